"""Infill: the stage for fill-in-the-middle, which ends the text when ending is likely, and else prefers sure tokens.

As llama.cpp does it: probabilities of tokens whose texts begin alike are pooled, only to judge which tokens are sure
enough to stay; the draw still uses their own logits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt

from kvs_core.sampling.candidates import Candidates, Probs

_SURE = 0.2   # pooled probability below which a token that does not end the text is dropped


def infill(candidates: Candidates, token_bytes: Callable[[int], bytes], eog_ids: Collection[int]) -> Candidates:
    """Keep only ends of generation, or the sure tokens and the ends. The result is sorted.

    With P_end, P_text the probabilities of ending and of going on, and n candidates:
    1. 3 P_end n > P_text: only the ends stay.
    2. The probability of a token goes to a likelier one of which it is a prefix, or which is a prefix of it.
    3. Tokens below 0.2 go; if none but ends are left, one end stays (the best candidate if the model has no end).
    4. Of m tokens left and ends, tokens below (their share of the pooled probability) 1 / (m + 1) go.
    """
    ordered = candidates.sorted()
    ids = ordered.ids.tolist()
    probs = ordered.probs()
    ends = np.array([token in eog_ids for token in ids]) & (probs > 0.0)
    end_mass = float(probs[ends].sum())
    if 3.0 * end_mass * len(ids) > float(probs[~ends].sum()):
        return ordered.take(np.flatnonzero(ends), is_sorted=True)
    pooled = _pool_prefixes(probs, [token_bytes(token) for token in ids])
    kept = np.flatnonzero(ends | (pooled >= _SURE))
    texts = int(np.count_nonzero(~ends[kept]))
    if not texts:
        return _one_end(ordered, ends, eog_ids)
    share = pooled[kept] / pooled[kept].sum()
    return ordered.take(kept[ends[kept] | (share >= 1.0 / (texts + 1))], is_sorted=True)


def _one_end(ordered: Candidates, ends: npt.NDArray[np.bool_], eog_ids: Collection[int]) -> Candidates:
    if ends.any():
        return ordered.take(np.flatnonzero(ends)[:1], is_sorted=True)
    token = min(eog_ids, default=int(ordered.ids[0]))
    return Candidates(np.array([token], np.int32), np.zeros(1, np.float32), is_sorted=True)


def _pool_prefixes(probs: Probs, texts: list[bytes]) -> Probs:
    """Pooled probabilities [n]; a token whose probability went elsewhere has 0. In list order, likeliest first."""
    at: dict[bytes, list[int]] = {}
    for position, text in enumerate(texts):
        at.setdefault(text, []).append(position)
    pairs = [   # (a, b): the text of a is a prefix of the text of b, or equal to it
        (shorter, longer)
        for longer, text in enumerate(texts)
        for length in range(1, len(text) + 1)
        for shorter in at.get(text[:length], ())
        if shorter != longer
    ]
    pooled = probs.copy()
    gone = probs == 0.0
    for shorter, longer in sorted(pairs):
        if not gone[shorter] and not gone[longer]:
            target, source = (longer, shorter) if pooled[longer] > pooled[shorter] else (shorter, longer)
            pooled[target] += pooled[source]
            pooled[source] = 0.0
            gone[source] = True
    return pooled
