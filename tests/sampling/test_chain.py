"""Sampler: what a user of the whole chain may rely on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.errors import DeviceError, SettingsError
from kvs_core.sampling.chain import Sampler
from kvs_core.sampling.params import RANDOM_SEED, SamplingParams
from tests.sampling.vocabs import LetterVocab, ListVocab

V = 300


def make(n_vocab: int = V, eog_ids: tuple[int, ...] = (2,), suppress: tuple[int, ...] = (), **params: Any) -> Sampler:
    return Sampler(
        SamplingParams(**params), n_vocab=n_vocab, vocab=LetterVocab(n_vocab), eog_ids=eog_ids, suppress_ids=suppress
    )


def random_logits(seed: int, n_vocab: int = V) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, n_vocab).astype(np.float32)


def generate(sampler: Sampler, count: int = 60) -> list[int]:
    tokens = []
    for step in range(count):
        token = sampler.pick(random_logits(step)).token
        sampler.accept(token)
        tokens.append(token)
    return tokens


CHAINS: list[dict[str, Any]] = [
    {},
    {"mirostat": 1},
    {"mirostat": 2},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"samplers": ("top_k", "adaptive_p"), "adaptive_target": 0.2},
    {"dry_multiplier": 0.8, "repeat_penalty": 1.2, "temperature": 1.5},
    {"dynatemp_range": 0.7, "typical_p": 0.9, "top_n_sigma": 2.0},
    {"samplers": ("top_k", "infill")},
]


@pytest.mark.parametrize("params", CHAINS)
def test_same_seed_same_tokens(params: dict[str, Any]) -> None:
    """A seed fixes the text: in a new sampler, after reset, and not with another seed."""
    sampler = make(seed=7, **params)
    tokens = generate(sampler)
    assert generate(make(seed=7, **params)) == tokens
    sampler.reset()
    assert generate(sampler) == tokens
    if "infill" not in params.get("samplers", ()):
        assert generate(make(seed=8, **params)) != tokens


def test_a_random_seed_is_drawn_at_reset_and_can_be_used_again() -> None:
    """seed_used is the seed of the text: given again it gives the same text."""
    sampler = make(seed=-1)
    first = sampler.seed_used
    tokens = generate(sampler)
    assert sampler.params.seed == RANDOM_SEED
    assert generate(make(seed=first)) == tokens
    sampler.reset()
    assert 0 <= sampler.seed_used < RANDOM_SEED
    assert sampler.seed_used != first   # one in 2^32
    assert make(seed=5).seed_used == 5


def test_dist_draws_by_probability() -> None:
    """10,000 draws from five tokens: chi-square below the 0.1 % point of four degrees of freedom, for three seeds."""
    probs = np.array([0.5, 0.25, 0.15, 0.08, 0.02])
    logits = np.log(probs).astype(np.float32)
    for seed in (1, 2, 3):
        sampler = make(n_vocab=5, seed=seed, samplers=())
        counts = np.bincount([sampler.pick(logits).token for _ in range(10_000)], minlength=5)
        assert (((counts - probs * 10_000) ** 2) / (probs * 10_000)).sum() < 18.47


@given(st.lists(st.sampled_from([-3.0, 0.0, 1.5, 1.5, 4.0]) | st.floats(-9, 9, width=32), min_size=2, max_size=100),
       st.integers(0, 1), st.floats(-5, 5))
def test_greedy_is_the_first_maximum_of_the_biased_and_penalised_logits(
    values: list[float], seen: int, bias: float
) -> None:
    """At temperature 0 the token is an exact argmax, with all of the default filters in the list."""
    sampler = make(n_vocab=len(values), eog_ids=(), temperature=0, presence_penalty=1.0, logit_bias=((1, bias),))
    sampler.accept(seen)
    logits = np.array(values, np.float32)
    expected = logits.astype(np.float64)
    expected[1] = np.float32(expected[1] + bias)
    expected[seen] = np.float32(expected[seen] - 1.0)
    pick = sampler.pick(logits)
    assert (pick.token, pick.logprob) == (int(expected.argmax()), 0.0)
    assert logits.tolist() == np.array(values, np.float32).tolist()


def test_greedy_obeys_stages_that_remove_the_maximum() -> None:
    """XTC and typ_p act before a greedy temperature too, and a list without temperature stays random."""
    logits = np.log(np.array([0.4, 0.35, 0.25], np.float32))
    sure = make(n_vocab=3, eog_ids=(), temperature=0, xtc_probability=1.0, xtc_threshold=0.3)
    assert sure.pick(logits).token == 1
    random = make(n_vocab=3, eog_ids=(), temperature=0, samplers=("top_k",), seed=1)
    assert {random.pick(logits).token for _ in range(50)} == {0, 1, 2}


def test_the_order_of_the_list_is_the_order_of_work() -> None:
    """Temperature before top_p flattens first, so that more tokens stay."""
    logits = random_logits(1)
    late = make(samplers=("top_p", "temperature"), top_p=0.9, temperature=5.0).distribution(logits)
    early = make(samplers=("temperature", "top_p"), top_p=0.9, temperature=5.0).distribution(logits)
    assert len(early) > len(late)


def test_distribution_is_what_pick_draws_from() -> None:
    """The candidates sum to 1, the logprob is the token's among them, and looking twice changes nothing."""
    sampler = make(seed=3)
    logits = random_logits(5)
    first, second = sampler.distribution(logits), sampler.distribution(logits)
    assert first.ids.tolist() == second.ids.tolist()
    assert first.logits.tolist() == second.logits.tolist()
    assert first.probs().sum() == pytest.approx(1.0)
    pick = sampler.pick(logits)
    assert math.exp(pick.logprob) == pytest.approx(first.prob_of(pick.token))


@pytest.mark.parametrize("params", CHAINS)
def test_a_pick_that_is_not_accepted_leaves_no_trace(params: dict[str, Any]) -> None:
    """Rejected drafts: only accepted tokens move penalties, DRY, mirostat and adaptive-p."""
    params = {**params, "xtc_probability": 0.0}
    plain, drafting = make(seed=1, **params), make(seed=1, **params)
    for step in range(20):
        logits = random_logits(step)
        drafting.distribution(random_logits(1000 + step))
        a, b = plain.distribution(logits), drafting.distribution(logits)
        assert (a.ids.tolist(), a.logits.tolist()) == (b.ids.tolist(), b.logits.tolist())
        token = int(a.ids[step % len(a)])
        plain.accept(token)
        drafting.accept(token)


def test_prompt_tokens_count_for_penalties_and_dry_only() -> None:
    """The prompt's repetition is penalised; mirostat's and adaptive-p's state waits for generated tokens."""
    prompt = [10, 11, 12, 13, 10, 11, 12]
    logits = np.zeros(V, np.float32)
    dry = make(samplers=("dry",), dry_multiplier=1.0)
    penalties = make(samplers=("penalties",), presence_penalty=2.0)
    mirostat, fresh = make(mirostat=2, mirostat_tau=3.0, seed=1), make(mirostat=2, mirostat_tau=3.0, seed=1)
    for token in prompt:
        for sampler in (dry, penalties, mirostat):
            sampler.accept(token)
    assert np.flatnonzero(dry.distribution(logits).logits).tolist() == [13]
    assert np.flatnonzero(penalties.distribution(logits).logits).tolist() == [10, 11, 12, 13]
    assert generate(mirostat) == generate(fresh)


def test_dry_sees_the_texts_of_tokens() -> None:
    """A token with a breaker in its text ends the repetition that would otherwise be penalised."""
    vocab = ListVocab([b"a", b"b", b"c", b"x:", b"d"])
    params = SamplingParams(samplers=("dry",), dry_multiplier=1.0)
    with_break, without = (Sampler(params, n_vocab=5, vocab=vocab, eog_ids=()) for _ in range(2))
    for token in (0, 3, 1, 2, 0, 3, 1):
        with_break.accept(token)
    for token in (0, 4, 1, 2, 0, 4, 1):
        without.accept(token)
    assert not with_break.distribution(np.zeros(5, np.float32)).logits.any()
    assert without.distribution(np.zeros(5, np.float32)).logits[2] == pytest.approx(-1.75)


def test_bans() -> None:
    """ignore_eos, suppressed ids and -inf biases are never generated; a ban cannot be lifted by another bias."""
    logits = np.zeros(V, np.float32)
    logits[[2, 3, 4]] = 50.0
    for params in ({}, {"mirostat": 2}, {"samplers": ("top_k", "infill")}):
        bias = ((4, -math.inf), (4, 9.0), (2, 9.0))
        sampler = make(eog_ids=(2,), suppress=(3,), ignore_eos=True, logit_bias=bias, **params)
        assert not {sampler.pick(logits).token for _ in range(50)} & {2, 3, 4}


def test_mirostat_replaces_the_list() -> None:
    """Under mirostat no penalty and no top_k acts, but biases and temperature do."""
    listed = {"top_k": 1, "presence_penalty": 50.0}
    sampler = make(mirostat=2, mirostat_tau=20.0, temperature=2.0, logit_bias=((5, 1.0),), **listed)
    sampler.accept(7)
    logits = random_logits(3)
    got = sampler.distribution(logits)
    logits[5] += 1.0
    expected = np.exp(logits.astype(np.float64) / 2)
    assert len(got) == V
    assert got.prob_of(7) == pytest.approx(expected[7] / expected.sum())


def test_bad_logits_and_bad_biases_are_errors_for_the_user() -> None:
    """NaN, no finite logit, everything banned, a bias beyond the vocabulary: one clear line each."""
    logits = random_logits(1)
    logits[9] = math.nan
    with pytest.raises(DeviceError, match="1 of 300 logits"):
        make().pick(logits)
    with pytest.raises(DeviceError, match="-infinity"):
        make(temperature=0).pick(np.full(V, -math.inf, np.float32))
    banned = make(n_vocab=3, eog_ids=(2,), ignore_eos=True, logit_bias=((0, -math.inf), (1, -math.inf)))
    with pytest.raises(SettingsError, match="ban 3 of 3 tokens"):
        banned.pick(np.zeros(3, np.float32))
    with pytest.raises(SettingsError, match="token 300: this model's tokens are 0 to 299"):
        make(logit_bias=((300, 1.0),))


@given(st.lists(st.sampled_from([-math.inf, -3e38, -1.0, 0.0, 2.0, 3e38]), min_size=2, max_size=30), st.data())
def test_extreme_logits_always_give_an_allowed_token(values: list[float], data: st.DataObject) -> None:
    """Whatever finite logits come and whichever stages act, the token is one with a finite logit."""
    if max(values) == -math.inf:
        values[0] = 0.0
    params = data.draw(st.sampled_from(CHAINS))
    extremes = {"presence_penalty": -3e38, "repeat_penalty": 1e38, "temperature": 1e-37, "dry_multiplier": 3e38}
    extreme = data.draw(st.sampled_from([{}, *({name: value} for name, value in extremes.items())]))
    sampler = make(n_vocab=len(values), eog_ids=(), seed=1, **{**params, **extreme})
    for token in (0, 1, 0, 1, 0, 1):
        sampler.accept(token)
    with np.errstate(all="raise", under="ignore"):
        pick = sampler.pick(np.array(values, np.float32))
    assert values[pick.token] > -math.inf
    assert pick.logprob <= 0.0


def test_the_caller_may_reuse_its_logits() -> None:
    """What a pick remembers until accept is its own: overwriting the logits changes nothing."""
    params = {"samplers": ("adaptive_p",), "adaptive_target": 0.3, "seed": 1}
    kept, reused = make(**params), make(**params)
    buffer = np.empty(V, np.float32)
    for step in range(20):
        buffer[:] = random_logits(step)
        token = reused.pick(buffer).token
        assert kept.pick(random_logits(step)).token == token
        buffer[:] = 0.0
        kept.accept(token)
        reused.accept(token)
