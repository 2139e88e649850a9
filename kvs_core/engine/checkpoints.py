"""Context checkpoints: where a conversation can go back to which has recurrent layers, or layers that slide.

A recurrent state knows only where it is. A checkpoint holds what is needed beside the history to go on at its position
with the same bits. The history has keys and values of every position, but where layers slide and their history goes:
there it keeps what their windows see at the checkpoints, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvs_core.models.recurrent import StateSnapshot
from kvs_core.streaming.history import ParkedHistory

_LEAST_HELD = 2   # that ``thin`` leaves


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The engine at a position, K and V aside.

    hidden  [E] the hidden row before that position, for the MTP block; None without
    """

    state: StateSnapshot
    hidden: np.ndarray | None

    @property
    def position(self) -> int:
        """Tokens behind which it goes on."""
        return self.state.position

    @property
    def size_bytes(self) -> int:
        """Host memory, the history's aside."""
        return self.state.size_bytes + (0 if self.hidden is None else self.hidden.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class ParkedSequence:
    """A sequence while no engine runs it: its history, and the engine at its end."""

    history: ParkedHistory
    end: Checkpoint


class Checkpoints:
    """Those of one conversation, by position; at most so many and so many bytes, what the history keeps for them
    included. The first to go is the one whose loss leaves the smallest gap, not the newest.

    are_alike  each takes as much as any other
    """

    def __init__(
        self, most: int, most_bytes: int, kept_bytes: Callable[[Sequence[int]], int] | None = None
    ) -> None:
        """``kept_bytes``: of the history, for these positions, see ``Engine.kept_bytes``; None: it keeps nothing for
        any, and they are alike."""
        self._most = most
        self._most_bytes = most_bytes
        self._kept_bytes = kept_bytes
        self.are_alike = kept_bytes is None
        self._held: list[Checkpoint] = []

    def __len__(self) -> int:
        return len(self._held)

    @property
    def positions(self) -> Sequence[int]:
        """Ascending."""
        return [held.position for held in self._held]

    @property
    def held(self) -> Sequence[Checkpoint]:
        """By position, ascending."""
        return tuple(self._held)

    @property
    def size_bytes(self) -> int:
        """Host memory, what the history keeps for them included."""
        return self.bytes_of(self._held)

    def bytes_of(self, held: Sequence[Checkpoint]) -> int:
        """The same of these, were they all."""
        kept_bytes = 0 if self._kept_bytes is None else self._kept_bytes([each.position for each in held])
        return sum(each.size_bytes for each in held) + kept_bytes

    def add(self, checkpoint: Checkpoint) -> bool:
        """Keep it, unless it alone takes more than all may; tell whether. One of its position, and those behind it, are
        of another text and go."""
        self.forget_behind(checkpoint.position - 1)
        if self._most < 1 or self.bytes_of([checkpoint]) > self._most_bytes:
            return False
        self._held.append(checkpoint)
        while len(self._held) > self._most or self.size_bytes > self._most_bytes:
            self._held.pop(_least_missed(self._held))
        return True

    def thin(self) -> bool:
        """Drop the one that is missed least, but for the last two; False if there are no more."""
        if len(self._held) <= _LEAST_HELD:
            return False
        self._held.pop(_least_missed(self._held))
        return True

    @property
    def thinnest(self) -> Sequence[Checkpoint]:
        """Those that are left when ``thin`` can do no more."""
        left = list(self._held)
        while len(left) > _LEAST_HELD:
            left.pop(_least_missed(left))
        return left

    def best(self, tokens: int) -> Checkpoint | None:
        """The last one at or before a position."""
        return next((held for held in reversed(self._held) if held.position <= tokens), None)

    def forget_behind(self, tokens: int) -> None:
        """Drop those behind a position: the text is another from there on."""
        self._held = [held for held in self._held if held.position <= tokens]


def _least_missed(held: Sequence[Checkpoint]) -> int:
    """Which of them, by position, leaves the smallest gap; never the newest, unless it is the only one."""
    if len(held) < 3:
        return 0
    positions = [0, *(each.position for each in held)]
    gaps = [positions[index + 2] - positions[index] for index in range(len(held) - 1)]
    return gaps.index(min(gaps))
