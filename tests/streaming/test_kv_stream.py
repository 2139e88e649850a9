"""KvStream without a model: exact for any pool, ring, run and copy timing, and its history is complete."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvs_core.device.host.device import HostDebug, HostDevice
from kvs_core.errors import BudgetError, ContextError
from kvs_core.memory.phases import Phase
from kvs_core.paging.slots import PageId
from kvs_core.streaming import kv_step as kv_step_module
from kvs_core.streaming.kv_step import KvStep
from tests.streaming.rig import DECODE_ROWS, LAYERS, PAGE, PLAIN, PREFILL_ROWS, ROTATED, Pools, Rig, rig
from tests.support.examples import examples

CONTEXT = 24 * PAGE   # of which up to 20 are streamed: from two slabs
MOVES = 2 * LAYERS


def hostile(seed: int) -> HostDebug:
    """Copies of random slowness, and NaN wherever nobody may read."""
    dice = random.Random(seed)
    return HostDebug(copy_delay=lambda: dice.choice((0.0, 0.0, 0.0, 0.0003, 0.001)), poison=True)


class KvMachine(RuleBasedStateMachine):
    """A small hostile pool and one that holds every page, driven alike: the same bits, and all rows come home."""

    @initialize(
        geometry=st.sampled_from([ROTATED, PLAIN]),
        prefill=st.floats(0.0, 0.5), decode=st.floats(0.0, 0.5),
        ring_slots=st.sampled_from([0, 0, 1, 2, 5, 9]), run_pages=st.sampled_from([0, 0, 1, 3, 8]),
        seed=st.integers(0, 999), tokens=st.integers(0, CONTEXT - 40),
        windows=st.sampled_from([(), (), (40, 0), (1, 0), (0, 100), (PAGE, PAGE + 1), (300, 33)]),
    )
    def start(
        self, geometry: object, prefill: float, decode: float, ring_slots: int, run_pages: int, seed: int, tokens: int,
        windows: tuple[int, ...],
    ) -> None:
        small, large = Pools.between(CONTEXT, prefill, decode, windows), Pools.all_of(CONTEXT, windows)
        make: Callable[..., Rig] = lambda pools, debug, **others: Rig(  # noqa: E731
            geometry, CONTEXT, pools, HostDevice(1, debug=debug), **others  # type: ignore[arg-type]
        )
        self.rig = make(small, hostile(seed), ring_slots=ring_slots, run_pages=run_pages, windows=windows)
        self.resident = make(large, HostDebug(poison=True), windows=windows)
        self.seed = seed
        for one in (self.rig, self.resident):
            one.prefill(tokens)

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            try:
                self.publish()
                # What a window has passed may come back after a truncation.
                slides = any(params.window for params in self.resident.params)
                assert slides or self.resident.device.counters().copy_bytes == 0
            finally:
                self.rig.close()
                self.resident.close()

    def both(self, phase: Phase, rows: int, keep: int, leave_after: int = MOVES) -> None:
        rows = min(rows, CONTEXT - self.rig.committed)
        keep = min(keep, rows)
        self.seed += 1
        if rows:
            one, other = (
                each.step(phase, rows, keep, seed=self.seed, leave_after=leave_after)
                for each in (self.rig, self.resident)
            )
            assert one.tobytes() == other.tobytes()

    @rule(rows=st.integers(1, DECODE_ROWS), keep=st.integers(0, DECODE_ROWS))
    def decode(self, rows: int, keep: int) -> None:
        self.both(Phase.DECODE, rows, keep)

    @rule(steps=st.integers(2, 12), keep=st.integers(1, DECODE_ROWS))
    def decode_on(self, steps: int, keep: int) -> None:
        for _ in range(steps):
            self.both(Phase.DECODE, DECODE_ROWS, keep)

    @rule(rows=st.integers(1, PREFILL_ROWS), keep=st.sampled_from([0, 31, 32, PREFILL_ROWS, PREFILL_ROWS]))
    def prefill(self, rows: int, keep: int) -> None:
        self.both(Phase.PREFILL, rows, keep)

    @rule(phase=st.sampled_from(Phase), rows=st.integers(1, DECODE_ROWS), leave_after=st.integers(0, MOVES - 1))
    def abandon(self, phase: Phase, rows: int, leave_after: int) -> None:
        self.both(phase, rows, 0, leave_after)

    @rule(share=st.floats(0, 1))
    def truncate(self, share: float) -> None:
        tokens = round(self.rig.committed * share)
        for one in (self.rig, self.resident):
            one.truncate(tokens)

    @rule(phase=st.sampled_from(Phase))
    def enter(self, phase: Phase) -> None:
        self.rig.enter(phase)

    @rule()
    def publish(self) -> None:
        self.rig.publish_all()
        self.rig.check_history()

    @precondition(lambda self: self.rig.committed)
    @rule(over=st.integers(1, PREFILL_ROWS))
    def too_much(self, over: int) -> None:
        with pytest.raises(ContextError, match="--ctx-size"):
            self.rig.kv.begin(CONTEXT - self.rig.committed + over, Phase.DECODE)

    @invariant()
    def all_is_accounted_for(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check_frontiers()
            self.rig.check_history()


TestKvMachine = KvMachine.TestCase
TestKvMachine.settings = settings(max_examples=examples(30), stateful_step_count=20)


def committed_pages(one: Rig) -> dict[tuple[int, int], bytes]:
    """The bytes of every full page, by layer and page."""
    return {
        (layer, page): one.kv.history_page(layer, page).tobytes()
        for layer in range(LAYERS) for page in range(one.committed // PAGE)
    }


@settings(max_examples=examples(10))
@given(seed=st.integers(0, 999), pool=st.floats(0, 0.4), keeps=st.lists(st.integers(0, 8), min_size=5, max_size=40))
def test_full_pages_come_home_by_themselves(seed: int, pool: float, keeps: list[int]) -> None:
    """Without anyone asking: a page is on its way once it is full, and home before its slot is used again."""
    with rig(CONTEXT, Pools.between(CONTEXT, pool, pool), debug=hostile(seed)) as one:
        one.prefill(100)
        for number, keep in enumerate(keeps):
            one.step(Phase.DECODE, DECODE_ROWS, keep, seed=number)
            assert one.committed // PAGE * PAGE <= one.kv._publisher.enqueued <= one.committed
            for page in range(one.committed // PAGE):
                for layer in range(LAYERS):
                    assert one.kv._pools.holds(PageId(layer, page)) or one.kv.cache.published >= (page + 1) * PAGE
        one.kv.drain()
        assert one.kv.cache.published == one.committed
        one.check_history()


def test_a_page_cut_short_is_written_to_only_after_it_has_come_back() -> None:
    """Truncated into a streamed page, the page comes back by a copy, which does not overwrite the rows that follow."""
    slow = HostDebug(copy_delay=lambda: 0.003, poison=True)
    with rig(CONTEXT, debug=slow) as one:
        one.prefill(CONTEXT - 64)
        one.truncate(3 * PAGE + 5)
        for number in range(3):
            one.step(Phase.DECODE, 8, 8, seed=number)
        one.step(Phase.DECODE, 8, 8, seed=9)
        one.publish_all()
        one.check_history()


def test_a_new_page_is_clear_behind_its_rows() -> None:
    """A slot that becomes a tail page is zeroed first: behind the rows nothing is left of the page that was there."""
    with rig(CONTEXT, debug=HostDebug(poison=True)) as one:
        one.prefill(CONTEXT - 64)
        for tokens in (9 * PAGE + 1, 4 * PAGE + 7, PAGE - 3):
            one.truncate(tokens // PAGE * PAGE)
            one.step(Phase.DECODE, min(8, tokens % PAGE), seed=tokens)
            one.publish_all()
            for layer in range(LAYERS):
                page = one.kv.history_page(layer, one.committed // PAGE)
                last = ROTATED.k_offset(0, one.committed % PAGE)
                assert not page[last : ROTATED.k_part_bytes].any()
                assert not page[ROTATED.v_offset(0, one.committed % PAGE) :].any()


def test_dropped_rows_are_not_published() -> None:
    """A verify that runs over the end of a page publishes it only when the rows that fill it are kept."""
    with rig() as one:
        one.prefill(PAGE - 2)
        one.step(Phase.DECODE, 8, 1, seed=1)
        one.kv.drain()
        assert one.kv.cache.published == PAGE - 1
        sent = one.device.counters().publish_calls
        one.step(Phase.DECODE, 8, 0, seed=2)
        assert one.device.counters().publish_calls == sent
        one.step(Phase.DECODE, 8, 4, seed=3)
        one.kv._publisher.wait_all()
        assert one.kv.cache.published == PAGE
        assert one.device.counters().publish_calls == sent + LAYERS
        one.check_history()


def test_a_step_can_be_used_only_while_it_is_open() -> None:
    """No layer of a step that is over; no second step beside an open one; no more rows kept than there are."""
    with rig() as one:
        with one.kv.begin(4, Phase.PREFILL) as step:
            with pytest.raises(AssertionError):
                one.kv.begin(1, Phase.PREFILL)
            with pytest.raises(AssertionError):
                one.kv.truncate(0)
            with pytest.raises(AssertionError):
                one.kv.publish_dirty()
            with pytest.raises(AssertionError):
                step.settle(5)
            with pytest.raises(AssertionError):
                step.settle(-1)
        with pytest.raises(AssertionError, match="over"):
            step.layer(0)
        with pytest.raises(AssertionError, match="over"):
            step.settle(1)
        assert one.kv.cache.reserved == 0
        one.step(Phase.PREFILL, 40)


def fail_half_way(step: KvStep) -> None:
    step.plan(0)
    raise ZeroDivisionError


def test_an_error_in_the_model_drops_the_step() -> None:
    """The error passes through, and the cache stands at its last commit."""
    with rig(debug=hostile(1)) as one:
        one.prefill(300)
        with pytest.raises(ZeroDivisionError), one.kv.begin(8, Phase.PREFILL) as step:
            fail_half_way(step)
        one.check_frontiers()
        one.step(Phase.DECODE, 8)
        one.publish_all()
        one.check_history()


def test_what_has_been_copied_ahead_is_not_copied_again() -> None:
    """In steady decode each streamed page crosses the link once per step, also over a step that changes the cuts."""
    with rig(CONTEXT, Pools.between(CONTEXT, 0.3, 0.3), ring_slots=6, run_pages=2) as one:
        one.prefill(CONTEXT - 160)
        one.step(Phase.DECODE, 1, seed=1)
        page_bytes = one.geometry.page_bytes
        for number in range(2, 120):
            ahead = len(one.kv.streamer._in_ring)
            before = one.device.counters().copy_bytes
            cuts = one.kv._placement.state.cuts
            one.step(Phase.DECODE, 1, seed=number)
            copied = (one.device.counters().copy_bytes - before) // page_bytes
            streamed = one.kv.stats().streamed_pages_per_step
            assert ahead > 0
            if one.kv._placement.state.cuts == cuts:
                assert copied == streamed
            else:
                assert copied <= streamed + one.kv.stats().ring_slots


def test_one_interrupted_step_does_not_move_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring is made for gaps that steps have in common: a pause in one of them is none, two in a row are."""
    now, pause = 0.0, 0.0

    def clock() -> float:
        nonlocal now
        now += 1e-6 + pause
        return now

    monkeypatch.setattr(kv_step_module, "perf_counter", clock)
    with rig(4 * CONTEXT, Pools(120, 120)) as one:
        placement = one.kv._placement
        link = 1000.0 * one.geometry.page_bytes
        placement._config = replace(placement._config, run_pages=4, link_bytes_per_s=link)
        monkeypatch.setattr(one.kv.streamer, "take_starved", lambda: False)
        one.prefill(4 * CONTEXT - 100)
        one.step(Phase.DECODE, 1)
        rings = []
        for number in range(60):
            pause = 0.03 if number == 20 or number > 40 else 0.0
            one.step(Phase.DECODE, 1, seed=number)
            rings.append(one.kv.stats().ring_slots)
    before, after = rings[20], rings[-1]
    assert rings[10:] == [before] * 33 + [after] * 17
    assert after > 2 * before


def test_a_resident_pool_copies_nothing_back() -> None:
    """With room for every page there is no ring, and no byte goes to the device."""
    with rig(CONTEXT, Pools.all_of(CONTEXT)) as one:
        one.prefill(CONTEXT - 10)
        one.step(Phase.DECODE, 8)
        stats = one.kv.stats()
        assert (stats.ring_slots, stats.streamed_pages_per_step) == (0, 0)
        assert stats.resident_pages == stats.active_pages == LAYERS * CONTEXT // PAGE
        assert one.device.counters().copy_bytes == 0


def test_a_pool_too_small_for_a_step_is_refused_and_nothing_is_lost() -> None:
    """A step wider than the pool was made for: an error with the numbers, and narrower steps go on."""
    with rig(CONTEXT, debug=hostile(2)) as one:
        one.prefill(100)
        with pytest.raises(BudgetError, match=r"\d+ pages.*--kv-stream-arena-mib"):
            one.kv.begin(400, Phase.PREFILL)
        one.check_frontiers()
        one.step(Phase.PREFILL, PREFILL_ROWS, seed=1)
        one.step(Phase.DECODE, 8, 3, seed=2)
        one.publish_all()
        one.check_history()
