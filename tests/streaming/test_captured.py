"""Captured steps: recorded when what they move or read changes, right at every launch whatever the order of work."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.errors import DeviceError
from tests.streaming.marks import (
    CONTEXT,
    DECODE,
    GEOMETRY,
    LAYERS,
    LEAST,
    PAGE,
    POOLS,
    PREFILL,
    PREFILL_ROWS,
    ROWS,
    Simulation,
)
from tests.support.examples import examples

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
