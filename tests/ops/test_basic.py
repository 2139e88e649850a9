"""The plain ops against float64 formulas, and the promise that a decode row does not see its neighbours."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.host.ops import basic
from kvs_core.device.host.weights import HeldMatrix, HostWeight
from kvs_core.device.operands import Activation, RopeTable
from kvs_core.memory.phases import Phase
from tests.reference.forward import gelu
from tests.support.examples import examples

SEEDS = st.integers(0, 2**32 - 1)
# A float32 result of a few roundings, against float64.
CLOSE = {"rtol": 2e-6, "atol": 2e-6}


def _normal(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def _sigmoid64(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-x.astype(np.float64)))


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 9), st.sampled_from(Phase), SEEDS)
def test_matmul(n_out: int, n_in: int, rows: int, phase: Phase, seed: int) -> None:
    """out = x W^T + bias in both phases, whether W is one tensor or two joined."""
    x, values = _normal(seed, rows, n_in), _normal(seed + 1, n_out, n_in)
    out = np.full((rows, n_out), np.nan, np.float32)
    bias = _normal(seed + 2, n_out)
    cut = n_out // 2
    parts = [HeldMatrix("w", part) for part in (values[:cut], values[cut:]) if len(part)]
    basic.matmul(x, HostWeight(parts, bias), out, phase=phase)
    np.testing.assert_allclose(out, x.astype(np.float64) @ values.T + bias, rtol=1e-5, atol=1e-5)


def test_embed_takes_the_rows_of_the_tokens() -> None:
    """Any order, repetitions included; a token outside the table is a bug."""
    values = _normal(0, 10, 6)
    out = np.empty((4, 6), np.float32)
    basic.embed(HeldMatrix("t", values), np.array([9, 0, 3, 9], np.int32), out)
    assert np.array_equal(out, values[[9, 0, 3, 9]])
    for wrong in (-1, 10):
        with pytest.raises(AssertionError):
            basic.embed(HeldMatrix("t", values), np.array([wrong], np.int32), out[:1])


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 700), st.booleans(), SEEDS)
def test_rms_norm(rows: int, heads: int, width: int, in_place: bool, seed: int) -> None:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, into x itself too; zeros stay zeros."""
    x, weight = _normal(seed, rows, heads, width, scale=3.0), _normal(seed + 1, width)
    x[0, 0] = 0.0
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-6) * weight
    out = x if in_place else np.empty_like(x)
    basic.rms_norm(x, weight, out, eps=1e-6)
    np.testing.assert_allclose(out, expected, **CLOSE)


def test_scale_works_in_place() -> None:
    """A float32 factor, whatever the Python number."""
    x = _normal(0, 3, 5)
    expected = x * np.float32(0.1)
    basic.scale(x, 0.1)
    assert np.array_equal(x, expected)
    assert x.dtype == np.float32


@pytest.mark.filterwarnings("error")
def test_gated_is_right_for_numbers_of_any_size() -> None:
    """gate * sigmoid(gate) * up, and GELU in place of it, without a warning or a NaN at either end of float32."""
    gate = np.concatenate([_normal(0, 50, scale=5.0), np.float32([-1e30, -1e4, -100, -88, 0, 88, 100, 1e4, 1e30])])
    gate = gate.astype(np.float32)[None]
    up = np.linspace(-3, 3, gate.size, dtype=np.float32)[None]
    expected = gate * _sigmoid64(gate) * up
    out = np.empty_like(gate)
    basic.gated(np.concatenate([gate, up], axis=1), out)
    # Below -88 the exact value is less than 1e-36; ours is at most 6e-39 times the number.
    np.testing.assert_allclose(out[:, 1:], expected[:, 1:], rtol=2e-6, atol=1e-7)
    assert np.isfinite(out).all()
    basic.gated(np.concatenate([gate, up], axis=1), out, Activation.GELU)
    with np.errstate(over="ignore"):
        expected = gelu(gate.astype(np.float64)) * up
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=2e-6)
    assert np.abs(out[0, -9:-6]).max() < 1e-7


@pytest.mark.filterwarnings("error")
def test_softcap() -> None:
    """cap * tanh(x / cap), for numbers of any size."""
    x = np.float32([[-1e38, -50, -1, 0, 1e-6, 3, 1e38]])
    expected = 30 * np.tanh(x.astype(np.float64) / 30)
    basic.softcap(x, 30.0)
    np.testing.assert_allclose(x, expected, **CLOSE)


@pytest.mark.filterwarnings("error")
def test_gate_heads_reads_a_gate_that_lies_between_queries() -> None:
    """x *= sigmoid(gate), where gate is every second head of a wider array, as qwen35 projects it."""
    projected = _normal(0, 3, 4, 16, scale=60.0)
    x = _normal(1, 3, 4, 8)
    expected = x * _sigmoid64(projected[..., 8:])
    basic.gate_heads(x, projected[..., 8:])
    np.testing.assert_allclose(x, expected, **CLOSE)


@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 8), st.integers(0, 6), st.booleans(),
    st.integers(0, 1 << 20), st.sampled_from([1.0, 1.2]), SEEDS,
)
def test_rope(
    rows: int, heads: int, pairs: int, rest: int, interleaved: bool, first: int, magnitude: float, seed: int
) -> None:
    """Each pair is a complex number turned by position * inv_freq, exactly enough at a million; the rest passes."""
    n_rot = 2 * pairs
    table = RopeTable(10000.0 ** (-np.arange(pairs) / pairs), interleaved, magnitude)
    x = _normal(seed, rows, heads, n_rot + rest)
    before = x.copy()
    basic.rope(x, first, table)
    left = np.arange(0, n_rot, 2) if interleaved else np.arange(pairs)
    right = left + (1 if interleaved else pairs)
    turn = magnitude * np.exp(1j * np.multiply.outer(first + np.arange(rows), table.inv_freq))[:, None, :]
    turned = (before[..., left] + 1j * before[..., right].astype(np.float64)) * turn
    np.testing.assert_allclose(x[..., left], turned.real, **CLOSE)
    np.testing.assert_allclose(x[..., right], turned.imag, **CLOSE)
    assert np.array_equal(x[..., n_rot:], before[..., n_rot:])


@pytest.mark.parametrize("block", [1, 2, 4, 64, 128, 256])
def test_hadamard_is_the_sylvester_matrix_and_its_own_inverse(block: int) -> None:
    """Per block of the head; entry (i, j) is (-1)**popcount(i & j) / sqrt(n). Strided heads are turned in place too."""
    matrix = np.array([[(-1.0) ** (i & j).bit_count() for j in range(block)] for i in range(block)]) / np.sqrt(block)
    wide = _normal(0, 3, 2, 2 * block + 5)
    x = wide[..., : 2 * block]
    before = wide.copy()
    basic.hadamard(x, block)
    expected = before[..., : 2 * block].reshape(-1, block).astype(np.float64) @ matrix
    np.testing.assert_allclose(x.reshape(-1, block), expected, **CLOSE)
    assert np.array_equal(wide[..., 2 * block :], before[..., 2 * block :])
    basic.hadamard(x, block)
    np.testing.assert_allclose(x, before[..., : 2 * block], **CLOSE)


@pytest.mark.parametrize(("block", "width"), [(3, 6), (64, 96), (0, 4)])
def test_hadamard_refuses_blocks_that_do_not_fit(block: int, width: int) -> None:
    """A block is a power of two and divides the head."""
    with pytest.raises(AssertionError):
        basic.hadamard(np.zeros((1, 1, width), np.float32), block)


ROW_OPS: dict[str, Callable[[np.ndarray, np.ndarray, int], None]] = {
    "matmul": lambda x, out, first: basic.matmul(
        x.reshape(len(x), -1), HostWeight([HeldMatrix("w", _normal(7, 2 * x[0].size, x[0].size))]),
        out.reshape(len(x), -1), phase=Phase.DECODE,
    ),
    "rms_norm": lambda x, out, first: basic.rms_norm(x, _normal(7, x.shape[-1]), out[..., : x.shape[-1]], eps=1e-5),
    "swiglu": lambda x, out, first: basic.gated(np.concatenate([x, x[..., ::-1]], axis=-1), out[..., : x.shape[-1]]),
    "geglu": lambda x, out, first: basic.gated(
        np.concatenate([x, x[..., ::-1]], axis=-1), out[..., : x.shape[-1]], Activation.GELU
    ),
    "softcap": lambda x, out, first: _after(basic.softcap, x, out, 3.0),
    "gate_heads": lambda x, out, first: _after(basic.gate_heads, x, out, x.copy()),
    "rope": lambda x, out, first: _after(
        basic.rope, x, out, first, RopeTable(np.linspace(1.0, 0.1, x.shape[-1] // 2), True)
    ),
    "hadamard": lambda x, out, first: _after(basic.hadamard, x, out, x.shape[-1] & -x.shape[-1]),
}


def _after(op: Callable[..., None], x: np.ndarray, out: np.ndarray, *rest: object) -> None:
    """Run an op that works in place, and put the result where the others put theirs."""
    op(x, *rest)
    out[..., : x.shape[-1]] = x


@settings(max_examples=examples(150), deadline=None)
@given(
    st.sampled_from(sorted(ROW_OPS)), st.integers(2, 8), st.integers(1, 4), st.integers(2, 150), st.integers(0, 5000),
    st.floats(0.01, 40.0), SEEDS,
)
def test_a_row_has_the_same_bits_whatever_stands_beside_it(
    name: str, rows: int, heads: int, width: int, first: int, size: float, seed: int
) -> None:
    """Row-invariance: n rows in one call and n calls of one row, at other addresses, agree bit for bit."""
    x = _normal(seed, rows, heads, width, scale=size)
    together = np.zeros((rows, heads, 2 * width), np.float32)
    ROW_OPS[name](x.copy(), together, first)
    for row in range(rows):
        memory = np.empty(heads * width + row, np.float32)
        alone = memory[row:].reshape(1, heads, width)
        alone[0] = x[row]
        out = np.zeros((1, heads, 2 * width), np.float32)
        ROW_OPS[name](alone, out, first + row)
        assert out.tobytes() == together[row].tobytes()
