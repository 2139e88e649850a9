"""Attention over pages: the reference for every other device's kernels.

A partial is a running softmax, float32 [..., Dv + 2]: acc (sum of exp(s - m) v), l (sum of exp(s - m)), m (largest s).
Two partials merge to max(m), and acc and l each scaled by exp(m - max). A page is always computed whole, its rows
dequantised into fresh memory first, so a page's partial depends on the page's bytes, the query row and its position and
on nothing else: not on the slot, the neighbours, the split of a span into calls, or (in decode) the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvs_core.device.host.ops import kv_codec
from kvs_core.paging.geometry import KvType, PageGeometry
from kvs_core.paging.spans import Fold, GroupPart, PageRef

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_TILE_BYTES = 2 << 20   # of dequantised K and V at a time: stays in the cache


def attend_decode(
    q: F32,
    pool: U8,
    geometry: PageGeometry,
    parts: Sequence[GroupPart],
    scratch: F32,
    *,
    first_position: int,
    round_q: bool = False,
) -> None:
    """Add T rows' attention over each part's pages to its scratch row, page by page.   scratch [rows, T, H, Dv + 2]"""
    rows, heads, _ = q.shape
    if round_q:
        q = _rounded(q, geometry.k_type)
    pages = [ref for part in parts for ref in part.pages]
    partials = np.empty((len(pages), rows, heads, geometry.v_dim + 2), dtype=np.float32)
    # One small product per row, head and page, whatever the number of rows.
    q = np.ascontiguousarray(q).reshape(rows, 1, geometry.kv_heads, -1, geometry.k_dim)
    per_page = 4 * geometry.page_tokens * geometry.kv_heads * (geometry.k_dim + geometry.v_dim)
    tile = max(1, _TILE_BYTES // per_page)
    for at in range(0, len(pages), tile):
        some = pages[at : at + tile]
        keys, values = _load(pool, geometry, some)
        scores = np.matmul(q, keys.swapaxes(-1, -2))                                  # [T, n, G, rep, P]
        for index, ref in enumerate(some):
            _mask(scores[:, index].reshape(rows, heads, -1), ref.page * geometry.page_tokens, first_position)
        partial = _softmax_partial(scores, values)                                    # [T, n, G, rep, Dv + 2]
        partials[at : at + len(some)] = partial.reshape(rows, len(some), heads, -1).swapaxes(0, 1)
    _add_pages(parts, partials, scratch)


def fold(scratch: F32, segments: F32, folds: Sequence[Fold]) -> None:
    """Merge group partials into segment partials, in the order given."""
    for each in folds:
        if each.fresh:
            segments[each.segment] = scratch[each.scratch_row]
        else:
            segments[each.segment] = _merged(segments[each.segment], scratch[each.scratch_row])


def finish_decode(segments: F32, n_segments: int, out: F32) -> None:
    """Merge segments [0, n_segments) in order and normalise.   out [T, H, Dv]"""
    total = segments[0]
    for segment in range(1, n_segments):
        total = _merged(total, segments[segment])
    _normalise(total, out)


def attend_prefill(
    q: F32,
    pool: U8,
    geometry: PageGeometry,
    pages: Sequence[PageRef],
    running: F32,
    *,
    fresh: bool,
    first_position: int,
    round_q: bool = False,
) -> None:
    """Add T rows' attention over consecutive pages to the running partial.   running [T, H, Dv + 2]"""
    rows = len(q)
    if round_q:
        q = _rounded(q, geometry.k_type)
    groups = geometry.kv_heads
    by_head = q.reshape(rows, groups, -1, geometry.k_dim).swapaxes(0, 1).reshape(groups, -1, geometry.k_dim)
    total = running.reshape(rows, groups, -1, geometry.v_dim + 2).swapaxes(0, 1)      # [G, T, rep, Dv + 2]
    for ref in pages:
        keys, values = _load(pool, geometry, [ref])
        scores = np.matmul(by_head, keys[0].swapaxes(-1, -2))                         # [G, T * rep, P]
        by_row = scores.reshape(groups, rows, -1, geometry.page_tokens).swapaxes(0, 1)
        _mask(by_row, ref.page * geometry.page_tokens, first_position)
        partial = _softmax_partial(scores, values[0]).reshape(total.shape)
        total[...] = partial if fresh else _merged(total, partial)
        fresh = False


def finish_prefill(running: F32, out: F32) -> None:
    """Normalise.   out [T, H, Dv]"""
    _normalise(running, out)


def _load(pool: U8, geometry: PageGeometry, pages: Sequence[PageRef]) -> tuple[F32, F32]:
    """K [n, G, P, Dk] and V [n, G, P, Dv] of some pages, in memory of their own."""
    heads = pool.reshape(len(pool), geometry.kv_heads, geometry.head_bytes)
    slots = [ref.slot for ref in pages]
    shape = (len(pages), geometry.kv_heads, geometry.page_tokens, -1)
    keys = kv_codec.decode(geometry.k_type, heads[slots, :, : geometry.k_part_bytes])
    values = kv_codec.decode(geometry.v_type, heads[slots, :, geometry.k_part_bytes :])
    return keys.reshape(shape), values.reshape(shape)


def _mask(scores: F32, first_key: int, first_position: int) -> None:
    """-inf where a key lies behind the row's own position.   scores [T, ..., P], written in place"""
    if first_key + scores.shape[-1] - 1 <= first_position:
        return
    keys = first_key + np.arange(scores.shape[-1])
    positions = first_position + np.arange(len(scores))
    hidden = keys[None, :] > positions[:, None]
    middle = (1,) * (scores.ndim - 2)
    np.copyto(scores, -np.inf, where=hidden.reshape(len(scores), *middle, -1))


def _softmax_partial(scores: F32, values: F32) -> F32:
    """The partial of one page.   scores [..., R, P]; values [..., P, Dv]; result [..., R, Dv + 2]"""
    largest = scores.max(axis=-1, keepdims=True)
    scores -= np.where(largest == -np.inf, np.float32(0), largest)
    weights = np.exp(scores, out=scores)
    partial = np.empty((*scores.shape[:-1], values.shape[-1] + 2), dtype=np.float32)
    partial[..., :-2] = np.matmul(weights, values)
    partial[..., -2] = weights.sum(axis=-1)
    partial[..., -1] = largest[..., 0]
    return partial


def _merged(a: F32, b: F32) -> F32:
    """Two partials in one; a's keys come first."""
    m = np.maximum(a[..., -1], b[..., -1])
    base = np.where(m == -np.inf, np.float32(0), m)
    out = np.empty_like(a)
    np.multiply(a[..., :-1], np.exp(a[..., -1] - base)[..., None], out=out[..., :-1])
    out[..., :-1] += b[..., :-1] * np.exp(b[..., -1] - base)[..., None]
    out[..., -1] = m
    return out


def _add_pages(parts: Sequence[GroupPart], partials: F32, scratch: F32) -> None:
    """Merge page partials [pages, T, H, Dv + 2] into the groups' scratch rows: the j-th page of all groups at a time."""
    starts = np.cumsum([0, *(len(part.pages) for part in parts)])
    for place in range(max(len(part.pages) for part in parts)):
        taking = [index for index, part in enumerate(parts) if len(part.pages) > place]
        begun = [index for index in taking if place > 0 or not parts[index].fresh]
        if begun:
            rows = [parts[index].scratch_row for index in begun]
            scratch[rows] = _merged(scratch[rows], partials[[starts[index] + place for index in begun]])
        for index in taking:
            if place == 0 and parts[index].fresh:
                scratch[parts[index].scratch_row] = partials[starts[index]]


def _normalise(partial: F32, out: F32) -> None:
    np.divide(partial[..., :-2], partial[..., -2:-1], out=out)


def _rounded(q: F32, k_type: KvType) -> F32:
    """q as llama.cpp's CPU product sees it against quantised keys: rounded to q8_0 blocks."""
    if not k_type.quantised:
        return q
    return kv_codec.decode(KvType.Q8_0, kv_codec.encode(KvType.Q8_0, q)).reshape(q.shape)
