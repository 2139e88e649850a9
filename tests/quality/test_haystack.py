"""Prompts have the length and the depth that were asked for, and one answer."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_cli.quality.haystack import Haystack, draw_facts
from kvs_cli.quality.needle import found_in
from kvs_core.bench_text import benchmark_text
from kvs_core.demo import DEMO_MODEL
from kvs_core.errors import SettingsError
from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.tokenizer import Tokenizer


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata(GgufFile.open(DEMO_MODEL).metadata, source="demo")


@cache
def haystack() -> Haystack:
    return Haystack(tokenizer(), tokenizer().encode(benchmark_text()[:40_000], add_special=False), [7])


@given(
    length=st.integers(500, 4000), depth=st.integers(0, 100), facts=st.integers(1, 8), seed=st.integers(0, 1 << 60)
)
def test_a_prompt(length: int, depth: int, facts: int, seed: int) -> None:
    """Exactly that many tokens, begun as the model wants it; the fact is stated once near its depth, then asked for."""
    prompt = haystack().prompt(length, depth, facts, seed)
    assert len(prompt.tokens) == length
    assert prompt.tokens[0] == 7
    text = tokenizer().decode(prompt.tokens[1:])
    assert text.count(prompt.fact.statement) == 1
    assert text.endswith(prompt.fact.question)
    at = prompt.fact_token
    assert tokenizer().decode(prompt.tokens[at : at + 30]).lstrip().startswith(prompt.fact.statement)
    # Facts take the place of text, and a line or a sentence has to end before one.
    assert abs(at - depth / 100 * length) < 20 * facts + 100
    assert haystack().prompt(length, depth, facts, seed) == prompt


@given(count=st.integers(1, 60), seed=st.integers(0, 1 << 60))
def test_facts_differ(count: int, seed: int) -> None:
    """No two have a name or a number in common."""
    facts = draw_facts(count, Random(seed))
    assert len({fact.name for fact in facts}) == len({fact.number for fact in facts}) == count
    assert all(len(fact.number) == 5 for fact in facts)


def test_names_share_words() -> None:
    """One word of a name is not enough to find a fact."""
    words = [fact.name.split() for fact in draw_facts(8, Random(2))]
    assert any(a[0] == b[0] or a[1] == b[1] for i, a in enumerate(words) for b in words[:i])


def test_what_does_not_fit_is_refused() -> None:
    """More facts than a prompt holds, and a prompt longer than the text: both with their numbers."""
    with pytest.raises(SettingsError, match=r"--lengths 200: 8 facts and a question take \d+ tokens of it; use at"):
        haystack().prompt(200, 50, 8, 1)
    with pytest.raises(SettingsError, match=r"--lengths 90000: the text has \d+ tokens"):
        haystack().prompt(90_000, 50, 8, 1)


@pytest.mark.parametrize(
    ("answer", "found"),
    [(" 48213.", True), ("48213", True), ("\n 48213\n", True), (" 482135", False), (" 4821", False), ("", False),
     (" The number is 48213", False), (" 48214. No, 48213.", False)],
)
def test_an_answer_is_the_whole_number(answer: str, found: bool) -> None:
    """Right to the last digit, and at once."""
    assert found_in(answer, "48213") is found
