"""A device on which only streams and fences order anything: it finds every access that lacks a wait.

The host's compute stream is the calling thread, which hides a missing wait of a copy for the compute stream. Here each
stream, and the host, keeps a clock per stream of what it knows to be done (vector clocks). Every page-sized place in
memory remembers its last write and the reads since. Two accesses to one place, at least one of them a write, must be
ordered by what the later one knows; that is asked when an access is enqueued, so timing does not matter.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvs_core.device.base import Fence, Stream
from kvs_core.device.host.device import HostDevice
from kvs_core.device.operands import AttentionParams, Buffer
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import PageGeometry
from kvs_core.paging.shift import PageMove
from kvs_core.paging.spans import LayerPlan, row_spans

Clock = dict[str, int]


def learn(clock: Clock, other: Clock) -> None:
    """Everything that ``other`` knows."""
    for name, count in other.items():
        clock[name] = max(clock.get(name, 0), count)


class TracedFence:
    """What a stream had done, and knew, when it was recorded."""

    def __init__(self, device: TracedDevice, clock: Clock) -> None:
        self._device = device
        self._clock = clock

    def done(self) -> bool:
        """Any answer; the host knows what a yes tells it."""
        if self._device.dice.random() < 0.5:
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """The host knows."""
        learn(self._device.host, self._clock)


class TracedStream:
    """A stream with a clock."""

    def __init__(self, device: TracedDevice, name: str) -> None:
        self.name = name
        self.clock: Clock = {name: 0}
        self._device = device

    def record(self) -> Fence:
        return TracedFence(self._device, dict(self.clock))

    def wait(self, fence: Fence) -> None:
        assert isinstance(fence, TracedFence)
        learn(self.clock, fence._clock)

    def synchronize(self) -> None:
        learn(self._device.host, self.clock)

    def next_op(self) -> int:
        """Work is enqueued now: it runs after all that the host had waited for."""
        learn(self.clock, self._device.host)
        self.clock[self.name] += 1
        return self.clock[self.name]


class TracedDevice(HostDevice):
    """A host device whose copies are done at once and whose accesses are checked, those of a device with memory of its
    own.

    committed_tokens  tells the rows that count: a part-filled page on its way home may be written to behind them
    """

    is_host = False

    def __init__(self, geometry: PageGeometry, seed: int) -> None:
        super().__init__(1)
        self.dice = random.Random(seed)
        self.host: Clock = {}
        self.copies = 0
        self.committed_tokens: Callable[[], int] = lambda: 0
        self._geometry = geometry
        self._writes: dict[int, tuple[str, int]] = {}
        self._reads: dict[int, dict[tuple[str, int], int]] = {}   # (stream, rows that are read) -> count
        self._streams = {name: TracedStream(self, name) for name in ("compute", "copy", "publish")}
        self.compute: Stream = self._streams["compute"]
        self.copy: Stream = self._streams["copy"]
        self.publish: Stream = self._streams["publish"]
        self.ops: Any = _TracedOps(self, self.ops)

    def enqueue_copy(self, dst: Buffer, src: Buffer, stream: Stream) -> None:
        """The copy is done now and traced per page."""
        assert dst.nbytes == src.nbytes
        assert dst.nbytes % self._geometry.page_bytes == 0
        self.copies += 1
        rows = self.committed_tokens() % self._geometry.page_tokens if stream is self.publish else 0
        self.access(stream.name, reads=self.places(src), writes=self.places(dst), read_rows=rows)
        np.copyto(dst, src)

    def discard(self, buffer: Buffer) -> None:
        """Nothing to see."""

    def touch(self, pool: Buffer, slots: Iterable[int]) -> None:
        """The compute stream uses the memory of slots for something else; they may lie behind the pool's end."""
        first = int(pool.ctypes.data)
        self.access("compute", writes=[first + slot * self._geometry.page_bytes for slot in slots])

    def access(
        self, stream: str, *, reads: Sequence[int] = (), writes: Sequence[int] = (), read_rows: int = 0,
        first_row: int = 0,
    ) -> None:
        """Check and remember one piece of work.

        read_rows  rows of a page that this read is about; 0: all     first_row  the first row that this write changes
        """
        count = self._streams[stream].next_op()
        knows = self._streams[stream].clock
        for place in [*reads, *writes]:
            writer, at = self._writes.get(place, (stream, 0))
            assert knows.get(writer, 0) >= at, f"{stream} uses a place that {writer} may still be writing"
        for place in writes:
            for (reader, rows), at in self._reads.pop(place, {}).items():
                ordered = knows.get(reader, 0) >= at or 0 < rows <= first_row
                assert ordered, f"{stream} writes to a place that {reader} may still be reading"
            self._writes[place] = (stream, count)
        for place in reads:
            assert place in self._writes, f"{stream} reads a place that was never written"
            self._reads.setdefault(place, {})[stream, read_rows] = count

    def places(self, buffer: Buffer) -> list[int]:
        """Where its pages begin; of larger ones as many parts."""
        first = int(buffer.ctypes.data)
        return list(range(first, first + buffer.nbytes, self._geometry.page_bytes))


class _TracedOps:
    """The host's ops; those on pages are traced."""

    def __init__(self, device: TracedDevice, ops: Any) -> None:
        self._device = device
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def zero_page(self, pool: Buffer, geometry: PageGeometry, slot: int) -> None:
        self._device.access("compute", writes=_slots(pool, [slot]))
        self._ops.zero_page(pool, geometry, slot)

    def write_kv(
        self, y: Buffer, params: AttentionParams, q: Buffer, pool: Buffer, geometry: PageGeometry, plan: LayerPlan, *,
        phase: Phase,
    ) -> None:
        position = self._ops._step.first_position
        for span in row_spans(position, len(y), geometry.page_tokens, plan.slots):
            self._device.access("compute", writes=_slots(pool, [span.slot]), first_row=span.page_row)
        self._ops.write_kv(y, params, q, pool, geometry, plan, phase=phase)

    def attend_decode(
        self, q: Buffer, params: AttentionParams, pool: Buffer, geometry: PageGeometry, plan: LayerPlan, call: int,
        scratch: Buffer,
    ) -> None:
        pages = [page for part in plan.calls[call].parts for page in part.pages]
        self._device.access("compute", reads=_slots(pool, [plan.slots[page] for page in pages]))
        self._ops.attend_decode(q, params, pool, geometry, plan, call, scratch)

    def attend_prefill(
        self, q: Buffer, params: AttentionParams, pool: Buffer, geometry: PageGeometry, plan: LayerPlan, pages: range,
        running: Buffer, *, fresh: bool,
    ) -> None:
        self._device.access("compute", reads=_slots(pool, [plan.slots[page] for page in pages]))
        self._ops.attend_prefill(q, params, pool, geometry, plan, pages, running, fresh=fresh)


    def shift_rows(
        self, page: Buffer, sources: Sequence[Buffer], params: AttentionParams, geometry: PageGeometry, move: PageMove
    ) -> None:
        places = self._device.places
        self._device.access("compute", reads=[place for each in sources for place in places(each)], writes=places(page))
        self._ops.shift_rows(page, sources, params, geometry, move)


def _slots(pool: Buffer, slots: Sequence[int]) -> list[int]:
    return [int(pool.ctypes.data) + slot * int(pool.strides[0]) for slot in slots]
