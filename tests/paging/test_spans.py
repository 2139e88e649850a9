"""Layer plans cover a layer once and refuse anything else; calls fold in an order that positions alone decide."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.paging import slabs
from kvs_core.paging.geometry import GROUP_PAGES, SEGMENT_GROUPS, KvType
from kvs_core.paging.schedule import plan_schedule
from kvs_core.paging.spans import LEAST_SCRATCH_GROUPS, Chunk, Fold, LayerPlan, plan_layer, row_spans
from kvs_core.units import ceil_div
from tests.ops.paged import Context, decode, geometry_of

SEGMENT_PAGES = SEGMENT_GROUPS * GROUP_PAGES
RING = 24


@st.composite
def plans(draw: st.DrawFn, max_pages: int = 4 * SEGMENT_PAGES) -> LayerPlan:
    """A streamed head in runs of any length, sometimes a resident group before it, and the resident rest.

    Slabs are those of the product, or others, which give runs over the ends of segments.
    """
    pages = draw(st.integers(1, max_pages))
    cut = draw(st.integers(0, (pages - 1) // GROUP_PAGES)) * GROUP_PAGES
    first = draw(st.sampled_from([0, GROUP_PAGES])) if cut > GROUP_PAGES else 0
    run_pages, batch_runs = draw(st.integers(1, RING)), draw(st.integers(1, 3))
    with patch.object(slabs, "_FULL", draw(st.sampled_from([slabs._FULL, 100]))):
        runs = plan_schedule([range(first, cut)], ring_slots=RING, run_pages=run_pages).runs
    slots = list(range(RING, RING + pages))
    chunks = [Chunk(range(first))] if first else []
    for number, run in enumerate(runs):
        slots[run.first_page : run.end_page] = run.slots
        together = number // batch_runs * batch_runs
        apart = sum(len(each.slots) for each in runs[together : together + batch_runs]) <= RING // 2
        chunks.append(Chunk(run.page_range, run, together if apart else None))
    chunks.append(Chunk(range(cut, pages)))
    return plan_layer(slots, chunks, scratch_groups=draw(st.sampled_from([1, 2, 4])) * LEAST_SCRATCH_GROUPS)


@st.composite
def partial_plans(draw: st.DrawFn) -> tuple[LayerPlan, list[int]]:
    """A draft's plan: the resident pages of a layer with a streamed middle that is left out; and those pages."""
    pages = draw(st.integers(1, 4 * SEGMENT_PAGES))
    cut = draw(st.integers(0, (pages - 1) // GROUP_PAGES)) * GROUP_PAGES
    first = min(draw(st.integers(0, 3)) * GROUP_PAGES, cut)
    chunks = [Chunk(part) for part in (range(first), range(cut, pages)) if len(part)]
    slots = [7 if first <= page < cut else RING + page for page in range(pages)]   # those left out mean nothing
    scratch_groups = draw(st.sampled_from([1, 2, 4])) * LEAST_SCRATCH_GROUPS
    return plan_layer(slots, chunks, scratch_groups=scratch_groups, partial=True), [*range(first), *range(cut, pages)]


def symbolic(plan: LayerPlan) -> dict[int, list[list[int]]]:
    """Run the calls on lists: per segment the groups folded into it, each the pages added to it in order.

    Checks on the way that a scratch row is fresh when it starts, never stale when it is resumed or folded.
    """
    rows: dict[int, list[int]] = {}
    segments: dict[int, list[list[int]]] = {}

    def fold_all(folds: Sequence[Fold]) -> None:
        for fold in folds:
            group = rows.pop(fold.scratch_row)
            assert fold.fresh == (fold.segment not in segments)
            segments.setdefault(fold.segment, []).append(group)

    for call in plan.calls:
        for part in call.parts:
            if part.fresh:
                assert part.scratch_row not in rows, "a row that is alive is started again"
                rows[part.scratch_row] = []
            rows[part.scratch_row] += part.pages
        fold_all(call.folds)
    fold_all(plan.last_folds)
    assert not rows, "partials left over"
    return segments


@given(plans())
def test_any_chunking_folds_alike(plan: LayerPlan) -> None:
    """Pages are added to groups, groups to segments, segments to the end, all in order, whatever is read when."""
    expected = {
        segment: [
            list(range(first, min(first + GROUP_PAGES, plan.pages)))
            for first in range(segment * SEGMENT_PAGES, min((segment + 1) * SEGMENT_PAGES, plan.pages), GROUP_PAGES)
        ]
        for segment in range(ceil_div(plan.pages, SEGMENT_PAGES))
    }
    assert symbolic(plan) == expected
    assert plan.segments == len(expected)


@given(partial_plans())
def test_a_partial_plan_has_the_pages_that_it_was_given(drawn: tuple[LayerPlan, list[int]]) -> None:
    """Each once, and no other; groups fold in order, into segments that are numbered as they occur."""
    plan, pages = drawn
    assert plan.partial
    assert sorted(page for call in plan.calls for part in call.parts for page in part.pages) == pages
    segments = symbolic(plan)
    assert list(segments) == list(range(plan.segments))
    groups = [group for segment in segments.values() for group in segment]
    assert [page for group in groups for page in group] == pages
    for segment in segments.values():
        assert len({group[0] // SEGMENT_PAGES for group in segment}) == 1
    assert len({groups_of[0][0] // SEGMENT_PAGES for groups_of in segments.values()}) == plan.segments
    assert all(call.resident and not call.runs for call in plan.calls)


@given(plans())
def test_a_partial_plan_without_gaps_is_a_plan(plan: LayerPlan) -> None:
    """Where everything is resident a draft reads and folds what a step reads and folds."""
    chunks = [Chunk(range(plan.pages))]
    whole, partial = (
        plan_layer(range(plan.pages), chunks, scratch_groups=2 * LEAST_SCRATCH_GROUPS, partial=partial)
        for partial in (False, True)
    )
    assert (whole.calls, whole.last_folds, whole.segments) == (partial.calls, partial.last_folds, partial.segments)


@settings(max_examples=15)
@given(partial_plans(), st.integers(1, 32), st.integers(0, 99))
def test_a_draft_attends_to_exactly_its_pages(drawn: tuple[LayerPlan, list[int]], last_rows: int, seed: int) -> None:
    """Its attention is softmax attention over the keys and values of those pages; what is left out is not even read."""
    plan, pages = drawn
    geometry = geometry_of(kv_heads=1, k_dim=8, k_type=KvType.F32, v_type=KvType.F32)
    context = Context(geometry, (plan.pages - 1) * geometry.page_tokens + last_rows, rep=2, seed=seed)
    q = context.q(1)
    seen = [position for position in range(context.tokens) if position // geometry.page_tokens in set(pages)]
    k, v = context.k[seen, 0].astype(np.float64), context.v[seen, 0].astype(np.float64)
    weights = np.exp(q[0] @ k.T)
    expected = (weights / weights.sum(axis=1, keepdims=True)) @ v
    # Slots of pages that are left out hold NaN.
    found = decode(geometry, context.pages(), q, context.tokens - 1, plan)
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-5)


def test_gaps_are_for_partial_plans_alone() -> None:
    """They may lack pages, but not the newest ones, which a draft writes; and no page comes twice."""
    gap = (Chunk(range(4)), Chunk(range(8, 10)))
    assert LayerPlan(tuple(range(10)), gap, partial=True).segments == 1
    with pytest.raises(AssertionError, match="page 8 where 4 must follow"):
        LayerPlan(tuple(range(10)), gap)
    with pytest.raises(AssertionError, match="4 pages in chunks, 10 slots"):
        LayerPlan(tuple(range(10)), gap[:1], partial=True)
    with pytest.raises(AssertionError, match="page 3 where 4 must follow"):
        LayerPlan(tuple(range(10)), (Chunk(range(4)), Chunk(range(3, 10))), partial=True)


@given(plans())
def test_resident_pages_come_first_then_runs_in_order(plan: LayerPlan) -> None:
    """Nothing waits for a copy before all that is there has been read, unless all copies come together; runs are read
    as they are scheduled."""
    if len(plan.calls) > 1:
        streamed = [bool(call.runs) for call in plan.calls]
        assert streamed == sorted(streamed)
        assert not any(call.resident and call.runs for call in plan.calls)
    runs = [run for call in plan.calls if call.first for run in call.runs]
    assert runs == [chunk.run for chunk in plan.chunks if chunk.run is not None]
    read = [page for call in plan.calls for part in call.parts for page in part.pages]
    assert sorted(read) == list(range(plan.pages))


@given(plans())
def test_a_run_is_waited_for_once_and_released_once(plan: LayerPlan) -> None:
    """Of the calls that read a run the first says first and the last says last, no other does."""
    resident = {page for chunk in plan.chunks if chunk.run is None for page in chunk.pages}
    for chunk in plan.chunks:
        if chunk.run is not None:
            calls = [call for call in plan.calls if chunk.run in call.runs]
            assert [call.first for call in calls] == [True] + [False] * (len(calls) - 1)
            assert [call.last for call in calls] == [False] * (len(calls) - 1) + [True]
            read = {page for call in calls for part in call.parts for page in part.pages}
            others = {page for call in calls for run in call.runs for page in run.page_range} | resident
            assert set(chunk.pages) <= read <= others


@given(plans())
def test_scratch_is_never_short(plan: LayerPlan) -> None:
    """However little scratch is given, no more rows are alive than it holds; a call's rows are distinct."""
    for groups in (LEAST_SCRATCH_GROUPS, 3 * LEAST_SCRATCH_GROUPS):
        again = plan_layer(plan.slots, plan.chunks, scratch_groups=groups)
        used = [part.scratch_row for call in again.calls for part in call.parts]
        assert max(used) < groups
        for call in again.calls:
            rows = [part.scratch_row for part in call.parts]
            assert len(set(rows)) == len(rows) >= 1
            assert all(len({page // GROUP_PAGES for page in part.pages}) == 1 for part in call.parts)


@given(plans(max_pages=LEAST_SCRATCH_GROUPS * GROUP_PAGES))
def test_a_row_for_every_group_defers_all_folds(plan: LayerPlan) -> None:
    """Where the scratch holds every group, what comes together is one call, and all is folded at the end."""
    groups = ceil_div(plan.pages, GROUP_PAGES)
    roomy = plan_layer(plan.slots, plan.chunks, scratch_groups=groups)
    arrivals = {chunk.arrival for chunk in plan.chunks if chunk.run is not None}
    if any(chunk.pages.start % GROUP_PAGES for chunk in plan.chunks):
        assert len(roomy.calls) == len(plan.chunks)
    else:
        assert len(roomy.calls) == (1 if len(arrivals) < 2 else 1 + len(arrivals))
    assert not any(call.folds for call in roomy.calls)
    assert len(roomy.last_folds) == groups
    assert max(part.scratch_row for call in roomy.calls for part in call.parts) < groups


def test_shape_is_what_a_new_page_does_not_change() -> None:
    """A page more leaves the calls and their runs; another run, or a fold more, does not."""
    runs = plan_schedule([range(8)], ring_slots=8, run_pages=4).runs
    chunks = [Chunk(run.page_range, run) for run in runs]

    def shape(pages: int) -> object:
        slots = [*(slot for run in runs for slot in run.slots), *range(8, pages)]
        return plan_layer(slots, [*chunks, Chunk(range(8, pages))], scratch_groups=LEAST_SCRATCH_GROUPS).shape

    assert shape(9) == shape(10) == shape(SEGMENT_PAGES)
    assert shape(9) != shape(4 * SEGMENT_PAGES)
    assert shape(9) != plan_layer(range(9), [Chunk(range(9))], scratch_groups=LEAST_SCRATCH_GROUPS).shape


@given(st.integers(0, 2000), st.integers(1, 300), st.sampled_from([32, 64, 256]))
def test_rows_go_to_their_pages(first: int, rows: int, page_tokens: int) -> None:
    """Every row of a step to the slot of its page, at its place in it; one span per page."""
    spans = row_spans(first, rows, page_tokens, range(1000, 1100))
    placed = [(span.slot, span.page_row + i, span.step_row + i) for span in spans for i in range(span.rows)]
    assert placed == [
        (1000 + position // page_tokens, position % page_tokens, position - first)
        for position in range(first, first + rows)
    ]
    assert len({span.slot for span in spans}) == len(spans)


@pytest.mark.parametrize(
    ("chunks", "slots", "message"),
    [
        ([range(1), range(2, 3)], [5, 6, 7], "page 2 where 1 must follow"),
        ([range(2), range(1, 2)], [5, 6], "page 1 where 2 must follow"),
        ([range(1, 2)], [5, 6], "page 1 where 0 must follow"),
        ([range(2)], [5, 6, 7], "2 pages in chunks, 3 slots"),
        ([range(2)], [5], "of a chunk in slots"),
        ([range(2)], [5, 5], "of a chunk in slots"),
        ([range(1), range(1, 2)], [5, 5], "two resident pages in one slot"),
        ([range(1), range(1, 1)], [5], "an empty chunk"),
        ([], [5], "0 pages in chunks"),
    ],
)
def test_plans_with_gaps_overlaps_or_shared_slots_are_refused(
    chunks: list[range], slots: list[int], message: str
) -> None:
    """A plan that would read a page twice, not at all, or from another's slot does not come to be."""
    with pytest.raises(AssertionError, match=message):
        LayerPlan(tuple(slots), tuple(Chunk(pages) for pages in chunks))


def test_streamed_chunks_are_their_runs() -> None:
    """A streamed chunk lies in its run's slots, and no resident page lies in the ring."""
    run = plan_schedule([range(4)], ring_slots=4, run_pages=4).runs[0]
    chunks = (Chunk(range(4), run), Chunk(range(4, 5)))
    assert LayerPlan((0, 1, 2, 3, 9), chunks).segments == 1
    for wrong in ((1, 2, 3, 4, 9), (3, 2, 1, 0, 9)):
        with pytest.raises(AssertionError, match="are not those of"):
            LayerPlan(wrong, chunks)
    for pages in (range(3), range(2, 6)):
        head = () if pages.start == 0 else (Chunk(range(pages.start)),)
        slots = (*range(8, 8 + pages.start), *range(len(pages)))
        with pytest.raises(AssertionError, match="are not those of"):
            LayerPlan(slots, (*head, Chunk(pages, run)))
    with pytest.raises(AssertionError, match="resident and in the ring"):
        LayerPlan((0, 1, 2, 3, 2), chunks)


def test_groups_that_come_out_of_order_are_refused() -> None:
    """The pages of a group must come in order, since they are added one by one; a cut inside a group breaks that."""
    run = plan_schedule([range(2)], ring_slots=2, run_pages=2).runs[0]
    with pytest.raises(AssertionError, match="page order"):
        plan_layer(
            [0, 1, 8, 9], [Chunk(range(2), run), Chunk(range(2, 4))], scratch_groups=LEAST_SCRATCH_GROUPS
        )
