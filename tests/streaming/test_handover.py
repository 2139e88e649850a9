"""A hand-over takes all or nothing: after any failure the old layout works on, or the session is closed and says so."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest

from kvs_core.device.host.device import HostDebug
from kvs_core.errors import BudgetError, DeviceError
from kvs_core.memory.lease import ArenaError
from kvs_core.memory.phases import KV_POOL, HandoverOrder, HandoverStep, Phase
from kvs_core.streaming import handover as handover_module
from kvs_core.streaming.handover import WORKSPACE
from tests.streaming.rig import LAYERS, Pools, Rig, rig

CONTEXT = 512
SMALL, LARGE = Pools.between(CONTEXT, 0.1, 0.1).prefill, Pools.between(CONTEXT, 0.5, 0.5).prefill

BEFORE_COMMIT = [
    *((step, when) for step in list(HandoverStep)[:4] for when in ("start", "end")), (HandoverStep.COMMIT, "start"),
]
AFTER_COMMIT = [
    (HandoverStep.COMMIT, "end"), *((step, when) for step in list(HandoverStep)[5:] for when in ("start", "end")),
]


class InjectedError(Exception):
    """What goes wrong."""


class FailingOrder(HandoverOrder):
    """An order of which one step fails at its start or at its end."""

    at: tuple[HandoverStep, str] | None = None
    error: type[BaseException] = InjectedError

    @contextmanager
    def step(self, step: HandoverStep) -> Iterator[None]:
        with super().step(step):
            self._fail_if((step, "start"))
            yield
            self._fail_if((step, "end"))

    def _fail_if(self, now: tuple[HandoverStep, str]) -> None:
        if now == self.at:
            raise self.error("as asked for")


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> type[FailingOrder]:
    """The order that hand-overs of this test keep; set ``at`` and ``error``."""
    made = type("Order", (FailingOrder,), {})
    monkeypatch.setattr(handover_module, "HandoverOrder", made)
    return made


def hostile() -> HostDebug:
    dice = random.Random(0)
    return HostDebug(copy_delay=lambda: dice.choice((0.0, 0.0003, 0.001)), poison=True)


def check_leases(one: Rig) -> None:
    """The layout's leases are held and good, and nobody holds any other."""
    assert [lease.view.region_id for lease in one.handover.layout.leases] == [KV_POOL, WORKSPACE]
    assert one.arena._leases == set(one.handover.layout.leases)


def other(phase: Phase) -> Phase:
    return Phase.DECODE if phase is Phase.PREFILL else Phase.PREFILL


@pytest.mark.parametrize("pools", [Pools(SMALL, LARGE), Pools(LARGE, SMALL)], ids=["grows", "shrinks"])
@pytest.mark.parametrize("error", [InjectedError, KeyboardInterrupt])
@pytest.mark.parametrize(("step", "when"), BEFORE_COMMIT)
def test_a_failure_before_the_commit_changes_nothing(
    order: type[FailingOrder], pools: Pools, error: type[BaseException], step: HandoverStep, when: str
) -> None:
    """The error passes through; the old layout works on with the right bits; the next hand-over succeeds."""
    outcome = []
    for fails in (True, False):
        with rig(CONTEXT, pools, debug=hostile()) as one:
            one.prefill(CONTEXT - 100)
            if fails:
                order.at, order.error = (step, when), error
                with pytest.raises(error):
                    one.handover.change(Phase.DECODE)
                assert one.handover.layout.phase is Phase.PREFILL
                assert len(one.handover.layout.pool) == pools.prefill
                check_leases(one)
                one.check_frontiers()
                order.at = None
            outputs = [one.step(Phase.PREFILL, 40, seed=1), one.step(Phase.DECODE, 8, 5, seed=2)]
            check_leases(one)
            assert len(one.handover.layout.pool) == pools.decode
            outputs += [one.step(Phase.PREFILL, 7, seed=3), one.step(Phase.DECODE, 8, seed=4)]
            one.publish_all()
            one.check_history()
            outcome.append([output.tobytes() for output in outputs])
    assert outcome[0] == outcome[1]


@pytest.mark.parametrize("pools", [Pools(SMALL, LARGE), Pools(LARGE, SMALL)], ids=["grows", "shrinks"])
@pytest.mark.parametrize(("step", "when"), AFTER_COMMIT)
def test_a_failure_after_the_commit_closes_the_session(
    order: type[FailingOrder], pools: Pools, step: HandoverStep, when: str
) -> None:
    """One clear error; from then on no layout, no view and no step; every committed row is in the history."""
    with rig(CONTEXT, pools, debug=hostile()) as one:
        one.prefill(CONTEXT - 100)
        one.step(Phase.DECODE, 8, 3)
        leases = one.handover.layout.leases
        order.at = (step, when)
        with pytest.raises(DeviceError, match=r"prefill phase failed \(as asked for\); the session is closed"):
            one.handover.change(Phase.PREFILL)
        for phase in Phase:
            with pytest.raises(DeviceError, match="session is closed"):
                one.handover.change(phase)
        with pytest.raises(DeviceError, match="session is closed"):
            _ = one.handover.layout
        for lease in leases:
            with pytest.raises(ArenaError):
                _ = lease.view
        with pytest.raises(AssertionError):
            one.kv.begin(1, Phase.DECODE)
        assert one.kv.cache.published == one.kv.cache.committed == one.committed
        one.check_history()


@pytest.mark.parametrize(("step", "when"), AFTER_COMMIT)
def test_an_interrupt_after_the_commit_closes_the_session_too(
    order: type[FailingOrder], step: HandoverStep, when: str
) -> None:
    """It stays an interrupt, and leaves no layout that could be used."""
    with rig(CONTEXT, Pools(SMALL, LARGE), debug=hostile()) as one:
        one.prefill(100)
        order.at, order.error = (step, when), KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            one.handover.change(Phase.DECODE)
        with pytest.raises(DeviceError, match="session is closed"):
            _ = one.handover.layout
        one.check_history()


@pytest.mark.parametrize("pools", [Pools(SMALL, LARGE), Pools(LARGE, SMALL)], ids=["grows", "shrinks"])
def test_failures_in_a_row_do_not_add_up(order: type[FailingOrder], pools: Pools) -> None:
    """Every way to fail before the commit, one after the other, steps in between; then a hand-over succeeds."""
    with rig(CONTEXT, pools, debug=hostile()) as one:
        one.prefill(CONTEXT - 200)
        for number, order.at in enumerate(BEFORE_COMMIT * 2):
            phase = one.handover.layout.phase
            with pytest.raises(InjectedError):
                one.handover.change(other(phase))
            one.step(phase, 5, seed=number)
            check_leases(one)
            if number == len(BEFORE_COMMIT):
                order.at = None
                one.enter(Phase.DECODE)
        order.at = None
        one.step(Phase.PREFILL, 20, seed=99)
        one.publish_all()
        one.check_history()


def test_a_lease_on_the_workspace_refuses_the_commit() -> None:
    """Whoever still uses a region that changes keeps it, and the hand-over fails before its commit."""
    with rig(CONTEXT, Pools(SMALL, LARGE), debug=hostile()) as one:
        one.prefill(200)
        with one.arena.lease(WORKSPACE), pytest.raises(ArenaError, match="workspace"):
            one.handover.change(Phase.DECODE)
        check_leases(one)
        one.step(Phase.PREFILL, 9, seed=1)
        one.step(Phase.DECODE, 8, seed=2)
        check_leases(one)


def test_a_failed_publication_fails_the_handover_before_its_commit() -> None:
    """Rows that cannot be brought home keep the old layout; what was published before is valid."""
    with rig(CONTEXT, Pools(SMALL, LARGE)) as one:
        one.prefill(201)
        one.kv._publisher.wait_all()
        published = one.kv.cache.published
        counters = one.device.counters()
        one.device._debug = replace(one.device._debug, fail_copy_at=counters.copy_calls + counters.publish_calls)
        with pytest.raises(DeviceError, match=r"copy \d+ .* failed"):
            one.handover.change(Phase.DECODE)
        assert one.handover.layout.phase is Phase.PREFILL
        check_leases(one)
        assert one.kv.cache.published == published
        one.check_history()


def test_a_pool_too_small_for_what_is_there_is_refused_and_the_old_layout_works_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan that leaves less than the newest pages need: a budget error, and no page has moved."""
    with rig(CONTEXT, Pools(LARGE, LARGE), debug=hostile()) as one:
        one.prefill(CONTEXT - 40)
        with monkeypatch.context() as patch:
            patch.setattr(type(one.handover._memory), "slots", lambda memory, phase: LAYERS - 1)
            with pytest.raises(BudgetError, match="--kv-stream-arena-mib"):
                one.handover.change(Phase.DECODE)
        check_leases(one)
        one.step(Phase.PREFILL, 9, seed=1)
        one.step(Phase.DECODE, 8, seed=2)


COPIES = 9
"""Of the hand-over below: six pages move, a run comes into the ring, the tail page of each layer goes home."""


@pytest.mark.parametrize("number", range(COPIES + 1))
def test_a_copy_that_cannot_be_enqueued_leaves_the_old_layout_in_use(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """While pages leave the slots that go: some have moved, some have not, and the old layout works on. Every copy
    fails once; behind the last there is none."""
    with rig(CONTEXT, Pools(LARGE, SMALL), debug=hostile(), ring_slots=7) as one:
        one.prefill(CONTEXT - 100)
        one.truncate(CONTEXT - 230)
        one.step(Phase.PREFILL, 60)
        enqueue = one.device.enqueue_copy
        calls = 0

        def fails(*arguments: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > number:
                raise InjectedError
            enqueue(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(one.device, "enqueue_copy", fails)
            with pytest.raises(InjectedError) if number < COPIES else nullcontext():
                one.handover.change(Phase.DECODE)
        assert one.handover.layout.phase is (Phase.PREFILL if number < COPIES else Phase.DECODE)
        check_leases(one)
        one.check_frontiers()
        one.step(Phase.PREFILL, 9, seed=1)
        one.step(Phase.DECODE, 8, seed=2)
        one.step(Phase.PREFILL, 9, seed=3)
        one.publish_all()
        one.check_history()


def test_pages_in_both_pools_stay_where_they_are() -> None:
    """Going to the larger pool and back moves no page and copies none but those that had to leave and come back."""
    with rig(CONTEXT, Pools(SMALL, LARGE)) as one:
        one.prefill(CONTEXT - 64)
        kept = {page: one.kv._pools.shared.slot_of(page) for page in one.kv._pools}
        copied = one.device.counters().copy_calls
        one.handover.change(Phase.DECODE)
        assert {page: one.kv._pools.shared.slot_of(page) for page in one.kv._pools} == kept
        assert one.device.counters().copy_calls == copied


def test_a_handover_publishes_every_committed_row() -> None:
    """A part-filled page too: whatever comes later, history alone could go on."""
    with rig(CONTEXT, Pools(LARGE, SMALL), debug=hostile()) as one:
        one.prefill(77)
        one.handover.change(Phase.DECODE)
        assert one.kv.cache.published == 77
        one.check_history()


def noting(seen: list[str], name: str, do: Callable[..., object]) -> Callable[..., object]:
    """The same, written down."""

    def noted(*arguments: object) -> object:
        seen.append(name)
        return do(*arguments)

    return noted


def test_streams_are_empty_and_graphs_dropped_when_the_arena_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All three streams, and before the commit: afterwards the same bytes may be another region's."""
    seen: list[str] = []
    with rig(CONTEXT, Pools(SMALL, LARGE)) as one:
        one.prefill(100)
        for name in ("compute", "copy", "publish"):
            stream = getattr(one.device, name)
            monkeypatch.setattr(stream, "synchronize", noting(seen, name, stream.synchronize))
        monkeypatch.setattr(one.device, "drop_captured", noting(seen, "graphs", one.device.drop_captured))
        monkeypatch.setattr(one.arena, "_adopt", noting(seen, "commit", one.arena._adopt))
        one.handover.change(Phase.DECODE)
    assert seen == ["compute", "copy", "publish", "graphs", "commit"]
