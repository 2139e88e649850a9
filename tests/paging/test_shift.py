"""Page by page, a shift does what deleting rows of one list does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.paging.shift import PageMove, plan_shift

PAGE = 8


@given(st.data())
def test_moves_delete_rows_of_a_list(data: st.DataObject) -> None:
    """Done one after the other, in place, or each from pages as they were before: the rows that are left, in order. No
    row is written twice, and pages that are written follow each other."""
    tokens = data.draw(st.integers(0, 6 * PAGE), "tokens")
    keep = data.draw(st.integers(0, tokens), "keep")
    discard = data.draw(st.integers(0, tokens - keep), "discard")
    before = list(range(6 * PAGE))
    moves = plan_shift(keep, discard, tokens, PAGE)
    after = before.copy()
    written: list[int] = []
    for move in moves:
        assert 1 <= len(move.sources) <= 2
        assert move.sources.start >= move.page
        assert 0 <= move.row < move.row + move.rows <= PAGE
        first = move.sources.start * PAGE + move.source_row
        assert (first + move.rows - 1) // PAGE == move.sources[-1]
        target = move.page * PAGE + move.row
        taken = after[first : first + move.rows]
        assert taken == before[first : first + move.rows]
        after[target : target + move.rows] = taken
        written += range(target, target + move.rows)
    left = tokens - discard
    assert after[:left] == before[:keep] + before[keep + discard : tokens]
    assert after[left:] == before[left:]
    assert written == (list(range(keep, left)) if discard else [])
    pages = [move.page for move in moves]
    assert pages == list(range(pages[0], pages[-1] + 1) if pages else [])


def test_a_shift_in_numbers() -> None:
    """30 rows in pages of 8, of which 5 stay and 7 go: 18 move, into three pages."""
    assert plan_shift(5, 7, 30, 8) == (
        PageMove(0, 5, 3, range(1, 2), 4), PageMove(1, 0, 8, range(1, 3), 7), PageMove(2, 0, 7, range(2, 4), 7),
    )
    assert plan_shift(5, 0, 30, 8) == plan_shift(5, 25, 30, 8) == ()


def test_rows_that_are_not_there_are_refused() -> None:
    """An assertion with the numbers."""
    with pytest.raises(AssertionError, match="30"):
        plan_shift(20, 11, 30, 8)
