"""Span plans cover a layer once and refuse anything else; decode calls fold in an order that positions alone decide."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.paging.geometry import GROUP_PAGES, SEGMENT_GROUPS
from kvs_core.paging.schedule import Run, plan_schedule
from kvs_core.paging.spans import SCRATCH_GROUPS, AttendCall, Chunk, PageRef, SpanPlan, plan_decode_calls, row_spans
from kvs_core.units import ceil_div

SEGMENT_PAGES = SEGMENT_GROUPS * GROUP_PAGES
RING = 24


def streamed_chunk(run: Run) -> Chunk:
    return Chunk(tuple(PageRef(run.first_page + i, run.first_slot + i) for i in range(run.pages)), run)


@st.composite
def plans(draw: st.DrawFn, max_pages: int = 4 * SEGMENT_PAGES) -> SpanPlan:
    """A streamed head in runs of any length, sometimes a resident group before it, and the resident rest."""
    pages = draw(st.integers(1, max_pages))
    cut = draw(st.integers(0, (pages - 1) // GROUP_PAGES)) * GROUP_PAGES
    first = draw(st.sampled_from([0, GROUP_PAGES])) if cut > GROUP_PAGES else 0
    resident = count(RING)
    chunks = []
    if first:
        chunks.append(Chunk(tuple(PageRef(page, next(resident)) for page in range(first))))
    length = draw(st.integers(1, RING))
    for run in plan_schedule([range(first, cut)], ring_slots=RING, run_pages=length).runs:
        chunks.append(streamed_chunk(run))
    chunks.append(Chunk(tuple(PageRef(page, next(resident)) for page in range(cut, pages))))
    return SpanPlan(tuple(chunks), pages)


def symbolic(calls: list[AttendCall]) -> dict[int, list[list[int]]]:
    """Run the calls on lists: per segment the groups folded into it, each the pages added to it in order.

    Checks on the way that a scratch row is fresh when it starts, never stale when it is resumed or folded.
    """
    rows: dict[int, list[int]] = {}
    segments: dict[int, list[list[int]]] = {}
    for call in calls:
        for part in call.parts:
            if part.fresh:
                assert part.scratch_row not in rows, "a row that is alive is started again"
                rows[part.scratch_row] = []
            rows[part.scratch_row] += [ref.page for ref in part.pages]
        assert len(rows) <= SCRATCH_GROUPS
        for fold in call.folds:
            group = rows.pop(fold.scratch_row)
            assert fold.fresh == (fold.segment not in segments)
            segments.setdefault(fold.segment, []).append(group)
    assert not rows, "partials left over"
    return segments


@given(plans())
def test_any_chunking_folds_alike(plan: SpanPlan) -> None:
    """Pages are added to groups, groups to segments, segments to the end, all in order, whatever is read when."""
    expected = {
        segment: [
            list(range(first, min(first + GROUP_PAGES, plan.pages)))
            for first in range(segment * SEGMENT_PAGES, min((segment + 1) * SEGMENT_PAGES, plan.pages), GROUP_PAGES)
        ]
        for segment in range(ceil_div(plan.pages, SEGMENT_PAGES))
    }
    assert symbolic(plan_decode_calls(plan)) == expected
    assert plan.segments == len(expected)


@given(plans())
def test_resident_pages_come_first_then_runs_in_order(plan: SpanPlan) -> None:
    """Nothing waits for a copy before all that is there has been read; runs are read as they are scheduled."""
    calls = plan_decode_calls(plan)
    streamed = [call.run is not None for call in calls]
    assert streamed == sorted(streamed)
    runs = [call.run for call in calls if call.run is not None]
    assert [run for before, run in pairwise([None, *runs]) if run != before] == [
        chunk.run for chunk in plan.chunks if chunk.run is not None
    ]
    read = [ref for call in calls for part in call.parts for ref in part.pages]
    assert sorted(read, key=lambda ref: ref.page) == [ref for chunk in plan.chunks for ref in chunk.pages]


@given(plans())
def test_a_run_is_waited_for_once_and_released_once(plan: SpanPlan) -> None:
    """Of the calls that read a run the first says first and the last says last, no other does."""
    by_run: dict[object, list[AttendCall]] = {}
    for call in plan_decode_calls(plan):
        if call.run is not None:
            by_run.setdefault(call.run, []).append(call)
    for run, calls in by_run.items():
        assert [call.first for call in calls] == [True] + [False] * (len(calls) - 1)
        assert [call.last for call in calls] == [False] * (len(calls) - 1) + [True]
        assert [ref.slot for call in calls for part in call.parts for ref in part.pages] == list(run.slots)  # type: ignore[attr-defined]


@given(plans())
def test_a_call_stays_within_a_segment_and_its_rows_are_distinct(plan: SpanPlan) -> None:
    """One launch needs at most a segment of scratch rows, one for each of its groups."""
    for call in plan_decode_calls(plan):
        rows = [part.scratch_row for part in call.parts]
        assert 1 <= len(set(rows)) == len(rows) <= SEGMENT_GROUPS
        pages = [ref.page for part in call.parts for ref in part.pages]
        assert len({page // SEGMENT_PAGES for page in pages}) == 1
        assert all(len({ref.page // GROUP_PAGES for ref in part.pages}) == 1 for part in call.parts)


@given(plans(max_pages=SCRATCH_GROUPS * GROUP_PAGES))
def test_a_short_context_needs_no_more_scratch_than_groups(plan: SpanPlan) -> None:
    """A workspace with a scratch row per group is enough where there are few."""
    rows = {part.scratch_row for call in plan_decode_calls(plan) for part in call.parts}
    assert max(rows) < ceil_div(plan.pages, GROUP_PAGES)


def test_scratch_holds_the_worst_cut() -> None:
    """Fifteen groups wait for the oldest of their segment while a run brings as many others as a slab allows."""
    streamed = range(SEGMENT_PAGES + GROUP_PAGES)
    runs = plan_schedule([streamed], ring_slots=64, run_pages=64).runs
    chunks = [streamed_chunk(run) for run in runs]
    last = 2 * SEGMENT_PAGES
    chunks.append(Chunk(tuple(PageRef(page, 64 + page) for page in range(streamed.stop, last))))
    rows = {part.scratch_row for call in plan_decode_calls(SpanPlan(tuple(chunks), last)) for part in call.parts}
    longest = max(run.pages for run in runs if run.end_page <= SEGMENT_PAGES)
    assert len(rows) == SEGMENT_GROUPS - 1 + longest // GROUP_PAGES <= SCRATCH_GROUPS


@given(st.integers(0, 2000), st.integers(1, 300), st.sampled_from([32, 64, 256]))
def test_rows_go_to_their_pages(first: int, rows: int, page_tokens: int) -> None:
    """Every row of a step to the slot of its page, at its place in it; one span per page."""
    spans = row_spans(first, rows, page_tokens, lambda page: 1000 + page)
    placed = [(span.slot, span.page_row + i, span.step_row + i) for span in spans for i in range(span.rows)]
    assert placed == [
        (1000 + position // page_tokens, position % page_tokens, position - first)
        for position in range(first, first + rows)
    ]
    assert len({span.slot for span in spans}) == len(spans)


def resident(*refs: tuple[int, int]) -> Chunk:
    return Chunk(tuple(PageRef(page, slot) for page, slot in refs))


@pytest.mark.parametrize(
    ("chunks", "pages", "message"),
    [
        ([resident((0, 5), (2, 6))], 3, "page 2 where 1 must follow"),
        ([resident((0, 5), (1, 6)), resident((1, 7))], 2, "page 1 where 2 must follow"),
        ([resident((1, 5))], 2, "page 1 where 0 must follow"),
        ([resident((0, 5), (1, 6))], 3, "2 pages given, the step's tokens need 3"),
        ([resident((0, 5), (1, 6))], 1, "2 pages given, the step's tokens need 1"),
        ([resident((0, 5), (1, 5))], 2, "two pages of a chunk in one slot"),
        ([resident((0, 5)), resident((1, 5))], 2, "two resident pages in one slot"),
        ([resident((0, 5)), resident()], 1, "an empty chunk"),
        ([], 1, "0 pages given"),
    ],
)
def test_plans_with_gaps_overlaps_or_shared_slots_are_refused(chunks: list[Chunk], pages: int, message: str) -> None:
    """A plan that would read a page twice, not at all, or from another's slot does not come to be."""
    with pytest.raises(AssertionError, match=message):
        SpanPlan(tuple(chunks), pages)


def test_streamed_chunks_are_their_runs() -> None:
    """A streamed chunk lies in its run's slots, and no resident page lies in the ring."""
    run = plan_schedule([range(4)], ring_slots=4, run_pages=4).runs[0]
    streamed = Chunk(tuple(PageRef(page, page) for page in range(4)), run)
    assert SpanPlan((streamed, resident((4, 9))), 5).segments == 1
    for wrong in ((1, 2, 3, 4), (3, 2, 1, 0), (0, 1, 2)):
        pages = tuple(PageRef(page, slot) for page, slot in enumerate(wrong))
        with pytest.raises(AssertionError, match="are not those of"):
            SpanPlan((replace(streamed, pages=pages), resident((len(wrong), 9))), len(wrong) + 1)
    late = replace(streamed, pages=tuple(PageRef(page + 2, page) for page in range(4)))
    with pytest.raises(AssertionError, match="are not those of"):
        SpanPlan((resident((0, 8), (1, 9)), late), 6)
    with pytest.raises(AssertionError, match="resident and in the ring"):
        SpanPlan((streamed, resident((4, 2))), 5)


def test_groups_that_come_out_of_order_are_refused() -> None:
    """The pages of a group must come in order, since they are added one by one; a cut inside a group breaks that."""
    run = plan_schedule([range(2)], ring_slots=2, run_pages=2).runs[0]
    streamed = Chunk(tuple(PageRef(page, page) for page in range(2)), run)
    with pytest.raises(AssertionError, match="page order"):
        plan_decode_calls(SpanPlan((streamed, resident((2, 8), (3, 9))), 4))
