"""Log-probabilities for reports: of the raw logits, before bias, penalties or any other stage."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvs_core.errors import DeviceError
from kvs_core.sampling.candidates import FLOAT32_MAX, Logits, top_positions

LOGPROB_FLOOR = -FLOAT32_MAX   # stands for ln 0, which JSON cannot carry


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability, not below LOGPROB_FLOOR."""

    id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenProbs:
    """The chosen token's log-probability and the best tokens' ones, by logprob descending, then id."""

    id: int
    logprob: float
    top: tuple[TokenLogprob, ...]


def token_probs(logits: Logits, token: int, n_probs: int) -> TokenProbs:
    """Softmax of the raw logits, in float64: the value of ``token`` and the ``n_probs`` best ones.

    logits  [V] float32; -inf is probability 0. NaN, or no finite logit: DeviceError.
    """
    assert 0 <= token < logits.size, f"token {token} of {logits.size}"
    assert n_probs >= 0
    check_logits(logits)
    wide = logits.astype(np.float64)
    wide -= wide.max()
    log_total = math.log(float(np.exp(wide).sum()))
    best = top_positions(logits, min(n_probs, logits.size)).tolist()
    top = tuple(TokenLogprob(at, max(float(wide[at]) - log_total, LOGPROB_FLOOR)) for at in best)
    return TokenProbs(token, max(float(wide[token]) - log_total, LOGPROB_FLOOR), top)


def check_logits(logits: Logits) -> None:
    """Raise DeviceError unless every logit is a number and the largest is finite."""
    if math.isfinite(float(logits.max())):   # max() is NaN if any value is
        return
    broken = int(np.count_nonzero(np.isnan(logits) | np.isposinf(logits)))
    if broken:
        raise DeviceError(
            f"the model gave {broken} of {logits.size} logits as NaN or infinity: its numbers overflowed; "
            "try f32 for the K and V types, or check the model file"
        )
    raise DeviceError(f"no token can follow: all {logits.size} logits are -infinity; check the model file")
