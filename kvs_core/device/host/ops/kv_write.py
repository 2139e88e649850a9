"""Writing K and V rows into pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvs_core.device.host.ops import kv_codec
from kvs_core.paging.geometry import PageGeometry
from kvs_core.paging.spans import RowSpan

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


def zero_page(pool: U8, geometry: PageGeometry, slot: int) -> None:
    """Clear a slot that becomes a tail page."""
    pool[slot, : geometry.page_bytes] = 0


def kv_write(k: F32, v: F32, pool: U8, geometry: PageGeometry, spans: Sequence[RowSpan]) -> None:
    """Store rows in their pages.   k [T, G, Dk]; v [T, G, Dv]"""
    k_rows = kv_codec.encode(geometry.k_type, k).transpose(1, 0, 2)
    v_rows = kv_codec.encode(geometry.v_type, v).transpose(1, 0, 2)
    for span in spans:
        heads = pool[span.slot].reshape(geometry.kv_heads, geometry.head_bytes)
        k_part = heads[:, : geometry.k_part_bytes].reshape(geometry.kv_heads, geometry.page_tokens, -1)
        v_part = heads[:, geometry.k_part_bytes :].reshape(geometry.kv_heads, geometry.page_tokens, -1)
        there = slice(span.page_row, span.page_row + span.rows)
        here = slice(span.step_row, span.step_row + span.rows)
        k_part[:, there] = k_rows[:, here]
        v_part[:, there] = v_rows[:, here]
