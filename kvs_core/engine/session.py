"""Session: one conversation on an engine: the tokens whose rows are in KV and state, and how it goes on or back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvs_core.engine.checkpoints import Checkpoint, Checkpoints, ParkedSequence
from kvs_core.engine.engine import Engine
from kvs_core.errors import ContextError
from kvs_core.memory.phases import Phase
from kvs_core.models.recurrent import StateSnapshot
from kvs_core.sampling.candidates import Candidates
from kvs_core.settings.rooms import ContextPlan
from kvs_core.streaming.history import ParkedHistory
from kvs_core.units import MIB, Progress

LOGGER = logging.getLogger(__name__)

TAIL_TOKENS = 4
"""At the end of a prompt: the next one is likely to have other tokens there, and may have the same before them."""


@dataclass(frozen=True, slots=True, eq=False)
class ParkedSession:
    """A conversation that is set aside.

    checkpoints  where else than at its end it can be taken up, by position
    can_rewind   it can be taken up anywhere that its history allows
    """

    tokens: tuple[int, ...]
    sequence: ParkedSequence
    checkpoints: tuple[Checkpoint, ...]
    can_rewind: bool

    @property
    def parts(self) -> tuple[ParkedHistory | Checkpoint, ...]:
        """All that takes host memory. A copy of a conversation shares checkpoints with it."""
        return (self.sequence.history, self.sequence.end, *self.checkpoints)

    def reusable(self, prompt: Sequence[int]) -> int:
        """How many tokens of ``prompt`` need not be read if this conversation goes on with it."""
        nearest = self.sequence.history.nearest if self.can_rewind else None
        return _reusable(self.tokens, prompt, nearest, self.checkpoints)


class Session:
    """The tokens of one sequence and the steps that extend it."""

    def __init__(self, engine: Engine, checkpoints: Checkpoints | None = None, *, checkpoint_tokens: int = 0) -> None:
        """
        checkpoints        where to keep those of a model that needs some to go back; None: none are made
        checkpoint_tokens  least distance of two that a prompt makes
        """
        self.engine = engine
        self.tokens: list[int] = []
        self._checkpoints = None if engine.can_rewind and not engine.drops_passed else checkpoints
        self._has_refused = False   # a checkpoint that was too large, and said so
        self._checkpoint_tokens = checkpoint_tokens

    @property
    def context_left(self) -> int:
        """Tokens that can still be added."""
        return self.engine.context.context_tokens - len(self.tokens)

    def prefill(
        self, prompt: Sequence[int], *, border: int = 0, progress: Progress | None = None, all_logits: bool = False
    ) -> np.ndarray:
        """Run the prompt in batches of ubatches; logits float32 [1, V] of its last token, or [T, V] of all.

        border  tokens of it behind which the next prompt is likely to differ: there a checkpoint is made, and a ubatch
                ends if the model has a state that is to be taken there

        ``ContextError`` if it does not fit; then nothing has happened.
        """
        assert len(prompt) > 0, "an empty prompt"
        check_prompt(len(self.tokens) + len(prompt), self.engine.context)
        logits: list[np.ndarray] = []
        done, before = 0, len(self.tokens)
        border = border if self._checkpoints is not None and 0 < border < len(prompt) else 0
        cut = 0 if self.engine.can_rewind else border
        sizes = [rows for part in (cut, len(prompt) - cut)
                 for rows in ubatches(part, self.engine.context.batch_tokens, self.engine.context.ubatch_tokens)]
        for rows in sizes:
            part = prompt[done : done + rows]
            with self.engine.step(part, Phase.PREFILL) as step:
                done += rows
                if all_logits:
                    logits.append(step.logits(0))
                elif done == len(prompt):
                    logits.append(step.logits())
                step.settle()
            self.tokens.extend(part)
            if self._checkpoints is not None and done - rows < border < done:
                self._add(Checkpoint(StateSnapshot(before + border, {}), None))
            self._checkpoint(done in (border, len(prompt)))
            if progress is not None:
                progress(done, len(prompt))
        return np.concatenate(logits)

    def keep_common(self, prompt: Sequence[int]) -> int:
        """Go back to the longest beginning of ``prompt`` that need not be read again, and return its tokens.

        At least one token is left to be read: it gives the logits that the text begins with. A model with recurrent
        layers stays where it is, goes back to a checkpoint, or begins anew.
        """
        kept = self.reusable(prompt)
        self.tell_lost(self.tokens, prompt, kept)
        if kept < len(self.tokens):
            self._go_back(kept)
        return kept

    def tell_lost(self, tokens: Sequence[int], prompt: Sequence[int], kept: int) -> None:
        """Say so where a prompt of which a conversation of ``tokens`` can keep so many has more in common with it."""
        common = common_prefix(tokens, prompt[:-1])
        if kept < common:
            LOGGER.info("a prompt has %d tokens in common with a conversation, and reads those behind %d again: %s",
                        common, kept, self._why_lost)  # fmt: skip

    @property
    def _why_lost(self) -> str:
        if not self.engine.can_rewind:
            return "recurrent layers go back to checkpoints alone"
        if self.engine.drops_passed:
            return "sliding windows have passed them, and --swa-full was not given"
        return "sliding windows have passed them, and the file it came from was saved without --swa-full"

    def reusable(self, prompt: Sequence[int]) -> int:
        """How many tokens ``keep_common`` would keep."""
        return _reusable(self.tokens, prompt, self.engine.nearest if self.engine.can_rewind else None, self.checkpoints)

    def _go_back(self, tokens: int) -> None:
        held = None if self._checkpoints is None or tokens == 0 else self._checkpoints.best(tokens)
        if held is None or self.engine.can_rewind:
            self.rewind(tokens)
        else:
            self.engine.go_back(held)
            self._forget_behind(tokens)

    def _checkpoint(self, is_wanted: bool) -> None:
        """Where it is wanted, and within a prompt at its distance."""
        if self._checkpoints is None:
            return
        last = self._checkpoints.positions[-1] if len(self._checkpoints) else 0
        if len(self.tokens) > last and (is_wanted or len(self.tokens) - last >= self._checkpoint_tokens > 0):
            self._add(self.engine.checkpoint())

    def _add(self, made: Checkpoint) -> None:
        assert self._checkpoints is not None
        if not self._checkpoints.add(made):
            if not self._has_refused:
                self._has_refused = True
                LOGGER.warning(
                    "a checkpoint is not kept: it takes %.0f MiB, more than all may; prompts that differ are read anew",
                    self._checkpoints.bytes_of([made]) / MIB,
                )
            if self._checkpoints.are_alike:   # no other will be kept
                self._checkpoints = None
        self._keep_checkpoints()

    def _keep_checkpoints(self) -> None:
        self.engine.keep([] if self._checkpoints is None else self._checkpoints.positions)

    def rewind(self, tokens: int) -> None:
        """Go on behind the first ``tokens`` tokens; see ``Engine.rewind``."""
        self.engine.rewind(tokens)
        self._forget_behind(tokens)

    def shift(self, keep: int, discard: int) -> None:
        """Drop the tokens [keep, keep + discard): those behind them follow the first ``keep``; see ``Engine.shift``.

        If that fails the session is empty.
        """
        try:
            self.engine.shift(keep, discard)
            del self.tokens[keep : keep + discard]
        except BaseException:
            self.rewind(0)
            raise

    def _forget_behind(self, tokens: int) -> None:
        del self.tokens[tokens:]
        if self._checkpoints is not None:
            self._checkpoints.forget_behind(tokens)
            self._keep_checkpoints()

    @property
    def checkpoints(self) -> Sequence[Checkpoint]:
        """Where else than at its end the conversation can be taken up, by position."""
        return () if self._checkpoints is None else self._checkpoints.held

    @property
    def parked_bytes(self) -> int:
        """Host memory that ``park`` would give away."""
        return self.engine.parked_bytes() + sum(held.size_bytes for held in self.checkpoints)

    @property
    def least_parked_bytes(self) -> int:
        """What is left of ``parked_bytes`` when ``thin`` can do no more."""
        left = () if self._checkpoints is None else self._checkpoints.thinnest
        return self.engine.parked_bytes([held.position for held in left]) + sum(held.size_bytes for held in left)

    def thin(self) -> bool:
        """Drop a checkpoint, to take less memory; False if the last two are left."""
        thinned = self._checkpoints is not None and self._checkpoints.thin()
        self._keep_checkpoints()
        return thinned

    def park(self) -> ParkedSession:
        """Set the conversation aside and be empty. Between steps.

        ``DeviceError`` if the device fails; then the session is as it was or, if it could not be, empty.
        """
        tokens, checkpoints = tuple(self.tokens), tuple(self.checkpoints)
        try:
            sequence = self.engine.park()
        finally:
            if self.engine.committed == 0:
                self._forget_behind(0)
        return ParkedSession(tokens, sequence, checkpoints, self.engine.can_rewind)

    def unpark(self, parked: ParkedSession) -> None:
        """Be a conversation that was set aside, as if it had never been; from an empty session. ``parked`` is used up.

        If that fails the session is empty, and ``parked`` is whole.
        """
        try:
            self.engine.unpark(parked.sequence)
        except BaseException:
            self.rewind(0)
            raise
        self._be(parked.tokens, parked.checkpoints)

    def fork(self, parked: ParkedSession, tokens: int) -> None:
        """Begin with the first ``tokens`` tokens of a conversation that stays aside: their pages are copied, so none is
        read again. ``tokens``: what ``parked.reusable`` says. If that fails the session is empty."""
        history, engine = parked.sequence.history, self.engine
        pages = (
            (layer, page, data.data)
            for layer in range(engine.kv_layers) for page, data in history.pages(layer, tokens)
        )
        checkpoints = [held for held in parked.checkpoints if held.position <= tokens]
        if parked.can_rewind:
            checkpoints.append(Checkpoint(StateSnapshot(tokens, {}), None))
        self.take_up(parked.tokens[:tokens], pages, checkpoints)

    def take_up(
        self, tokens: Sequence[int], pages: Iterable[tuple[int, int, bytes | memoryview]],
        checkpoints: Sequence[Checkpoint],
    ) -> None:
        """Be the conversation that was left with these tokens, pages and checkpoints, the last one at its end.

        If that fails, the session is empty.
        """
        self.rewind(0)
        try:
            self.engine.take_up(pages, checkpoints[-1], len(tokens))
        except BaseException:
            self.rewind(0)
            raise
        self._be(tokens, checkpoints)

    def _be(self, tokens: Sequence[int], checkpoints: Sequence[Checkpoint]) -> None:
        self.tokens = list(tokens)
        for checkpoint in checkpoints:
            if self._checkpoints is not None and checkpoint.position > 0:
                self._checkpoints.add(checkpoint)
        self._keep_checkpoints()

    def decode(self, token: int, *, enough: int | None = None) -> np.ndarray | Candidates:
        """Add one token and return the logits float32 [V] that follow it, or the ``enough`` largest of them."""
        with self.engine.step([token], Phase.DECODE) as step:
            best = None if enough is None else step.best(enough)
            logits: np.ndarray | Candidates = step.logits()[0] if best is None else best[0]
            step.settle()
        self.tokens.append(token)
        return logits


def common_prefix(held: Sequence[object], wanted: Sequence[object]) -> int:
    """How many tokens, or characters, both begin with."""
    most = min(len(held), len(wanted))
    if list(held[:most]) == list(wanted[:most]):   # quick, and nearly always so
        return most
    return next(index for index in range(most) if held[index] != wanted[index])


def _reusable(
    tokens: Sequence[int], prompt: Sequence[int], nearest: Callable[[int], int] | None,
    checkpoints: Sequence[Checkpoint],
) -> int:
    """Tokens of ``prompt`` that a conversation of ``tokens`` can begin with: never all, so that there are logits.

    nearest  see ``Engine.nearest``; None: it can be taken up at its end and its checkpoints alone
    """
    common = common_prefix(tokens, prompt[:-1])
    if common == len(tokens):
        return common
    if nearest is not None:
        return nearest(common)
    return max((held.position for held in checkpoints if held.position <= common), default=0)


def check_prompt(
    prompt_tokens: int, context: ContextPlan, *, is_session: bool = False, can_shift: bool = True
) -> None:
    """``ContextError`` unless a prompt of that many tokens leaves room in the context for one more.

    is_session  the prompt is all that a session holds; can_shift: its context can be shifted, see ``Engine.shift``
    """
    if prompt_tokens >= context.context_tokens:
        what, lever = ("session", "begin a new --session") if is_session else ("prompt", "shorten the prompt")
        if is_session and can_shift:
            lever = "use --context-shift"
        raise ContextError(
            f"the {what} has {prompt_tokens} tokens, the context holds {context.context_tokens} and must leave room "
            f"for one more; {context.advice(lever)}",
            prompt_tokens=prompt_tokens,
            context_tokens=context.context_tokens,
        )


def ubatches(tokens: int, batch_tokens: int, ubatch_tokens: int) -> list[int]:
    """Rows of each prefill step: batches cut into ubatches, as llama-server cuts them."""
    sizes = []
    for start in range(0, tokens, batch_tokens):
        batch = min(batch_tokens, tokens - start)
        sizes += [min(ubatch_tokens, batch - at) for at in range(0, batch, ubatch_tokens)]
    return sizes
