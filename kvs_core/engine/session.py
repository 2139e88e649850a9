"""Session: one conversation on an engine: which tokens it holds, and where it stands.

    tokens[0 : committed]    have their rows in KV and state
    tokens[committed : ]     the tail: at most the one token sampled last
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvs_core.engine.checkpoints import Checkpoints
from kvs_core.engine.engine import Engine
from kvs_core.errors import ContextError
from kvs_core.memory.phases import Phase
from kvs_core.sampling.candidates import Candidates
from kvs_core.settings.rooms import ContextPlan
from kvs_core.units import Progress


class Session:
    """The tokens of one sequence and the steps that extend it."""

    def __init__(self, engine: Engine, checkpoints: Checkpoints | None = None, *, checkpoint_tokens: int = 0) -> None:
        """
        checkpoints        where to keep those of a model with recurrent layers; None: none are made
        checkpoint_tokens  least distance of two that a prompt makes
        """
        self.engine = engine
        self.tokens: list[int] = []
        self._checkpoints = None if engine.can_rewind else checkpoints
        self._checkpoint_tokens = checkpoint_tokens

    @property
    def context_left(self) -> int:
        """Tokens that can still be added."""
        return self.engine.context.context_tokens - len(self.tokens)

    def prefill(
        self, prompt: Sequence[int], *, progress: Progress | None = None, all_logits: bool = False
    ) -> np.ndarray:
        """Run the prompt in batches of ubatches; logits float32 [1, V] of its last token, or [T, V] of all.

        ``ContextError`` if it does not fit; then nothing has happened.
        """
        assert len(prompt) > 0, "an empty prompt"
        check_prompt(len(self.tokens) + len(prompt), self.engine.context)
        logits: list[np.ndarray] = []
        done = 0
        for rows in ubatches(len(prompt), self.engine.context.batch_tokens, self.engine.context.ubatch_tokens):
            part = prompt[done : done + rows]
            with self.engine.step(part, Phase.PREFILL) as step:
                done += rows
                if all_logits:
                    logits.append(step.logits(0))
                elif done == len(prompt):
                    logits.append(step.logits())
                step.settle()
            self.tokens.extend(part)
            self._checkpoint(done == len(prompt))
            if progress is not None:
                progress(done, len(prompt))
        return np.concatenate(logits)

    def keep_common(self, prompt: Sequence[int]) -> int:
        """Go back to the longest beginning of ``prompt`` that need not be read again, and return its tokens.

        At least one token is left to be read: it gives the logits that the text begins with. A model with recurrent
        layers stays where it is, goes back to a checkpoint, or begins anew.
        """
        common = common_prefix(self.tokens, prompt[:-1])
        if common < len(self.tokens):
            self._go_back(common)
        return len(self.tokens)

    def _go_back(self, tokens: int) -> None:
        if self.engine.can_rewind:
            self.rewind(tokens)
            return
        held = None if self._checkpoints is None else self._checkpoints.best(tokens)
        if held is None:
            self.rewind(0)
        else:
            self.engine.go_back(held)
            del self.tokens[held.position :]
        if self._checkpoints is not None:
            self._checkpoints.forget_behind(len(self.tokens))

    def _checkpoint(self, is_end: bool) -> None:
        """Within a prompt at its distance, and at its end: a next turn goes on there, or differs just behind."""
        if self._checkpoints is None:
            return
        last = self._checkpoints.positions[-1] if len(self._checkpoints) else 0
        if len(self.tokens) > last and (is_end or len(self.tokens) - last >= self._checkpoint_tokens > 0):
            self._checkpoints.add(self.engine.checkpoint())

    def rewind(self, tokens: int) -> None:
        """Go on behind the first ``tokens`` tokens; see ``Engine.rewind``."""
        self.engine.rewind(tokens)
        del self.tokens[tokens:]

    def decode(self, token: int, *, enough: int | None = None) -> np.ndarray | Candidates:
        """Add one token and return the logits float32 [V] that follow it, or the ``enough`` largest of them."""
        with self.engine.step([token], Phase.DECODE) as step:
            best = None if enough is None else step.best(enough)
            logits: np.ndarray | Candidates = step.logits()[0] if best is None else best[0]
            step.settle()
        self.tokens.append(token)
        return logits


def common_prefix(held: Sequence[int], wanted: Sequence[int]) -> int:
    """How many tokens both begin with."""
    most = min(len(held), len(wanted))
    if held[:most] == wanted[:most]:
        return most
    return next(index for index in range(most) if held[index] != wanted[index])


def check_prompt(prompt_tokens: int, context: ContextPlan) -> None:
    """``ContextError`` unless a prompt of that many tokens leaves room in the context for one more."""
    if prompt_tokens >= context.context_tokens:
        raise ContextError(
            f"the prompt has {prompt_tokens} tokens, the context holds {context.context_tokens} and must leave room "
            f"for one more; {context.advice}",
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
