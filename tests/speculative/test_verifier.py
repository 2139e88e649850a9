"""Whatever is drafted, what is generated is the target's: the very tokens, or their distribution."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.sampling.candidates import Candidates
from kvs_core.settings.drafters import ModelDraftSettings
from kvs_core.speculative.drafter import NO_DRAFT, Draft
from kvs_core.speculative.picker import DraftPicker
from kvs_core.speculative.verifier import Verifier, distribution
from tests.speculative.chain_model import ChainModel, Drafting, sampler_of

PROMPT = (0, 1)
V = 5
TARGET = ChainModel(V, seed=1)
OTHER = ChainModel(V, seed=2)   # a drafter's idea of the target: quite wrong

CHAINS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "samplers": ("temperature",)},
    {"temperature": 0, "repeat_penalty": 1.3},
    {},
    {"samplers": ("top_k", "temperature"), "top_k": 3},
    {"temperature": 1.3, "presence_penalty": 1.0, "frequency_penalty": 0.3},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"mirostat": 2},
    {"samplers": ("top_k", "adaptive_p"), "adaptive_target": 0.2},
]


def random_drafts(random: Random) -> Drafting:
    """Anything: drafts of 0 to 6 tokens of a vocabulary so small that many are right."""
    return lambda history: Draft(tuple(random.randrange(V) for _ in range(random.randrange(7))), "draft-mtp")


def drawn_drafts(seed: int, *, tokens: int = 3, temperature: float = 1.0, model: ChainModel = OTHER) -> Drafting:
    """Drafts drawn from another model, which tell what they were drawn from."""
    picker = DraftPicker(ModelDraftSettings(n_max=7, sampling="probabilistic"), temperature=temperature, seed=seed)

    def drafting(history: Sequence[int]) -> Draft:
        text, guesses = list(history), []
        for _ in range(tokens):
            guess = picker.pick_of(model.logits(text))
            assert guess is not None
            guesses.append(guess)
            text.append(guess.token)
        return picker.draft(guesses, "draft-mtp")

    return drafting


@pytest.mark.parametrize("params", CHAINS, ids=str)
@given(seed=st.integers(0, 1000))
def test_a_seed_gives_the_text_that_it_gives_without_drafts(params: dict[str, Any], seed: int) -> None:
    """Token for token, at every temperature and through every stage that remembers, for any drafts whatsoever that do
    not tell what they were drawn from."""
    plain, sampler = (sampler_of(V, seed=seed, **params) for _ in range(2))
    expected = TARGET.plain(PROMPT, 40, plain)
    drafting = random_drafts(Random(seed))
    assert TARGET.speculative(PROMPT, 40, sampler, Verifier((), seed=seed), drafting) == expected


@pytest.mark.parametrize("params", CHAINS[:3], ids=str)
@given(seed=st.integers(0, 1000))
def test_greedy_text_does_not_depend_on_drawn_drafts(params: dict[str, Any], seed: int) -> None:
    """At temperature 0 rejection sampling, too, gives the tokens of plain decoding."""
    expected = TARGET.plain(PROMPT, 40, sampler_of(V, **params))
    sampler = sampler_of(V, **params)
    assert TARGET.speculative(PROMPT, 40, sampler, Verifier((), seed=seed), drawn_drafts(seed)) == expected


def test_a_draft_of_the_targets_own_tokens_is_accepted_whole() -> None:
    """All of it, and one token more."""
    sampler = sampler_of(V, temperature=0)
    text = TARGET.plain(PROMPT, 5, sampler_of(V, temperature=0))
    rows = [TARGET.logits([*PROMPT, *text[:index]]) for index in range(5)]
    verdict = Verifier((), seed=0).judge(Draft(tuple(text[:4]), "ngram-mod"), rows, sampler)
    assert (verdict.tokens, verdict.accepted, verdict.synthetic) == (tuple(text), 4, False)
    assert Verifier((), seed=0).judge(NO_DRAFT, rows[:1], sampler).tokens == (text[0],)


def test_rows_behind_the_end_are_not_looked_at() -> None:
    """A wrong token ends the round, and so does an end token, even one that was drafted."""
    bad = np.full(V, np.nan, np.float32)
    good = np.array([0, 0, 9, 0, 0], np.float32)
    sampler = sampler_of(V, temperature=0)
    assert Verifier((), seed=0).judge(Draft((1, 1), "ngram-mod"), [good, bad, bad], sampler).tokens == (2,)
    assert Verifier((2,), seed=0).judge(Draft((2, 1), "ngram-mod"), [good, bad, bad], sampler).tokens == (2,)
    assert Verifier((2,), seed=0).judge(Draft((2,), "ngram-mod"), [good, bad], sampler).tokens == (2,)
    lone = Candidates(np.array([2], np.int32), np.zeros(1, np.float32))
    drawn = Draft((2, 2), "draft-mtp", (lone, lone))
    assert Verifier((2,), seed=0).judge(drawn, [good, bad, bad], sampler).tokens == (2,)


@given(st.integers(0, 1000))
def test_text_ends_where_it_ends_without_drafts(seed: int) -> None:
    """With end tokens about, the text is still that of plain decoding."""
    plain, sampler = (sampler_of(V, seed=seed, eog_ids=(3,)) for _ in range(2))
    expected = TARGET.plain(PROMPT, 40, plain, eog_ids=(3,))
    drafting = random_drafts(Random(seed))
    made = TARGET.speculative(PROMPT, 40, sampler, Verifier((3,), seed=seed), drafting, eog_ids=(3,))
    assert made == expected


def exact(params: dict[str, Any]) -> np.ndarray:
    """Probability of each first and second token of plain sampling, [V, V]."""
    joint = np.zeros((V, V))
    sampler = sampler_of(V, **params)
    for first in range(V):
        p = distribution(sampler, TARGET.row(PROMPT, sampler)).prob_of(first)
        after = distribution(sampler, TARGET.row([*PROMPT, first], sampler))
        joint[first] = [p * after.prob_of(second) for second in range(V)]
    return joint


def drafts_of(kind: str, seed: int) -> Drafting:
    random = Random(seed)
    match kind:
        case "fixed":
            return lambda history: Draft((2, 4, 2), "ngram-mod")
        case "random":
            return random_drafts(random)
        case "drawn":
            return drawn_drafts(seed)
        case "drawn hotter":
            return drawn_drafts(seed, temperature=3.0, tokens=2)
        case "drawn colder":
            return drawn_drafts(seed, temperature=0.3)
        case "drawn from the target":
            return drawn_drafts(seed, model=TARGET)
    raise AssertionError(kind)


@pytest.mark.parametrize("params", [{"samplers": ("temperature",), "temperature": 1.0},
                                    {"samplers": ("top_k", "temperature"), "temperature": 0.7, "top_k": 3}], ids=str)
@pytest.mark.parametrize("kind", ["fixed", "random", "drawn", "drawn hotter", "drawn colder", "drawn from the target"])
def test_the_distribution_is_that_of_plain_sampling(kind: str, params: dict[str, Any]) -> None:
    """First and second token of 2,000 texts against their exact probabilities, with a draft over both: chi-square below
    the 0.1 % point of its degrees of freedom. Drafted tokens come out on the way, so acceptance takes part."""
    rounds = 2_000
    sampler, judge, drafting = sampler_of(V, seed=11, **params), Verifier((), seed=11), drafts_of(kind, 12)
    counts, accepted = np.zeros((V, V)), 0
    for _ in range(rounds):
        draft = drafting(PROMPT)
        rows = [TARGET.row([*PROMPT, *draft.tokens[:index]], sampler) for index in range(1 + len(draft))]
        verdict = judge.judge(draft, rows, sampler)
        accepted += verdict.accepted
        tokens = verdict.tokens
        if len(tokens) == 1:
            tokens += (sampler.pick(TARGET.row([*PROMPT, tokens[0]], sampler)).token,)
        counts[tokens[0], tokens[1]] += 1
    expected = exact(params) * rounds
    assert counts[expected == 0].sum() == 0
    often = expected > 5
    chi_square = (((counts - expected) ** 2)[often] / expected[often]).sum()
    rest = counts[~often].sum(), expected[~often].sum()
    degrees = int(often.sum()) - 1
    assert rest[0] <= rest[1] + 5 * np.sqrt(rest[1]) + 1
    assert chi_square < CHI_SQUARE_999[degrees]
    assert accepted > 0.05 * rounds
    if kind == "drawn from the target" and params["temperature"] == 1.0:
        assert accepted == 3 * rounds


# 0.1 % points of the chi-square distribution, by degrees of freedom.
CHI_SQUARE_999 = {5: 20.52, 6: 22.46, 7: 24.32, 8: 26.12, 18: 42.31, 19: 43.82, 20: 45.31, 21: 46.80, 22: 48.27,
                  23: 49.73, 24: 51.18}


def test_rejection_beats_matching_where_both_draw() -> None:
    """The same drawn drafts, without what they were drawn from, are accepted less often: why drafters tell."""
    params = {"samplers": ("temperature",), "temperature": 1.0}
    means = []
    for tells in (True, False):
        sampler, judge, drafting = sampler_of(V, seed=1, **params), Verifier((), seed=1), drawn_drafts(1, model=TARGET)
        accepted = 0
        for _ in range(300):
            draft = drafting(PROMPT)
            rows = [TARGET.row([*PROMPT, *draft.tokens[:index]], sampler) for index in range(1 + len(draft))]
            accepted += judge.judge(draft if tells else Draft(draft.tokens, draft.source), rows, sampler).accepted
        means.append(accepted / 300)
    assert means[0] == 3.0
    assert means[1] < 2.0
