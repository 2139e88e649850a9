"""Drafters guess the tokens that follow; the mix asks them in a fixed order and tells all of them what came of it.

    begin(prompt) ─┬─ propose(history) ─> Draft ─ step of 1 + n rows ─ judge ─> Verdict ─ accept ─┐
                   └──────────────────────────────────────────────────────────────────────────────┘

Deliberately absent: the model, logits, and whether a drafter pays for itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvs_core.errors import SettingsError
from kvs_core.sampling.candidates import Candidates
from kvs_core.settings.drafters import DRAFTERS, SpeculativeSettings
from kvs_core.speculative.text import Text, TextBuffer
from kvs_core.speculative.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens expected after the one sampled last, which is not among them.

    source      the drafter's type; empty for no draft
    candidates  for tokens that were drawn at random: what each was drawn from, by the softmax of its logits.
                Otherwise empty
    """

    tokens: tuple[int, ...] = ()
    source: str = ""
    candidates: tuple[Candidates, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.candidates) in (0, len(self.tokens))
        assert self.source or not self.tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def head(self, tokens: int) -> Draft:
        """The first ``tokens`` tokens of it."""
        return self if tokens >= len(self) else replace(
            self, tokens=self.tokens[:tokens], candidates=self.candidates[:tokens])


NO_DRAFT = Draft()


class Drafter(Protocol):
    """One drafter, for one sequence. What it learnt may outlive a request."""

    @property
    def name(self) -> str:
        """Its type, one of ``DRAFTERS``."""
        ...

    def begin(self, prompt: Text) -> None:
        """A request's prompt has been run: all tokens of the sequence so far."""
        ...

    def propose(self, text: Text, limit: int) -> Draft:
        """Tokens that may follow ``text``, whose last token is sampled, not run.

        ``limit`` >= 1 is how many can be used: a longer draft is cut by the mix.
        """
        ...

    def accept(self, verdict: Verdict, drafted: int) -> None:
        """What came of a round; called for every round, whoever drafted, and where no one did.

        ``drafted`` of this drafter's own tokens were verified, 0 if it was another's round.
        """
        ...


@dataclass(slots=True)
class DraftStats:
    """Counts of one drafter, those that llama-server reports per type.

    begin_calls, draft_calls, accept_calls   requests; times it was asked; verifications of drafts of its own
    drafts, drafted_tokens                   drafts that were verified, and their tokens
    accepted_drafts, accepted_tokens         drafts of which a token was accepted; tokens accepted
    accepted_at                              by position in the draft, how often its token was accepted
    """

    begin_calls: int = 0
    draft_calls: int = 0
    accept_calls: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_drafts: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)

    @property
    def mean_tokens(self) -> float:
        """Tokens that a verification of its drafts gave on average, the target's own included; 0 if there was none."""
        return 1.0 + self.accepted_tokens / self.accept_calls if self.accept_calls else 0.0

    def count_accepted(self, accepted: int) -> None:
        """One verification, of which ``accepted`` drafted tokens were accepted."""
        self.accept_calls += 1
        self.accepted_drafts += accepted > 0
        self.accepted_tokens += accepted
        self.accepted_at.extend([0] * (accepted - len(self.accepted_at)))
        for position in range(accepted):
            self.accepted_at[position] += 1


class DrafterMix:
    """All drafters of one sequence.

    Legal moves: ``begin`` for each request; then per round any ``peek``, ``propose``, and ``accept`` of what came
    of that draft. A round that was given up by an error leaves out ``accept``.
    """

    def __init__(self, drafters: Collection[Drafter]) -> None:
        """``drafters`` of distinct types, in any order."""
        self._drafters = sorted(drafters, key=lambda drafter: DRAFTERS.index(drafter.name))
        self._stats = {drafter.name: DraftStats() for drafter in self._drafters}
        assert len(self._stats) == len(self._drafters), "two drafters of one type"
        self._text = TextBuffer()
        self._draft = NO_DRAFT

    @property
    def stats(self) -> Mapping[str, DraftStats]:
        """Counts per type, in the order of asking."""
        return self._stats

    def begin(self, prompt: Sequence[int]) -> None:
        """A request's prompt has been run: every token of the sequence so far."""
        self._text.clear()
        self._draft = NO_DRAFT
        text = self._text.follow(prompt)
        for drafter in self._drafters:
            drafter.begin(text)
            self._stats[drafter.name].begin_calls += 1

    def propose(
        self, history: Sequence[int], limit: int, *, skip: Collection[str] = (), limits: Mapping[str, int] | None = None
    ) -> Draft:
        """The first draft that is not empty, or none.

        history  every token since ``begin``'s prompt, which it starts with; the last is sampled, not run
        limit    tokens that can be used, see ``draft_limit``; nobody is asked when it is not positive
        skip     types that are not asked this time
        limits   of single types, where they are smaller; with 0 a type is not asked
        """
        self._draft = NO_DRAFT
        if limit <= 0:
            return NO_DRAFT
        text = self._text.follow(history)
        for drafter in self._drafters:
            most = limit if limits is None else min(limit, limits.get(drafter.name, limit))
            if drafter.name in skip or most <= 0:
                continue
            stats = self._stats[drafter.name]
            stats.draft_calls += 1
            draft = drafter.propose(text, most).head(most)
            if draft.tokens:
                stats.drafts += 1
                stats.drafted_tokens += len(draft)
                self._draft = draft
                return draft
        return NO_DRAFT

    def peek(self, name: str, history: Sequence[int], limit: int) -> Draft:
        """What the drafter of that type would draft, as in ``propose``; it does not count, and nobody verifies it."""
        if limit <= 0:
            return NO_DRAFT
        drafter = next(drafter for drafter in self._drafters if drafter.name == name)
        return drafter.propose(self._text.follow(history), limit).head(limit)

    def shorten(self, tokens: int) -> Draft:
        """Only so many tokens of the last ``propose``'s draft will be verified."""
        draft = self._draft
        self._draft = draft.head(tokens) if tokens > 0 else NO_DRAFT
        if draft.tokens:
            stats = self._stats[draft.source]
            stats.drafted_tokens -= len(draft) - len(self._draft)
            stats.drafts -= not self._draft.tokens
        return self._draft

    def accept(self, verdict: Verdict) -> None:
        """What came of the round of the last ``propose``."""
        draft, self._draft = self._draft, NO_DRAFT
        if draft.tokens:
            self._stats[draft.source].count_accepted(verdict.accepted)
        for drafter in self._drafters:
            drafter.accept(verdict, len(draft) if drafter.name == draft.source else 0)


def draft_limit(*, context_tokens: int, history_tokens: int, remaining_tokens: int | None) -> int:
    """Drafted tokens that a round can use, as llama-server counts them; none where it is not positive.

    history_tokens    tokens of the sequence, the one sampled last included
    remaining_tokens  how many more may be generated; None: no limit
    """
    limit = context_tokens - history_tokens - 1
    return limit if remaining_tokens is None else min(limit, remaining_tokens - 1)


def verify_width(settings: SpeculativeSettings, *, ubatch_tokens: int, context_tokens: int) -> int:
    """Rows of the widest verification: 1 + the widest draft. SettingsError if these sizes cannot hold that many."""
    rows = settings.verify_rows
    for flag, tokens in (("--ubatch-size", ubatch_tokens), ("--ctx-size", context_tokens)):
        if rows > tokens and settings.types:
            bound, drafted = settings.widest()
            raise SettingsError(f"{bound} drafts {drafted} tokens: verifying them takes {rows} rows, the size given by "
                                f"{flag} is {tokens}; raise that, or draft fewer")
    return rows
