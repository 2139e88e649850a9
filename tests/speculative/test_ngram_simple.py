"""ngram-simple on texts made by hand, and the search it uses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.settings.drafters import NgramSimpleSettings
from kvs_core.speculative.ngram import NgramSimple
from kvs_core.speculative.text import TextBuffer, last_place, places
from tests.speculative.play import proposed, text_of

N2_M3 = NgramSimple(NgramSimpleSettings(size_n=2, size_m=3))
tokens = st.lists(st.integers(0, 2), max_size=60)


@pytest.mark.parametrize(
    ("history", "draft"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7, 1, 2], [3, 4, 5]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], []),                  # position 0 is not looked at
        ([0, 1, 2, 3, 4, 1, 2], []),                           # 6 tokens before the last: not more than n + m + 1
        ([0, 1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([0, 1, 2, 9, 9, 1, 2, 8, 8, 8, 1, 2], [8, 8, 8]),     # the last match counts
        ([0, 1, 2, 9, 9, 9, 9, 1, 2, 5, 1, 2], [5, 1]),        # what is left behind the match
        ([0, 0, 0, 0, 0, 9, 1, 2, 1, 2], []),                  # of which there have to be n
    ],
)
def test_rounds(history: list[int], draft: list[int]) -> None:
    """The continuation of the last earlier match, at least n and at most m tokens of it."""
    assert proposed(N2_M3, history) == draft


@pytest.mark.parametrize(("period", "drafted"), [(1, 0), (5, 0), (12, 0), (13, 12), (20, 19), (60, 48)])
def test_text_that_repeats_faster_than_n_tokens_is_not_drafted(period: int, drafted: int) -> None:
    """With 12 and 48 tokens, a text of some period drafts that period less one, if those are 12: a run drafts none."""
    history = [token % period for token in range(240)]
    draft = proposed(NgramSimple(NgramSimpleSettings()), history)
    assert draft == [(240 + index) % period for index in range(drafted)]


@given(tokens, st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(0, 70), st.integers(-2, 70))
def test_places_are_those_of_a_plain_search(text: list[int], run: list[int], first: int, last: int) -> None:
    """All starts in the given range, and the last of them; a run that reaches beyond the end is not there."""
    found = [at for at in range(first, last + 1) if text[at : at + len(run)] == run]
    assert places(text_of(text), text_of(run), first, last).tolist() == found
    assert last_place(text_of(text), text_of(run), first, last) == (found[-1] if found else None)


def test_the_last_place_is_found_across_blocks() -> None:
    """A long text is searched from its end, block by block, without a gap between two."""
    text = text_of([0] * 50_000)
    for at in (0, 1, 48_973, 48_974, 48_975, 48_976, 49_998, 46_000):
        text[at : at + 2] = 7
        assert last_place(text, text_of([7, 7]), 0, 49_999) == at
        text[at : at + 2] = 0


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), max_size=900)), max_size=8))
def test_a_buffer_follows_its_list(moves: list[tuple[bool, list[int]]]) -> None:
    """The array is the list: as it grows, when it starts again, and when it became shorter."""
    buffer, followed = TextBuffer(), []
    for again, more in moves:
        if again:
            followed = []
            buffer.clear()
        followed = followed + more
        assert buffer.follow(followed).tolist() == followed
    assert buffer.follow(followed[: len(followed) // 2]).tolist() == followed[: len(followed) // 2]
