"""How two rows of logits differ: as bits, and as distributions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

LIKELY = 1e-6
"""Below this, other orders of summing move a log-probability by as much as they like."""


@dataclass(slots=True)
class Bits:
    """Logits compared bit by bit. first_row: of the first that differs; None: none does."""

    rows: int = 0
    logits: int = 0
    logits_differ: int = 0
    bits_differ: int = 0
    first_row: int | None = None

    def add(self, ours: np.ndarray, theirs: np.ndarray) -> None:
        """Compare float32 [n, V] with the like."""
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype == np.float32
        differ = ours.view(np.uint32) ^ theirs.view(np.uint32)
        bits = np.bitwise_count(differ).sum(axis=1, dtype=np.int64)
        if self.first_row is None and bits.any():
            self.first_row = self.rows + int(np.flatnonzero(bits)[0])
        self.rows += len(ours)
        self.logits += ours.size
        self.logits_differ += int(np.count_nonzero(differ))
        self.bits_differ += int(bits.sum())


@dataclass(frozen=True, slots=True)
class Parting:
    """The first row where two engines have other likeliest tokens.

    ours, theirs  these tokens
    gap           how much likelier ours finds its own, in nats: a small one means that both were nearly as good
    """

    row: int
    ours: int
    theirs: int
    gap: float


@dataclass(slots=True)
class Distance:
    """How far our distributions are from another engine's, row by row; theirs counts as the truth.

    kl       KL(theirs || ours) of each row, in nats
    largest  difference of two log-probabilities, where theirs is at least ``LIKELY``
    """

    kl: list[float] = field(default_factory=list)
    agreed: int = 0
    largest: float = 0.0
    parting: Parting | None = None

    def add(self, ours: np.ndarray, theirs: np.ndarray) -> None:
        """Compare a row of ours, logits [V], with log-probabilities [V] of theirs; -inf where they say nothing."""
        own = log_probs(ours)
        share = np.exp(theirs)
        kept = share > 0
        self.kl.append(max(0.0, float((share[kept] * (theirs[kept] - own[kept])).sum())))
        likely = share >= LIKELY
        self.largest = max(self.largest, float(np.abs(theirs[likely] - own[likely]).max()))
        a, b = int(own.argmax()), int(theirs.argmax())
        if a == b:
            self.agreed += 1
        elif self.parting is None:
            self.parting = Parting(len(self.kl) - 1, a, b, float(own[a] - own[b]))


def log_probs(logits: np.ndarray) -> np.ndarray:
    """Log-softmax of one row, float64 [V]."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
