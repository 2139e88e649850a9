"""The CUDA device's streams and fences.

Events come from a pool and go back when their fence is forgotten: a wait that was enqueued keeps the state that the
event had then, so an event may be recorded again at once. Inside a capture an event marks a place in the graph; asking
whether it is done is not allowed there, and a fence from outside must not be waited for.
"""

from __future__ import annotations

from kvs_core.device.base import Fence, PassedFence
from kvs_core.device.cuda.runtime import Event, RawStream, Runtime


class EventPool:
    """Events that are not in use."""

    def __init__(self, runtime: Runtime, ready: int) -> None:
        """``ready``: events made at the start."""
        self._runtime = runtime
        self._free = [runtime.event() for _ in range(ready)]

    def take(self) -> Event:
        """An event; a new one only if all are in use."""
        return self._free.pop() if self._free else self._runtime.event()

    def give(self, event: Event) -> None:
        """It may be recorded again."""
        self._free.append(event)


class CudaFence:
    """A point in a stream, marked by an event. ``captured``: it lies in a graph, and is nothing outside of it."""

    __slots__ = ("_event", "_pool", "captured")

    def __init__(self, pool: EventPool, captured: bool) -> None:
        self._pool = pool
        self._event = pool.take()
        self.captured = captured

    @property
    def event(self) -> Event:
        """The mark."""
        return self._event

    def done(self) -> bool:
        """True once all work before the fence is finished; never within a capture."""
        return not self.captured and self._event.done()

    def wait(self) -> None:
        """Block the host until then."""
        assert not self.captured, "the host waits for a fence of a graph"
        self._event.wait()

    def __del__(self) -> None:
        self._pool.give(self._event)


class CaptureState:
    """Whether steps are being captured; shared by the streams of a device."""

    def __init__(self) -> None:
        self.active = False


class CudaStream:
    """Work in order."""

    def __init__(self, name: str, raw: RawStream, pool: EventPool, capture: CaptureState) -> None:
        self.name = name
        self.raw = raw
        self._pool = pool
        self._capture = capture

    def record(self) -> Fence:
        """A fence behind all work enqueued so far."""
        fence = CudaFence(self._pool, self._capture.active)
        self.raw.record(fence.event)
        return fence

    def wait(self, fence: Fence) -> None:
        """Later work on this stream runs after ``fence``."""
        if isinstance(fence, PassedFence):
            return
        assert isinstance(fence, CudaFence)
        assert fence.captured == self._capture.active, "a fence crosses the border of a capture"
        self.raw.wait(fence.event)

    def synchronize(self) -> None:
        """Block the host until the stream is empty."""
        self.raw.synchronize()
