"""Adaptive-p: prefer tokens whose probability is near a target that follows what was chosen before.

Logits are replaced by a bell around the adapted target; as the last stage it also decides the draw.
"""

from __future__ import annotations

import numpy as np

from kvs_core.sampling.candidates import Candidates

_WIDTH = 0.3   # distance from the target, in probability, that costs half of _SHARPNESS
_PEAK = 5.0
_SHARPNESS = 10.0


class AdaptiveP:
    """A running, decaying mean of the probabilities of the chosen tokens, and the stage that corrects for it."""

    __slots__ = ("_decay", "_target", "_total", "_weighted")

    def __init__(self, target: float, decay: float) -> None:
        """``target`` in [0, 1], ``decay`` in [0, 0.99]. The mean starts at the target."""
        self._target = target
        self._decay = decay
        self._weighted = target / (1.0 - decay)
        self._total = 1.0 / (1.0 - decay)

    def reshape(self, candidates: Candidates) -> Candidates:
        """l = 5 - 10 x^2 / (1 + x), x = |p - A| / 0.3, A = 2 target - mean, held in [0, 1]; banned tokens stay so."""
        aim = min(max(2.0 * self._target - self._weighted / self._total, 0.0), 1.0)
        x = np.abs(candidates.probs() - aim) / _WIDTH
        logits = np.where(np.isfinite(candidates.logits), _PEAK - _SHARPNESS * x * x / (1.0 + x), -np.inf)
        return candidates.with_logits(logits.astype(np.float32))

    def observe(self, prob: float) -> None:
        """A token was taken that had probability ``prob`` before ``reshape``."""
        self._weighted = prob + self._decay * self._weighted
        self._total = 1.0 + self._decay * self._total
