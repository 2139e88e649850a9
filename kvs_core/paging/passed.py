"""What of a layer's history a sequence needs that goes on somewhere, where layers slide. Pure.

    | passed: nobody reads it | window | what is written |      of a layer that slides, whole groups
                              ^ first page                     of any other layer: 0
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvs_core.paging.geometry import GROUP_PAGES
from kvs_core.units import ceil_div


def first_page(before: int | None, writable_page: int) -> int:
    """The first page that rows see which are written from ``writable_page`` on, whole groups.

    before  pages before a row's own that it may see; None: all
    """
    return 0 if before is None else max(0, writable_page - before) // GROUP_PAGES * GROUP_PAGES


@dataclass(frozen=True, slots=True)
class Slides:
    """By layer, pages before a row's own that it may see; None: all."""

    before: tuple[int | None, ...]
    page_tokens: int

    def needed(self, layer: int, tokens: int) -> range:
        """The pages that a sequence has to find to go on behind ``tokens`` tokens."""
        pages = ceil_div(tokens, self.page_tokens)
        return range(min(first_page(self.before[layer], tokens // self.page_tokens), pages), pages)

    def groups(self, layer: int, tokens: int) -> range:
        """The groups that these pages lie in."""
        pages = self.needed(layer, tokens)
        return range(pages.start // GROUP_PAGES, ceil_div(pages.stop, GROUP_PAGES))

    def groups_by_layer(self, positions: Collection[int]) -> list[Collection[int]]:
        """By layer, the groups that any of these positions needs; of a layer that sees everything none are named."""
        first_like = {before: layer for layer, before in enumerate(self.before) if before is not None}
        groups = {
            before: {group for position in positions for group in self.groups(layer, position)}
            for before, layer in first_like.items()
        }
        return [() if before is None else groups[before] for before in self.before]

    def nearest(self, tokens: int, held: Sequence[Collection[int]]) -> int:
        """The last position, none behind ``tokens``, at which a sequence finds what it needs.

        held  by layer, the groups that are there; of a layer that sees everything nothing is looked at
        """
        differing = {(before, frozenset(held[layer])): layer for layer, before in enumerate(self.before)
                     if before is not None}
        for page in range(tokens // self.page_tokens, -1, -1):
            first = page * self.page_tokens
            for position in (min(tokens, first + self.page_tokens - 1), first):
                if all(groups.issuperset(self.groups(layer, position)) for (_, groups), layer in differing.items()):
                    return position
        raise AssertionError("nothing is needed to begin anew")
