"""A round: sample the token that follows, and run it. And the loop over rounds until something ends the text.

The loop yields one ``Token`` per round. Text, stop strings and printing are the caller's: a generator that is closed
leaves the session at the last commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvs_core.engine.session import Session
from kvs_core.sampling.candidates import Candidates
from kvs_core.sampling.chain import Sampler
from kvs_core.sampling.logprobs import TokenProbs, token_probs


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
    session: Session, sampler: Sampler, logits: np.ndarray, *, n_predict: int, eog_ids: frozenset[int], n_probs: int = 0
) -> Iterator[Token]:
    """Tokens that follow ``logits`` [V], those of the last prompt token.

    n_predict  tokens at most, 0: none; -1: until the model or the context ends
    The last token of the text is sampled but not run: nothing follows it. The context ends the text when prompt and
    generated tokens fill it, as in llama-server.
    """
    made = 0
    enough = None if n_probs > 0 else sampler.enough
    following: np.ndarray | Candidates = logits
    while made != n_predict:
        token = sampler.pick(following).token
        probs = None
        if n_probs > 0:
            assert isinstance(following, np.ndarray)
            probs = token_probs(following, token, n_probs)
        sampler.accept(token)
        made += 1
        stop = None
        if token in eog_ids:
            stop = "eos"
        elif 0 <= n_predict <= made:
            stop = "length"
        elif session.context_left <= 1:
            stop = "context"
        yield Token(token, stop, probs)
        if stop is not None:
            return
        following = session.decode(token, enough=enough)


def accept_prompt(sampler: Sampler, prompt: Sequence[int]) -> None:
    """Penalties and DRY see the prompt."""
    for token in prompt:
        sampler.accept(token)
