"""LogicalCache: how far one sequence's KV has come. All its attention layers advance together.

    [0, published)           in the host history
    [published, committed)   only in resident pages, which are dirty
    [committed, reserved)    the rows of the open step; settle() keeps or drops them
"""

from __future__ import annotations

from dataclasses import dataclass

from kvs_core.errors import ContextError


@dataclass(frozen=True, slots=True)
class Frontiers:
    """0 <= published <= committed <= reserved <= capacity, in tokens."""

    published: int
    committed: int
    reserved: int


class LogicalCache:
    """The frontiers of one cache and their legal moves:

        reserve(n)     no step open               reserved = committed + n
        settle(keep)   a step open, keep <= n     committed += keep, reserved = committed
        publish(t)     t <= committed             published = max(published, t)
        truncate(t)    no step open               committed = t, published = min(published, t)
        restore(t)     empty, t <= capacity       committed = published = t

    Any other move raises and changes nothing.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self._frontiers = Frontiers(0, 0, 0)

    @property
    def frontiers(self) -> Frontiers:
        """The three frontiers now."""
        return self._frontiers

    @property
    def committed(self) -> int:
        """Tokens whose rows count."""
        return self._frontiers.committed

    @property
    def published(self) -> int:
        """Tokens whose rows are in the host history."""
        return self._frontiers.published

    @property
    def reserved(self) -> int:
        """Tokens including those of the open step."""
        return self._frontiers.reserved

    def reserve(self, rows: int) -> range:
        """Open a step of ``rows`` rows and return their positions; ``ContextError`` if they do not fit."""
        now = self._frontiers
        assert now.reserved == now.committed, "a step is open already"
        assert rows >= 1, rows
        if now.committed + rows > self.capacity_tokens:
            raise ContextError(
                f"{now.committed + rows} tokens exceed the context of {self.capacity_tokens}; raise --ctx-size",
                prompt_tokens=now.committed + rows,
                context_tokens=self.capacity_tokens,
            )
        self._frontiers = Frontiers(now.published, now.committed, now.committed + rows)
        return range(now.committed, now.committed + rows)

    def settle(self, keep: int) -> None:
        """Close the step: its first ``keep`` rows count, the rest never were."""
        now = self._frontiers
        assert now.reserved > now.committed, "no step is open"
        assert 0 <= keep <= now.reserved - now.committed, (keep, now)
        self._frontiers = Frontiers(now.published, now.committed + keep, now.committed + keep)

    def publish(self, tokens: int) -> None:
        """The rows of [0, tokens) are in the host history."""
        now = self._frontiers
        assert 0 <= tokens <= now.committed, (tokens, now)
        self._frontiers = Frontiers(max(now.published, tokens), now.committed, now.reserved)

    def restore(self, tokens: int) -> None:
        """The rows of [0, tokens) have come into the host history from elsewhere."""
        assert self._frontiers == Frontiers(0, 0, 0), self._frontiers
        assert 0 <= tokens <= self.capacity_tokens, (tokens, self.capacity_tokens)
        self._frontiers = Frontiers(tokens, tokens, tokens)

    def truncate(self, tokens: int) -> None:
        """Forget the rows from ``tokens`` on."""
        now = self._frontiers
        assert now.reserved == now.committed, "a step is open"
        assert 0 <= tokens <= now.committed, (tokens, now)
        self._frontiers = Frontiers(min(now.published, tokens), tokens, tokens)
