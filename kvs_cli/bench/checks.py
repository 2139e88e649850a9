"""What can be said of a measurement before a folder is made or a process started: from a model's file alone."""

from __future__ import annotations

from kvs_cli.open_model import OpenModel
from kvs_core.engine.budget import Drafting
from kvs_core.engine.speculation import MOST_DRAFTED
from kvs_core.errors import ContextError
from kvs_core.settings import ContextPlan, EngineSettings
from kvs_core.speculative.drafter import verify_width

WARM_ROUNDS = 12
FLOOR_WARM_ROUNDS, FLOOR_ROUNDS = 2, 8
_RESERVED_ROUNDS = WARM_ROUNDS + FLOOR_WARM_ROUNDS + FLOOR_ROUNDS
_LEAST_PROMPT = 64


def check_engine(model: OpenModel, settings: EngineSettings, flag: str) -> ContextPlan:
    """The context. Raises the ``KvsError`` for one that is longer than the model was trained for, and for drafters that
    the model lacks or whose drafts do not fit.

    flag  the one by which this command is told its context
    """
    context, most = settings.context.plan(model.spec.n_ctx_train, model.spec.n_ctx_most), model.spec.n_ctx_most
    if context.capped:
        raise ContextError(
            f"{flag}: that takes a context of {settings.context.ctx_size} tokens, the model has {most} at most; "
            f"use no more, or --override-kv {model.spec.arch}.context_length=int:N",
            prompt_tokens=settings.context.ctx_size, context_tokens=most,
        )
    Drafting.of(settings.speculative.types).check(model.spec)
    verify_width(settings.speculative, ubatch_tokens=context.ubatch_tokens, context_tokens=context.context_tokens)
    return context


def prompt_room(context_tokens: int, decode_tokens: int) -> int:
    """Tokens of a point's prompt: what is left of a context beside those that decoding may need, warm-up and the rounds
    without copies included. The same for every variant, so that all have the same prompt. ``ContextError``."""
    reserved = decode_tokens + _RESERVED_ROUNDS * (1 + MOST_DRAFTED)
    room = context_tokens - reserved
    if room < _LEAST_PROMPT:
        raise ContextError(
            f"--contexts: a context of {context_tokens} tokens leaves {max(0, room)} for the prompt beside "
            f"{decode_tokens} timed tokens and {reserved - decode_tokens} for warm-up; use at least "
            f"{reserved + _LEAST_PROMPT}, or lower --decode-tokens",
            prompt_tokens=_LEAST_PROMPT, context_tokens=context_tokens,
        )
    return room
