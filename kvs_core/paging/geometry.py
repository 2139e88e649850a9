"""The only place where tokens become bytes and offsets, for the writer and the reader of a page alike.

A page is ``page_tokens`` consecutive positions of ONE attention layer, contiguous. Per KV head it holds a K part, then
a V part; a part is its head's rows in position order, each row ``head_dim`` values in the blocks of its ``KvType``:

    page   | head 0: K rows 0..P-1 | head 0: V rows 0..P-1 | head 1: K rows ... | ...

That order is ``PageOrder.ROWS``; a device may keep its pages in another. Whatever is saved carries the layout id.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvs_core.errors import CapabilityError
from kvs_core.units import ceil_div

GROUP_PAGES = 4
"""Pages of a group: the unit of attention partials, of residency and of copies."""

SEGMENT_GROUPS = 16
"""Groups folded, in logical order, into one segment; segments fold in order at the end."""


class KvType(Enum):
    """How K or V is stored. ``value`` is llama-server's name; blocks are ggml's (formats as in ggml-common.h).

    name    block values  block bytes
    """

    F32 = ("f32", 1, 4)
    F16 = ("f16", 1, 2)
    BF16 = ("bf16", 1, 2)
    Q8_0 = ("q8_0", 32, 34)
    Q4_0 = ("q4_0", 32, 18)
    Q4_1 = ("q4_1", 32, 20)
    Q5_0 = ("q5_0", 32, 22)
    Q5_1 = ("q5_1", 32, 24)
    IQ4_NL = ("iq4_nl", 32, 18)

    def __init__(self, label: str, block_values: int, block_bytes: int) -> None:
        self.label = label
        self.block_values = block_values
        self.block_bytes = block_bytes

    @property
    def quantised(self) -> bool:
        """True for the block formats, whose rows are stored rotated (see ``PageGeometry.rotation``)."""
        return self.block_values > 1

    def row_bytes(self, values: int) -> int:
        """Bytes of ``values`` consecutive values; they must fill whole blocks."""
        if values % self.block_values:
            raise CapabilityError(
                f"KV type {self.label} stores blocks of {self.block_values} values, "
                f"which do not divide a head of {values}; use f16, bf16 or f32"
            )
        return values // self.block_values * self.block_bytes

    @classmethod
    def parse(cls, label: str) -> KvType:
        """The type of that llama-server name; ``CapabilityError`` names the known ones."""
        for kv_type in cls:
            if kv_type.label == label:
                return kv_type
        known = ", ".join(kv_type.label for kv_type in cls)
        raise CapabilityError(f"KV type {label!r} is not known; use one of {known}")


class PageOrder(Enum):
    """Order of the bytes within a page; the number of bytes is the same in all. The name is part of the layout id.

    ROWS       per head the K rows, then the V rows, as the module's picture shows
    FRAGMENTS  per head the K part, then the V part, each in the order in which tensor cores take it; of q8_0 keys and
               q4_0 values of heads of 256 in pages of 256 (``cuda_src/common/fragments.cuh``)
    """

    ROWS = "rows"
    FRAGMENTS = "fragments"


def hadamard_block(kv_type: KvType, head_dim: int, *, is_key: bool) -> int:
    """Width of the orthonormal Walsh-Hadamard blocks a stored row is rotated by; 0 = stored as is.

    The rule of llama.cpp: quantised types with a head size that is a multiple of 64 only; K heads in blocks of the
    largest ``64 * 2**m`` that divides the head size, V heads in blocks of 64.
    """
    if not kv_type.quantised or head_dim % 64:
        return 0
    if not is_key:
        return 64
    block = 64
    while head_dim % (block * 2) == 0:
        block *= 2
    return block


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Shape and bytes of the pages of one attention layer.

    ``k_rotation`` and ``v_rotation`` are Hadamard block widths (0: none). They are part of the layout: rows written
    with one rotation cannot be read with another.
    """

    page_tokens: int
    kv_heads: int
    k_dim: int
    v_dim: int
    k_type: KvType
    v_type: KvType
    k_rotation: int = 0
    v_rotation: int = 0
    order: PageOrder = PageOrder.ROWS

    def __post_init__(self) -> None:
        if self.page_tokens < 1 or self.page_tokens % 32:
            raise CapabilityError(f"a page of {self.page_tokens} tokens: --kv-page-tokens must be a multiple of 32")
        if self.kv_heads < 1:
            raise CapabilityError(f"a layer with {self.kv_heads} KV heads has no pages")
        self.k_type.row_bytes(self.k_dim)
        self.v_type.row_bytes(self.v_dim)

    @property
    def k_row_bytes(self) -> int:
        """Bytes of one head's K row."""
        return self.k_type.row_bytes(self.k_dim)

    @property
    def v_row_bytes(self) -> int:
        """Bytes of one head's V row."""
        return self.v_type.row_bytes(self.v_dim)

    @property
    def k_part_bytes(self) -> int:
        """Bytes of one head's K part."""
        return self.page_tokens * self.k_row_bytes

    @property
    def v_part_bytes(self) -> int:
        """Bytes of one head's V part."""
        return self.page_tokens * self.v_row_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's K and V parts, and the distance from one head to the next."""
        return self.k_part_bytes + self.v_part_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.kv_heads * self.head_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes that one position of this layer takes."""
        return self.kv_heads * (self.k_row_bytes + self.v_row_bytes)

    def k_offset(self, head: int, row: int = 0) -> int:
        """Byte offset, within a page, of K row ``row`` of ``head``."""
        return head * self.head_bytes + row * self.k_row_bytes

    def v_offset(self, head: int, row: int = 0) -> int:
        """Byte offset, within a page, of V row ``row`` of ``head``."""
        return head * self.head_bytes + self.k_part_bytes + row * self.v_row_bytes

    @property
    def layout_id(self) -> str:
        """Name of the byte order; equal ids mean that pages can be exchanged as they are."""
        return (
            f"{self.order.value}-p{self.page_tokens}-h{self.kv_heads}"
            f"-k{self.k_dim}.{self.k_type.label}.r{self.k_rotation}"
            f"-v{self.v_dim}.{self.v_type.label}.r{self.v_rotation}"
        )

    def pages_of(self, tokens: int) -> int:
        """Pages that hold ``tokens`` positions."""
        return ceil_div(tokens, self.page_tokens)


def group_of(page: int) -> int:
    """The group that a page belongs to."""
    return page // GROUP_PAGES
