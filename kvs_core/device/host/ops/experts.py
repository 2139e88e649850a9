"""A mixture of experts in NumPy: expert by expert, each over the rows that chose it.

So an expert's matrices are read once in a step, and those that nobody chose not at all. In DECODE a row's products are
its own, and it adds its experts in the order of their numbers: its bits do not depend on what other rows chose.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

from kvs_core.device.host.ops.basic import gated, matmul, rms_norm, sigmoid
from kvs_core.device.host.workers import Team
from kvs_core.device.operands import Activation, Buffer, ExpertWeights, MixtureWeights, Weight
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
    products = _Products(weights.activation, phase, team)
    y = np.empty_like(x)
    rms_norm(x, norm, y, eps=eps)
    total = _routed(y, y, weights, products)
    if weights.shared_gate is not None:
        assert weights.shared_gate_up is not None
        assert weights.shared_down is not None
        made = products.feed_forward(y, weights.shared_gate_up, weights.shared_down)
        total += sigmoid(np.sum(y * weights.shared_gate, axis=-1, keepdims=True)) * made
    x += total


def add_mixture(x: Buffer, weights: MixtureWeights, *, eps: float, phase: Phase, team: Team) -> None:
    """See ``Ops.add_mixture``."""
    products = _Products(weights.experts.activation, phase, team)

    def normed(rows: Buffer, norm: Buffer) -> Buffer:
        out = np.empty_like(rows)
        rms_norm(rows, norm, out, eps=eps)
        return out

    total = normed(products.feed_forward(normed(x, weights.norm), weights.gate_up, weights.down), weights.dense_norm)
    asked = normed(x, weights.router_scale / np.float32(sqrt(x.shape[1])))
    routed = _routed(normed(x, weights.experts_norm), asked, weights.experts, products, weights.expert_scales)
    total += normed(routed, weights.sum_norm)
    x += normed(total, weights.post_norm)


class _Products:
    """What the matrices make of rows, in memory of their own."""

    def __init__(self, activation: Activation, phase: Phase, team: Team) -> None:
        self._activation = activation
        self._phase = phase
        self._team = team

    def multiply(self, rows: Buffer, weight: Weight) -> Buffer:
        """rows @ weight.T"""
        out = np.empty((len(rows), weight.n_out), np.float32)
        matmul(rows, weight, out, phase=self._phase, team=self._team)
        return out

    def feed_forward(self, rows: Buffer, gate_up: Weight, down: Weight) -> Buffer:
        """down(activation(gate(rows)) * up(rows))"""
        hidden = np.empty((len(rows), down.n_in), np.float32)
        gated(self.multiply(rows, gate_up), hidden, self._activation)
        return self.multiply(hidden, down)


def _routed(
    y: Buffer, asked: Buffer, weights: ExpertWeights, products: _Products, scales: np.ndarray | None = None
) -> Buffer:
    """The sum of what a row's experts make of y, by the shares that ``asked`` gives them and perhaps their scales."""
    chosen, shares = choose(products.multiply(asked, weights.router), weights.used)
    if scales is not None:
        shares *= scales[chosen]
    total = np.zeros_like(y)
    for expert in np.unique(chosen).tolist():
        rows, ranks = np.nonzero(chosen == expert)
        made = products.feed_forward(y[rows], weights.gate_up[expert], weights.down[expert])
        total[rows] += shares[rows, ranks, None] * made
    return total
