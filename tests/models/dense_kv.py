"""A KV cache without pages: lists of rows and a full softmax, for tests of the forward pass alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvs_core.device.base import Turn
from kvs_core.device.host.ops import basic
from kvs_core.device.operands import AttentionParams, AttentionRows


class DenseLayer:
    """One attention layer's keys and values, in float32, and float64 attention over them."""

    def __init__(self) -> None:
        self.k: list[np.ndarray] = []
        self.v: list[np.ndarray] = []

    def attend(self, given: AttentionRows, params: AttentionParams) -> None:
        y, q, out = given.y, given.q, given.out
        rows = len(y)
        position = len(self.k) - (rows if params.shares else 0)   # what is shared has been stored
        assert len(q) >= rows
        assert len(q) % 8 == 0
        heads = y[:, : params.q_columns].reshape(rows, params.heads, -1)
        queries = heads[..., : params.k_dim].copy()
        turning = [(queries, params.q_norm)]
        if not params.shares:
            k, v = np.split(y[:, params.q_columns :].copy(), [params.kv_heads * params.k_dim], axis=1)
            k = k.reshape(rows, params.kv_heads, params.k_dim)
            v = v.reshape(rows, params.kv_heads, params.v_dim)
            if params.v_norm:
                basic.rms_norm(v, np.float32(1.0), v, eps=params.eps)
            turning.append((k, params.k_norm))
        for part, norm in turning:
            if norm is not None:
                basic.rms_norm(part, norm, part, eps=params.eps)
            basic.rope(part, position, params.rope)
        if not params.shares:
            self.k += list(k)
            self.v += list(v)
        keys, values = np.array(self.k, np.float64), np.array(self.v, np.float64)
        attended = out.reshape(rows, params.heads, params.v_dim)
        for row in range(rows):
            seen = position + row + 1
            first = max(0, seen - params.window) if params.window else 0
            for head in range(params.heads):
                group = head // (params.heads // params.kv_heads)
                scores = keys[first:seen, group] @ (params.scale * queries[row, head])
                weights = np.exp(scores - scores.max())
                attended[row, head] = weights @ values[first:seen, group] / weights.sum()
        if params.gated:
            attended /= 1.0 + np.exp(-heads[..., params.k_dim :])

    def attend_tiles(self, tiles: Sequence[AttentionRows], params: AttentionParams, turn: Turn) -> None:
        for number, rows in enumerate(tiles):
            turn(number)
            self.attend(rows, params)


class DenseKv:
    """The view that a model gets of all layers."""

    def __init__(self, reads: Sequence[int]) -> None:
        """``reads``: the layer whose keys and values each attention reads."""
        layers = [DenseLayer() for _ in range(max(reads) + 1)]
        self._layers = [layers[layer] for layer in reads]

    def layer(self, read_index: int) -> DenseLayer:
        return self._layers[read_index]

    def truncate(self, tokens: int) -> None:
        """Forget all positions from ``tokens`` on."""
        for layer in self._layers:
            del layer.k[tokens:], layer.v[tokens:]
