"""Pages as bytes: every byte of a page belongs to one row of one part, and the parts lie as the layout says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.errors import CapabilityError
from kvs_core.paging.geometry import GROUP_PAGES, KvType, PageGeometry, group_of, hadamard_block

# Block bytes as ggml-common.h has them: scales of two bytes, then the fifth bits, then the nibbles or bytes.
BLOCKS = {
    "f32": (1, 4), "f16": (1, 2), "bf16": (1, 2),
    "q8_0": (32, 2 + 32), "q4_0": (32, 2 + 16), "q4_1": (32, 4 + 16), "q5_0": (32, 2 + 4 + 16),
    "q5_1": (32, 4 + 4 + 16), "iq4_nl": (32, 2 + 16),
}

geometries = st.builds(
    PageGeometry,
    page_tokens=st.sampled_from([32, 64, 96]),
    kv_heads=st.integers(1, 4),
    k_dim=st.sampled_from([32, 64, 96]),
    v_dim=st.sampled_from([32, 64, 128]),
    k_type=st.sampled_from(KvType),
    v_type=st.sampled_from(KvType),
)


def test_types_have_the_blocks_of_ggml() -> None:
    """Every type is found by its name and stores the bytes that ggml stores; other names are refused with the list."""
    assert {kv_type.label: (kv_type.block_values, kv_type.block_bytes) for kv_type in KvType} == BLOCKS
    for label, (values, size) in BLOCKS.items():
        kv_type = KvType.parse(label)
        assert kv_type.quantised == (values > 1)
        assert kv_type.row_bytes(96) == 96 // values * size
    with pytest.raises(CapabilityError, match=r"q6_k.*iq4_nl"):
        KvType.parse("q6_k")


def test_a_head_that_does_not_fill_blocks_is_refused() -> None:
    """A quantised type needs whole blocks, and says which types do not."""
    with pytest.raises(CapabilityError, match=r"q4_0.*32.*80.*f16"):
        PageGeometry(32, 1, 80, 64, KvType.Q4_0, KvType.F16)
    with pytest.raises(CapabilityError, match=r"q8_0.*32.*80"):
        PageGeometry(32, 1, 64, 80, KvType.F16, KvType.Q8_0)
    assert PageGeometry(32, 1, 80, 80, KvType.F16, KvType.BF16).page_bytes == 32 * 80 * 4


@pytest.mark.parametrize("tokens", [0, -32, 16, 48, 255])
def test_page_tokens_are_a_multiple_of_32(tokens: int) -> None:
    """Other page sizes are refused by the flag's name."""
    with pytest.raises(CapabilityError, match="--kv-page-tokens"):
        PageGeometry(tokens, 1, 64, 64, KvType.F16, KvType.F16)


def test_a_layer_without_heads_is_refused() -> None:
    """No KV heads, no pages."""
    with pytest.raises(CapabilityError, match="0 KV heads"):
        PageGeometry(32, 0, 64, 64, KvType.F16, KvType.F16)


@given(geometries)
def test_every_byte_of_a_page_belongs_to_one_row(geometry: PageGeometry) -> None:
    """The offsets of all K and V rows tile the page: per head the K part, then the V part, rows in position order."""
    owners = np.zeros(geometry.page_bytes, int)
    at = 0
    for head in range(geometry.kv_heads):
        for offset, size in ((geometry.k_offset, geometry.k_row_bytes), (geometry.v_offset, geometry.v_row_bytes)):
            for row in range(geometry.page_tokens):
                assert offset(head, row) == at
                owners[at : at + size] += 1
                at += size
    assert at == geometry.page_bytes
    assert (owners == 1).all()
    assert geometry.page_bytes == geometry.page_tokens * geometry.token_bytes
    assert geometry.head_bytes == geometry.k_part_bytes + geometry.v_part_bytes


@given(geometries, st.integers(0, 10_000))
def test_pages_of_is_the_least_number_that_holds_the_tokens(geometry: PageGeometry, tokens: int) -> None:
    """No page too few and none too many."""
    pages = geometry.pages_of(tokens)
    assert pages * geometry.page_tokens >= tokens > (pages - 1) * geometry.page_tokens


@given(geometries, geometries)
def test_layout_ids_tell_geometries_apart(one: PageGeometry, other: PageGeometry) -> None:
    """Pages may be exchanged if, and only if, everything that decides their bytes is equal."""
    assert (one.layout_id == other.layout_id) == (one == other)


def test_rotation_is_part_of_the_layout() -> None:
    """The same types with another rotation are another layout."""
    ids = {
        PageGeometry(32, 1, 128, 128, KvType.Q8_0, KvType.Q4_0, k_rotation=k, v_rotation=v).layout_id
        for k in (0, 64, 128) for v in (0, 64, 128)
    }
    assert len(ids) == 9


@pytest.mark.parametrize(
    ("head_dim", "key_block", "value_block"),
    [(64, 64, 64), (80, 0, 0), (96, 0, 0), (128, 128, 64), (192, 64, 64), (256, 256, 64), (384, 128, 64)],
)
def test_rotation_follows_llama_cpp(head_dim: int, key_block: int, value_block: int) -> None:
    """Quantised heads of a multiple of 64: K in the largest 64 * 2**m that divides the head, V in 64; floats never."""
    assert hadamard_block(KvType.Q4_0, head_dim, is_key=True) == key_block
    assert hadamard_block(KvType.Q4_0, head_dim, is_key=False) == value_block
    assert hadamard_block(KvType.F16, head_dim, is_key=True) == 0
    assert hadamard_block(KvType.BF16, head_dim, is_key=False) == 0


@given(st.integers(0, 1000))
def test_groups_are_consecutive_pages(page: int) -> None:
    """A page lies within its group."""
    first = group_of(page) * GROUP_PAGES
    assert first <= page < first + GROUP_PAGES


def test_the_page_of_the_27b() -> None:
    """256 tokens of 4 heads of 256, K q8_0 and V q4_0: the byte counts that all sizes are quoted in."""
    geometry = PageGeometry(256, 4, 256, 256, KvType.Q8_0, KvType.Q4_0)
    assert geometry.kv_heads * geometry.k_part_bytes == 278_528
    assert geometry.kv_heads * geometry.v_part_bytes == 147_456
    assert geometry.page_bytes == 425_984
