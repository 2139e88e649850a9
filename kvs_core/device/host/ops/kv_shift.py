"""Rows of a history that move down over rows that are dropped: keys turned back by as many positions.

    rows    | 0 .. keep | dropped | what moves down ....... |              page by page, in ascending order: what a
    rows    | 0 .. keep | what moves down ....... |                        page takes is read before it is overwritten

A key is stored after its rotary embedding, so it becomes the key of another position by one more rotation: it is
decoded, Hadamard rotation undone, turned, and encoded again. Values know no position; their bytes are moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvs_core.device.base import RopeTable
from kvs_core.device.host.ops import basic, kv_codec, kv_fragments
from kvs_core.paging.geometry import PageGeometry, PageOrder
from kvs_core.paging.spans import row_spans

U8 = npt.NDArray[np.uint8]


def shift_rows(
    pages: Sequence[U8], geometry: PageGeometry, table: RopeTable, *, keep: int, discard: int, tokens: int
) -> None:
    """See ``Ops.shift_rows``."""
    if discard == 0 or keep + discard == tokens:
        return   # nothing moves
    left, size = tokens - discard, geometry.page_tokens
    opened: dict[int, tuple[U8, U8]] = {}
    for page in range(keep // size, geometry.pages_of(left)):
        first, end = max(keep, page * size), min(left, (page + 1) * size)
        sources = row_spans(first + discard, end - first, size, range(len(pages)))
        for number in (page, *(span.slot for span in sources)):
            if number not in opened:
                opened[number] = _open(pages[number], geometry)
        keys, values = (
            np.concatenate([opened[span.slot][part][:, span.page_row : span.page_row + span.rows] for span in sources],
                           axis=1)
            for part in (0, 1)
        )
        there = slice(first - page * size, end - page * size)
        k_part, v_part = opened.pop(page)
        k_part[:, there] = turned(keys, geometry, table, -discard)
        v_part[:, there] = values
        if geometry.order is PageOrder.FRAGMENTS:
            pages[page][:] = kv_fragments.pack(_closed(k_part, v_part), geometry.kv_heads)
        last = sources[-1].slot   # what the next page takes begins there, if it is not this one
        opened = {last: opened[last]} if last > page else {}


def turned(keys: U8, geometry: PageGeometry, table: RopeTable, positions: int) -> U8:
    """Stored keys uint8 [G, rows, row bytes] as they would be stored ``positions`` further on."""
    rows = np.empty((*keys.shape[:-1], geometry.k_dim), np.float32)
    kv_codec.decode(geometry.k_type, keys, rows)
    with np.errstate(all="ignore"):
        if geometry.k_rotation:
            basic.hadamard(rows, geometry.k_rotation)
        basic.rope_by(rows, positions, table)
        if geometry.k_rotation:
            basic.hadamard(rows, geometry.k_rotation)
    return kv_codec.encode(geometry.k_type, rows)


def _open(page: U8, geometry: PageGeometry) -> tuple[U8, U8]:
    """The rows of K and V, [G, P, row bytes]: windows on the page, or of another order a copy."""
    if geometry.order is PageOrder.FRAGMENTS:
        page = kv_fragments.unpack(page, geometry.kv_heads)
    heads = page.reshape(geometry.kv_heads, geometry.head_bytes)
    k_part, v_part = heads[:, : geometry.k_part_bytes], heads[:, geometry.k_part_bytes :]
    shape = geometry.kv_heads, geometry.page_tokens, -1
    return k_part.reshape(shape), v_part.reshape(shape)


def _closed(k_part: U8, v_part: U8) -> U8:
    heads = len(k_part)
    return np.concatenate([k_part.reshape(heads, -1), v_part.reshape(heads, -1)], axis=1).reshape(-1)
