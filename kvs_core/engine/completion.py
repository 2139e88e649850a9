"""The text that follows a prompt, as it comes: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from kvs_core.engine.context_shift import ContextShift
from kvs_core.engine.round import generate
from kvs_core.engine.session import Session
from kvs_core.engine.speculation import Speculation
from kvs_core.formats.tokenizer import StopMatcher, Tokenizer, Utf8Stream
from kvs_core.sampling.chain import Sampler
from kvs_core.sampling.logprobs import TokenProbs


@dataclass(frozen=True, slots=True)
class Piece:
    """One generated token, and the text that can be shown since the last one: characters may span several tokens.

    stop   why the text ends here: "eos", "length", "stop" (a stop string), "context"; None if it goes on
    probs  log-probabilities of the raw logits it was drawn from, if asked for
    """

    token: int
    text: str
    stop: str | None
    probs: TokenProbs | None


def complete(
    session: Session,
    sampler: Sampler,
    logits: np.ndarray,
    tokenizer: Tokenizer,
    *,
    n_predict: int,
    stops: Sequence[str] = (),
    special: bool = False,
    n_probs: int = 0,
    speculation: Speculation | None = None,
    shift: ContextShift | None = None,
) -> Generator[Piece, None, None]:
    """Pieces of the text that follows ``logits`` [V], the last prompt token's; see ``generate``.

    stops    strings that end the text and are not part of it; one that is complete counts before any other end
    special  control tokens are text too
    """
    utf8, matcher = Utf8Stream(), StopMatcher(stops)
    for token in generate(
        session, sampler, logits, n_predict=n_predict, eog_ids=tokenizer.eog_ids, n_probs=n_probs,
        speculation=speculation, shift=shift,
    ):
        matched = matcher.push(utf8.push(tokenizer.token_bytes(token.id, special=special)))
        text = matched.text
        if token.stop is not None and matched.stop is None:
            matched = matcher.push(utf8.flush())
            text += matched.text + matcher.flush()
        stop = token.stop if matched.stop is None else "stop"
        yield Piece(token.id, text, stop, token.probs)
        if stop is not None:
            return
