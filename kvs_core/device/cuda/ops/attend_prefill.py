"""Launchers of ``attend_prefill.cu``: attention of many rows over pages, with tensor cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import log

import numpy as np

from kvs_core.device.cuda.context import Context
from kvs_core.device.cuda.kernel import I32, I64, PTR, Kernel
from kvs_core.device.cuda.ops.attend_decode import LEAST_SHARED_FOR_512
from kvs_core.device.cuda.plan import DevicePlan
from kvs_core.device.operands import AttentionParams, Buffer
from kvs_core.errors import CapabilityError
from kvs_core.paging.geometry import KvType, PageGeometry, PageOrder, hadamard_block
from kvs_core.units import ceil_div

_ATTEND_ARGS = (
    PTR, PTR, I64, PTR, PTR,   # q; pool, bytes from slot to slot, slots; running
    I32, I32, I32, I32,        # rows, heads, kv heads, position
    I32, I32, I32,             # first page, end of pages, fresh
)
_FINISH_ARGS = (PTR, PTR, PTR, I32, I32, I32, I32)   # running, y, out; rows, heads, columns of y, gated
_FINISH_WARPS = 8
_WEIGHT_LOG2 = 8.0   # PARTIAL_WEIGHT_LOG2 of common/partials.cuh: a weight is 2^(score - m + 8)

_WIDEST_FOR_TWO = 128
"""Dims of V up to which registers hold the sums of two query tiles of a warp."""

_WIDEST_FOR_ONE = 256
"""Dims beyond which they hold half of those of a single query tile."""
_MOST_WIDE_PAIRS = 64
"""Of a block of such heads: more would leave its warps too few registers."""

_SHAPES = ((128, 64), (128, 32), (64, 32), (32, 32), (32, 16), (16, 16))
"""(row, query head) pairs of a block and keys of a tile, the fastest first; each needs less shared memory."""

_FRAGMENT_KEY_PIECE = 4352           # bytes of 16 tokens
_FRAGMENT_VALUE_QUARTER = 9216       # bytes of 64 tokens


@dataclass(frozen=True, slots=True)
class _Tiling:
    """How a block divides its work, and the bytes of shared memory that it takes."""

    pairs: int
    keys: int
    query_tiles: int
    sharers: int
    shared_bytes: int

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.pairs // (16 * self.query_tiles) * self.sharers


class AttendPrefill:
    """The ops ``attend_prefill`` and ``finish_prefill``."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def attend_prefill(
        self, q: Buffer, params: AttentionParams, pool: Buffer, geometry: PageGeometry, plan: DevicePlan, pages: range,
        running: Buffer, *, fresh: bool,
    ) -> None:
        """See ``Ops.attend_prefill``.

        q        float16 [T, H, Dk], times log2(e)
        running  [T, H, Dv + 2] numbers, in this order: acc [T, H, Dv], then (l, m) [T, H, 2]; m in units of log2
        """
        context = self._context
        tiling = _tiling(geometry, context.launcher.shared_bytes)
        pairs = context.rows * (params.heads // params.kv_heads)
        context.launcher.launch(
            _attend(geometry, tiling, params.window), (ceil_div(pairs, tiling.pairs), params.kv_heads, 1),
            32 * tiling.warps,
            (
                q, pool, pool.strides[0], plan.slots, running,
                context.rows, params.heads, params.kv_heads, context.position,
                pages.start, pages.stop, int(fresh),
            ),
            shared_bytes=tiling.shared_bytes,
        )

    def prefill_sums(self, running: Buffer) -> Buffer:
        """See ``Ops.prefill_sums``: (l, m) behind all sums of values."""
        rows, heads, width = running.shape
        return running.reshape(-1)[rows * heads * (width - 2) :].reshape(rows, heads, 2)

    def log_sums(self, sums: np.ndarray) -> np.ndarray:
        """See ``Ops.log_sums``."""
        wide = sums.astype(np.float64)
        with np.errstate(all="ignore"):
            found: np.ndarray = log(2) * (wide[..., 1] - _WEIGHT_LOG2) + np.log(wide[..., 0])
        return found

    def finish_prefill(
        self, y: Buffer, params: AttentionParams, geometry: PageGeometry, running: Buffer, out: Buffer
    ) -> None:
        """See ``Ops.finish_prefill``.   out [T, H * Dv] float32"""
        rows = self._context.rows
        self._context.launcher.launch(
            _finish(geometry.v_dim, geometry.v_rotation), (ceil_div(rows * params.heads, _FINISH_WARPS), 1, 1),
            32 * _FINISH_WARPS,
            (running, y, out, rows, params.heads, y.strides[0] // 4, int(params.gated)),
        )


def kernels_for(geometry: PageGeometry, shared_bytes: int, *, window: int = 0) -> list[Kernel]:
    """What a layer with such pages and window needs on a GPU whose blocks have so much shared memory."""
    return [_attend(geometry, _tiling(geometry, shared_bytes), window), _finish(geometry.v_dim, geometry.v_rotation)]


def instances(arch: int) -> Iterator[Kernel]:
    """Every type of K and of V, page order, head dim and tiling; each page order with a window too."""
    shared_bytes = {75: 64, 80: 163, 86: 99, 89: 99, 120: 99}.get(arch, 227) << 10
    types = list(KvType)
    for k_type, v_type in zip(types, types[4:] + types[:4], strict=True):
        yield from kernels_for(_pages(k_type, v_type, 128, 128), shared_bytes)
    for k_dim, v_dim in ((64, 64), (80, 80), (96, 96), (192, 128), (256, 256)):
        yield from kernels_for(_pages(KvType.F16, KvType.F16, k_dim, v_dim), shared_bytes)
    yield from kernels_for(_pages(KvType.Q8_0, KvType.Q8_0, 256, 256, page_tokens=32), shared_bytes)
    fragments = _pages(KvType.Q8_0, KvType.Q4_0, 256, 256, PageOrder.FRAGMENTS)
    yield from kernels_for(fragments, shared_bytes)
    yield from kernels_for(fragments, shared_bytes, window=1024)
    yield from kernels_for(_pages(KvType.Q8_0, KvType.Q8_0, 256, 256), shared_bytes, window=512)
    if shared_bytes >= LEAST_SHARED_FOR_512:
        for k_type, v_type in ((KvType.Q8_0, KvType.Q4_0), (KvType.F16, KvType.F16)):
            yield from kernels_for(_pages(k_type, v_type, 512, 512), shared_bytes)


def _pages(
    k_type: KvType, v_type: KvType, k_dim: int, v_dim: int, order: PageOrder = PageOrder.ROWS, page_tokens: int = 256
) -> PageGeometry:
    rotations = hadamard_block(k_type, k_dim, is_key=True), hadamard_block(v_type, v_dim, is_key=False)
    return PageGeometry(page_tokens, 1, k_dim, v_dim, k_type, v_type, *rotations, order)


@cache
def _tiling(geometry: PageGeometry, shared_bytes: int) -> _Tiling:
    """The fastest that fits. Its keys divide a page, so that tiles are the same however the pages are split."""
    for pairs, keys in _SHAPES:
        if geometry.v_dim > _WIDEST_FOR_ONE and pairs > _MOST_WIDE_PAIRS:
            continue
        tiling = _divided(geometry, pairs, keys)
        if tiling.shared_bytes <= shared_bytes and geometry.page_tokens % keys == 0:
            return tiling
    raise CapabilityError(
        f"prefill attention over pages {geometry.layout_id} needs more than this GPU's {shared_bytes >> 10} KiB of "
        "shared memory; use other --cache-type-k and --cache-type-v"
    )


def _divided(geometry: PageGeometry, pairs: int, keys: int) -> _Tiling:
    """Two query tiles a warp if there are as many, shared by two warps if they are wide; of the widest heads one."""
    query_tiles, sharers = min(2, pairs // 16), 1
    if geometry.v_dim > _WIDEST_FOR_ONE:
        query_tiles, sharers = 1, 2
    elif geometry.v_dim > _WIDEST_FOR_TWO:
        query_tiles = sharers = 2 if pairs >= 32 and keys >= 32 and geometry.v_dim % 32 == 0 else 1
    # Queries, keys, values, raw keys, raw values, weights and maxima: as the source places them.
    k_row = ceil_div(geometry.k_dim, 32) * 64
    size = pairs * k_row + keys * (k_row + 2 * geometry.v_dim)
    if geometry.order is PageOrder.FRAGMENTS:
        size += keys // 16 * _FRAGMENT_KEY_PIECE + _FRAGMENT_VALUE_QUARTER
    else:
        size += keys * (_raw_stride(geometry.k_row_bytes) + _raw_stride(geometry.v_row_bytes))
    if sharers > 1 and keys >= 32:   # each scores half of them
        size += pairs * (keys * 2 + sharers * 4)
    return _Tiling(pairs, keys, query_tiles, sharers, size)


def _raw_stride(row_bytes: int) -> int:
    return row_bytes if row_bytes % 128 else row_bytes + 16


@cache
def _attend(geometry: PageGeometry, tiling: _Tiling, window: int) -> Kernel:
    return Kernel(
        "attend_prefill.cu", "attend_prefill", _ATTEND_ARGS,
        (
            ("K_TYPE", f"KV_{geometry.k_type.name}"), ("V_TYPE", f"KV_{geometry.v_type.name}"),
            ("K_DIM", geometry.k_dim), ("V_DIM", geometry.v_dim),
            ("PAGE", geometry.page_tokens), ("FRAGMENTS", int(geometry.order is PageOrder.FRAGMENTS)),
            ("WARPS", tiling.warps), ("KEYS", tiling.keys),
            ("QUERY_TILES", tiling.query_tiles), ("SHARERS", tiling.sharers), ("WINDOW", window),
        ),
    )


@cache
def _finish(v_dim: int, v_rotation: int) -> Kernel:
    return Kernel(
        "finish_prefill.cu", "finish_prefill", _FINISH_ARGS, (("V_DIM", v_dim), ("V_ROTATION", v_rotation))
    )
