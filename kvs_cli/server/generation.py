"""One completion in the engine's thread: prompt, tokens, text, and the events that tell of them.

    Started ─ Progress* ─ Piece* ─ Finished          or Failed, at any point
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvs_cli.server.errors import ApiError, api_error
from kvs_cli.server.jobs import Cancelled, Job
from kvs_cli.server.live import LiveView
from kvs_cli.server.metrics import Metrics
from kvs_cli.server.options import Options
from kvs_cli.server.slot import Conversation, SlotView
from kvs_core.engine.context_shift import ContextShift
from kvs_core.engine.round import Token, accept_prompt, generate
from kvs_core.engine.session import TAIL_TOKENS
from kvs_core.engine.speculation import Speculation
from kvs_core.errors import KvsError
from kvs_core.formats.tokenizer import StopMatcher, Tokenizer, Utf8Stream
from kvs_core.sampling.candidates import Candidates
from kvs_core.sampling.chain import Pick, Sampler
from kvs_core.sampling.constrained import ConstrainedSampler, Constraint
from kvs_core.sampling.logprobs import TokenLogprob, TokenProbs
from kvs_core.settings import SpeculativeSettings
from kvs_core.speculative.drafter import Drafter, DraftStats
from kvs_core.speculative.ngram import ngram_drafters
from kvs_core.units import counted

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Task:
    """What to complete, and how.

    border      tokens of the prompt that the next turn is likely to begin with, see ``Session.prefill``
    constraint  what the text has to follow; used up by one run
    visible     control tokens that are text all the same
    settings    ``generation_settings`` of the reply
    """

    id: int
    prompt: tuple[int, ...]
    options: Options
    settings: dict[str, Any]
    border: int = 0
    constraint: Constraint | None = None
    visible: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Timings:
    """llama-server's timings: the first token is free, and nothing is divided by nothing."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int = 0
    predicted_ms: float = 0.0
    drafted_n: int = 0
    accepted_n: int = 0

    def as_json(self) -> dict[str, Any]:
        """``timings`` of a reply; of drafts only where there were some."""
        times = {
            "cache_n": self.cache_n,
            "prompt_n": self.prompt_n,
            "prompt_ms": self.prompt_ms,
            "prompt_per_token_ms": _ratio(self.prompt_ms, self.prompt_n),
            "prompt_per_second": _ratio(self.prompt_n * 1e3, self.prompt_ms),
            "predicted_n": self.predicted_n,
            "predicted_ms": self.predicted_ms,
            "predicted_per_token_ms": _ratio(self.predicted_ms, self.predicted_n - 1),
            "predicted_per_second": _ratio((self.predicted_n - 1) * 1e3, self.predicted_ms),
        }
        drafts = {"draft_n": self.drafted_n, "draft_n_accepted": self.accepted_n} if self.drafted_n else {}
        return times | drafts


@dataclass(frozen=True, slots=True)
class Started:
    """The request has the engine; ``cached`` of its ``total`` prompt tokens are there already."""

    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class Progress:
    """``processed`` prompt tokens are there, those of the cache included."""

    total: int
    cached: int
    processed: int
    time_ms: float


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that can be shown now, and the tokens since the last piece: characters may span several."""

    text: str
    tokens: tuple[int, ...]
    probs: tuple[TokenProbs, ...]
    prompt_tokens: int
    timings: Timings


@dataclass(frozen=True, slots=True)
class Finished:
    """The text has ended, by ``stop``: eos, word, limit, or none for an empty prompt. ``last``: what was held back.

    held       tokens in the slot now
    truncated  the context is full, or was and has been shifted
    """

    stop: str
    stop_word: str
    last: Piece
    timings: Timings
    held: int
    truncated: bool
    has_new_line: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended in an error."""

    error: ApiError


Event = Started | Progress | Piece | Finished | Failed

_REASONS = {"eos": "eos", "length": "limit", "context": "limit"}


class RequestSampler(ConstrainedSampler):
    """Remembers what the last tokens were drawn from, for ``post_sampling_probs``."""

    keep_picks = False

    def draw(self, candidates: Candidates) -> Pick:
        """See ``Sampler.draw``."""
        pick = super().draw(candidates)
        if self.keep_picks:
            self.picks.append(pick)
        return pick

    def reset(self) -> None:
        """See ``Sampler.reset``."""
        super().reset()
        self.picks: list[Pick] = []


@dataclass(slots=True)
class Room:
    """What one completion after another uses. The engine's thread writes ``view`` and ``live``; others read them."""

    conversation: Conversation
    tokenizer: Tokenizer
    metrics: Metrics
    speculative: SpeculativeSettings = field(default_factory=SpeculativeSettings)
    special: bool = False
    shifts: bool = False   # a full context does not end a text
    view: SlotView = field(default_factory=SlotView)
    live: LiveView = field(init=False)
    _ngrams: list[Drafter] = field(init=False)   # remember earlier requests

    def __post_init__(self) -> None:
        self.view.speculative = bool(self.speculative.types)
        self.live = LiveView(self.conversation, self.view)
        self._ngrams = list(ngram_drafters(self.speculative, n_vocab=self.conversation.session.engine.spec.n_vocab))

    def speculation(self, sampler: Sampler) -> Speculation | None:
        """For one request; None without drafters."""
        if not self.speculative.types:
            return None
        engine = self.conversation.session.engine
        return Speculation(engine, self.speculative, sampler, self._ngrams, self.tokenizer.eog_ids)


class Generation:
    """Runs a task. ``__call__`` is a job's work."""

    def __init__(self, room: Room, task: Task) -> None:
        self._room = room
        self._task = task
        self._options = task.options
        self._utf8 = Utf8Stream()
        self._matcher = StopMatcher(task.options.stop)
        self._tokens: list[int] = []       # since the last piece
        self._probs: list[TokenProbs] = []
        self._made = 0
        self._new_line = False
        self._timings = Timings(0, 0, 0.0)
        self._prompt_done_s = 0.0
        self._speculation: Speculation | None = None
        self._shift: ContextShift | None = None
        if room.shifts:
            self._shift = ContextShift(
                task.options.n_keep, prompt_tokens=len(task.prompt), bos=room.tokenizer.add_bos,
                discard=task.options.n_discard,
            )

    def __call__(self, job: Job[Event]) -> None:
        """Do it all; emits ``Failed`` for whatever goes wrong."""
        view = self._room.view
        view.task, view.processing, view.params = self._task.id, True, self._task.settings
        view.prompt_tokens, view.prompt_processed, view.prompt_cached = len(self._task.prompt), 0, 0
        view.decoded, view.has_new_line, view.has_next_token = 0, False, True
        view.remaining = self._options.tokens_at_most
        try:
            job.check()
            end: Finished | Failed = self._run(job)
        except Cancelled as cancelled:
            end = Failed(ApiError("unavailable_error", "the request was cancelled"))
            LOGGER.info("request %d: %s, %d of them cached and %d read; %s; %s", self._task.id,
                        counted(len(self._task.prompt), "prompt token"), view.prompt_cached,
                        view.prompt_processed - view.prompt_cached, counted(self._made, "token"),
                        cancelled)  # fmt: skip
        except Exception as error:
            end = Failed(self._failed(error))
        if isinstance(end, Finished):
            times = end.timings
            LOGGER.info("request %d: %s, %d of them cached; %s, %.1f tokens/s; stop: %s", self._task.id,
                        counted(len(self._task.prompt), "prompt token"), times.cache_n,
                        counted(times.predicted_n, "token"), times.as_json()["predicted_per_second"],
                        end.stop)  # fmt: skip
        view.processing = view.has_next_token = False
        self._room.live.look(self._speculation, always=True)
        job.emit(end)   # last: who reads it finds the slot free

    def _failed(self, error: Exception) -> ApiError:
        """``error`` as a reply. What is no fault of the request may have left anything: the slot begins anew."""
        failed = api_error(error)
        if failed.code >= 500:
            LOGGER.error("request %d: %s", self._task.id, error if isinstance(error, KvsError) else repr(error),
                         exc_info=LOGGER.isEnabledFor(logging.DEBUG))  # fmt: skip
            with suppress(Exception):   # if it cannot, the next request will say so
                self._room.conversation.erase()
        return failed

    def _run(self, job: Job[Event]) -> Finished:
        prompt = self._task.prompt
        if not prompt:
            job.emit(Started(0, 0))
            return Finished("none", "", self._piece(""), self._timings, 0, False, False)
        sampler = self._sampler()
        logits = self._read_prompt(job)
        try:
            stop, word, is_full, text = self._write(job, sampler, logits)
        finally:
            held = len(self._room.conversation.session.tokens)
            self._room.metrics.add_text(self._made, self._timings.predicted_ms / 1e3, held, self._drafts)
        truncated = is_full or (self._shift is not None and self._shift.dropped > 0)
        return Finished(stop, word, self._piece(text), self._timings, held, truncated, self._new_line)

    def _sampler(self) -> RequestSampler:
        tokenizer = self._room.tokenizer
        sampler = RequestSampler(
            self._options.sampling, n_vocab=self._room.conversation.session.engine.spec.n_vocab, vocab=tokenizer,
            eog_ids=tokenizer.eog_ids, suppress_ids=tokenizer.suppress_ids,
        )
        accept_prompt(sampler, self._task.prompt)
        if self._task.constraint is not None:
            sampler.constrain(self._task.constraint)
        sampler.keep_picks = self._options.post_sampling_probs and self._options.sampling.n_probs > 0
        return sampler

    def _read_prompt(self, job: Job[Event]) -> np.ndarray:
        """Run what of the prompt is not there; logits [V] of its last token."""
        prompt, room = self._task.prompt, self._room
        start_s = last_s = time.perf_counter()
        cached = room.conversation.begin(prompt, reuse=self._options.cache_prompt)
        room.metrics.cached_tokens += cached
        room.view.prompt_cached = room.view.prompt_processed = cached
        room.live.look(always=True)
        job.emit(Started(len(prompt), cached))
        job.emit(Progress(len(prompt), cached, cached, 0.0))
        counted = 0

        def progress(done: int, _all: int) -> None:
            nonlocal counted, last_s
            now_s = time.perf_counter()
            room.metrics.add_prompt(done - counted, now_s - last_s)
            counted, last_s = done, now_s
            room.view.prompt_processed = cached + done
            room.live.look()
            job.emit(Progress(len(prompt), cached, cached + done, (now_s - start_s) * 1e3))
            job.check()   # the step is settled: what was read so far stays for the next request

        logits: np.ndarray = room.conversation.session.prefill(
            prompt[cached:], border=(self._task.border or len(prompt) - TAIL_TOKENS) - cached, progress=progress
        )[0]
        self._prompt_done_s = time.perf_counter()
        self._timings = Timings(cached, len(prompt) - cached, (self._prompt_done_s - start_s) * 1e3)
        return logits

    def _write(self, job: Job[Event], sampler: RequestSampler, logits: np.ndarray) -> tuple[str, str, bool, str]:
        """Tokens until something ends the text: by what, the stop string, whether the context is full, the last text.
        """
        room, options = self._room, self._options
        # What the chain left of a drafted token is not kept, so those who ask for it get no drafts.
        self._speculation = None if sampler.keep_picks else room.speculation(sampler)
        tokens = generate(
            room.conversation.session, sampler, logits, n_predict=options.tokens_at_most,
            eog_ids=room.tokenizer.eog_ids, n_probs=0 if sampler.keep_picks else options.sampling.n_probs,
            speculation=self._speculation, shift=self._shift,
        )
        with closing(tokens):   # type: ignore[type-var]  # a generator, though it is declared as an iterator
            for token in tokens:
                text = self._take(token, sampler)
                matched = self._matcher.push(text)
                shown = matched.text
                late = 0 < options.t_max_predict_ms < self._timings.predicted_ms and self._new_line
                if matched.stop is not None:
                    return "word", matched.stop, False, shown
                if token.stop is not None or late:
                    last = self._matcher.push(self._utf8.flush())
                    shown += last.text
                    if last.stop is not None:
                        return "word", last.stop, False, shown
                    return _REASONS.get(token.stop or "", "limit"), "", token.stop == "context", (
                        shown + self._matcher.flush())
                if shown:
                    job.emit(self._piece(shown))
                job.check()
        raise AssertionError("the tokens ended without a reason")

    def _take(self, token: Token, sampler: RequestSampler) -> str:
        """Note a token; the characters that are complete with it."""
        room = self._room
        self._made += 1
        self._timings = Timings(
            self._timings.cache_n, self._timings.prompt_n, self._timings.prompt_ms, self._made,
            (time.perf_counter() - self._prompt_done_s) * 1e3,
            sum(each.drafted_tokens for each in self._drafts.values()),
            sum(each.accepted_tokens for each in self._drafts.values()),
        )
        self._tokens.append(token.id)
        if token.probs is not None:
            self._probs.append(token.probs)
        elif sampler.keep_picks:
            self._probs.append(_pick_probs(sampler, token.id, self._options.sampling.n_probs))
        special = room.special or token.id in self._task.visible
        text = self._utf8.push(room.tokenizer.token_bytes(token.id, special=special))
        self._new_line = self._new_line or "\n" in text
        view = room.view
        view.decoded, view.has_new_line = self._made, self._new_line
        view.remaining = self._options.tokens_at_most - self._made if self._options.tokens_at_most >= 0 else -1
        room.live.look(self._speculation)
        return text

    @property
    def _drafts(self) -> Mapping[str, DraftStats]:
        """Counts per drafter, of this request."""
        return {} if self._speculation is None else self._speculation.stats

    def _piece(self, text: str) -> Piece:
        piece = Piece(text, tuple(self._tokens), tuple(self._probs), len(self._task.prompt), self._timings)
        self._tokens, self._probs = [], []
        return piece


def _pick_probs(sampler: RequestSampler, token: int, count: int) -> TokenProbs:
    """What the sampler drew ``token`` from, its likeliest first; probabilities, in the place of their logarithms."""
    pick = sampler.picks.pop(0)
    assert pick.token == token, "nothing is drafted where picks are kept"
    probs = pick.candidates.probs()
    best = np.argsort(-probs, kind="stable")[:count]
    top = tuple(TokenLogprob(int(pick.candidates.ids[at]), float(probs[at])) for at in best if probs[at] > 0)
    return TokenProbs(token, pick.candidates.prob_of(token), top)


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 and a > 0 else 0.0


def joined(pieces: Sequence[Piece]) -> Piece:
    """Several pieces as one."""
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        tuple(probs for piece in pieces for probs in piece.probs),
        pieces[-1].prompt_tokens, pieces[-1].timings,
    )
