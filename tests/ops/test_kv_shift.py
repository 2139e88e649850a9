"""Rows of a history move down over dropped ones as they would in one flat cache, and keys get their new positions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.device.host.ops import basic, kv_codec, kv_shift, kv_write
from kvs_core.device.operands import RopeTable
from kvs_core.paging.geometry import KvType, PageGeometry, hadamard_block
from kvs_core.paging.shift import plan_shift
from kvs_core.paging.spans import row_spans

PAGE, HEADS, DIM, PAGES = 32, 2, 64, 5
TYPES = list(KvType)


def pages_of(rows: tuple[np.ndarray, np.ndarray], geometry: PageGeometry, count: int) -> np.ndarray:
    """Pages that hold these rows from position 0 on; what else they hold is noise."""
    pages = np.random.default_rng(1).integers(0, 256, (count, geometry.page_bytes), dtype=np.uint8)
    spans = row_spans(0, len(rows[0]), geometry.page_tokens, range(count))
    kv_write.kv_write(*rows, pages, geometry, spans)
    return pages


def flat(keys: np.ndarray, geometry: PageGeometry, table: RopeTable, keep: int, discard: int) -> np.ndarray:
    """Stored keys [rows, G, row bytes] as one cache without pages has them after the shift."""
    rows = np.empty((*keys.shape[:-1], geometry.k_dim), np.float32)
    kv_codec.decode(geometry.k_type, keys, rows)
    moved = rows[keep + discard :].copy()
    if geometry.k_rotation:
        basic.hadamard(moved, geometry.k_rotation)
    basic.rope_by(moved, -discard, table)
    if geometry.k_rotation:
        basic.hadamard(moved, geometry.k_rotation)
    return np.concatenate([keys[:keep], kv_codec.encode(geometry.k_type, moved)]) if len(moved) else keys[:keep]


@given(st.data())
def test_rows_move_as_in_a_flat_cache(data: st.DataObject) -> None:
    """Any type of K and V, any cut: keys are decoded, turned and encoded, values move as bytes, and what lies before
    the dropped rows or behind the last one that moves keeps its bytes."""
    k_type, v_type = data.draw(st.sampled_from(TYPES), "K"), data.draw(st.sampled_from(TYPES), "V")
    geometry = PageGeometry(PAGE, HEADS, DIM, DIM, k_type, v_type, hadamard_block(k_type, DIM, is_key=True),
                            hadamard_block(v_type, DIM, is_key=False))
    tokens = data.draw(st.integers(1, PAGE * PAGES), "tokens")
    keep = data.draw(st.integers(0, tokens), "keep")
    discard = data.draw(st.integers(0, tokens - keep), "discard")
    table = RopeTable(10000.0 ** (-np.arange(0, 48, 2) / 48), data.draw(st.booleans(), "interleaved"), 1.3)
    dice = np.random.default_rng(tokens)
    rows = tuple(dice.standard_normal((tokens, HEADS, DIM), np.float32) for _ in range(2))
    pages = pages_of((rows[0], rows[1]), geometry, PAGES)
    before, left = pages.copy(), tokens - discard
    for move in plan_shift(keep, discard, tokens, PAGE):
        sources = [pages[source] for source in move.sources]
        kv_shift.shift_rows(pages[move.page], sources, geometry, table, move, positions=-discard)

    keys = flat(kv_codec.encode(k_type, rows[0]), geometry, table, keep, discard)
    values = np.delete(kv_codec.encode(v_type, rows[1]), slice(keep, keep + discard), axis=0)
    for position in range(PAGE * PAGES):
        page, row = divmod(position, PAGE)
        for head in range(HEADS):
            for at, size, wanted in ((geometry.k_offset(head, row), geometry.k_row_bytes, keys),
                                     (geometry.v_offset(head, row), geometry.v_row_bytes, values)):
                place = slice(at, at + size)
                stored = wanted[position, head] if position < left else before[page, place]
                np.testing.assert_array_equal(pages[page, place], stored)


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_turned_key_is_that_of_another_position(interleaved: bool) -> None:
    """With any frequencies, and with a magnitude that a key has once and not twice; the rest of a head stays."""
    frequencies = 500000.0 ** (-np.arange(0, 48, 2) / 48) * np.linspace(1, 0.125, 24)
    table = RopeTable(frequencies, interleaved, magnitude=1.25)
    key = np.random.default_rng(6).standard_normal((1, 2, 64), np.float32)
    for position, by in ((5000, -4999), (130000, -65001), (7, -7), (40, 0)):
        there, here = key.copy(), key.copy()
        basic.rope(there, position, table)
        basic.rope(here, position + by, table)
        basic.rope_by(there, by, table)
        np.testing.assert_allclose(there, here, rtol=0, atol=2e-6)
