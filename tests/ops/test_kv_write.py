"""Rows of K and V land where the geometry says, and nowhere else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.device.host.ops import kv_codec, kv_write
from kvs_core.paging.geometry import KvType, PageGeometry
from kvs_core.paging.spans import RowSpan


@pytest.mark.parametrize(
    ("k_type", "v_type"), [(KvType.F32, KvType.F16), (KvType.Q8_0, KvType.Q4_0), (KvType.BF16, KvType.Q5_1)]
)
@given(st.integers(0, 60), st.integers(1, 70), st.permutations(range(5)), st.integers(0, 2**32 - 1))
def test_rows_land_in_their_pages(
    k_type: KvType, v_type: KvType, first: int, rows: int, slots: list[int], seed: int
) -> None:
    """Each row's bytes are at its head's offset in its page's slot; every other byte is as it was."""
    geometry = PageGeometry(32, 2, 64, 32, k_type, v_type)
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((rows, 2, 64)).astype(np.float32)
    v = rng.standard_normal((rows, 2, 32)).astype(np.float32)
    pool = rng.integers(0, 256, (5, geometry.page_bytes), dtype=np.uint8)
    expected = pool.copy()
    spans = []
    for row in range(rows):
        page, page_row = divmod(first + row, 32)
        if row == 0 or page_row == 0:
            spans.append(RowSpan(slots[page], page_row, row, min(32 - page_row, rows - row)))
        for head in range(2):
            for offset, kv_type, values in (
                (geometry.k_offset(head, page_row), k_type, k[row, head]),
                (geometry.v_offset(head, page_row), v_type, v[row, head]),
            ):
                stored = kv_codec.encode(kv_type, values)
                expected[slots[page], offset : offset + len(stored)] = stored
    kv_write.kv_write(k, v, pool, geometry, spans)
    np.testing.assert_array_equal(pool, expected)


def test_zero_page_clears_one_slot() -> None:
    """The slot's page is zero, the other slots are as they were."""
    geometry = PageGeometry(32, 1, 32, 32, KvType.Q4_0, KvType.F16)
    pool = np.full((3, geometry.page_bytes), 0xFF, np.uint8)
    kv_write.zero_page(pool, geometry, 1)
    assert not pool[1].any()
    assert (pool[[0, 2]] == 0xFF).all()
