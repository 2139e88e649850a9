"""The schedule: every copy of a whole step, in execution order, each with its place in the ring.

    runs      what one copy moves
    batches   consecutive runs, of one layer or of several, that attention waits for and gives back together

Runs are consumed in list order and placed around the ring in that order, so a run only ever waits for runs that are
consumed before it is needed: no order of copies can lock up. The same list repeats step after step (it wraps into the
first layers of the next step) until a cut or the ring changes; what has been copied ahead by then keeps its slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvs_core.paging.geometry import GROUP_PAGES
from kvs_core.paging.slabs import slab_of
from kvs_core.units import align_up, ceil_div

_BATCH_SHARE = 3
_SMALL_BATCHES = 3   # at the beginning of a step


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive streamed pages of one layer, moved by one copy into consecutive slots."""

    layer: int
    first_page: int
    pages: int
    first_slot: int

    @property
    def end_page(self) -> int:
        """The first page behind the run."""
        return self.first_page + self.pages

    @property
    def page_range(self) -> range:
        """The pages."""
        return range(self.first_page, self.end_page)

    @property
    def slots(self) -> range:
        """The ring slots it fills."""
        return range(self.first_slot, self.first_slot + self.pages)


@dataclass(frozen=True, slots=True)
class PrefetchSchedule:
    """The runs of one step. ``by_layer[l]`` are those of layer l, in page order; ``streamed_pages`` are copied per
    step.

    batch_ends  for each run, the number of the first run behind its batch. The runs of a batch lie in different slots
    """

    runs: tuple[Run, ...]
    ring_slots: int
    by_layer: tuple[tuple[Run, ...], ...] = field(repr=False)
    batch_ends: tuple[int, ...] = field(repr=False)
    streamed_pages: int = field(init=False, repr=False)   # asked for in every step, of hundreds of runs

    def __post_init__(self) -> None:
        object.__setattr__(self, "streamed_pages", sum(run.pages for run in self.runs))

    def batches(self, layer: int) -> tuple[int, ...]:
        """For each run of a layer, a number that the runs of its batch share."""
        first = sum(map(len, self.by_layer[:layer]))
        return self.batch_ends[first : first + len(self.by_layer[layer])]


def plan_schedule(
    streamed: Sequence[range], *, ring_slots: int, run_pages: int, kept: Sequence[Run] = ()
) -> PrefetchSchedule:
    """Cut each layer's streamed pages into runs and place them around the ring.

    streamed   per layer, the pages that are not resident
    run_pages  pages of a run at most; a run also ends at a slab's end and never exceeds the ring
    kept       runs that are in the ring already: the head of the list, as they lie
    """
    length = min(run_pages, ring_slots)
    assert length >= 1 or not any(streamed), "streamed pages need a ring"
    kept_end = {run.layer: run.end_page for run in kept}
    last_kept_layer = kept[-1].layer if kept else -1
    pieces: list[tuple[int, int, int]] = []   # layer, first page, pages
    for layer, pages in enumerate(streamed):
        page = kept_end.get(layer, pages.start)
        assert layer >= last_kept_layer or page == pages.stop, "kept runs must be the head of the schedule"
        while page < pages.stop:
            count = _even_part(min(pages.stop, slab_of(page).end_page) - page, length)
            pieces.append((layer, page, count))
            page += count
    cursor = kept[-1].slots.stop if kept else 0
    end = _turn_end([count for *_, count in pieces], cursor, ring_slots)
    runs: list[Run] = list(kept)
    for layer, page, count in pieces:
        if cursor + count > end:
            cursor = 0
        runs.append(Run(layer, page, count, cursor))
        cursor += count
    by_layer = tuple(tuple(run for run in runs if run.layer == layer) for layer in range(len(streamed)))
    return PrefetchSchedule(tuple(runs), ring_slots, by_layer, _batch_ends(by_layer, ring_slots))


def _turn_end(sizes: Sequence[int], cursor: int, ring_slots: int) -> int:
    """Where turns around the ring end, so that they are as few as in the whole ring and about equal.

    The first runs of the next step follow the last turn. Were it short, they would have to wait for the newest runs,
    while slots that were read long before lie idle, and the step would end with a ring that is far from full.
    """
    def turns(end: int) -> int:
        count, at = 1, cursor
        for size in sizes:
            if at + size > end:
                count, at = count + 1, 0
            at += size
        return count

    least, most = max(sizes, default=0), ring_slots
    fewest = turns(most)
    while least < most:
        middle = (least + most) // 2
        if turns(middle) == fewest:
            most = middle
        else:
            least = middle + 1
    return most


def _batch_ends(by_layer: Sequence[Sequence[Run]], ring_slots: int) -> tuple[int, ...]:
    """Batches of whole layers where a layer is small beside the ring, else of a layer's runs.

    Each wait of one stream for another costs microseconds, for which a GPU stands still. A batch takes a part of the
    ring, so that the link fills the rest meanwhile; that its runs lie apart means that all of them can be there at
    once when what came before it has been given back. A step begins and ends with a full ring: until its first batches
    have been read the link has little to do, and behind its last one the kernels have little, so these are small.
    """
    most = ring_slots // _BATCH_SHARE
    units: list[Sequence[Run]] = []
    for runs in by_layer:
        small = 0 < sum(run.pages for run in runs) <= most and _lie_apart(runs)
        units += [runs] if small else [[run] for run in runs]
    ends: list[int] = []
    batch: list[Run] = []
    for number, unit in enumerate(units):
        together = [*batch, *unit]
        if batch and (
            number <= _SMALL_BATCHES or number == len(units) - 1
            or sum(run.pages for run in together) > most or not _lie_apart(together)
        ):
            ends += [len(ends) + len(batch)] * len(batch)
            batch = []
        batch += unit
    return (*ends, *[len(ends) + len(batch)] * len(batch))


def _lie_apart(runs: Sequence[Run]) -> bool:
    """Runs that an earlier schedule placed may lie anywhere."""
    slots = [slot for run in runs for slot in run.slots]
    return len(set(slots)) == len(slots)


def _even_part(pages: int, length: int) -> int:
    """Pages of the next run where so many lie in one piece: as few runs as possible, about equal, in whole groups."""
    runs = ceil_div(pages, length)
    return min(align_up(ceil_div(pages, runs), GROUP_PAGES), length, pages)


def head_in_ring(streamed: Sequence[range], ring_slots: int, in_ring: Sequence[Run]) -> int:
    """How many of the runs that were copied ahead are still the head of a schedule for ``streamed``.

    They are, as long as they are exactly the first streamed pages in order and lie inside the ring.
    """
    position = 0
    for layer, pages in enumerate(streamed):
        page = pages.start
        while page < pages.stop:
            if position == len(in_ring):
                return position
            run = in_ring[position]
            fits = run.layer == layer and run.first_page == page and run.end_page <= pages.stop
            if not fits or run.first_slot + run.pages > ring_slots:
                return position
            page = run.end_page
            position += 1
    return position
