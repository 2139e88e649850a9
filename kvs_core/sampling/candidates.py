"""Candidates: the tokens still in play between two stages of the chain, and the few questions stages ask of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]
Probs = npt.NDArray[np.float64]
Positions = npt.NDArray[np.intp]

FLOAT32_MAX = float(np.finfo(np.float32).max)

_BLOCK = 64   # values per block of the first pass of top_positions
_PREFIX = 1024   # candidates sorted at first when a cut by cumulative probability is looked for


@dataclass(frozen=True, slots=True)
class Candidates:
    """An ordered list of tokens with logits. The arrays are shared between stages: read them, never write.

    ids        [n] int32, each id at most once
    logits     [n] float32, -inf for a banned token, never NaN or +inf
    is_sorted  logits do not increase along the list
    is_full    ids[i] == i: the untouched vocabulary, where a token's position is its id
    """

    ids: Ids
    logits: Logits
    is_sorted: bool = False
    is_full: bool = False

    def __post_init__(self) -> None:
        assert self.ids.ndim == 1
        assert self.ids.shape == self.logits.shape
        assert self.ids.size > 0

    def __len__(self) -> int:
        return int(self.ids.size)

    def probs(self) -> Probs:
        """Softmax over the candidates, [n] float64, in list order; at least one logit must be finite."""
        weights = np.exp(self.logits.astype(np.float64) - float(self.logits.max()))
        return np.asarray(weights / weights.sum())

    def prob_of(self, token: int) -> float:
        """Probability of ``token`` among the candidates; 0.0 if it is not one of them."""
        at = np.flatnonzero(self.ids == token)
        return float(self.probs()[at[0]]) if at.size else 0.0

    def take(self, positions: Positions, *, is_sorted: bool) -> Candidates:
        """The candidates at ``positions``, in that order."""
        return Candidates(self.ids[positions], self.logits[positions], is_sorted=is_sorted)

    def head(self, count: int) -> Candidates:
        """The first ``count`` candidates of the list."""
        return Candidates(self.ids[:count], self.logits[:count], self.is_sorted)

    def with_logits(self, logits: Logits, *, is_sorted: bool = False) -> Candidates:
        """The same tokens with other logits."""
        return Candidates(self.ids, logits, is_sorted, self.is_full)

    def top(self, count: int) -> Candidates:
        """The ``count`` best candidates, sorted; equal logits keep their order in the list."""
        if self.is_sorted:
            return self.head(count)
        return self.take(top_positions(self.logits, count), is_sorted=True)

    def sorted(self) -> Candidates:
        """All candidates, sorted by logit, descending; equal logits keep their order in the list."""
        return self.top(len(self))

    def positions_of(self, tokens: npt.NDArray[np.int64]) -> tuple[Positions, Positions]:
        """Where ``tokens`` (distinct ids below V) are in the list.

        Returns two arrays of one length: positions in the list, and the index in ``tokens`` of the token found there.
        """
        if self.is_full:
            return tokens.astype(np.intp), np.arange(tokens.size)
        order = np.argsort(tokens)
        at = np.searchsorted(tokens, self.ids, sorter=order)
        found = order[np.minimum(at, tokens.size - 1)] if tokens.size else np.zeros(0, np.intp)
        positions = np.flatnonzero(tokens[found] == self.ids) if tokens.size else found
        return positions, found[positions]

    def sorted_prefix_reaching(self, mass: float, at_least: int) -> Candidates:
        """The shortest sorted prefix whose probability sums to ``mass`` or more, of ``at_least`` tokens or more.

        Only the best candidates are sorted when they are enough. With no such prefix (rounding) all are returned.
        """
        weights = np.exp(self.logits.astype(np.float64) - float(self.logits.max()))
        target = mass * float(weights.sum())
        count = min(max(_PREFIX, at_least), len(self))
        while True:
            best = self.top(count)
            running = np.cumsum(np.exp(best.logits.astype(np.float64) - float(best.logits[0])))
            if running[-1] >= target or count == len(self):
                return best.head(max(int(np.searchsorted(running, target)) + 1, at_least, 1))
            count = min(8 * count, len(self))


def top_positions(values: Logits, count: int) -> Positions:
    """Positions of the ``count`` largest of ``values`` (no NaN), largest first; equal values by position.

    No full sort: the count-th largest of the maxima of blocks bounds the answer from below, and what passes that
    bound is a handful.
    """
    blocks = values.size // _BLOCK
    if count == 0 or count >= values.size:
        chosen = np.arange(min(count, values.size))
    elif count < blocks:
        maxima = values[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
        chosen = np.flatnonzero(values >= np.partition(maxima, blocks - count)[blocks - count])
    else:
        chosen = np.flatnonzero(values >= np.partition(values, values.size - count)[values.size - count])
    return chosen[np.argsort(-values[chosen], kind="stable")[:count]]


def entropy(probs: Probs) -> float:
    """-sum p ln p in nats, where 0 ln 0 is 0."""
    positive = probs[probs > 0.0]
    return -float(np.dot(positive, np.log(positive)))
