"""Schedules copy every streamed page once, in order, and no timing of copies can lock them up or lose a page."""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.paging.geometry import GROUP_PAGES
from kvs_core.paging.schedule import PrefetchSchedule, Run, head_in_ring, plan_schedule
from kvs_core.paging.slabs import slab_of
from kvs_core.units import align_up, ceil_div

cuts = st.lists(st.integers(0, 20).map(lambda groups: groups * GROUP_PAGES), min_size=1, max_size=5)
rings = st.integers(1, 40)
lengths = st.integers(1, 30)


def ranges(of: list[int]) -> list[range]:
    return [range(cut) for cut in of]


def check(schedule: PrefetchSchedule, of: list[int], ring: int) -> None:
    """All streamed pages once, layer by layer in page order; every run within a slab and inside the ring."""
    copied = [(run.layer, page) for run in schedule.runs for page in range(run.first_page, run.end_page)]
    assert copied == [(layer, page) for layer, cut in enumerate(of) for page in range(cut)]
    assert schedule.streamed_pages == sum(of)
    for run in schedule.runs:
        assert run.pages >= 1
        assert run.end_page <= slab_of(run.first_page).end_page
        assert run.slots == range(run.first_slot, run.first_slot + run.pages)
        assert 0 <= run.first_slot <= run.first_slot + run.pages <= ring
    assert len(schedule.by_layer) == len(of)
    assert [run for runs in schedule.by_layer for run in runs] == list(schedule.runs)
    assert all(run.layer == layer for layer, runs in enumerate(schedule.by_layer) for run in runs)
    assert [end for layer in range(len(of)) for end in schedule.batches(layer)] == list(schedule.batch_ends)
    assert [run for batch in batches(schedule) for run in batch] == list(schedule.runs)
    for batch in batches(schedule):
        slots = [slot for run in batch for slot in run.slots]
        layers = {run.layer for run in batch}
        assert len(batch) == 1 or len(slots) <= ring // 5 or (len(layers) == 1 and len(slots) <= 3 * ring / 4)
        assert len(set(slots)) == len(slots)


def batches(schedule: PrefetchSchedule) -> list[tuple[Run, ...]]:
    """The runs of each batch."""
    ends = sorted(set(schedule.batch_ends))
    assert list(schedule.batch_ends) == sorted(schedule.batch_ends)
    assert all(start < end for start, end in enumerate(schedule.batch_ends))
    return [schedule.runs[start:end] for start, end in pairwise([0, *ends])]


@given(cuts, rings, lengths)
def test_every_streamed_page_is_copied_once_in_order(of: list[int], ring: int, length: int) -> None:
    """Runs cover the streamed pages, none longer than asked for, and follow each other around the ring."""
    schedule = plan_schedule(ranges(of), ring_slots=ring, run_pages=length)
    check(schedule, of, ring)
    assert all(run.pages <= length for run in schedule.runs)
    for run, following in pairwise(schedule.runs):
        assert following.first_slot in (0, run.first_slot + run.pages)


def turns(schedule: PrefetchSchedule) -> list[list[Run]]:
    """The runs of each turn around the ring."""
    found: list[list[Run]] = []
    for run in schedule.runs:
        if run.first_slot == 0:
            found.append([])
        found[-1].append(run)
    return found


@given(cuts, rings, lengths)
def test_turns_around_the_ring_are_few_and_equal(of: list[int], ring: int, length: int) -> None:
    """As few as in the whole ring, and all but the last of one size, in whole groups; the last one has the rest."""
    schedule = plan_schedule(ranges(of), ring_slots=ring, run_pages=length)
    found = [sum(run.pages for run in turn) for turn in turns(schedule)]
    unit = GROUP_PAGES if ring >= GROUP_PAGES else 1
    fewest = ceil_div(sum(of), ring // unit * unit)
    if fewest > 32:
        assert len(found) >= fewest
        return
    if fewest == 0:
        assert not found
        return
    size = align_up(ceil_div(sum(of), fewest), unit)
    whole, rest = divmod(sum(of), size)
    assert found == [size] * whole + [rest] * (rest > 0)
    assert len(found) <= fewest


def test_many_turns_leave_runs_whole() -> None:
    """A copy more in each of many turns would cost more than the slots that they leave empty."""
    schedule = plan_schedule([range(16, 720)] * 10, ring_slots=200, run_pages=64)
    assert {run.pages for run in schedule.runs} == {48, 64, 16}
    assert max(sum(run.pages for run in turn) for turn in turns(schedule)) <= 200


def test_the_last_turn_fills_the_ring_too() -> None:
    """48 layers of 16 in a ring that holds eight of them and a half: six turns of eight, not five and a half of eight
    and a half, and no runs for which the next step's first ones would have to wait."""
    schedule = plan_schedule([range(16)] * 48, ring_slots=136, run_pages=16)
    assert [sum(run.pages for run in turn) for turn in turns(schedule)] == [128] * 6
    kept = schedule.runs[:8]
    assert plan_schedule([range(16)] * 48, ring_slots=136, run_pages=16, kept=kept) == schedule


def test_a_run_ends_where_its_turn_does() -> None:
    """Five layers of 20 in a ring of 56: two turns of 52 and 48; the third layer is cut in two."""
    schedule = plan_schedule([range(64, 84)] * 5, ring_slots=56, run_pages=20)
    assert [[(run.layer, run.pages) for run in turn] for turn in turns(schedule)] == [
        [(0, 20), (1, 20), (2, 12)], [(2, 8), (3, 20), (4, 20)],
    ]
    assert schedule.runs[3].first_page == 64 + 12


def test_late_slots_are_those_of_the_last_batch_but_for_what_the_next_step_reads_first() -> None:
    """What comes there at a step's end would hold it up; but its successor must not wait for its first attention."""
    schedule = plan_schedule([range(16)] * 6, ring_slots=48, run_pages=16)
    assert batches(schedule)[-1] == (Run(5, 0, 16, 32),)
    assert schedule.late_slots == set(range(32, 48))
    odd = plan_schedule([range(64, 104)] * 3, ring_slots=60, run_pages=40)   # two turns, of 60
    assert batches(odd)[0] == (Run(0, 64, 40, 0),)
    assert batches(odd)[-1] == (Run(2, 64, 40, 20),)
    assert odd.late_slots == set(range(40, 60))
    alone = plan_schedule([range(0), range(8)], ring_slots=8, run_pages=8)
    assert not alone.late_slots


def test_where_a_step_goes_on_for_long_no_slot_is_late() -> None:
    """Behind the last batch half of the layers or more: there is time to fill the ring."""
    streams, rests = [range(16)] * 3, [range(0)] * 3
    assert plan_schedule([*rests, *streams], ring_slots=32, run_pages=16).late_slots
    assert plan_schedule([*streams, range(0), range(0)], ring_slots=32, run_pages=16).late_slots
    assert not plan_schedule([*streams, *rests], ring_slots=32, run_pages=16).late_slots


def test_runs_are_as_long_as_slabs_allow() -> None:
    """Only a slab's end and the cut shorten a run."""
    schedule = plan_schedule([range(140)], ring_slots=140, run_pages=64)
    assert [run.pages for run in schedule.runs] == [16, 48, 64, 12]
    assert [run.first_slot for run in schedule.runs] == [0, 16, 64, 128]
    schedule = plan_schedule([range(140)], ring_slots=140, run_pages=32)
    assert [run.pages for run in schedule.runs] == [16, 24, 24, 32, 32, 12]


def test_streamed_pages_need_a_ring() -> None:
    """Pages without a slot to pass through are a broken invariant; no pages need no ring."""
    with pytest.raises(AssertionError, match="ring"):
        plan_schedule([range(0), range(4)], ring_slots=0, run_pages=4)
    assert plan_schedule([range(0), range(0)], ring_slots=0, run_pages=1).runs == ()


class Simulation:
    """A link that copies in order at random moments, and an attention that reads in order; nothing else may happen."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.schedule = PrefetchSchedule((), 0, (), ())
        self.holds: dict[int, tuple[int, int]] = {}   # slot -> (layer, page), copied or on its way
        self.in_ring: deque[Run] = deque()
        self.fetched = 0

    def replan(self, of: list[int], ring: int, length: int) -> list[Run]:
        """What the streamer does between steps; returns the runs that were kept."""
        kept = head_in_ring(ranges(of), ring, list(self.in_ring))
        while len(self.in_ring) > kept:
            for slot in self.in_ring.pop().slots:
                del self.holds[slot]
        self.schedule = plan_schedule(ranges(of), ring_slots=ring, run_pages=length, kept=list(self.in_ring))
        check(self.schedule, of, ring)
        assert self.schedule.runs[:kept] == tuple(self.in_ring)
        while any(self.is_late(run) for run in self.in_ring):
            for slot in self.in_ring.pop().slots:
                del self.holds[slot]
        for run, following in pairwise(self.schedule.runs[max(0, kept - 1) :]):
            end = run.first_slot + run.pages
            assert following.first_slot in (0, end)
        self.fetched = len(self.in_ring)
        return list(self.in_ring)

    def is_late(self, run: Run) -> bool:
        return not self.schedule.late_slots.isdisjoint(run.slots)

    def try_fetch(self, *, between_steps: bool = False) -> bool:
        runs = self.schedule.runs
        if len(self.in_ring) == len(runs):
            return False
        run = runs[self.fetched % len(runs)]
        if any(slot in self.holds for slot in run.slots):
            return False   # an unread page is there: the copy waits
        if between_steps and self.is_late(run):
            return False
        self.holds |= {run.first_slot + i: (run.layer, run.first_page + i) for i in range(run.pages)}
        self.in_ring.append(run)
        self.fetched += 1
        return True

    def step(self) -> None:
        """Read all batches, with random numbers of copies in between; then let the link run on a little."""
        for batch in batches(self.schedule):
            while self.dice.random() < 0.6 and self.try_fetch():
                pass
            while len(self.in_ring) < len(batch):
                assert self.try_fetch(), "what came before is read, and yet the next batch does not fit: locked up"
            for run in batch:
                assert self.in_ring[0] == run
                self.in_ring.popleft()
                for i, slot in enumerate(run.slots):
                    assert self.holds.pop(slot) == (run.layer, run.first_page + i)
        while self.dice.random() < 0.8 and self.try_fetch(between_steps=True):
            pass

    def fill(self) -> list[Run]:
        """What is in the ring when the next step begins, if the link has the time."""
        while self.try_fetch(between_steps=True):
            pass
        return list(self.in_ring)


@given(
    changes=st.lists(st.tuples(cuts.map(lambda of: (of * 4)[:4]), rings, lengths), min_size=1, max_size=6),
    seed=st.integers(0, 10_000),
)
def test_no_timing_locks_up_or_overwrites_an_unread_page(
    changes: list[tuple[list[int], int, int]], seed: int
) -> None:
    """Steps read every page where the schedule says, for any pace of the link and any change of cuts, ring and runs."""
    dice = random.Random(seed)
    simulation = Simulation(dice)
    for of, ring, length in changes:
        simulation.replan(of, ring, length)
        for _ in range(dice.randint(0, 3)):
            simulation.step()


@given(
    changes=st.lists(st.tuples(cuts.map(lambda of: (of * 4)[:4]), rings, lengths), min_size=1, max_size=4),
    seed=st.integers(0, 10_000),
)
def test_every_step_begins_alike(changes: list[tuple[list[int], int, int]], seed: int) -> None:
    """With the same runs in the ring, the first batch among them, however a schedule came about: captured steps know
    but one beginning."""
    dice = random.Random(seed)
    simulation = Simulation(dice)
    for of, ring, length in changes:
        simulation.replan(of, ring, length)
        begins = simulation.fill()
        assert begins[: len(batches(simulation.schedule)[0]) if begins else 0] == list(
            batches(simulation.schedule)[0] if simulation.schedule.runs else ()
        )
        for _ in range(2):
            simulation.step()
            assert simulation.fill() == begins


@given(cuts, rings, lengths, st.integers(0, 1000))
def test_the_same_schedule_keeps_all_that_was_copied_ahead(of: list[int], ring: int, length: int, seed: int) -> None:
    """Planning the same again drops no run."""
    simulation = Simulation(random.Random(seed))
    simulation.replan(of, ring, length)
    simulation.step()
    before = list(simulation.in_ring)
    assert simulation.replan(of, ring, length) == before


@given(cuts, st.integers(8, 40), st.integers(0, 1000), st.integers(0, 4))
def test_a_cut_that_rises_keeps_all_that_was_copied_ahead(of: list[int], ring: int, seed: int, layer: int) -> None:
    """One more group streamed from a layer leaves the runs copied ahead where they are, up to that group, or to one
    that is in a late slot now."""
    simulation = Simulation(random.Random(seed))
    simulation.replan(of, ring, 4)
    while simulation.try_fetch():
        pass
    layer %= len(of)
    risen = [cut + GROUP_PAGES * (number == layer) for number, cut in enumerate(of)]
    before = [run for run in simulation.in_ring if run.layer <= layer]
    kept = simulation.replan(risen, ring, 4)
    assert kept == before[: len(kept)]
    assert kept == before or simulation.is_late(before[len(kept)])


def test_a_smaller_ring_keeps_the_runs_that_lie_inside_it() -> None:
    """The head of the list stays as far as it fits; the first run outside ends it."""
    runs = plan_schedule([range(28)], ring_slots=28, run_pages=8).runs
    assert [run.pages for run in runs] == [8, 8, 8, 4]
    assert head_in_ring([range(28)], 28, runs) == 4
    assert head_in_ring([range(28)], 27, runs) == 3
    assert head_in_ring([range(28)], 15, runs) == 1
    assert head_in_ring([range(28)], 7, runs) == 0


def test_a_fallen_cut_drops_the_runs_beyond_it() -> None:
    """A page that is resident now is read from its own slot, so its run cannot stay; nor can what follows."""
    runs = plan_schedule([range(12), range(4)], ring_slots=16, run_pages=8).runs
    assert head_in_ring([range(12), range(4)], 16, runs) == 3
    assert head_in_ring([range(8), range(4)], 16, runs) == 1
    assert head_in_ring([range(0), range(4)], 16, runs) == 0


def test_runs_that_begin_elsewhere_are_not_the_head() -> None:
    """The first run must begin with a layer's first page, and each other where the one before it ended."""
    assert head_in_ring([range(12)], 16, [Run(0, 4, 4, 0)]) == 0
    assert head_in_ring([range(12)], 16, [Run(0, 0, 4, 0), Run(0, 8, 4, 4)]) == 1


def test_small_layers_share_a_batch() -> None:
    """Several up to a fifth of the ring, and whole; a layer of up to three quarters has one of its own, and the runs of
    a larger one follow one by one. The first three layers and the last stand alone."""
    cuts = [range(64, 64 + pages) for pages in (8, 8, 4, 0, 8, 8, 48, 64, 4, 4, 4)]
    schedule = plan_schedule(cuts, ring_slots=80, run_pages=16)   # two turns
    assert [[(run.layer, run.pages) for run in batch] for batch in batches(schedule)] == [
        [(0, 8)], [(1, 8)], [(2, 4)], [(4, 8), (5, 8)], [(6, 16), (6, 16), (6, 12), (6, 4)],
        [(7, 16)], [(7, 16)], [(7, 16)], [(7, 16)], [(8, 4), (9, 4)], [(10, 4)],
    ]


def test_runs_that_lie_across_each_other_share_no_batch() -> None:
    """What was copied under another schedule may lie where this one puts the next run."""
    small = [Run(layer, 0, 4, 40 + 4 * layer) for layer in range(3)]
    kept = [*small, Run(3, 0, 4, 20), Run(4, 0, 4, 6), Run(4, 4, 4, 0)]
    cuts = [range(8 if layer == 4 else 4) for layer in range(7)]
    schedule = plan_schedule(cuts, ring_slots=64, run_pages=8, kept=kept)
    assert [run.first_slot for run in schedule.runs] == [40, 44, 48, 20, 6, 0, 4, 8]
    assert [len(batch) for batch in batches(schedule)] == [1, 1, 1, 3, 1, 1]


def test_kept_runs_must_be_the_head() -> None:
    """Runs that begin behind a page not in the ring are refused."""
    late = Run(layer=1, first_page=0, pages=4, first_slot=0)
    with pytest.raises(AssertionError, match="head"):
        plan_schedule([range(4), range(4)], ring_slots=8, run_pages=4, kept=[late])
