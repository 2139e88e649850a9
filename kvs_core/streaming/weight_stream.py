"""WeightStream: keeps the weights ring ahead of the layers on the copy stream, and on into the next pass.

Parts pass in one order, round and round, each into its own place (``paging.weight_ring``). A place is overwritten
behind the fence of the last reader of its end of the ring, and read behind the fence of its copy:

    next_fetch   the part that ``pump`` copies next, once its end of the ring is free
    in_ring      parts that are there or on their way, two at most
    next_read    the part that ``acquire`` lends next: 0 between passes
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvs_core.device.base import PASSED, Device, Fence
from kvs_core.device.copied import NONE_COPIED, Copied
from kvs_core.device.operands import Buffer, WeightPart
from kvs_core.memory.lease import Lease
from kvs_core.paging.weight_ring import WeightRing

_ENDS = 2   # of the ring: parts alternate


@dataclass(frozen=True, slots=True)
class _InRing:
    """A part that is in the ring, or on its way."""

    number: int
    ready: Fence


class WeightStream:
    """``models.model.WeightFlow`` on one region of the arena, whose lease is held for good.

    moved  so far
    """

    def __init__(self, device: Device, parts: Sequence[WeightPart], lease: Lease) -> None:
        """The parts of a pass, in order; from now on they lie in the region."""
        assert parts, "no part passes"
        self._device = device
        self._parts = tuple(parts)
        self._lease = lease
        view = lease.view
        places = WeightRing(tuple(part.home.nbytes for part in parts)).places(view.size_bytes)
        self._places: list[Buffer] = [
            device.arena_view(view.offset + place.start, (len(place),), np.uint8) for place in places
        ]
        for part, place in zip(parts, self._places, strict=True):
            part.lie_in(place)
        self._in_ring: deque[_InRing] = deque()
        self._consumed: list[Fence | None] = [None] * _ENDS
        self._next_fetch = self._next_read = 0
        self.moved = NONE_COPIED

    @property
    def pass_bytes(self) -> int:
        """Bytes that a pass over all layers moves."""
        return sum(part.home.nbytes for part in self._parts)

    def begin(self) -> None:
        """A pass begins. What one that broke off has left is dropped."""
        if self._next_read != 0:
            self.empty()
        self.pump()

    def acquire(self, part: WeightPart) -> None:
        """Before the first op that reads ``part``, the next in order: the compute stream waits until it is there."""
        entry = self._in_ring[0]
        assert self._parts[self._next_read] is part, f"part {self._next_read} is next"
        assert entry.number == self._next_read, (entry.number, self._next_read)
        self._device.compute.wait(entry.ready)

    def release(self, part: WeightPart) -> None:
        """After the last op that reads it: its end of the ring may be filled again once that op is done."""
        number = self._next_read
        assert self._parts[number] is part, f"part {number} is next"
        self._consumed[number % _ENDS] = self._device.compute.record()   # may raise; until then it keeps its place
        self._in_ring.popleft()
        self._device.discard(self._places[number])
        self._next_read = (number + 1) % len(self._parts)
        self.pump()

    def pump(self) -> None:
        """Enqueue copies as far as the ring has room."""
        while len(self._in_ring) < _ENDS:
            number = self._next_fetch
            end = number % _ENDS
            fence = self._consumed[end]
            if fence is not None:
                self._device.copy.wait(fence)
                self._consumed[end] = None
            home = self._parts[number].home
            self._device.enqueue_copy(self._places[number], home, self._device.copy)
            self.moved = self.moved.plus(Copied(home.nbytes, 1))
            self._in_ring.append(_InRing(number, self._device.copy.record()))
            self._next_fetch = (number + 1) % len(self._parts)

    def empty(self) -> None:
        """Drop all that was copied ahead: the next pass begins with the first part."""
        # What comes into the ring next meets neither a copy that is under way, as the copy stream keeps its order, nor
        # a reader. This may raise; until then readers are known.
        self._device.copy.wait(self._device.compute.record())
        self._next_fetch = self._next_read = 0
        self._consumed = [None] * _ENDS
        dropped, self._in_ring = self._in_ring, deque()
        for entry in dropped:
            self._device.compute.wait(entry.ready)
            self._device.discard(self._places[entry.number])

    # Around captured steps: see ``KvStep`` and ``Streamer``, whose methods of these names do the same for pages.

    def settle_fences(self) -> None:
        """Before a capture or a launch: the ring is filled, the compute stream waits for it, no fence is kept."""
        self.begin()
        for index, entry in enumerate(self._in_ring):
            self._device.compute.wait(entry.ready)
            self._in_ring[index] = _InRing(entry.number, PASSED)
        self._consumed = [None] * _ENDS

    def after_capture(self, before: Copied) -> Copied:
        """A capture has ended, or has failed: its fences mean nothing outside, and what is enqueued next comes behind
        its launch. What was ``moved`` before it stands again; returned is what each launch moves.

        A whole pass leaves the ring as it found it, so what is there now is there whether it is launched or not.
        """
        self._in_ring = deque(_InRing(entry.number, PASSED) for entry in self._in_ring)
        self._consumed = [None] * _ENDS
        moved, self.moved = self.moved.since(before), before
        return moved

    def launched(self, moved: Copied) -> None:
        """A captured step was launched that moves this."""
        self.moved = self.moved.plus(moved)
