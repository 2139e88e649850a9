"""Speculation of one request: who drafts this round, the draft, the verdict, and what everyone learns of it.

    n-gram drafters, in fixed order ─ first draft that is not empty, of a length that pays (``Returns``)
    else the model's own: MTP block or resident pages, whichever pays more (``Payback``) ─ drafts within the open step
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from time import perf_counter

from kvs_core.engine.engine import Engine
from kvs_core.engine.step import Step
from kvs_core.models.recurrent import MAX_ROWS
from kvs_core.sampling.chain import Sampler
from kvs_core.settings.drafters import MODEL_DRAFTERS, ModelDraftSettings, SpeculativeSettings
from kvs_core.speculative.drafter import NO_DRAFT, Draft, Drafter, DrafterMix, DraftStats
from kvs_core.speculative.ngram import ngram_drafters
from kvs_core.speculative.payback import Choice, Payback
from kvs_core.speculative.picker import KEPT, DraftPicker, Guess
from kvs_core.speculative.returns import Returns
from kvs_core.speculative.synthetic import make_judge
from kvs_core.speculative.text import Text
from kvs_core.speculative.verdict import Verdict
from kvs_core.speculative.verifier import Row

MOST_DRAFTED = MAX_ROWS - 1
"""Tokens that a usual step verifies beside its first. Longer drafts take a step in tiles."""


class ModelDrafter:
    """draft-mtp or draft-resident: drafts with the model, within the step that will verify."""

    def __init__(self, name: str, settings: ModelDraftSettings, sampler: Sampler) -> None:
        self.name = name
        self._picker = DraftPicker(settings, temperature=sampler.params.temperature, seed=sampler.seed_used)
        self._step: Step | None = None
        self._tokens = 0

    def lend(self, step: Step, tokens: int) -> None:
        """Draft at most ``tokens`` tokens in this step when asked next."""
        self._step, self._tokens = step, tokens

    def begin(self, prompt: Text) -> None:
        """Its memory is the model's."""

    def propose(self, text: Text, limit: int) -> Draft:
        """See ``Drafter``."""
        step, self._step = self._step, None
        if step is None:
            return NO_DRAFT
        row = step.draft_next if self.name == "draft-mtp" else step.draft_resident
        guesses: list[Guess] = []
        token = int(text[-1])
        for _ in range(min(limit, self._tokens)):
            row(token)
            best = step.best(KEPT)
            guess = self._picker.pick_of(step.logits()[0]) if best is None else self._picker.pick(best[0])
            if guess is None:
                break
            guesses.append(guess)
            token = guess.token
        return self._picker.draft(guesses, self.name)

    def accept(self, verdict: Verdict, drafted: int) -> None:
        """Nothing to remember."""


def make_speculation(
    engine: Engine, settings: SpeculativeSettings, sampler: Sampler, eog_ids: Collection[int]
) -> Speculation | None:
    """For one request, n-gram drafters without a memory of others; None without drafters."""
    if not settings.types:
        return None
    ngrams = ngram_drafters(settings, n_vocab=engine.spec.n_vocab)
    return Speculation(engine, settings, sampler, ngrams, eog_ids)


class Speculation:
    """See the top of the file. One per request."""

    def __init__(
        self, engine: Engine, settings: SpeculativeSettings, sampler: Sampler, ngrams: Collection[Drafter],
        eog_ids: Collection[int],
    ) -> None:
        """``ngrams``: the drafters that need no model; they may have served earlier requests."""
        self._engine = engine
        self._models = {
            name: ModelDrafter(name, settings.draft, sampler) for name in settings.types if name in MODEL_DRAFTERS
        }
        self._mix = DrafterMix([*ngrams, *self._models.values()])
        self._judge = make_judge(settings, eog_ids, seed=sampler.seed_used)
        self._synthetic = settings.is_synthetic
        self._adaptive = settings.adaptive and not settings.is_synthetic
        self._returns = Returns([drafter.name for drafter in ngrams], MOST_DRAFTED, models=bool(self._models))
        self._payback = Payback({name: min(settings.draft.n_max, MOST_DRAFTED) for name in self._models})
        self._history: list[int] = []
        self._choice = Choice()
        self._draft = NO_DRAFT
        self._draft_s = 0.0
        self._began = 0.0
        self.rounds = 0

    @property
    def is_synthetic(self) -> bool:
        """Acceptance is pretended: what is generated is no text."""
        return self._synthetic

    @property
    def stats(self) -> dict[str, DraftStats]:
        """Counts per drafter."""
        return dict(self._mix.stats)

    def begin(self, tokens: Sequence[int]) -> None:
        """The prompt has been run: all tokens of the sequence so far."""
        self._history = list(tokens)
        self._mix.begin(self._history)

    def propose(self, token: int, limit: int) -> Draft:
        """A draft of what follows ``token``, which was sampled last, of at most ``limit`` tokens: from tokens alone."""
        self._began = perf_counter()
        self._history.append(token)
        self._choice, self._draft_s = Choice(), 0.0
        limits = self._limits(limit) if self._adaptive else None
        self._draft = self._mix.propose(self._history, limit, skip=self._models, limits=limits)
        return self._draft

    def shorten(self, tokens: int) -> Draft:
        """Only so many tokens of the draft can be verified: the draft that is left."""
        self._draft = self._mix.shorten(tokens)
        return self._draft

    @property
    def drafts_within(self) -> bool:
        """Whether ``propose_within`` may draft."""
        return bool(self._models)

    def propose_within(self, step: Step, limit: int) -> Draft:
        """Where ``propose`` had nothing: a draft of at most ``limit`` tokens that the model makes, in ``step``."""
        if limit > 0 and self._models:
            start = perf_counter()
            self._choice = self._choose(limit)
            if self._choice.kind:
                self._models[self._choice.kind].lend(step, self._choice.tokens)
                self._draft = self._mix.propose(
                    self._history, limit, skip={drafter for drafter in self.stats if drafter != self._choice.kind}
                )
            self._draft_s = perf_counter() - start
        return self._draft

    def judge(self, rows: Sequence[Row], sampler: Sampler) -> Verdict:
        """What the round generates; ``rows`` are those of the step."""
        return self._judge.judge(self._draft, rows, sampler)

    def accept(self, verdict: Verdict, step_s: float) -> None:
        """The round is over; its step took ``step_s`` seconds."""
        self.rounds += 1
        self._history.extend(verdict.tokens[:-1])
        by_ngram = len(self._draft) > 0 and self._draft.source not in self._models
        self._returns.written(verdict.tokens)
        self._returns.observe(
            self._draft.source if by_ngram else "", drafted=len(self._draft), tokens=len(verdict.tokens),
            seconds=perf_counter() - self._began,
        )
        self._payback.observe(
            Choice() if by_ngram else self._choice, drafted=len(self._draft), accepted=verdict.accepted,
            draft_s=self._draft_s, step_s=step_s,
        )
        self._mix.accept(verdict)

    def _limits(self, limit: int) -> Mapping[str, int]:
        limits = self._returns.limits(limit)
        for name in self._returns.to_watch:
            start = perf_counter()
            draft = self._mix.peek(name, self._history, min(limit, MOST_DRAFTED))
            self._returns.watch(name, draft.tokens, perf_counter() - start)
        return limits

    def _choose(self, limit: int) -> Choice:
        if self._adaptive:
            return self._payback.choose(limit)
        name = next(iter(self._models))
        return Choice(name, min(limit, self._payback.most[name]))
