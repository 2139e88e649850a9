"""A round: run the token sampled last, with what is drafted behind it, and sample what follows. And the loop over them.

The loop yields one ``Token`` at a time. Text, stop strings and printing are the caller's: a generator that is closed
leaves the session at the last commit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from kvs_core.engine.context_shift import ContextShift
from kvs_core.engine.session import Session
from kvs_core.engine.speculation import MOST_DRAFTED, Speculation
from kvs_core.sampling.chain import Sampler
from kvs_core.sampling.logprobs import TokenProbs, token_probs
from kvs_core.speculative.drafter import NO_DRAFT, draft_limit
from kvs_core.speculative.verdict import Verdict
from kvs_core.speculative.verifier import Row


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    stop   why the text ends with it: "eos", "length", "context"; None if it goes on
    probs  log-probabilities of the raw logits it was drawn from, if asked for
    """

    id: int
    stop: str | None
    probs: TokenProbs | None


def generate(
    session: Session, sampler: Sampler, logits: np.ndarray, *, n_predict: int, eog_ids: frozenset[int],
    n_probs: int = 0, speculation: Speculation | None = None, shift: ContextShift | None = None,
) -> Iterator[Token]:
    """Tokens that follow ``logits`` [V], those of the last prompt token.

    n_predict    tokens at most, 0: none; -1: until the model or the context ends
    speculation  drafts, so that a round may give several tokens; at temperature 0 they are the same tokens
    shift        makes room in a context that is full; None: the text ends there
    The last token of the text is sampled but not run: nothing follows it. The context ends the text when prompt and
    generated tokens fill it, as in llama-server.
    """
    if n_predict == 0:
        return
    if speculation is not None:
        speculation.begin(session.tokens)
    token = sampler.pick(logits).token
    probs = token_probs(logits, token, n_probs) if n_probs > 0 else None
    sampler.accept(token)
    waiting = deque([(token, probs)])
    made = 0
    while True:
        token, probs = waiting.popleft()
        made += 1
        stop = None
        if token in eog_ids:
            stop = "eos"
        elif 0 <= n_predict <= made:
            stop = "length"
        elif shift is None and session.context_left + len(waiting) <= 1:
            stop = "context"
        yield Token(token, stop, probs)
        if stop is not None:
            return
        if not waiting:
            if shift is not None and session.context_left <= 1:
                shift.make_room(session)
            remaining = None if n_predict < 0 else n_predict - made
            waiting.extend(run_round(session, sampler, token, remaining, n_probs, speculation))


def run_round(
    session: Session, sampler: Sampler, token: int, remaining: int | None, n_probs: int, speculation: Speculation | None
) -> list[tuple[int, TokenProbs | None]]:
    """Run ``token``, with a draft behind it if there is one, and sample what follows: at least one token.

    remaining  tokens that may still be generated; None: no limit
    """
    enough = None if n_probs > 0 else sampler.enough
    engine, draft, within = session.engine, NO_DRAFT, 0
    if speculation is not None:
        limit = draft_limit(
            context_tokens=engine.context.context_tokens, history_tokens=len(session.tokens) + 1,
            remaining_tokens=remaining,
        )
        draft = speculation.propose(token, limit)
        if len(draft) > MOST_DRAFTED:
            draft = speculation.shorten(engine.widest(1 + len(draft)) - 1)
        if not draft and speculation.drafts_within:
            within = max(0, min(limit, MOST_DRAFTED))
    with engine.open(1 + max(len(draft), within)) as step:
        if speculation is not None and within > 0:
            draft = speculation.propose_within(step, within)
        start = perf_counter()
        step.run([token, *draft.tokens])
        best = None if enough is None else step.best(enough, 0)
        rows: Sequence[Row] = list(step.logits(0)) if best is None else best
        if speculation is None:
            picked = sampler.pick(rows[0]).token
            sampler.accept(picked)
            verdict = Verdict((picked,))
        else:
            verdict = speculation.judge(rows, sampler)
        keep = len(verdict.tokens)   # the token's row and those of accepted drafts
        step.settle(keep)
        session.tokens.extend([token, *verdict.tokens[:-1]])
    if speculation is not None:
        speculation.accept(verdict, perf_counter() - start)
    return [(made, _probs(row, made, n_probs)) for row, made in zip(rows, verdict.tokens, strict=False)]


def _probs(row: Row, token: int, n_probs: int) -> TokenProbs | None:
    if n_probs <= 0:
        return None
    assert isinstance(row, np.ndarray)
    return token_probs(row, token, n_probs)


def accept_prompt(sampler: Sampler, prompt: Sequence[int]) -> None:
    """Penalties and DRY see the prompt."""
    for token in prompt:
        sampler.accept(token)
