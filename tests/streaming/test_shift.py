"""Rows that move down through a device's memory: right bytes at any time of copies, no page comes twice, and errors."""

from __future__ import annotations

import random
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.host.device import HostDebug
from kvs_core.errors import BudgetError, DeviceError
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import PageGeometry
from kvs_core.paging.shift import plan_shift
from kvs_core.streaming import shift
from kvs_core.streaming.history import HostHistory
from tests.streaming.apart import ApartDevice
from tests.streaming.rig import DECODE_ROWS, LAYERS, PAGE, PLAIN, ROTATED, Pools, Rig
from tests.streaming.test_failures import FailingDevice, InjectedError, within
from tests.support.examples import examples

CONTEXT = 24 * PAGE


class FailingApartDevice(FailingDevice):
    """An ``ApartDevice`` of which a call fails; those of ``shift_rows`` count too."""

    is_host = False

    def __init__(self, fail_at: int, error: type[BaseException]) -> None:
        super().__init__(fail_at, error)
        self.ops.shift_rows = self._counted(self.ops.shift_rows)   # type: ignore[method-assign]


@settings(max_examples=examples(20))
@given(
    geometry=st.sampled_from([ROTATED, PLAIN]), prefill=st.floats(0, 1), decode=st.floats(0, 1),
    ring_slots=st.sampled_from([0, 0, 1, 5]), batch=st.integers(1, 5), tokens=st.integers(1, CONTEXT - 40),
    cuts=st.lists(st.tuples(st.integers(0, CONTEXT), st.integers(0, CONTEXT)), min_size=1, max_size=3),
    windowed=st.booleans(), seed=st.integers(0, 999),
)
def test_rows_are_right_whenever_copies_are_done(
    geometry: PageGeometry, prefill: float, decode: float, ring_slots: int, batch: int, tokens: int,
    cuts: list[tuple[int, int]], windowed: bool, seed: int,
) -> None:
    """The history and what steps read have the bytes of a flat cache, where copies are slow and free slots are NaN."""
    dice = random.Random(seed)
    debug = HostDebug(copy_delay=lambda: dice.choice((0.0, 0.0, 0.0005)), poison=True)
    windows = (0, 40) if windowed else ()
    rig = Rig(
        geometry, CONTEXT, Pools.between(CONTEXT, prefill, decode, windows), ApartDevice(1, debug=debug),
        ring_slots=ring_slots, windows=windows,
    )

    def work() -> None:
        rig.prefill(tokens)
        for keep, discard in cuts:
            rig.step(Phase.DECODE, min(DECODE_ROWS, CONTEXT - rig.committed), seed=keep)
            keep = min(keep, rig.committed)
            rig.shift(keep, min(discard, rig.committed - keep))
            rig.check_frontiers()
            rig.publish_all()
            rig.check_history()
            rig.step(Phase.DECODE, 1, seed=discard)
        rig.step(Phase.PREFILL, min(16, CONTEXT - rig.committed))

    try:
        with patch.object(shift, "_BATCH_BYTES", batch * geometry.page_bytes):
            within(60, work)
    finally:
        rig.close()


def test_pages_that_stay_do_not_come_back() -> None:
    """All is resident: a shift copies what is taken, page by page, and pages that are written in part. Behind it only
    pages that were not written come, and those for which there was no slot beside the work."""
    rig = Rig(ROTATED, CONTEXT, Pools.all_of(CONTEXT), ApartDevice(1, debug=HostDebug(poison=True)))
    try:
        rig.prefill(20 * PAGE)
        assert rig.device.counters().copy_bytes == 0
        with patch.object(shift, "_BATCH_BYTES", ROTATED.page_bytes):
            rig.shift(2 * PAGE + 5, 3 * PAGE)
        pages, moves = 17 * LAYERS, 15
        through = (1 + moves) * LAYERS           # sources; of the first page also the rows that stay. None is cut
        rest = 2 * LAYERS                        # below those
        for _ in range(2):
            rig.step(Phase.DECODE, 1)
            assert rig.device.counters().copy_bytes == (through + rest) * ROTATED.page_bytes
            assert sum(rig.kv.stats().moved_bytes) == (through + rest) * ROTATED.page_bytes
        assert rig.kv.stats().resident_pages == pages + LAYERS
    finally:
        rig.close()


def test_places_are_true_at_once() -> None:
    """Before the next step, pages are resident or streamed as the policy wants them."""
    rig = Rig(ROTATED, CONTEXT, Pools.between(CONTEXT, 0.3, 0.3), ApartDevice(1))
    try:
        rig.prefill(20 * PAGE)
        rig.shift(5, 2 * PAGE)
        places = rig.kv.places()
        assert [each.pages for each in places] == [18] * LAYERS
        assert sum(len(each.streamed) for each in places) + rig.kv.stats().resident_pages == 18 * LAYERS
        assert any(each.streamed for each in places)
    finally:
        rig.close()


def calls_of_shift() -> range:
    """Those of a device that a shift makes."""
    device = FailingApartDevice(-1, InjectedError)
    rig = Rig(ROTATED, CONTEXT, Pools.between(CONTEXT, 0.2, 0.2), device)
    try:
        rig.prefill(15 * PAGE)
        rig.publish_all()
        first = device.calls
        rig.shift(PAGE + 3, 2 * PAGE + 1)
        return range(first, device.calls)
    finally:
        rig.close()


@pytest.mark.parametrize("error", [InjectedError, KeyboardInterrupt])
def test_a_shift_that_fails_can_be_begun_anew(error: type[BaseException]) -> None:
    """Wherever it does: emptied, the cache is a fresh one, no copy of the shift is on its way, and texts are right."""
    with patch.object(shift, "_BATCH_BYTES", 2 * ROTATED.page_bytes):
        calls = calls_of_shift()
        assert len(calls) > 3 * 10 * LAYERS
        for number in calls[:: 3 if error is InjectedError else 11]:
            rig = Rig(ROTATED, CONTEXT, Pools.between(CONTEXT, 0.2, 0.2), FailingApartDevice(number, error))
            try:
                rig.prefill(15 * PAGE)
                rig.publish_all()
                with pytest.raises(error):
                    rig.shift(PAGE + 3, 2 * PAGE + 1)
                rig.truncate(0)
                rig.check_frontiers()
                assert rig.kv.stats().resident_pages == 0
                rig.prefill(6 * PAGE, seed=number)
                rig.step(Phase.DECODE, 3)
                rig.publish_all()
                rig.check_history()
            finally:
                rig.close()


def copies_of_shift(rig: Rig) -> range:
    """The numbers of a device's copies that a shift makes."""
    rig.prefill(15 * PAGE)
    rig.publish_all()
    counts = []
    for _ in range(2):
        counters = rig.device.counters()
        counts.append(counters.copy_calls + counters.publish_calls)
        if len(counts) == 1:
            rig.shift(PAGE + 3, 2 * PAGE + 1)
    return range(*counts)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_a_copy_that_fails_is_told(share: float) -> None:
    """A shift whose copies fail raises that error and does not hang; the cache can be emptied."""
    pools = Pools.between(CONTEXT, 1.0, 1.0)
    with patch.object(shift, "_BATCH_BYTES", 2 * ROTATED.page_bytes):
        whole = Rig(ROTATED, CONTEXT, pools, ApartDevice(1))
        try:
            copies = copies_of_shift(whole)
        finally:
            whole.close()
        number = copies[int(share * (len(copies) - 3 * LAYERS))]   # those at the end come back, and nobody waits
        rig = Rig(ROTATED, CONTEXT, pools, ApartDevice(1, debug=HostDebug(fail_copy_at=number)))

        def work() -> None:
            with pytest.raises(DeviceError, match=f"copy {number} "):
                copies_of_shift(rig)
            rig.truncate(0)
            assert rig.kv.cache.committed == 0

        try:
            within(60, work)
        finally:
            rig.close()


def test_too_little_memory_is_told_before_anything_moves() -> None:
    """Two pages that are taken from, and one that is made, have to fit: else the numbers, and what to do."""
    device = ApartDevice(1)
    history = HostHistory(device, [ROTATED.page_bytes], 4)
    history.ensure(4)
    for page in range(4):
        history.page(0, page)[:] = page
    rig_params = partial(shift.ShiftLayer, 0, ROTATED)
    work = np.zeros(3 * ROTATED.page_bytes - 1, np.uint8)
    through = shift.ShiftThrough(device, history, work)
    try:
        with pytest.raises(BudgetError, match=r"a context shift needs .* MiB of it, .*raise --kv-stream-arena-mib"):
            through.run([rig_params(None)], plan_shift(3, 5, 4 * PAGE, PAGE), lambda layer, page: None)
        assert [set(np.asarray(history.page(0, page))) for page in range(4)] == [{0}, {1}, {2}, {3}]
    finally:
        device.close()
        history.close()
