"""Attention over pages: the reference for every other device's kernels.

A partial is a running softmax, float32 [..., Dv + 2]: acc (sum of exp(s - m) v), l (sum of exp(s - m)), m (largest s).
Two partials merge to max(m), and acc and l each scaled by exp(m - max). A page is always computed whole, its rows
dequantised into memory of their own first, and a key that a row must not see weighs exactly nothing, whatever it holds.
So in decode a page's partial depends on the keys and values that the row sees, on the row and its position, and on
nothing else: not on the slot, the neighbours, the split of a span into calls, or the other rows of the step.

``window`` is that of ``AttentionParams``. The partial of a page of which a row sees nothing is (0, 0, lowest), and a
merge with it changes no bit of the other one, whichever comes first.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from kvs_core.device.host.ops import kv_codec
from kvs_core.paging.geometry import KvType, PageGeometry
from kvs_core.paging.spans import Fold, GroupPart

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_TILE_BYTES = 4 << 20    # of dequantised K and V at a time
_SCORE_BYTES = 1 << 20   # of prefill scores at a time
_FEW_ROWS = 4            # up to here BLAS is fast at q K^T; for some more rows it is five times faster at K q^T
_LOWEST = np.finfo(np.float32).min   # m of a row that sees nothing: behaves like -inf, but without inf - inf


def attend_decode(
    q: F32,
    pool: U8,
    geometry: PageGeometry,
    parts: Sequence[GroupPart],
    slots: Sequence[int],
    scratch: F32,
    *,
    first_position: int,
    window: int = 0,
    round_q: bool = False,
) -> None:
    """Add T rows' attention over each part's pages to its scratch row, page by page.   scratch [rows, T, H, Dv + 2]"""
    rows, heads, _ = q.shape
    if round_q:
        q = _rounded(q, geometry.k_type)
    q = _by_kv_head(q, geometry)
    if first_page := _first_page(geometry, first_position, window):
        parts = [_trimmed(part, first_page) for part in parts]
    pages = [page for part in parts for page in part.pages]
    partials = _memory.floats("partials", len(pages), rows, heads, geometry.v_dim + 2)
    tile = max(1, _TILE_BYTES // (4 * geometry.page_tokens * geometry.kv_heads * (geometry.k_dim + geometry.v_dim)))
    with np.errstate(all="ignore"):
        for at in range(0, len(pages), tile):
            some = slice(at, at + tile)
            _page_partials(q, pool, geometry, pages[some], slots, first_position, window, partials[some])
        _add_pages(parts, partials, scratch)


def fold(scratch: F32, segments: F32, folds: Sequence[Fold]) -> None:
    """Merge group partials into segment partials, in the order given."""
    with np.errstate(all="ignore"):
        for segment, group in groupby(folds, key=attrgetter("segment")):
            each = list(group)
            rows = [one.scratch_row for one in each]
            if each[0].fresh:
                segments[segment] = scratch[rows.pop(0)]
            if rows:
                _merge(segments[segment], scratch[rows])


def finish_decode(segments: F32, n_segments: int, out: F32) -> None:
    """Merge segments [0, n_segments) in order and normalise.   out [T, H, Dv]. The segments are used up."""
    with np.errstate(all="ignore"):
        if n_segments > 1:
            _merge(segments[0], segments[1:n_segments])
        _normalise(segments[0], out)
        # A row alone merges fewer empty partials, each of which makes +0 of -0.
        out += 0.0


def attend_prefill(
    q: F32,
    pool: U8,
    geometry: PageGeometry,
    pages: range,
    slots: Sequence[int],
    running: F32,
    *,
    fresh: bool,
    first_position: int,
    window: int = 0,
    round_q: bool = False,
) -> None:
    """Add T rows' attention over consecutive pages to the running partial.   running [T, H, Dv + 2]"""
    rows, heads, _ = q.shape
    if round_q:
        q = _rounded(q, geometry.k_type)
    q = _by_kv_head(q, geometry)
    if fresh:
        running[..., :-1] = 0
        running[..., -1] = _LOWEST
    totals = running.reshape(rows, geometry.kv_heads, -1, geometry.v_dim + 2).swapaxes(0, 1)   # [G, T, rep, Dv + 2]
    tile = max(32, _SCORE_BYTES // (4 * heads * geometry.page_tokens))
    with np.errstate(all="ignore"):
        for page in range(max(pages.start, _first_page(geometry, first_position, window)), pages.stop):
            keys, values = _load(pool, geometry, [slots[page]])
            seen = _seen(page, geometry, first_position)
            values[0, :, max(0, seen + rows - 1) :] = 0
            values[0, :, : _hidden(seen, window)] = 0
            # Rows before the first of these, and behind the last, see nothing of this page.
            end = min(rows, window + geometry.page_tokens - seen) if window else rows
            for at in range(max(0, 1 - seen), end, tile):
                some = slice(at, min(at + tile, end))
                _add_page(q[:, some], keys[0], values[0], seen + at, window, totals[:, some])


def finish_prefill(running: F32, out: F32) -> None:
    """Normalise.   out [T, H, Dv]"""
    with np.errstate(all="ignore"):
        _normalise(running, out)


def prefill_sums(running: F32) -> F32:
    """l and m of each row and head: [T, H, 2]."""
    return running[..., -2:]


def log_sums(sums: F32) -> npt.NDArray[np.float64]:
    """ln of the sum of exp(s), float64 [T, H]: m + ln l."""
    wide = sums.astype(np.float64)
    with np.errstate(all="ignore"):
        return wide[..., 1] + np.log(wide[..., 0])


def _by_kv_head(q: F32, geometry: PageGeometry) -> F32:
    """[T, H, Dk] to [G, T, rep, Dk]: the rep query heads of each KV head together."""
    return np.ascontiguousarray(q.reshape(len(q), geometry.kv_heads, -1, geometry.k_dim).swapaxes(0, 1))


def _seen(page: int, geometry: PageGeometry, position: int) -> int:
    """Keys of a page that the row at ``position`` sees, row t behind it t more; below 1 none, from P on all."""
    return position + 1 - page * geometry.page_tokens


def _hidden(seen: int, window: int) -> int:
    """Keys at a page's beginning that lie before the window of a row that sees ``seen``, as ``_seen`` counts them."""
    return max(0, seen - window) if window else 0


def _first_page(geometry: PageGeometry, position: int, window: int) -> int:
    """The first page of which the row at ``position``, or one behind it, sees something."""
    return _hidden(position + 1, window) // geometry.page_tokens


def _trimmed(part: GroupPart, first_page: int) -> GroupPart:
    """A part without its pages before ``first_page``, but for its last one: they would add nothing."""
    start = max(part.pages.start, min(first_page, part.pages.stop - 1))
    return replace(part, pages=range(start, part.pages.stop))


class _Memory(threading.local):
    """Memory for what does not outlive a call, kept for the next: faulting in fresh pages costs more than the maths."""

    def __init__(self) -> None:
        self._buffers: dict[str, U8] = {}

    def bytes(self, name: str, *shape: int) -> U8:
        """Undefined contents; ``name``'s earlier array is given up."""
        size = math.prod(shape)
        if name not in self._buffers or len(self._buffers[name]) < size:
            self._buffers[name] = np.empty(size, dtype=np.uint8)
        return self._buffers[name][:size].reshape(shape)

    def floats(self, name: str, *shape: int) -> F32:
        """The same as float32."""
        return self.bytes(name, *shape[:-1], 4 * shape[-1]).view(np.float32)


_memory = _Memory()


def _load(pool: U8, geometry: PageGeometry, slots: Sequence[int]) -> tuple[F32, F32]:
    """K [n, G, P, Dk] and V [n, G, P, Dv] of the pages in some slots, in memory of their own until the next call."""
    count, groups, page_tokens = len(slots), geometry.kv_heads, geometry.page_tokens
    stored = _memory.bytes("stored", count, geometry.page_bytes)
    np.take(pool, slots, axis=0, out=stored, mode="clip")   # no check, no second copy
    heads = stored.reshape(count, groups, geometry.head_bytes)
    keys = _memory.floats("keys", count, groups, page_tokens * geometry.k_dim)
    values = _memory.floats("values", count, groups, page_tokens * geometry.v_dim)
    kv_codec.decode(geometry.k_type, heads[..., : geometry.k_part_bytes], keys)
    kv_codec.decode(geometry.v_type, heads[..., geometry.k_part_bytes :], values)
    return keys.reshape(count, groups, page_tokens, -1), values.reshape(count, groups, page_tokens, -1)


def _page_partials(
    q: F32, pool: U8, geometry: PageGeometry, pages: Sequence[int], slots: Sequence[int], first_position: int,
    window: int, partials: F32,
) -> None:
    """The partial of every page and row, by itself.   q [G, T, rep, Dk]; partials [n, T, H, Dv + 2]

    One small product per page, KV head and row, of the same shape whatever the number of pages and rows.
    """
    rows = q.shape[1]
    keys, values = _load(pool, geometry, [slots[page] for page in pages])
    scores = _scores(q, keys)
    seen_by_first = [_seen(page, geometry, first_position) for page in pages]
    cut = [(index, seen) for index, seen in enumerate(seen_by_first) if seen < geometry.page_tokens]
    begun = [(index, seen) for index, seen in enumerate(seen_by_first) if _hidden(seen + rows - 1, window)]
    for index, seen in cut:
        values[index, :, max(0, seen + rows - 1) :] = 0
        for row in range(rows):
            scores[index, :, row, :, max(0, seen + row) :] = -np.inf
    for index, seen in begun:
        values[index, :, : _hidden(seen, window)] = 0
        for row in range(rows):
            scores[index, :, row, :, : _hidden(seen + row, window)] = -np.inf
    largest = np.maximum.reduce(scores, axis=-1, keepdims=True, initial=_LOWEST)
    scores -= largest
    weights = np.exp(scores, out=scores)
    out = partials.reshape(len(pages), rows, len(q), -1, geometry.v_dim + 2).swapaxes(1, 2)
    np.matmul(weights, values[:, :, None], out=out[..., :-2])
    # Zero times a value that another row alone sees is not always zero: a row must not even meet it.
    if begun and rows > 1:
        own = _memory.floats("own", *values.shape[1:])
        for index, seen in begun:
            for row in range(rows):
                np.copyto(own, values[index])
                own[:, : _hidden(seen + row, window)] = 0
                own[:, max(0, seen + row) :] = 0
                np.matmul(weights[index, :, row], own, out=out[index, :, row, :, :-2])
    for index, seen in [each for each in cut if each not in begun]:
        for row in range(rows - 2, -1, -1):
            values[index, :, max(0, seen + row) :] = 0
            np.matmul(weights[index, :, row], values[index], out=out[index, :, row, :, :-2])
    out[..., -2] = np.add.reduce(weights, axis=-1)
    out[..., -1] = largest[..., 0]


def _scores(q: F32, keys: F32) -> F32:
    """q K^T of every page, KV head and row.   q [G, T, rep, Dk]; keys [n, G, P, Dk]; result [n, G, T, rep, P]"""
    (groups, rows, rep, _), (count, _, page_tokens, _) = q.shape, keys.shape
    scores = _memory.floats("scores", count, groups, rows, rep, page_tokens)
    keys = keys[:, :, None]
    if rep <= _FEW_ROWS:
        return np.matmul(q, keys.swapaxes(-1, -2), out=scores)
    np.copyto(scores, np.matmul(keys, np.ascontiguousarray(q.swapaxes(-1, -2))).swapaxes(-1, -2))
    return scores


def _add_page(q: F32, keys: F32, values: F32, seen: int, window: int, total: F32) -> None:
    """Add one page to the running partials of t rows, the first of which sees ``seen`` > 0 keys of it.

    q [G, t, rep, Dk]; keys [G, P, Dk]; values [G, P, Dv]; total [G, t, rep, Dv + 2]
    """
    (groups, rows, rep, k_dim), (_, page_tokens, v_dim) = q.shape, values.shape
    flat = _memory.floats("scores", groups, rows * rep, page_tokens)
    np.matmul(q.reshape(groups, -1, k_dim), keys.swapaxes(-1, -2), out=flat)
    scores = flat.reshape(groups, rows, rep, page_tokens)
    for row in range(min(rows, page_tokens - seen)):
        scores[:, row, :, seen + row :] = -np.inf
    if window:
        for row in range(max(0, window + 1 - seen), rows):
            scores[:, row, :, : seen + row - window] = -np.inf
    largest = np.maximum.reduce(scores, axis=-1, keepdims=True)
    np.maximum(largest, total[..., -1:], out=largest)
    scores -= largest
    np.exp(scores, out=scores)
    total[..., :-1] *= np.exp(total[..., -1:] - largest)
    acc = np.matmul(flat, values, out=_memory.floats("acc", groups, rows * rep, v_dim))
    total[..., :-2] += acc.reshape(groups, rows, rep, v_dim)
    total[..., -2] += np.add.reduce(scores, axis=-1)
    total[..., -1:] = largest


def _merge(total: F32, later: F32) -> None:
    """Merge partials one after the other into ``total``, in place.   total [..., Dv + 2]; later [k, ...], used up"""
    m = np.maximum.accumulate(np.concatenate([total[None, ..., -1:], later[..., -1:]]))
    scale = np.exp(m[:-1] - m[1:])
    later *= np.exp(later[..., -1:] - m[1:])
    for index in range(len(later)):
        total *= scale[index]
        total += later[index]
    total[..., -1:] = m[-1]


def _add_pages(parts: Sequence[GroupPart], partials: F32, scratch: F32) -> None:
    """Merge page partials [pages, T, H, Dv + 2] into the groups' scratch rows, parts of the same kind at a time."""
    kinds = defaultdict(list)
    start = 0
    for part in parts:
        kinds[part.fresh, len(part.pages)].append((part.scratch_row, start))
        start += len(part.pages)
    for (fresh, count), members in kinds.items():
        rows, starts = (list(column) for column in zip(*members, strict=True))
        total = partials[starts] if fresh else scratch[rows]
        later = np.arange(1 if fresh else 0, count)
        if len(later):
            _merge(total, partials[np.add.outer(later, starts)])
        scratch[rows] = total


def _normalise(partial: F32, out: F32) -> None:
    np.divide(partial[..., :-2], partial[..., -2:-1], out=out)


def _rounded(q: F32, k_type: KvType) -> F32:
    """q as llama.cpp's CPU product sees it against quantised keys: rounded to q8_0 blocks."""
    if not k_type.quantised:
        return q
    rounded = np.empty(q.shape, dtype=np.float32)
    kv_codec.decode(KvType.Q8_0, kv_codec.encode(KvType.Q8_0, q), rounded)
    return rounded
