"""How a layer's history is cut into slabs: small ones first, so that a large context costs nothing until it is used.

    slab 0: 4 pages   slab 1: 8   slab 2: 16   slab 3: 32   slab 4 and on: 64 each

Slabs hold whole groups. A run never crosses a slab's end, since one copy needs one contiguous source.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvs_core.paging.geometry import GROUP_PAGES

_DOUBLINGS = 4
_LARGEST = GROUP_PAGES << _DOUBLINGS
_DOUBLED = GROUP_PAGES * ((1 << _DOUBLINGS) - 1)   # pages in the slabs that are smaller than the largest


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


def slab(index: int) -> Slab:
    """The slab of that number."""
    if index < _DOUBLINGS:
        return Slab(index, GROUP_PAGES * ((1 << index) - 1), GROUP_PAGES << index)
    return Slab(index, _DOUBLED + (index - _DOUBLINGS) * _LARGEST, _LARGEST)


def slab_of(page: int) -> Slab:
    """The slab that holds ``page``."""
    if page >= _DOUBLED:
        return slab(_DOUBLINGS + (page - _DOUBLED) // _LARGEST)
    return slab((page // GROUP_PAGES + 1).bit_length() - 1)
