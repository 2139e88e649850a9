"""Steps that run as they come: their pages are not pinned, or memory for their recording lacks."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.cuda import device as cuda_device
from kvs_core.engine import captured
from kvs_core.errors import DeviceMemoryError
from tests.streaming.marks import CONTEXT, DECODE, LAYERS, LEAST, PAGE, POOLS, PREFILL, PREFILL_ROWS, ROWS, Simulation
from tests.support.examples import examples


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
