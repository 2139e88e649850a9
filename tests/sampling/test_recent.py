"""The memory of accepted tokens against plain lists."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvs_core.sampling.recent import RecentCounts, TokenTail


@given(st.integers(1, 100), st.lists(st.integers(0, 9), max_size=400))
def test_counts_and_tail_are_those_of_the_last_tokens(window: int, tokens: list[int]) -> None:
    """After every token both know exactly the last ``window`` ones."""
    counts, tail = RecentCounts(window), TokenTail(window)
    for done, token in enumerate(tokens, 1):
        counts.accept(token)
        tail.accept(token)
        last = tokens[max(0, done - window) : done]
        assert dict(counts.counts) == dict(Counter(last))
        assert tail.tokens.tolist() == last
