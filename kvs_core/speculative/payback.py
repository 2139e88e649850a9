"""Payback: what drafting is worth, from what it cost and how often it was right. Pure: it is told times, reads none.

A round that drafts n tokens with acceptance p per token takes n d + v(1 + n) seconds and gives, on average,
1 + p + p^2 + ... + p^n tokens, where d is a drafted token's time and v(T) that of a step of T rows. The kind and length
with the most tokens per second is chosen, drafting nothing included; what was not tried for long is tried again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_FOLLOW = 0.15        # weight of the newest observation
_TRY_AGAIN = 64       # rounds after which a kind that did not pay is given a chance
_OPTIMISM = 0.8       # acceptance of a kind that nobody has seen draft


@dataclass(slots=True)
class _Kind:
    """What is known of one kind of drafter."""

    acceptance: float = _OPTIMISM
    draft_s: float | None = None
    rounds_unused: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """Whom to ask for how many tokens. ``kind`` is empty if drafting does not pay."""

    kind: str = ""
    tokens: int = 0


NO_CHOICE = Choice()


@dataclass(slots=True)
class Payback:
    """Legal moves: any. ``most``: tokens that each kind drafts at most."""

    most: Mapping[str, int]
    _kinds: dict[str, _Kind] = field(default_factory=dict)
    _step_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._kinds = {kind: _Kind() for kind in self.most}

    def choose(self, limit: int) -> Choice:
        """The best for a round that can use ``limit`` tokens."""
        best, best_rate = NO_CHOICE, self._rate(NO_CHOICE)
        for name, kind in self._kinds.items():
            tokens = min(limit, self.most[name])
            if tokens < 1:
                continue
            if kind.draft_s is None or kind.rounds_unused >= _TRY_AGAIN or best_rate is None:
                return self._use(Choice(name, tokens))
            for count in range(1, tokens + 1):
                choice = Choice(name, count)
                rate = self._rate(choice)
                if rate is not None and rate > best_rate:
                    best, best_rate = choice, rate
        return self._use(best)

    def observe(self, choice: Choice, *, drafted: int, accepted: int, draft_s: float, step_s: float) -> None:
        """What a round cost: drafting and verifying, in seconds."""
        self._follow_step(1 + drafted, step_s)
        if choice.kind and drafted > 0:
            kind = self._kinds[choice.kind]
            per_token = draft_s / drafted
            # The first draft of a kind pays for what is set up on the way; later ones are told from it.
            kind.draft_s = per_token if kind.draft_s is None else min(
                kind.draft_s * (1 - _FOLLOW) + per_token * _FOLLOW, 2 * per_token
            )
            # Accepted tokens are successes; if not all were, one failure.
            tries = accepted + (accepted < drafted)
            for success in [True] * accepted + [False] * (tries - accepted):
                kind.acceptance += _FOLLOW * (success - kind.acceptance)

    def _follow_step(self, rows: int, step_s: float) -> None:
        known = self._step_s.get(rows)
        self._step_s[rows] = step_s if known is None else min(
            known * (1 - _FOLLOW) + step_s * _FOLLOW, 2 * step_s
        )

    def _time_of(self, rows: int) -> float | None:
        """Seconds of a step: measured, or that of the nearest width."""
        if not self._step_s:
            return None
        return self._step_s[min(self._step_s, key=lambda known: abs(known - rows))]

    def _rate(self, choice: Choice) -> float | None:
        """Tokens per second; None if a time is not known."""
        step_s = self._time_of(1 + choice.tokens)
        if step_s is None:
            return None
        if not choice.kind:
            return 1.0 / step_s
        kind = self._kinds[choice.kind]
        assert kind.draft_s is not None
        gained = sum(kind.acceptance**position for position in range(choice.tokens + 1))
        return gained / (choice.tokens * kind.draft_s + step_s)

    def _use(self, choice: Choice) -> Choice:
        for name, kind in self._kinds.items():
            kind.rounds_unused = 0 if name == choice.kind else kind.rounds_unused + 1
        return choice
