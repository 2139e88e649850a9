"""Payback: what drafting is worth, from what it cost and how often it was right. Pure: it is told times, reads none.

A round that drafts n tokens takes n d + v(1 + n) seconds and gives, on average, 1 + p1 + p1 p2 + ... + p1 ... pn
tokens, where d is a drafted token's time, v(T) that of a step of T rows and pi the probability that the token at
position i is accepted if those before it were. The kind and length with the most tokens per second is chosen, drafting
nothing included.

    at first     every kind at full length, and no draft, each twice: what comes first pays for what is set up
    then         the best
    in between   what was not measured for 64 rounds: a kind that does not pay with one token, a width with the best
                 kind; seldomer where that would cost more than 1 % of the time
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

_FOLLOW = 0.05       # weight of the newest time
_FOLLOW_STALE = 0.2  # and where the last one is old
_OUTLIER = 1.5       # no time counts for more than that many times what was known
_MEMORY = 100        # tries that an acceptance remembers
_CHANCE = 4          # and of a kind that is tried again: a text that has changed shows at once
_OPTIMISM = 0.8      # acceptance at the first position before it was seen; further on, that of the position before
_TRY_AGAIN = 64      # rounds after which what was not used is tried again
_SPENT = 0.01        # part of the time that this may take
_TWICE = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """Whom to ask for how many tokens. ``kind`` is empty if drafting does not pay."""

    kind: str = ""
    tokens: int = 0


NO_CHOICE = Choice()


@dataclass(slots=True)
class _Time:
    """Seconds, of something that is done again and again. ``round``: when it was measured last."""

    seconds: float = 0.0
    seen: int = 0
    round: int = 0

    def follow(self, seconds: float, now: int) -> None:
        """One more measurement."""
        if self.seen < _TWICE:
            self.seconds = min(seconds, self.seconds) if self.seen else seconds
        else:
            weight = _FOLLOW_STALE if self.is_stale(now) else _FOLLOW
            self.seconds += weight * (min(seconds, _OUTLIER * self.seconds) - self.seconds)
        self.seen += 1
        self.round = now

    def is_stale(self, now: int) -> bool:
        return now - self.round >= _TRY_AGAIN


@dataclass(slots=True)
class _Kind:
    """What is known of one kind of drafter.   accepted: by position, the mean of what was tried, and how many tries"""

    draft: _Time = field(default_factory=_Time)
    accepted: list[float] = field(default_factory=list)
    tries: list[int] = field(default_factory=list)

    def learn(self, position: int, is_accepted: bool) -> None:
        if position == len(self.tries):
            self.accepted.append(0.0)
            self.tries.append(0)
        self.tries[position] = min(self.tries[position] + 1, _MEMORY)
        self.accepted[position] += (is_accepted - self.accepted[position]) / self.tries[position]

    def give_chance(self) -> None:
        self.tries = [min(tries, _CHANCE) for tries in self.tries]

    def gains(self, tokens: int) -> Iterator[float]:
        """Tokens that a round with a draft of 0, 1, ... ``tokens`` tokens gives on average."""
        total = reached = 1.0
        acceptance = _OPTIMISM
        yield total
        for position in range(tokens):
            if position < len(self.tries):
                tries = self.tries[position]
                acceptance = (tries * self.accepted[position] + acceptance) / (tries + 1)
            reached *= acceptance
            total += reached
            yield total


@dataclass(frozen=True, slots=True)
class _Offer:
    """A choice and what it would give."""

    choice: Choice
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else inf

    def loss_s(self, best: _Offer) -> float:
        """Seconds that the best would save."""
        return max(0.0, self.seconds - self.tokens / best.rate)


class Payback:
    """Legal moves: ``choose`` if no other drafter had its say, then ``observe`` of that round."""

    def __init__(self, most: Mapping[str, int]) -> None:
        """``most``: tokens that each kind drafts at most."""
        self.most = dict(most)
        self._kinds = {kind: _Kind() for kind in most}
        self._steps: dict[int, _Time] = {}
        self._round = 0
        self._credit_s = 0.0                        # what may be spent on trying again
        self._trial: tuple[Choice, float] | None = None

    def choose(self, limit: int) -> Choice:
        """The best for a round that can use ``limit`` tokens."""
        self._trial = None
        if limit < 1:
            return NO_CHOICE
        unknown = self._unknown(limit)
        if unknown is not None:
            return unknown
        best = max(self._offers(limit), key=lambda offer: offer.rate)   # of equals the first: the shortest
        trial = self._stalest(limit, best)
        if trial is None or trial.loss_s(best) > self._credit_s:
            return best.choice
        if trial.choice.kind != best.choice.kind and trial.choice.kind:
            self._kinds[trial.choice.kind].give_chance()
        self._trial = trial.choice, trial.loss_s(best)
        return trial.choice

    def observe(self, choice: Choice, *, drafted: int, accepted: int, draft_s: float, step_s: float) -> None:
        """What a round cost: drafting and verifying, in seconds.

        choice   what was made of ``choose``; ``NO_CHOICE`` if another drafter's tokens were verified
        drafted  of the tokens that were asked for; a draft that ended early counts as rejected where it did
        """
        self._round += 1
        self._credit_s += _SPENT * (draft_s + step_s)
        if self._trial is not None and choice == self._trial[0]:
            self._credit_s -= self._trial[1]
        self._trial = None
        self._steps.setdefault(1 + drafted, _Time()).follow(step_s, self._round)
        if choice.kind:
            kind = self._kinds[choice.kind]
            ended_early = drafted < choice.tokens
            kind.draft.follow(draft_s / (drafted + ended_early), self._round)
            for position in range(accepted):
                kind.learn(position, True)
            if accepted < choice.tokens:
                kind.learn(accepted, False)

    def _unknown(self, limit: int) -> Choice | None:
        """What has not been measured twice."""
        kinds = sorted(self._kinds.items(), key=lambda item: item[1].draft.seen)
        first = [(kind.draft.seen, Choice(name, min(limit, self.most[name]))) for name, kind in kinds]
        plain = self._steps.get(1)
        seen, choice = min([*first, (plain.seen if plain else 0, NO_CHOICE)], key=lambda pair: pair[0])
        return choice if seen < _TWICE else None

    def _offers(self, limit: int) -> Iterator[_Offer]:
        yield self._offer(NO_CHOICE)
        for name in self._kinds:
            for tokens in range(1, min(limit, self.most[name]) + 1):
                yield self._offer(Choice(name, tokens))

    def _offer(self, choice: Choice) -> _Offer:
        step_s = self._step_s(1 + choice.tokens)
        if not choice.kind:
            return _Offer(choice, 1.0, step_s)
        kind = self._kinds[choice.kind]
        *_, tokens = kind.gains(choice.tokens)
        return _Offer(choice, tokens, choice.tokens * kind.draft.seconds + step_s)

    def _stalest(self, limit: int, best: _Offer) -> _Offer | None:
        """What was measured longest ago, if that is long ago: a kind, or a width of the best one."""
        others = [name for name in self._kinds if name != best.choice.kind]
        times = [(self._kinds[name].draft, Choice(name, 1)) for name in others]
        if best.choice.kind:
            widest = min(limit, self.most[best.choice.kind])
            times += [
                (self._steps[1 + tokens], Choice(best.choice.kind, tokens) if tokens else NO_CHOICE)
                for tokens in range(widest + 1) if 1 + tokens in self._steps
            ]
        if not times:
            return None
        time, choice = min(times, key=lambda pair: pair[0].round)
        return self._offer(choice) if time.is_stale(self._round) else None

    def _step_s(self, rows: int) -> float:
        """Seconds of a step: measured, or on the line between the nearest narrower and wider ones."""
        known = {width: time.seconds for width, time in self._steps.items() if time.seen >= _TWICE}
        if rows in known:
            return known[rows]
        below = max(width for width in known if width < rows)
        above = min((width for width in known if width > rows), default=below)
        if above == below:
            return known[below]
        return known[below] + (known[above] - known[below]) * (rows - below) / (above - below)
