"""RMS norm of rows and sums, soft caps, and the row that a step names, on each device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvs_core.device.cuda.ops.norm import Norm
from kvs_core.device.cuda.tables import STEP_KEPT


@pytest.mark.parametrize("n", [5, 64, 300, 5120])
def test_rms_norm(lab: Any, n: int) -> None:
    """x / rms(x) * norm, strided on both sides; what lies between rows of out is left alone, and rows do not mix."""
    rng = np.random.default_rng(n)
    x, norm = rng.normal(0, 3, (3, n + 4)).astype(np.float32), rng.normal(1, 0.2, n).astype(np.float32)
    out = lab.empty((3, 2 * n), np.float32)
    device_x, device_norm = lab.array(x), lab.array(norm)
    Norm(lab.context(3)).rms_norm(device_x[:, :n], device_norm, out[:, :n], eps=1e-6)
    got = lab.host(out)
    wide = x[:, :n].astype(np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + 1e-6) * norm
    np.testing.assert_allclose(got[:, :n], expected, rtol=3e-6, atol=1e-6)
    assert np.isnan(got[:, n:]).all()
    alone = lab.empty((1, n), np.float32)
    Norm(lab.context(1)).rms_norm(device_x[1:2, :n], device_norm, alone, eps=1e-6)
    assert lab.host(alone).tobytes() == got[1:2, :n].tobytes()


@pytest.mark.parametrize(("n", "parts"), [(5, 1), (300, 2), (64, 4), (5376, 3)])
def test_add_normed(lab: Any, n: int, parts: int) -> None:
    """x += rms(sum of parts) * norm, parts and x wider than their rows; what lies between is left alone, and a row's
    bits are those that it has alone."""
    rng = np.random.default_rng(n)
    given = rng.normal(0, 2, (parts, 3, n + 4)).astype(np.float32)
    x, norm = rng.normal(0, 3, (3, n + 8)).astype(np.float32), rng.normal(1, 0.2, n).astype(np.float32)
    device_norm = lab.array(norm)

    def added(rows: slice) -> np.ndarray:
        own, total = lab.array(given[:, rows]), lab.array(x[rows])
        Norm(lab.context(len(x[rows]))).add_normed(own, parts, n + 4, device_norm, total[:, :n], eps=1e-6)
        return lab.host(total)

    got = added(slice(0, 3))
    wide = given[..., :n].astype(np.float64).sum(axis=0)
    expected = x[:, :n] + wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + 1e-6) * norm
    np.testing.assert_allclose(got[:, :n], expected, rtol=3e-6, atol=3e-6)
    np.testing.assert_array_equal(got[:, n:], x[:, n:])
    assert added(slice(1, 2)).tobytes() == got[1:2].tobytes()


@pytest.mark.parametrize("n", [5, 700])
def test_softcap(lab: Any, n: int) -> None:
    """cap * tanh(x / cap) for numbers of any size, in place; what lies between rows is left alone."""
    x = (np.random.default_rng(n).normal(size=(3, n + 2)) * 10.0 ** np.arange(-2, 4)[:3, None]).astype(np.float32)
    x[0, 0], x[1, 1] = 1e30, -1e30
    logits = lab.array(x)
    Norm(lab.context(3)).softcap(logits[:, :n], 30.0)
    got = lab.host(logits)
    np.testing.assert_allclose(got[:, :n], 30.0 * np.tanh(x[:, :n].astype(np.float64) / 30.0), rtol=2e-6)
    np.testing.assert_array_equal(got[:, n:], x[:, n:])


@pytest.mark.parametrize("n", [5, 700])
def test_scale(lab: Any, n: int) -> None:
    """x * factor to the last bit, in place; what lies between rows is left alone."""
    x = np.random.default_rng(n).normal(size=(3, n + 2)).astype(np.float32)
    rows = lab.array(x)
    Norm(lab.context(3)).scale(rows[:, :n], 0.7)
    got = lab.host(rows)
    assert got[:, :n].tobytes() == (x[:, :n] * np.float32(0.7)).tobytes()
    np.testing.assert_array_equal(got[:, n:], x[:, n:])


@pytest.mark.parametrize("kept", [0, 1, 4])
def test_take_kept(lab: Any, kept: int) -> None:
    """The row of that number becomes the first; the others stay."""
    rows = np.random.default_rng(0).normal(size=(5, 300)).astype(np.float32)
    table, context = lab.array(rows), lab.context(1)
    step = lab.host(context.step)
    step[STEP_KEPT] = kept
    context.step = lab.array(step)
    Norm(context).take_kept(table, table[:1])
    got = lab.host(table)
    assert np.array_equal(got[0], rows[kept])
    assert np.array_equal(got[1:], rows[1:])
