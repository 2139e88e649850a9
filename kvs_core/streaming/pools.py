"""Pools: the slots of a cache's pages, as bytes.

Most layers share one pool, through whose ring pages stream. Layers that slide never stream and need a number of slots
that no context changes; where their pages have another shape, they lie in a pool of their own, which has no ring.

    shared pool   | ring | resident pages of layers that see everything |
    own pool      | resident pages of layers that slide |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvs_core.device.operands import Buffer
from kvs_core.paging.slots import PageId, PageTable
from kvs_core.units import ceil_div


class Pools:
    """The tables and the memory of both. In each, ``resident capacity + ring = pool``.

    shared  the table of the pool in which pages stream
    own     that of the layers that slide; without slots where they share
    """

    def __init__(self, is_apart: Sequence[bool]) -> None:
        """``is_apart``: by layer, whether its pages lie in the own pool of those that slide."""
        self.shared = PageTable(0)
        self.own = PageTable(0)
        self._is_apart = tuple(is_apart)
        self._memory: Buffer | None = None
        self._own_memory: Buffer | None = None

    def __len__(self) -> int:
        return len(self.shared) + len(self.own)

    def __iter__(self) -> Iterator[PageId]:
        yield from self.shared
        yield from self.own

    @property
    def is_bound(self) -> bool:
        """Whether there is memory."""
        return self._memory is not None

    def bind(self, memory: Buffer, own: Buffer | None) -> None:
        """Use this memory, uint8 [slots, page_bytes] each. Resident pages lie in what was used before and in this."""
        assert (own is not None) == any(self._is_apart)
        self._memory, self._own_memory = memory, own
        self.shared.resize(ring_slots=self.shared.ring_slots, pool_slots=memory.shape[0])
        if own is not None:
            self.own.resize(ring_slots=0, pool_slots=own.shape[0])

    def unbind(self) -> None:
        """The memory is gone."""
        self._memory = self._own_memory = None

    @property
    def slots(self) -> int:
        """Of the shared pool's memory, those that are lent included."""
        assert self._memory is not None, "no layout is bound"
        return int(self._memory.shape[0])

    def table(self, layer: int) -> PageTable:
        """The table of a layer's pages."""
        return self.own if self._is_apart[layer] else self.shared

    def memory(self, layer: int) -> Buffer:
        """The pool of a layer's pages."""
        memory = self._own_memory if self._is_apart[layer] else self._memory
        assert memory is not None, "no layout is bound"
        return memory

    def view(self, first_slot: int, slots: int) -> Buffer:
        """The bytes of slots of the shared pool."""
        assert self._memory is not None
        return self._memory[first_slot : first_slot + slots].reshape(-1)

    def holds(self, page: PageId) -> bool:
        """True if the page is resident."""
        return self.table(page.layer).holds(page)

    def assign(self, page: PageId) -> int:
        """Make a page resident; returns its slot, in its layer's pool."""
        return self.table(page.layer).assign(page)

    def has_free(self, layer: int) -> bool:
        """Whether one more page of that layer can be made resident."""
        table = self.table(layer)
        return len(table) < table.pool_slots - table.ring_slots

    @contextmanager
    def borrow(self, size_bytes: int) -> Iterator[Buffer]:
        """That many bytes of the larger pool, or all it has, of slots that are none until they are given back: uint8.

        No page is resident when this begins. The ring is given up.
        """
        assert len(self) == 0, "pages are resident"
        table, memory = max(
            ((table, memory) for table, memory in ((self.shared, self._memory), (self.own, self._own_memory))
             if memory is not None),
            key=lambda each: each[0].pool_slots * int(each[1].shape[1]),
        )
        slots = min(table.pool_slots, ceil_div(size_bytes, int(memory.shape[1])))
        table.resize(ring_slots=slots, pool_slots=table.pool_slots)
        try:
            yield memory[:slots].reshape(-1)
        finally:
            table.resize(ring_slots=0, pool_slots=table.pool_slots)

    def release(self, page: PageId) -> Buffer:
        """The page is resident no more; returns the bytes of what was its slot."""
        slot = self.table(page.layer).release(page)
        return self.memory(page.layer)[slot : slot + 1].reshape(-1)

    def bytes_of(self, page: PageId) -> Buffer:
        """The bytes of a resident page."""
        slot = self.table(page.layer).slot_of(page)
        return self.memory(page.layer)[slot : slot + 1].reshape(-1)
