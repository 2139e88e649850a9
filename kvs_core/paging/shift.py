"""What moves where when a cache forgets rows in its middle, page by page.

    rows    | 0 .. keep | dropped | what moves down ....... |
    rows    | 0 .. keep | what moves down ....... |

In ascending order of pages, what a page takes lies in none that is done.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvs_core.units import ceil_div


@dataclass(frozen=True, slots=True)
class PageMove:
    """Rows that come together in one page.

    page, row    rows [row, row + rows) of ``page`` are written; its others keep their bytes
    sources      the one or two consecutive pages that the rows come from: from row ``source_row`` of the first one on
    """

    page: int
    row: int
    rows: int
    sources: range
    source_row: int


def plan_shift(keep: int, discard: int, tokens: int, page_tokens: int) -> tuple[PageMove, ...]:
    """The moves that drop the rows [keep, keep + discard) of ``tokens`` rows, in ascending order of consecutive pages.

    () where nothing moves. A page takes from itself or from pages behind it.
    """
    assert 0 <= keep <= keep + discard <= tokens, (keep, discard, tokens)
    left = tokens - discard
    if discard == 0 or keep == left:
        return ()
    moves = []
    for page in range(keep // page_tokens, ceil_div(left, page_tokens)):
        first, end = max(keep, page * page_tokens), min(left, (page + 1) * page_tokens)
        source, source_row = divmod(first + discard, page_tokens)
        sources = range(source, ceil_div(end + discard, page_tokens))
        moves.append(PageMove(page, first - page * page_tokens, end - first, sources, source_row))
    return tuple(moves)
