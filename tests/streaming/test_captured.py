"""Captured steps: recorded when what they move or read changes, right at every launch whatever the order of work.

Pages hold marks here, one for each layer and token, and the ops are checks that run when the device would: they take
positions and plans from the tables in device memory, as kernels do.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.base import StepInputs
from kvs_core.device.cuda import device as cuda_device
from kvs_core.device.cuda.device import CudaDevice
from kvs_core.device.cuda.plan import DevicePlan
from kvs_core.device.cuda.tables import STEP_PENDING, STEP_POSITION, STEP_ROWS, STEP_TOKENS
from kvs_core.device.operands import AttentionParams, AttentionRows
from kvs_core.engine import captured
from kvs_core.engine.captured import CapturedSteps
from kvs_core.errors import DeviceError, DeviceMemoryError
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import KvType, PageGeometry
from kvs_core.paging.residency import ResidencyConfig, ResidencyMode, least_pool_slots
from kvs_core.streaming.kv_stream import KvStream
from kvs_core.streaming.layer_kv import AttentionScratch
from tests.streaming.deferred import DeferredRuntime
from tests.support.examples import examples

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
LAYERS, PAGE, ROWS, PREFILL_ROWS = 3, 32, 8, 64
CONTEXT = 24 * PAGE   # of which up to 20 are streamed: from two slabs
GEOMETRY = PageGeometry(PAGE, 1, 32, 32, KvType.F32, KvType.F32)
PARAMS = AttentionParams(1, 1, 32, 32, False, 1.0, None, 1e-6)
LEAST = least_pool_slots(LAYERS, CONTEXT, PAGE, PREFILL_ROWS)


class MarkOps:
    """Ops that write and check marks. ``truth``: by number of a step, the token of every position that it may see."""

    def __init__(self, device: CudaDevice, runtime: DeferredRuntime) -> None:
        self._device = device
        self._runtime = runtime
        self.truth: dict[int, list[int]] = {}
        self.seen: dict[tuple[int, int], list[int]] = defaultdict(list)   # pages, by step and layer
        self.load_plan = device._ops.load_plan
        self.fail_at: tuple[str, int] | None = None   # op and layer
        self.error = DeviceError("a broken part; mend it")

    def zero_page(self, pool: np.ndarray, geometry: PageGeometry, slot: int) -> None:
        def work() -> None:
            pool[slot] = 0

        self._runtime.compute.enqueue(work)

    def write_kv(
        self, y: Any, params: Any, q: Any, pool: np.ndarray, geometry: Any, plan: DevicePlan, *, phase: Phase
    ) -> None:
        layer = self._layer(y, "write_kv")

        def work() -> None:
            number, position, rows = self._step()
            slots = _words(plan.slots, _words(plan.header, 1)[0])
            tokens = self._device._steps.memory[STEP_TOKENS:] if phase is DECODE else self._device._steps.tokens
            for row in range(rows):
                page, at = divmod(position + row, PAGE)
                _marks(pool, slots[page])[at] = _mark(layer, int(tokens[row]))
                assert tokens[row] == self.truth[number][position + row], f"step {number} has another's tokens"

        self._runtime.compute.enqueue(work)

    def attend_decode(
        self, q: Any, params: Any, pool: np.ndarray, geometry: Any, plan: DevicePlan, call: int, scratch: Any
    ) -> None:
        layer = self._layer(q, "attend_decode")

        def work() -> None:
            first, count, _, _ = _words(plan.calls + 16 * call, 4)
            for part in range(first, first + count):
                _, _, page, pages = _words(plan.parts + 16 * part, 4)
                self._check(layer, pool, plan, range(page, page + pages))

        self._runtime.compute.enqueue(work)

    def attend_prefill(
        self, q: Any, params: Any, pool: np.ndarray, geometry: Any, plan: DevicePlan, pages: range, running: Any, *,
        fresh: bool,
    ) -> None:
        layer = self._layer(q, "attend_prefill")
        self._runtime.compute.enqueue(lambda: self._check(layer, pool, plan, pages))

    def fold(self, params: Any, plan: DevicePlan, call: int, scratch: Any, segments: Any) -> None:
        """Nothing."""

    def finish_decode(
        self, y: Any, params: Any, geometry: Any, plan: DevicePlan, scratch: Any, segments: Any, out: Any
    ) -> None:
        self._finish(self._layer(y, "finish_decode"))

    def finish_prefill(self, y: Any, params: Any, geometry: Any, running: Any, out: Any) -> None:
        self._finish(self._layer(y, "finish_prefill"))

    def _finish(self, layer: int) -> None:
        def work() -> None:
            number, position, rows = self._step()
            pages = GEOMETRY.pages_of(position + rows)
            assert sorted(self.seen.pop((number, layer))) == list(range(pages)), f"step {number}, layer {layer}"

        self._runtime.compute.enqueue(work)

    def _layer(self, layer: int, op: str) -> int:
        if self.fail_at == (op, layer):
            raise self.error
        return layer

    def _step(self) -> tuple[int, int, int]:
        table = self._device._steps.memory
        return int(table[STEP_PENDING]), int(table[STEP_POSITION]), int(table[STEP_ROWS])

    def _check(self, layer: int, pool: np.ndarray, plan: DevicePlan, pages: range) -> None:
        number, position, rows = self._step()
        truth = self.truth[number]
        for page, slot in zip(pages, _words(plan.slots, pages.stop)[pages.start :], strict=True):
            positions = range(page * PAGE, min((page + 1) * PAGE, position + rows))
            expected = [_mark(layer, truth[at]) for at in positions]
            assert _marks(pool, slot)[: len(expected)].tolist() == expected, f"step {number}, {layer=}, {page=}"
            self.seen[number, layer].append(page)


def _mark(layer: int, token: int) -> int:
    return token * LAYERS + layer + 1


def _marks(pool: np.ndarray, slot: int) -> np.ndarray:
    """The marks of the tokens in a slot."""
    return pool[slot, : 4 * PAGE].view(np.int32)


def _words(address: int, count: int) -> list[int]:
    """int32 at an address of the device."""
    return list((ctypes.c_int32 * count).from_address(address))


class Simulation:
    """A cache of marks on a device without kernels, and the engine's way of running steps on it."""

    def __init__(self, seed: int, pool_slots: int, *, ring: int = 0, run: int = 0) -> None:
        self.runtime = DeferredRuntime(seed)
        runtime: Any = self.runtime
        self.device = CudaDevice(runtime)
        self.ops = MarkOps(self.device, self.runtime)
        self.device.ops = self.ops   # type: ignore[assignment]
        pages = CONTEXT // PAGE
        self.device.allocate_arena(LAYERS * pages * GEOMETRY.page_bytes)
        self.device.reserve_steps(LAYERS, pages, PREFILL_ROWS)
        config = ResidencyConfig(ResidencyMode.ADAPTIVE, LAYERS, GEOMETRY.page_bytes, ring, run)
        self.kv = KvStream(self.device, GEOMETRY, config, CONTEXT)
        self.captured = CapturedSteps(self.device)
        self.tokens: list[int] = []
        self.launched = self.eager = 0   # decode steps
        self._number = self._next_token = 0
        self._bind(pool_slots)

    def step(self, phase: Phase, rows: int, keep: int, *, leave: bool = False) -> None:
        """Run a step as ``engine.Step`` does, of tokens never seen before."""
        rows = min(rows, CONTEXT - len(self.tokens))
        if rows == 0:
            return
        tokens = list(range(self._next_token, self._next_token + rows))
        self._next_token += rows
        self._number += 1
        self.ops.truth[self._number] = self.tokens + tokens
        with self.kv.begin(rows, phase) as step:
            inputs = StepInputs(np.array(tokens, np.int32), step.first_position, self._number, phase)

            def record() -> None:
                step.fill_ring()
                for layer in range(LAYERS):
                    step.layer(layer).attend(AttentionRows(layer, layer, np.empty(rows)), PARAMS)

            captures = phase is DECODE and step.can_capture
            if captures and self.captured.launch(("step", rows), inputs, step, record):
                self.launched += 1
            else:
                self.ops.fail_at = None
                self.device.begin_step(inputs)
                record()
                self.eager += phase is DECODE
            if leave:
                return
            keep = rows if phase is PREFILL else min(keep, rows)
            step.settle(keep)
        self.tokens += tokens[:keep]

    def resize(self, pool_slots: int) -> None:
        """What a hand-over does."""
        self.captured.forget()
        self.kv.vacate(pool_slots)
        self.kv.drain()
        self._bind(pool_slots)

    def truncate(self, tokens: int) -> None:
        self.kv.truncate(tokens)
        del self.tokens[tokens:]

    def check_history(self) -> None:
        """All is done and home."""
        self.kv.drain()
        assert not self.ops.seen
        for layer in range(LAYERS):
            for page in range(GEOMETRY.pages_of(len(self.tokens))):
                tokens = self.tokens[page * PAGE : (page + 1) * PAGE]
                marks = self.kv.history_page(layer, page)[: 4 * len(tokens)].view(np.int32)
                assert marks.tolist() == [_mark(layer, token) for token in tokens]

    def close(self) -> None:
        self.device.close()
        self.kv.close()

    def _bind(self, pool_slots: int) -> None:
        held = 32
        partial = ROWS * (GEOMETRY.v_dim + 2)
        scratch = AttentionScratch(
            held * ROWS, np.empty(held * partial, np.float32), np.empty(2 * partial, np.float32),
            np.empty(PREFILL_ROWS * (GEOMETRY.v_dim + 2), np.float32),
        )
        self.kv.bind(self.device.arena_view(0, (pool_slots, GEOMETRY.page_bytes), np.uint8), scratch)


POOLS = st.integers(LEAST, LEAST + 12)
MOVES = st.one_of(
    st.tuples(st.just("decode"), st.integers(1, ROWS), st.integers(0, ROWS)),
    st.tuples(st.just("decode on"), st.integers(1, 12), st.sampled_from([1, 3, ROWS])),
    st.tuples(st.just("prefill"), st.integers(1, PREFILL_ROWS), st.just(0)),
    st.tuples(st.just("leave"), st.integers(1, ROWS), st.just(0)),
    st.tuples(st.just("fail"), st.integers(1, ROWS), st.integers(0, 3 * LAYERS - 1)),
    st.tuples(st.just("truncate"), st.integers(0, CONTEXT), st.just(0)),
    st.tuples(st.just("resize"), POOLS, st.just(0)),
)


@settings(max_examples=examples(100))
@given(
    moves=st.lists(MOVES, min_size=3, max_size=12), pool=POOLS, ring=st.integers(0, 12), run=st.integers(0, 4),
    start=st.integers(0, CONTEXT - 100), seed=st.integers(0, 2**20),
)
def test_every_launch_finds_the_pages_of_its_step(
    moves: list[tuple[str, int, int]], pool: int, ring: int, run: int, start: int, seed: int
) -> None:
    """Attention of a step reads, in every layer, the tokens of every page, and its inputs are its own: for any pools,
    rings and runs, any order of work that streams and events allow, after failures in a capture, and across changes of
    the pool. Then every row that was kept is in the history."""
    one = Simulation(seed, pool, ring=min(ring, pool - LEAST + 1), run=run)
    for _ in range(0, start, PREFILL_ROWS):
        one.step(PREFILL, PREFILL_ROWS, 0)
    for name, a, b in moves:
        if name == "decode":
            one.step(DECODE, a, b)
        elif name == "decode on":
            for _ in range(a):
                one.step(DECODE, b, b)
        elif name == "prefill":
            one.step(PREFILL, a, 0)
        elif name == "leave":
            one.step(DECODE, a, 0, leave=True)
        elif name == "truncate":
            one.truncate(min(a, len(one.tokens)))
        elif name == "resize":
            one.resize(a)
        else:
            one.ops.fail_at = ("write_kv", "attend_decode", "finish_decode")[b % 3], b // 3
            recorded = one.captured.recorded
            try:
                one.step(DECODE, a, 0)
                assert one.captured.recorded == recorded   # a replay: nothing is broken in that
            except DeviceError:
                assert one.captured.recorded == recorded
            one.ops.fail_at = None
    one.check_history()
    one.close()


@settings(max_examples=examples(60))
@given(
    rows=st.lists(st.integers(1, ROWS), min_size=4, max_size=30), pool=POOLS, ring=st.integers(0, 12),
    run=st.integers(0, 4), start=st.integers(15 * PAGE, CONTEXT - 100), pinned=st.integers(0, 2 * LAYERS),
    pieces=st.sampled_from([0, 2]), piece_bytes=st.sampled_from([5000, 20_000, 1 << 17]), seed=st.integers(0, 2**20),
)
def test_slabs_that_cannot_be_pinned_cost_time_and_no_bit(
    rows: list[int], pool: int, ring: int, run: int, start: int, pinned: int, pieces: int, piece_bytes: int, seed: int
) -> None:
    """However many slabs are pinned, and whether the pieces are that the others pass through: every step reads the
    tokens of its pages, and those that stream from a slab that is not pinned are not captured."""
    with patch.object(cuda_device, "_PAGEABLE_BYTES", piece_bytes):
        one = Simulation(seed, pool, ring=min(ring, pool - LEAST + 1), run=run)
    one.runtime.pins_left = {True: pinned, False: pieces}
    for _ in range(0, start, PREFILL_ROWS):
        one.step(PREFILL, PREFILL_ROWS, 0)
    for number, count in enumerate(rows):
        before = one.eager
        one.step(DECODE, count, count)
        runs = one.kv.streamer.schedule.runs
        assert one.eager - before == any(not one.kv._history.is_pinned(run.layer, run) for run in runs)
        if number % 7 == 3:
            one.truncate(len(one.tokens) - 3 * PAGE)
    assert one.kv._history.has_pageable == (pinned < 2 * LAYERS and len(one.kv._history._slabs[-1]) > pinned // LAYERS)
    one.check_history()
    one.close()


NO_MEMORY = [("", ""), ("capture", ""), ("launch", ""), ("", "write_kv"), ("", "attend_decode"), ("", "finish_decode")]


@settings(max_examples=examples(60))
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(NO_MEMORY), st.integers(0, LAYERS - 1), st.integers(1, ROWS), st.booleans()),
        min_size=3, max_size=20,
    ),
    pool=POOLS, ring=st.integers(0, 12), run=st.integers(0, 4), start=st.integers(0, CONTEXT - 200),
    pause=st.integers(0, 3), seed=st.integers(0, 2**20),
)
def test_a_step_without_memory_for_its_recording_runs_as_it_comes(
    moves: list[tuple[tuple[str, str], int, int, bool]], pool: int, ring: int, run: int, start: int, pause: int,
    seed: int,
) -> None:
    """Wherever memory lacks: half way through a recording, at its end, or at a launch. Every step has its row, and
    later ones are recorded again."""
    with patch.object(captured, "PAUSE_STEPS", pause):
        one = Simulation(seed, pool, ring=min(ring, pool - LEAST + 1), run=run)
        for _ in range(0, start, PREFILL_ROWS):
            one.step(PREFILL, PREFILL_ROWS, 0)
        one.ops.error = DeviceMemoryError("no memory for a kernel")
        for (graph, op), layer, rows, leave in moves:
            one.runtime.fail_graph, one.ops.fail_at = graph, (op, layer) if op else None
            eager = one.eager
            one.step(DECODE, rows, rows, leave=leave)
            assert one.eager > eager or graph != "launch"
            one.runtime.fail_graph, one.ops.fail_at = "", None
        launched = one.launched
        for _ in range(pause + 1):
            one.step(DECODE, 1, 0)
        assert one.launched > launched
        one.check_history()
    one.close()


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 2**20))
def test_copies_behind_a_step_that_was_left_wait_for_its_launch(seed: int) -> None:
    """With a ring of one slot, which the launch that is still under way fills again and again."""
    one = Simulation(seed, LEAST, ring=1, run=1)
    for _ in range(5):
        one.step(PREFILL, PREFILL_ROWS, 0)
    for _ in range(5):
        one.step(DECODE, ROWS, 0, leave=True)
        one.step(DECODE, ROWS, 1)
    one.check_history()
    one.close()


def test_steps_are_recorded_when_cuts_move_and_not_before() -> None:
    """The least pool, with a ring of one slot: 3 layers of 6 pages and one, for a prefill; decode needs 4 or 5.

        position    pages a layer   resident, at most 18         cuts
        0           1 to 6          18
        192         7               3 + 7 + 7 = 17               4, 0, 0
        224         8               4 + 4 + 8 = 16               4, 4, 0
        256         9               5 + 5 + 5 = 15               4, 4, 4
        288         10              6 + 6 + 6 = 18
        320         11              3 + 7 + 7 = 17               8, 4, 4
    """
    one = Simulation(3, LEAST, ring=1, run=1)
    assert LEAST == 19
    counts = []
    for _ in range(320 // ROWS):
        one.step(DECODE, ROWS, ROWS)
        counts.append((len(one.tokens), one.captured.recorded))
    one.close()
    changes = [before for (before, a), (_, b) in pairwise(counts) if a != b]
    assert changes == [192, 224, 256]
    assert counts[-1] == (320, 4)


def test_captured_copies_count_when_they_are_launched() -> None:
    """``Counters`` tell of what moved: nothing for a capture, each launch for itself."""
    one = Simulation(4, LEAST, ring=1, run=1)
    for _ in range(4):
        one.step(PREFILL, PREFILL_ROWS, 0)
    one.step(DECODE, 1, 1)
    for _ in range(3):
        before = one.device.counters()
        one.step(DECODE, 1, 1)
        after = one.device.counters()
        streamed = one.kv.stats().streamed_pages_per_step
        assert after.copy_calls - before.copy_calls == streamed > 0
        assert after.copy_bytes - before.copy_bytes == streamed * GEOMETRY.page_bytes
    one.check_history()
    one.close()


def test_a_recording_says_nothing_of_the_link() -> None:
    """A step that is recorded has not waited for the link, and no ring grows for it: not even where a run that is too
    long for the slots that are free leaves the link without work while the step is recorded."""
    one = Simulation(5, LEAST + 12, ring=12, run=6)
    while len(one.tokens) < 16 * PAGE:
        one.step(PREFILL, PREFILL_ROWS, PREFILL_ROWS)
    one.kv.streamer.take_starved()
    recorded = one.captured.recorded
    for rows in (1, 3, 1, 4, 2):
        one.step(DECODE, rows, 0)
        assert not one.kv.streamer.take_starved()
    assert len({run.pages for run in one.kv.streamer.schedule.runs}) > 1
    assert one.captured.recorded == recorded + 4
    one.close()
