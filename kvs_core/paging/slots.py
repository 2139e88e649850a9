"""Which slot of the KV pool holds which page: the table of resident pages, and the ring's slot states.

    slots   | ring: 0 .. ring-1 | resident pages and free slots: ring .. pool-1 |

The ring lies at the bottom so that its slots are consecutive; resident pages take the highest free slot, so a ring that
grows, or a pool that shrinks at its end, meets few of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class PageId:
    """Page ``page`` of attention layer ``layer``."""

    layer: int
    page: int


class PageTable:
    """Resident pages and their slots. ``resident capacity + ring = pool`` always.

    Moves: assign (a free slot to a page), release (its slot is free again), move_to (a given free slot),
    resize (refused while a resident page lies where the ring or the cut-off part would be).
    A refused move raises and changes nothing.
    """

    def __init__(self, pool_slots: int) -> None:
        self.pool_slots = pool_slots
        self.ring_slots = 0
        self._slot_of: dict[PageId, int] = {}
        self._page_at: dict[int, PageId] = {}
        self._free = [-slot for slot in range(pool_slots)]   # a heap whose least entry is the highest slot
        heapq.heapify(self._free)

    def __len__(self) -> int:
        return len(self._slot_of)

    def __iter__(self) -> Iterator[PageId]:
        return iter(self._slot_of)

    def slot_of(self, page: PageId) -> int:
        """The slot of a resident page; ``KeyError`` if it is not resident."""
        return self._slot_of[page]

    def slots_of(self, layer: int, pages: range) -> list[int]:
        """The slots of resident pages of one layer."""
        return [self._slot_of[PageId(layer, page)] for page in pages]

    def holds(self, page: PageId) -> bool:
        """True if the page is resident."""
        return page in self._slot_of

    def assign(self, page: PageId) -> int:
        """Make a page resident in the highest free slot."""
        assert page not in self._slot_of, page
        slot = self._take_highest()
        self._bind(page, slot)
        return slot

    def release(self, page: PageId) -> int:
        """The page is resident no more; returns the slot that is free now."""
        slot = self._slot_of.pop(page)
        del self._page_at[slot]
        heapq.heappush(self._free, -slot)
        return slot

    def free_slots(self, within: range) -> list[int]:
        """The free slots within a range, ascending."""
        return [slot for slot in within if self._is_free(slot)]

    def move_to(self, page: PageId, slot: int) -> None:
        """Give a resident page that free slot."""
        assert self._is_free(slot), slot
        old = self._slot_of[page]
        del self._page_at[old]
        self._bind(page, slot)
        heapq.heappush(self._free, -old)

    def in_the_way(self, *, ring_slots: int, pool_slots: int) -> list[PageId]:
        """Resident pages in slots that such a ring and such a pool would not leave to them."""
        return [page for slot, page in sorted(self._page_at.items()) if slot < ring_slots or slot >= pool_slots]

    def resize(self, *, ring_slots: int, pool_slots: int) -> None:
        """Change both bounds."""
        assert 0 <= ring_slots <= pool_slots, (ring_slots, pool_slots)
        assert not self.in_the_way(ring_slots=ring_slots, pool_slots=pool_slots)
        self.ring_slots, self.pool_slots = ring_slots, pool_slots
        self._free = [-slot for slot in range(ring_slots, pool_slots) if slot not in self._page_at]
        heapq.heapify(self._free)

    def _is_free(self, slot: int) -> bool:
        return self.ring_slots <= slot < self.pool_slots and slot not in self._page_at

    def _take_highest(self) -> int:
        while self._free:
            slot = -heapq.heappop(self._free)
            if self._is_free(slot):
                return slot
        raise AssertionError(f"no free slot: {len(self)} resident, {self.ring_slots} ring, {self.pool_slots} in all")

    def _bind(self, page: PageId, slot: int) -> None:
        self._slot_of[page] = slot
        self._page_at[slot] = page


class SlotState(Enum):
    """State of one ring slot."""

    EMPTY = "empty"
    FILLING = "filling"
    READY = "ready"
    READING = "reading"


_LEGAL = {
    (SlotState.EMPTY, SlotState.FILLING),     # a copy into it is enqueued
    (SlotState.FILLING, SlotState.READY),     # attention has been told to wait for that copy
    (SlotState.READY, SlotState.READING),     # an attention call that reads it is enqueued
    (SlotState.READING, SlotState.EMPTY),     # its consumed fence is recorded: the next copy waits for that
    (SlotState.FILLING, SlotState.EMPTY),     # dropped before it was read (a changed schedule, an abandoned step)
    (SlotState.READY, SlotState.EMPTY),
}


class Ring:
    """States of the ring's slots; a move that is not legal raises."""

    def __init__(self, slots: int) -> None:
        self._states = [SlotState.EMPTY] * slots

    def __len__(self) -> int:
        return len(self._states)

    def state(self, slot: int) -> SlotState:
        """The state of one slot."""
        return self._states[slot]

    def all_empty(self, slots: range) -> bool:
        """True if a copy into these consecutive slots may be enqueued."""
        return self._states[slots.start : slots.stop].count(SlotState.EMPTY) == len(slots)

    def move(self, slots: range, to: SlotState) -> None:
        """Move consecutive slots, which are in one state, to another."""
        states = self._states[slots.start : slots.stop]
        assert states, "no slot to move"
        assert states.count(states[0]) == len(slots), f"ring slots {slots} are not in one state"
        assert (states[0], to) in _LEGAL, f"ring slots {slots}: {states[0].value} -> {to.value}"
        self._states[slots.start : slots.stop] = [to] * len(slots)

    def resize(self, slots: int) -> None:
        """Grow with empty slots, or shrink by empty ones."""
        assert all(state is SlotState.EMPTY for state in self._states[slots:])
        self._states = self._states[:slots] + [SlotState.EMPTY] * (slots - len(self._states))
