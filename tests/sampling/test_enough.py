"""A chain that looks only at the largest logits may be given those alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.sampling.candidates import Candidates, top_positions
from kvs_core.sampling.chain import Sampler
from kvs_core.sampling.params import SamplingParams
from tests.sampling.vocabs import LetterVocab

V = 120
OTHERS = ("top_p", "min_p", "typ_p", "xtc", "top_n_sigma", "temperature", "adaptive_p", "penalties", "dry")


def make(**params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), n_vocab=V, vocab=LetterVocab(V), eog_ids=(2,))


def best_of(logits: np.ndarray, count: int) -> Candidates:
    """As a device finds them: the largest first, of equal ones the lower id; no -0."""
    ids = top_positions(logits, count)
    return Candidates(ids.astype(np.int32), logits[ids] + np.float32(0.0), is_sorted=True)


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, Any]:
    """Chains that begin with top_k, or choose greedily."""
    greedy = draw(st.booleans())
    rest = draw(st.permutations(OTHERS).map(lambda names: names[: draw(st.integers(0, len(OTHERS)))]))
    if greedy:
        head = draw(st.lists(st.sampled_from(["top_k", "top_p", "min_p", "top_n_sigma"]), unique=True))
        names = (*head, "temperature", *(name for name in rest if name not in (*head, "temperature")))
    else:
        names = ("top_k", *rest)
    return {
        "samplers": names,
        "temperature": 0.0 if greedy else draw(st.sampled_from([0.0, 0.3, 0.8, 2.0])),
        "top_k": draw(st.integers(1, V + 20)),
        "top_p": draw(st.sampled_from([0.5, 0.95, 1.0])),
        "min_p": draw(st.sampled_from([0.0, 0.05, 0.3])),
        "typical_p": draw(st.sampled_from([0.4, 1.0])),
        "top_n_sigma": draw(st.sampled_from([-1.0, 1.0])),
        "xtc_probability": draw(st.sampled_from([0.0, 0.5])),
        "xtc_threshold": 0.1,
        "repeat_penalty": draw(st.sampled_from([1.0, 1.5])),
        "dry_multiplier": draw(st.sampled_from([0.0, 0.8])),
        "adaptive_target": draw(st.sampled_from([-1.0, 0.3])),
        "min_keep": draw(st.sampled_from([0, 3])),
        "dynatemp_range": 0.0 if greedy else draw(st.sampled_from([0.0, 0.2])),
        "seed": draw(st.integers(0, 1000)),
    }


@given(params=parameters(), seed=st.integers(0, 1000), steps=st.integers(0, 1))
def test_the_largest_logits_decide(params: dict[str, Any], seed: int, steps: int) -> None:
    """Text from the ``enough`` largest logits is text from all of them: the same tokens, probabilities and candidates,
    with ties at the cut, banned tokens and whatever earlier picks have left behind."""
    full, few = make(**params), make(**params)
    assert few.enough is not None
    dice = np.random.default_rng(seed)
    for _ in range(12):
        logits = dice.normal(0, 3, V).astype(np.float32)
        if steps:
            logits = np.round(logits)   # many are equal
        logits[dice.integers(0, V, 5)] = -np.inf
        expected, got = full.pick(logits), few.pick(best_of(logits, min(few.enough, V)))
        assert (got.token, got.logprob) == (expected.token, expected.logprob)
        assert got.candidates.ids.tolist() == expected.candidates.ids.tolist()
        assert got.candidates.logits.tolist() == expected.candidates.logits.tolist()
        full.accept(expected.token)
        few.accept(got.token)


@pytest.mark.parametrize(
    "params",
    [
        {"samplers": ("penalties", "top_k"), "repeat_penalty": 1.1}, {"samplers": ("top_p", "top_k")},
        {"samplers": ("temperature", "top_k")}, {"mirostat": 1}, {"mirostat": 2, "temperature": 0.0},
        {"logit_bias": ((3, 1.0),)}, {"ignore_eos": True}, {"top_k": 0}, {"samplers": ()},
        {"samplers": ("xtc", "temperature"), "xtc_probability": 0.5, "temperature": 0.0},
        {"temperature": 0.0, "dynatemp_range": 0.5, "samplers": ("temperature",)},
    ],
    ids=str,
)
def test_chains_that_look_at_all_logits_say_so(params: dict[str, Any]) -> None:
    """Where any logit could matter, none is left out."""
    assert make(**params).enough is None


@pytest.mark.parametrize(
    ("params", "enough"),
    [({}, 40), ({"top_k": 7}, 7), ({"temperature": 0.0}, 1), ({"temperature": 0.0, "top_k": 5}, 1),
     ({"repeat_penalty": 1.0, "samplers": ("penalties", "dry", "top_k")}, 40)],
    ids=str,
)
def test_usual_chains_need_few(params: dict[str, Any], enough: int) -> None:
    """The default chain, its usual changes, and greedy ones."""
    assert make(**params).enough == enough
