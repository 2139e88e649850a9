"""Drafters on texts that are known beforehand, on a pretended GPU: what n-grams before MTP cost and gain."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from benchmarks.gpu.given_text import Arm, write_by_turns
from benchmarks.gpu_check import given_texts
from kvs_core.engine import round as rounds_of_engine
from kvs_core.engine import speculation
from kvs_core.settings.drafters import ModelDraftSettings, SpeculativeSettings
from tests.benchmarks.pretended import STREAMED_S, Pretended
from tests.sampling.vocabs import LetterVocab

N_VOCAB = 20_000
MTP = ("draft-mtp",)
NGRAMS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")


@cache
def texts() -> Mapping[str, tuple[list[int], list[int]]]:
    """What stands before, and the text, by name."""
    return {name: (before, text) for name, before, text in given_texts(N_VOCAB)}


def arms_on(
    name: str, *types: tuple[str, ...], seed: int, monkeypatch: pytest.MonkeyPatch, after_s: float = 0.0
) -> list[Arm]:
    """One text, written by each of these mixes in turn."""
    engine: Any = Pretended(N_VOCAB, after_s=after_s)
    for room in (speculation, rounds_of_engine):
        monkeypatch.setattr(room, "perf_counter", engine.clock)
    vocab: Any = LetterVocab(N_VOCAB)
    before, text = texts()[name]
    arms = [
        Arm(engine, vocab, SpeculativeSettings(mix, draft=ModelDraftSettings(n_max=5)), before, text, seed=seed,
            clock=engine.clock)
        for mix in types
    ]
    write_by_turns(arms)
    assert engine.now == pytest.approx(sum(each.seconds for arm in arms for each in arm.rounds))
    return arms


def whole_rate(arm: Arm) -> float:
    """Tokens per second of the whole text, what is found out on the way included."""
    return sum(each.tokens for each in arm.rounds) / sum(each.seconds for each in arm.rounds)


@pytest.mark.parametrize("ngram", NGRAMS)
@pytest.mark.parametrize("name", ["source", "no repetition"])
def test_ngrams_that_find_little_cost_little(name: str, ngram: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than 1 % of the whole text's speed, whatever the MTP block guesses; ngram-cache, which drafts from one
    token that was seen before, 2 % on average."""
    ratios = []
    for seed in range(5):
        alone, mixed = arms_on(name, MTP, (ngram, *MTP), seed=seed, monkeypatch=monkeypatch)
        ratios.append(whole_rate(mixed) / whole_rate(alone))
    assert sum(ratios) / len(ratios) >= 0.98, ratios
    assert ngram == "ngram-cache" or min(ratios) >= 0.99, ratios


@pytest.mark.parametrize(("ngram", "least"), [
    ("ngram-simple", 1.9), ("ngram-map-k", 1.9), ("ngram-map-k4v", 1.9), ("ngram-mod", 1.6), ("ngram-cache", 1.1),
])
def test_a_copy_keeps_its_gain(ngram: str, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the MTP block guesses, whether the copy shows early or not; the whole text counts."""
    for seed in range(5):
        alone, mixed = arms_on("source copied with changes", MTP, (ngram, *MTP), seed=seed, monkeypatch=monkeypatch)
        assert whole_rate(mixed) >= least * whole_rate(alone), seed


def test_what_a_wide_round_leads_to_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other arm's rounds take no longer, but for one behind the end of the text; and wide rounds, with what
    follows, count as they were."""
    alone, mixed = arms_on(
        "source copied with changes", MTP, ("ngram-simple", *MTP), seed=0, monkeypatch=monkeypatch, after_s=0.01
    )
    assert any(each.drafted > 7 for each in mixed.rounds)
    assert sum(each.seconds > STREAMED_S + 0.005 for each in alone.rounds) <= 1
    measured = [each for each in mixed.rounds if each.measured]
    assert all(each.counts for each in measured if each.seconds > STREAMED_S + 0.005)
    taken = sum(each.seconds for each in measured)
    assert mixed.tokens_per_s == pytest.approx(sum(each.tokens for each in measured) / taken)


def test_a_busy_moment_of_the_host_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few usual rounds that took ten times as long, in one arm."""
    (arm,) = arms_on("no repetition", MTP, seed=0, monkeypatch=monkeypatch)
    before = arm.tokens_per_s
    full = [at for at, each in enumerate(arm.rounds) if each.measured and each.drafted == 5]
    for at in full[:10]:
        slow = arm.rounds[at]
        arm.rounds[at] = type(slow)(slow.source, slow.drafted, slow.tokens, 10 * slow.seconds, slow.counts, True)
    assert arm.tokens_per_s == pytest.approx(before)


def test_the_detail_has_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their times; the rounds of the first quarter too, which are not measured."""
    (arm,) = arms_on("source", MTP, seed=0, monkeypatch=monkeypatch)
    detail = arm.detail
    assert len(detail["every_round"]) == len(arm.rounds) > detail["rounds"] > 0
    first = arm.rounds[0]
    assert detail["every_round"][0] == f"draft-mtp 5 {first.tokens} {first.seconds} False False"
    assert sum(each.tokens for each in arm.rounds) >= 640 - 80 - 1
