"""Reported log-probabilities against a plain softmax."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.errors import DeviceError
from kvs_core.sampling.candidates import Candidates
from kvs_core.sampling.logprobs import LOGPROB_FLOOR, token_probs
from tests.reference import sampling as oracle
from tests.sampling.lists import candidate_lists, listed


@given(candidate_lists(), st.integers(0, 300), st.data())
def test_values_and_order(candidates: Candidates, n_probs: int, data: st.DataObject) -> None:
    """Logprobs are ln softmax of the raw logits, floored; the best come first and equal ones by id."""
    logits = candidates.logits
    token = data.draw(st.integers(0, logits.size - 1))
    got = token_probs(logits, token, n_probs)
    probs = oracle.softmax(listed(candidates))
    expected = [max(math.log(p), LOGPROB_FLOOR) if p else LOGPROB_FLOOR for p in probs]
    order = sorted(range(logits.size), key=lambda i: (-float(logits[i]), i))[:n_probs]
    assert got.id == token
    assert got.logprob == pytest.approx(expected[token], abs=1e-9)
    assert [item.id for item in got.top] == order
    assert [item.logprob for item in got.top] == pytest.approx([expected[i] for i in order], abs=1e-9)


def test_logits_that_are_no_distribution() -> None:
    """NaN, +inf or nothing but -inf is the device's error, said with the count; one finite logit is enough."""
    with pytest.raises(DeviceError, match="2 of 4 logits as NaN or infinity"):
        token_probs(np.array([0.0, math.nan, math.nan, 1.0], np.float32), 0, 1)
    with pytest.raises(DeviceError, match="1 of 2 logits"):
        token_probs(np.array([math.inf, 0.0], np.float32), 0, 1)
    with pytest.raises(DeviceError, match="all 3 logits are -infinity"):
        token_probs(np.full(3, -math.inf, np.float32), 0, 1)
    lone = token_probs(np.array([-math.inf, -3.0], np.float32), 0, 2)
    assert lone.logprob == LOGPROB_FLOOR == float(np.finfo(np.float32).min)
    assert [(item.id, item.logprob) for item in lone.top] == [(1, 0.0), (0, LOGPROB_FLOOR)]
