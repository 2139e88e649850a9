"""What a kernel that runs ahead still finds in memory.

A launch with overlap may start as soon as every block of the one before has called ``pdl_trigger``, and that one may
itself have started so. Until its ``pdl_wait`` a kernel may thus find all that the chain changes as it was before:

    plain launch ── overlap ── overlap ── overlap      the last one may find what was before the first
         a chain ends in front of a launch that is plain, behind a kernel that lets nobody in before it is done, and in
         front of one that does so only behind its own wait
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from enum import IntEnum

import numpy as np

_GAP = 64   # bytes that are as before, and yet part of a span: fewer spans


class Trigger(IntEnum):
    """See ``past.h``."""

    BEFORE_WAIT = 0
    BEHIND_WAIT = 1
    NEVER = 2


class Span(ctypes.Structure):
    """See ``past.h``."""

    _fields_ = (
        ("at", ctypes.c_void_p), ("past", ctypes.c_void_p), ("present", ctypes.c_void_p), ("bytes", ctypes.c_uint64)
    )


class Past:
    """Of ``memories``, uint8 [size] each, which may become more."""

    def __init__(self) -> None:
        self.memories: list[np.ndarray] = []
        self._before: Sequence[np.ndarray] = ()   # the chain
        self._present: list[np.ndarray] = []      # room

    def now(self) -> list[np.ndarray]:
        """All bytes."""
        return [memory.copy() for memory in self.memories]

    def spans(self) -> ctypes.Array[Span]:
        """What a launch may find as it was before the chain; good until the next call."""
        found = list(self._found())
        return (Span * len(found))(*found)

    def launched(self, trigger: Trigger, ahead: bool, before: Sequence[np.ndarray]) -> None:
        """A kernel is done. ``ahead``: it may have started early; ``before``: memory when it was launched."""
        if trigger is Trigger.NEVER:
            self._before = self.now()
        elif trigger is Trigger.BEHIND_WAIT or not ahead:
            self._before = before

    def _found(self) -> Iterator[Span]:
        self._present.clear()
        for memory, before in zip(self.memories, self._before, strict=False):   # a new one has no past
            changed = np.flatnonzero(memory != before)
            for run in np.split(changed, np.flatnonzero(np.diff(changed) > _GAP) + 1) if len(changed) else ():
                first, size = int(run[0]), int(run[-1] - run[0]) + 1
                room = np.empty(size, np.uint8)
                self._present.append(room)
                yield Span(memory.ctypes.data + first, before.ctypes.data + first, room.ctypes.data, size)
