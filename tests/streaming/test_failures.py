"""Copies and allocations that fail: one kind of error, no hang, no wrong bit, and published rows stay what they are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.host.device import HostDebug, HostDevice
from kvs_core.errors import DeviceError
from kvs_core.memory.phases import Phase
from tests.streaming.rig import ROTATED, Pools, Rig

CONTEXT = 480
POOLS = Pools.between(CONTEXT, 0.1, 0.3)

Move = Callable[[Rig], object]
SCRIPT: list[Move] = [
    *[partial(Rig.step, phase=Phase.PREFILL, rows=60, seed=number) for number in range(6)],
    *[partial(Rig.step, phase=Phase.DECODE, rows=8, keep=5, seed=number) for number in range(9)],
    partial(Rig.truncate, tokens=4 * 32 + 9),
    *[partial(Rig.step, phase=Phase.DECODE, rows=8, keep=7, seed=number) for number in range(9)],
    partial(Rig.step, phase=Phase.DECODE, rows=3, leave_after=3, seed=70),
    partial(Rig.step, phase=Phase.PREFILL, rows=64, seed=71),
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
def made_by_script() -> tuple[int, int]:
    """How many copies and pinned allocations the script makes when nothing fails."""
    rig = Rig(ROTATED, CONTEXT, POOLS, HostDevice(1))
    try:
        for move in SCRIPT:
            move(rig)
        counters = rig.device.counters()
        return counters.copy_calls + counters.publish_calls, next(rig.device._alloc_numbers) - 1
    finally:
        rig.close()


@settings(max_examples=25)
@given(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.0, 0.0003]))
def test_a_failed_copy_ends_all_work_and_loses_nothing_published(share: float, delay: float) -> None:
    """Steps before it are right. From then on every move is right or that same error, never another, and none hangs."""
    number = int(share * made_by_script()[0])
    rig = Rig(ROTATED, CONTEXT, POOLS, HostDevice(1, debug=HostDebug(copy_delay=lambda: delay, fail_copy_at=number)))

    def work() -> None:
        messages: list[str] = []
        for move in SCRIPT * 2:
            if rig.committed > CONTEXT - 64:
                break
            try:
                move(rig)
            except DeviceError as error:
                messages.append(str(error))
                # Rows whose settle was interrupted by the failure count: they lie in their pages, if not yet at home.
                assert rig.kv.cache.reserved == rig.kv.cache.committed >= rig.committed
                if rig.kv.cache.committed > rig.committed:
                    break
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


@pytest.mark.parametrize("number", range(1, 7))
def test_a_failed_pinned_allocation_costs_one_step_and_nothing_else(number: int) -> None:
    """The step that needs the memory is refused before it begins; once there is memory, the same step runs."""
    rig = Rig(ROTATED, CONTEXT, POOLS, HostDevice(1, debug=HostDebug(poison=True, fail_alloc_at=number)))
    messages: list[str] = []

    def work() -> None:
        for move in SCRIPT:
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
        assert len(messages) == 1
        assert "no host memory" in messages[0]
        assert made_by_script()[1] == 6
        assert rig.kv.cache.published == rig.committed
    finally:
        rig.close()
