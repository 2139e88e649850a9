"""Candidate lists for tests: hypothesis strategies, and the way from the package's arrays to the oracle's lists."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from kvs_core.sampling.candidates import Candidates
from tests.reference.sampling import Listed

finite_logits = st.floats(-30, 30, width=32)
logits_with_bans = st.one_of(finite_logits, st.sampled_from([-math.inf, 0.0, 1.0, 1.0]))


@st.composite
def candidate_lists(draw: st.DrawFn, *, max_size: int = 200, bans: bool = True) -> Candidates:
    """Distinct ids in some order, at least one finite logit, ties not rare."""
    logits = draw(st.lists(logits_with_bans if bans else finite_logits, min_size=1, max_size=max_size))
    if max(logits) == -math.inf:
        logits[draw(st.integers(0, len(logits) - 1))] = draw(finite_logits)
    ids = np.arange(len(logits), dtype=np.int32)
    if draw(st.booleans()):
        return Candidates(ids, np.array(logits, np.float32), is_full=True)
    return Candidates(draw(st.permutations(ids.tolist()).map(lambda order: np.array(order, np.int32) * 3)),
                      np.array(logits, np.float32))


def listed(candidates: Candidates) -> Listed:
    """The oracle's form of a list."""
    return list(zip(candidates.ids.tolist(), candidates.logits.tolist(), strict=True))
