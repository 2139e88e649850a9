"""Embeddings per layer on each device: inputs of all layers, and a layer's gate, as float64 has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvs_core.device.cuda.ops.per_layer import PerLayer
from tests.reference.forward import gelu


@pytest.mark.parametrize(("layers", "size"), [(3, 16), (2, 300)])
def test_inputs(lab: Any, layers: int, size: int) -> None:
    """The table's rows and the normed product of each layer, times the square root of a half; rows do not mix."""
    rng = np.random.default_rng(size)
    table, projected = (rng.normal(0, 3, (3, layers * size)).astype(np.float32) for _ in range(2))
    norm = rng.normal(1, 0.2, size).astype(np.float32)

    def made(rows: slice) -> np.ndarray:
        out = lab.array(table[rows])
        PerLayer(lab.context(len(table[rows]))).inputs(
            out, lab.array(projected[rows]), lab.array(norm), 64, eps=1e-3
        )
        return lab.host(out)

    got = made(slice(0, 3))
    parts = projected.astype(np.float64).reshape(3, layers, size) / 8
    normed = parts / np.sqrt(np.mean(parts**2, axis=-1, keepdims=True) + 1e-3) * norm
    np.testing.assert_allclose(got, (table + normed.reshape(3, -1)) * np.sqrt(0.5), rtol=3e-6, atol=3e-6)
    assert made(slice(1, 2)).tobytes() == got[1:2].tobytes()


@pytest.mark.parametrize("size", [5, 300])
def test_gate(lab: Any, size: int) -> None:
    """gelu(rows) * inputs in place, the inputs a layer's part of wider rows."""
    rng = np.random.default_rng(size)
    rows = rng.normal(0, 2, (3, size)).astype(np.float32)
    wide = rng.normal(0, 2, (3, 3 * size)).astype(np.float32)
    device_rows, inputs = lab.array(rows), lab.array(wide)
    PerLayer(lab.context(3)).gate(device_rows, inputs[:, size : 2 * size])
    expected = gelu(rows.astype(np.float64)) * wide[:, size : 2 * size]
    np.testing.assert_allclose(lab.host(device_rows), expected, rtol=3e-6, atol=3e-6)
