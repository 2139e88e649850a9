"""Slow, obvious samplers in plain Python floats (float64): the oracle of ``tests/sampling``.

A candidate list is a list of ``(id, logit)``. Sorting is stable: equal keys keep their order in the list.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

Listed = list[tuple[int, float]]


def softmax(items: Listed) -> list[float]:
    peak = max(logit for _, logit in items)
    weights = [math.exp(logit - peak) for _, logit in items]
    return [weight / sum(weights) for weight in weights]


def by_logit(items: Listed) -> Listed:
    return sorted(items, key=lambda item: -item[1])


def penalties(
    items: Listed, seen: Sequence[int], last_n: int, repeat: float, frequency: float, presence: float
) -> Listed:
    counts = Counter(seen[-last_n:])
    out = []
    for token, logit in items:
        if counts[token]:
            logit = logit * repeat if logit <= 0 else logit / repeat
            logit -= counts[token] * frequency + presence
        out.append((token, logit))
    return out


def top_n_sigma(items: Listed, n: float) -> Listed:
    finite = [logit for _, logit in items if logit > -math.inf]
    mean = sum(finite) / len(finite)
    sigma = math.sqrt(sum((logit - mean) ** 2 for logit in finite) / len(finite))
    return [(token, logit if logit >= max(finite) - n * sigma else -math.inf) for token, logit in items]


def top_k(items: Listed, k: int) -> Listed:
    return by_logit(items)[:k]


def typ_p(items: Listed, mass: float, min_keep: int) -> Listed:
    probs = softmax(items)
    entropy = -sum(p * math.log(p) for p in probs if p > 0)
    odd = [abs(-math.log(p) - entropy) if p > 0 else math.inf for p in probs]
    order = sorted(range(len(items)), key=lambda i: odd[i])
    kept, total = [], 0.0
    for i in order:
        kept.append(items[i])
        total += probs[i]
        if total > mass and len(kept) >= min_keep:
            break
    return kept


def top_p(items: Listed, mass: float, min_keep: int) -> Listed:
    ordered = by_logit(items)
    kept, total = [], 0.0
    for item, p in zip(ordered, softmax(ordered), strict=True):
        kept.append(item)
        total += p
        if total >= mass and len(kept) >= min_keep:
            break
    return kept


def min_p(items: Listed, ratio: float, min_keep: int) -> Listed:
    floor = max(logit for _, logit in items) + math.log(ratio)
    kept = [item for item in items if item[1] >= floor]
    return kept if len(kept) >= min_keep else by_logit(items)[:min_keep]


def xtc(items: Listed, threshold: float, min_keep: int) -> Listed:
    ordered = by_logit(items)
    probs = softmax(ordered)
    last = 0
    while last + 1 < len(ordered) and probs[last + 1] >= threshold:
        last += 1
    return ordered[last:] if len(ordered) - last >= min_keep else ordered


def dynamic_temperature(items: Listed, t: float, half_range: float, exponent: float) -> Listed:
    probs = softmax(items)
    share = -sum(p * math.log(p) for p in probs if p > 0) / math.log(len(items))
    low, high = max(0.0, t - half_range), t + half_range
    scale = low + (high - low) * share**exponent
    return [(token, logit / scale) for token, logit in by_logit(items)]


def suffix_length(context: Sequence[int], end: int) -> int:
    """Length of the common suffix of ``context[:end]`` and ``context``."""
    length = 0
    while length < end and context[end - 1 - length] == context[-1 - length]:
        length += 1
    return length


def dry_penalties(
    context: Sequence[int],
    texts: Sequence[bytes],
    breakers: Sequence[bytes],
    multiplier: float,
    base: float,
    allowed: int,
) -> dict[int, float]:
    """What each token loses, with breakers of one byte: a token that contains one ends a sequence."""
    singles = {token for token, text in enumerate(texts) if any(breaker in text for breaker in breakers)}
    if len(context) <= allowed:
        return {}
    reach = 0
    while reach < len(context) and context[-1 - reach] not in singles:
        reach += 1
    if reach < allowed:
        return {}
    longest: dict[int, int] = {}
    for end in range(1, len(context)):
        length = min(suffix_length(context, end), reach)
        if length >= allowed and context[end] not in singles:
            longest[context[end]] = max(longest.get(context[end], 0), length)
    return {token: multiplier * base ** (length - allowed) for token, length in longest.items()}


def mirostat_1_count(items: Listed, mu: float, n_vocab: int) -> float:
    """k of mirostat version 1, not rounded, from the plain formula; p must be positive."""
    probs = softmax(by_logit(items))[:100]
    t = [math.log((i + 2) / (i + 1)) for i in range(len(probs) - 1)]
    b = [math.log(probs[i] / probs[i + 1]) for i in range(len(probs) - 1)]
    s = sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t)
    e = s - 1
    return float(((e * 2**mu) / (1 - n_vocab**-e)) ** (1 / s))


def mirostat_2_list(items: Listed, mu: float) -> Listed:
    ordered = by_logit(items)
    kept = []
    for item, p in zip(ordered, softmax(ordered), strict=True):
        if p == 0 or -math.log2(p) > mu:
            break
        kept.append(item)
    return kept or ordered[:1]
