"""How a layer's history is cut into slabs: smaller ones first, so that a large context costs little until it is used.

    slab 0: 16 pages   slab 1: 48   slab 2 and on: 64 each

Slabs hold whole groups. A run never crosses a slab's end, since one copy needs one contiguous source; the oldest pages
are streamed first, so a history that began with many small slabs would pay for them with copies in every step.

A layer that slides has slabs of one group each: it streams nothing, and gives back what its window has passed.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvs_core.paging.geometry import GROUP_PAGES

_FIRST = 4 * GROUP_PAGES
_FULL = 16 * GROUP_PAGES


@dataclass(frozen=True, slots=True)
class Slab:
    """Slab ``index`` of a layer holds pages [first_page, first_page + pages)."""

    index: int
    first_page: int
    pages: int

    @property
    def end_page(self) -> int:
        """The first page behind the slab."""
        return self.first_page + self.pages


def slab(index: int, *, slides: bool = False) -> Slab:
    """The slab of that number."""
    if slides:
        return Slab(index, index * GROUP_PAGES, GROUP_PAGES)
    if index == 0:
        return Slab(0, 0, _FIRST)
    if index == 1:
        return Slab(1, _FIRST, _FULL - _FIRST)
    return Slab(index, (index - 1) * _FULL, _FULL)


def slab_of(page: int, *, slides: bool = False) -> Slab:
    """The slab that holds ``page``."""
    if slides:
        return slab(page // GROUP_PAGES, slides=True)
    return slab(0) if page < _FIRST else slab(page // _FULL + 1)
