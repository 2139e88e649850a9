"""DraftPicker: how a drafter that runs the model chooses its tokens, the likeliest ones or drawn ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvs_core.sampling import stages
from kvs_core.sampling.candidates import Candidates, Logits, top_positions
from kvs_core.sampling.rng import MersenneTwister
from kvs_core.settings.drafters import ModelDraftSettings
from kvs_core.speculative.drafter import NO_DRAFT, Draft

KEPT = 10
"""Tokens that a draft is chosen from: the largest logits."""

_DRAFT_SEED = 0x85EBCA6B


@dataclass(frozen=True, slots=True)
class Guess:
    """A drafted token. candidates: what it was drawn from; None if it is the likeliest one."""

    token: int
    candidates: Candidates | None


class DraftPicker:
    """The choices of one request. A drafter asks for one token after the other, until it gets None or has ``n_max``.

    Whether drafting goes on is decided by the likeliest token, not by the drawn one: else ``p_min`` would show in what
    is generated.
    """

    def __init__(self, settings: ModelDraftSettings, *, temperature: float, seed: int) -> None:
        """``temperature`` and ``seed`` are the request's; at temperature 0 every choice is the likeliest token."""
        self._settings = settings
        self._temperature = temperature
        self._draws = settings.sampling == "probabilistic" and temperature > 0.0
        self._dice = MersenneTwister(seed ^ _DRAFT_SEED)

    def pick(self, best: Candidates) -> Guess | None:
        """A token among ``best``, the ``KEPT`` largest logits, sorted; None to end the draft before it."""
        assert best.is_sorted
        assert len(best) <= KEPT
        candidates = stages.temperature(best, self._temperature) if self._draws else best
        probs = candidates.probs()
        if float(probs[0]) < self._settings.p_min:
            return None
        if not self._draws:
            return Guess(int(best.ids[0]), None)
        return Guess(int(candidates.ids[stages.draw_index(probs, self._dice.uniform())]), candidates)

    def pick_of(self, logits: Logits) -> Guess | None:
        """``pick`` among all ``logits`` [V]."""
        kept = top_positions(logits, KEPT)
        return self.pick(Candidates(kept.astype(np.int32), logits[kept], is_sorted=True))

    def draft(self, guesses: list[Guess], source: str) -> Draft:
        """The draft of ``guesses``, in order; none if they are fewer than ``n_min``."""
        if not guesses or len(guesses) < self._settings.n_min:
            return NO_DRAFT
        drawn = tuple(guess.candidates for guess in guesses if guess.candidates is not None)
        return Draft(tuple(guess.token for guess in guesses), source, drawn)
