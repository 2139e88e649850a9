"""Candidates and the partial sort under them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.sampling.candidates import Candidates, entropy, top_positions
from tests.reference import sampling as oracle
from tests.sampling.lists import candidate_lists, listed


@given(
    st.lists(st.sampled_from([-math.inf, -2.0, 0.0, 0.5, 7.0]) | st.floats(-9, 9, width=32), min_size=1, max_size=900),
    st.integers(0, 1000),
)
def test_top_positions_is_a_stable_sort_cut_short(values: list[float], count: int) -> None:
    """The largest values come first and equal ones in their order, for every count and around every block size."""
    expected = sorted(range(len(values)), key=lambda i: -values[i])[:count]
    assert top_positions(np.array(values, np.float32), count).tolist() == expected


def test_top_positions_of_a_large_vocabulary() -> None:
    """With many blocks, a few and a few thousand best ones are those of a full sort."""
    values = np.round(np.random.default_rng(0).normal(0, 3, 50_001), 2).astype(np.float32)
    order = np.argsort(-values, kind="stable")
    for count in (1, 40, 700, 5000, 50_000):
        assert np.array_equal(top_positions(values, count), order[:count])


@given(candidate_lists(), st.lists(st.integers(0, 600), unique=True))
def test_positions_of_finds_each_token_once(candidates: Candidates, tokens: list[int]) -> None:
    """Every token that is in the list is found at its place, and no other one."""
    if candidates.is_full:
        tokens = [token for token in tokens if token < len(candidates)]
    positions, which = candidates.positions_of(np.array(tokens, np.int64))
    found = dict(zip(which.tolist(), positions.tolist(), strict=True))
    ids = candidates.ids.tolist()
    assert found == {index: ids.index(token) for index, token in enumerate(tokens) if token in ids}


@given(candidate_lists())
def test_probs_are_the_softmax(candidates: Candidates) -> None:
    """Probabilities, also of one token, equal the oracle's; a token outside the list has 0."""
    expected = oracle.softmax(listed(candidates))
    np.testing.assert_allclose(candidates.probs(), expected, rtol=1e-12)
    assert candidates.prob_of(int(candidates.ids[-1])) == pytest.approx(expected[-1])
    assert candidates.prob_of(601) == 0.0


@pytest.mark.parametrize("mass", [0.5, 0.9, 0.999, 1.0])
def test_a_flat_distribution_needs_more_than_the_first_prefix(mass: float) -> None:
    """Where 1,024 candidates are too few, the prefix still is the shortest one that reaches the mass."""
    logits = np.random.default_rng(1).normal(0, 0.3, 40_000).astype(np.float32)
    full = Candidates(np.arange(logits.size, dtype=np.int32), logits, is_full=True)
    prefix = full.sorted_prefix_reaching(mass, 0)
    probs = full.sorted().probs()
    assert prefix.ids.tolist() == full.sorted().ids[: len(prefix)].tolist()
    assert probs[: len(prefix)].sum() >= mass - 1e-9
    assert probs[: len(prefix) - 1].sum() < mass + 1e-9


def test_entropy_counts_zero_probabilities_as_nothing() -> None:
    """0 ln 0 is 0; two equal chances are ln 2."""
    assert entropy(np.array([0.5, 0.0, 0.5])) == pytest.approx(math.log(2))
    assert entropy(np.array([1.0])) == 0.0
