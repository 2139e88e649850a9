"""Work for the engine, in the order of its arrival, one at a time: the engine runs in one thread, requests in another.

    queued ─ take ─> running ─ done
    queued ─ cancel ─> dropped                  running ─ cancel ─> ``check`` raises Cancelled, within a step

The event loop submits, cancels and reads events; the engine's thread takes jobs and emits. Neither waits for the other
with a lock held.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from kvs_cli.server.errors import ApiError

T = TypeVar("T")

MAX_WAITING = 128
"""Requests that wait for their turn. More are refused: they would wait for hours."""


BY_CLIENT = "cancelled by the client"
BY_SERVER = "cancelled: the server ends"
WITH_OTHERS = "cancelled with the rest of its request"


class Cancelled(Exception):
    """The job is not wanted any more; the text says by whom."""


class Job(Generic[T]):
    """One piece of work that tells of its progress by events."""

    def __init__(self, work: Callable[[Job[T]], None], name: str = "") -> None:
        """``work`` runs in the engine's thread; it emits, and calls ``check`` between steps. Made in an event loop.

        name  for the log
        """
        self.work = work
        self.name = name
        self._cancelled = ""
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[T] = asyncio.Queue()

    def emit(self, event: T) -> None:
        """From the engine's thread: hand an event to whoever reads them."""
        with suppress(RuntimeError):   # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def cancel(self, why: str) -> None:
        """Have ``check`` raise Cancelled from now on; the first reason stays."""
        self._cancelled = self._cancelled or why

    def check(self) -> None:
        """Raise Cancelled if the job is not wanted any more."""
        if self._cancelled:
            raise Cancelled(self._cancelled)

    async def next(self) -> T:
        """The next event."""
        return await self._events.get()


class JobQueue:
    """First come, first served."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()  # type: ignore[type-arg]  # of any kind of event
        self._running: Job | None = None  # type: ignore[type-arg]
        self._closed = False

    @property
    def waiting(self) -> int:
        """Jobs that wait for their turn."""
        return len(self._waiting)

    def submit(self, job: Job[T]) -> None:
        """Queue a job. ApiError 503 if too many wait, or if the server ends."""
        with self._changed:
            if self._closed:
                raise ApiError("unavailable_error", "the server is shutting down")
            if len(self._waiting) >= self._max_waiting:
                raise ApiError(
                    "unavailable_error", f"{len(self._waiting)} requests wait already; try again when they are done"
                )
            self._waiting.append(job)
            self._changed.notify_all()

    def cancel(self, job: Job[T], why: str) -> bool:
        """A job that waits is dropped, one that runs ends within a step; nothing happens to one that is done. Whether
        it waited."""
        job.cancel(why)
        with self._changed, suppress(ValueError):
            self._waiting.remove(job)
            return True
        return False

    def run(self) -> None:
        """In the engine's thread: do jobs until ``close``."""
        while (job := self._take()) is not None:
            try:
                job.work(job)
            except Cancelled:
                pass
            finally:
                self._running = None

    def close(self) -> None:
        """Cancel all jobs and let ``run`` return. Jobs that wait still run, to find that they are cancelled."""
        with self._changed:
            self._closed = True
            for job in (*self._waiting, *filter(None, (self._running,))):
                job.cancel(BY_SERVER)
            self._changed.notify_all()

    def _take(self) -> Job | None:  # type: ignore[type-arg]
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            self._running = self._waiting.popleft() if self._waiting else None
            return self._running
