"""Embeddings of a token per layer in NumPy: what a step's rows get for every layer, and how a layer adds its part."""

from __future__ import annotations

from math import sqrt

import numpy as np

from kvs_core.device.host.ops.basic import ACTIVATIONS, embed, matmul, rms_norm, scale
from kvs_core.device.host.workers import Team
from kvs_core.device.operands import Activation, Buffer, PerLayerWeights, Weight
from kvs_core.memory.phases import Phase


def inputs(
    tokens: np.ndarray, x: Buffer, weights: PerLayerWeights, out: Buffer, *, eps: float, phase: Phase, team: Team
) -> None:
    """See ``Ops.per_layer_inputs``."""
    rows, n_embd = x.shape
    size = len(weights.norm)
    embed(weights.table, tokens, out)
    scale(out, sqrt(size))
    projected = np.empty_like(out)
    matmul(x, weights.project, projected, phase=phase, team=team)
    scale(projected, 1.0 / sqrt(n_embd))
    parts = projected.reshape(rows, -1, size)
    rms_norm(parts, weights.norm, parts, eps=eps)
    out += projected
    scale(out, sqrt(0.5))


def add(
    x: Buffer, given: Buffer, gate: Weight, project: Weight, norm: Buffer, *, eps: float, phase: Phase, team: Team
) -> None:
    """See ``Ops.add_per_layer``."""
    gates = np.empty(given.shape, np.float32)
    matmul(x, gate, gates, phase=phase, team=team)
    made = np.empty_like(x)
    matmul(ACTIVATIONS[Activation.GELU](gates) * given, project, made, phase=phase, team=team)
    rms_norm(made, norm, made, eps=eps)
    x += made
