"""Mirostat: candidates are cut so that the surprise of the text stays near a target (Basu et al., 2021).

Both versions keep one number, mu, the surprise in bits that a token may have. It starts at 2 tau and moves after each
token: mu -= eta * (surprise - tau).
"""

from __future__ import annotations

import math

import numpy as np

from kvs_core.sampling.candidates import Candidates, Logits

_TOP_TOKENS = 100   # version 1 estimates the Zipf exponent from this many


class Mirostat:
    """State of one conversation under mirostat ``version`` 1 or 2."""

    __slots__ = ("_eta", "_mu", "_n_vocab", "_tau", "_version")

    def __init__(self, version: int, *, tau: float, eta: float, n_vocab: int) -> None:
        assert version in (1, 2)
        self._version = version
        self._tau = tau
        self._eta = eta
        self._n_vocab = n_vocab
        self._mu = 2.0 * tau

    @property
    def mu(self) -> float:
        """Surprise that a token may have, bits."""
        return self._mu

    def cut(self, candidates: Candidates) -> Candidates:
        """The candidates that may be drawn, sorted. At least one."""
        if self._version == 1:
            best = candidates.top(_TOP_TOKENS)
            return candidates.top(zipf_cut(best.logits, self._mu, n_vocab=self._n_vocab, n_candidates=len(candidates)))
        with np.errstate(divide="ignore"):
            expected = -np.log2(candidates.probs()) <= self._mu
        return candidates.top(max(int(np.count_nonzero(expected)), 1))

    def observe(self, prob: float) -> None:
        """A token was taken that had probability ``prob`` > 0 among the candidates of ``cut``."""
        self._mu -= self._eta * (-math.log2(prob) - self._tau)


def zipf_cut(best: Logits, mu: float, *, n_vocab: int, n_candidates: int) -> int:
    """Version 1: how many of the best candidates give a surprise of mu on average, if p falls as Zipf's law.

    best  the largest logits, sorted; at most 100 of the n_candidates

    With t_i = ln((i+2)/(i+1)) and b_i = ln(p_i / p_(i+1)) over ``best``: s = sum t b / sum t^2, e = s - 1 and
    k = (e 2^mu / (1 - V^-e)) ^ (1/s). Worked in logarithms: k may be beyond every float. At least 1.
    """
    logits = best[np.isfinite(best)].astype(np.float64)
    if logits.size < 2:
        return 1
    t = np.log1p(1.0 / np.arange(1, logits.size))
    s = float(np.dot(t, logits[:-1] - logits[1:]) / np.dot(t, t))
    e = s - 1.0
    decay = -e * math.log(n_vocab)   # ln V^-e
    if abs(decay) < 1e-9:
        log_ratio = -math.log(math.log(n_vocab))   # limit of e / (1 - V^-e) for e -> 0
    elif decay > 0.0:   # e < 0: e / (1 - V^-e) = -e V^e / (1 - V^e)
        log_ratio = math.log(-e) - decay - math.log(-math.expm1(-decay))
    else:
        log_ratio = math.log(e) - math.log(-math.expm1(decay))
    log_k = (log_ratio + mu * math.log(2.0)) / max(s, 1e-9)
    if log_k >= math.log(n_candidates):
        return n_candidates
    return max(int(math.exp(log_k)), 1)
