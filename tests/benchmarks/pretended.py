"""A GPU pretended for rounds: steps take what they took on an H200 at 256 Ki, by a clock that only they move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvs_core.sampling.candidates import Candidates

STREAMED_S = 0.095
DRAFT_S = 0.0005
WIDE = ((17, 1.38), (49, 1.88), (65, 2.3))   # rows of a step in tiles, and what it takes of a usual one


class Pretended:
    """What a ``Session`` and its rounds ask of an engine. ``now``: seconds; ``after_s``: more in the step behind a wide
    one."""

    def __init__(self, n_vocab: int, *, after_s: float = 0.0) -> None:
        self.spec = SimpleNamespace(n_vocab=n_vocab)
        self.context = SimpleNamespace(context_tokens=1 << 18)
        self.can_rewind, self.drops_passed = True, False
        self._captured = SimpleNamespace(recorded=0)
        self.committed = 5000
        self.now = 0.0
        self._after_s = after_s
        self._rows = 0

    def clock(self) -> float:
        return self.now

    def widest(self, rows: int) -> int:
        return rows

    @contextmanager
    def open(self, rows: int) -> Iterator[Any]:
        yield self

    def draft_next(self, token: int) -> None:
        self.now += DRAFT_S

    def run(self, tokens: list[int]) -> None:
        was_wide, self._rows = self._rows > 8, len(tokens)
        widths, costs = zip(*WIDE, strict=True)
        self.now += STREAMED_S * (1.0 if self._rows <= 8 else float(np.interp(self._rows, widths, costs)))
        self.now += self._after_s if was_wide else 0.0

    def best(self, count: int, first: int | None = None) -> list[Candidates]:
        """Any tokens: the judge knows the text."""
        row = Candidates(np.arange(count, dtype=np.int32), -np.arange(count, dtype=np.float32), is_sorted=True)
        return [row] * (1 if first is None else self._rows)

    def settle(self, keep: int) -> None:
        self.committed += keep
