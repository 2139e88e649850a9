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
from fractions import Fraction

from kvs_core.paging.geometry import GROUP_PAGES
from kvs_core.paging.slabs import slab_of
from kvs_core.units import align_up, ceil_div

_BATCH_SHARE = Fraction(1, 5)   # of the ring, for what several layers have together
_LAYER_SHARE = Fraction(3, 4)   # for one layer
_SMALL_BATCHES = 3        # at the beginning of a step
_MOST_EVEN_TURNS = 32     # around the ring in a step; where there are more, what each one leaves empty costs little


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
    late_slots  those of the last batch, where a step ends soon behind it: what comes into them next is copied at the
                beginning of the next step, beside kernels; at the end of this one everything would wait for it
    """

    runs: tuple[Run, ...]
    ring_slots: int
    by_layer: tuple[tuple[Run, ...], ...] = field(repr=False)
    batch_ends: tuple[int, ...] = field(repr=False)
    streamed_pages: int = field(init=False, repr=False)   # asked for in every step, of hundreds of runs
    late_slots: frozenset[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "streamed_pages", sum(run.pages for run in self.runs))
        object.__setattr__(self, "late_slots", self._find_late())

    def _find_late(self) -> frozenset[int]:
        if not self.runs or 2 * self.runs[-1].layer + 1 < len(self.by_layer):
            return frozenset()   # behind the last batch there is time enough
        last = {
            slot for run, end in zip(self.runs, self.batch_ends, strict=True) if end == len(self.runs)
            for slot in run.slots
        }
        # What the first attention waits for is always copied ahead.
        return frozenset(last.difference(*(run.slots for run in self.runs[: self.batch_ends[0]])))

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
    left: list[range] = []   # of each layer
    for layer, pages in enumerate(streamed):
        page = kept_end.get(layer, pages.start)
        assert layer >= last_kept_layer or page == pages.stop, "kept runs must be the head of the schedule"
        left.append(range(page, max(page, pages.stop)))
    cursor = kept[-1].slots.stop if kept else 0
    end, splits = _turn_end(sum(map(len, left)), cursor, ring_slots)
    runs: list[Run] = list(kept)
    for layer, pages in enumerate(left):
        page = pages.start
        while page < pages.stop:
            count = _even_part(min(pages.stop, slab_of(page).end_page) - page, length)
            if cursor >= end or (cursor + count > end and not splits):
                cursor = 0
            count = min(count, end - cursor)
            runs.append(Run(layer, page, count, cursor))
            page, cursor = page + count, cursor + count
    by_layer = tuple(tuple(run for run in runs if run.layer == layer) for layer in range(len(streamed)))
    return PrefetchSchedule(tuple(runs), ring_slots, by_layer, _batch_ends(by_layer, ring_slots))


def _turn_end(pages: int, cursor: int, ring_slots: int) -> tuple[int, bool]:
    """Where turns around the ring end, and whether a run that would go beyond that ends there too.

    Turns are as few as can be and equal. The first runs of the next step follow the last turn: were it short, they
    would have to wait for the newest runs, while slots that were read long before lie idle.
    """
    unit = GROUP_PAGES if ring_slots >= GROUP_PAGES else 1
    most = ring_slots // unit * unit
    for at in (cursor, 0) if pages else ():
        turns = ceil_div(at + pages, most)
        end = align_up(ceil_div(at + pages, turns), unit)
        if turns <= _MOST_EVEN_TURNS and at <= end:
            return end, True
    return most, False


def _batch_ends(by_layer: Sequence[Sequence[Run]], ring_slots: int) -> tuple[int, ...]:
    """Batches of whole layers where a layer is small beside the ring, else of a layer's runs.

    Each wait of one stream for another costs microseconds, for which a GPU stands still, and each call that reads a few
    pages leaves most of it idle. A batch takes a part of the ring, so that the link fills the rest meanwhile; that its
    runs lie apart means that all of them can be there at once when what came before it has been given back. A step
    begins with a full ring: until its first batches have been read the link has nothing to do, so these are small.
    """
    most, most_of_one = (int(ring_slots * share) for share in (_BATCH_SHARE, _LAYER_SHARE))
    units: list[Sequence[Run]] = []
    for runs in by_layer:
        small = 0 < sum(run.pages for run in runs) <= most_of_one and _lie_apart(runs)
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
