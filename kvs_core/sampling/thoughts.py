"""Constraints that know where a model's thoughts begin and end: a limit on their length, rules for what follows."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import numpy as np

from kvs_core.sampling.constrained import Constraint, Mask
from kvs_core.sampling.vocab import VocabView


class AfterText:
    """A constraint that begins behind some text: behind that which ends the thoughts, or opens a tool call."""

    def __init__(self, constraint: Constraint, vocab: VocabView, *, text: str, exactly: bool = False) -> None:
        """``exactly``: it begins only where a token ends with the text, since what follows it is constrained too."""
        self._constraint = constraint
        self._vocab = vocab
        self._text = text.encode()
        self._exactly = exactly
        self._tail = b""
        self._begun = False

    def allowed(self) -> Mask | None:
        """Anything, before the text."""
        return self._constraint.allowed() if self._begun else None

    def accept(self, token: int, /) -> None:
        """Take note of the next token of the text."""
        if self._begun:
            self._constraint.accept(token)
            return
        self._tail += self._vocab.token_bytes(token, special=True)
        self._begun = self._tail.endswith(self._text) if self._exactly else self._text in self._tail
        self._tail = self._tail[-len(self._text) :]


class ThoughtLimit:
    """Ends thoughts that have taken ``limit`` tokens, by ``closing``; 0: at once.

    idle ─ start tag ─> counting ─ end tag ─> idle
                        counting ─ limit reached, no character open ─> closing, token by token ─> idle
    """

    def __init__(
        self, limit: int, vocab: VocabView, *, n_vocab: int, start: str, end: str, closing: Sequence[int], is_open: bool
    ) -> None:
        """``is_open``: the prompt ends inside of thoughts. ``closing``: tokens of a message, then of the end tag."""
        self._limit = limit
        self._vocab = vocab
        self._n_vocab = n_vocab
        self._start, self._end = start.encode(), end.encode()
        self._closing = tuple(closing)
        self._left: list[int] = []
        self._tail = b""
        self._counting = is_open
        self._count = 0
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._check()

    def allowed(self) -> Mask | None:
        """One token while thoughts are being closed."""
        if not self._left:
            return None
        mask = np.zeros(self._n_vocab, np.bool_)
        mask[self._left[0]] = True
        return mask

    def accept(self, token: int, /) -> None:
        """Take note of the next token of the text."""
        if self._left:
            del self._left[0]
            return
        piece = self._vocab.token_bytes(token, special=True)
        self._characters.decode(piece)
        self._tail += piece
        tag = self._end if self._counting else self._start
        if tag in self._tail:
            self._counting, self._count, self._tail = not self._counting, 0, b""
        elif self._counting:
            self._count += 1
        self._tail = self._tail[-max(len(self._start), len(self._end)) :]
        self._check()

    def _check(self) -> None:
        if self._counting and self._count >= self._limit and not self._characters.getstate()[0]:
            self._left = list(self._closing)
            self._counting, self._count, self._tail = False, 0, b""
