"""SpanPlan: the ordered, gap-free (page -> slot) list of one attention call, and the order in which its partials fold.

A plan's chunks are what can be read at one time: the resident pages, and each streamed run. Attention of a decode or
verify row takes them in any order (resident pages first: they need no wait), because every group of pages has a partial
of its own and the partials fold in an order that logical positions alone decide:

    pages   0 1 2 3 | 4 5 6 7 | ... | 60 61 62 63 | 64 65 66 67 | ...
    groups     0    |    1    | ... |     15      |     16      | ...     one partial each, pages added in page order
    segments               0                      |     1 ...             groups added in group order, then segments
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvs_core.paging.geometry import GROUP_PAGES, SEGMENT_GROUPS, group_of
from kvs_core.paging.schedule import Run
from kvs_core.units import ceil_div

SCRATCH_GROUPS = 2 * SEGMENT_GROUPS
"""Group partials alive at once at most: those that wait for their segment's older groups, and one call's."""


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows of a step written into one page: step rows [step_row, +rows) become page rows [page_row, +rows)."""

    slot: int
    page_row: int
    step_row: int
    rows: int


def row_spans(first: int, rows: int, page_tokens: int, slot_of: Callable[[int], int]) -> list[RowSpan]:
    """Where the rows at positions [first, first + rows) go; ``slot_of`` tells the slot of a page."""
    spans = []
    position = first
    while position < first + rows:
        page, page_row = divmod(position, page_tokens)
        count = min(page_tokens - page_row, first + rows - position)
        spans.append(RowSpan(slot_of(page), page_row, position - first, count))
        position += count
    return spans


@dataclass(frozen=True, slots=True)
class PageRef:
    """One page as an attention call reads it: logical page number and the slot that holds it."""

    page: int
    slot: int


@dataclass(frozen=True, slots=True)
class GroupPart:
    """Consecutive pages of one group, read by one decode attention call into one scratch row.

    ``fresh``: the row starts empty; otherwise it holds the partial of the group's earlier pages and is resumed.
    """

    scratch_row: int
    fresh: bool
    pages: tuple[PageRef, ...]


@dataclass(frozen=True, slots=True)
class Fold:
    """Fold one complete group's partial into its segment's; ``fresh`` starts the segment."""

    scratch_row: int
    segment: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive pages that are read together. ``run`` is None for resident pages."""

    pages: tuple[PageRef, ...]
    run: Run | None = None


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """All pages [0, pages) of one layer that a step attends to, as chunks in page order.

    Refuses, at birth, gaps, overlaps, short cover, and two pages in one slot at one time.
    """

    chunks: tuple[Chunk, ...]
    pages: int

    def __post_init__(self) -> None:
        expected = 0
        resident: set[int] = set()
        streamed: set[int] = set()
        for chunk in self.chunks:
            slots = [ref.slot for ref in chunk.pages]
            assert slots, "an empty chunk"
            assert len(set(slots)) == len(slots), f"two pages of a chunk in one slot: {slots}"
            for ref in chunk.pages:
                assert ref.page == expected, f"page {ref.page} where {expected} must follow"
                expected += 1
            if chunk.run is None:
                assert not resident & set(slots), f"two resident pages in one slot: {slots}"
                resident |= set(slots)
            else:
                same = slots == list(chunk.run.slots) and chunk.pages[0].page == chunk.run.first_page
                assert same, f"slots {slots} of pages from {chunk.pages[0].page} on are not those of {chunk.run}"
                streamed |= set(slots)
        assert not resident & streamed, f"slots {sorted(resident & streamed)} are resident and in the ring"
        assert expected == self.pages, f"{expected} pages given, the step's tokens need {self.pages}"

    @property
    def segments(self) -> int:
        """Segments that the plan's groups fold into."""
        return ceil_div(self.pages, GROUP_PAGES * SEGMENT_GROUPS)


@dataclass(frozen=True, slots=True)
class AttendCall:
    """One decode attention call, then the folds it makes possible.

    ``run``: the streamed run it reads (None: resident pages); ``first``/``last``: it is the run's first/last call.
    """

    parts: tuple[GroupPart, ...]
    folds: tuple[Fold, ...]
    run: Run | None
    first: bool
    last: bool


def plan_decode_calls(plan: SpanPlan) -> list[AttendCall]:
    """The calls of one decode attention: resident chunks, then runs, in tiles of at most a segment of groups."""
    book = _FoldBook(plan.pages)
    calls = []
    order = sorted(plan.chunks, key=lambda chunk: chunk.run is not None)   # stable: page order within each kind
    for chunk in order:
        tiles = list(_tiles(chunk.pages))
        for number, tile in enumerate(tiles):
            parts = tuple(book.add(group) for group in tile)
            calls.append(AttendCall(parts, tuple(book.folds()), chunk.run, number == 0, number == len(tiles) - 1))
    assert book.finished, "a group never became complete"
    return calls


def _tiles(pages: Sequence[PageRef]) -> Iterator[list[tuple[PageRef, ...]]]:
    """Pages as lists of whole or cut groups, each list within one segment."""
    tile: list[tuple[PageRef, ...]] = []
    group: list[PageRef] = []
    for ref in pages:
        if group and group_of(ref.page) != group_of(group[0].page):
            tile.append(tuple(group))
            group = []
            if group_of(ref.page) % SEGMENT_GROUPS == 0:
                yield tile
                tile = []
        group.append(ref)
    tile.append(tuple(group))
    yield tile


class _FoldBook:
    """Which group partials exist, and which of them may fold: each after its predecessor in the segment."""

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self._groups = ceil_div(pages, GROUP_PAGES)
        self._rows: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._free = list(range(SCRATCH_GROUPS - 1, -1, -1))
        self._next = [segment * SEGMENT_GROUPS for segment in range(ceil_div(self._groups, SEGMENT_GROUPS))]

    @property
    def finished(self) -> bool:
        return not self._rows and sum(self._seen.values()) == self._pages

    def add(self, pages: tuple[PageRef, ...]) -> GroupPart:
        group = group_of(pages[0].page)
        fresh = group not in self._seen
        assert pages[0].page == group * GROUP_PAGES + self._seen.get(group, 0), "a group's pages come in page order"
        if fresh:
            self._rows[group] = self._free.pop()
        self._seen[group] = self._seen.get(group, 0) + len(pages)
        return GroupPart(self._rows[group], fresh, pages)

    def folds(self) -> Iterator[Fold]:
        for segment, group in enumerate(self._next):
            end = min((segment + 1) * SEGMENT_GROUPS, self._groups)
            while group < end and self._complete(group):
                row = self._rows.pop(group)
                self._free.append(row)
                yield Fold(row, segment, fresh=group % SEGMENT_GROUPS == 0)
                group += 1
            self._next[segment] = group

    def _complete(self, group: int) -> bool:
        size = min(GROUP_PAGES, self._pages - group * GROUP_PAGES)
        return self._seen.get(group, 0) == size
