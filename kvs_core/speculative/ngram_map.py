"""ngram-map-k and ngram-map-k4v: n-grams are found through a table of positions, and each remembers how it did.

    table      slot of the hash of n tokens ─> a position where they stand; 0: none. The first writer keeps a slot
    keys       n-grams that were looked up and found, by a position of theirs; per key up to four continuations

A position is only ever trusted after its tokens have been compared, so what a shorter or other text leaves behind costs
drafts, never correctness. The arithmetic is llama.cpp's, which decides which of two equal n-grams is found.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvs_core.settings.drafters import NgramMapSettings
from kvs_core.speculative.drafter import NO_DRAFT, Draft
from kvs_core.speculative.text import Places, Text, last_place, places, same
from kvs_core.speculative.verdict import Verdict

TABLE_SLOTS = 1 << 18
_MULTIPLIER = np.uint32(2654435761)
_MOST_COUNTED = 16380
_VALUES = 4


@dataclass(slots=True)
class _Value:
    """A continuation of a key. start: of its m tokens; count: times seen, 0: unused; accepted: of its last draft."""

    accepted: int
    start: int = 0
    count: int = 0


@dataclass(slots=True)
class _Key:
    """An n-gram. start: where it stands; hits: times it was looked up and found; counted: where counting goes on."""

    start: int
    values: list[_Value]
    hits: int = 0
    counted: int = 0


class NgramMap:
    """What followed the last ``size_n`` tokens when they stood before, as long as such drafts were accepted.

    map-k    drafts no more tokens of an n-gram than were accepted last time: a length that only shrinks, down to none
    map-k4v  counts up to four continuations, and drafts where one is seen at least twice as often as the others
             together; the tokens are those behind the place found, whichever continuation that is
    """

    def __init__(self, settings: NgramMapSettings, *, counts_values: bool) -> None:
        """``counts_values``: map-k4v, else map-k."""
        self._size_n = settings.size_n
        self._size_m = settings.size_m
        self._min_hits = settings.min_hits
        self._counts_values = counts_values
        self._table = np.zeros(TABLE_SLOTS, np.uint32)
        self._keys: list[_Key] = []
        self._indexed = 0        # positions up to here are in the table, or are left out for good
        self._last_run = 0       # tokens before the last one, when it was asked last
        self._prompt = 0         # tokens of the last prompt
        self._drafted: _Value | None = None

    @property
    def name(self) -> str:
        return "ngram-map-k4v" if self._counts_values else "ngram-map-k"

    def begin(self, prompt: Text) -> None:
        """Nothing is forgotten unless the text has become shorter; then all that lies beyond what both share, by
        length: the two are not compared."""
        if prompt.size < self._last_run:
            self._forget(self._common(prompt.size))
        self._last_run = self._prompt = prompt.size

    def propose(self, text: Text, limit: int) -> Draft:
        """See the class, and ``Drafter``."""
        n, m = self._size_n, self._size_m
        self._drafted = None
        run = text.size - 1
        if run < 2 * n + m:
            return NO_DRAFT
        self._last_run = run
        gram = text[run + 1 - n :]
        match = self._find(text, gram)
        self._index(text)
        if match is None:
            return NO_DRAFT
        key = self._key_of(text, gram, match)
        key.hits = min(key.hits + 1, _MOST_COUNTED)
        value = self._likeliest(text, gram, key, match) if self._counts_values else key.values[0]
        if value is None:
            return NO_DRAFT
        self._drafted = value
        count = min(m, value.accepted)
        return Draft(tuple(text[match + n : match + n + count].tolist()), self.name)

    def accept(self, verdict: Verdict, drafted: int) -> None:
        """After a round of its own the n-gram remembers how many tokens were accepted."""
        if drafted and self._drafted is not None:
            self._drafted.accepted = verdict.accepted

    def _common(self, prompt: int) -> int:
        """The first position of what is forgotten when a prompt is shorter than the text was."""
        if self._prompt <= prompt:
            return self._prompt
        return max(prompt - self._size_n - self._size_m, 0)

    def _forget(self, cut: int) -> None:
        self._table[self._table >= cut] = 0
        self._indexed = max(cut - 1, 0)
        self._keys = [key for key in self._keys if key.start < cut]
        if not self._counts_values:
            return
        for key in self._keys:
            kept = [value for value in key.values if value.count and value.start < cut]
            key.values = kept + [_Value(self._size_m) for _ in range(_VALUES - len(kept))]
        self._keys = [key for key in self._keys if key.values[0].count]

    def _ranges(self, run: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """First and last of the positions that are not indexed yet: those of the prompt, and those of what followed,
        without the prompt's last n + m; either may be empty."""
        reach = self._size_n + self._size_m + 1
        return ((self._indexed + 1, min(self._prompt, run) - reach),
                (max(self._indexed, self._prompt) + 1, run - reach))

    def _find(self, text: Text, gram: Text) -> int | None:
        """A place of ``gram``: the table's, else the last one in the prompt that is not indexed yet, else the last one
        behind it."""
        run = text.size - 1
        place = int(self._table[_slots(gram, 0, 0, self._size_n)[0]])
        if 0 < place < run - self._size_n - self._size_m - 1 and same(text, place, gram):
            return place
        for first, last in self._ranges(run):
            found = last_place(text, gram, first, last)
            if found is not None:
                return found
        return None

    def _index(self, text: Text) -> None:
        """Put what is not indexed yet into the table. Of two positions of one slot the later wins, unless the slot was
        taken before."""
        run = text.size - 1
        for first, last in self._ranges(run):
            slots = _slots(text, first, last, self._size_n)
            free = np.flatnonzero(self._table[slots] == 0)
            self._table[slots[free]] = first + free   # ascending: the last of equal slots stays
        self._indexed = max(self._indexed, run - self._size_n - self._size_m - 1)

    def _key_of(self, text: Text, gram: Text, match: int) -> _Key:
        """The first key whose tokens are ``gram``; a new one, standing at ``match``, if there is none."""
        starts = np.fromiter((key.start for key in self._keys), np.intp, len(self._keys))
        equal = np.flatnonzero(starts <= text.size - gram.size)
        for offset in range(gram.size - 1, -1, -1):
            equal = equal[text[starts[equal] + offset] == gram[offset]]
        if equal.size:
            return self._keys[int(equal[0])]
        key = _Key(match, [_Value(self._size_m) for _ in range(_VALUES)])
        self._keys.append(key)
        return key

    def _likeliest(self, text: Text, gram: Text, key: _Key, match: int) -> _Value | None:
        """Count the continuations up to ``match``; the one that counts for twice the rest together, if there is one.

        The continuation at ``match`` is counted again the next time.
        """
        if key.hits < self._min_hits:
            return None
        for start in places(text, gram, key.counted, match).tolist():
            self._count(text, key, start + self._size_n)
        key.counted = match
        best = max(key.values, key=lambda value: value.count)
        others = sum(value.count for value in key.values) - best.count
        return None if others > 0 and best.count < 2 * others else best

    def _count(self, text: Text, key: _Key, start: int) -> None:
        """One more of the continuation that stands at ``start``; a fifth different one is not counted."""
        tokens = text[start : start + self._size_m]
        for value in key.values:
            if not value.count:
                value.start = start
            elif not same(text, value.start, tokens):
                continue
            value.count = min(value.count + 1, _MOST_COUNTED)
            return


def _slots(text: Text, first: int, last: int, n: int) -> Places:
    """Table slots of the n-grams that start in [first, last]: h = h * 2654435761 + token from 0, in 32 bits."""
    count = max(last - first + 1, 0)
    hashes = np.zeros(count, np.uint32)
    tokens = text.view(np.uint32)
    for offset in range(first, first + n):
        hashes = hashes * _MULTIPLIER + tokens[offset : offset + count]
    return (hashes % TABLE_SLOTS).astype(np.intp)
