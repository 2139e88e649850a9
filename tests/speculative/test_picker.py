"""Choices of drafters that run the model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.settings.drafters import ModelDraftSettings
from kvs_core.speculative.drafter import NO_DRAFT, Draft
from kvs_core.speculative.picker import KEPT, DraftPicker, Guess

logits_of = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30).map(lambda v: np.array(v, np.float32))


def picker(temperature: float = 1.0, seed: int = 1, **settings: object) -> DraftPicker:
    return DraftPicker(ModelDraftSettings(**settings), temperature=temperature, seed=seed)  # type: ignore[arg-type]


@given(logits_of)
def test_greedy_choices(logits: np.ndarray) -> None:
    """The first of the largest logits, and no word of what it was drawn from: nor at temperature 0."""
    for each in (picker(), picker(0.0, sampling="probabilistic")):
        assert each.pick_of(logits) == Guess(int(logits.argmax()), None)


@given(logits_of, st.integers(0, 99))
def test_drawn_choices(logits: np.ndarray, seed: int) -> None:
    """One of the ten largest logits, with the candidates that it was drawn from, at the request's temperature."""
    guess = picker(2.0, seed, sampling="probabilistic").pick_of(logits)
    assert guess is not None
    assert guess.candidates is not None
    assert len(guess.candidates) == min(KEPT, logits.size)
    assert guess.candidates.prob_of(guess.token) > 0.0
    kept = np.sort(logits)[::-1][:KEPT].astype(np.float64)
    weights = np.exp((kept - kept[0]) / 2.0)
    assert guess.candidates.probs() == pytest.approx(weights / weights.sum(), rel=1e-5)


def test_drawn_choices_follow_their_probabilities() -> None:
    """5,000 draws of three tokens: chi-square below the 0.1 % point of two degrees of freedom."""
    probs = np.array([0.6, 0.3, 0.1])
    each = picker(sampling="probabilistic")
    guesses = [each.pick_of(np.log(probs).astype(np.float32)) for _ in range(5000)]
    counts = np.bincount([guess.token for guess in guesses if guess is not None], minlength=3)
    assert (((counts - probs * 5000) ** 2) / (probs * 5000)).sum() < 13.82


@pytest.mark.parametrize("sampling", ["greedy", "probabilistic"])
def test_drafting_stops_below_p_min(sampling: str) -> None:
    """Judged by the likeliest of the ten, whatever is drawn."""
    logits = np.log(np.array([0.3, 0.7])).astype(np.float32)
    assert picker(p_min=0.71, sampling=sampling).pick_of(logits) is None
    each = picker(p_min=0.69, sampling=sampling)
    tokens = {guess.token for guess in (each.pick_of(logits) for _ in range(200)) if guess is not None}
    assert tokens == ({0, 1} if sampling == "probabilistic" else {1})
    assert picker(p_min=1.0, sampling=sampling).pick_of(np.zeros(1, np.float32)) is not None


def test_short_drafts_are_thrown_away() -> None:
    """Fewer than ``n_min`` tokens are none."""
    guesses = [Guess(4, None), Guess(5, None)]
    assert picker(n_min=3).draft(guesses, "draft-mtp") == NO_DRAFT
    assert picker(n_min=2).draft(guesses, "draft-mtp") == Draft((4, 5), "draft-mtp")
    assert picker().draft([], "draft-mtp") == NO_DRAFT


def test_a_seed_repeats_the_choices() -> None:
    """The same request drafts the same."""
    logits = np.zeros(10, np.float32)
    first, again, other = ([each.pick_of(logits) for _ in range(20)] for each in (
        picker(seed=1, sampling="probabilistic"), picker(seed=1, sampling="probabilistic"),
        picker(seed=2, sampling="probabilistic")))
    tokens = [[guess.token for guess in guesses if guess is not None] for guesses in (first, again, other)]
    assert tokens[0] == tokens[1] != tokens[2]
