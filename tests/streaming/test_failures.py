"""Copies and allocations that fail, errors at any point: no hang, no wrong bit, and published rows stay."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.base import Stream
from kvs_core.device.host.device import HostDebug, HostDevice
from kvs_core.device.operands import Buffer
from kvs_core.errors import DeviceError, DeviceMemoryError
from kvs_core.memory.phases import Phase
from kvs_core.paging.slots import PageId
from tests.streaming.rig import LAYERS, PAGE, ROTATED, Pools, Rig
from tests.support.examples import examples

CONTEXT = 480
POOLS = Pools.between(CONTEXT, 0.1, 0.3)
DECODE_ALL = Pools.between(CONTEXT, 0.1, 1.0)

Move = Callable[[Rig], object]
SCRIPT: list[Move] = [
    *[partial(Rig.step, phase=Phase.PREFILL, rows=60, seed=number) for number in range(6)],
    *[partial(Rig.step, phase=Phase.DECODE, rows=8, keep=5, seed=number) for number in range(9)],
    partial(Rig.truncate, tokens=4 * 32 + 9),
    *[partial(Rig.step, phase=Phase.DECODE, rows=8, keep=7, seed=number) for number in range(9)],
    partial(Rig.step, phase=Phase.DECODE, rows=3, leave_after=2, seed=70),
    partial(Rig.step, phase=Phase.PREFILL, rows=64, seed=71),
    Rig.publish_all,
]

LONG_CONTEXT = 70 * PAGE
LONG_POOLS = Pools.between(LONG_CONTEXT, 0.05, 0.1)
LONG_SCRIPT: list[Move] = [   # through three slabs
    *[partial(Rig.step, phase=Phase.PREFILL, rows=64, seed=number) for number in range(30)],
    *[partial(Rig.step, phase=Phase.DECODE, rows=8, keep=5, seed=number) for number in range(4)],
    partial(Rig.truncate, tokens=58 * PAGE + 9),
    *[partial(Rig.step, phase=Phase.PREFILL, rows=64, seed=number) for number in range(40, 44)],
    partial(Rig.step, phase=Phase.DECODE, rows=3, leave_after=2, seed=70),
    partial(Rig.step, phase=Phase.DECODE, rows=8, seed=71),
    Rig.publish_all,
]


def within(seconds: float, work: Callable[[], None]) -> None:
    """Do the work on another thread, so that a hang is a failure and not the end of all tests."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


@cache
def copies_of_script(pools: Pools) -> int:
    """How many copies the script makes when nothing fails."""
    rig = Rig(ROTATED, CONTEXT, pools, HostDevice(1))
    try:
        for move in SCRIPT:
            move(rig)
        counters = rig.device.counters()
        return counters.copy_calls + counters.publish_calls
    finally:
        rig.close()


@settings(max_examples=examples(30))
@given(
    st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.0, 0.0003]), st.sampled_from([POOLS, DECODE_ALL])
)
def test_a_failed_copy_ends_all_work_and_loses_nothing_published(share: float, delay: float, pools: Pools) -> None:
    """Steps before it are right. From then on every move is right or that same error, never another, and none hangs."""
    number = int(share * copies_of_script(pools))
    rig = Rig(ROTATED, CONTEXT, pools, HostDevice(1, debug=HostDebug(copy_delay=lambda: delay, fail_copy_at=number)))

    def work() -> None:
        messages: list[str] = []
        for move in SCRIPT * 2:
            if rig.committed > CONTEXT - 64:
                break
            try:
                move(rig)
            except DeviceError as error:
                messages.append(str(error))
                assert rig.kv.cache.reserved == rig.kv.cache.committed == rig.committed
            rig.check_history()
        with pytest.raises(DeviceError, match=f"copy {number} "):
            rig.publish_all()
        assert messages
        assert all(f"copy {number} " in message for message in messages)

    try:
        within(60, work)
        assert rig.kv.cache.published <= rig.kv.cache.committed
    finally:
        rig.close()


@pytest.mark.parametrize("error", [DeviceMemoryError, MemoryError])
@pytest.mark.parametrize("number", range(1, 3 * LAYERS + 1))
def test_a_failed_pinned_allocation_costs_one_step_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    """The step that needs the memory is refused before it begins; once there is memory, the same step runs. Where a
    helper could not have it ahead of need, the step has it after all."""
    debug = HostDebug(poison=True, fail_alloc_at=number)   # the arena is number 0
    rig = Rig(ROTATED, LONG_CONTEXT, LONG_POOLS, HostDevice(1, debug=debug))
    messages: list[str] = []
    allocate = rig.device.allocate_pinned

    def allocate_pinned(size_bytes: int) -> np.ndarray:
        try:
            return allocate(size_bytes)
        except DeviceMemoryError as refused:
            raise error(str(refused)) from None

    monkeypatch.setattr(rig.device, "allocate_pinned", allocate_pinned)

    def work() -> None:
        for move in LONG_SCRIPT:
            before = rig.committed
            try:
                move(rig)
            except DeviceError as error:
                messages.append(str(error))
                assert rig.committed == before
                rig.check_frontiers()
                rig.check_history()
                move(rig)
        rig.check_history()

    try:
        within(60, work)
        assert len(messages) == (number <= LAYERS)   # the first slabs are pinned by the step itself
        assert all("no host memory" in line and "MiB of RAM are free); lower --ctx-size" in line for line in messages)
        assert next(rig.device._alloc_numbers) == 1 + 3 * LAYERS + 1   # and the one that failed
        assert rig.kv.cache.published == rig.committed
    finally:
        rig.close()


class InjectedError(Exception):
    """What goes wrong."""


class FailingDevice(HostDevice):
    """A host device of which one call fails before it does anything; the streams stay good.

    fail_at  the call of that number: copies enqueued and ops on pages, counted from 0
    """

    def __init__(self, fail_at: int, error: type[BaseException]) -> None:
        super().__init__(1, debug=HostDebug(poison=True))
        self.calls = 0
        self.fail_at = fail_at
        self.error = error
        for name in ("zero_page", "write_kv", "attend_decode", "attend_prefill", "fold"):
            setattr(self.ops, name, self._counted(getattr(self.ops, name)))

    def enqueue_copy(self, dst: Buffer, src: Buffer, stream: Stream) -> None:
        self._count()
        super().enqueue_copy(dst, src, stream)

    def _counted(self, do: Callable[..., None]) -> Callable[..., None]:
        def counted(*arguments: Any, **named: Any) -> None:
            self._count()
            do(*arguments, **named)

        return counted

    def _count(self) -> None:
        self.calls += 1
        if self.calls - 1 == self.fail_at:
            raise self.error("as asked for")


@cache
def calls_of_script() -> int:
    """Calls that can fail."""
    device = FailingDevice(-1, InjectedError)
    rig = Rig(ROTATED, CONTEXT, POOLS, device)
    try:
        for move in SCRIPT:
            move(rig)
        return device.calls
    finally:
        rig.close()


@settings(max_examples=examples(20))
@given(st.floats(0, 1, exclude_max=True), st.sampled_from([InjectedError, KeyboardInterrupt]))
def test_after_an_error_anywhere_the_same_move_succeeds(share: float, error: type[BaseException]) -> None:
    """While pages are copied, cleared, written, read or sent home: the error passes, and all goes on as before."""
    device = FailingDevice(int(share * calls_of_script()), error)
    rig = Rig(ROTATED, CONTEXT, POOLS, device)
    failed = 0
    try:
        for move in SCRIPT:
            try:
                move(rig)
            except error:
                failed += 1
                rig.check_frontiers()
                rig.check_history()
                move(rig)
        assert failed == int(device.calls > device.fail_at)   # how many calls there are depends on the link a little
        rig.check_history()
    finally:
        rig.close()


@pytest.mark.parametrize("number", [0, 1, 7, 10, 11])
def test_a_page_that_could_not_be_asked_back_is_not_taken_for_there(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Pages come back to a larger pool, the copy of one cannot be enqueued: the next step asks for it again."""
    rig = Rig(ROTATED, CONTEXT, DECODE_ALL, HostDevice(1, debug=HostDebug(poison=True)))
    enqueue = rig.device.enqueue_copy
    calls = 0

    def enqueue_copy(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > number:
            raise InjectedError
        enqueue(*arguments)

    try:
        rig.prefill(CONTEXT - 100)
        streamed = rig.kv.stats().streamed_pages_per_step
        assert streamed == 12
        rig.enter(Phase.DECODE)
        with monkeypatch.context() as patch:
            patch.setattr(rig.device, "enqueue_copy", enqueue_copy)
            with pytest.raises(InjectedError):
                rig.step(Phase.DECODE, 1)
        before = rig.device.counters().copy_calls
        rig.step(Phase.DECODE, 8)
        assert rig.device.counters().copy_calls == before + streamed - number
    finally:
        rig.close()


@pytest.mark.parametrize("then", [Phase.DECODE, Phase.PREFILL])
def test_a_page_that_could_not_be_sent_home_is_sent_before_it_is_streamed(
    monkeypatch: pytest.MonkeyPatch, then: Phase
) -> None:
    """The last page of a group fails to be sent, and the next step or phase wants the group's slots: it goes first."""
    least = Pools.between(CONTEXT, 0.0, 0.0).prefill
    pools = Pools(least, least if then is Phase.DECODE else 2 * least)
    rig = Rig(ROTATED, CONTEXT, pools, HostDevice(1, debug=HostDebug(poison=True)), ring_slots=11)
    send = rig.device.enqueue_copy
    fails = 0

    def enqueue_copy(dst: Buffer, src: Buffer, stream: Stream) -> None:
        nonlocal fails
        if stream is rig.device.publish and fails:
            fails -= 1
            raise InjectedError
        send(dst, src, stream)

    monkeypatch.setattr(rig.device, "enqueue_copy", enqueue_copy)
    try:
        rig.prefill(8 * PAGE - 1)
        rig.enter(Phase.DECODE)
        fails = 1
        with pytest.raises(InjectedError):
            rig.step(Phase.DECODE, 1)
        assert (rig.committed, rig.kv.cache.published) == (8 * PAGE, 8 * PAGE - 1)
        rig.step(then, 1, seed=1)
        assert not any(rig.kv._pools.holds(PageId(layer, 7)) for layer in range(LAYERS))
        rig.step(Phase.DECODE, 8, seed=2)
        rig.publish_all()
        rig.check_history()
    finally:
        rig.close()
