"""Finds control and user-defined tokens inside text.

Their texts are cut out before anything else, longest first over the whole text, as llama.cpp does. Where two of
them overlap the longer one wins, wherever it starts; that is not what a search from left to right would give.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


class SpecialSplitter:
    """Cuts text at a fixed set of token texts."""

    def __init__(self, tokens: Iterable[tuple[str, int]]) -> None:
        """``tokens``: text and id of each, texts not empty."""
        # Length counts in bytes; equal lengths are tried in the order of ids.
        self._ordered = sorted(tokens, key=lambda token: (-len(token[0].encode()), token[1]))
        self._ids = dict(self._ordered)
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[0], set()).add(len(text))
        self._begins = {text[:2] for text in self._ids}
        self._lengths = {first: sorted(of_first, reverse=True) for first, of_first in lengths.items()}
        firsts = "".join(map(re.escape, sorted(lengths)))
        self._first = re.compile(f"[{firsts}]") if lengths else None

    def split(self, text: str) -> list[str | int]:
        """``text`` as pieces of ordinary text, none empty, and the ids of the special tokens between them."""
        pieces: list[str | int] = []
        done = 0
        for start, end, token in self._find(text):
            if start > done:
                pieces.append(text[done:start])
            pieces.append(token)
            done = end
        if done < len(text):
            pieces.append(text[done:])
        return pieces

    def _find(self, text: str) -> list[tuple[int, int, int]]:
        """(start, end, id) of every token to cut out, in order.

        Occurrences that overlap, directly or through others, form a cluster. In most clusters one occurrence holds
        all others; only the rest need the search by length.
        """
        found: list[tuple[int, int, int]] = []
        match = self._first.search(text) if self._first else None
        while match and self._first:
            start = match.start()
            end = first_end = self._longest_at(text, start)
            at = start + 1
            while at < end:
                inner = self._first.search(text, at, end)
                if inner is None:
                    break
                end = max(end, self._longest_at(text, inner.start()))
                at = inner.start() + 1
            if end > first_end > start:
                found += self._find_by_length(text, start, end)
            elif end > start:
                found.append((start, end, self._ids[text[start:end]]))
            match = self._first.search(text, max(end, start + 1))
        return found

    def _longest_at(self, text: str, start: int) -> int:
        """Where the longest token that begins at ``start`` ends; ``start`` if none does."""
        begin = text[start : start + 2]
        if begin not in self._begins and begin[0] not in self._begins:
            return start
        for length in self._lengths[begin[0]]:
            if text[start : start + length] in self._ids:
                return start + length
        return start

    def _find_by_length(self, text: str, start: int, end: int) -> list[tuple[int, int, int]]:
        """The same for one cluster, token by token, in the ranges that the longer ones have left."""
        found: list[tuple[int, int, int]] = []
        free = [(start, end)]
        for token, token_id in self._ordered:
            if text.find(token, start, end) < 0:
                continue
            left_over: list[tuple[int, int]] = []
            for low, high in free:
                while (at := text.find(token, low, high)) >= 0:
                    left_over.append((low, at))
                    found.append((at, at + len(token), token_id))
                    low = at + len(token)
                left_over.append((low, high))
            free = left_over
        return sorted(found)
