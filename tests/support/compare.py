"""How far two sets of logits are apart. All take logits [T, V] and compare log-probabilities, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

Logits = np.ndarray[Any, np.dtype[np.floating[Any]]]


def log_probs(logits: Logits) -> Logits:
    """Log-softmax over the last axis."""
    shifted: Logits = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    total: Logits = np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted - total


def max_difference(logits: Logits, reference: Logits) -> float:
    """Largest difference of one log-probability, over all positions and tokens."""
    return float(np.abs(log_probs(logits) - log_probs(reference)).max())


def mean_kl(logits: Logits, reference: Logits) -> float:
    """Mean over positions of KL(reference || logits), in nats."""
    expected = log_probs(reference)
    return float((np.exp(expected) * (expected - log_probs(logits))).sum(axis=-1).mean())


def top_agreement(logits: Logits, reference: Logits) -> float:
    """Fraction of positions at which both have the same likeliest token."""
    return float((logits.argmax(axis=-1) == reference.argmax(axis=-1)).mean())
