"""Launchers of ``write_kv.cu`` and ``zero_page.cu``: projected rows become queries, and keys and values in pages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

from kvs_core.device.cuda.context import Context
from kvs_core.device.cuda.kernel import F32, I32, I64, PTR, Kernel, address
from kvs_core.device.cuda.plan import DevicePlan
from kvs_core.device.operands import AttentionParams, Buffer
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import KvType, PageGeometry, PageOrder, hadamard_block
from kvs_core.units import ceil_div

LOG2_E = math.log2(math.e)
"""Factor on queries: the attention kernels use exp2."""

_HEADS = 4   # of a block, a warp each: WARPS in the source
_ARGS = (
    PTR, I32,         # y and its stride
    I32, I32, I32,    # heads, kv heads, columns of a query
    PTR, PTR, F32,    # norms, eps
    PTR, F32,         # cosines and sines, factor on queries
    PTR, PTR,         # step table, slots
    PTR, I64, I32,    # pool, bytes from slot to slot, tokens of a page
    PTR,              # q
)

_ZERO_PAGE = Kernel("zero_page.cu", "zero_page", (PTR, I64))
_ZERO_THREADS = 256
_ZERO_BYTES = 4 * 16 * _ZERO_THREADS   # of a block: four vectors a thread


class WriteKv:
    """The ops ``write_kv`` and ``zero_page``."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def write_kv(
        self, y: Buffer, params: AttentionParams, q: Buffer, pool: Buffer, geometry: PageGeometry, plan: DevicePlan, *,
        phase: Phase,
    ) -> None:
        """See ``Ops.write_kv``.

        q becomes float16, times log2(e), in the order that the attention kernels take (R = H / G query heads per head
        of K and V):

            DECODE   [G, T * R rounded up to 8, Dk], query head r of row t at t * R + r, zeros beyond; for FRAGMENTS
                     pages every 32 dims in the order of the key bytes (``cuda_src/common/fragments.cuh``)
            PREFILL  [T, H, Dk]
        """
        rows, heads, kv_heads, rope = len(y), params.heads, params.kv_heads, params.rope
        self._context.launcher.launch(
            _kernel(geometry, rope.n_rot, rope.interleaved, phase, params.v_norm, not params.shares),
            (ceil_div(heads + (1 if params.shares else 2) * kv_heads, _HEADS), rows, 1), 32 * _HEADS,
            (
                y, y.strides[0] // 4,
                heads, kv_heads, params.q_columns // heads,
                _or_null(params.q_norm), _or_null(params.k_norm), params.eps,
                rope.cs_of(self._context.first_row), params.scale * LOG2_E,
                self._context.step, plan.slots,
                pool, pool.strides[0], geometry.page_tokens,
                q,
            ),
            overlap=phase is Phase.DECODE,
        )

    def clear(self, buffer: Buffer) -> None:
        """See ``Ops.clear``."""
        assert buffer.nbytes % 16 == 0
        self._context.launcher.launch(
            _ZERO_PAGE, (ceil_div(buffer.nbytes, _ZERO_BYTES), 1, 1), _ZERO_THREADS, (buffer, buffer.nbytes // 16)
        )

    def zero_page(self, pool: Buffer, geometry: PageGeometry, slot: int) -> None:
        """See ``Ops.zero_page``."""
        self._context.launcher.launch(
            _ZERO_PAGE, (ceil_div(geometry.page_bytes, _ZERO_BYTES), 1, 1), _ZERO_THREADS,
            (address(pool) + slot * pool.strides[0], geometry.page_bytes // 16),
        )


def kernels_for(params: AttentionParams, geometry: PageGeometry) -> list[Kernel]:
    """What a layer of this kind needs."""
    n_rot, interleaved = params.rope.n_rot, params.rope.interleaved
    kernels = (_kernel(geometry, n_rot, interleaved, phase, params.v_norm, not params.shares) for phase in Phase)
    return [_ZERO_PAGE, *kernels]


def instances(arch: int) -> Iterator[Kernel]:
    """Every type of K and of V, page order, form of queries, lane width and place of a pair's other value."""
    types = list(KvType)
    yield _ZERO_PAGE
    for k_type, v_type in zip(types, types[5:] + types[:5], strict=True):
        yield _kernel(made_up_pages(k_type, v_type, 128), 128, True, Phase.DECODE)
    for head_dim, n_rot in ((48, 12), (80, 20), (96, 24), (128, 128), (256, 64), (512, 512)):
        yield _kernel(made_up_pages(KvType.F16, KvType.F16, head_dim), n_rot, False, Phase.PREFILL)
    yield _kernel(made_up_pages(KvType.IQ4_NL, KvType.Q5_1, 512), 128, False, Phase.DECODE)
    fragments, wide = (
        made_up_pages(KvType.Q8_0, KvType.Q4_0, dim, order)
        for dim, order in ((256, PageOrder.FRAGMENTS), (512, PageOrder.ROWS))
    )
    for phase in Phase:
        yield _kernel(fragments, 64, False, phase)
        for stores in (True, False):
            yield _kernel(fragments, 256, False, phase, stores, stores)
            yield _kernel(wide, 512, False, phase, stores, stores)


def _or_null(buffer: Buffer | None) -> Buffer:
    return 0 if buffer is None else buffer


def made_up_pages(k_type: KvType, v_type: KvType, head_dim: int, order: PageOrder = PageOrder.ROWS) -> PageGeometry:
    """Pages of one head, rotated as its types ask for."""
    k_rotation, v_rotation = (
        hadamard_block(kv_type, head_dim, is_key=is_key) for kv_type, is_key in ((k_type, True), (v_type, False))
    )
    return PageGeometry(256, 1, head_dim, head_dim, k_type, v_type, k_rotation, v_rotation, order)


@cache
def _kernel(
    geometry: PageGeometry, n_rot: int, interleaved: bool, phase: Phase, v_norm: bool = False, stores: bool = True
) -> Kernel:
    return Kernel(
        "write_kv.cu", "write_kv", _ARGS,
        (
            ("K_TYPE", f"KV_{geometry.k_type.name}"), ("V_TYPE", f"KV_{geometry.v_type.name}"),
            ("DK", geometry.k_dim), ("DV", geometry.v_dim),
            ("K_ROTATION", geometry.k_rotation), ("V_ROTATION", geometry.v_rotation),
            ("N_ROT", n_rot), ("INTERLEAVED", int(interleaved)),
            ("V_NORM", int(v_norm)), ("STORES", int(stores)),
            ("FRAGMENTS", int(geometry.order is PageOrder.FRAGMENTS)), ("DECODE", int(phase is Phase.DECODE)),
        ),
    )
