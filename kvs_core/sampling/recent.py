"""What the chain remembers of accepted tokens: counts for the penalties, the tail of the context for DRY."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from kvs_core.sampling.candidates import Ids


class RecentCounts:
    """How often each token occurs among the last ``window`` accepted ones."""

    __slots__ = ("_counts", "_order", "_window")

    def __init__(self, window: int) -> None:
        self._window = window
        self._order: deque[int] = deque()
        self._counts: dict[int, int] = {}

    @property
    def counts(self) -> Mapping[int, int]:
        """Token -> count, only counts above 0."""
        return self._counts

    def accept(self, token: int) -> None:
        """Append ``token``; the oldest leaves when the window is full."""
        self._order.append(token)
        self._counts[token] = self._counts.get(token, 0) + 1
        if len(self._order) > self._window:
            oldest = self._order.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]


class TokenTail:
    """The last ``window`` accepted tokens as one contiguous array; memory follows what was accepted."""

    __slots__ = ("_buffer", "_end", "_window")

    def __init__(self, window: int) -> None:
        self._window = window
        self._buffer = np.empty(64, np.int32)
        self._end = 0

    def accept(self, token: int) -> None:
        """Append ``token``. A full buffer is replaced by one twice the size of what is kept: O(1) per token."""
        if self._end == self._buffer.size:
            kept = self.tokens
            self._buffer = np.empty(max(2 * kept.size, 64), np.int32)
            self._buffer[: kept.size] = kept
            self._end = kept.size
        self._buffer[self._end] = token
        self._end += 1

    @property
    def tokens(self) -> Ids:
        """The tail, oldest first: a view that the next ``accept`` may leave behind."""
        return self._buffer[max(0, self._end - self._window) : self._end]
