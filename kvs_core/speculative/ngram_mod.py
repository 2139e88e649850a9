"""ngram-mod: a table of hashed n-grams and the token that followed each last. The n-grams themselves are not kept, so
two that share a slot spoil each other's drafts, never the text."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

import numpy as np

from kvs_core.settings.drafters import NgramModSettings
from kvs_core.speculative.drafter import NO_DRAFT, Draft
from kvs_core.speculative.text import Text
from kvs_core.speculative.verdict import Verdict

LOGGER = logging.getLogger(__name__)

TABLE_SLOTS = 4 << 20
_MULTIPLIER = 6364136223846793005
_MASK = (1 << 64) - 1
_EMPTY = -1
_FULLEST = 0.25       # a table with a larger part in use is cleared when a prompt has been learnt
_LEARN_STEP = 32      # new text is learnt when it is longer than this
_POOR_SHARE = 0.25    # a draft of which less is accepted is a poor one
_POOR_ROUNDS = 5      # so many in a row clear the table
_SHORT_MATCH = 16


class NextTokens:
    """The table: [TABLE_SLOTS] int32, the token that follows an n-gram; 16 MiB.

    The slot of an n-gram is r = r * 6364136223846793005 + token from 0 in 64 bits, modulo the number of slots. A table
    may serve several sequences in turn; it outlives requests.
    """

    __slots__ = ("_tokens",)

    def __init__(self) -> None:
        self._tokens = np.full(TABLE_SLOTS, _EMPTY, np.int32)

    @property
    def used_share(self) -> float:
        """Part of the slots that hold a token."""
        return int(np.count_nonzero(self._tokens != _EMPTY)) / TABLE_SLOTS

    def clear(self) -> None:
        """Forget everything."""
        self._tokens.fill(_EMPTY)

    def learn(self, text: Text, n: int, first: int, end: int) -> None:
        """What follows the n-grams of ``text`` that start in [first, end); a later one overwrites its slot."""
        tokens = text[first:].astype(np.uint64)
        count = end - first
        hashes = np.zeros(count, np.uint64)
        for offset in range(n):
            hashes = hashes * np.uint64(_MULTIPLIER) + tokens[offset : offset + count]
        self._tokens[(hashes % TABLE_SLOTS).astype(np.intp)] = text[first + n : end + n]

    def follower(self, gram: Iterable[int]) -> int | None:
        """The token that followed the n-gram last."""
        slot = 0
        for token in gram:
            slot = (slot * _MULTIPLIER + token) & _MASK
        token = int(self._tokens[slot % TABLE_SLOTS])
        return None if token == _EMPTY else token


class NgramMod:
    """Looks up the last ``n_match`` tokens, appends what it finds, and goes on from there; ``n_min`` to ``n_max``
    tokens. Five poor drafts in a row clear the table."""

    def __init__(self, settings: NgramModSettings, table: NextTokens) -> None:
        self._settings = settings
        self._table = table
        self._learnt = 0         # n-grams that start before this are in the table
        self._drafted = 0        # tokens of the last draft, before it was cut
        self._poor_rounds = 0
        if settings.n_match < _SHORT_MATCH:
            LOGGER.warning("--spec-ngram-mod-n-match %d: below %d most drafts are wrong", settings.n_match,
                           _SHORT_MATCH)

    @property
    def name(self) -> str:
        return "ngram-mod"

    def begin(self, prompt: Text) -> None:
        """Learn the prompt; a table more than a quarter full is cleared then, the prompt with it."""
        n = self._settings.n_match
        self._learnt = self._drafted = 0
        if prompt.size < n:
            return
        self._table.learn(prompt, n, 0, prompt.size - n)
        self._learnt = prompt.size - n
        if self._table.used_share > _FULLEST:
            self._table.clear()

    def propose(self, text: Text, limit: int) -> Draft:
        """See the class, and ``Drafter``. A draft ends where the table has no token; below ``n_min`` there is none."""
        n, most = self._settings.n_match, self._settings.n_max
        run = text.size - 1
        self._drafted = 0
        if run < n:
            return NO_DRAFT
        if self._learnt + _LEARN_STEP < run:
            self._table.learn(text[:run], n, self._learnt, run - n)
            self._learnt = run - n
        window = deque(text[run + 1 - n :].tolist(), maxlen=n)
        tokens: list[int] = []
        while len(tokens) < most and (token := self._table.follower(window)) is not None:
            tokens.append(token)
            window.append(token)
        if not tokens or (len(tokens) < most and len(tokens) < self._settings.n_min):
            return NO_DRAFT
        self._drafted = len(tokens)
        return Draft(tuple(tokens), self.name)

    def accept(self, verdict: Verdict, drafted: int) -> None:
        """After a round of its own: count poor drafts, by their length before they were cut."""
        if not drafted or not self._drafted:
            return
        if verdict.accepted / self._drafted >= _POOR_SHARE:
            self._poor_rounds = 0
            return
        self._poor_rounds += 1
        if self._poor_rounds == _POOR_ROUNDS:
            self._table.clear()
            self._poor_rounds = self._learnt = 0
