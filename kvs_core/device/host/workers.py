"""Threads that share the pieces of a job with the thread that has it.

    caller    calls ─ takes pieces till none is left ─ takes back calls not heard ─ waits for helpers still at a piece
    helper    sleeps ─ hears a call ─ takes pieces till none is left ─ sleeps

The caller waits for nothing but pieces that a helper has begun. Where the cores are busy with something else, helpers
come late or never, and the caller does the job alone: having called them costs microseconds. Worse is a helper that
loses its core in the middle of a piece, or gets the caller's. So each job is compared with the time that the caller
alone would have computed; where jobs take longer, no helper is called for a while.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from kvs_core.errors import DeviceError

_CREDIT_S = 0.01   # time saved that may be lost again before helpers pause: a stray delay is no busy core
_PAUSE = 64        # times what was lost; so on busy cores helpers cost a sixty-fourth of the time


class Team:
    """The calling thread and ``threads - 1`` helpers, daemon threads that end with ``close`` or with the team."""

    def __init__(self, threads: int) -> None:
        """Start the helpers. Raises ``DeviceError`` if the system refuses so many."""
        assert threads >= 1
        self._calls: SimpleQueue[_Job | None] = SimpleQueue()
        # They know the calls alone: a helper that knew its team would keep it alive.
        self._helpers = [
            threading.Thread(target=_help, args=(self._calls,), name=f"kvs worker {number}", daemon=True)
            for number in range(1, threads)
        ]
        self._credit_s = 0.0
        self._alone_until = 0.0   # by time.perf_counter
        self._dismiss = weakref.finalize(self, _dismiss, self._calls, len(self._helpers))
        for number, helper in enumerate(self._helpers, start=1):
            try:
                helper.start()
            except RuntimeError:   # those started end with this object
                raise DeviceError(
                    f"{threads} threads cannot be had, the system refused after {number}; use a smaller --threads"
                ) from None

    def share(self, n_pieces: int, work: Callable[[int], None]) -> None:
        """Call ``work`` with each number below ``n_pieces`` once, on any of the threads, in any order; then return.

        If a piece raises, pieces not begun are dropped and the error is raised here, once no helper is at work.
        A team that is closed has no helpers left: the caller does all.
        """
        helpers = min(len(self._helpers), n_pieces - 1)
        if helpers < 1 or time.perf_counter() < self._alone_until:
            for piece in range(n_pieces):
                work(piece)
            return
        job = _Job(n_pieces, work)
        for _ in range(helpers):
            self._calls.put(job)
        start, computing, own = time.perf_counter(), time.thread_time(), 0
        try:
            own = job.work()
            computing = time.thread_time() - computing
        finally:
            job.drop()
            self._take_back()
            job.wait()
        if own:
            self._judge(time.perf_counter() - start, computing / own * n_pieces)

    def close(self) -> None:
        """End the helpers. Idempotent."""
        self._dismiss()
        for helper in self._helpers:
            helper.join()
        self._helpers = []

    def _judge(self, took_s: float, alone_s: float) -> None:
        """Decide when to call helpers next.   alone_s: processor time of the whole job, by the caller's pieces of it"""
        self._credit_s = min(_CREDIT_S, self._credit_s + alone_s - took_s)
        if self._credit_s < 0:
            self._alone_until = time.perf_counter() - _PAUSE * self._credit_s
            self._credit_s = 0.0

    def _take_back(self) -> None:
        try:
            while True:
                self._calls.get_nowait()
        except Empty:
            pass


class _Job:
    """Pieces to do, and how many helpers are at them."""

    def __init__(self, n_pieces: int, work: Callable[[int], None]) -> None:
        self._work = work
        self._left = deque(range(n_pieces))   # threads may take from it at the same time
        self._changed = threading.Condition(threading.Lock())
        self._helping = 0
        self._failure: BaseException | None = None

    def work(self) -> int:
        """Do pieces until none is left; how many it were."""
        done = 0
        while (piece := self._take()) is not None:
            self._work(piece)
            done += 1
        return done

    def help(self) -> None:
        """The same on a helper. Its error is for the caller."""
        with self._changed:
            self._helping += 1   # before it takes a piece, so that whoever sees none left sees this
        failure = None
        try:
            self.work()
        except BaseException as error:   # whatever it is: a piece is not done
            failure = error
            self.drop()
        with self._changed:
            self._helping -= 1
            self._failure = self._failure or failure
            self._changed.notify_all()

    def drop(self) -> None:
        """Begin no more pieces."""
        self._left.clear()

    def wait(self) -> None:
        """Block until no helper is at a piece; none is left to take. Raises what a helper's piece raised."""
        with self._changed:
            self._changed.wait_for(lambda: not self._helping)
        if self._failure is not None:
            raise self._failure

    def _take(self) -> int | None:
        try:
            return self._left.popleft()
        except IndexError:
            return None


def _help(calls: SimpleQueue[_Job | None]) -> None:
    if sys.platform == "linux":
        with suppress(OSError):   # a container may forbid it
            # Batch work that wakes up goes to an idle core or waits; it does not push its caller off a core.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    while (job := calls.get()) is not None:
        job.help()
        del job   # a sleeping helper keeps no arrays


def _dismiss(calls: SimpleQueue[_Job | None], helpers: int) -> None:
    """Wait for nothing: this may run wherever the garbage collector does."""
    for _ in range(helpers):
        calls.put(None)
