"""A target that writes a text known beforehand: how fast are drafters on that text, with a model of random weights?
Ways of drafting write it by turns on one engine, and are compared by what their rounds gave and took.

Every step is run and costs what it costs; only the verdict is taken from the text. An n-gram draft is accepted as far
as it is the text. The MTP block's guesses mean nothing here, so a draft of its own is accepted as far as the text's
tokens are ones that such a block guesses: each is with probability 0.9, by dice that do not depend on who drafts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.gpu.runs import tokens_of
from kvs_core.engine.engine import Engine
from kvs_core.engine.round import generate
from kvs_core.engine.session import Session
from kvs_core.engine.speculation import MOST_DRAFTED, make_speculation
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.sampling.chain import Sampler
from kvs_core.sampling.params import SamplingParams
from kvs_core.settings.drafters import MODEL_DRAFTERS, SpeculativeSettings
from kvs_core.speculative.drafter import Draft
from kvs_core.speculative.verdict import Verdict
from kvs_core.speculative.verifier import Row

GUESSED = 0.9   # of a text's tokens
TURN = 4   # rounds


class GivenText:
    """A ``Judge`` whose target writes ``text``."""

    def __init__(self, text: Sequence[int], seed: int = 0) -> None:
        self._text = list(text)
        self._guessed = np.random.default_rng(seed).random(len(self._text)) < GUESSED
        self._written = 0
        self.judged: list[tuple[Draft, int]] = []   # drafts, and the tokens of their rounds

    def judge(self, draft: Draft, rows: Sequence[Row], sampler: Sampler) -> Verdict:
        """See ``Judge``."""
        made: list[int] = []
        for index, row in enumerate(rows):
            sampler.pick(row)   # a part of what a round costs
            token, guessed = self._text[self._written], bool(self._guessed[self._written])
            made.append(token)
            self._written += 1
            if index == len(draft):
                break
            if not (guessed if draft.source in MODEL_DRAFTERS else draft.tokens[index] == token):
                break
        self.judged.append((draft, len(made)))
        return Verdict(tuple(made), synthetic=True)


@dataclass(frozen=True)
class Round:
    """What was drafted in a round and by whom, what the round gave, and what it took by the host's clock.

    counts    as it was, not by the median of its kind: a wide one, one behind it, or one that recorded work
    measured  behind the first quarter of the text, in which what is recorded on first use has been recorded
    """

    source: str
    drafted: int
    tokens: int
    seconds: float
    counts: bool
    measured: bool


class Arm:
    """One way of drafting that writes a text, a round at a time."""

    def __init__(
        self, engine: Engine, vocab: Tokenizer, settings: SpeculativeSettings, before: Sequence[int],
        text: Sequence[int], *, seed: int = 0, clock: Callable[[], float] = perf_counter,
    ) -> None:
        """The drafters know that ``before`` stands before ``text``; its last 80 tokens are only there to be drafted."""
        session = Session(engine)
        history = tokens_of(engine, engine.committed)
        history[-len(before) :] = before
        session.tokens = history.tolist()
        sampler = Sampler(SamplingParams(temperature=0.0, seed=1), n_vocab=engine.spec.n_vocab, vocab=vocab, eog_ids=())
        speculation = make_speculation(engine, settings, sampler, ())
        assert speculation is not None
        self._judge = speculation._judge = GivenText(text[1:], seed)
        first = np.zeros(engine.spec.n_vocab, np.float32)
        first[text[0]] = 1.0
        self._engine, self._text, self._clock = engine, text, clock
        self._tokens = generate(
            session, sampler, first, n_predict=len(text) - 80, eog_ids=frozenset(), speculation=speculation
        )
        self._made = 0
        self.rounds: list[Round] = []

    def round(self) -> bool:
        """Run one more round; False if the text has ended."""
        for _ in self._text:
            recorded = self._engine._captured.recorded
            start = self._clock()
            token = next(self._tokens, None)
            seconds = self._clock() - start
            if token is None:
                return False
            assert token.id == self._text[self._made]
            self._made += 1
            if len(self._judge.judged) > len(self.rounds):
                break
        draft, tokens = self._judge.judged[-1]
        counts = self.is_wide or len(draft) > MOST_DRAFTED or self._engine._captured.recorded > recorded
        self.rounds.append(
            Round(draft.source, len(draft), tokens, seconds, counts, measured=self._made > len(self._text) // 4)
        )
        return True

    @property
    def is_wide(self) -> bool:
        """The last round was wide: what its step has displaced comes back in the next one, of the same arm."""
        return bool(self.rounds) and self.rounds[-1].drafted > MOST_DRAFTED

    @property
    def tokens_per_s(self) -> float:
        """Of the measured rounds. Those of one drafter and length count with the median of their times, since a host
        that is busy elsewhere for a moment is no property of a drafter; all that ``counts`` is in as it was."""
        seconds, usual = 0.0, defaultdict[tuple[str, int], list[float]](list)
        measured = [each for each in self.rounds if each.measured]
        for each in measured:
            if each.counts:
                seconds += each.seconds
            else:
                usual[each.source, each.drafted].append(each.seconds)
        seconds += sum(len(times) * median(times) for times in usual.values())
        return sum(each.tokens for each in measured) / seconds

    @property
    def detail(self) -> dict[str, Any]:
        """For the JSON: the speed, how many rounds were measured, and a line for every round: drafter, tokens drafted
        and made, seconds, whether its time counts as it was, whether it was measured."""
        return {"tokens_per_s": self.tokens_per_s, "rounds": sum(each.measured for each in self.rounds),
                "every_round": [" ".join(map(str, astuple(each))) for each in self.rounds]}


def write_by_turns(arms: Sequence[Arm]) -> None:
    """Let the arms write, four rounds each by turns, until all have ended: so the link's rate and the growing context
    are the same for all. A turn does not end with a wide round: what follows from one is never another arm's."""
    writing = list(arms)
    while writing:
        for arm in tuple(writing):
            rounds = 0
            while rounds < TURN or arm.is_wide:
                rounds += 1
                if not arm.round():
                    writing.remove(arm)
                    break
