"""Drawn blocks are valid ones of the size asked for, and any range of bytes is the same however it is read."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.formats.quants import dequantize
from kvs_core.formats.synthetic_blocks import (
    DRAWN_TYPES,
    POOL_BLOCKS,
    DrawnBytes,
    block_bytes,
    block_pool,
    drawn_blocks,
)

Quant = GGMLQuantizationType
ALL_TYPES = pytest.mark.parametrize("quant", DRAWN_TYPES, ids=lambda quant: quant.name)


def values_of(data: np.ndarray, quant: Quant) -> np.ndarray:
    elements, size = GGML_QUANT_SIZES[quant]
    return dequantize(data, quant, (1, data.size // size * elements))[0]


@ALL_TYPES
@pytest.mark.parametrize("std", [1.0, 2.0 / 5120**0.5, 0.25 / 17408**0.5])
def test_values_have_the_size_asked_for(quant: Quant, std: float) -> None:
    """Mean near 0, standard deviation within 2 %, nothing far out, all finite: also for the smallest weights in use."""
    values = values_of(block_pool(quant, std).reshape(-1), quant).astype(np.float64)
    assert values.std() == pytest.approx(std, rel=0.02)
    assert abs(values.mean()) < 0.02 * std
    assert np.abs(values).max() < 8 * std   # NaN fails this too


@ALL_TYPES
def test_rows_are_unlike(quant: Quant) -> None:
    """Rows of 20 blocks have the correlations of independent ones, but for those that share a block or a few."""
    data = DrawnBytes(quant, 1.0, 5, 1000 * 20 * block_bytes(quant))
    rows = values_of(data[:], quant).reshape(1000, -1).astype(np.float64)
    product = rows @ rows.T / rows.shape[1]
    np.fill_diagonal(product, 0.0)
    assert np.abs(product).max() < 0.5
    assert np.sqrt(np.mean(product**2)) < 2 / np.sqrt(rows.shape[1])
    other = DrawnBytes(quant, 1.0, 6, data.n_bytes)
    assert not np.array_equal(other[:], data[:])


@given(st.sampled_from(DRAWN_TYPES), st.integers(0, 2**32 - 1), st.integers(0, 5000), st.integers(0, 3000))
def test_a_range_is_part_of_the_whole(quant: Quant, seed: int, first: int, count: int) -> None:
    """Any start and end, inside a block or not, beyond the end or not."""
    data = DrawnBytes(quant, 1.0, seed, 20 * block_bytes(quant) + 2)
    whole = data[:]
    assert len(whole) == len(data) == data.n_bytes
    np.testing.assert_array_equal(data[first : first + count], whole[first : first + count])


def test_the_hash_is_the_one_that_files_were_made_with() -> None:
    """Known answers, also past 2^32 in the counter's product; all blocks of a pool are drawn about equally often."""
    def by_hand(index: int, seed: int) -> int:
        x = (index * 0x9E3779B1 + seed) % 2**32
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return (x ^ x >> 16) % POOL_BLOCKS

    for seed, first in ((0, 0), (2**32 - 1, 123), (77, 40_000_000)):
        assert drawn_blocks(seed, first, 5).tolist() == [by_hand(first + i, seed) for i in range(5)]
    counts = np.bincount(drawn_blocks(3, 0, 100 * POOL_BLOCKS), minlength=POOL_BLOCKS)
    assert counts.min() > 50
    assert counts.max() < 150
