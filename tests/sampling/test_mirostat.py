"""Mirostat's cuts against the plain formulas, and its movement."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvs_core.sampling.candidates import Candidates
from kvs_core.sampling.mirostat import Mirostat, zipf_cut
from tests.reference import sampling as oracle
from tests.sampling.lists import candidate_lists, listed


@given(candidate_lists(bans=False), st.floats(-5, 20))
def test_version_1_keeps_as_many_as_the_formula_says(candidates: Candidates, mu: float) -> None:
    """k by logarithms is k by the formula, wherever that can be evaluated."""
    assume(len(candidates) > 1)
    ordered = candidates.sorted()
    try:
        k = oracle.mirostat_1_count(listed(candidates), mu, 1000)
    except (OverflowError, ZeroDivisionError):
        return
    assume(abs(k - round(k)) > 1e-6 * max(1.0, k))
    count = zipf_cut(ordered.logits[:100], mu, n_vocab=1000, n_candidates=len(ordered))
    assert count == min(max(int(k), 1), len(ordered))


@pytest.mark.parametrize("mu", [-1e38, -1.0, 0.0, 10.0, 1e38])
@pytest.mark.parametrize(
    "logits", [[0.0], [0.0, 0.0], [5.0, 5.0, 5.0], [3e38, -3e38], [1.0, -math.inf], [math.log(3), math.log(1.5), 0.0]]
)
def test_version_1_has_an_answer_for_every_distribution(logits: list[float], mu: float) -> None:
    """Flat, lone, Zipf (e = 0) and absurd distributions give a count in [1, n], and no warning of overflow."""
    with np.errstate(all="raise"):
        count = zipf_cut(np.array(logits, np.float32), mu, n_vocab=50, n_candidates=len(logits))
    assert 1 <= count <= len(logits)


@given(candidate_lists(), st.floats(0.1, 12))
def test_version_2_keeps_what_is_not_too_surprising(candidates: Candidates, tau: float) -> None:
    """Everything with at most mu bits of surprise stays, and the best one always."""
    mirostat = Mirostat(2, tau=tau, eta=0.1, n_vocab=1000)
    probs = oracle.softmax(listed(candidates))
    assume(all(abs(-math.log2(p) - 2 * tau) > 1e-9 for p in probs if p > 0))
    assert listed(mirostat.cut(candidates)) == oracle.mirostat_2_list(listed(candidates), 2 * tau)


def test_mu_moves_against_the_surprise() -> None:
    """A token of more bits than the target lowers mu, one of fewer raises it, by eta times the difference."""
    mirostat = Mirostat(2, tau=3.0, eta=0.5, n_vocab=10)
    assert mirostat.mu == 6.0
    mirostat.observe(1 / 32)
    assert mirostat.mu == 5.0
    mirostat.observe(0.5)
    assert mirostat.mu == 6.0
