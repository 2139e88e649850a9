"""Random legal and illegal moves on an arena against a dumb model: a map with one entry per byte."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvs_core.memory.arena import Arena, ArenaPlan, Region, RegionRequest
from kvs_core.memory.lease import ArenaError, Lease, View
from tests.support.examples import examples

NAMES = st.sampled_from(["a", "b", "c", "pool"])
ALIGNMENTS = st.sampled_from([1, 2, 8, 32])
SIZES = st.integers(1, 48)


class Model:
    """What an arena is, byte by byte: ``owners[i]`` is the region that owns byte i, "" if none does."""

    def __init__(self, total_bytes: int) -> None:
        self.owners = [""] * total_bytes
        self.persistent: set[str] = set()

    def bytes_of(self, name: str) -> list[int]:
        return [i for i, owner in enumerate(self.owners) if owner == name]

    def fits(self, offset: int, size_bytes: int) -> bool:
        return all(self.owners[i : i + 1] == [""] for i in range(offset, offset + size_bytes))

    def names(self) -> set[str]:
        return set(self.owners) - {""}


class ArenaMachine(RuleBasedStateMachine):
    """Every placement, refusal and stale view is what the byte map says; a refused move changes nothing."""

    @initialize(total_bytes=st.integers(1, 160))
    def start(self, total_bytes: int) -> None:
        self.arena = Arena(total_bytes)
        self.total_bytes = total_bytes
        self.now = Model(total_bytes)
        self.next: Model | None = None
        self.generation = 0
        self.transaction = self.arena.begin()
        self.transaction.rollback()
        self.leases: list[Lease] = []
        self.views: list[tuple[View, bool]] = []

    def model(self) -> Model:
        """The layout in the making. The rules that call this run only while there is one."""
        assert self.next is not None
        return self.next

    def starts(self, name: str, alignment: int, persistent: bool) -> list[int] | None:
        """Every offset at which a region may start, by brute force; None if the reservation is illegal."""
        model = self.model()
        if name in model.names():
            return None
        if name not in self.now.persistent:
            return list(range(0, self.total_bytes, alignment))
        offset = self.now.bytes_of(name)[0]
        return [offset] if persistent and offset % alignment == 0 else None

    def take(self, region: Region, offset: int, size_bytes: int) -> None:
        assert (region.offset, region.size_bytes) == (offset, size_bytes)
        model = self.model()
        model.owners[offset : offset + size_bytes] = [region.id] * size_bytes
        if region.persistent:
            model.persistent.add(region.id)

    @rule()
    def begin(self) -> None:
        if self.next is not None:
            with pytest.raises(ArenaError):
                self.arena.begin()
        else:
            self.transaction = self.arena.begin()
            self.next = Model(self.total_bytes)

    @precondition(lambda self: self.next is not None)
    @rule(name=NAMES, size_bytes=SIZES, alignment=ALIGNMENTS, persistent=st.booleans(), at_end=st.booleans())
    def reserve(self, name: str, size_bytes: int, alignment: int, persistent: bool, at_end: bool) -> None:
        starts = [o for o in self.starts(name, alignment, persistent) or [] if self.model().fits(o, size_bytes)]
        request = RegionRequest(name, size_bytes, alignment, persistent)
        if not starts:
            with pytest.raises(ArenaError):
                self.transaction.reserve(request, at_end=at_end)
        else:
            offset = starts[-1] if at_end else starts[0]
            self.take(self.transaction.reserve(request, at_end=at_end), offset, size_bytes)

    @precondition(lambda self: self.next is not None)
    @rule(name=NAMES, unit_bytes=SIZES, alignment=ALIGNMENTS, persistent=st.booleans())
    def reserve_rest(self, name: str, unit_bytes: int, alignment: int, persistent: bool) -> None:
        model = self.model()
        units = dict.fromkeys(self.starts(name, alignment, persistent) or [], 0)
        for offset in units:
            while model.fits(offset, (units[offset] + 1) * unit_bytes):
                units[offset] += 1
        most = max(units.values(), default=0)
        arguments = {"unit_bytes": unit_bytes, "alignment": alignment}
        if most == 0:
            with pytest.raises(ArenaError):
                self.transaction.reserve_rest(name, persistent=persistent, **arguments)
        else:
            offset = min(o for o, count in units.items() if count == most)
            region = self.transaction.reserve_rest(name, persistent=persistent, **arguments)
            self.take(region, offset, most * unit_bytes)

    @precondition(lambda self: self.next is not None)
    @rule(name=NAMES, longer=st.integers(-2, 8), at_end=st.booleans())
    def keep(self, name: str, longer: int, at_end: bool) -> None:
        """Reserve a region of the current plan again, perhaps with another end."""
        size_bytes = len(self.now.bytes_of(name))
        if size_bytes:
            self.reserve(name, max(1, size_bytes + longer), 1, name in self.now.persistent, at_end)

    @rule(names=st.lists(NAMES, unique=True), sizes=st.lists(SIZES, min_size=4, max_size=4), data=st.data())
    def new_layout(self, names: list[str], sizes: list[int], data: st.DataObject) -> None:
        """A whole transaction in one rule, so that an example sees many layouts."""
        if self.next is None:
            self.begin()
        for name in sorted(self.now.persistent):
            self.keep(name, data.draw(st.integers(-1, 1)), data.draw(st.booleans()))
        for name, size_bytes in zip(names, sizes, strict=False):
            persistent, at_end = data.draw(st.integers(0, 5)) == 0, data.draw(st.booleans())
            self.reserve(name, size_bytes, data.draw(ALIGNMENTS), persistent, at_end)
        self.commit()

    def survives(self, name: str) -> bool:
        old, new = self.now.bytes_of(name), self.model().bytes_of(name)
        return new[: len(old)] == old

    @rule()
    def commit(self) -> None:
        if (
            self.next is None
            or not self.now.persistent <= self.next.persistent
            or not all(self.survives(lease.region_id) for lease in self.leases)
        ):
            with pytest.raises(ArenaError):
                self.transaction.commit()
            return
        plan = self.transaction.commit()
        assert plan == self.arena.plan
        self.views = [(view, alive and self.survives(view.region_id)) for view, alive in self.views]
        self.now, self.next = self.next, None
        self.generation += 1
        for region in plan.regions:
            self.views.append((self.arena.view(region.id), True))
            self.views.append((self.arena.view(region.id, size_bytes=1), True))

    @rule()
    def rollback(self) -> None:
        if self.next is None:
            with pytest.raises(ArenaError):
                self.transaction.rollback()
        else:
            self.transaction.rollback()
            self.next = None

    @rule(name=NAMES)
    def reserve_without_transaction(self, name: str) -> None:
        if self.next is None:
            with pytest.raises(ArenaError):
                self.transaction.reserve(RegionRequest(name, 1))
            with pytest.raises(ArenaError):
                self.transaction.reserve_rest(name, unit_bytes=1)

    @rule(name=NAMES, first_byte=st.sampled_from([-1, 0, 1, 7]), size_bytes=st.integers(0, 12))
    def view(self, name: str, first_byte: int, size_bytes: int) -> None:
        owned = self.now.bytes_of(name)
        window = owned[first_byte : first_byte + size_bytes] if first_byte >= 0 else []
        if not window or len(window) < size_bytes:
            with pytest.raises(ArenaError):
                self.arena.view(name, first_byte=first_byte, size_bytes=size_bytes)
        else:
            view = self.arena.view(name, first_byte=first_byte, size_bytes=size_bytes)
            assert (view.offset, view.end) == (window[0], window[-1] + 1)
            self.views.append((view, True))

    @rule(name=NAMES)
    def lease_region(self, name: str) -> None:
        if name in self.now.names():
            self.leases.append(self.arena.lease(name))
        else:
            with pytest.raises(ArenaError):
                self.arena.lease(name)

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def lease_view(self, data: st.DataObject) -> None:
        view, alive = data.draw(st.sampled_from(self.views))
        if alive:
            self.leases.append(self.arena.lease(view))
        else:
            with pytest.raises(ArenaError):
                self.arena.lease(view)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        lease.release()
        lease.release()
        with pytest.raises(ArenaError):
            _ = lease.view

    @invariant()
    def plan_is_the_byte_map(self) -> None:
        owners = [""] * self.total_bytes
        for region in self.arena.plan.regions:
            owners[region.offset : region.end] = [region.id] * region.size_bytes
        assert owners == self.now.owners
        assert self.arena.plan.free_bytes == owners.count("")
        assert self.arena.generation == self.generation

    @invariant()
    def views_are_as_alive_as_their_bytes(self) -> None:
        for view, alive in self.views:
            assert self.arena.is_current(view) == alive
        for lease in self.leases:
            assert set(self.now.owners[lease.view.offset : lease.view.end]) == {lease.region_id}


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


def region(name: str, offset: int, size_bytes: int) -> Region:
    return Region(name, offset, size_bytes, 1, False)


@pytest.mark.parametrize(
    "regions",
    [
        (region("a", 0, 10), region("b", 9, 10)),
        (region("b", 10, 10), region("a", 0, 10)),
        (region("a", 0, 10), region("a", 10, 10)),
        (region("a", 91, 10),),
    ],
    ids=["overlap", "order", "same id", "outside"],
)
def test_malformed_plan_is_not_born(regions: tuple[Region, ...]) -> None:
    """A plan's regions are in order, disjoint, unique and inside the arena."""
    with pytest.raises(ArenaError):
        ArenaPlan(100, regions)


@pytest.mark.parametrize("total_bytes", [0, -1])
def test_empty_arena_is_refused(total_bytes: int) -> None:
    """An arena has at least one byte."""
    with pytest.raises(ArenaError):
        Arena(total_bytes)


@pytest.mark.parametrize(
    ("name", "size_bytes", "alignment"), [("", 1, 1), ("a", 0, 1), ("a", -1, 1), ("a", 1, 0), ("a", 1, -2), ("a", 1, 3)]
)
def test_malformed_request_is_not_born(name: str, size_bytes: int, alignment: int) -> None:
    """A request has a name, bytes, and a power of two as alignment."""
    with pytest.raises(ArenaError):
        RegionRequest(name, size_bytes, alignment)


@pytest.mark.parametrize("offset", [-8, 4])
def test_unaligned_region_is_not_born(offset: int) -> None:
    """A region starts at a multiple of its alignment, inside the arena."""
    with pytest.raises(ArenaError):
        Region("a", offset, 8, 8, False)


@pytest.mark.parametrize("ending", ["commit", "leave", "raise"])
def test_block_left_uncommitted_rolls_back(ending: str) -> None:
    """A ``with`` block keeps the new layout only if it committed; either way the next transaction can begin."""
    arena = Arena(100)
    with suppress(KeyError), arena.begin() as transaction:
        transaction.reserve(RegionRequest("a", 10))
        if ending == "raise":
            raise KeyError
        if ending == "commit":
            transaction.commit()
    assert [region.id for region in arena.plan.regions] == (["a"] if ending == "commit" else [])
    arena.begin().rollback()


def test_refused_commit_can_be_retried() -> None:
    """A commit refused for a lease names the region, changes nothing, and goes through once the lease is released."""
    arena = Arena(100)
    with arena.begin() as transaction:
        transaction.reserve(RegionRequest("scratch", 10))
        transaction.commit()
    before, lease = arena.plan, arena.lease("scratch")
    transaction = arena.begin()
    with pytest.raises(ArenaError, match="scratch"):
        transaction.commit()
    assert (arena.plan, arena.generation, lease.view.generation) == (before, 1, 1)
    lease.release()
    assert transaction.commit().regions == ()
    assert arena.generation == 2


def test_old_transaction_does_not_touch_the_new_one() -> None:
    """A transaction that is over stays refused while another one is open."""
    arena = Arena(100)
    old = arena.begin()
    old.rollback()
    new = arena.begin()
    with pytest.raises(ArenaError):
        old.reserve(RegionRequest("a", 10))
    with pytest.raises(ArenaError):
        old.commit()
    assert new.reserve(RegionRequest("a", 10)).offset == 0


def test_rest_takes_the_lowest_of_equal_places() -> None:
    """Places that hold as many units are equal, however many bytes they leave over: the lowest is taken."""
    arena = Arena(32)
    with arena.begin() as transaction:
        transaction.reserve(RegionRequest("gone", 10, alignment=1))
        transaction.reserve(RegionRequest("wall", 10, alignment=1, persistent=True))
        transaction.commit()
    with arena.begin() as transaction:
        transaction.reserve(RegionRequest("wall", 10, alignment=1, persistent=True))
        assert transaction.reserve_rest("rest", unit_bytes=10, alignment=1).offset == 0
