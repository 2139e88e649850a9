"""Launchers of ``attend_decode.cu``, ``attend_decode_rows.cu`` and ``fold.cu``: attention of decode rows over pages.

The partials lie in the caller's scratch and segments, in the order of ``cuda_src/common/partials.cuh``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from kvs_core.device.cuda.context import Context
from kvs_core.device.cuda.kernel import I32, I64, PTR, Kernel, Launcher, address
from kvs_core.device.cuda.matrices import BLOCK
from kvs_core.device.cuda.ops.row_forms import Records
from kvs_core.device.cuda.plan import DevicePlan
from kvs_core.device.operands import AttentionParams, Buffer
from kvs_core.paging.geometry import KvType, PageGeometry, PageOrder, hadamard_block
from kvs_core.units import ceil_div

MAX_ROWS = 8
"""Rows of a decode step."""

LEAST_SHARED_FOR_512 = 99 << 10
"""Shared memory of a block that heads of 512 need."""

_PLAN_ENTRY = 16           # bytes of a call in the plan table
_BULK_COPIES = 90          # the first arch that has them
_COLUMN_TILE = 8           # query columns of one tensor-core product
_MOST_TILES = 6            # of a pass: what registers hold
_FRAGMENT_THREADS = 512
_SEGMENT_LANES = 16        # segments that a block of fold.cu merges at a time, of heads up to _WIDE
_WIDE = 256                # dims of V beyond which a block has twice the warps, so that registers hold its sums

_ATTEND_ARGS = (PTR, PTR, I64, PTR, PTR, PTR, PTR, PTR, I32)   # q; pool, slot bytes; step; slots, call, parts; scratch
_FOLD_ARGS = (PTR, PTR, PTR, I32, PTR, I32)                    # call, folds; scratch; segments
_FINISH_ARGS = (PTR, PTR, PTR, I32, PTR, I32, PTR, I32, PTR, I32)   # header, folds; scratch; segments; gate; out


@dataclass(frozen=True, slots=True)
class Variant:
    """An attention kernel and how it is launched.

    unit_blocks   blocks of one part: kv heads times passes over its columns
    sm_blocks     that fit on a multiprocessor
    """

    kernel: Kernel
    threads: int
    shared_bytes: int
    unit_blocks: int
    sm_blocks: int


class AttendDecode:
    """The ops ``attend_decode``, ``fold`` and ``finish_decode``."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def attend_decode(
        self, q: Buffer, params: AttentionParams, pool: Buffer, geometry: PageGeometry, plan: DevicePlan, call: int,
        scratch: Buffer,
    ) -> None:
        """See ``Ops.attend_decode``; q as ``WriteKv.write_kv`` leaves it."""
        context = self._context
        launcher = context.launcher
        variant = variant_for(params, geometry, context.rows, launcher.arch, launcher.shared_bytes)
        planned = plan.plan.calls[call]
        # Resident parts become more while a captured launch is replayed, up to a scratch row each.
        most_parts = len(scratch) if planned.resident else len(planned.parts)
        blocks = min(launcher.sm_count * variant.sm_blocks // variant.unit_blocks, most_parts)
        launcher.launch(
            variant.kernel, (max(blocks, 1) * variant.unit_blocks, 1, 1), variant.threads,
            (
                q, pool, pool.strides[0], context.step,
                plan.slots, plan.calls + _PLAN_ENTRY * call, plan.parts,
                scratch, len(scratch),
            ),
            shared_bytes=variant.shared_bytes,
            overlap=context.first_row == 0,   # a later tile reads at once pages that those before it may have written
        )

    def fold(self, params: AttentionParams, plan: DevicePlan, call: int, scratch: Buffer, segments: Buffer) -> None:
        """See ``Ops.fold``."""
        rows = self._context.rows
        self._context.launcher.launch(
            _fold(params.heads, params.kv_heads, params.v_dim, rows), (rows * params.heads, 1, 1),
            _fold_threads(params.v_dim),
            (plan.calls + _PLAN_ENTRY * call, plan.folds, scratch, len(scratch), segments, len(segments)),
            overlap=True,
        )

    def finish_decode(
        self, y: Buffer, params: AttentionParams, geometry: PageGeometry, plan: DevicePlan, scratch: Buffer,
        segments: Buffer, out: Buffer,
    ) -> None:
        """See ``Ops.finish_decode``. Where a head is one activation record, out becomes records, its noted form."""
        context, rows = self._context, self._context.rows
        records = _leaves_records(params)
        if records:
            assert out.flags.c_contiguous
            context.forms[address(out)] = Records(out)
        else:
            context.forms.pop(address(out), None)
        context.launcher.launch(
            _finish(params, geometry, rows), (rows * params.heads, 1, 1), _fold_threads(params.v_dim),
            (
                plan.header, plan.folds, scratch, len(scratch), segments, len(segments),
                address(y) + 4 * params.k_dim, y.strides[0] // 4,
                out, out.strides[0] // 4,
            ),
            overlap=True,
        )


def kernels_for(params: AttentionParams, geometry: PageGeometry, launcher: Launcher) -> list[Kernel]:
    """What a layer of this kind needs, for every number of rows."""
    kernels = []
    for rows in range(1, MAX_ROWS + 1):
        kernels += [
            variant_for(params, geometry, rows, launcher.arch, launcher.shared_bytes).kernel,
            _fold(params.heads, params.kv_heads, params.v_dim, rows),
            _finish(params, geometry, rows),
        ]
    return kernels


def instances(arch: int) -> Iterator[Kernel]:
    """Both page orders, every type of K and of V, with and without bulk copies or a window, few columns and many."""
    shared_bytes = {75: 64, 80: 163, 90: 227, 100: 227}.get(arch, 99) << 10
    fragments = _layer(24, 4, KvType.Q8_0, KvType.Q4_0, 256, 256, PageOrder.FRAGMENTS, gated=True)
    layers = [(fragments, rows) for rows in (1, 4, 6, 8)]
    types = list(KvType)
    for k_type, v_type, dim in zip(types, types[5:] + types[:5], (64, 128, 256) * 3, strict=True):
        layers.append((_layer(8, 4, k_type, v_type, dim, dim), 2))
    for heads, kv_heads, k_dim, v_dim, rows in (
        (4, 4, 80, 80, 1), (4, 4, 96, 96, 8), (32, 8, 128, 128, 8), (40, 8, 128, 128, 8), (9, 3, 64, 64, 8),
        (8, 1, 32, 96, 3),
    ):
        layers.append((_layer(heads, kv_heads, KvType.F16, KvType.F16, k_dim, v_dim), rows))
    layers.append((_layer(24, 4, KvType.Q8_0, KvType.Q4_0, 256, 256, PageOrder.FRAGMENTS, gated=True, window=1024), 4))
    layers.append((_layer(4, 1, KvType.Q8_0, KvType.Q8_0, 256, 256, window=512), 8))
    if shared_bytes >= LEAST_SHARED_FOR_512:
        for k_type, v_type, rows in ((KvType.Q8_0, KvType.Q4_0, 1), (KvType.F16, KvType.F16, 8)):
            layers.append((_layer(16, 2, k_type, v_type, 512, 512), rows))
    for (params, geometry), rows in layers:
        yield variant_for(params, geometry, rows, arch, shared_bytes).kernel
        yield _fold(params.heads, params.kv_heads, params.v_dim, rows)
        yield _finish(params, geometry, rows)


def variant_for(params: AttentionParams, geometry: PageGeometry, rows: int, arch: int, shared_bytes: int) -> Variant:
    """The attention kernel for these pages and so many rows, on a GPU whose blocks have ``shared_bytes`` at most."""
    rep = params.heads // geometry.kv_heads
    if geometry.order is PageOrder.FRAGMENTS:
        return _over_fragments(geometry.kv_heads, rep, rows, params.window, arch, shared_bytes)
    return _over_rows(geometry, rep, rows, params.window, arch, shared_bytes)


def _column_tiles(columns: int, most: int) -> tuple[int, int]:
    """Passes over the pages, and column tiles of one."""
    tiles = ceil_div(columns, _COLUMN_TILE)
    passes = ceil_div(tiles, most)
    return passes, ceil_div(tiles, passes)


@cache
def _over_fragments(kv_heads: int, rep: int, rows: int, window: int, arch: int, shared_bytes: int) -> Variant:
    passes, tiles = _column_tiles(rows * rep, _MOST_TILES)
    columns = tiles * _COLUMN_TILE
    own = columns * (512 + 544 + 8)   # queries, weights, maxima
    ring = 16 * (2 * 4352 + 2048 + 512 + 24)   # of 16 warps: two pieces of K, one of V, barriers
    bulk = arch >= _BULK_COPIES and own + ring <= shared_bytes
    kernel = Kernel(
        "attend_decode.cu", "attend_decode", _ATTEND_ARGS,
        (
            ("ROWS", rows), ("REP", rep), ("KV_HEADS", kv_heads), ("TILES", tiles), ("RING", int(bulk)),
            ("WINDOW", window),
        ),
    )
    return Variant(kernel, _FRAGMENT_THREADS, own + ring if bulk else own, kv_heads * passes, 1)


@cache
def _over_rows(geometry: PageGeometry, rep: int, rows: int, window: int, arch: int, shared_bytes: int) -> Variant:
    k_dim, v_dim = geometry.k_dim, geometry.v_dim
    # The tile decides about bits: it depends on the pages alone, never on rows.
    tile = 64 if geometry.page_tokens % 64 == 0 and max(k_dim, v_dim) <= 128 else 32
    warps = 4 if v_dim <= 64 else 8 if v_dim <= _WIDE else 16
    blocks_of_32 = ceil_div(k_dim, 32)
    own = tile * (64 * blocks_of_32 + 2 * v_dim)   # keys and values in float16
    of_column_tile = _COLUMN_TILE * (64 * (blocks_of_32 | 1) + 2 * tile + 32 + 8)   # queries, weights, maxima
    most = min(_MOST_TILES, warps)
    if v_dim > _WIDE:
        most = min(most, (shared_bytes - own) // of_column_tile)
    passes, tiles = _column_tiles(rows * rep, most)
    own += tiles * of_column_tile
    stored = tile * (geometry.k_row_bytes + geometry.v_row_bytes) + 8             # and a barrier
    ring = 2 if arch >= _BULK_COPIES and own + 2 * stored <= shared_bytes else 0
    size = own + ring * stored
    sm_blocks = max(1, min(16 // warps, (shared_bytes + 1024) // (size + 1024)))   # 16 warps of 128 registers
    kernel = Kernel(
        "attend_decode_rows.cu", "attend_decode_rows", _ATTEND_ARGS,
        (
            ("ROWS", rows), ("REP", rep), ("KV_HEADS", geometry.kv_heads),
            ("K_TYPE", f"KV_{geometry.k_type.name}"), ("V_TYPE", f"KV_{geometry.v_type.name}"),
            ("K_DIM", k_dim), ("V_DIM", v_dim), ("PAGE_TOKENS", geometry.page_tokens), ("TILE", tile),
            ("WARPS", warps), ("TILES", tiles), ("RING", ring), ("SM_BLOCKS", sm_blocks),
            ("WINDOW", window),
        ),
    )
    return Variant(kernel, 32 * warps, size, geometry.kv_heads * passes, sm_blocks)


def _fold_threads(v_dim: int) -> int:
    lanes = _SEGMENT_LANES if v_dim <= _WIDE else _SEGMENT_LANES // 2
    return lanes * v_dim // 4


@cache
def _fold(heads: int, kv_heads: int, v_dim: int, rows: int) -> Kernel:
    """No rotation, gate or records: ``fold`` is the same for all."""
    return Kernel("fold.cu", "fold", _FOLD_ARGS, _fold_defines(heads, kv_heads, v_dim, rows, 0, False, False))


def _finish(params: AttentionParams, geometry: PageGeometry, rows: int) -> Kernel:
    defines = _fold_defines(
        params.heads, params.kv_heads, params.v_dim, rows, geometry.v_rotation, params.gated, _leaves_records(params)
    )
    return Kernel("fold.cu", "finish", _FINISH_ARGS, defines)


def _leaves_records(params: AttentionParams) -> bool:
    """True if a head is one activation record."""
    return params.v_dim == BLOCK


@cache
def _fold_defines(
    heads: int, kv_heads: int, v_dim: int, rows: int, rotation: int, gated: bool, records: bool
) -> tuple[tuple[str, int | str], ...]:
    return (
        ("ROWS", rows), ("REP", heads // kv_heads), ("KV_HEADS", kv_heads), ("V_DIM", v_dim), ("ROTATION", rotation),
        ("GATED", int(gated)), ("QUANTISE", int(records)),
    )


def _layer(
    heads: int, kv_heads: int, k_type: KvType, v_type: KvType, k_dim: int, v_dim: int,
    order: PageOrder = PageOrder.ROWS, *, gated: bool = False, window: int = 0,
) -> tuple[AttentionParams, PageGeometry]:
    params = AttentionParams(heads, kv_heads, k_dim, v_dim, gated, scale=1.0, rope=None, eps=0.0, window=window)
    rotations = (hadamard_block(k_type, k_dim, is_key=True), hadamard_block(v_type, v_dim, is_key=False))
    return params, PageGeometry(256, kv_heads, k_dim, v_dim, k_type, v_type, *rotations, order)
