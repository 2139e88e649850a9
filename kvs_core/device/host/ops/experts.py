"""A mixture of experts in NumPy: expert by expert, each over the rows that chose it.

So an expert's matrices are read once in a step, and those that nobody chose not at all. In DECODE a row's products are
its own, and it adds its experts in the order of their numbers: its bits do not depend on what other rows chose.
"""

from __future__ import annotations

import numpy as np

from kvs_core.device.base import Buffer, ExpertWeights, Weight
from kvs_core.device.host.ops.basic import gated, matmul, rms_norm, sigmoid
from kvs_core.device.host.workers import Team
from kvs_core.memory.phases import Phase


def choose(logits: Buffer, used: int) -> tuple[np.ndarray, Buffer]:
    """Each row's experts and their weights, largest first: int64 and float32 [T, used].   logits [T, experts]

    The softmax over all experts, scaled to the sum 1 over those chosen, is the softmax over those alone.
    """
    chosen = np.argsort(-logits, axis=-1, kind="stable")[:, :used]
    weights = np.take_along_axis(logits, chosen, axis=-1)
    weights = np.exp(weights - weights[:, :1])
    weights /= weights.sum(axis=-1, keepdims=True)
    return chosen, weights


def add_experts(
    x: Buffer, norm: Buffer, weights: ExpertWeights, *, eps: float, phase: Phase, team: Team
) -> None:
    """See ``Ops.add_experts``."""
    def multiply(rows: Buffer, weight: Weight) -> Buffer:
        out = np.empty((len(rows), weight.n_out), np.float32)
        matmul(rows, weight, out, phase=phase, team=team)
        return out

    def feed_forward(rows: Buffer, gate_up: Weight, down: Weight) -> Buffer:
        hidden = np.empty((len(rows), down.n_in), np.float32)
        gated(multiply(rows, gate_up), hidden, weights.activation)
        return multiply(hidden, down)

    y = np.empty_like(x)
    rms_norm(x, norm, y, eps=eps)
    chosen, shares = choose(multiply(y, weights.router), weights.used)
    total = np.zeros_like(x)
    for expert in np.unique(chosen).tolist():
        rows, ranks = np.nonzero(chosen == expert)
        made = feed_forward(y[rows], weights.gate_up[expert], weights.down[expert])
        total[rows] += shares[rows, ranks, None] * made
    if weights.shared_gate is not None:
        assert weights.shared_gate_up is not None
        assert weights.shared_down is not None
        made = feed_forward(y, weights.shared_gate_up, weights.shared_down)
        total += sigmoid(np.sum(y * weights.shared_gate, axis=-1, keepdims=True)) * made
    x += total
