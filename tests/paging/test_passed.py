"""Slides: which pages a sequence needs to go on, and how near to a place it can with those that are there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvs_core.paging.passed import Slides, first_page

PAGE = 32
windows = st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=4)   # a window of more than one token
groups = st.sets(st.integers(0, 8))


def pages_read(before: int | None, tokens: int) -> set[int]:
    """Pages with rows of the first ``tokens`` that a row behind them sees, and what shares a group with them."""
    own = tokens // PAGE
    seen = {row // PAGE for row in range(tokens) if before is None or row // PAGE >= own - before}
    return {page for page in range(-(-tokens // PAGE)) if any(page // 4 == other // 4 for other in seen)}


@given(windows, st.integers(0, 1200))
def test_what_is_needed(before: list[int | None], tokens: int) -> None:
    """All that rows behind these tokens read, in whole groups from the first one on."""
    slides = Slides(tuple(before), PAGE)
    for layer, pages in enumerate(before):
        needed = slides.needed(layer, tokens)
        assert set(needed) == pages_read(pages, tokens)
        assert {page // 4 for page in needed} == set(slides.groups(layer, tokens))


@given(windows, st.lists(groups, min_size=4, max_size=4), st.integers(0, 1200))
def test_the_nearest_place(before: list[int | None], held: list[set[int]], tokens: int) -> None:
    """The last one at which each layer that slides finds its groups; others are not asked for theirs."""
    slides = Slides(tuple(before), PAGE)

    def is_there(position: int) -> bool:
        return all(
            {page // 4 for page in pages_read(pages, position)} <= held[layer]
            for layer, pages in enumerate(before) if pages is not None
        )

    assert slides.nearest(tokens, held[: len(before)]) == max(filter(is_there, range(tokens + 1)))


def test_the_first_page() -> None:
    """Whole groups of four: of pages 9 to 11, that of page 8."""
    assert [first_page(2, page) for page in (0, 5, 6, 11)] == [0, 0, 4, 8]
    assert first_page(None, 11) == 0
