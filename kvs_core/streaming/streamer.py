"""Streamer: keeps the ring ahead of attention on the copy stream, across layers and on into the next step.

A run's life: its slots are EMPTY; ``pump`` enqueues the copy (FILLING) behind the fences of the slots' last readers,
between steps only into slots that are not late ones of the schedule;
``acquire`` makes the compute stream wait for it (READY, READING); ``release`` records consumed (EMPTY) and pumps again.
Waiting and recording is done once for each batch: before its first run is read, and behind its last one.
Runs are fetched and read in the order of the schedule, round and round.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvs_core.device.base import PASSED, Device, Fence
from kvs_core.device.operands import Buffer
from kvs_core.paging.schedule import PrefetchSchedule, Run, head_in_ring, plan_schedule
from kvs_core.paging.slots import Ring, SlotState
from kvs_core.streaming.history import HostHistory


@dataclass(frozen=True, slots=True)
class _InRing:
    """A run that is in the ring, or on its way."""

    run: Run
    ready: Fence


@dataclass(frozen=True, slots=True)
class _Consumed:
    """The last reader of a slot is done behind ``fence``; fences of a higher ``number`` lie behind it."""

    number: int
    fence: Fence


class Streamer:
    """Carries out one ``PrefetchSchedule`` after another.

    pool_view(first_slot, slots)  the bytes of those slots
    moved                         bytes copied to the device by layer; those who copy beside the streamer count here too
    starved                       since last asked: within a step the link idled for want of a slot, and later attention
                                  waited for it; a pause before the first run of a step does not count
    """

    def __init__(
        self, device: Device, history: HostHistory, pool_view: Callable[[int, int], Buffer], reads: Sequence[int] = ()
    ) -> None:
        """``reads``: the layer that each attention of a step reads, where that is not its own."""
        self._device = device
        self._history = history
        self._reads = tuple(reads)
        self._pool_view = pool_view
        self._schedule = PrefetchSchedule((), 0, (), ())
        self._ring = Ring(0)
        self._in_ring: deque[_InRing] = deque()
        self._consumed: dict[int, _Consumed] = {}   # by slot
        self._releases = 0        # the number of the newest, and of the newest that the copy stream has waited for
        self._waited = 0
        self._next_fetch = 0
        self._batch_first = 0     # of the batch in hand: the number of its first run, the oldest one in the ring
        self._acquired = 0        # of its runs, and how many of those have been given back
        self._released = 0
        self._idled = self._starved = False
        self._behind_launch = False   # captured work was launched, of whose reads no fence tells
        self.moved: Counter[int] = Counter()

    @property
    def schedule(self) -> PrefetchSchedule:
        """The schedule being carried out."""
        return self._schedule

    @property
    def can_capture(self) -> bool:
        """Whether all that a decode step copies lies in pinned memory, which captured copies have to find it in."""
        if not self._history.has_pageable:
            return True
        return all(self._history.is_pinned(self._layer(run), run) for run in self._schedule.runs)

    @property
    def in_ring(self) -> list[Run]:
        """Runs that are in the ring or on their way, in the order of the schedule."""
        return [entry.run for entry in self._in_ring]

    def take_starved(self) -> bool:
        """Whether a larger ring would have spared attention a wait; asking clears it."""
        starved, self._idled, self._starved = self._starved, False, False
        return starved

    def note_starved(self) -> None:
        """A captured step has shown what ``acquire`` cannot see in one: the link waited for slots."""
        self._starved = True

    def replan(self, streamed: Sequence[range], *, ring_slots: int, run_pages: int) -> None:
        """Between steps: take up a new schedule. Runs copied ahead that still head it keep their slots.

        Every streamed page is published already.
        """
        assert self._batch_first == self._acquired == 0, "a step is being read"
        runs = [entry.run for entry in self._in_ring]
        kept = head_in_ring(streamed, ring_slots, runs)
        self._drop_behind(kept)
        self._ring.resize(ring_slots)
        self._consumed = {slot: fence for slot, fence in self._consumed.items() if slot < ring_slots}
        # Slots that join the ring were read, or written, by the compute stream last.
        self._wait_for_compute()
        self._schedule = plan_schedule(streamed, ring_slots=ring_slots, run_pages=run_pages, kept=runs[:kept])
        # Every step begins alike, for captured ones know but one beginning.
        late = self._schedule.late_slots
        kept = next((number for number, run in enumerate(runs[:kept]) if not late.isdisjoint(run.slots)), kept)
        self._drop_behind(kept)
        self._next_fetch = kept % max(1, len(self._schedule.runs))
        self.pump(between_steps=True)

    def empty(self) -> None:
        """Drop all that was copied ahead; what the compute stream does next meets no copy into the ring under way."""
        self._next_fetch = self._batch_first = self._acquired = self._released = 0
        self._consumed.clear()
        self._drop_behind(0)
        self._wait_for_compute()

    def pump(self, *, between_steps: bool = False) -> None:
        """Enqueue copies as far as the ring has room; between steps, as far as it is to be full when one begins."""
        runs = self._schedule.runs
        while runs and len(self._in_ring) < len(runs):
            run = runs[self._next_fetch]
            if not self._ring.all_empty(run.slots):
                return
            if between_steps and not self._schedule.late_slots.isdisjoint(run.slots):
                return
            if self._behind_launch:
                self._wait_for_compute()
            self._wait_for_readers(run)
            layer = self._layer(run)
            source = self._history.run(layer, run)
            self._device.enqueue_copy(self._pool_view(run.first_slot, run.pages), source, self._device.copy)
            self.moved[layer] += source.nbytes
            self._in_ring.append(_InRing(run, self._device.copy.record()))
            self._ring.move(run.slots, SlotState.FILLING)
            self._next_fetch = (self._next_fetch + 1) % len(runs)

    def settle_fences(self) -> None:
        """The compute stream waits for all that was copied ahead, and no fence is kept: those of now mean nothing in a
        capture, and a captured step does not know them."""
        for index, entry in enumerate(self._in_ring):
            self._device.compute.wait(entry.ready)
            self._in_ring[index] = _InRing(entry.run, PASSED)
        # Captured copies begin behind the compute stream, which is the last reader of every slot that is empty now.
        self._consumed.clear()
        self._behind_launch = False

    def note_launch(self, moved: Counter[int]) -> None:
        """What is enqueued from now on comes behind a captured step that moves these bytes."""
        self.moved.update(moved)
        self._behind_launch = True

    def forget_fences(self) -> None:
        """After a capture: its fences mean nothing outside, and what is enqueued next comes behind its launch. Nor does
        what was seen on the way tell of the link: nothing has run."""
        self._in_ring = deque(_InRing(entry.run, PASSED) for entry in self._in_ring)
        self._consumed.clear()
        self._idled = self._starved = False

    def acquire(self, run: Run) -> None:
        """Before the attention call that reads ``run``: the compute stream waits until it is there, and its batch."""
        runs, first = self._schedule.runs, self._batch_first
        entry = self._in_ring[self._acquired]
        assert entry.run == runs[first + self._acquired] == run, (entry.run, run)
        if self._acquired == 0:
            last = self._in_ring[self._schedule.batch_ends[first] - first - 1]
            if self._idled and not last.ready.done():
                self._starved = True
            self._device.compute.wait(last.ready)
        self._ring.move(run.slots, SlotState.READY)
        self._ring.move(run.slots, SlotState.READING)
        self._acquired += 1

    def release(self, run: Run) -> None:
        """After the last attention call that reads ``run``: once that call of its batch's last run is done, the slots
        of the batch may be filled again."""
        first = self._batch_first
        size = self._schedule.batch_ends[first] - first
        entry = self._in_ring[self._released]
        assert self._released < self._acquired, run
        assert entry.run == run, (entry.run, run)
        if self._released + 1 < size:
            self._released += 1
            return
        if first > 0 and len(self._in_ring) < len(self._schedule.runs) and self._in_ring[-1].ready.done():
            self._idled = True
        consumed = self._device.compute.record()   # may raise; until then the batch keeps its slots
        self._releases += 1
        note = None if consumed.done() else _Consumed(self._releases, consumed)
        for _ in range(size):
            read = self._in_ring.popleft().run
            self._ring.move(read.slots, SlotState.EMPTY)
            if note is not None:
                self._consumed.update(dict.fromkeys(read.slots, note))
            self._device.discard(self._pool_view(read.first_slot, read.pages))
        self._batch_first = (first + size) % len(self._schedule.runs)
        self._acquired = self._released = 0
        self.pump(between_steps=self._batch_first == 0)

    def _wait_for_compute(self) -> None:
        """The copy stream waits for all that the compute stream has been given."""
        self._device.copy.wait(self._device.compute.record())
        self._behind_launch = False

    def _wait_for_readers(self, run: Run) -> None:
        """The copy stream waits for the last reader of the run's slots, unless it has waited for a later one: in a
        captured step each such wait holds up the kernels too, some 20 us on an H200."""
        readers = [self._consumed.pop(slot) for slot in run.slots if slot in self._consumed]
        last = max(readers, key=lambda reader: reader.number, default=None)
        if last is not None and last.number > self._waited:
            self._device.copy.wait(last.fence)
            self._waited = last.number

    def _drop_behind(self, kept: int) -> None:
        """Forget the runs in the ring behind the first ``kept``."""
        dropped = [self._in_ring.pop() for _ in range(len(self._in_ring) - kept)]
        for entry in dropped:
            self._ring.move(entry.run.slots, SlotState.EMPTY)
        # Whoever uses the slots next must not meet a copy that is still under way; the stream keeps its order, so the
        # last one is the one to wait for. The wait may raise, and by then the ring is what it will be.
        if dropped:
            self._device.compute.wait(dropped[0].ready)
            for entry in dropped:
                self._device.discard(self._pool_view(entry.run.first_slot, entry.run.pages))

    def _layer(self, run: Run) -> int:
        """Whose pages it brings."""
        return self._reads[run.layer] if self._reads else run.layer
