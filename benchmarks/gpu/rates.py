"""What the GPU at hand does at best: memory reads, copies over the link, large products. Ratios are against these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kvs_core.device.cuda.cupy_runtime import CupyRuntime

GEMM = (2048, 5120, 17408)   # rows, n_in, n_out


@dataclass(frozen=True)
class Rates:
    """Bytes and operations per second, medians."""

    hbm_read: float
    h2d: float
    gemm: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def milliseconds(work: Callable[[], object], stream: object, times: int = 9) -> float:
    """Median time of ``work`` on the GPU, after one run that does not count."""
    import cupy

    taken = []
    for _ in range(times + 1):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        taken.append(cupy.cuda.get_elapsed_time(begin, end))
    return float(np.median(taken[1:]))


_READ = r"""
extern "C" __global__ void __launch_bounds__(1024) read_all(
    const uint4* data, unsigned long long n, unsigned int* out) {
  unsigned int sum = 0;
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 3 * step < n; i += 4 * step) {
    uint4 a = __ldcs(data + i), b = __ldcs(data + i + step);
    uint4 c = __ldcs(data + i + 2 * step), d = __ldcs(data + i + 3 * step);
    sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
  }
  for (; i < n; i += step) { uint4 a = __ldcs(data + i); sum ^= a.x ^ a.y ^ a.z ^ a.w; }
  if (sum == 0x12345678u) *out = sum;
}
"""


def probe() -> Rates:
    """Measure them, on random bytes."""
    import cupy

    from kvs_core.device.cuda.cupy_runtime import CupyRuntime

    runtime = CupyRuntime()
    try:
        return Rates(_read_rate(runtime), runtime.measure_copies(64 << 20, 9), _gemm_rate(runtime))
    finally:
        cupy.get_default_memory_pool().free_all_blocks()
        runtime.close()


def _read_rate(runtime: CupyRuntime) -> float:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        data = cupy.random.randint(0, 1 << 31, 1 << 29, dtype=cupy.uint32)   # 2 GiB: no cache holds it
        out = cupy.zeros(1, cupy.uint32)
        read = cupy.RawKernel(_READ, "read_all")
        args = (2 * runtime.launcher.sm_count,), (1024,), (data, np.uint64(data.nbytes // 16), out)
        return float(data.nbytes) / milliseconds(lambda: read(*args), stream) * 1e3


def _gemm_rate(runtime: CupyRuntime) -> float:
    import cupy

    rows, n_in, n_out = GEMM

    def random(*shape: int) -> Any:
        return cupy.random.standard_normal(shape, dtype=cupy.float32).astype(cupy.float16)

    inputs = [(random(rows, n_in), random(n_out, n_in)) for _ in range(3)]
    product = cupy.empty((rows, n_out), cupy.float32)
    cupy.cuda.Device().synchronize()
    turn = iter(range(1 << 30))

    def multiply() -> None:
        runtime.gemm.gemm(
            *inputs[next(turn) % 3], product, n_rows=rows, n_out=n_out, n_in=n_in, out_stride=n_out, accumulate=False
        )

    compute: Any = runtime.compute
    return 2.0 * rows * n_in * n_out / milliseconds(multiply, compute.raw) * 1e3
