"""Streamer: runs arrive in order, ahead of attention, through a ring of any size and over changes of the schedule."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.host.device import HostDebug, HostDevice
from kvs_core.device.operands import Buffer
from kvs_core.errors import DeviceError
from kvs_core.paging.schedule import Run
from kvs_core.streaming.history import HostHistory
from kvs_core.streaming.streamer import Streamer
from tests.streaming.rig import LAYERS, ROTATED
from tests.support.examples import examples

PAGES = 40
RING = 24


class Bench:
    """A history of known pages and a streamer on a ring of at most ``RING`` slots."""

    def __init__(self, debug: HostDebug) -> None:
        self.device = HostDevice(1, debug=debug)
        self.history = HostHistory(self.device, [ROTATED.page_bytes] * LAYERS, PAGES)
        self.history.ensure(PAGES)
        for layer in range(LAYERS):
            for page in range(PAGES):
                self.history.page(layer, page)[:] = self.value(layer, page)
        self.pool = np.zeros((RING, ROTATED.page_bytes), np.uint8)
        self.streamer = Streamer(self.device, self.history, self.view)
        self.before_close: Callable[[], None] = lambda: None

    @staticmethod
    def value(layer: int, page: int) -> int:
        return layer * PAGES + page + 1

    def view(self, first_slot: int, slots: int) -> Buffer:
        return self.pool[first_slot : first_slot + slots].reshape(-1)

    def plan(self, cuts: list[int], ring: int, run: int) -> None:
        self.streamer.replan([range(cut) for cut in cuts], ring_slots=ring, run_pages=run)

    def read(self, run: Run) -> None:
        """What attention does: wait, read every page, release."""
        self.streamer.acquire(run)
        for i, slot in enumerate(run.slots):
            assert (self.pool[slot] == self.value(run.layer, run.first_page + i)).all()
        self.streamer.release(run)

    def step(self) -> None:
        for run in self.streamer.schedule.runs:
            self.read(run)

    def close(self) -> None:
        self.before_close()
        self.device.close()
        self.history.close()


Made = Callable[[HostDebug], Bench]


@pytest.fixture
def bench() -> Iterator[Made]:
    made: list[Bench] = []

    def make(debug: HostDebug) -> Bench:
        made.append(Bench(debug))
        return made[-1]

    yield make
    for each in made:
        each.close()


cuts = st.lists(st.integers(0, 9).map(lambda groups: 4 * groups), min_size=LAYERS, max_size=LAYERS)


@settings(max_examples=examples(30))
@given(
    changes=st.lists(st.tuples(cuts, st.integers(1, RING), st.integers(1, 12)), min_size=1, max_size=6),
    seed=st.integers(0, 999),
)
def test_attention_reads_the_right_bytes_from_every_slot(changes: list[tuple[list[int], int, int]], seed: int) -> None:
    """Slow copies, slots poisoned once read, steps left half way, changed schedules: pages are there when read."""
    dice = random.Random(seed)
    one = Bench(HostDebug(copy_delay=lambda: dice.choice((0.0, 0.0, 0.0005)), poison=True))
    try:
        for of, ring, run in changes:
            one.plan(of, ring, run)
            for _ in range(dice.randint(0, 2)):
                one.step()
            if one.streamer.schedule.runs and dice.random() < 0.3:
                for each in one.streamer.schedule.runs[: dice.randint(1, 3)]:
                    one.read(each)
                one.streamer.empty()
                one.streamer.pump(between_steps=True)
    finally:
        one.close()


def test_the_ring_fills_before_anyone_reads_and_on_into_the_next_step(bench: Made) -> None:
    """The link needs no request: it runs ahead as far as the ring goes, over the end of the step."""
    one = bench(HostDebug())
    one.plan([12, 16], 16, 4)
    assert one.device.counters().copy_bytes == 16 * ROTATED.page_bytes
    one.step()
    assert one.device.counters().copy_bytes == (28 + 16) * ROTATED.page_bytes
    one.step()
    assert one.device.counters().copy_bytes == (56 + 16) * ROTATED.page_bytes


def test_a_ring_larger_than_the_step_copies_no_page_twice(bench: Made) -> None:
    """At most one step's runs lie in the ring."""
    one = bench(HostDebug())
    one.plan([4, 4], RING, 4)
    assert one.device.counters().copy_bytes == 4 * ROTATED.page_bytes   # the last run comes when the step begins
    for steps in range(3):
        one.streamer.pump()
        assert one.device.counters().copy_bytes == 8 * (steps + 1) * ROTATED.page_bytes
        one.step()
        assert one.device.counters().copy_bytes == (8 * (steps + 1) + 4) * ROTATED.page_bytes


def test_what_the_last_batch_leaves_is_filled_when_the_next_step_begins(bench: Made) -> None:
    """Between steps copies stop before the first run that needs a late slot, though slots behind it are free."""
    one = bench(HostDebug())
    one.plan([16, 16], 20, 4)
    late = one.streamer.schedule.late_slots
    assert late
    for _ in range(3):
        ahead = one.streamer.in_ring
        assert all(late.isdisjoint(run.slots) for run in ahead)
        following = one.streamer.schedule.runs[len(ahead)]
        assert not late.isdisjoint(following.slots)
        one.streamer.pump()
        assert one.streamer.in_ring[: len(ahead) + 1] == [*ahead, following]
        one.step()


def test_a_changed_schedule_keeps_its_head(bench: Made) -> None:
    """Runs copied ahead that are still the first are not copied again."""
    one = bench(HostDebug())
    one.plan([12, 12], 16, 4)
    one.plan([12, 16], 16, 4)
    assert one.device.counters().copy_bytes == 16 * ROTATED.page_bytes
    one.plan([12, 16], 8, 4)
    assert one.device.counters().copy_bytes == 16 * ROTATED.page_bytes
    one.step()
    one.plan([8, 16], 8, 4)   # the ring holds pages [0, 8) of layer 0: all that is left of that layer
    assert one.device.counters().copy_bytes == (16 + 20 + 8) * ROTATED.page_bytes
    one.step()


def test_runs_are_read_in_the_order_of_the_schedule(bench: Made) -> None:
    """Another order, a run read twice, a release without its run: broken invariants that are noticed."""
    one = bench(HostDebug())
    one.plan([12, 4], 16, 4)
    first, second, *_ = one.streamer.schedule.runs
    with pytest.raises(AssertionError):
        one.streamer.acquire(second)
    one.streamer.acquire(first)
    with pytest.raises(AssertionError):
        one.streamer.acquire(first)
    with pytest.raises(AssertionError):
        one.streamer.release(second)
    one.streamer.release(first)
    with pytest.raises(AssertionError, match="being read"):
        one.plan([12, 4], 8, 4)


class SlowLink:
    """A streamer whose copies wait for a turn each, with eight runs of one page."""

    def __init__(self, bench: Made, ring: int = 3) -> None:
        self.turns = threading.Semaphore(0)
        self.one = bench(HostDebug(copy_delay=self._wait_for_turn))
        self.one.before_close = lambda: self.turns.release(100)
        self.one.plan([4, 4], ring, 1)
        self.runs = iter(self.one.streamer.schedule.runs * 3)
        self.left = len(self.one.streamer.schedule.runs)
        self.one.streamer.pump()   # the step begins

    def _wait_for_turn(self) -> float:
        assert self.turns.acquire(timeout=20)
        return 0.0

    def fill(self) -> None:
        """Time enough for the link to fill the ring."""
        for entry in list(self.one.streamer._in_ring):
            if not entry.ready.done():
                self.turns.release()
                entry.ready.wait()

    def read(self, *, waits: bool = False) -> None:
        """Attention reads the next run, which is there, or comes while attention waits."""
        if waits:
            threading.Timer(0.05, self.turns.release).start()
        self.one.read(next(self.runs))
        self.left -= 1
        if self.left == 0:
            self.left = len(self.one.streamer.schedule.runs)
            self.one.streamer.pump()   # the next step begins


def test_a_link_that_idles_for_want_of_a_slot_and_is_then_waited_for_starves(bench: Made) -> None:
    """The ring was full between two layers and then too short: told, and told once."""
    link = SlowLink(bench)
    link.fill()
    link.read()
    link.fill()
    for _ in range(3):
        link.read()
    link.read(waits=True)
    assert link.one.streamer.take_starved()
    assert not link.one.streamer.take_starved()


def test_attention_that_never_waits_does_not_starve(bench: Made) -> None:
    """A link that is always ahead idles, and nobody minds."""
    link = SlowLink(bench)
    for _ in range(16):
        link.fill()
        link.read()
    assert not link.one.streamer.take_starved()


def test_a_link_that_never_idles_does_not_starve(bench: Made) -> None:
    """A link that is always behind would be no faster with a larger ring."""
    link = SlowLink(bench)
    for _ in range(10):
        link.read(waits=True)
    assert not link.one.streamer.take_starved()


def test_a_pause_between_steps_does_not_starve(bench: Made) -> None:
    """Only a gap within a step calls for a larger ring: between steps a resident page would save as much."""
    link = SlowLink(bench)
    link.fill()
    for _ in range(3):
        link.read()
    for _ in range(5):
        link.read(waits=True)
    link.fill()
    for _ in range(3):
        link.read()
    link.read(waits=True)
    assert not link.one.streamer.take_starved()


def test_a_ring_that_holds_the_whole_step_does_not_starve(bench: Made) -> None:
    """There is nothing more to copy ahead."""
    link = SlowLink(bench, ring=8)
    for _ in range(2):
        link.fill()
        for _ in range(8):
            link.read()
    link.turns.release(3)   # the other runs of the batch
    link.read(waits=True)
    assert not link.one.streamer.take_starved()


@pytest.mark.parametrize("failing", [0, 1, 3, 6])
def test_a_failed_copy_is_an_error_for_whoever_reads_it_and_nothing_hangs(bench: Made, failing: int) -> None:
    """Reads before it are good; it and all after it raise, also after the ring was emptied and planned anew."""
    one = bench(HostDebug(poison=True, fail_copy_at=failing))
    with pytest.raises(DeviceError, match=f"copy {failing} .* failed"):   # noqa: PT012
        one.plan([12, 12], 8, 4)
        for _ in range(3):
            one.step()
    for _ in range(2):
        with pytest.raises(DeviceError, match=f"copy {failing} .* failed"):
            one.streamer.empty()
        with pytest.raises(DeviceError, match=f"copy {failing} .* failed"):   # noqa: PT012
            one.plan([12, 16], 8, 4)
            one.step()
