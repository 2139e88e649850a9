"""ngram-cache: followers of the last one to four tokens, counted in the text so far and in two files of statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvs_core.settings.drafters import NGRAM_CACHE_DRAFT, NgramCacheSettings
from kvs_core.speculative.drafter import NO_DRAFT, Draft
from kvs_core.speculative.lookup_file import MAX_GRAM, Followers, Gram, Lookup, read_lookup
from kvs_core.speculative.text import Text, places
from kvs_core.speculative.verdict import Verdict

STATIC_GRAM = 2   # the size of the n-grams that the static file is asked for

# Per size of n-gram, 1 to 4: least number of followers seen, least share of the best one in percent.
_LAX = ((2, 66), (2, 50), (1, 50), (1, 50))
_STRICT = ((4, 75), (3, 66), (2, 66), (2, 66))
_STATIC_WEIGHT = 100
_NO_FOLLOWERS: Followers = {}
_SEAM = -1   # stands between two parts of the text that were learnt one after the other


class SeenText:
    """Followers counted in the text so far, when asked: parts of it behind each other, seams between them.

    The answer is the same as of a map from n-gram to counts that grew part by part, for 4 bytes a token.
    """

    __slots__ = ("_size", "_tokens")

    def __init__(self) -> None:
        self._tokens = np.full(1024, _SEAM, np.int32)
        self._size = 0

    def learn(self, part: Text) -> None:
        """One more part, by itself: no n-gram reaches from one into the next. A lone token holds none."""
        if part.size < 2:
            return
        end = self._size + part.size + 1
        if end > self._tokens.size:
            grown = np.full(2 * end, _SEAM, np.int32)
            grown[: self._size] = self._tokens[: self._size]
            self._tokens = grown
        self._tokens[self._size : end - 1] = part
        self._size = end

    def followers(self, gram: Gram) -> Followers:
        """Token -> how often it followed ``gram``, in the order of first times."""
        tokens = self._tokens[: self._size]
        found = places(tokens, np.array(gram, np.int32), 0, tokens.size) + len(gram)
        counts = Counter(tokens[found[found < tokens.size]].tolist())
        counts.pop(_SEAM, None)
        return counts


class NgramCache:
    """Drafts up to eight tokens, one after the other: from the text so far if it is sure enough, else from the dynamic
    file, else from the static one, which also weighs what the other two say.

    The text is learnt in parts, each as long as what was new when a draft was asked for: in rounds of one token that
    is one token, from which nothing can be learnt. What is learnt stays for later requests; of those, only what is
    longer than all before is learnt.
    """

    def __init__(self, settings: NgramCacheSettings, *, n_vocab: int) -> None:
        """SettingsError for a file that cannot be read, or counts tokens beyond ``n_vocab``."""
        self._static: Lookup = {} if settings.static is None else read_lookup(settings.static, n_vocab)
        self._dynamic: Lookup = {} if settings.dynamic is None else read_lookup(settings.dynamic, n_vocab)
        self._seen = SeenText()
        self._learnt = 0   # tokens

    @property
    def name(self) -> str:
        return "ngram-cache"

    def begin(self, prompt: Text) -> None:
        """Nothing is forgotten, and learning waits for the first draft."""

    def propose(self, text: Text, limit: int) -> Draft:
        """See the class, and ``Drafter``."""
        if self._learnt < text.size:
            self._seen.learn(text[self._learnt :])
            self._learnt = text.size
        tail = text[-MAX_GRAM:].tolist()
        known = len(tail)
        while len(tail) - known < NGRAM_CACHE_DRAFT and (token := self._next(tail)) is not None:
            tail.append(token)
        drafted = tuple(tail[known:])
        return Draft(drafted, self.name) if drafted else NO_DRAFT

    def accept(self, verdict: Verdict, drafted: int) -> None:
        """Nothing is learnt from it: the text is."""

    def _next(self, tail: Sequence[int]) -> int | None:
        """The token that may follow ``tail``, the last tokens, four where there are so many."""
        if len(tail) < STATIC_GRAM:
            return None
        grams = [tuple(tail[-size:]) for size in range(1, min(MAX_GRAM, len(tail)) + 1)]
        static = self._static.get(grams[STATIC_GRAM - 1], _NO_FOLLOWERS)
        token = _sure(grams, self._seen.followers, static, _LAX)
        if token is None:
            token = _sure(grams, lambda gram: self._dynamic.get(gram, _NO_FOLLOWERS), static, _STRICT)
        if token is None:
            least, percent = _LAX[STATIC_GRAM - 1]
            token = _best(static, _NO_FOLLOWERS, least, percent)
        return token


def _sure(
    grams: Sequence[Gram], followers: Callable[[Gram], Followers], static: Followers, bounds: Sequence[tuple[int, int]]
) -> int | None:
    """The token of the largest of ``grams``, of sizes 1, 2, ..., whose followers pass the bounds of its size."""
    for gram in reversed(grams):
        least, percent = bounds[len(gram) - 1]
        token = _best(followers(gram), static, least, percent)
        if token is not None:
            return token
    return None


def _best(followers: Followers, static: Followers, least: int, percent: int) -> int | None:
    """The follower with the best score, if all are ``least`` or more and it is at least ``percent`` of them.

    Of equal scores the one first seen last is taken: llama.cpp takes the first in the order of a hash map, which is
    that order as long as the map is small.
    """
    total = sum(followers.values())
    if total < least or not followers:
        return None
    token = max(reversed(followers), key=lambda each: followers[each] * _weight(static, each))
    return token if 100 * followers[token] >= percent * total else None


def _weight(static: Mapping[int, int], token: int) -> int:
    return _STATIC_WEIGHT * static[token] if token in static else 1
