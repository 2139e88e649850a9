"""Returns: how long the drafts of n-gram drafters may be, from what rounds cost and gave. Pure: it is told times.

A long draft takes a step in tiles, which costs more than a usual one and pays only if most of it is accepted. So a
drafter gives drafts that fit a usual step until one of them is accepted whole: the text is being copied, and the next
may have any length. Both kinds are compared with rounds in which no n-gram drafter had its say: the kind with the most
tokens per second is asked, or none is.

    at first     a drafter's first draft, and a second one if any of the first was accepted; the first long draft; and
                 two rounds without, where no other came by itself
    then         the best
    in between   what was not seen for 64 rounds, if what that is known to lose is less than 1 % of the time so far
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

_FOLLOW = 0.2        # weight of the newest round
_TWICE = 2
_TRY_AGAIN = 64      # rounds
_SPENT = 0.01        # part of the time that trials may take
_UNASKED = 4         # drafts that are verified before rounds without them are wanted for comparison


@dataclass(slots=True)
class _Rounds:
    """Rounds of one kind: how many were seen, the last one's number, and means of their tokens and seconds."""

    seen: int = 0
    round: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def is_known(self) -> bool:
        """Twice, or once to no avail."""
        return self.seen >= _TWICE or (self.seen > 0 and self.tokens == 1)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def follow(self, tokens: int, seconds: float, now: int) -> None:
        self.seen += 1
        self.round = now
        weight = max(1 / self.seen, _FOLLOW)
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)

    def charge(self, seconds: float) -> None:
        """The last round of this kind cost so much more, later on."""
        self.seconds += max(1 / self.seen, _FOLLOW) * seconds

    def loss_s(self, best_rate: float) -> float:
        """Seconds that such a round loses against the best."""
        return max(0.0, self.seconds - self.tokens / best_rate) if best_rate > 0 else 0.0


class Returns:
    """Legal moves: ``limits``, then ``observe`` of that round."""

    def __init__(self, names: Collection[str], usual: int) -> None:
        """``usual``: drafted tokens that a usual step verifies."""
        self._usual = usual
        self._kinds = {(name, long): _Rounds() for name in names for long in (False, True)}
        self._whole = dict.fromkeys(names, False)   # whether a drafter's last draft was accepted whole
        self._others = _Rounds()
        self._round = 0
        self._credit_s = 0.0
        self._trials: set[str] = set()       # drafters that are asked this time although they are known to lose
        self._after: _Rounds | None = None   # of the round before, a long one

    def limits(self, limit: int) -> Mapping[str, int]:
        """For each drafter, the tokens that it may draft in a round that can use ``limit``; 0: it is not asked."""
        self._trials.clear()
        drafted = sum(kind.seen for kind in self._kinds.values())
        if self._others.seen < _TWICE and drafted >= _UNASKED:
            return dict.fromkeys(self._whole, 0)
        return {name: self._limit(name, limit) for name in self._whole}

    def observe(self, name: str, *, drafted: int, tokens: int, seconds: float) -> None:
        """What a round gave and cost.

        name     the n-gram drafter whose draft of ``drafted`` tokens was verified; empty: there was none
        tokens   that the round gave, the one that nobody drafted included
        """
        self._round += 1
        self._credit_s += _SPENT * seconds
        after, self._after = self._after, None
        kind = self._kinds[name, drafted > self._usual] if name else self._others
        if drafted > self._usual:
            self._after = kind
        elif after is not None and kind.seen >= _TWICE:
            # What a step in tiles has displaced comes back in the round after it.
            excess = max(0.0, seconds - kind.seconds)
            after.charge(excess)
            seconds -= excess
        kind.follow(tokens, seconds, self._round)
        if name:
            self._whole[name] = tokens > drafted
        if name in self._trials:
            best = max(other.rate for other in (*self._kinds.values(), self._others) if other.is_known)
            self._credit_s -= kind.loss_s(best)

    def _limit(self, name: str, limit: int) -> int:
        kinds = {min(limit, self._usual): self._kinds[name, False]}
        if limit > self._usual and self._whole[name]:
            kinds[limit] = self._kinds[name, True]
        for tokens, kind in reversed(kinds.items()):
            if not kind.is_known:
                return tokens
        best_tokens, best = max(kinds.items(), key=lambda item: item[1].rate)
        if best.rate < self._others.rate:
            best_tokens, best = 0, self._others
        for tokens, kind in kinds.items():
            stale = self._round - kind.round >= _TRY_AGAIN
            if kind is not best and stale and kind.loss_s(best.rate) <= self._credit_s:
                self._trials.add(name)
                return tokens
        return best_tokens
