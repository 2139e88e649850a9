"""KvStream: joins cache, policy, plan and schedule for one step, and lends the model a ``LayerKv`` per layer.

    with kv.begin(rows, phase) as step:      pages assigned, cuts and ring decided, copies under way
        ... model: step.layer(i).write / attend ...
        step.settle(keep)                    commit those rows; full pages go home

Leaving the block without ``settle`` (an error, a caller who stops) drops the rows: back to the last commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from operator import mul

import numpy as np

from kvs_core.device.base import Device, Fence
from kvs_core.device.operands import AttentionParams, Buffer
from kvs_core.errors import BudgetError, DeviceError
from kvs_core.memory.phases import Phase
from kvs_core.paging.cache import LogicalCache
from kvs_core.paging.geometry import GROUP_PAGES, PageGeometry
from kvs_core.paging.passed import Slides
from kvs_core.paging.residency import Observation, ResidencyConfig, ResidencyState, residency_step
from kvs_core.paging.shift import PageMove, plan_shift
from kvs_core.paging.slots import PageId
from kvs_core.paging.spans import Chunk
from kvs_core.streaming.history import HostHistory, ParkedHistory
from kvs_core.streaming.kv_step import KvStep
from kvs_core.streaming.layer_kv import AttentionScratch, PrefillWatch
from kvs_core.streaming.pace import Advice, Pace
from kvs_core.streaming.plans import Lie, StepPlans
from kvs_core.streaming.pools import Pools
from kvs_core.streaming.publisher import Publisher
from kvs_core.streaming.shift import ShiftLayer, ShiftThrough, shift_in_place, work_bytes
from kvs_core.streaming.streamer import Streamer

_MOST_LENT = 2      # a half of the pool is the most that is lent
_NO_SLOT = 0        # of a page that no row sees


@dataclass(frozen=True, slots=True)
class KvStats:
    """Where the pages are now, and what has happened since the start.

    pool_pages, resident_pages  of both pools, where layers that slide have one of their own
    streamed_pages_per_step     as often as attention reads them
    """

    pool_pages: int
    resident_pages: int
    ring_slots: int
    active_pages: int
    active_bytes: int
    streamed_pages_per_step: int
    repartitions: int
    history_bytes: int
    moved_bytes: tuple[int, ...]   # to the device, by layer


@dataclass(frozen=True, slots=True)
class LayerPlaces:
    """Where the pages of one layer are. Those of ``streamed`` pass through the ring in every step, all others are
    resident, but for those before ``first_page``: a sliding window has passed them, and nobody reads them.

    in_ring  of the streamed ones, those that are there now or on their way, in order
    """

    pages: int
    streamed: range
    in_ring: tuple[range, ...]
    first_page: int = 0


@dataclass(frozen=True, slots=True)
class _Gap:
    """Longest time in a step in which attention consumed nothing, of the last step and of those before; seconds.

    steady_s  the shorter of the last two: a ring follows what steps have in common, not the one that was interrupted
    """

    steady_s: float = 0.0
    last_s: float = 0.0

    def then(self, gap_s: float) -> _Gap:
        """After one more step."""
        return _Gap(min(gap_s, self.last_s), gap_s)


class KvStream:
    """The KV of one cache: its pages in the pools of the arena, its history, and the copies between them."""

    def __init__(
        self, device: Device, geometry: PageGeometry, config: ResidencyConfig, capacity_tokens: int, *,
        sliding: PageGeometry | None = None, reads: Sequence[int] = (), other_bytes: int = 0,
    ) -> None:
        """
        geometry     of the pages that may stream
        sliding      of those of the layers that slide, where the policy says that they have a pool of their own
        reads        the layer whose pages each attention of a step reads, in order; (): each layer's own
        other_bytes  what each step moves to the device beside pages
        """
        self.geometry = geometry
        self.layers = config.layers
        self.reads = tuple(reads) or tuple(range(config.layers))
        self.geometries = tuple(
            sliding if sliding is not None and config.is_apart(layer) else geometry for layer in range(config.layers)
        )
        self.cache = LogicalCache(capacity_tokens)
        self._device = device
        self._config = config
        self._state = ResidencyState(cuts=(0,) * config.layers)
        self._pages = 0                                      # pages per layer that exist, resident or streamed
        self._pools = Pools([config.is_apart(layer) for layer in range(config.layers)])
        self._page_bytes = tuple(each.page_bytes for each in self.geometries)
        slides = Slides(config.sliding_pages or (None,) * config.layers, geometry.page_tokens)
        self._history = HostHistory(device, self._page_bytes, geometry.pages_of(capacity_tokens), slides)
        self._kept: tuple[int, ...] = ()                     # positions to which something may come back
        self._publisher = Publisher(device, self.cache, self._history)
        self.streamer = Streamer(device, self._history, self._pools.view, reads)
        self._promoted: dict[PageId, Fence] = {}             # resident pages whose bytes are still on their way
        self._scratch = AttentionScratch()
        self.plans = StepPlans(device, self, len(self.reads))
        self.watch: PrefillWatch | None = None               # only where attention itself is measured
        self._step: KvStep | None = None
        self._repartitions = 0
        self._scheduled: tuple[tuple[int, ...], int] | None = None
        self._phase = Phase.PREFILL                          # of the last step: a gap of prefill says nothing of decode
        self._gaps = {phase: _Gap() for phase in Phase}
        self._pace = Pace(config.link_bytes_per_s, other_bytes)   # of captured steps
        self._other_s = other_bytes / config.link_bytes_per_s if other_bytes else 0.0
        self._in_vain = False                                # it says that the ring grew in vain; the policy will hear

    # Layout: called at start and by a hand-over, between steps.

    def bind(self, pool: Buffer, scratch: AttentionScratch, sliding_pool: Buffer | None = None) -> None:
        """Use this pool, uint8 [slots, page_bytes], and this scratch from now on, and this pool for the layers that
        slide, where they have one. Pages that are resident lie in the old memory and in the new one."""
        self._scratch = scratch
        self.plans.bind(scratch.group_rows)
        self._pools.bind(pool, sliding_pool)

    def unbind(self) -> None:
        """The pools are gone: no step begins from now on. The history stays."""
        self._pools.unbind()

    def vacate(self, pool_slots: int) -> None:
        """For a hand-over, empty the slots from ``pool_slots`` on: oldest groups become streamed, the rest moves."""
        assert self._step is None
        if pool_slots >= self._pools.shared.pool_slots:
            return
        self._publish_full()
        decision = self._decide(pool_slots, self.cache.committed, self._pages, starved=False)
        self._apply(decision, pool_slots, self._pages)

    def can_lend(self, slots: int, rows: int) -> bool:
        """Whether a decode step of ``rows`` rows would run with that many slots fewer: at most half of the pool."""
        committed, pool_slots = self.cache.committed, self._pools.slots
        if slots * _MOST_LENT > pool_slots or committed + rows > self.cache.capacity_tokens:
            return False
        try:
            self._decide(pool_slots - slots, committed, self.geometry.pages_of(committed + rows), starved=False)
        except BudgetError:
            return False
        return True

    def lend(self, slots: int) -> int:
        """Empty the last ``slots`` slots of the pool for other use, oldest pages first, until ``end_loan`` or a
        hand-over; returns the first of them. Between steps, and only what ``can_lend``."""
        first = self._pools.slots - slots
        self.vacate(first)   # nothing, if as many are lent already
        return first

    @property
    def lent_slots(self) -> int:
        """Slots that are lent."""
        return self._pools.slots - self._pools.shared.pool_slots

    def end_loan(self) -> None:
        """The whole pool holds pages again, as far as the next step wants it. Between steps."""
        assert self._step is None
        table = self._pools.shared
        if self.lent_slots > 0:
            self._device.discard(self._pools.view(table.pool_slots, self.lent_slots))
            table.resize(ring_slots=table.ring_slots, pool_slots=self._pools.slots)

    @property
    def _firsts(self) -> Sequence[int]:
        """Of each layer, the first page that anybody reads, but none behind those that exist."""
        return [min(first, self._pages) for first in self._state.first_pages or (0,) * self.layers]

    def drain(self) -> None:
        """Publish what is dirty and block until every stream is empty."""
        self.publish_dirty()
        self._publisher.wait_all()
        for stream in (self._device.compute, self._device.copy, self._device.publish):
            stream.synchronize()

    def publish_dirty(self) -> None:
        """Send home every page that holds committed rows which have not been sent, a part-filled tail page too."""
        assert self._step is None
        committed = self.cache.committed
        if self._publisher.enqueued < committed:
            first = self._publisher.enqueued // self.geometry.page_tokens
            self._publish(range(first, self.geometry.pages_of(committed)), committed)

    # Steps.

    def begin(self, rows: int, phase: Phase) -> KvStep:
        """Open a step of rows behind the committed ones. ``ContextError``, ``BudgetError`` or ``DeviceError``."""
        assert self._step is None, "a step is open"
        assert self._pools.is_bound, "no layout is bound"
        positions = self.cache.reserve(rows)
        self._phase = phase
        try:
            self._publisher.poll()
            self._publish_full()   # nothing to do, unless a publication failed before
            pages = self.geometry.pages_of(positions.stop)
            self._history.ensure(pages, self._config.first_pages(positions.start // self.geometry.page_tokens))
            pool_slots = self._pools.shared.pool_slots
            decision = self._decide(pool_slots, positions.start, pages, starved=self.streamer.take_starved())
            if decision.ring_bonus < self._state.ring_bonus or not decision.ring_bonus:
                self._in_vain = False
            self._apply(decision, pool_slots, pages)
            self._drop_from_history()
            self.streamer.pump()
        except BaseException:
            self.abandon()
            raise
        self._step = KvStep(self, self._device, positions.start, rows, phase, self._scratch)
        return self._step

    def truncate(self, tokens: int) -> None:
        """Forget the rows from ``tokens`` on. What the new tail page needs comes back with the next step.

        What was copied ahead stays, as far as it is still to be streamed: full pages that are left do not change.
        """
        assert self.nearest(tokens) == tokens, f"what windows saw at {tokens} tokens has left the history"
        self._truncate(tokens)
        if self.drops_passed:
            self._history.cut(self.geometry.pages_of(tokens))

    def nearest(self, tokens: int) -> int:
        """The last position up to ``tokens`` to which ``truncate`` can go: any of them, unless windows have passed what
        they would see there."""
        return self._history.nearest(tokens)

    def keep(self, positions: Sequence[int]) -> None:
        """From now on ``truncate`` can go to these positions, whatever windows pass, as far as it can now. To others
        that windows have passed it can no longer, where the policy drops what they pass. Between steps."""
        self._kept = tuple(positions)
        self._drop_from_history()

    @property
    def drops_passed(self) -> bool:
        """Whether the history gives back what windows have passed."""
        return self._config.drops_passed

    def _drop_from_history(self) -> None:
        if self.drops_passed:
            self._history.drop(self._passed_firsts, self._kept)

    @property
    def _passed_firsts(self) -> Sequence[int]:
        """Of each layer, the first page that is on the device, or that the next step needs, if that comes before."""
        firsts = self._config.first_pages(self.cache.committed // self.geometry.page_tokens)
        return [min(pair) for pair in zip(self._state.first_pages or (0,) * self.layers, firsts, strict=True)]

    def _truncate(self, tokens: int) -> None:
        assert self._step is None
        pages = self.geometry.pages_of(tokens)
        self._publisher.wait_all()
        for page in [page for page in self._promoted if page.page >= pages]:
            self._wait_promoted(page)   # what may fail comes before what changes
        self.cache.truncate(tokens)
        self._forget_pages(pages)

    def restore(self, tokens: int) -> None:
        """Take up a history that came from elsewhere: the cache is empty, and ``room_for`` gave the memory that was
        filled. What stays on the device comes with the next step."""
        assert self._step is None
        self._forget_ring()
        self.cache.restore(tokens)
        self._expect(tokens)

    def _expect(self, tokens: int) -> None:
        """The history will hold that many; nothing is on the device."""
        self._pages = self.geometry.pages_of(tokens)
        # Where nothing is resident yet, cuts say that everything is streamed: the policy then takes back what fits.
        cut = tokens // self.geometry.page_tokens // GROUP_PAGES * GROUP_PAGES
        self._state = replace(self._state, cuts=(cut,) * self.layers)
        self.plans.forget()

    def shift(self, attention: Sequence[AttentionParams], *, keep: int, discard: int, tokens: int) -> None:
        """Drop the rows [keep, keep + discard) and move those behind them down. Blocks; between steps.

        attention  of each layer whose rows are stored, in order
        The cache is empty, and the history still holds all of ``tokens`` rows. If this fails, ``truncate(0)`` has to
        come next, and the rows are lost.
        """
        assert self._step is None
        assert self.cache.committed == 0, self.cache.committed
        self._forget_ring()
        layers = [ShiftLayer(*each) for each in zip(range(self.layers), self.geometries, attention, strict=True)]
        moves, left = plan_shift(keep, discard, tokens, self.geometry.page_tokens), tokens - discard
        self._device.begin_shift(attention, -discard)
        if self._device.is_host or not moves:
            shift_in_place(self._device, self._history, layers, moves)
            self.restore(left)
        else:
            self._shift_through(layers, moves, left)

    def _shift_through(self, layers: Sequence[ShiftLayer], moves: Sequence[PageMove], left: int) -> None:
        """Through slots that are free; pages that are to be resident stay, as far as slots are left for them."""
        self._expect(left)
        pool_slots = self._pools.shared.pool_slots
        self._state = self._decide(pool_slots, left, self._pages, starved=False)
        streamed, firsts = [self._config.streamed(cut) for cut in self._state.cuts], self._firsts
        with self._pools.borrow(work_bytes(layers)) as work:
            for move, layer in product(reversed(moves), range(self.layers)):   # the newest first
                stays = move.page >= firsts[layer] and move.page not in streamed[layer]
                if stays and self._pools.has_free(layer):
                    self._pools.assign(PageId(layer, move.page))
            moved = ShiftThrough(self._device, self._history, work).run(layers, moves, self._place)
            self._device.discard(work)
        for layer, size in enumerate(moved):
            self.streamer.moved[layer] += size
        self.cache.restore(left)
        self._apply(self._state, pool_slots, self._pages)

    def _place(self, layer: int, page: int) -> Buffer | None:
        """The bytes of a page, if it is resident."""
        place = PageId(layer, page)
        return self._pools.bytes_of(place) if self._pools.holds(place) else None

    def room_for(self, layer: int, page: int) -> np.ndarray:
        """The history's memory for a page that ``restore`` is to find there, uint8 [page_bytes]."""
        self._history.ensure_page(layer, page)
        return np.asarray(self._history.page(layer, page))

    def park(self) -> ParkedHistory:
        """Send home what is not there, give the history away, pages and all, and be empty. No bytes move on the host.

        Blocks. ``DeviceError`` if a copy fails; then nothing is given away, and the rows are as they were.
        """
        self.drain()
        self._forget_ring()
        tokens = self.cache.committed
        self._truncate(0)
        return self._history.hand_over(self.geometry.pages_of(tokens), tokens)

    def take_back(self, parked: ParkedHistory) -> None:
        """Go on with a history that was given away: the cache is empty. ``parked`` is used up, unless this raises."""
        self.restore(parked.tokens)
        self._history.adopt(parked)   # last: nothing fails behind it

    def parked_bytes(self, kept: Sequence[int] | None = None) -> int:
        """Pinned bytes that ``park`` would give away now, or after ``keep(kept)``."""
        held = self._history.bytes_of(self.geometry.pages_of(self.cache.committed))
        if kept is None or not self.drops_passed:
            return held
        return held - self._history.passed_bytes(self._passed_firsts, kept)

    @property
    def sliding_page_bytes(self) -> int:
        """Bytes of a page of the layers that slide."""
        return max(size for layer, size in enumerate(self._page_bytes) if self._config.slides(layer))

    def reclaim_with(self, reclaim: Callable[[], bool]) -> None:
        """Where the history finds no memory: see ``HostHistory``."""
        self._history.reclaim = reclaim

    def stats(self) -> KvStats:
        """A snapshot."""
        shared, own = self._pools.shared, self._pools.own
        active = [self._pages - first for first in self._firsts]
        return KvStats(
            pool_pages=shared.pool_slots + own.pool_slots,
            resident_pages=len(self._pools),
            ring_slots=shared.ring_slots,
            active_pages=sum(active),
            active_bytes=sum(map(mul, active, self._page_bytes)),
            streamed_pages_per_step=self.streamer.schedule.streamed_pages,
            repartitions=self._repartitions,
            history_bytes=self._history.size_bytes,
            moved_bytes=tuple(self.streamer.moved[layer] for layer in range(self.layers)),
        )

    def places(self) -> list[LayerPlaces]:
        """Where every page is, by layer. Between steps; costs as much as there are layers and runs in the ring."""
        ahead: list[list[range]] = [[] for _ in range(self.layers)]
        for run in self.streamer.in_ring:
            ahead[self.reads[run.layer]].append(run.page_range)
        made = []
        for first, cut, runs in zip(self._firsts, self._state.cuts, ahead, strict=True):
            # What was taken up from elsewhere comes to the device with the next step.
            going = self._config.streamed(min(cut, self._pages)) if len(self._pools) else range(first, self._pages)
            inside = [range(max(run.start, going.start), min(run.stop, going.stop)) for run in runs]
            ring = tuple(sorted(set(filter(None, inside)), key=lambda run: run.start))
            made.append(LayerPlaces(self._pages, going, ring, first))
        return made

    def history_pages(self, layer: int) -> Iterator[tuple[int, np.ndarray]]:
        """The pages of a layer that the history holds of what is committed, and the bytes of each."""
        for page in range(self.geometry.pages_of(self.cache.committed)):
            if self._history.holds(layer, page):
                yield page, self.history_page(layer, page)

    def needed_pages(self, layer: int, tokens: int) -> range:
        """Those that ``restore(tokens)`` has to find in the history."""
        return self._history.slides.needed(layer, tokens)

    def history_page(self, layer: int, page: int) -> np.ndarray:
        """The published bytes of a page (for saving and for tests)."""
        return np.asarray(self._history.page(layer, page))

    def close(self) -> None:
        """Let go of the history's memory; the streams must be empty or dead."""
        self._history.close()

    # For KvStep.

    def settle(self, keep: int) -> None:
        self.cache.settle(keep)
        self._forget_pages(self.geometry.pages_of(self.cache.committed))
        # The rows are committed whatever becomes of their way home: the next step, or a drain, tries again and raises.
        with suppress(DeviceError):
            self._publish_full()

    def abandon(self) -> None:
        self.cache.settle(0)
        try:
            self.streamer.empty()
        finally:
            self._forget_pages(self.geometry.pages_of(self.cache.committed))

    @property
    def can_capture(self) -> bool:
        """Whether all that a decode step copies lies in pinned memory, which captured copies have to find it in."""
        if not self._history.has_pageable:
            return True
        return all(self._history.is_pinned(self.reads[run.layer], run) for run in self.streamer.schedule.runs)

    def pool_of(self, layer: int) -> Buffer:
        return self._pools.memory(layer)

    def lie(self, read: int) -> Lie:
        """For ``StepPlans``."""
        layer = self.reads[read]
        table = self._pools.table(layer)
        streamed = self._config.streamed(self._state.cuts[layer])
        schedule = self.streamer.schedule
        runs, batches = (schedule.by_layer[read], schedule.batches(read)) if schedule.runs else ((), ())
        first = self._firsts[layer]
        newest = range(max(first, streamed.stop), self._pages)
        slots = [_NO_SLOT] * first + table.slots_of(layer, range(streamed.start))
        slots += [slot for run in runs for slot in run.slots]
        slots += table.slots_of(layer, newest)
        chunks = [Chunk(run.page_range, run, batch) for run, batch in zip(runs, batches, strict=True)]
        if streamed.start > 0:
            chunks.insert(0, Chunk(range(streamed.start)))
        chunks.append(Chunk(newest))
        return Lie(tuple(slots), tuple(chunks), self._config.slides(layer))

    def wait_layer(self, layer: int) -> None:
        # Before its rows are written, and so before attention too: a page that was cut short may be coming back.
        if not self._promoted:
            return
        for coming in [page for page in self._promoted if page.layer == layer]:
            self._wait_promoted(coming)

    def observe_step(self, step_s: float | None) -> None:
        """A captured step took that long on the device.

        One that streamed nothing tells how long the layers between two attention layers take, the gap that the ring
        bridges. One that streamed more than it may show that the link was kept waiting, which ``acquire`` cannot see.
        """
        if not step_s:
            return
        moved = self.streamer.schedule.streamed_pages * self.geometry.page_bytes
        if moved == 0:
            # While the link is busy with other things no slot is missing.
            gap_s = max(0.0, step_s - self._other_s) / len(self.reads)
            self._gaps[Phase.DECODE] = _Gap(gap_s, gap_s)
        advice = self._pace.observe(step_s, moved)
        if advice is Advice.GROW:
            self.streamer.note_starved()
        elif advice is Advice.TAKE_BACK:
            self._in_vain = True

    def step_closed(self, longest_gap_s: float) -> None:
        self._step = None
        if longest_gap_s > 0:
            self._gaps[self._phase] = self._gaps[self._phase].then(longest_gap_s)

    # Deciding and carrying out.

    def _decide(self, pool_slots: int, first_position: int, pages: int, *, starved: bool) -> ResidencyState:
        seen = Observation(
            pages=pages,
            writable_page=first_position // self.geometry.page_tokens,
            pool_slots=pool_slots,
            gap_s=self._gaps[self._phase].steady_s,
            starved=starved,
            in_vain=self._in_vain,
        )
        return residency_step(self._config, self._state, seen)

    def _apply(self, state: ResidencyState, pool_slots: int, pages: int) -> None:
        """Make table, ring and pages what ``state`` says, for a pool and for ``pages`` pages per layer.

        Each move is complete in itself: an error in between leaves a table that is true, and the next step plans anew.
        """
        if state.first_pages != self._state.first_pages:
            self.plans.forget()
            self._drop_passed(state.first_pages)
        if self._scheduled != (state.cuts, state.ring_slots) or pool_slots != self._pools.shared.pool_slots:
            self._scheduled = None
            table = self._pools.shared
            self.plans.rescheduled()
            self._evict(state.cuts)
            if state.ring_slots <= table.ring_slots:
                self._replan(state)
                table.resize(ring_slots=state.ring_slots, pool_slots=table.pool_slots)
                self._clear_the_way(state.ring_slots, pool_slots)
                table.resize(ring_slots=state.ring_slots, pool_slots=pool_slots)
            else:
                self._clear_the_way(state.ring_slots, pool_slots)
                table.resize(ring_slots=state.ring_slots, pool_slots=pool_slots)
                self._replan(state)
            self._scheduled = (state.cuts, state.ring_slots)
            self._repartitions += 1
        self._state = state
        self._promote()
        self._grow(pages)

    def _replan(self, state: ResidencyState) -> None:
        self.streamer.replan(
            [self._config.streamed(state.cuts[layer]) for layer in self.reads],
            ring_slots=state.ring_slots,
            run_pages=self._config.run_pages_in(state.ring_slots),
        )

    def _evict(self, cuts: Sequence[int]) -> None:
        """Pages that are to be streamed give their slots back; their bytes are in the history."""
        streamed = [self._config.streamed(cut) for cut in cuts]
        self._send_away([page for page in self._pools if page.page in streamed[page.layer]])

    def _drop_passed(self, firsts: Sequence[int]) -> None:
        """The same for pages that sliding windows have passed."""
        self._send_away([page for page in self._pools if page.page < firsts[page.layer]])

    def _send_away(self, going: Sequence[PageId]) -> None:
        if going:
            self._publisher.wait_for((max(page.page for page in going) + 1) * self.geometry.page_tokens)
        for page in going:
            self._release(page)

    def _clear_the_way(self, ring_slots: int, pool_slots: int) -> None:
        """Move resident pages out of slots that the ring takes or the pool gives up."""
        table = self._pools.shared
        moving = table.in_the_way(ring_slots=ring_slots, pool_slots=pool_slots)
        if moving:
            self._publisher.wait_all()
        targets = table.free_slots(range(max(ring_slots, table.ring_slots), pool_slots))
        assert len(moving) <= len(targets), "the policy kept more pages than fit"
        for page in moving:
            # On the compute stream: behind all that has read the target and, once awaited, what filled the source.
            self._wait_promoted(page)
            target = targets.pop()
            source = self._pools.bytes_of(page)
            self._device.enqueue_copy(self._pools.view(target, 1), source, self._device.compute)
            table.move_to(page, target)
            self._device.discard(source)

    def _promote(self) -> None:
        """Streamed pages at or above their layer's cut come back to stay; a layer waits for its own before use."""
        streamed = [self._config.streamed(cut) for cut in self._state.cuts]
        if len(self._pools) == self._pages * self.layers - sum(map(len, streamed)) - sum(self._firsts):
            return
        back = [
            PageId(layer, page)
            for layer, (pages, first) in enumerate(zip(streamed, self._firsts, strict=True))
            for page in (*range(pages.start), *range(max(first, pages.stop), self._pages))
            if not self._pools.holds(PageId(layer, page))
        ]
        self._device.copy.wait(self._device.compute.record())
        for page in back:
            self._pools.assign(page)
            try:
                view = self._pools.bytes_of(page)
                self._device.enqueue_copy(view, self._history.page(page.layer, page.page), self._device.copy)
                self._promoted[page] = self._device.copy.record()
                self.streamer.moved[page.layer] += self._page_bytes[page.layer]
            except BaseException:
                self._pools.release(page)   # a page in the table is one whose bytes are there, or on their way
                raise

    def _grow(self, pages: int) -> None:
        """New tail pages, cleared: stale scales times zero weights would be NaN."""
        if pages == self._pages:
            return
        self.plans.forget()
        first, self._pages = self._pages, pages
        for page in range(first, pages):
            for layer in range(self.layers):
                slot = self._pools.assign(PageId(layer, page))
                self._device.ops.zero_page(self._pools.memory(layer), self.geometries[layer], slot)

    def _forget_ring(self) -> None:
        """The history will be another: what was copied ahead is of no use, and where copies come from changes."""
        self.streamer.empty()
        self._scheduled = None

    def _forget_pages(self, pages: int) -> None:
        """Pages from ``pages`` on hold no committed row."""
        if self._pages <= pages:
            return
        self.plans.forget()
        self._pages = pages
        for page in [page for page in self._pools if page.page >= pages]:
            self._release(page)

    def _release(self, page: PageId) -> None:
        self._wait_promoted(page)
        self._device.discard(self._pools.release(page))

    def _wait_promoted(self, page: PageId) -> None:
        fence = self._promoted.get(page)
        if fence is not None:
            self._device.compute.wait(fence)   # raises if the copy failed, and again whenever the page is asked for
            del self._promoted[page]

    def _publish_full(self) -> None:
        """Send home the full pages that have not been sent."""
        full = self.cache.committed // self.geometry.page_tokens
        first = self._publisher.enqueued // self.geometry.page_tokens
        if full > first:
            self._publish(range(first, full), full * self.geometry.page_tokens)

    def _publish(self, pages: range, tokens: int) -> None:
        ids = [PageId(layer, page) for page in pages for layer in range(self.layers)]
        self._publisher.enqueue([(page, self._pools.bytes_of(page)) for page in ids], tokens)
