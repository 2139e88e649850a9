"""Adaptive-p: the bell around the target and the memory that moves it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvs_core.sampling.adaptive import AdaptiveP
from kvs_core.sampling.candidates import Candidates


def make(*probs: float) -> Candidates:
    logits = [math.log(p) if p else -math.inf for p in probs]
    return Candidates(np.arange(len(probs), dtype=np.int32), np.array(logits, np.float32))


def test_the_token_nearest_to_the_target_becomes_the_best() -> None:
    """Logits follow 5 - 10 x^2 / (1 + x) with x = |p - A| / 0.3, A the target at first; banned tokens stay banned."""
    got = AdaptiveP(0.3, 0.9).reshape(make(0.6, 0.3, 0.1, 0.0)).logits
    for logit, p in zip(got[:3].tolist(), (0.6, 0.3, 0.1), strict=True):
        x = abs(p - 0.3) / 0.3
        assert logit == pytest.approx(5 - 10 * x * x / (1 + x), abs=1e-5)
    assert got[3] == -np.inf


def test_sure_choices_lower_the_aim() -> None:
    """After tokens likelier than the target the aim falls, to 0 at least, and comes back after unlikely ones."""
    adaptive = AdaptiveP(0.3, 0.5)

    def best() -> int:
        return int(adaptive.reshape(make(0.55, 0.3, 0.15)).logits.argmax())

    assert best() == 1
    for _ in range(10):
        adaptive.observe(0.9)
    assert best() == 2
    for _ in range(10):
        adaptive.observe(0.01)
    assert best() == 0
