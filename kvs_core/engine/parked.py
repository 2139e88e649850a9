"""ParkedSessions: conversations set aside in host memory, and which of them goes when it gets tight. Pure bookkeeping.

    [least recently used ... most recently used]      short ones go first, then the others, each in this order

A short one is soon read again, so it is kept where there is room, and no longer one goes for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvs_core.engine.session import TAIL_TOKENS, ParkedSession, common_prefix

_ENDING = 8          # tokens by which the end of a conversation is known again
_ENDING_TRIM = 2     # behind them, those that a template may strip
_WORTH_COPYING = 32  # tokens take about as long to copy as one takes to be read, on a GPU


class ParkedSessions:
    """At most so many bytes of them. What is dropped here is forgotten; its memory goes when nobody uses it."""

    def __init__(self, most_bytes: int, *, short_tokens: int = 0) -> None:
        """``short_tokens``: one that has fewer is short."""
        self._most_bytes = most_bytes
        self._short_tokens = short_tokens
        self._held: list[ParkedSession] = []

    def __len__(self) -> int:
        return len(self._held)

    @property
    def most_bytes(self) -> int:
        """The limit."""
        return self._most_bytes

    @property
    def size_bytes(self) -> int:
        """Host memory. What several of them share counts once."""
        return _size_bytes(self._held)

    def room_bytes(self, tokens: int) -> int:
        """The most that one of so many tokens may take, if all go that may go for it."""
        if tokens >= self._short_tokens:
            return self._most_bytes
        return self._most_bytes - _size_bytes(held for held in self._held if not self._is_short(held))

    def covers(self, tokens: Sequence[int]) -> bool:
        """Whether one of them gives all that a conversation of ``tokens`` would."""
        return any(_covers(held, tokens) for held in self._held)

    def add(self, parked: ParkedSession) -> int:
        """Hold one, the most recently used; how many had to go for it. Those that it gives all of go too, uncounted.

        One for which there is no room, see ``room_bytes``, is not held, and nothing changes.
        """
        kept = [*(held for held in self._held if not _covers(parked, held.tokens)), parked]
        before = len(kept)
        while _size_bytes(kept) > self._most_bytes:
            first = self._first_to_go(kept, len(parked.tokens))
            if first is None or first is parked:
                return 0
            kept.remove(first)
        self._held = kept
        return before - len(kept)

    def best(self, prompt: Sequence[int]) -> ParkedSession | None:
        """The one that gives most of ``prompt``; of equals the one that loses least by it, then the last used. None
        where none gives anything."""
        best = max(reversed(self._held), key=lambda held: gain(held.reusable(prompt), held.tokens), default=None)
        return None if best is None or best.reusable(prompt) == 0 else best

    def remove(self, parked: ParkedSession) -> None:
        """Let go of one: it is taken up again."""
        self._held.remove(parked)

    def touch(self, parked: ParkedSession) -> None:
        """It has been used."""
        self._held.remove(parked)
        self._held.append(parked)

    def drop_one(self, for_tokens: int | None = None, *, but: ParkedSession | None = None) -> bool:
        """Forget the one that goes first; False if there is none. ``for_tokens``: for one that has so many. ``but``:
        one that stays, since somebody reads it, and its memory would too."""
        first = self._first_to_go([held for held in self._held if held is not but], for_tokens)
        if first is None:
            return False
        self._held.remove(first)
        return True

    def _first_to_go(self, held: Sequence[ParkedSession], for_tokens: int | None) -> ParkedSession | None:
        short = next(filter(self._is_short, held), None)
        if short is not None or (for_tokens is not None and for_tokens < self._short_tokens):
            return short
        return held[0] if held else None

    def _is_short(self, held: ParkedSession) -> bool:
        return len(held.tokens) < self._short_tokens


def gain(reused: int, tokens: Sequence[int]) -> tuple[int, float]:
    """What going on with a conversation is worth, to be compared: tokens reused, and their share of all it has."""
    return reused, reused / max(1, len(tokens))


def parts_from(tokens: Sequence[int], prompt: Sequence[int], reused: int) -> bool:
    """Whether a prompt that can reuse the first ``reused`` tokens of a conversation leaves it for another one, so that
    both have to be kept.

    It does where more than half of it would be lost. It also does where it goes on with tokens of its own and what
    would be lost is more than a small part: conversations that share long instructions must not take turns in cutting
    each other short. It does not where it tells how the conversation ended, as when a template drops thoughts.
    """
    lost, common = len(tokens) - reused, common_prefix(tokens, prompt)
    if common == len(tokens) or _tells(prompt[common:], tokens[common:]):
        return False
    has_its_own = len(prompt) - common > TAIL_TOKENS
    return lost > reused or (has_its_own and _WORTH_COPYING * lost > reused)


def _tells(text: Sequence[int], lost: Sequence[int]) -> bool:
    """Whether the end of what is lost occurs in ``text``."""
    end = list(lost[-_ENDING - _ENDING_TRIM : -_ENDING_TRIM])
    if len(end) < _ENDING:
        return False
    text = list(text)
    return any(text[at : at + _ENDING] == end for at in range(len(text) - _ENDING + 1) if text[at] == end[0])


def _covers(parked: ParkedSession, tokens: Sequence[int]) -> bool:
    return parked.reusable((*tokens, -1)) == len(tokens)


def _size_bytes(sessions: Iterable[ParkedSession]) -> int:
    return sum(part.size_bytes for part in {part for held in sessions for part in held.parts})
