"""Each stage against its slow twin in ``tests/reference/sampling.py``, and the edges that the formulas leave open."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvs_core.sampling import stages
from kvs_core.sampling.candidates import FLOAT32_MAX, Candidates
from tests.reference import sampling as oracle
from tests.sampling.lists import candidate_lists, listed

shares = st.floats(0.001, 0.999)
keeps = st.integers(0, 5)
BOUNDARY = 1e-9   # closer than this to a cut, the order of summation decides


def make(*logits: float) -> Candidates:
    return Candidates(np.arange(len(logits), dtype=np.int32), np.array(logits, np.float32), is_full=True)


def close(candidates: Candidates, expected: oracle.Listed) -> bool:
    if candidates.ids.tolist() != [token for token, _ in expected]:
        return False
    return np.allclose(candidates.logits, [logit for _, logit in expected], rtol=1e-6, atol=1e-6)


def away_from_cut(probs: list[float], cut: float) -> bool:
    running = np.cumsum(probs)
    return bool(np.all(np.abs(running - cut) > BOUNDARY))


@given(candidate_lists(), st.lists(st.integers(0, 60), max_size=50), st.integers(1, 30), st.floats(0.1, 3),
       st.floats(-2, 2), st.floats(-2, 2))
def test_penalties(
    candidates: Candidates, seen: list[int], last_n: int, repeat: float, frequency: float, presence: float
) -> None:
    """Only tokens in the window change, by the repeat factor and then by count and presence."""
    window = seen[-last_n:]
    counts = {token: window.count(token) for token in window if not candidates.is_full or token < len(candidates)}
    got = stages.penalties(candidates, counts, repeat=repeat, frequency=frequency, presence=presence)
    assert close(got, oracle.penalties(listed(candidates), seen, last_n, repeat, frequency, presence))


@given(candidate_lists(), st.dictionaries(st.integers(0, 199), st.floats(-50, 50) | st.just(-math.inf)))
def test_add_to_logits(candidates: Candidates, bias: dict[int, float]) -> None:
    """A bias reaches its token wherever it is in the list; -inf bans."""
    bias = {token: amount for token, amount in bias.items() if token < len(candidates)}
    expected = [(token, logit + bias.get(token, 0.0)) for token, logit in listed(candidates)]
    assert close(stages.add_to_logits(candidates, bias), expected)


@given(candidate_lists(), st.floats(0.01, 4))
def test_top_n_sigma(candidates: Candidates, n: float) -> None:
    """Logits below max - n sigma are banned and the list keeps its length and order."""
    finite = [logit for logit in candidates.logits.tolist() if logit > -math.inf]
    assume(np.all(np.abs(np.array(finite) - (max(finite) - n * np.std(finite))) > 1e-4) or np.std(finite) == 0)
    assert close(stages.top_n_sigma(candidates, n), oracle.top_n_sigma(listed(candidates), n))


@given(candidate_lists(), st.integers(1, 250))
def test_top_k(candidates: Candidates, k: int) -> None:
    """The k largest, sorted, ties in list order."""
    assert listed(stages.top_k(candidates, k)) == oracle.top_k(listed(candidates), k)


@given(candidate_lists(), shares, keeps)
def test_top_p(candidates: Candidates, mass: float, keep: int) -> None:
    """The shortest sorted prefix that reaches the mass and min_keep."""
    assume(away_from_cut(oracle.softmax(oracle.by_logit(listed(candidates))), mass))
    assert listed(stages.top_p(candidates, mass, min_keep=keep)) == oracle.top_p(listed(candidates), mass, keep)


@given(candidate_lists(bans=False), shares, keeps)
def test_typ_p(candidates: Candidates, mass: float, keep: int) -> None:
    """The most typical ones until their mass exceeds the share."""
    expected = oracle.typ_p(listed(candidates), mass, keep)
    probs = oracle.softmax(listed(candidates))
    total = sum(p for p, item in zip(probs, listed(candidates), strict=True) if item in expected)
    last = probs[listed(candidates).index(expected[-1])]
    assume(abs(total - mass) > BOUNDARY and abs(total - last - mass) > BOUNDARY)
    got = stages.typ_p(candidates, mass, min_keep=keep)
    odd = [abs(-math.log(p) + sum(q * math.log(q) for q in probs)) for p in probs]
    assume(len(odd) == 1 or min(np.diff(sorted(set(odd))), default=1.0) > BOUNDARY)
    assert listed(got) == expected


@given(candidate_lists(), shares, keeps)
def test_min_p(candidates: Candidates, ratio: float, keep: int) -> None:
    """Everything within the ratio of the best, in list order, or the min_keep best."""
    floor = float(candidates.logits.max()) + math.log(ratio)
    assume(np.all(np.abs(candidates.logits - floor) > 1e-5))
    assert listed(stages.min_p(candidates, ratio, min_keep=keep)) == oracle.min_p(listed(candidates), ratio, keep)


@given(candidate_lists(), st.floats(0.001, 0.5), keeps)
def test_xtc(candidates: Candidates, threshold: float, keep: int) -> None:
    """Of the tokens above the threshold only the least likely stays, unless min_keep forbids it."""
    assume(all(abs(p - threshold) > BOUNDARY for p in oracle.softmax(listed(candidates))))
    assert listed(stages.xtc(candidates, threshold, min_keep=keep)) == oracle.xtc(listed(candidates), threshold, keep)


@given(candidate_lists(), st.floats(0.05, 5))
def test_temperature(candidates: Candidates, t: float) -> None:
    """Logits are divided, nothing else moves."""
    assert close(stages.temperature(candidates, t), [(token, logit / t) for token, logit in listed(candidates)])


@given(candidate_lists(bans=False), st.floats(1, 5), st.floats(0.05, 0.9), st.floats(0, 3))
def test_dynamic_temperature(candidates: Candidates, t: float, half_range: float, exponent: float) -> None:
    """The temperature between both ends is chosen by the entropy's share of its maximum."""
    assume(len(candidates) > 1)
    got = stages.dynamic_temperature(candidates, t, half_range=half_range, exponent=exponent)
    assert close(got, oracle.dynamic_temperature(listed(candidates), t, half_range, exponent))


@given(candidate_lists())
def test_greedy_temperature_keeps_the_first_maximum(candidates: Candidates) -> None:
    """At 0, or at a temperature that float32 cannot hold, the one candidate left is the first of the largest."""
    best = max(listed(candidates), key=lambda item: item[1])
    assert listed(stages.temperature(candidates, 0.0)) == [best]
    assert listed(stages.temperature(candidates, 1e-40)) == [best]


@given(candidate_lists(), st.data())
def test_no_stage_writes_to_its_input(candidates: Candidates, data: st.DataObject) -> None:
    """The arrays given to a stage are the same afterwards, bit for bit."""
    before = listed(candidates)
    candidates.ids.flags.writeable = candidates.logits.flags.writeable = False
    token = data.draw(st.sampled_from(candidates.ids.tolist()))
    stages.penalties(candidates, {token: 2}, repeat=1.5, frequency=0.1, presence=0.1)
    stages.add_to_logits(candidates, {token: 1.0})
    stages.top_n_sigma(candidates, 1.0)
    for stage in (stages.top_k, stages.top_p, stages.typ_p, stages.min_p, stages.xtc, stages.temperature):
        stage(candidates, 1 if stage is stages.top_k else 0.4)
    stages.dynamic_temperature(candidates, 1.0, half_range=0.5, exponent=1.0)
    assert listed(candidates) == before


def test_exact_cuts() -> None:
    """top_p stops when it reaches the mass, typ_p when it exceeds it; top_p = 0 keeps one."""
    halves = make(1.0, 1.0)
    assert len(stages.top_p(halves, 0.5)) == 1
    assert len(stages.typ_p(halves, 0.5)) == 2
    assert len(stages.top_p(halves, 0.0)) == 1


def test_off_values_change_nothing() -> None:
    """Every stage has a value at which it hands back what it was given."""
    some = make(1.0, 3.0, 2.0)
    assert stages.top_k(some, 0) is some
    assert stages.top_p(some, 1.0) is some
    assert stages.typ_p(some, 1.0) is some
    assert stages.min_p(some, 0.0) is some
    assert stages.top_n_sigma(some, -1.0) is some
    assert stages.penalties(some, {}, repeat=2.0, frequency=1.0, presence=1.0) is some
    assert stages.add_to_logits(some, {}) is some


def test_overflow_never_makes_nan_or_infinity() -> None:
    """Huge factors and tiny temperatures end at float32's limits; the order of probabilities survives."""
    some = make(30.0, 20.0, -20.0)
    held = stages.penalties(some, {0: 1, 2: 1}, repeat=1e38, frequency=1e38, presence=-FLOAT32_MAX)
    assert np.isfinite(held.logits).all()
    raised = stages.add_to_logits(some, {0: 1e300, 1: -1e300})
    assert raised.logits.tolist() == [np.float32(FLOAT32_MAX), np.float32(-FLOAT32_MAX), -20.0]
    cold = stages.temperature(make(30.0, 29.0), 1e-37)
    assert cold.probs().tolist() == [1.0, 0.0]


@pytest.mark.parametrize("u", [0.0, 0.2, 0.5, 0.999999, math.nextafter(1.0, 0.0)])
def test_draw_index_never_takes_a_banned_token(u: float) -> None:
    """Probability 0 is never drawn, not even by u = 0 or by rounding at the end."""
    probs = np.array([0.0, 0.25, 0.0, 0.25, 0.5, 0.0])
    assert probs[stages.draw_index(probs, u)] > 0.0
    assert stages.draw_index(probs, 0.25) == 1
    assert stages.draw_index(probs, 0.26) == 3
