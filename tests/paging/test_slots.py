"""Random legal and illegal moves on the page table and the ring against dumb models: one list entry per slot."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvs_core.paging.slots import PageId, PageTable, Ring, SlotState

PAGES = st.builds(PageId, st.integers(0, 1), st.integers(0, 5))
SLOTS = st.integers(-1, 12)


class TableMachine(RuleBasedStateMachine):
    """A table is a list of slots, each in the ring or with a page or without; a refused move changes nothing."""

    @initialize(pool=st.integers(0, 10))
    def start(self, pool: int) -> None:
        self.table = PageTable(pool)
        self.slots: list[PageId | None] = [None] * pool
        self.ring = 0

    def free(self) -> list[int]:
        return [slot for slot in range(self.ring, len(self.slots)) if self.slots[slot] is None]

    @rule(page=PAGES)
    def assign(self, page: PageId) -> None:
        if page in self.slots or not self.free():
            with pytest.raises(AssertionError):
                self.table.assign(page)
        else:
            slot = self.table.assign(page)
            assert slot == max(self.free())
            self.slots[slot] = page

    @rule(page=PAGES)
    def release(self, page: PageId) -> None:
        if page not in self.slots:
            with pytest.raises(KeyError):
                self.table.release(page)
        else:
            slot = self.slots.index(page)
            assert self.table.release(page) == slot
            self.slots[slot] = None

    @rule(page=PAGES, slot=SLOTS)
    def move_to(self, page: PageId, slot: int) -> None:
        if slot not in self.free():
            with pytest.raises(AssertionError):
                self.table.move_to(page, slot)
        elif page not in self.slots:
            with pytest.raises(KeyError):
                self.table.move_to(page, slot)
        else:
            old = self.slots.index(page)
            self.table.move_to(page, slot)
            self.slots[old], self.slots[slot] = None, page

    @rule(ring=SLOTS, pool=SLOTS)
    def resize(self, ring: int, pool: int) -> None:
        pages = [page for slot, page in enumerate(self.slots) if page and (slot < ring or slot >= pool)]
        if not 0 <= ring <= pool or pages:
            with pytest.raises(AssertionError):
                self.table.resize(ring_slots=ring, pool_slots=pool)
        else:
            self.table.resize(ring_slots=ring, pool_slots=pool)
            self.slots = (self.slots + [None] * pool)[:pool]
            self.ring = ring

    @rule(ring=SLOTS, pool=SLOTS)
    def in_the_way(self, ring: int, pool: int) -> None:
        expected = [page for slot, page in enumerate(self.slots) if page and not ring <= slot < pool]
        assert self.table.in_the_way(ring_slots=ring, pool_slots=pool) == expected

    @rule(first=SLOTS, stop=SLOTS)
    def free_slots(self, first: int, stop: int) -> None:
        within = [slot for slot in self.free() if first <= slot < stop]
        assert self.table.free_slots(range(first, stop)) == within

    @invariant()
    def table_is_the_list(self) -> None:
        pages = {page: slot for slot, page in enumerate(self.slots) if page}
        assert len(self.table) == len(pages)
        assert set(self.table) == set(pages)
        assert {page: self.table.slot_of(page) for page in pages} == pages
        assert (self.table.ring_slots, self.table.pool_slots) == (self.ring, len(self.slots))
        for layer in range(2):
            for page in (PageId(layer, number) for number in range(6)):
                assert self.table.holds(page) == (page in pages)


TestTableMachine = TableMachine.TestCase

NEXT = {
    SlotState.EMPTY: {SlotState.FILLING},
    SlotState.FILLING: {SlotState.READY, SlotState.EMPTY},
    SlotState.READY: {SlotState.READING, SlotState.EMPTY},
    SlotState.READING: {SlotState.EMPTY},
}


class RingMachine(RuleBasedStateMachine):
    """A ring is a list of states; consecutive slots of one state move together, others not at all."""

    @initialize(slots=st.integers(0, 6))
    def start(self, slots: int) -> None:
        self.ring = Ring(slots)
        self.states = [SlotState.EMPTY] * slots

    @rule(first=st.integers(0, 6), count=st.integers(0, 6), to=st.sampled_from(SlotState))
    def move(self, first: int, count: int, to: SlotState) -> None:
        slots = range(first, min(first + count, len(self.states)))
        before = {self.states[slot] for slot in slots}
        if len(before) == 1 and to in NEXT[before.pop()]:
            self.ring.move(slots, to)
            for slot in slots:
                self.states[slot] = to
        else:
            with pytest.raises(AssertionError):
                self.ring.move(slots, to)

    @rule(slots=st.integers(0, 6))
    def resize(self, slots: int) -> None:
        if any(state is not SlotState.EMPTY for state in self.states[slots:]):
            with pytest.raises(AssertionError):
                self.ring.resize(slots)
        else:
            self.ring.resize(slots)
            self.states = (self.states + [SlotState.EMPTY] * slots)[:slots]

    @invariant()
    def ring_is_the_list(self) -> None:
        assert len(self.ring) == len(self.states)
        assert [self.ring.state(slot) for slot in range(len(self.states))] == self.states
        for slot in range(len(self.states)):
            assert self.ring.all_empty(range(slot)) == all(s is SlotState.EMPTY for s in self.states[:slot])


TestRingMachine = RingMachine.TestCase

# How to bring an empty slot into each state.
WAYS: dict[SlotState, list[SlotState]] = {
    SlotState.EMPTY: [],
    SlotState.FILLING: [SlotState.FILLING],
    SlotState.READY: [SlotState.FILLING, SlotState.READY],
    SlotState.READING: [SlotState.FILLING, SlotState.READY, SlotState.READING],
}


@pytest.mark.parametrize("before", list(SlotState))
@pytest.mark.parametrize("to", list(SlotState))
def test_every_move_of_a_slot_is_legal_or_refused(before: SlotState, to: SlotState) -> None:
    """A copy goes into an empty slot only, a read follows its copy, and whatever is in a slot can be dropped."""
    ring = Ring(3)
    for state in WAYS[before]:
        ring.move(range(1, 3), state)
    if to in NEXT[before]:
        ring.move(range(1, 3), to)
        assert [ring.state(slot) for slot in range(3)] == [SlotState.EMPTY, to, to]
    else:
        with pytest.raises(AssertionError):
            ring.move(range(1, 3), to)
        assert [ring.state(slot) for slot in range(3)] == [SlotState.EMPTY, before, before]
