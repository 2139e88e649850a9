"""Pretended acceptance: its rates come out, it is labelled, and a seed repeats it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.settings.drafters import SpeculativeSettings
from kvs_core.speculative.drafter import NO_DRAFT, Draft
from kvs_core.speculative.synthetic import SyntheticVerifier, make_judge, rates_of_length
from kvs_core.speculative.verdict import Verdict
from kvs_core.speculative.verifier import Verifier
from tests.speculative.chain_model import sampler_of

V = 8
ROW = np.arange(V, dtype=np.float32)   # the target always says 7
DRAFT = Draft((1, 2, 3), "draft-mtp")


def judged(judge: SyntheticVerifier, draft: Draft = DRAFT, rounds: int = 1) -> list[Verdict]:
    sampler = sampler_of(V, temperature=0)
    return [judge.judge(draft, [ROW] * (1 + len(draft)), sampler) for _ in range(rounds)]


@given(st.integers(1, 64).flatmap(lambda n: st.tuples(st.just(n), st.floats(1, n + 1))))
def test_rates_of_a_length(sizes: tuple[int, float]) -> None:
    """Powers of one probability, whose sum and one is the length."""
    widest, length = sizes
    rates = rates_of_length(length, widest)
    assert len(rates) == widest
    assert 1.0 + sum(rates) == pytest.approx(length, abs=1e-5)
    assert rates == pytest.approx([rates[0] ** (1 + index) for index in range(widest)])
    assert list(rates) == sorted(rates, reverse=True)


def test_the_ends_of_the_lengths_are_exact() -> None:
    """No token is accepted, or every one."""
    assert rates_of_length(1.0, 3) == (0.0, 0.0, 0.0)
    assert rates_of_length(4.0, 3) == (1.0, 1.0, 1.0)
    for rate, tokens in ((0.0, (7,)), (1.0, (1, 2, 3, 7))):
        verdicts = judged(SyntheticVerifier((rate,) * 3, (), seed=1), rounds=50)
        assert {verdict.tokens for verdict in verdicts} == {tokens}


@given(
    st.lists(st.floats(0, 1), min_size=3, max_size=3), st.integers(1, 400), st.integers(0, 2**32 - 1)
)
def test_rates_come_out_of_any_number_of_rounds(rates: list[float], rounds: int, seed: int) -> None:
    """Each position is accepted as often as its rate says, but for 3 rounds: dice would miss 400 by 10, or 30."""
    rates.sort(reverse=True)
    verdicts = judged(SyntheticVerifier(rates, (), seed=seed), rounds=rounds)
    accepted = np.array([verdict.accepted for verdict in verdicts])
    for position, rate in enumerate(rates):
        assert abs((accepted > position).sum() - rate * rounds) < 3


def test_verdicts_are_labelled_and_repeat_with_their_seed() -> None:
    """Every one says that it is pretended, even one without a draft; the same seed pretends the same."""
    rates = (0.7, 0.4, 0.3)
    first, again, other = (judged(SyntheticVerifier(rates, (), seed=seed), rounds=40) for seed in (5, 5, 6))
    assert first == again != other
    assert all(verdict.synthetic for verdict in first)
    assert judged(SyntheticVerifier(rates, (), seed=5), NO_DRAFT) == [Verdict((7,), synthetic=True)]


def test_a_drafted_end_token_is_not_accepted() -> None:
    """The target's token stands there instead: the text goes on as long as it was meant to."""
    assert judged(SyntheticVerifier((1.0,) * 3, (2,), seed=1)) == [Verdict((1, 7), synthetic=True)]


def test_accepted_tokens_are_seen_by_penalties() -> None:
    """The sampler remembers what came out, not what the target would have said."""
    sampler = sampler_of(V, temperature=0, presence_penalty=10.0)
    judge = SyntheticVerifier((1.0,), (), seed=1)
    assert judge.judge(Draft((7,), "draft-mtp"), [ROW, ROW], sampler).tokens == (7, 6)
    assert judge.judge(Draft((5,), "draft-mtp"), [ROW, ROW], sampler).tokens == (5, 4)


def test_the_judge_of_settings() -> None:
    """True acceptance unless a length or rates are given; a length is that of the widest draft."""
    mtp = ("draft-mtp",)
    assert isinstance(make_judge(SpeculativeSettings(types=mtp), (), seed=1), Verifier)
    assert isinstance(make_judge(SpeculativeSettings(), (), seed=1), Verifier)
    for settings in (SpeculativeSettings(types=mtp, synth_len=4.0),
                     SpeculativeSettings(types=mtp, synth_rates=(1.0, 1.0, 1.0))):
        judge = make_judge(settings, (), seed=1)
        assert isinstance(judge, SyntheticVerifier)
        assert judged(judge) == [Verdict((1, 2, 3, 7), synthetic=True)]
