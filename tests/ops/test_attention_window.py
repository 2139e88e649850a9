"""Sliding-window attention: close to softmax in float64 over the window, and not a bit from what lies before it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.device.base import StepInputs
from kvs_core.device.host.ops import HostOps, attention
from kvs_core.device.host.workers import Team
from kvs_core.device.operands import AttentionParams
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import GROUP_PAGES, SEGMENT_GROUPS, KvType
from kvs_core.paging.schedule import Run
from kvs_core.paging.spans import LEAST_SCRATCH_GROUPS, Chunk, LayerPlan, plan_layer
from tests.ops.paged import Context, decode, geometry_of, plain_plan, prefill, spoil

PAGE = 32
SEGMENT_PAGES = GROUP_PAGES * SEGMENT_GROUPS
WINDOWS = [1, 5, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, 9 * PAGE + 7, 1000]
SEEDS = st.integers(0, 2**32 - 1)
# float32 sums of some hundred products against float64, for values about 1.
CLOSE = {"rtol": 0, "atol": 1e-5}


def _same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def _first_seen(position: int, window: int) -> int:
    """The first token that the row at ``position`` sees."""
    return max(0, position + 1 - window)


def _first_groups(position: int, window: int, page_tokens: int = PAGE) -> range:
    """First pages that a plan may have for rows from ``position`` on: of groups up to the one that is seen first."""
    return range(0, _first_seen(position, window) // page_tokens + 1, GROUP_PAGES)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("tokens", [300, 320, 9])
def test_every_window_attends(window: int, rows: int, tokens: int) -> None:
    """Decode and prefill attend to the last keys up to the row's own, whether a page ends with them or not."""
    context = Context(geometry_of(), tokens)
    q, pages, position = context.q(rows), context.pages(), tokens - rows
    expected = context.expected(q, window)
    np.testing.assert_allclose(decode(context.geometry, pages, q, position, window=window), expected, **CLOSE)
    np.testing.assert_allclose(prefill(context.geometry, pages, q, position, window=window), expected, **CLOSE)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("tokens", "rows"), [(300, 300), (400, 150), (333, 33)])
def test_prefill_of_many_rows(window: int, tokens: int, rows: int) -> None:
    """A ubatch longer than the window and shorter, several tiles of rows, at the start and later."""
    context = Context(geometry_of(k_dim=32, v_type=KvType.Q5_1), tokens, rep=8)
    q, pages, first = context.q(rows), context.pages(), tokens - rows
    many = prefill(context.geometry, pages, q, first, window=window)
    np.testing.assert_allclose(many, context.expected(q, window), **CLOSE)
    each = [range(page, page + 1) for page in range(len(pages))]
    _same_bits(prefill(context.geometry, pages, q, first, each, window=window), many)
    for start in _first_groups(first, window):
        _same_bits(prefill(context.geometry, pages, q, first, each[start:], window=window), many)


@pytest.mark.parametrize("tokens", [1, 70, 333])
def test_a_window_of_the_whole_context_is_none(tokens: int) -> None:
    """From a window as long as the context on, the bits are those without one."""
    context = Context(geometry_of(), tokens)
    q, pages = context.q(1), context.pages()
    for attend in (decode, prefill):
        whole = attend(context.geometry, pages, q, tokens - 1)
        for window in (tokens, tokens + 1, (1 << 31) - 1):
            _same_bits(attend(context.geometry, pages, q, tokens - 1, window=window), whole)


@given(
    st.integers(0, 300), st.sampled_from([2, 3, 4, 5, 6, 7, 8, 65]), st.sampled_from([1, 3, 6]),
    st.sampled_from([*WINDOWS, 2, 64, 100]), SEEDS,
)
def test_rows_do_not_see_each_other(before: int, rows: int, rep: int, window: int, seed: int) -> None:
    """T rows at once have the bits of T steps of one row, each with a plan that begins where its own window does."""
    geometry = geometry_of(kv_heads=1, k_dim=32)
    context = Context(geometry, before + rows, rep, seed)
    q = context.q(rows)
    together = decode(geometry, context.pages(), q, before, window=window)
    for row in range(rows):
        position = before + row
        plan = plain_plan(geometry.pages_of(position + 1), _first_groups(position, window)[-1])
        alone = decode(geometry, context.pages(position + 1), q[row : row + 1], position, plan, window=window)
        _same_bits(alone, together[row : row + 1])


def _streamed(draw: st.DrawFn, first: int, pages: int) -> LayerPlan:
    """A plan from page ``first`` on: some runs through a ring, then resident pages."""
    cut = draw(st.integers(first // GROUP_PAGES, (pages - 1) // GROUP_PAGES)) * GROUP_PAGES
    inner = draw(st.sets(st.integers(first + 1, cut - 1), max_size=5)) if cut > first + 1 else set()
    runs = [range(*pair) for pair in pairwise(sorted({first, cut, *inner}))]
    ring = max(map(len, runs), default=0)
    slots = [ring + pages] * first + list(draw(st.permutations(range(ring, ring + pages))))[first:]
    chunks = []
    for part in runs:
        run = Run(0, part.start, len(part), ring - len(part))
        slots[part.start : part.stop] = run.slots
        chunks.append(Chunk(part, run))
    chunks.append(Chunk(range(cut, pages)))
    return plan_layer(slots, chunks, scratch_groups=LEAST_SCRATCH_GROUPS, partial=first > 0)


@given(st.data(), st.integers(1, 600), st.integers(1, 8), st.sampled_from([*WINDOWS, 130, 257]), SEEDS)
def test_what_is_not_seen_may_be_left_out(data: st.DataObject, tokens: int, rows: int, window: int, seed: int) -> None:
    """Plans from any group on up to the first one that is seen, placed and streamed in any way, give the same bits."""
    rows = min(rows, tokens)
    context = Context(geometry_of(k_dim=32, k_type=KvType.Q4_0, v_type=KvType.F16), tokens, seed=seed)
    pages, q, first = context.pages(), context.q(rows), tokens - rows
    whole = decode(context.geometry, pages, q, first, window=window)
    start = data.draw(st.sampled_from(_first_groups(first, window)))
    plan = _streamed(data.draw, start, len(pages))
    _same_bits(decode(context.geometry, pages, q, first, plan, spare=1, window=window), whole)


@pytest.mark.parametrize("window", [1, 40, 300, 32 * SEGMENT_PAGES + 9])
def test_what_is_not_seen_may_be_left_out_in_segments(window: int) -> None:
    """The same over three segments, of which plans leave out none to all but the last, or begin within one."""
    tokens = PAGE * (2 * SEGMENT_PAGES + 9) - 5
    context = Context(geometry_of(kv_heads=1, k_dim=32), tokens, rep=1)
    pages, q = context.pages(), context.q(3)
    whole = decode(context.geometry, pages, q, tokens - 3, window=window)
    np.testing.assert_allclose(whole, context.expected(q, window), **CLOSE)
    starts = _first_groups(tokens - 3, window)
    for start in {*starts[::7], *starts[-2:]}:
        plan = plain_plan(len(pages), start)
        assert plan.segments == 3 - start // SEGMENT_PAGES
        _same_bits(decode(context.geometry, pages, q, tokens - 3, plan, window=window), whole)


@pytest.mark.parametrize("window", [1, 5, PAGE, PAGE + 1, 3 * PAGE, 200])
@pytest.mark.parametrize("kv_type", [KvType.F32, KvType.F16, KvType.Q8_0, KvType.Q4_1])
def test_what_no_row_sees_is_not_there(kv_type: KvType, window: int) -> None:
    """Poison in pages before all windows, and in rows of a page before them, changes no bit and warns of nothing."""
    context = Context(geometry_of(k_type=kv_type, v_type=kv_type), tokens=301)
    geometry, pages = context.geometry, context.pages()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (1, 4, 40):
            q, first = context.q(rows), 301 - rows
            spoiled = spoil(pages, geometry, _first_seen(first, window))
            assert not np.array_equal(spoiled, pages)
            for attend in (decode, prefill):
                got = attend(geometry, spoiled, q, first, window=window)
                _same_bits(got, attend(geometry, pages, q, first, window=window))


@pytest.mark.parametrize("window", [3, 40])   # that begins and ends in one page, in two
def test_a_row_does_not_meet_what_another_sees(window: int) -> None:
    """Infinite and NaN values that only the first rows see, or only the last, leave the other rows' bits alone."""
    context = Context(geometry_of(k_type=KvType.F32, v_type=KvType.F32), tokens=301)
    q, first = context.q(6), 296 - window   # the row at 295 + t sees [first + t, 296 + t)
    clean = decode(context.geometry, context.pages(), q, 295, window=window)
    context.v[first], context.v[first + 1], context.k[first] = np.inf, np.nan, np.nan
    context.v[300], context.v[299] = np.nan, -np.inf
    spoiled = decode(context.geometry, context.pages(), q, 295, window=window)
    _same_bits(spoiled[2:4], clean[2:4])
    assert not np.isfinite(spoiled[[0, 1, 4, 5]]).any()


@pytest.mark.parametrize("window", [0, 1, 40, 1000])
def test_sums_of_prefill(window: int) -> None:
    """ln of the sum of exp(score) of each row and head over what the row sees, as float64 has it."""
    tokens, rows = 300, 50
    context = Context(geometry_of(k_type=KvType.F32, v_type=KvType.F16), tokens)
    pages, q = context.pages(), context.q(rows)
    running = np.full((rows, 6, context.geometry.v_dim + 2), np.nan, np.float32)
    attention.attend_prefill(
        q, pages, context.geometry, range(len(pages)), range(len(pages)), running, fresh=True,
        first_position=tokens - rows, window=window,
    )
    scores = np.einsum("thd,shd->ths", q.astype(np.float64), np.repeat(context.k, context.rep, axis=1))
    ahead = np.arange(tokens) - np.arange(tokens - rows, tokens)[:, None]
    hidden = (ahead > 0) | (ahead <= -window if window else False)
    expected = np.log(np.where(hidden[:, None], 0, np.exp(scores)).sum(axis=-1))
    np.testing.assert_allclose(HostOps.log_sums(HostOps.prefill_sums(running)), expected, rtol=0, atol=1e-5)


def test_the_window_of_a_layer_is_its_own() -> None:
    """The ops take the window from ``AttentionParams``: layers with and without one share a step and its plan."""
    tokens, rows = 300, 3
    context = Context(geometry_of(k_type=KvType.F16, v_type=KvType.F16), tokens)
    geometry, pages, q = context.geometry, context.pages(), context.q(rows)
    plan, ops = plain_plan(len(pages)), HostOps(Team(1))
    whole = AttentionParams(6, 2, geometry.k_dim, geometry.v_dim, False, scale=1.0, rope=None, eps=0.0)
    y = np.zeros((rows, whole.columns), np.float32)
    for window in (0, 40, 0):
        params = replace(whole, window=window)
        ops.begin_step(StepInputs(np.zeros(rows, np.int32), tokens - rows, 0, Phase.DECODE))
        out = np.full((2, rows, 6 * geometry.v_dim), np.nan, np.float32)
        scratch = np.full((LEAST_SCRATCH_GROUPS, rows, 6, geometry.v_dim + 2), np.nan, np.float32)
        segments = scratch[:1].copy()
        ops.attend_decode(q, params, pages, geometry, plan, 0, scratch)
        ops.finish_decode(y, params, geometry, plan, scratch, segments, out[0])
        ops.attend_prefill(q, params, pages, geometry, plan, range(len(pages)), segments[0], fresh=True)
        ops.finish_prefill(y, params, geometry, segments[0], out[1])
        for one, attend in zip(out, (decode, prefill), strict=True):
            same = attend(geometry, pages, q, tokens - rows, window=window)
            _same_bits(one.reshape(same.shape), same)


@pytest.mark.parametrize("window", [-1, 1 << 31])
def test_a_window_is_a_number_of_keys(window: int) -> None:
    """One that kernels could not count with is refused."""
    with pytest.raises(AssertionError, match=f"a window of {window} keys"):
        AttentionParams(1, 1, 32, 32, False, scale=1.0, rope=None, eps=0.0, window=window)
