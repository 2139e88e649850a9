"""A KV cache without pages: lists of rows and a full softmax, for tests of the forward pass alone."""

from __future__ import annotations

import numpy as np


class DenseLayer:
    """One attention layer's keys and values, in float32, and float64 attention over them."""

    def __init__(self) -> None:
        self.k: list[np.ndarray] = []
        self.v: list[np.ndarray] = []

    def write(self, k: np.ndarray, v: np.ndarray) -> None:
        self.k += list(k.copy())
        self.v += list(v.copy())
        k.fill(np.nan)  # a cache may overwrite its inputs
        v.fill(np.nan)

    def attend(self, q: np.ndarray, out: np.ndarray) -> None:
        rows, heads = q.shape[:2]
        keys, values = np.array(self.k, np.float64), np.array(self.v, np.float64)
        per_group = heads // keys.shape[1]
        for row in range(rows):
            seen = len(keys) - rows + row + 1
            for head in range(heads):
                scores = keys[:seen, head // per_group] @ q[row, head]
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ values[:seen, head // per_group] / weights.sum()
        q.fill(np.nan)


class DenseKv:
    """The view that a model gets of all layers."""

    def __init__(self, layers: int) -> None:
        self._layers = [DenseLayer() for _ in range(layers)]

    def layer(self, kv_index: int) -> DenseLayer:
        return self._layers[kv_index]

    def truncate(self, tokens: int) -> None:
        """Forget all positions from ``tokens`` on."""
        for layer in self._layers:
            del layer.k[tokens:], layer.v[tokens:]
