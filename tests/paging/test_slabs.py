"""Slabs cut a layer's pages without gap or overlap, small ones first, in whole groups."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvs_core.paging.geometry import GROUP_PAGES
from kvs_core.paging.slabs import slab, slab_of


def test_slabs_follow_each_other() -> None:
    """16, 48, then 64 pages each, every one beginning where the last ended."""
    end = 0
    for index, pages in enumerate([16, 48] + [64] * 50):
        part = slab(index)
        assert (part.index, part.first_page, part.pages) == (index, end, pages)
        assert part.pages % GROUP_PAGES == 0
        end = part.end_page


@given(st.integers(0, 100_000))
def test_slab_of_holds_the_page(page: int) -> None:
    """The slab of a page is one of the list, and holds the page."""
    part = slab_of(page)
    assert part == slab(part.index)
    assert part.first_page <= page < part.end_page


def test_a_context_costs_at_most_a_little_more_than_it_uses() -> None:
    """Slabs that hold n pages hold fewer than 64 more, and the first 16 pages fewer than 16 more."""
    for pages in range(1, 2000):
        assert slab_of(pages - 1).end_page < pages + (16 if pages <= 16 else 64)
