"""The stand-in is what kernel tests stand on: its instructions do what the GPU's do, and it finds broken kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvs_core.device.cuda.kernel import F32, I32, I64, PTR, U32, Arg, Kernel
from tests.cuda_on_cpu import memory
from tests.cuda_on_cpu.build import BuildError
from tests.cuda_on_cpu.launcher import CpuLauncher, LaunchError

Make = Callable[..., Kernel]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A kernel ``k`` from its body; ``before`` stands in front of it."""

    def kernel(parameters: str, body: str, args: tuple[Arg, ...], before: str = "", **defines: int) -> Kernel:
        source = tmp_path / f"k{len(list(tmp_path.iterdir()))}.cu"
        source.write_text(
            f'#include "common/ptx.cuh"\n{before}\nextern "C" __global__ void k({parameters}) {{\n{body}\n}}\n'
        )
        return Kernel(str(source), "k", args, tuple(defines.items()))

    return kernel


def on_device(values: Any) -> np.ndarray:
    """A guarded copy."""
    values = np.asarray(values)
    buffer = memory.poisoned(values.shape, values.dtype)
    buffer[...] = values
    return buffer


def run(
    kernel: Kernel, args: tuple[Any, ...], *, grid: int = 1, block: int = 32, arch: int = 90, **launch: Any
) -> None:
    CpuLauncher(arch=arch).launch(kernel, (grid,), block, args, **launch)


# ---- instructions ----

def fragments(matrix: np.ndarray, deep: int) -> np.ndarray:
    """uint32 [32 lanes, registers] of A [16, k] or, transposed, of B [8, k]; see ptx.cuh."""
    raw = np.ascontiguousarray(matrix).view(np.uint8).reshape(len(matrix), -1, 4).view(np.uint32)[..., 0]
    lane = np.arange(32)
    rows = (0, 8) if len(matrix) == 16 else (0,)
    columns = [raw[lane // 4 + row, lane % 4 + 4 * d] for d in range(deep) for row in rows]
    return np.stack(columns, 1)


@pytest.mark.parametrize("arch", [75, 90])
@pytest.mark.parametrize("name", ["mma_s8", "mma_u8", "mma_s8_k16", "mma_f16"])
def test_tensor_core_products_are_matrix_products(make: Make, name: str, arch: int) -> None:
    """Whether one instruction or smaller ones of an older GPU do it; integers exactly, floats but for rounding."""
    rng = np.random.default_rng(1)
    deep = 1 if name == "mma_s8_k16" else 2
    if name == "mma_f16":
        a, b = (rng.standard_normal((rows, 16)).astype(np.float16) for rows in (16, 8))
        number = np.float32
    else:
        a = rng.integers(0, 256, (16, 16 * deep)).astype(np.uint8 if name == "mma_u8" else np.int8)
        b = rng.integers(-128, 128, (8, 16 * deep)).astype(np.int8)
        number = np.int32
    c = rng.integers(-1000, 1000, (16, 8)).astype(number)
    lane = np.arange(32)
    place = (lane[:, None] // 4 + np.array([0, 0, 8, 8]), 2 * (lane[:, None] % 4) + np.array([0, 1, 0, 1]))
    sums = on_device(c[place])
    registers = [f"a[l * {2 * deep} + {i}]" for i in range(2 * deep)] + [f"b[l * {deep} + {i}]" for i in range(deep)]
    kind = "int" if number is np.int32 else "float"
    kernel = make(
        f"const u32* a, const u32* b, {kind}* sums",
        f"const int l = threadIdx.x; {kind} c[4]; for (int i = 0; i < 4; i++) c[i] = sums[4 * l + i];"
        f"{name}(c, {', '.join(registers)}); for (int i = 0; i < 4; i++) sums[4 * l + i] = c[i];",
        (PTR, PTR, PTR),
    )
    run(kernel, (on_device(fragments(a, deep)), on_device(fragments(b, deep)), sums), arch=arch)
    exact = c.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(sums, exact[place], rtol=0 if kind == "int" else 1e-5, atol=0 if kind == "int" else 1e-4)


def test_halves_are_numpys(make: Make) -> None:
    """All halves to float; floats to halves with ties, subnormals, overflow; the three operations rounded once."""
    rng = np.random.default_rng(2)
    halves = np.arange(65536, dtype=np.uint16)
    out = on_device(np.zeros(65536, np.float32))
    run(make("const u16* h, float* f", "f[blockIdx.x * 256 + threadIdx.x] = h2f(h[blockIdx.x * 256 + threadIdx.x]);",
             (PTR, PTR)), (on_device(halves), out), grid=256, block=256)
    np.testing.assert_array_equal(out, halves.view(np.float16).astype(np.float32))

    finite = halves.view(np.float16)[np.isfinite(halves.view(np.float16))].astype(np.float64)
    middles = (np.sort(finite)[1:] + np.sort(finite)[:-1]) / 2
    values = np.concatenate((middles, middles * (1 + 1e-6), rng.standard_normal(1000) * 1e-6, [65519, 65520, -1e9]))
    floats = values.astype(np.float32)
    blocks = -(-len(floats) // 256)
    padded = np.resize(floats, blocks * 256)
    got = on_device(np.zeros(len(padded), np.uint16))
    run(make("const float* f, u16* h", "const int i = blockIdx.x * 256 + threadIdx.x; h[i] = f2h(f[i]);",
             (PTR, PTR)), (on_device(padded), got), grid=blocks, block=256)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, padded.astype(np.float16).view(np.uint16))

    a, b, c = (rng.standard_normal((32, 2)).astype(np.float16) for _ in range(3))
    results = on_device(np.zeros((3, 32, 2), np.float16))
    run(make("const u32* a, const u32* b, const u32* c, u32* r",
             "const int l = threadIdx.x; r[l] = hadd2(a[l], b[l]); r[32 + l] = hmul2(a[l], b[l]);"
             "r[64 + l] = hfma2(a[l], b[l], c[l]);", (PTR, PTR, PTR, PTR)),
        (*map(on_device, (a, b, c)), results))
    fused = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)   # exact before it is rounded
    np.testing.assert_array_equal(results, np.stack((a + b, a * b, fused.astype(np.float16))))


def test_brain_floats_round_to_even(make: Make) -> None:
    """f2bf2 keeps the upper halves of floats, to nearest."""
    values = on_device(np.array([1.0, 1.00390625, 1.01171875, -1.0039065, 3.4e38, np.inf], np.float32))
    out = on_device(np.zeros(6, np.uint16))
    run(make("const float* f, u16* b", "for (int i = 0; i < 6; i += 2) *(u32*)(b + i) = f2bf2(f[i], f[i + 1]);",
             (PTR, PTR)), (values, out), block=1)
    assert [hex(b) for b in out] == ["0x3f80", "0x3f80", "0x3f82", "0xbf81", "0x7f80", "0x7f80"]


def test_byte_select_replicates_signs(make: Make) -> None:
    """A selector of 8 or more gives the byte's sign eight times."""
    out = on_device(np.zeros(3, np.uint32))
    run(make("u32* o", "o[0] = prmt(0x33221180u, 0x77665544u, 0x7140); o[1] = prmt(0x00007f80u, 0u, 0x9898);"
                       "o[2] = (u32)__dp4a((int)0x80ff0102, 0x01020304, 7);", (PTR,)), (out,), block=1)
    assert [hex(v) for v in out[:2]] == ["0x77114480", "0xff00ff"]
    assert int(out[2].view(np.int32)) == -128 * 1 - 1 * 2 + 1 * 3 + 2 * 4 + 7


def test_shuffles_stay_in_their_segments(make: Make) -> None:
    """By index, xor, up and down, also in segments of 8; a lane without a partner keeps its value."""
    out = on_device(np.zeros((6, 32), np.int32))
    run(make("int* o",
             "const int l = threadIdx.x; int* p = o + l;"
             "p[0] = __shfl_sync(~0u, l, 3); p[32] = __shfl_xor_sync(~0u, l, 5);"
             "p[64] = __shfl_up_sync(~0u, l, 2, 8); p[96] = __shfl_down_sync(~0u, l, 2, 8);"
             "p[128] = __shfl_sync(~0u, l, 3, 8); p[160] = (int)__shfl_xor_sync(~0u, (double)l, 16);", (PTR,)), (out,))
    l = np.arange(32)
    up = np.where(l % 8 < 2, l, l - 2)
    down = np.where(l % 8 > 5, l, l + 2)
    np.testing.assert_array_equal(out, [0 * l + 3, l ^ 5, up, down, l // 8 * 8 + 3, l ^ 16])


def test_parts_of_a_warp_meet_apart(make: Make) -> None:
    """Votes and reductions of lanes 0-15 and 16-31 by themselves, with different numbers of turns; then all."""
    out = on_device(np.zeros((3, 32), np.uint32))
    run(make("u32* o",
             "const int l = threadIdx.x; const u32 half = l < 16 ? 0xffffu : 0xffff0000u; u32 v = 0;"
             "for (int i = 0; i < (l < 16 ? 3 : 1); i++) v = __ballot_sync(half, l % 3 == i);"
             "o[l] = v; o[32 + l] = __reduce_add_sync(half, l); o[64 + l] = __any_sync(~0u, l == 31) + "
             "2 * __all_sync(~0u, l < 31);", (PTR,)), (out,))
    l = np.arange(16)
    assert {int(v) for v in out[0, :16]} == {int(sum(1 << i for i in l if i % 3 == 2))}
    assert {int(v) for v in out[0, 16:]} == {int(sum(1 << i for i in range(16, 32) if i % 3 == 0))}
    assert set(out[1, :16].tolist()) == {120}
    assert set(out[1, 16:].tolist()) == {sum(range(16, 32))}
    assert set(out[2].tolist()) == {1}


@pytest.mark.parametrize("portable", [False, True])
def test_barriers_hold_all_threads(make: Make, portable: bool) -> None:
    """1000 threads turn an array over through shared memory, in each of 6 blocks, in any order of blocks."""
    kernel = make(
        "const int* in, int* out, u32* order, u32* turn",
        "__shared__ int s[1000]; const int t = threadIdx.x, at = (blockIdx.y * gridDim.x + blockIdx.x) * 1000;"
        "if (t == 0) order[at / 1000] = atomicAdd(turn, 1u);"
        "s[t] = in[at + t]; __syncthreads(); out[at + t] = s[999 - t];", (PTR, PTR, PTR, PTR),
    )
    values = np.arange(6000, dtype=np.int32)
    orders = set()
    for seed in range(3):
        out, order, turn = on_device(0 * values), on_device(np.zeros(6, np.uint32)), on_device(np.zeros(1, np.uint32))
        CpuLauncher(seed=seed, portable=portable).launch(kernel, (3, 2), 1000, (on_device(values), out, order, turn))
        np.testing.assert_array_equal(out.reshape(6, 1000), values.reshape(6, 1000)[:, ::-1])
        assert sorted(order) == list(range(6))
        orders.add(tuple(order.tolist()))
    assert len(orders) == 3


def test_barriers_of_parts_do_not_meet(make: Make) -> None:
    """Two halves of a block, with barriers of their own and different numbers of turns; then the whole block."""
    kernel = make(
        "int* out",
        "__shared__ int s[128]; const int t = threadIdx.x, half = t / 64; int v = t;"
        "for (int i = 0; i < 1 + 2 * half; i++) { s[t] = v; barrier_of(1 + half, 64); v = s[t ^ 32] + 1;"
        "barrier_of(1 + half, 64); } s[t] = v; __syncthreads(); out[t] = s[127 - t];", (PTR,),
    )
    out = on_device(np.zeros(128, np.int32))
    run(kernel, (out,), block=128)
    t = np.arange(128)[::-1]
    np.testing.assert_array_equal(out, (t ^ 32) + 1 + 2 * (t // 64))


def test_shared_memory_belongs_to_one_kernel(make: Make) -> None:
    """Static arrays in templates and functions of different instances are different ones, and poison at the start."""
    before = (
        "template <class T> DEVICE T* mine() { __shared__ T here[WORDS]; return here; }\n"
        "DEVICE float* other() { __shared__ float there[WORDS]; return there; }"
    )
    body = ("extern __shared__ __align__(16) u8 raw[]; float* a = mine<float>(); int* b = mine<int>();"
            "out[0] = b[0]; out[1] = (int)(smem_u32(raw) % 16); out[2] = isnan(a[WORDS - 1]) + 2 * isnan(other()[0]);"
            "b[0] = WORDS; a[WORDS - 1] = other()[0] = 0.f; lds32(smem_u32(raw + 60));")
    for n in (4, 8, 4):
        out = on_device(np.zeros(3, np.int32))
        run(make("int* out", body, (PTR,), before, WORDS=n), (out,), block=1, shared_bytes=64)
        assert out.tolist() == [-1, 0, 3]


BULK = """
  __shared__ __align__(128) float ring[2][64];
  __shared__ u64 bars[2];
  const u32 bar = smem_u32(bars);
  if (threadIdx.x == 0) { mbar_init(bar, 1), mbar_init(bar + 8, 1); mbar_fence_init(); }
  __syncthreads();
  auto issue = [&](int i) {
    if (elect_one()) {
      mbar_expect(bar + 8 * (i % 2), 256);
      bulk_g2s(smem_u32(ring[i % 2]), in + 64 * i, 128, bar + 8 * (i % 2));
      bulk_g2s_hint(smem_u32(ring[i % 2] + 32), in + 64 * i + 32, 128, bar + 8 * (i % 2), policy_evict_first());
    }
  };
  if (threadIdx.x < 32) issue(0), issue(1);
  float sum = 0.f;
  for (int i = 0; i < n; i++) {
    WAIT mbar_wait(bar + 8 * (i % 2), i / 2 % 2);
    sum += ring[i % 2][threadIdx.x];
    __syncthreads();
    if (threadIdx.x < 32 && i + 2 < n) issue(i + 2);
  }
  out[threadIdx.x] = sum;
"""


def test_a_ring_of_bulk_copies(make: Make) -> None:
    """Two slots, seven turns, two copies each."""
    values = np.arange(7 * 64, dtype=np.float32)
    out = on_device(np.zeros(64, np.float32))
    run(make("const float* in, float* out, int n", BULK.replace("WAIT", ""), (PTR, PTR, I32)),
        (on_device(values), out, 7), block=64)
    np.testing.assert_array_equal(out, values.reshape(7, 64).sum(0))


WARP_RING = """
  __shared__ __align__(128) float ring[4][164];
  __shared__ u64 bars[4];
  const u32 bar = smem_u32(bars);
  if (threadIdx.x == 0) { for (int s = 0; s < stages; s++) ring_init(bar + 8 * s); ring_fence_init(); }
  __syncwarp();
  auto issue = [&](int i) {
    if (i < n)
      ring_copy<656>(smem_u32(ring[i % stages]), in + 164 * i, bar + 8 * (i % stages), policy_evict_first());
    ring_close();
  };
  for (int i = 0; i < stages; i++) issue(i);
  for (int i = 0; i < n; i++) {
    WAIT ring_wait(bar + 8 * (i % stages), i / stages % 2, stages);
    for (int k = threadIdx.x; k < 164; k += 32) out[164 * i + k] = ring[i % stages][(k + 41) % 164];
    __syncwarp();
    issue(i + stages);
  }
"""


@pytest.mark.parametrize("arch", [75, 80, 90])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_ring_of_one_warp(make: Make, arch: int, stages: int) -> None:
    """Seven turns, 41 pieces of 16 bytes each; every lane sees what the others brought. With cp.async, what is read
    without a wait is poison."""
    values = np.arange(7 * 164, dtype=np.float32).reshape(7, 164)
    out = on_device(np.zeros_like(values))
    kernel = make("const float* in, float* out, int n, int stages", WARP_RING.replace("WAIT", ""), (PTR, PTR, I32, I32))
    run(kernel, (on_device(values), out, 7, stages), arch=arch)
    np.testing.assert_array_equal(out, np.roll(values, -41, axis=1))
    if arch == 80:
        late = make("const float* in, float* out, int n, int stages", WARP_RING.replace("WAIT", "if (0)"),
                    (PTR, PTR, I32, I32))
        run(late, (on_device(values), out, 7, stages), arch=arch)
        assert np.isnan(out).all()


def test_copies_of_a_thread_arrive_in_groups(make: Make) -> None:
    """What was not waited for is poison; the oldest groups arrive first."""
    values = np.arange(12, dtype=np.float32)
    body = ("__shared__ float4 s[3]; for (int i = 0; i < 3; i++) { cp_async16(smem_u32(s + i), in + 4 * i);"
            "cp_async_commit(); } cp_async_wait<1>(); for (int i = 0; i < 3; i++) out[i] = s[i].x;"
            "cp_async_wait<0>(); out[3] = s[2].w;")
    kernel = make("const float* in, float* out", body, (PTR, PTR))
    out = on_device(np.zeros(4, np.float32))
    run(kernel, (on_device(values), out), block=1)
    np.testing.assert_array_equal(out, [0, 4, np.nan, 11])
    run(kernel, (on_device(values), out), block=1, arch=75)
    np.testing.assert_array_equal(out, [0, 4, 8, 11])


# ---- broken kernels ----

def broken(make: Make, body: str, said: str, *, block: int = 64, **launch: Any) -> None:
    """Launch, and expect an error with these words."""
    out = memory.poisoned(16, np.float32)
    with pytest.raises(LaunchError, match=said):
        run(make("float* out", body, (PTR,)), (out,), block=block, **launch)


def test_waiting_for_nothing_is_an_error(make: Make) -> None:
    """A barrier that some threads never reach, a lane that is missing, a copy that nobody issues: named, no hang."""
    broken(make, "if (threadIdx.x < 5) __syncthreads(); else __shfl_sync(~0u, 1, 0);",
           r"block \(0, 0, 0\): no thread can go on: 27 wait for lanes of their warp, 5 at a barrier")
    broken(make, "__shared__ u64 bar; if (threadIdx.x == 0) mbar_init(smem_u32(&bar), 1); __syncthreads();"
                 "mbar_wait(smem_u32(&bar), 0);", "64 for bulk copies that nobody issued")
    broken(make, "if (threadIdx.x == 3) __shfl_sync(4u, 1, 0);", r"thread 3: lane 3 calls a function of the lanes 0x4")


def test_copies_are_read_after_a_wait_or_are_poison(make: Make) -> None:
    """A read without the wait gets NaN, whatever luck has it on a GPU; a kernel does not end before they are in."""
    values = np.arange(2 * 64, dtype=np.float32)
    out = on_device(np.zeros(64, np.float32))
    body = BULK.replace("WAIT", "out[threadIdx.x] = ring[0][threadIdx.x]; if (0)")
    late = make("const float* in, float* out, int n", body, (PTR, PTR, I32))
    with pytest.raises(LaunchError, match="4 bulk copies that nobody waited for"):
        run(late, (on_device(values), out, 2), block=64)
    assert np.isnan(out).all()


def test_addresses_beyond_a_buffer_are_errors(make: Make) -> None:
    """Reads and writes, far and near, of global and of shared memory."""
    broken(make, "out[16 + threadIdx.x * 64] = 1.f;", r"thread \d+: .*bytes behind the end of an array float32 \[16\]")
    broken(make, "if (threadIdx.x == 9) out[1] = out[-1500];", "thread 9: .*before an array")
    broken(make, "*(float*)nullptr = 1.f;", "touched address 0x0, where there is nothing")
    broken(make, "extern __shared__ float s[]; s[threadIdx.x] = 1.f;", "wrote byte 12[89] of dynamic shared memory",
           shared_bytes=128)
    broken(make, "extern __shared__ float s[]; *out = lds32(smem_u32(s) + 1000000);", "as a shared address")
    broken(make, "*out = smem_u32(out);", "not in shared memory")
    broken(make, "float big[100000]; for (int i = 0; i < 100000; i++) big[i] = *out; *out = big[(int)*out & 7];",
           "local variables|where there is nothing")   # as what lies behind a stack has it
    for place, where in ((15, "behind the end of"), (-1, "before")):
        out = memory.poisoned(15, np.float32)
        run(make("float* out", f"out[{place}] = 1.f;", (PTR,)), (out,), block=1)
        with pytest.raises(AssertionError, match=rf"{where} an array float32 \[15\]"):
            memory.check_slack()
        del out
        memory.check_slack()


def test_a_missing_barrier_shows(make: Make) -> None:
    """Warps run in another order in every second block, so what one reads before the other has written is poison."""
    kernel = make("int* out", "__shared__ int s[64]; s[threadIdx.x] = 1; out[blockIdx.x * 64 + threadIdx.x] = "
                              "s[threadIdx.x ^ 32];", (PTR,))
    out = on_device(np.zeros((2, 64), np.int32))
    run(kernel, (out,), grid=2, block=64)
    assert (out[0] == -1).any()
    assert (out[1] == -1).any()


def test_endless_loops_end(make: Make) -> None:
    """By processor time."""
    kernel = make("volatile int* out", "while (*out) {}", (PTR,))
    with pytest.raises(LaunchError, match="does not end"):
        CpuLauncher(seconds=1).launch(kernel, (1,), 32, (on_device(np.ones(1, np.int32)),))


def test_early_launches_must_wait(make: Make) -> None:
    """A kernel launched with overlap calls pdl_wait in every block; before sm_90 there is no overlap."""
    body = "if (blockIdx.x < 2) { pdl_trigger(); pdl_wait(); }"
    broken(make, body, r"block \(2, 0, 0\).*no thread called pdl_wait", grid=3, overlap=True)
    kernel = make("float* out", body, (PTR,))
    run(kernel, (0,), grid=2, overlap=True)
    run(kernel, (0,), grid=3, overlap=True, arch=86)


def test_arguments_are_those_of_the_kernel(make: Make) -> None:
    """Types of the declaration and of the Kernel agree; values fit; sums show that every argument arrives whole."""
    parameters = "double* out, int a, long long b, u32 c, float d, const void* e"
    body = "*out = (double)a + (double)b + (double)c + (double)d + (double)(u64)e;"
    out = on_device(np.zeros(1))
    kernel = make(parameters, body, (PTR, I32, I64, U32, F32, PTR))
    run(kernel, (out, -5, 1 << 40, 0xFFFFFFFF, 0.25, 3), block=1)
    assert out[0] == -5 + 2.0**40 + 0xFFFFFFFF + 0.25 + 3
    with pytest.raises(LaunchError, match=r"takes .P, i, l, u, f, P., its Kernel says .PTR, I32, I32"):
        run(make(parameters, body, (PTR, I32, I32, U32, F32, PTR)), (out, 1, 1, 1, 1.0, 0))
    for wrong in ((out, 1.5, 1, 1, 1.0, 0), (out, 1 << 31, 1, 1, 1.0, 0), (out, 1, 1, -1, 1.0, 0), (out, 1, 1, 1, 1.0)):
        with pytest.raises(TypeError, match=r"k takes .PTR, I32, I64, U32, F32, PTR., was given"):
            run(kernel, wrong)


def test_what_a_gpu_refuses_is_refused(make: Make) -> None:
    """Grids, blocks and shared memory out of range; sources that do not compile; kernels that are not there."""
    kernel = make("float* out", "", (PTR,))
    for launch in ({"grid": 0}, {"block": 1025}, {"shared_bytes": 227 * 1024 + 1}):
        with pytest.raises(LaunchError, match=r"k: "):
            run(kernel, (0,), **launch)
    with pytest.raises(BuildError, match="nonsense"):
        run(make("float* out", "nonsense;", (PTR,)), (0,))
    with pytest.raises(LaunchError, match="has no kernel other"):
        run(Kernel(kernel.source, "other", ()), ())


def test_products_are_numpys() -> None:
    """With and without what is in the output before; nothing between its rows is touched."""
    rng = np.random.default_rng(3)
    rows, weight = rng.standard_normal((3, 8)).astype(np.float16), rng.standard_normal((5, 8)).astype(np.float16)
    out = on_device(np.full((3, 7), 2.0, np.float32))
    product = rows.astype(np.float32) @ weight.astype(np.float32).T
    for accumulate, before in ((True, 2.0), (False, 0.0)):
        CpuLauncher().gemm(on_device(rows), on_device(weight), out, n_rows=3, n_out=5, n_in=8, out_stride=7,
                           accumulate=accumulate)
        np.testing.assert_allclose(out[:, :5], product + before, rtol=1e-5)
        assert (out[:, 5:] == 2.0).all()
