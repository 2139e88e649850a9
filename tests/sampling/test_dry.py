"""DRY against a quadratic oracle, and how breaker texts become token sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.sampling.dry import DryRule, expand_breakers, suffix_matches
from tests.reference import sampling as oracle
from tests.sampling.vocabs import ListVocab
from tests.support.tiny_gguf import write_tiny_qwen35

TEXTS = [b"a", b"b", b"ab", b"\n", b"b\n", b"c"]
contexts = st.lists(st.integers(0, 5), min_size=1, max_size=60) | st.lists(st.integers(0, 1), min_size=1, max_size=60)


@given(contexts)
def test_suffix_matches_are_those_found_by_comparing(context: list[int]) -> None:
    """Each earlier occurrence of the last token is found with the length of its common suffix."""
    ends, lengths = suffix_matches(np.array(context, np.int32))
    found = dict(zip(ends, lengths, strict=True))
    expected = {end: oracle.suffix_length(context, end) for end in range(1, len(context))}
    assert found == {end: length for end, length in expected.items() if length}


@given(contexts, st.integers(0, 5), st.sampled_from([1.0, 1.75, 3.0]), st.sampled_from([(), ("\n",), ("\n", "c")]))
def test_penalties_equal_the_oracle(context: list[int], allowed: int, base: float, breakers: tuple[str, ...]) -> None:
    """The same tokens lose the same amounts, whatever the breakers and the free length."""
    rule = DryRule(0.8, base, allowed, expand_breakers(breakers, ListVocab(TEXTS)))
    expected = oracle.dry_penalties(context, TEXTS, [text.encode() for text in breakers], 0.8, base, allowed)
    got = rule.penalties(np.array(context, np.int32))
    assert got == {token: pytest.approx(-amount) for token, amount in expected.items()}


def test_a_breaker_is_found_in_and_across_tokens() -> None:
    """A token that holds the text is a breaker; one that ends with its beginning needs the rest as the next tokens."""
    vocab = ListVocab([b"xend.", b"x", b"e", b"n", b"d", b"the", b".", b"en", b"eend", b""])
    breakers = expand_breakers(["end"], vocab)
    assert breakers.tails == {0: ((),), 8: ((),), 2: ((3, 4),), 5: ((3, 4),), 7: ((4,),)}
    assert breakers.is_single(0)
    assert not breakers.is_single(2)
    assert not breakers.is_single(1)
    assert np.flatnonzero(breakers.is_head).tolist() == [0, 2, 5, 7, 8]


def test_a_control_token_can_be_a_breaker() -> None:
    """The end of a turn breaks a repetition, whole or spelt in plain tokens, although it prints nothing."""
    vocab = ListVocab([b"<end>", b"<", b"end>", b"x", b"e", b"n", b"d", b">"], control=frozenset({0}))
    breakers = expand_breakers(["<end>"], vocab)
    assert breakers.tails == {0: ((),), 1: ((2,),)}
    assert breakers.reach(np.array([3, 0, 3, 3], np.int32)) == 2


def test_a_tokenizer_s_control_tokens_are_breakers(tmp_path: Path) -> None:
    """The same with the tokenizer of a model file, the only one that users meet."""
    file = GgufFile.open(write_tiny_qwen35(tmp_path / "m.gguf", seed=1))
    tokenizer = Tokenizer.from_metadata(file.metadata, source="m.gguf")
    end, = tokenizer.encode("<|im_end|>")
    assert tokenizer.token_bytes(end) == b""
    assert expand_breakers(["<|im_end|>"], tokenizer).is_single(end)


def test_the_newest_complete_breaker_limits_the_reach() -> None:
    """Only tokens behind a whole breaker count; a head without its tail is no breaker."""
    vocab = ListVocab([b"x", b"e", b"n", b"d", b"the"])
    breakers = expand_breakers(["end"], vocab)

    def reach(*tokens: int) -> int:
        return breakers.reach(np.array(tokens, np.int32))

    assert reach(0, 0, 0) == 3
    assert reach(0, 1, 2, 3, 0, 0) == 2
    assert reach(4, 2, 3) == 0
    assert reach(0, 1, 2, 0, 0) == 5
    assert reach(1, 2, 3, 0, 1, 2) == 3


def test_breakers_in_other_scripts() -> None:
    """A text whose tokens cut a character works as long as the rest is whole characters, and breaks nothing else."""
    mark = "。".encode()
    vocab = ListVocab([mark, mark[:1], mark[1:2], mark[2:], "好".encode(), "好。".encode()])
    assert expand_breakers(["。"], vocab).tails == {0: ((),), 5: ((),)}
    assert expand_breakers(["好。"], vocab).tails == {5: ((),), 4: ((0,),)}
    assert expand_breakers(["", "\ud800"], vocab).tails == {}


def test_growth_stops_before_it_overflows() -> None:
    """A repetition of thousands of tokens gives a finite penalty."""
    rule = DryRule(5.0, 1.75, 2, expand_breakers((), ListVocab(TEXTS)))
    penalty = rule.penalties(np.zeros(5000, np.int32))[0]
    assert -3e39 < penalty < -1e38


def test_a_long_context_of_one_token_stays_linear() -> None:
    """The worst case of matching, 100,000 equal tokens, is no worse than their number."""
    _, lengths = suffix_matches(np.zeros(100_000, np.int32))
    assert max(lengths) == 99_999   # quadratic work would take minutes
