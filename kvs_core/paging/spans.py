"""LayerPlan: where the pages of one layer lie during a step, in what order they are read, and how partials fold.

A plan's chunks are what can be read at one time: the resident pages, and each streamed run. Attention of a decode or
verify row takes them in any order (resident pages first: they need no wait), because every group of pages has a partial
of its own and the partials fold in an order that logical positions alone decide:

    pages   0 1 2 3 | 4 5 6 7 | ... | 60 61 62 63 | 64 65 66 67 | ...
    groups     0    |    1    | ... |     15      |     16      | ...     one partial each, pages added in page order
    segments               0                      |     1 ...             groups added in group order, then segments
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from kvs_core.paging.geometry import GROUP_PAGES, SEGMENT_GROUPS, group_of
from kvs_core.paging.schedule import Run


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows of a step written into one page: step rows [step_row, +rows) become page rows [page_row, +rows)."""

    slot: int
    page_row: int
    step_row: int
    rows: int


def row_spans(first: int, rows: int, page_tokens: int, slots: Sequence[int]) -> list[RowSpan]:
    """Where the rows at positions [first, first + rows) go; ``slots[page]`` is the slot of a page."""
    spans = []
    position = first
    while position < first + rows:
        page, page_row = divmod(position, page_tokens)
        count = min(page_tokens - page_row, first + rows - position)
        spans.append(RowSpan(slots[page], page_row, position - first, count))
        position += count
    return spans


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive pages that are read together. ``run`` is None for resident pages.

    batch  runs of one number, in slots of their own, arrive together; None: the run comes alone
    """

    pages: range
    run: Run | None = None
    batch: int | None = None

    @property
    def arrival(self) -> Run | int | None:
        """What chunks that are there at one time have in common."""
        return self.run if self.batch is None else self.batch


@dataclass(frozen=True, slots=True)
class GroupPart:
    """Consecutive pages of one group, read by one decode attention call into one scratch row.

    ``fresh``: the row starts empty; otherwise it holds the partial of the group's earlier pages and is resumed.
    """

    scratch_row: int
    fresh: bool
    pages: range


@dataclass(frozen=True, slots=True)
class Fold:
    """Fold one complete group's partial into its segment's; ``fresh`` starts the segment."""

    scratch_row: int
    segment: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class AttendCall:
    """One decode attention call, then the folds it makes possible.

    resident     it reads resident pages, of which there may be more in the next step
    runs         the streamed runs it reads, beside them or alone
    first, last  it is the first, or last, call of its runs
    """

    parts: tuple[GroupPart, ...]
    folds: tuple[Fold, ...]
    resident: bool
    runs: tuple[Run, ...]
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """All pages of one layer that a step attends to: where each lies, and in what order they are read and folded.

    slots       the slot of every page while its chunk is read, and of every page that the step writes
    chunks      in page order
    partial     the chunks leave pages out: those of a draft, which attends only to what is on the device, and those
                that a sliding window has passed
    calls       of a decode step; the last one's folds, and all folds if every group has a scratch row of its own, are
    last_folds  done when the attention is finished
    Refuses, at birth, gaps, overlaps, short cover, and two pages in one slot at one time.
    """

    slots: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    calls: tuple[AttendCall, ...] = ()
    last_folds: tuple[Fold, ...] = ()
    partial: bool = False

    def __post_init__(self) -> None:
        expected = 0
        resident: set[int] = set()
        streamed: set[int] = set()
        for chunk in self.chunks:
            assert len(chunk.pages) > 0, "an empty chunk"
            gap = self.partial and chunk.pages.start > expected
            assert gap or chunk.pages.start == expected, f"page {chunk.pages.start} where {expected} must follow"
            expected = chunk.pages.stop
            slots = self.slots[chunk.pages.start : chunk.pages.stop]
            assert len(set(slots)) == len(chunk.pages), f"pages {chunk.pages} of a chunk in slots {slots}"
            if chunk.run is None:
                assert resident.isdisjoint(slots), f"two resident pages in one slot: {slots}"
                resident.update(slots)
            else:
                same = slots == tuple(chunk.run.slots) and chunk.pages.start == chunk.run.first_page
                assert same, f"slots {slots} of pages {chunk.pages} are not those of {chunk.run}"
                streamed.update(slots)
        assert resident.isdisjoint(streamed), f"slots {sorted(resident & streamed)} are resident and in the ring"
        assert expected == len(self.slots), f"{expected} pages in chunks, {len(self.slots)} slots"

    @property
    def pages(self) -> int:
        """Pages attended to."""
        return len(self.slots)

    @property
    def segments(self) -> int:
        """Segments that the groups fold into."""
        return len({page // (GROUP_PAGES * SEGMENT_GROUPS) for chunk in self.chunks for page in _ends(chunk.pages)})

    @property
    def shape(self) -> tuple[tuple[tuple[Run, ...], bool, bool], ...]:
        """What captured work depends on: what each call reads, and whether folds follow it."""
        return tuple((call.runs, call.resident, bool(call.folds)) for call in self.calls)


LEAST_SCRATCH_GROUPS = 2 * SEGMENT_GROUPS
"""Group partials that decode attention must have room for: those that wait for their segment's older groups, and one
call's."""


def plan_layer(
    slots: Sequence[int], chunks: Sequence[Chunk], *, scratch_groups: int, partial: bool = False
) -> LayerPlan:
    """The plan of a decode step: resident chunks first, then runs, in calls whose groups find room in the scratch.

    Where all groups find room, one call reads the resident chunks and one each batch; or one call everything, if all
    runs arrive together: a call that reads a few pages takes a GPU nearly as long as one that reads many.
    scratch_groups  group partials that the scratch holds; the more, the fewer the calls. It changes no bit
    partial         see ``LayerPlan``; slots of pages that are left out mean nothing
    """
    sizes = Counter(group_of(page) for chunk in chunks for page in chunk.pages)
    roomy = len(sizes) <= scratch_groups
    assert roomy or scratch_groups >= LEAST_SCRATCH_GROUPS
    # A tile is whole segments, so that at most the first of its groups wait for older ones of their segment.
    tile_pages = (scratch_groups // SEGMENT_GROUPS - 1) * SEGMENT_GROUPS * GROUP_PAGES
    book = _FoldBook(sizes, scratch_groups)
    calls: list[AttendCall] = []
    for together in _calls_of(chunks, join=roomy):
        resident = together[0].run is None
        runs = tuple(chunk.run for chunk in together if chunk.run is not None)
        tiles = [[chunk.pages for chunk in together]]
        if not roomy:
            tiles = [[tile] for tile in _cut(together[0].pages, tile_pages)]
        for number, tile in enumerate(tiles):
            parts = tuple(book.add(group) for pages in tile for group in _cut(pages, GROUP_PAGES))
            folds = () if roomy else tuple(book.folds())
            calls.append(AttendCall(parts, folds, resident, runs, number == 0, number == len(tiles) - 1))
    last_folds = tuple(book.folds())
    if not roomy:
        last_folds = calls[-1].folds
        calls[-1] = replace(calls[-1], folds=())
    assert book.finished, "a group never became complete"
    return LayerPlan(tuple(slots), tuple(chunks), tuple(calls), last_folds, partial)


def _calls_of(chunks: Sequence[Chunk], *, join: bool) -> list[list[Chunk]]:
    """The chunks that one call reads, resident ones first; ``join``: as many as come together. A group that two chunks
    share has a partial that one call finishes after another."""
    order = sorted(chunks, key=lambda chunk: chunk.run is not None)   # stable: page order within each kind
    if not join or any(chunk.pages.start % GROUP_PAGES for chunk in chunks):
        return [[chunk] for chunk in order]
    if len({chunk.arrival for chunk in order if chunk.run is not None}) == 1:
        return [order]
    return [list(together) for _, together in groupby(order, key=lambda chunk: chunk.arrival)]


def _ends(pages: range) -> Iterator[int]:
    """A page of every segment that these lie in."""
    yield from range(pages.start, pages.stop, GROUP_PAGES * SEGMENT_GROUPS)
    yield pages.stop - 1


def _cut(pages: range, size: int) -> Iterator[range]:
    """A range of pages cut at the multiples of ``size``."""
    start = pages.start
    while start < pages.stop:
        stop = min(start - start % size + size, pages.stop)
        yield range(start, stop)
        start = stop


class _FoldBook:
    """Which group partials exist, and which of them may fold: each after its predecessor in the segment."""

    def __init__(self, sizes: Mapping[int, int], scratch_groups: int) -> None:
        """``sizes``: the pages of each group, in any order."""
        self._sizes = sizes
        self._rows: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._free = list(range(scratch_groups - 1, -1, -1))
        # Segments are numbered as they occur; what is still to be folded of each, the next one last.
        by_segment = groupby(sorted(sizes), key=lambda group: group // SEGMENT_GROUPS)
        self._waiting = [list(reversed(list(groups))) for _, groups in by_segment]
        self._folded = [0] * len(self._waiting)

    @property
    def finished(self) -> bool:
        return not self._rows and self._seen == self._sizes

    def add(self, pages: range) -> GroupPart:
        group = group_of(pages.start)
        fresh = group not in self._seen
        assert fresh or pages.start == group * GROUP_PAGES + self._seen[group], "a group's pages come in page order"
        assert not fresh or pages.start == group * GROUP_PAGES, "a group's pages come in page order"
        if fresh:
            self._rows[group] = self._free.pop()
        self._seen[group] = self._seen.get(group, 0) + len(pages)
        return GroupPart(self._rows[group], fresh, pages)

    def folds(self) -> Iterator[Fold]:
        """Segments in order; within one, groups in order."""
        for segment, waiting in enumerate(self._waiting):
            while waiting and self._seen.get(waiting[-1]) == self._sizes[waiting[-1]]:
                row = self._rows.pop(waiting.pop())
                self._free.append(row)
                yield Fold(row, segment, fresh=self._folded[segment] == 0)
                self._folded[segment] += 1
