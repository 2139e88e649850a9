"""ngram-mod on texts made by hand, round by round."""

from __future__ import annotations

import logging
from unittest import mock

import pytest

from kvs_core.settings.drafters import NgramModSettings
from kvs_core.speculative.ngram_mod import NextTokens, NgramMod
from tests.speculative.play import proposed, text_of, verdict_of

PROMPT = [1, 2, 3, 4, 5, 6]


def begun(n: int, n_min: int, n_max: int, table: NextTokens | None = None) -> NgramMod:
    drafter = NgramMod(NgramModSettings(n, n_min, n_max), table or NextTokens())
    drafter.begin(text_of(PROMPT))
    return drafter


@pytest.mark.parametrize(
    ("n_min", "n_max", "draft"),
    [(1, 4, [3, 4, 5, 6]), (1, 2, [3, 4]), (4, 9, [3, 4, 5, 6]), (5, 9, []), (9, 4, [3, 4, 5, 6])],
)
def test_drafts_end_where_the_table_does(n_min: int, n_max: int, draft: list[int]) -> None:
    """A draft that ends before ``n_min`` is none; one of ``n_max`` tokens always is one."""
    assert proposed(begun(2, n_min, n_max), [*PROMPT, 1, 2]) == draft


def test_drafts_follow_their_own_tokens() -> None:
    """What is drafted is looked up in its turn: a loop in the text is followed round and round."""
    drafter = begun(2, 1, 9)
    drafter.begin(text_of([1, 2, 3, 1, 2, 3, 9]))
    assert proposed(drafter, [1, 2, 3, 1, 2, 3, 9, 1, 2]) == [3, 9]     # a later follower overwrites the first one
    drafter.begin(text_of([1, 2, 3, 1, 2, 3, 1]))
    assert proposed(drafter, [1, 2, 3, 1, 2, 3, 1, 2]) == [3, 1, 2] * 3


def test_new_text_is_learnt_in_steps() -> None:
    """33 new tokens are learnt, 32 are not yet."""
    drafter = begun(2, 1, 2)
    text = [*PROMPT, *range(100, 129)]     # what is not learnt starts at token 4: 31 tokens up to here
    assert proposed(drafter, [*text, 101, 102]) == []
    assert proposed(drafter, [*text, 9, 101, 102]) == [103, 104]


def test_tables_outlive_requests_and_may_be_shared() -> None:
    """What one sequence learnt, in an earlier request, another one drafts."""
    table = NextTokens()
    begun(2, 1, 4, table).begin(text_of([7]))
    assert proposed(NgramMod(NgramModSettings(2, 1, 4), table), [0, 0, 1, 2]) == [3, 4, 5, 6]


def test_a_quarter_full_table_is_cleared() -> None:
    """Together with the prompt that filled it."""
    with mock.patch("kvs_core.speculative.ngram_mod.TABLE_SLOTS", 16):
        table = NextTokens()
        begun(2, 1, 4, table)
        assert 0.0 < table.used_share <= 0.25
        drafter = begun(1, 1, 4, table)
        drafter.begin(text_of([*PROMPT, 7, 8, 9, 10]))
        assert table.used_share == 0.0


def test_five_poor_rounds_clear_the_table() -> None:
    """In a row, judged by the length before a draft is cut; of rounds of its own."""
    table = NextTokens()
    drafter = begun(2, 1, 4, table)
    asked = [*PROMPT, 1, 2]
    for accepted, own in [*[(0, 1)] * 4, (1, 1), *[(0, 1)] * 4, (0, 0)]:
        assert proposed(drafter, asked) == [3, 4, 5, 6]
        drafter.accept(verdict_of(accepted), own)
    drafter.begin(text_of(PROMPT))   # does not count anew
    assert proposed(drafter, asked) == [3, 4, 5, 6]
    drafter.accept(verdict_of(0), 4)
    assert table.used_share == 0.0
    assert proposed(drafter, asked) == []


def test_a_cleared_table_learns_the_text_again() -> None:
    """At the next draft, from its beginning, once it is long enough."""
    text = [*range(100, 140), 100, 101]
    drafter = NgramMod(NgramModSettings(2, 1, 4), NextTokens())
    drafter.begin(text_of(text))
    for _ in range(6):
        assert proposed(drafter, text) == [102, 103, 104, 105]
        drafter.accept(verdict_of(0), 4)


def test_short_matches_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """Fewer than 16 tokens match too often by chance."""
    with caplog.at_level(logging.WARNING):
        NgramMod(NgramModSettings(16), NextTokens())
        assert not caplog.messages
        NgramMod(NgramModSettings(15), NextTokens())
    assert caplog.messages == ["--spec-ngram-mod-n-match 15: below 16 most drafts are wrong"]
