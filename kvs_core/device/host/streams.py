"""The host's streams: copies run on real threads, the compute stream is the calling thread.

A copy stream counts its work; a fence is a stream and a count, done once that much is finished:

    enqueued   1  2  3  4  5  6        record() now gives the fence (stream, 6)
    finished   1  2  3                 so fences up to 3 are done

    running  work ends ──> running; work raises ──> failed; close ──> closed
    failed   what follows is skipped, as it may need what was not done; fences behind the failure raise it
    closed   likewise: what was not yet begun is skipped

The first failure stays: ``record``, ``wait`` and ``synchronize`` raise it from then on. Fences before it stay good.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from kvs_core.device.base import Fence
from kvs_core.errors import DeviceError, KvsError


class CopyStream:
    """Work done in order by one daemon thread. ``copied_bytes`` and ``copies`` count what was enqueued."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.copied_bytes = 0
        self.copies = 0
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._enqueued = 0
        self._begun = 0
        self._finished = 0
        self._failure: str | None = None
        self._failed_from = 0   # fences of this count and above are not good
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"kvs {name}", daemon=True)
        self._thread.start()

    def enqueue_copy(self, size_bytes: int, work: Callable[[], None]) -> None:
        """Have the thread do ``work``, which moves ``size_bytes``; returns at once."""
        self._enqueue(work)
        self.copied_bytes += size_bytes
        self.copies += 1

    def record(self) -> StreamFence:
        """A fence behind all work enqueued so far. Raises ``DeviceError`` if the stream has failed or is closed."""
        with self._changed:
            self._check()
            return StreamFence(self, self._enqueued)

    def wait(self, fence: Fence) -> None:
        """Later work runs after ``fence``. If what is behind it failed, this stream fails too."""
        if isinstance(fence, StreamFence) and fence.stream is self:
            self.record()   # in order anyway
        else:
            self._enqueue(fence.wait)

    def synchronize(self) -> None:
        """Block until all work enqueued so far is finished. Raises ``DeviceError`` if any of it failed."""
        self.record().wait()

    def close(self) -> None:
        """Skip what has not begun, and end the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._fail(f"the {self.name} stream is closed", self._begun + 1)
            self._changed.notify_all()
        self._thread.join()

    def _enqueue(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._check()
            self._waiting.append(work)
            self._enqueued += 1
            self._changed.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise DeviceError(self._failure)

    def _fail(self, message: str, count: int) -> None:
        """Work ``count`` is not done, nor is any after it. The failure of the earliest work counts."""
        if self._failure is None or count < self._failed_from:
            self._failure = message
            self._failed_from = count

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                work = self._waiting.popleft()
                self._begun += 1
                skip = self._failure is not None
            failure = None
            if not skip:
                try:
                    work()
                except BaseException as error:   # whatever it is, the thread that waits must learn of it
                    known = isinstance(error, KvsError)
                    failure = str(error) if known else f"work on the {self.name} stream failed: {error!r}"
            with self._changed:
                self._finished += 1
                if failure is not None:
                    self._fail(failure, self._finished)
                self._changed.notify_all()

    def _is_finished(self, count: int) -> bool:
        with self._changed:
            return self._finished >= count

    def _wait_finished(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._finished >= count)
            if self._failure is not None and count >= self._failed_from:
                raise DeviceError(self._failure)


class StreamFence:
    """Done once the stream has finished the first ``count`` pieces of its work."""

    __slots__ = ("count", "stream")

    def __init__(self, stream: CopyStream, count: int) -> None:
        self.stream = stream
        self.count = count

    def done(self) -> bool:
        """True once all work before the fence is finished, or skipped after a failure."""
        return self.stream._is_finished(self.count)

    def wait(self) -> None:
        """Block until then. Raises ``DeviceError`` if that work failed or was skipped."""
        self.stream._wait_finished(self.count)


class _DoneFence:
    """The calling thread's own past."""

    __slots__ = ()

    def done(self) -> bool:
        """True."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


class ComputeStream:
    """The calling thread. ``stall_ns`` sums the time it was blocked by fences."""

    def __init__(self) -> None:
        self.name = "compute"
        self.stall_ns = 0

    def record(self) -> Fence:
        """A fence that is done: an op is finished when it returns."""
        return _DoneFence()

    def wait(self, fence: Fence) -> None:
        """Block the calling thread until ``fence``. Raises ``DeviceError`` if the work before it failed."""
        if fence.done():
            fence.wait()   # raises its failure, if there is one
            return
        start = time.perf_counter_ns()
        try:
            fence.wait()
        finally:
            self.stall_ns += time.perf_counter_ns() - start

    def synchronize(self) -> None:
        """Nothing is ever open."""
