"""Launcher of ``shift_kv.cu``: rows that move to another page, their keys turned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from kvs_core.device.cuda.context import Context
from kvs_core.device.cuda.kernel import I32, PTR, Kernel
from kvs_core.device.cuda.ops.write_kv import made_up_pages
from kvs_core.device.operands import AttentionParams, Buffer
from kvs_core.paging.geometry import KvType, PageGeometry, PageOrder
from kvs_core.paging.shift import PageMove
from kvs_core.units import ceil_div

_ROWS = 4   # of a block, a warp each: WARPS in the source
_ARGS = (
    PTR, PTR, I32,   # sources, row of the first
    PTR, I32, I32,   # page, row, rows
    I32,             # tokens of a page
    PTR,             # cosines and sines
)


class ShiftKv:
    """The op ``shift_rows``."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def shift_rows(
        self, page: Buffer, sources: Sequence[Buffer], params: AttentionParams, geometry: PageGeometry, move: PageMove
    ) -> None:
        """See ``Ops.shift_rows``. The turn lies where a step has the angles of its first row."""
        rope = params.rope
        self._context.launcher.launch(
            _kernel(geometry, rope.n_rot, rope.interleaved), (ceil_div(move.rows, _ROWS), geometry.kv_heads, 2),
            32 * _ROWS,
            (
                sources[0], sources[1] if len(sources) > 1 else 0, move.source_row,
                page, move.row, move.rows,
                geometry.page_tokens,
                rope.cs_of(0),
            ),
        )


def kernels_for(params: AttentionParams, geometry: PageGeometry) -> list[Kernel]:
    """What a layer of this kind needs."""
    return [] if params.shares else [_kernel(geometry, params.rope.n_rot, params.rope.interleaved)]


def instances(arch: int) -> Iterator[Kernel]:
    """Every type of K and of V, page order, lane width and place of a pair's other value."""
    types = list(KvType)
    for k_type, v_type in zip(types, types[5:] + types[:5], strict=True):
        yield _kernel(made_up_pages(k_type, v_type, 128), 128, True)
    for head_dim, n_rot in ((48, 12), (80, 20), (96, 24), (256, 64), (512, 512)):
        yield _kernel(made_up_pages(KvType.F16, KvType.F16, head_dim), n_rot, False)
    for n_rot in (64, 256):
        yield _kernel(made_up_pages(KvType.Q8_0, KvType.Q4_0, 256, PageOrder.FRAGMENTS), n_rot, False)


@cache
def _kernel(geometry: PageGeometry, n_rot: int, interleaved: bool) -> Kernel:
    return Kernel(
        "shift_kv.cu", "shift_kv", _ARGS,
        (
            ("K_TYPE", f"KV_{geometry.k_type.name}"), ("V_TYPE", f"KV_{geometry.v_type.name}"),
            ("DK", geometry.k_dim), ("DV", geometry.v_dim), ("K_ROTATION", geometry.k_rotation),
            ("N_ROT", n_rot), ("INTERLEAVED", int(interleaved)),
            ("FRAGMENTS", int(geometry.order is PageOrder.FRAGMENTS)),
        ),
    )
