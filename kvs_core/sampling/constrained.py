"""A sampler whose text has to follow a rule: a grammar, a JSON schema, a limit on thoughts."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvs_core.errors import SettingsError
from kvs_core.sampling.candidates import Candidates, Logits
from kvs_core.sampling.chain import Sampler

Mask = npt.NDArray[np.bool_]


class Constraint(Protocol):
    """A rule for the tokens of a text."""

    def allowed(self) -> Mask | None:
        """[V] bool: tokens that may follow; None if any may. Raises SettingsError where nothing can."""

    def accept(self, token: int, /) -> None:
        """Take note of the next token of the text."""


class AllOf:
    """Several constraints at once."""

    def __init__(self, *constraints: Constraint) -> None:
        self._constraints = constraints

    def allowed(self) -> Mask | None:
        """Tokens that all of them allow; those of the first ones where they have none in common."""
        both: Mask | None = None
        for constraint in self._constraints:
            mask = constraint.allowed()
            if mask is not None:
                both = mask if both is None else (common if (common := both & mask).any() else both)
        return both

    def accept(self, token: int, /) -> None:
        """Take note of the next token of the text."""
        for constraint in self._constraints:
            constraint.accept(token)


class ConstrainedSampler(Sampler):
    """A ``Sampler`` that gives tokens outside of a constraint no chance: their logits are -inf before the chain, so
    what is drawn is distributed as the chain says of the tokens that are allowed."""

    _constraint: Constraint | None = None

    def constrain(self, constraint: Constraint) -> None:
        """From now on what is accepted is text under ``constraint``: call it once the prompt is accepted."""
        self._constraint = constraint

    def accept(self, token: int) -> None:
        """See ``Sampler.accept``."""
        super().accept(token)
        if self._constraint is not None:
            self._constraint.accept(token)

    @property
    def enough(self) -> int | None:
        """See ``Sampler.enough``: under a constraint the best tokens may be the ones that are not allowed."""
        return super().enough if self._constraint is None else None

    def distribution(self, logits: Logits) -> Candidates:
        """See ``Sampler.distribution``. SettingsError if no token is allowed."""
        allowed = None if self._constraint is None else self._constraint.allowed()
        if allowed is None:
            return super().distribution(logits)
        masked = np.where(allowed, logits, np.float32(-np.inf))
        if masked.max() == -np.inf:
            raise SettingsError("no token can follow: the grammar allows none that the model can write; change it")
        return super().distribution(masked)
