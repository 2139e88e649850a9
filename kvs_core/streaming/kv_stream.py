"""KvStream: joins cache, policy, plan and schedule for one step, and lends the model a ``LayerKv`` per layer.

    with kv.begin(rows, phase) as step:      pages assigned, cuts and ring decided, copies under way
        ... model: step.layer(i).write / attend ...
        step.settle(keep)                    commit those rows; full pages go home

Leaving the block without ``settle`` (an error, a caller who stops) drops the rows: back to the last commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import mul

import numpy as np

from kvs_core.device.base import Device
from kvs_core.device.operands import AttentionParams, Buffer
from kvs_core.errors import BudgetError, DeviceError
from kvs_core.memory.phases import Phase
from kvs_core.paging.cache import LogicalCache
from kvs_core.paging.geometry import GROUP_PAGES, PageGeometry
from kvs_core.paging.passed import Slides
from kvs_core.paging.residency import ResidencyConfig
from kvs_core.paging.shift import PageMove, plan_shift
from kvs_core.streaming.feedback import Feedback
from kvs_core.streaming.history import HostHistory, ParkedHistory
from kvs_core.streaming.kv_step import KvStep
from kvs_core.streaming.layer_kv import AttentionScratch, PrefillWatch
from kvs_core.streaming.placement import Placement
from kvs_core.streaming.places import KvStats, LayerPlaces
from kvs_core.streaming.pools import Pools
from kvs_core.streaming.publisher import Publisher
from kvs_core.streaming.residents import Residents
from kvs_core.streaming.shift import ShiftLayer, shift_in_place, shift_through
from kvs_core.streaming.streamer import Streamer

_MOST_LENT = 2      # a half of the pool is the most that is lent


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
        self._pools = Pools([config.is_apart(layer) for layer in range(config.layers)])
        self._page_bytes = tuple(each.page_bytes for each in self.geometries)
        slides = Slides(config.sliding_pages or (None,) * config.layers, geometry.page_tokens)
        self._history = HostHistory(device, self._page_bytes, geometry.pages_of(capacity_tokens), slides)
        self._kept: tuple[int, ...] = ()                     # positions to which something may come back
        self._publisher = Publisher(device, self.cache, self._history)
        self.streamer = Streamer(device, self._history, self._pools.view, reads)
        self._residents = Residents(device, self.geometries, self._pools, self._history, self._publisher, self.streamer)
        self._scratch = AttentionScratch()
        self.watch: PrefillWatch | None = None               # only where attention itself is measured
        self._step: KvStep | None = None
        streaming = sum(not config.slides(layer) for layer in self.reads)
        self._feedback = Feedback(config.link_bytes_per_s, max(1, streaming), other_bytes)
        self._placement = Placement(
            device, config, geometry.page_tokens, self.reads, self._pools, self._residents, self.streamer,
            self._feedback,
        )
        self.plans = self._placement.plans

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
        placement = self._placement
        decision = placement.decide(pool_slots, self.cache.committed, placement.pages, starved=False)
        placement.apply(decision, pool_slots, placement.pages)

    def can_lend(self, slots: int, rows: int) -> bool:
        """Whether a decode step of ``rows`` rows would run with that many slots fewer: at most half of the pool."""
        committed, pool_slots = self.cache.committed, self._pools.slots
        if slots * _MOST_LENT > pool_slots or committed + rows > self.cache.capacity_tokens:
            return False
        try:
            pages = self.geometry.pages_of(committed + rows)
            self._placement.decide(pool_slots - slots, committed, pages, starved=False)
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

    def drain(self) -> None:
        """Publish what is dirty and block until every stream is empty."""
        self.publish_dirty()
        self._publisher.wait_all()
        for stream in (self._device.compute, self._device.copy, self._device.publish):
            stream.synchronize()

    def publish_dirty(self) -> None:
        """Send home every page that holds committed rows which have not been sent, a part-filled tail page too."""
        assert self._step is None
        self._residents.publish(self.cache.committed)

    # Steps.

    def begin(self, rows: int, phase: Phase) -> KvStep:
        """Open a step of rows behind the committed ones. ``ContextError``, ``BudgetError`` or ``DeviceError``."""
        assert self._step is None, "a step is open"
        assert self._pools.is_bound, "no layout is bound"
        positions = self.cache.reserve(rows)
        self._feedback.phase = phase
        try:
            self._publisher.poll()
            self._publish_full()   # nothing to do, unless a publication failed before
            pages = self.geometry.pages_of(positions.stop)
            self._history.ensure(pages, self._config.first_pages(positions.start // self.geometry.page_tokens))
            pool_slots, placement = self._pools.shared.pool_slots, self._placement
            decision = placement.decide(pool_slots, positions.start, pages, starved=self.streamer.take_starved())
            if decision.ring_bonus < placement.state.ring_bonus or not decision.ring_bonus:
                self._feedback.in_vain = False
            placement.apply(decision, pool_slots, pages)
            self._drop_from_history()
            self.streamer.pump(between_steps=True)
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
        that windows have passed it can no longer, where the policy drops what they pass. Between steps, or where
        ``reclaim_with`` asks."""
        self._kept = tuple(positions)
        self._drop_from_history()

    @property
    def drops_passed(self) -> bool:
        """Whether the history gives back what windows have passed."""
        return self._config.drops_passed

    def _drop_from_history(self) -> None:
        if self.drops_passed:
            self._history.drop(self._placement.passed_firsts(self.cache.committed), self._kept)

    def _truncate(self, tokens: int) -> None:
        assert self._step is None
        pages = self.geometry.pages_of(tokens)
        self._publisher.wait_all()
        self._residents.wait_from(pages)   # what may fail comes before what changes
        self.cache.truncate(tokens)
        self._placement.cut(pages)

    def restore(self, tokens: int) -> None:
        """Take up a history that came from elsewhere: the cache is empty, and ``room_for`` gave the memory that was
        filled. What stays on the device comes with the next step."""
        assert self._step is None
        self._placement.forget()
        self.cache.restore(tokens)
        self._placement.expect(tokens)

    def shift(self, attention: Sequence[AttentionParams], *, keep: int, discard: int, tokens: int) -> None:
        """Drop the rows [keep, keep + discard) and move those behind them down. Blocks; between steps.

        attention  of each layer whose rows are stored, in order
        The cache is empty, and the history still holds all of ``tokens`` rows. If this fails, ``truncate(0)`` has to
        come next, and the rows are lost.
        """
        assert self._step is None
        assert self.cache.committed == 0, self.cache.committed
        self._placement.forget()
        layers = [ShiftLayer(*each) for each in zip(range(self.layers), self.geometries, attention, strict=True)]
        moves, left = plan_shift(keep, discard, tokens, self.geometry.page_tokens), tokens - discard
        self._device.begin_shift(attention, -discard)
        if self._device.is_host or not moves:
            shift_in_place(self._device, self._history, layers, moves)
            self.restore(left)
        else:
            self._shift_through(layers, moves, left)

    def _shift_through(self, layers: Sequence[ShiftLayer], moves: Sequence[PageMove], left: int) -> None:
        """Through slots that are free; pages that are to be resident stay there."""
        pool_slots, placement = self._pools.shared.pool_slots, self._placement
        stays = placement.expect_resident(left, pool_slots)
        moved = shift_through(self._device, self._history, self._pools, layers, moves, stays)
        for layer, size in enumerate(moved):
            self.streamer.moved[layer] += size
        self.cache.restore(left)
        placement.apply(placement.state, pool_slots, placement.pages)

    def forget_slid(self) -> None:
        """The cache is empty: what the history still has of layers that slide is of another text. Before ``room_for``,
        which leaves out pages: of those layers memory that is there counts as bytes that are."""
        assert self.cache.committed == 0, self.cache.committed
        self._history.cut(0)

    def room_for(self, layer: int, page: int) -> np.ndarray:
        """The history's memory for a page that ``restore`` is to find there, uint8 [page_bytes]."""
        self._history.ensure_page(layer, page)
        return np.asarray(self._history.page(layer, page))

    def park(self) -> ParkedHistory:
        """Send home what is not there, give the history away, pages and all, and be empty. On the host only the pages
        of a short sequence move.

        Blocks. ``DeviceError`` if a copy fails; then nothing is given away, and the rows are as they were.
        """
        self.drain()
        self._placement.forget()
        tokens = self.cache.committed
        self._truncate(0)
        return self._history.hand_over(self.geometry.pages_of(tokens), tokens)

    def take_back(self, parked: ParkedHistory) -> None:
        """Go on with a history that was given away: the cache is empty. ``parked`` is used up, unless this raises."""
        self.restore(parked.tokens)
        self._history.adopt(parked)   # last: nothing fails behind it

    def parked_bytes(self, kept: Sequence[int] | None = None) -> int:
        """Bytes of host memory that ``park`` would give away now, or after ``keep(kept)``."""
        held = self._history.bytes_of(self.geometry.pages_of(self.cache.committed))
        if kept is None or not self.drops_passed:
            return held
        return held - self._history.passed_bytes(self._placement.passed_firsts(self.cache.committed), kept)

    def kept_bytes(self, positions: Sequence[int]) -> int:
        """Bytes of the history that ``keep`` keeps for these positions, once windows have passed them."""
        if not self.drops_passed:
            return 0
        groups = self._history.slides.groups_by_layer(positions)
        return sum(GROUP_PAGES * len(held) * size for held, size in zip(groups, self._page_bytes, strict=True))

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
        active = [self._placement.pages - first for first in self._placement.firsts]
        return KvStats(
            pool_pages=shared.pool_slots + own.pool_slots,
            resident_pages=len(self._pools),
            ring_slots=shared.ring_slots,
            active_pages=sum(active),
            active_bytes=sum(map(mul, active, self._page_bytes)),
            streamed_pages_per_step=self.streamer.schedule.streamed_pages,
            repartitions=self._placement.changes,
            history_bytes=self._history.size_bytes,
            moved_bytes=tuple(self.streamer.moved[layer] for layer in range(self.layers)),
        )

    def places(self) -> list[LayerPlaces]:
        """Where every page is, by layer. Between steps; costs as much as there are layers and runs in the ring."""
        return self._placement.by_layer()

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
        self._placement.cut(self.geometry.pages_of(self.cache.committed))
        # The rows are committed whatever becomes of their way home: the next step, or a drain, tries again and raises.
        with suppress(DeviceError):
            self._publish_full()

    def abandon(self) -> None:
        self.cache.settle(0)
        try:
            self.streamer.empty()
        finally:
            self._placement.cut(self.geometry.pages_of(self.cache.committed))

    def pool_of(self, layer: int) -> Buffer:
        return self._pools.memory(layer)

    def wait_layer(self, layer: int) -> None:
        # Before its rows are written, and so before attention too: a page that was cut short may be coming back.
        self._residents.wait_layer(layer)

    def observe_step(self, step_s: float | None) -> None:
        """A captured step took that long on the device; see ``Feedback``."""
        if step_s and self._feedback.captured(
            step_s, self.streamer.schedule.streamed_pages * self.geometry.page_bytes
        ):
            self.streamer.note_starved()

    def step_closed(self, longest_gap_s: float) -> None:
        self._step = None
        self._feedback.step_closed(longest_gap_s)

    def _publish_full(self) -> None:
        """Send home the full pages that have not been sent."""
        self._residents.publish(self.cache.committed // self.geometry.page_tokens * self.geometry.page_tokens)
