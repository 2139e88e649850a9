"""ngram-map-k and ngram-map-k4v on texts made by hand, round by round."""

from __future__ import annotations

import pytest

from kvs_core.settings.drafters import NgramMapSettings
from kvs_core.speculative.ngram_map import NgramMap
from tests.speculative.play import proposed, text_of, verdict_of

PROMPT = [0, 1, 2, 3, 4, 5, 6, 7, 8]
ASKED = [*PROMPT, 1, 2]


def begun(prompt: list[int], n: int, m: int, min_hits: int = 1, *, counts_values: bool = False) -> NgramMap:
    drafter = NgramMap(NgramMapSettings(n, m, min_hits), counts_values=counts_values)
    drafter.begin(text_of(prompt))
    return drafter


@pytest.mark.parametrize("min_hits", [1, 5])
def test_map_k_drafts_no_more_than_was_accepted(min_hits: int) -> None:
    """The length of an n-gram's drafts only shrinks, and none accepted means none for ever. Hits do not matter."""
    drafter = begun(PROMPT, 2, 3, min_hits)
    for accepted, draft in ((2, [3, 4, 5]), (2, [3, 4]), (1, [3, 4]), (0, [3])):
        assert proposed(drafter, ASKED) == draft
        drafter.accept(verdict_of(accepted), len(draft))
    assert proposed(drafter, ASKED) == []
    assert proposed(drafter, [*PROMPT, 2, 3]) == [4, 5, 6]   # another n-gram has a length of its own
    assert proposed(drafter, [*PROMPT, 7, 8]) == []          # too near to the prompt's end to be in the table


def test_another_drafters_round_teaches_nothing() -> None:
    """Only what came of its own draft changes the length."""
    drafter = begun(PROMPT, 2, 3)
    assert proposed(drafter, ASKED) == [3, 4, 5]
    drafter.accept(verdict_of(0), 0)
    assert proposed(drafter, ASKED) == [3, 4, 5]


def test_a_short_text_is_not_drafted() -> None:
    """2 n + m tokens have to stand before the last one."""
    assert proposed(begun([0, 1, 2, 3, 4, 5], 2, 3), [0, 1, 2, 3, 4, 5, 1]) == []
    assert proposed(begun([0, 1, 2, 3, 4, 5, 6], 2, 3), [0, 1, 2, 3, 4, 5, 6, 1]) == []
    assert proposed(begun([0, 1, 2, 3, 4, 5, 6], 2, 3), [0, 1, 2, 3, 4, 5, 6, 1, 2]) == [3, 4, 5]


def test_the_oldest_place_stays_in_the_table() -> None:
    """Of one learning the later place wins; what is in the table already is kept."""
    prompt = [0, 1, 2, 5, 5, 1, 2, 6, 6, 9, 9, 9, 9]
    drafter = begun(prompt, 2, 2)
    text = [*prompt, 1, 2]
    assert proposed(drafter, text) == [6, 6]
    text += [7, 7, 9, 8, 8, 8, 8, 8, 1, 2]
    assert proposed(drafter, text) == [6, 6]


def test_a_shorter_text_is_forgotten_beyond_what_both_share() -> None:
    """A prompt shorter than the last text drops keys beyond it, and their lengths; a longer one drops nothing."""
    drafter = begun(PROMPT, 2, 3)
    assert proposed(drafter, ASKED) == [3, 4, 5]
    drafter.accept(verdict_of(0), 3)
    drafter.begin(text_of([*ASKED, 3]))
    assert proposed(drafter, [*ASKED, 3, 9, 1, 2]) == []
    drafter.begin(text_of(PROMPT[:5]))     # 5 = n + m: everything is dropped
    assert proposed(drafter, [*PROMPT, 9, 1, 2]) == []   # and its own tokens are too near to its end
    drafter.begin(text_of(PROMPT))
    assert proposed(drafter, ASKED) == []
    drafter.begin(text_of([*ASKED, 9]))
    assert proposed(begun(PROMPT, 2, 3), ASKED) == [3, 4, 5]


def test_what_was_generated_is_forgotten_when_it_is_cut() -> None:
    """A prompt of the length that the text had keeps all; one token less drops the n-grams behind the old prompt."""
    text = [*PROMPT, 30, 20, 21, 22, 23, 24, 25, 26, 27, 20, 21]
    for cut, draft in ((1, []), (2, [22, 23, 24])):
        drafter = begun(PROMPT, 2, 3)
        assert proposed(drafter, text) == [22, 23, 24]
        drafter.accept(verdict_of(0), 3)
        drafter.begin(text_of(text[:-cut]))
        assert proposed(drafter, text) == draft


def test_map_k4v_drafts_what_is_seen_twice_as_often_as_the_rest() -> None:
    """The condition looks at counts; the draft is what stands behind the place found, even if it is the rarer one. The
    place found is counted again the next time."""
    prompt = [9, 1, 5, 1, 5, 1, 6, 0, 0, 0]
    drafter = begun(prompt, 1, 1, counts_values=True)
    assert proposed(drafter, [*prompt, 1]) == [6]    # 5 twice, 6 once
    assert proposed(drafter, [*prompt, 1]) == []     # 5 twice, 6 twice
    assert proposed(begun([9, 1, 5, 1, 6, 0, 0, 0], 1, 1, counts_values=True), [9, 1, 5, 1, 6, 0, 0, 0, 1]) == []


def test_map_k4v_waits_for_its_hits() -> None:
    """An n-gram has to be looked up ``min_hits`` times."""
    drafter = begun(PROMPT, 2, 3, 3, counts_values=True)
    assert [proposed(drafter, ASKED) for _ in range(3)] == [[], [], [3, 4, 5]]


def test_map_k4v_counts_four_continuations() -> None:
    """A fifth different one is not counted, so it cannot outweigh the others."""
    prompt = [9, *[token for value in (2, 3, 4, 5, 6, 6, 6, 6, 6, 6, 6, 6) for token in (1, value)], 0, 0, 0]
    drafter = begun(prompt, 1, 1, counts_values=True)
    assert proposed(drafter, [*prompt, 1]) == []
    common = [9, *[token for value in (2, 3, 4, 6, 6, 6, 6, 6, 6) for token in (1, value)], 0, 0, 0]
    assert proposed(begun(common, 1, 1, counts_values=True), [*common, 1]) == [6]


def test_map_k4v_remembers_what_was_accepted() -> None:
    """The likeliest continuation drafts no more tokens than were accepted last time."""
    drafter = begun(PROMPT, 2, 3, counts_values=True)
    for accepted, draft in ((1, [3, 4, 5]), (0, [3])):
        assert proposed(drafter, ASKED) == draft
        drafter.accept(verdict_of(accepted), len(draft))
    assert proposed(drafter, ASKED) == []
