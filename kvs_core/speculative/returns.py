"""Returns: how long the drafts of n-gram drafters may be, from what rounds cost and gave. Pure: it is told times.

A long draft takes a step in tiles, which costs more than a usual one and pays only if most of it is accepted. So a
drafter gives drafts that fit a usual step until one of them is accepted whole: the text is being copied, and the next
may have any length. Both kinds are compared with rounds in which no n-gram drafter had its say: the kind with the most
tokens per second is asked, or none is.

Where the model drafts behind them, an n-gram draft that fails costs what the model's would have given. So there a
drafter is watched first: it says what it would draft, the model drafts all the same, and what is written shows how much
of it was right. It is asked once that promises more than such rounds give, and watched again when it no longer does, or
when its own rounds take too long for what they give, until it is due to be tried again.

    at first     a drafter's first draft, and a second one if any of the first was accepted; the first long draft; and
                 two rounds without, where no other came by itself
    then         the best
    in between   what was not seen for 64 rounds, if what that is known to lose is less than 1 % of the time so far
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

_FOLLOW = 0.2        # weight of the newest round
_TWICE = 2
_TRY_AGAIN = 64      # rounds
_SPENT = 0.01        # part of the time that trials may take
_UNASKED = 4         # drafts that are verified before rounds without them are wanted for comparison


@dataclass(slots=True)
class _Rounds:
    """Rounds of one kind: how many were run and, with those that were only watched, seen; the last one's number, and
    means of their tokens and seconds."""

    seen: int = 0
    run: int = 0
    round: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def is_known(self) -> bool:
        """Twice, or once to no avail."""
        return self.run >= _TWICE or (self.run > 0 and self.tokens == 1)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def follow(self, tokens: int, seconds: float, now: int) -> None:
        self.see(tokens)
        self.run += 1
        self.round = now
        self.seconds += max(1 / self.run, _FOLLOW) * (seconds - self.seconds)

    def see(self, tokens: int) -> None:
        """What such a round would have given."""
        self.seen += 1
        self.tokens += max(1 / self.seen, _FOLLOW) * (tokens - self.tokens)

    def charge(self, seconds: float) -> None:
        """The last round of this kind cost so much more, later on."""
        self.seconds += max(1 / self.run, _FOLLOW) * seconds

    def loss_s(self, best_rate: float) -> float:
        """Seconds that such a round loses against the best."""
        return max(0.0, self.seconds - self.tokens / best_rate) if best_rate > 0 else 0.0


@dataclass(slots=True)
class _Watched:
    """A draft that nobody verifies, and how many of its tokens have come so far."""

    tokens: tuple[int, ...]
    right: int = 0


class Returns:
    """Legal moves: ``limits``, ``watch`` of those that are ``to_watch``, then ``written`` and ``observe`` of that
    round."""

    def __init__(self, names: Collection[str], usual: int, *, models: bool = False) -> None:
        """
        usual   drafted tokens that a usual step verifies
        models  rounds in which no n-gram drafter has its say have drafts too, the model's own
        """
        self._usual = usual
        self._models = models
        self._watched: dict[str, _Watched] = {}
        self._to_watch: list[str] = []
        self._kinds = {(name, long): _Rounds() for name in names for long in (False, True)}
        self._whole = dict.fromkeys(names, False)   # whether a drafter's last draft was right as a whole
        self._others = _Rounds()
        self._round = 0
        self._credit_s = 0.0
        self._trials: set[str] = set()       # drafters that are asked this time although they are known to lose
        self._after: _Rounds | None = None   # of the round before, a long one

    def limits(self, limit: int) -> Mapping[str, int]:
        """For each drafter, the tokens that it may draft in a round that can use ``limit``; 0: it is not asked."""
        self._trials.clear()
        self._to_watch.clear()
        drafted = sum(kind.run for kind in self._kinds.values())
        if self._others.run < _TWICE and drafted >= _UNASKED:
            return dict.fromkeys(self._whole, 0)
        return {name: self._limit(name, limit) for name in self._whole}

    @property
    def to_watch(self) -> Sequence[str]:
        """Drafters that have no say in this round, and that ``watch`` wants to know of."""
        return self._to_watch

    def watch(self, name: str, draft: Sequence[int], seconds: float) -> None:
        """What a drafter of ``to_watch`` would draft in this round; to find out took ``seconds``."""
        self._credit_s -= seconds
        if draft:
            self._watched[name] = _Watched(tuple(draft[: self._usual]))

    def written(self, tokens: Sequence[int]) -> None:
        """What the round gives; call it before ``observe``. A watched draft is judged when all of it has come, or
        something else has."""
        for name, watched in tuple(self._watched.items()):
            for token in tokens:
                is_right = token == watched.tokens[watched.right]
                watched.right += is_right
                if not is_right or watched.right == len(watched.tokens):
                    self._kinds[name, False].see(1 + watched.right)
                    self._whole[name] = is_right
                    del self._watched[name]
                    break

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
        elif after is not None and kind.run >= _TWICE:
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

    @property
    def _watches(self) -> bool:
        """A draft to no avail costs several tokens where the model's own are good, next to nothing where not."""
        return self._models and (self._others.run < _TWICE or self._others.tokens >= _TWICE)

    def _promises(self, kind: _Rounds) -> bool:
        """Whether its rounds would give more for their time than those without, if they took no longer; what was seen,
        and one more draft to no avail."""
        if not self._others.run or not kind.seen:
            return False
        seconds = min(kind.seconds, self._others.seconds) if kind.run else self._others.seconds
        return 1.0 + (kind.tokens - 1.0) * kind.seen / (kind.seen + 1) > seconds * self._others.rate

    def _limit(self, name: str, limit: int) -> int:
        short = self._kinds[name, False]
        if self._watches and not self._promises(short):
            return self._not_asked(name)
        kinds = {min(limit, self._usual): short}
        if limit > self._usual and self._whole[name]:
            kinds[limit] = self._kinds[name, True]
        for tokens, kind in reversed(kinds.items()):
            if not kind.is_known:
                return tokens
        best_tokens, best = max(kinds.items(), key=lambda item: item[1].rate)
        loses = best.rate < self._others.rate
        if loses:
            best = self._others
        stale = {tokens: kind for tokens, kind in kinds.items() if self._round - kind.round >= _TRY_AGAIN}
        for tokens, kind in stale.items():
            if kind is not best and kind.loss_s(best.rate) <= self._credit_s:
                self._trials.add(name)
                return tokens
        if not loses:
            return best_tokens
        return 0 if stale else self._not_asked(name)   # what is due to be tried again saves up for that

    def _not_asked(self, name: str) -> int:
        """It drafts nothing, and is watched where that tells something and there is time for it."""
        if self._watches and name not in self._watched and self._credit_s >= 0:
            self._to_watch.append(name)
        return 0
