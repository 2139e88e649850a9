"""The stages of the sampler chain that keep no state: candidates in, candidates out, nothing written in place.

Names, order of evaluation and edge cases are those of llama.cpp's samplers. ``l`` is a logit, ``p`` the softmax over
the candidates a stage receives. Sums are float64. A stage never returns an empty list: ``min_keep`` aside, one
candidate always stays. No stage makes a NaN or +inf out of sound input: results are held within float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from kvs_core.sampling.candidates import FLOAT32_MAX, Candidates, Logits, Probs, entropy

_LEAST_MASS = math.ulp(0.0)
_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)


def add_to_logits(candidates: Candidates, bias: Mapping[int, float]) -> Candidates:
    """l += bias for each token of ``bias``; -inf bans it. Used by logit_bias and DRY."""
    if not bias:
        return candidates
    tokens = np.fromiter(bias.keys(), np.int64, len(bias))
    amounts = np.fromiter(bias.values(), np.float64, len(bias))
    positions, which = candidates.positions_of(tokens)
    logits = candidates.logits.copy()
    logits[positions] = to_float32(logits[positions].astype(np.float64) + amounts[which])
    return candidates.with_logits(logits)


def penalties(
    candidates: Candidates, counts: Mapping[int, int], *, repeat: float, frequency: float, presence: float
) -> Candidates:
    """For a token seen c > 0 times: l = l * repeat if l <= 0 else l / repeat; then l -= c * frequency + presence."""
    if not counts:
        return candidates
    tokens = np.fromiter(counts.keys(), np.int64, len(counts))
    times = np.fromiter(counts.values(), np.float64, len(counts))
    positions, which = candidates.positions_of(tokens)
    logits = candidates.logits.copy()
    seen = logits[positions].astype(np.float64)
    seen = np.where(seen <= 0.0, seen * repeat, seen / repeat) - (times[which] * frequency + presence)
    logits[positions] = to_float32(seen)
    return candidates.with_logits(logits)


def top_n_sigma(candidates: Candidates, n: float) -> Candidates:
    """l < max - n * sigma becomes -inf, with the population sigma of the finite logits; the list keeps its length."""
    if n <= 0.0 or len(candidates) <= 1:
        return candidates
    finite = candidates.logits[np.isfinite(candidates.logits)].astype(np.float64)
    floor = float(finite.max()) - n * float(finite.std())
    logits = np.where(candidates.logits >= floor, candidates.logits, np.float32(-np.inf))
    return candidates.with_logits(logits, is_sorted=candidates.is_sorted)


def top_k(candidates: Candidates, k: int) -> Candidates:
    """The k largest logits, sorted; k <= 0 keeps everything as it is."""
    return candidates if k <= 0 else candidates.top(min(k, len(candidates)))


def typ_p(candidates: Candidates, mass: float, *, min_keep: int = 0) -> Candidates:
    """Locally typical sampling (Meister et al., 2022).

    Sort by |-ln p - H|, H the entropy, and keep until the cumulative p exceeds ``mass``. The result is in that order.
    """
    if mass >= 1.0:
        return candidates
    probs = candidates.probs()
    with np.errstate(divide="ignore"):
        surprise = -np.log(probs)
    order = np.argsort(np.abs(surprise - entropy(probs)), kind="stable")
    count = int(np.searchsorted(np.cumsum(probs[order]), mass, side="right")) + 1
    return candidates.take(order[: max(count, min_keep)], is_sorted=False)


def top_p(candidates: Candidates, mass: float, *, min_keep: int = 0) -> Candidates:
    """The shortest sorted prefix whose cumulative p reaches ``mass``; 0 keeps one candidate."""
    if mass >= 1.0:
        return candidates
    return candidates.sorted_prefix_reaching(mass, min_keep)


def min_p(candidates: Candidates, ratio: float, *, min_keep: int = 0) -> Candidates:
    """Keep p >= ratio * max p, that is l >= max l + ln ratio; if that is fewer than ``min_keep``, the best of them."""
    if ratio <= 0.0:
        return candidates
    floor = float(candidates.logits.max()) + math.log(ratio)
    kept = np.flatnonzero(candidates.logits >= floor)
    if kept.size < min_keep:
        return candidates.top(min_keep)
    return candidates.take(kept, is_sorted=candidates.is_sorted)


def xtc(candidates: Candidates, threshold: float, *, min_keep: int = 0) -> Candidates:
    """Exclude top choices: of the tokens with p >= threshold only the least likely stays. The result is sorted.

    The chance with which this happens at all is the caller's draw.
    """
    ordered = candidates.sorted()
    above = int(np.count_nonzero(ordered.probs() >= threshold))
    last = above - 1
    if last <= 0 or len(ordered) - last < min_keep:
        return ordered
    return ordered.take(np.arange(last, len(ordered)), is_sorted=True)


def temperature(candidates: Candidates, t: float) -> Candidates:
    """l / t. At t <= 0 (or too small for float32) only the first maximum stays, as the one candidate."""
    if t < _SMALLEST_TEMPERATURE:
        best = int(candidates.logits.argmax())
        return Candidates(candidates.ids[best : best + 1], candidates.logits[best : best + 1], is_sorted=True)
    scaled = candidates.logits.astype(np.float64) / t
    if not abs(float(scaled.max())) <= FLOAT32_MAX:
        scaled -= scaled.max()   # differences are all that matters, and these fit
    return candidates.with_logits(to_float32(scaled), is_sorted=candidates.is_sorted)


def dynamic_temperature(candidates: Candidates, t: float, *, half_range: float, exponent: float) -> Candidates:
    """Temperature t' = lo + (hi - lo) * e^exponent, with lo, hi = max(0, t - half_range), t + half_range.

    e is the entropy of p over ln(number of candidates): 0 when the model is sure, 1 when it has no idea. A lone
    candidate is left as it is; the result is sorted.
    """
    if half_range <= 0.0:
        return temperature(candidates, t)
    if len(candidates) <= 1:
        return candidates
    ordered = candidates.sorted()
    low, high = max(0.0, t - half_range), t + half_range
    share = min(max(entropy(ordered.probs()) / math.log(len(ordered)), 0.0), 1.0)
    return temperature(ordered, low + (high - low) * share**exponent)


def draw_index(probs: Probs, u: float) -> int:
    """First index whose running sum of ``probs`` reaches u of the total, ``u`` in [0, 1); never one with p = 0."""
    running = np.cumsum(probs)
    return int(np.searchsorted(running, max(u * float(running[-1]), _LEAST_MASS)))


def to_float32(values: Probs) -> Logits:
    """Float64 logits as float32: finite values stay finite, held within float32's range; -inf stays -inf."""
    held = np.clip(values, -FLOAT32_MAX, FLOAT32_MAX)
    return np.where(values == -np.inf, values, held).astype(np.float32)
