"""The tokens so far as one array, and the search for a run of tokens in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Text: TypeAlias = npt.NDArray[np.int32]
"""Tokens [T] int32, oldest first; the last one is sampled, but not yet run. Read it, never write."""

Places: TypeAlias = npt.NDArray[np.intp]

_FIRST_BLOCK = 1024   # positions searched at first; each further block is twice as long


class TextBuffer:
    """A growing array of tokens that follows a list, so that a round costs what is new in it, not its length."""

    __slots__ = ("_size", "_tokens")

    def __init__(self) -> None:
        self._tokens = np.empty(_FIRST_BLOCK, np.int32)
        self._size = 0

    def clear(self) -> None:
        """Forget everything."""
        self._size = 0

    def follow(self, tokens: Sequence[int]) -> Text:
        """``tokens`` as an array, a view until the next call. They go on from those of the call before; a shorter list
        is taken as a new one."""
        if len(tokens) < self._size:
            self._size = 0
        if len(tokens) > self._tokens.size:
            grown = np.empty(2 * len(tokens), np.int32)
            grown[: self._size] = self._tokens[: self._size]
            self._tokens = grown
        self._tokens[self._size : len(tokens)] = tokens[self._size :]
        self._size = len(tokens)
        return self._tokens[: self._size]


def same(text: Text, start: int, run: Text) -> bool:
    """Whether ``run`` stands in ``text`` at ``start``; False where it would reach beyond the end."""
    return bool(np.array_equal(text[start : start + run.size], run))


def places(text: Text, run: Text, first: int, last: int) -> Places:
    """Every start in [first, last] at which ``run`` stands in ``text``, ascending; ``first`` is not negative."""
    last = min(last, text.size - run.size)
    if last < first:
        return np.zeros(0, np.intp)
    end = run.size - 1
    found = np.flatnonzero(text[first + end : last + end + 1] == run[end]) + first
    for offset in range(end - 1, -1, -1):
        if not found.size:
            break
        found = found[text[found + offset] == run[offset]]
    return found


def last_place(text: Text, run: Text, first: int, last: int) -> int | None:
    """The largest start in [first, last] at which ``run`` stands in ``text``."""
    block = _FIRST_BLOCK
    while last >= first:
        found = places(text, run, max(first, last - block + 1), last)
        if found.size:
            return int(found[-1])
        last -= block
        block *= 2
    return None
