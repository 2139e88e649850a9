"""Rows that move to another page of a history, their keys turned to other positions.

A key is stored after its rotary embedding, so it becomes the key of another position by one more rotation: it is
decoded, Hadamard rotation undone, turned, and encoded again. Values know no position; their bytes are moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvs_core.device.host.ops import basic, kv_codec
from kvs_core.device.operands import RopeTable
from kvs_core.paging.geometry import PageGeometry, PageOrder
from kvs_core.paging.shift import PageMove
from kvs_core.paging.spans import row_spans

U8 = npt.NDArray[np.uint8]


def shift_rows(
    page: U8, sources: Sequence[U8], geometry: PageGeometry, table: RopeTable, move: PageMove, *, positions: int
) -> None:
    """See ``Ops.shift_rows``; keys are turned by ``positions``, which may be negative."""
    assert geometry.order is PageOrder.ROWS, geometry.order
    opened = [_open(source, geometry) for source in sources]
    spans = row_spans(move.source_row, move.rows, geometry.page_tokens, range(len(sources)))
    keys, values = (   # copies: the page may be one of the sources
        np.concatenate([opened[span.slot][part][:, span.page_row : span.page_row + span.rows] for span in spans], 1)
        for part in (0, 1)
    )
    there = slice(move.row, move.row + move.rows)
    k_part, v_part = _open(page, geometry)
    k_part[:, there] = turned(keys, geometry, table, positions)
    v_part[:, there] = values


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
    """The rows of K and V, [G, P, row bytes]: windows on the page."""
    heads = page.reshape(geometry.kv_heads, geometry.head_bytes)
    k_part, v_part = heads[:, : geometry.k_part_bytes], heads[:, geometry.k_part_bytes :]
    shape = geometry.kv_heads, geometry.page_tokens, -1
    return k_part.reshape(shape), v_part.reshape(shape)
