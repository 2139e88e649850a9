"""A constraint binds what is drawn, and nothing else about a sampler."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.errors import SettingsError
from kvs_core.sampling.chain import Sampler
from kvs_core.sampling.constrained import AllOf, ConstrainedSampler, Mask
from kvs_core.sampling.params import SamplingParams
from kvs_core.sampling.thoughts import AfterText, ThoughtLimit
from tests.sampling.vocabs import ListVocab

V = 256
BYTES = ListVocab([bytes([byte]) for byte in range(V)])


class Only:
    """Allows some tokens; remembers what it saw."""

    def __init__(self, *tokens: int) -> None:
        self.mask = np.isin(np.arange(V), tokens)
        self.seen: list[int] = []

    def allowed(self) -> Mask:
        return self.mask

    def accept(self, token: int, /) -> None:
        self.seen.append(token)


def sampler(**params: object) -> ConstrainedSampler:
    return ConstrainedSampler(SamplingParams(seed=1, **params), n_vocab=V, vocab=BYTES, eog_ids=())  # type: ignore[arg-type]


LOGITS = np.random.default_rng(0).normal(size=V).astype(np.float32)


@given(st.sets(st.integers(0, V - 1), min_size=1), st.floats(0, 2))
def test_only_allowed_tokens_are_drawn(tokens: set[int], temperature: float) -> None:
    """Whatever the chain; the distribution is the chain's of logits without the others; the logits are not changed."""
    made = sampler(temperature=temperature)
    made.constrain(Only(*tokens))
    before = LOGITS.copy()
    assert made.enough is None
    left = made.distribution(LOGITS)
    finite = left.ids[np.isfinite(left.logits)]
    assert set(finite.tolist()) <= tokens
    assert made.pick(LOGITS).token in tokens
    np.testing.assert_array_equal(LOGITS, before)
    masked = np.where(np.isin(np.arange(V), list(tokens)), LOGITS, np.float32(-np.inf))
    plain = Sampler(SamplingParams(seed=1, temperature=temperature), n_vocab=V, vocab=BYTES, eog_ids=())
    np.testing.assert_array_equal(plain.distribution(masked).ids, left.ids)


def test_the_prompt_is_not_under_the_constraint() -> None:
    """What was accepted before ``constrain`` is the prompt; from then on everything is the text."""
    made, only = sampler(temperature=0), Only(5)
    made.accept(1)
    made.constrain(only)
    made.accept(5)
    assert only.seen == [5]


def test_nothing_allowed_is_an_error() -> None:
    """Said in one line, not drawn from nothing."""
    made = sampler()
    made.constrain(Only())
    with pytest.raises(SettingsError, match="no token can follow"):
        made.pick(LOGITS)


def test_all_of_several() -> None:
    """Tokens that all allow; the first one's where they have none in common; every one hears of each token."""
    a, b, c = Only(1, 2), Only(2, 3), Only(9)
    np.testing.assert_array_equal(AllOf(a, b).allowed(), Only(2).mask)
    np.testing.assert_array_equal(AllOf(a, c).allowed(), a.mask)
    both = AllOf(a, b)
    both.accept(2)
    assert a.seen == b.seen == [2]


@pytest.mark.parametrize("exactly", [False, True])
def test_a_constraint_begins_behind_a_text(exactly: bool) -> None:
    """Not before its last byte, and then at once."""
    only = Only(7)
    after = AfterText(only, BYTES, text="</t>", exactly=exactly)
    for byte in b"a</</t":
        after.accept(byte)
        assert after.allowed() is None
    after.accept(ord(">"))
    assert after.allowed() is only.mask
    after.accept(7)
    assert only.seen == [7]


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_thoughts_end_at_their_limit(limit: int) -> None:
    """After so many tokens the closing is the only thing allowed, token by token; thoughts that end by themselves, or
    that never open, are left alone; a second stretch has the limit again."""
    closing = list(b"\n</t>")
    rule = ThoughtLimit(limit, BYTES, n_vocab=V, start="<t>", end="</t>", closing=closing, is_open=True)
    for _ in range(2):
        for _ in range(limit):
            assert rule.allowed() is None
            rule.accept(ord("a"))
        for token in closing:
            mask = rule.allowed()
            assert mask is not None
            assert np.flatnonzero(mask).tolist() == [token]
            rule.accept(token)
        for byte in b"answer <t>":
            assert rule.allowed() is None
            rule.accept(byte)
    early = ThoughtLimit(9, BYTES, n_vocab=V, start="<t>", end="</t>", closing=closing, is_open=True)
    for byte in b"a</t>" + b"b" * 20:
        assert early.allowed() is None
        early.accept(byte)


def test_a_limit_waits_for_the_end_of_a_character() -> None:
    """Three bytes of thought may not end in the middle of a character."""
    rule = ThoughtLimit(1, BYTES, n_vocab=V, start="<t>", end="</t>", closing=[1], is_open=True)
    for byte in "€".encode():
        assert rule.allowed() is None
        rule.accept(byte)
    assert rule.allowed() is not None
