"""No early read and no early write, on a device that orders nothing by itself: see ``traced``."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.base import Fence
from kvs_core.device.host.device import HostDevice
from kvs_core.device.host.ops import kv_write
from kvs_core.device.operands import AttentionParams, RopeTable
from kvs_core.memory.phases import Phase
from kvs_core.paging import slabs
from kvs_core.paging.geometry import PageGeometry
from kvs_core.paging.shift import plan_shift
from kvs_core.paging.spans import row_spans
from kvs_core.streaming import shift
from kvs_core.streaming.history import HostHistory
from kvs_core.streaming.streamer import Streamer
from tests.streaming.rig import DECODE_ROWS, LAYERS, PAGE, PLAIN, PREFILL_ROWS, ROTATED, Pools, Rig
from tests.streaming.traced import TracedDevice
from tests.support.examples import examples

CONTEXT = 24 * PAGE   # of which up to 20 are streamed: from two slabs

Move = tuple[str, int, int]
MOVES = st.one_of(
    st.tuples(st.just("decode"), st.integers(1, DECODE_ROWS), st.integers(0, DECODE_ROWS)),
    st.tuples(st.just("decode on"), st.integers(1, 12), st.just(DECODE_ROWS)),
    st.tuples(st.just("prefill"), st.integers(1, PREFILL_ROWS), st.integers(0, PREFILL_ROWS)),
    st.tuples(
        st.sampled_from(["leave decode", "leave prefill"]), st.integers(1, DECODE_ROWS), st.integers(0, 2 * LAYERS - 1)
    ),
    st.tuples(st.just("truncate"), st.integers(0, CONTEXT), st.just(0)),
    st.tuples(st.just("publish"), st.just(0), st.just(0)),
    st.tuples(st.just("shift"), st.integers(0, CONTEXT), st.integers(0, CONTEXT)),
)


def step(rig: Rig, device: TracedDevice, phase: Phase, rows: int, keep: int, leave_after: int = 2 * LAYERS) -> None:
    """One step, around which the compute stream uses all of the arena behind the pool."""
    rows = min(rows, rig.context - rig.committed)
    if rows == 0:
        return
    rig.enter(phase)
    pool = rig.handover.layout.pool
    device.touch(pool, range(len(pool), rig.arena.plan.total_bytes // rig.geometry.page_bytes))
    rig.step(phase, rows, min(keep, rows), leave_after=leave_after)


def carry_out(rig: Rig, device: TracedDevice, move: Move) -> None:
    name, first, second = move
    if name == "decode on":
        for _ in range(first):
            step(rig, device, Phase.DECODE, second, second)
    elif name in ("decode", "prefill"):
        step(rig, device, Phase(name), first, second)
    elif name.startswith("leave"):
        step(rig, device, Phase(name.removeprefix("leave ")), first, 0, second)
    elif name == "truncate":
        rig.truncate(min(first, rig.committed))
    elif name == "shift":
        keep = min(first, rig.committed)
        rig.shift(keep, min(second, rig.committed - keep))
    else:
        rig.kv.publish_dirty()


@settings(max_examples=examples(60))
@given(
    geometry=st.sampled_from([ROTATED, PLAIN]),
    prefill=st.floats(0, 1), decode=st.floats(0, 1),
    ring_slots=st.sampled_from([0, 0, 1, 2, 5, 9]), run_pages=st.sampled_from([0, 0, 1, 3, 8]),
    tokens=st.integers(0, CONTEXT - 40), seed=st.integers(0, 999),
    moves=st.lists(MOVES, max_size=12),
)
def test_every_access_is_ordered_by_streams_and_fences(
    geometry: PageGeometry, prefill: float, decode: float, ring_slots: int, run_pages: int, tokens: int, seed: int,
    moves: list[Move],
) -> None:
    """Copies and kernels that touch one page are ordered by what they waited for, on streams that all run freely."""
    device = TracedDevice(geometry, seed)
    rig = Rig(
        geometry, CONTEXT, Pools.between(CONTEXT, prefill, decode), device, ring_slots=ring_slots, run_pages=run_pages
    )
    device.committed_tokens = lambda: rig.kv.cache.committed
    try:
        while rig.committed < tokens:
            step(rig, device, Phase.PREFILL, PREFILL_ROWS, min(PREFILL_ROWS, tokens - rig.committed))
        for move in moves:
            carry_out(rig, device, move)
        rig.publish_all()
        rig.check_history()
    finally:
        rig.close()


@pytest.mark.parametrize(("keep", "discard"), [(40, 100), (0, 3 * PAGE), (PAGE + 7, 5)])
@pytest.mark.parametrize("decode", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("batch", [1, 2, 30])
def test_a_shift_is_ordered_too(batch: int, decode: float, keep: int, discard: int) -> None:
    """In batches of a few pages that take turns in two areas, while other results stay where they are."""
    device = TracedDevice(ROTATED, batch)
    rig = Rig(ROTATED, CONTEXT, Pools.between(CONTEXT, 0.3, decode), device)
    device.committed_tokens = lambda: rig.kv.cache.committed
    try:
        rig.prefill(CONTEXT - 40)
        step(rig, device, Phase.DECODE, 1, 1)
        with patch.object(shift, "_BATCH_BYTES", batch * ROTATED.page_bytes):
            for _ in range(2):
                carry_out(rig, device, ("shift", keep, discard))
                step(rig, device, Phase.DECODE, DECODE_ROWS, DECODE_ROWS)
        rig.publish_all()
        rig.check_history()
    finally:
        rig.close()


@pytest.mark.parametrize("work_pages", [6, 10, 14, 40])
def test_layers_with_pages_of_other_sizes_are_shifted_in_order(work_pages: int) -> None:
    """Areas of one size lie across those of another, and where there is room for one alone it is waited for. The rows
    are those of a shift in place."""
    geometries = [ROTATED, replace(ROTATED, kv_heads=2), ROTATED, replace(ROTATED, kv_heads=2)]
    params = AttentionParams(1, 1, 64, 64, False, 1.0, RopeTable(np.ones(1), False), 1e-6)
    layers = [shift.ShiftLayer(index, geometry, params) for index, geometry in enumerate(geometries)]
    moves = plan_shift(PAGE + 7, 2 * PAGE + 3, 18 * PAGE + 5, PAGE)
    device, host = TracedDevice(ROTATED, 0), HostDevice(1)
    histories = [HostHistory(device, [geometry.page_bytes for geometry in geometries], 20) for _ in range(2)]
    for each in (device, host):
        each.begin_shift([params], -(2 * PAGE + 3))
    try:
        for history in histories:
            history.ensure(20)
            dice = np.random.default_rng(1)
            for layer in layers:
                rows = [dice.standard_normal((20 * PAGE, layer.geometry.kv_heads, 64), np.float32) for _ in range(2)]
                pages = np.stack([history.page(layer.index, page) for page in range(20)])
                kv_write.kv_write(*rows, pages, layer.geometry, row_spans(0, 20 * PAGE, PAGE, range(20)))
                for number, page in enumerate(pages):
                    history.page(layer.index, number)[:] = page
                    device.access("publish", writes=device.places(history.page(layer.index, number)))
        device.publish.synchronize()
        work = np.zeros(work_pages * ROTATED.page_bytes, np.uint8)
        device.touch(work.reshape(work_pages, -1), range(work_pages))
        with patch.object(shift, "_BATCH_BYTES", 2 * ROTATED.page_bytes):
            shift.ShiftThrough(device, histories[0], work).run(layers, moves, lambda layer, page: None)
        shift.shift_in_place(host, histories[1], layers, moves)
        for layer in layers:
            for page in range(20):
                np.testing.assert_array_equal(*(history.page(layer.index, page) for history in histories))
    finally:
        for each in (device, host, *histories):
            each.close()


def test_a_page_coming_back_is_waited_for_before_its_slot_is_anothers() -> None:
    """A step that is left at once has asked for pages; forgotten on their way, they leave slots that others get."""
    device = TracedDevice(ROTATED, 0)
    rig = Rig(ROTATED, CONTEXT, Pools.between(CONTEXT, 0.0, 0.8), device)
    device.committed_tokens = lambda: rig.kv.cache.committed
    try:
        rig.prefill(CONTEXT - 100)
        before = device.copies
        step(rig, device, Phase.DECODE, 1, 0, 0)
        assert device.copies > before + 10
        rig.truncate(5)
        for _ in range(40):
            step(rig, device, Phase.DECODE, DECODE_ROWS, DECODE_ROWS)
    finally:
        rig.close()


def test_a_page_coming_back_is_waited_for_before_it_moves() -> None:
    """Pages asked for by a step that is left at once lie where a smaller pool ends: they arrive, then they move."""
    device = TracedDevice(ROTATED, 0)
    rig = Rig(ROTATED, CONTEXT, Pools.between(CONTEXT, 0.5, 0.1), device)
    device.committed_tokens = lambda: rig.kv.cache.committed
    try:
        rig.prefill(CONTEXT - 100)
        rig.truncate(4 * PAGE + 5)
        before = device.copies
        step(rig, device, Phase.PREFILL, 1, 0, 0)
        assert device.copies > before
        coming = set(rig.kv._residents.promoted)
        rig.enter(Phase.DECODE)
        assert coming & set(rig.kv._pools)
        step(rig, device, Phase.DECODE, DECODE_ROWS, DECODE_ROWS)
    finally:
        rig.close()


def test_a_run_over_the_end_of_a_segment_keeps_its_slots_until_its_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads such a run in two calls; only after the second may its slots be filled again. Slabs that end with
    segments give no such runs, so these do not."""
    monkeypatch.setattr(slabs, "_FULL", 100)
    context = 140 * PAGE   # more groups than scratch rows: calls end with segments
    device = TracedDevice(PLAIN, 0)
    rig = Rig(PLAIN, context, Pools(34, 34), device, ring_slots=20, run_pages=20)
    device.committed_tokens = lambda: rig.kv.cache.committed
    try:
        rig.prefill(context - 32)
        for number in range(3):
            step(rig, device, Phase.DECODE, DECODE_ROWS, DECODE_ROWS)
            runs = rig.kv.streamer.schedule.by_layer[0]
            assert any(run.first_page < 64 < run.end_page for run in runs), number
    finally:
        rig.close()


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 24), st.integers(1, 9)), max_size=6),
    st.integers(0, 999),
)
def test_ring_slots_come_and_go_in_order(changes: list[tuple[int, int, int, int]], seed: int) -> None:
    """A ring that grows over slots in use until now, and shrinks again; steps left between reading and releasing."""
    dice = random.Random(seed)
    device = TracedDevice(ROTATED, seed)
    history = HostHistory(device, [ROTATED.page_bytes] * LAYERS, 40)
    history.ensure(40)
    for layer in range(LAYERS):
        for page in range(40):
            device.access("publish", writes=[history.page(layer, page).ctypes.data])
    device.publish.synchronize()
    pool = np.zeros((24, ROTATED.page_bytes), np.uint8)
    streamer = Streamer(device, history, lambda first, slots: pool[first : first + slots].reshape(-1))
    try:
        for first_groups, second_groups, ring, run_pages in changes:
            device.touch(pool, range(len(streamer._ring), 24))
            streamer.replan([range(4 * first_groups), range(4 * second_groups)], ring_slots=ring, run_pages=run_pages)
            for _ in range(dice.randint(0, 3)):
                if dice.random() < 0.5:
                    streamer.pump()
                runs = streamer.schedule.runs
                until = dice.randint(0, len(runs)) if dice.random() < 0.5 else len(runs)
                for run in runs[:until]:
                    streamer.acquire(run)
                    device.access("compute", reads=[int(pool[slot].ctypes.data) for slot in run.slots])
                    if run is runs[until - 1] and until < len(runs) and dice.random() < 0.5:
                        break
                    streamer.release(run)
                if until < len(runs):
                    streamer.empty()
                    streamer.pump(between_steps=True)
            device.touch(pool, range(len(streamer._ring), 24))
    finally:
        device.close()
        history.close()


def test_the_tracer_finds_a_missing_wait() -> None:
    """A copy into a slot that is being read, a read of one that is being filled: found, and cured by a wait."""
    device = TracedDevice(ROTATED, 0)
    a, b = 4096, 8192
    device.access("compute", writes=[a])
    with pytest.raises(AssertionError, match="copy uses a place that compute may still be writing"):
        device.access("copy", writes=[a])
    device.copy.wait(device.compute.record())
    device.access("copy", writes=[a])
    with pytest.raises(AssertionError, match="compute uses a place that copy may still be writing"):
        device.access("compute", reads=[a])
    device.compute.wait(device.copy.record())
    device.access("compute", reads=[a])
    with pytest.raises(AssertionError, match="copy writes to a place that compute may still be reading"):
        device.access("copy", writes=[a])
    with pytest.raises(AssertionError, match="never written"):
        device.access("compute", reads=[b])
    device.compute.synchronize()
    device.access("publish", writes=[a])
    device.close()


def test_a_batch_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compute stream before its first run is read, by the copy stream before its slots are filled again: small
    layers share waits."""
    device = TracedDevice(ROTATED, 0)
    history = HostHistory(device, [ROTATED.page_bytes] * LAYERS, 40)
    history.ensure(40)
    for page in range(8):
        for layer in range(LAYERS):
            device.access("publish", writes=[history.page(layer, page).ctypes.data])
    device.publish.synchronize()
    pool = np.zeros((40, ROTATED.page_bytes), np.uint8)
    streamer = Streamer(device, history, lambda first, slots: pool[first : first + slots].reshape(-1))
    try:
        streamer.replan([range(8)] * LAYERS, ring_slots=36, run_pages=4)
        schedule = streamer.schedule
        waits: Counter[str] = Counter()
        monkeypatch.setattr(device.dice, "random", lambda: 0.0)   # no reader is done by the time that it is asked
        for stream in (device.compute, device.copy):

            def wait(fence: Fence, stream: Any = stream, inner: Any = stream.wait) -> None:
                waits[stream.name] += 1
                inner(fence)

            monkeypatch.setattr(stream, "wait", wait)
        for _ in range(5):
            for run in schedule.runs:
                streamer.acquire(run)
                device.access("compute", reads=[int(pool[slot].ctypes.data) for slot in run.slots])
                streamer.release(run)
        batches = len(set(schedule.batch_ends))
        assert batches < len(schedule.runs)
        assert waits["compute"] == 5 * batches
        assert 0 < waits["copy"] <= 5 * batches
    finally:
        device.close()
        history.close()
