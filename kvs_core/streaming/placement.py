"""Placement: which pages of a cache are on the device, and where they are read: what the policy says, carried out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvs_core.device.base import Device
from kvs_core.paging.geometry import GROUP_PAGES
from kvs_core.paging.residency import Observation, ResidencyConfig, ResidencyState, residency_step
from kvs_core.paging.slots import PageId
from kvs_core.paging.spans import Chunk
from kvs_core.streaming.feedback import Feedback
from kvs_core.streaming.partition import Partition
from kvs_core.streaming.places import LayerPlaces
from kvs_core.streaming.plans import Lie, StepPlans
from kvs_core.streaming.pools import Pools
from kvs_core.streaming.residents import Residents
from kvs_core.streaming.streamer import Streamer
from kvs_core.units import ceil_div

_NO_SLOT = 0   # of a page that no row sees


class Placement:
    """Of ``config.layers`` layers of pages of ``page_tokens`` tokens.

    decide ─> apply     a decision is a value; nothing moves before it is applied

    state   the decision that is applied or, behind ``expect_resident``, is to be
    pages   per layer that exist, resident or streamed
    plans   of the layers, which it tells whenever a page moves
    """

    def __init__(
        self, device: Device, config: ResidencyConfig, page_tokens: int, reads: Sequence[int], pools: Pools,
        residents: Residents, streamer: Streamer, feedback: Feedback,
    ) -> None:
        """``reads``: the layer whose pages each attention of a step reads, in order."""
        self.state = ResidencyState(cuts=(0,) * config.layers)
        self.pages = 0
        self.plans = StepPlans(device, self, len(reads))
        self._config = config
        self._page_tokens = page_tokens
        self._reads = tuple(reads)
        self._pools = pools
        self._residents = residents
        self._streamer = streamer
        self._feedback = feedback
        self._partition = Partition(reads, pools, residents, streamer, self.plans)

    @property
    def changes(self) -> int:
        """Of ring and cuts, since the start."""
        return self._partition.changes

    @property
    def firsts(self) -> Sequence[int]:
        """Of each layer, the first page that anybody reads, but none behind those that exist."""
        return [min(first, self.pages) for first in self.state.first_pages or (0,) * self._config.layers]

    def passed_firsts(self, first_position: int) -> Sequence[int]:
        """Of each layer, the first page that is on the device, or that a step from that position on needs, if that
        comes before."""
        firsts = self._config.first_pages(first_position // self._page_tokens)
        on_device = self.state.first_pages or (0,) * self._config.layers
        return firsts if on_device == firsts else tuple(map(min, on_device, firsts))

    def decide(self, pool_slots: int, first_position: int, pages: int, *, starved: bool) -> ResidencyState:
        """What the policy makes of a step from that position on, for a pool and for ``pages`` pages per layer.
        ``BudgetError`` if they do not fit."""
        seen = Observation(
            pages=pages,
            writable_page=first_position // self._page_tokens,
            pool_slots=pool_slots,
            gap_s=self._feedback.gap_s,
            starved=starved,
            in_vain=self._feedback.in_vain,
        )
        return residency_step(self._config, self.state, seen)

    def apply(self, state: ResidencyState, pool_slots: int, pages: int) -> None:
        """Make table, ring and pages what ``state`` says, for a pool and for ``pages`` pages per layer.

        Each move is complete in itself: an error in between leaves a table that is true, and the next step plans anew.
        """
        if state.first_pages != self.state.first_pages:
            self.plans.forget()
            self._residents.evict(lambda page: page.page < state.first_pages[page.layer])
        self._partition.change(self._config, state, pool_slots)
        self.state = state
        # Streamed pages at or above their layer's cut come back to stay.
        self._residents.promote(self._streamed(state), self.firsts, self.pages)
        if pages != self.pages:
            self.plans.forget()
            first, self.pages = self.pages, pages
            self._residents.grow(range(first, pages))

    def cut(self, pages: int) -> None:
        """Pages from ``pages`` on hold no committed row."""
        if self.pages <= pages:
            return
        self.plans.forget()
        self.pages = pages
        self._residents.release_from(pages)

    def forget(self) -> None:
        """The history will be another: what was copied ahead is of no use."""
        self._partition.forget()

    def expect(self, tokens: int) -> None:
        """The history will hold that many; nothing is on the device."""
        self.pages = ceil_div(tokens, self._page_tokens)
        # Where nothing is resident yet, cuts say that everything is streamed: the policy then takes back what fits.
        cut = tokens // self._page_tokens // GROUP_PAGES * GROUP_PAGES
        self.state = replace(self.state, cuts=(cut,) * self._config.layers, seen=None)
        self.plans.forget()

    def expect_resident(self, tokens: int, pool_slots: int) -> Callable[[PageId], bool]:
        """``expect``, and decide at once for a pool: whether a page is to be resident. ``state`` is to be applied when
        they are."""
        self.expect(tokens)
        self.state = self.decide(pool_slots, tokens, self.pages, starved=False)
        streamed, firsts = self._streamed(self.state), self.firsts
        return lambda page: page.page >= firsts[page.layer] and page.page not in streamed[page.layer]

    def lie(self, read: int) -> Lie:
        """For ``StepPlans``."""
        layer = self._reads[read]
        table = self._pools.table(layer)
        streamed = self._config.streamed(self.state.cuts[layer])
        schedule = self._streamer.schedule
        runs, batches = (schedule.by_layer[read], schedule.batches(read)) if schedule.runs else ((), ())
        first = self.firsts[layer]
        newest = range(max(first, streamed.stop), self.pages)
        slots = [_NO_SLOT] * first + table.slots_of(layer, range(streamed.start))
        slots += [slot for run in runs for slot in run.slots]
        slots += table.slots_of(layer, newest)
        chunks = [Chunk(run.page_range, run, batch) for run, batch in zip(runs, batches, strict=True)]
        if streamed.start > 0:
            chunks.insert(0, Chunk(range(streamed.start)))
        chunks.append(Chunk(newest))
        return Lie(tuple(slots), tuple(chunks), self._config.slides(layer))

    def by_layer(self) -> list[LayerPlaces]:
        """Where every page is. Between steps; costs as much as there are layers and runs in the ring."""
        ahead: list[list[range]] = [[] for _ in range(self._config.layers)]
        for run in self._streamer.in_ring:
            ahead[self._reads[run.layer]].append(run.page_range)
        made = []
        for first, cut, runs in zip(self.firsts, self.state.cuts, ahead, strict=True):
            # What was taken up from elsewhere comes to the device with the next step.
            going = self._config.streamed(min(cut, self.pages)) if len(self._pools) else range(first, self.pages)
            made.append(LayerPlaces.of(self.pages, going, runs, first))
        return made

    def _streamed(self, state: ResidencyState) -> Sequence[range]:
        """By layer, the pages that stream."""
        return [self._config.streamed(cut) for cut in state.cuts]
