"""Gated DeltaNet: the rows' own formula, what a step saves and applies later, and the chunked form."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.host.ops import gdn
from kvs_core.device.operands import GdnShape, GdnState, GdnWeights
from tests.support.examples import examples

EPS = 1e-6
MAX_ROWS = 8
SHAPES = (
    GdnShape(k_heads=2, v_heads=4, d_k=16, d_v=16, conv_taps=4),
    GdnShape(k_heads=1, v_heads=3, d_k=8, d_v=24, conv_taps=2),
    GdnShape(k_heads=4, v_heads=4, d_k=32, d_v=32, conv_taps=4),
)
SEEDS = st.integers(0, 2**32 - 1)


class Rows:
    """Projected rows y [T, columns] and windows on their parts."""

    def __init__(self, y: np.ndarray, shape: GdnShape) -> None:
        self.y = y
        ends = np.cumsum([shape.conv_channels, shape.inner, shape.v_heads])
        self.qkv, self.z, self.beta, self.alpha = np.split(y, ends, axis=1)


def _rows(shape: GdnShape, n: int, seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    return Rows((rng.normal(size=(n, shape.columns)) * 1.5).astype(np.float32), shape)


def _weights(shape: GdnShape, seed: int, *, decay: float = 0.3) -> GdnWeights:
    rng = np.random.default_rng(seed)
    return GdnWeights(
        conv=rng.normal(size=(shape.conv_taps, shape.conv_channels)).astype(np.float32),
        dt_bias=rng.normal(size=shape.v_heads).astype(np.float32),
        a=(-decay * rng.uniform(0.1, 1.0, shape.v_heads)).astype(np.float32),
        norm=rng.normal(1.0, 0.2, shape.d_v).astype(np.float32),
        eps=EPS,
    )


def _state(shape: GdnShape, seed: int | None = None) -> GdnState:
    """Fresh, or in the middle of something at ``_start(seed)``; slots hold NaN until they are written."""
    slots = shape.ring_rows(MAX_ROWS)
    state = GdnState(
        state=np.zeros((shape.v_heads, shape.d_k, shape.d_v), np.float32),
        ring_x=np.full((slots, shape.conv_channels), np.nan, np.float32),
        ring_k=np.full((slots, shape.k_heads, shape.d_k), np.nan, np.float32),
        ring_decay=np.full((slots, shape.v_heads), np.nan, np.float32),
        ring_d=np.full((slots, shape.v_heads, shape.d_v), np.nan, np.float32),
    )
    before = _before(shape, _start(seed))
    state.ring_x[before] = 0
    if seed is not None:
        rng = np.random.default_rng(seed)
        state.state[:] = 0.3 * rng.normal(size=state.state.shape)
        state.ring_x[before] = 0.3 * rng.normal(size=(len(before), shape.conv_channels))
    return state


def _start(seed: int | None) -> int:
    """Position of the first row after ``_state(shape, seed)``."""
    return 0 if seed is None else seed % 1000


def _before(shape: GdnShape, position: int) -> np.ndarray:
    """Slots of the inputs that a convolution at ``position`` reads besides its own."""
    return np.arange(position - shape.conv_taps + 1, position) % shape.ring_rows(MAX_ROWS)


def _bits(shape: GdnShape, state: GdnState, position: int) -> bytes:
    """What counts of a state with nothing pending."""
    return state.state.tobytes() + state.ring_x[_before(shape, position)].tobytes()


def _oracle(
    rows: Rows, weights: GdnWeights, shape: GdnShape, state: GdnState, position: int
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [T, v_heads * d_v] and final state by the textbook, head by head, in float64."""
    s = state.state.astype(np.float64)
    before = state.ring_x[_before(shape, position)].astype(np.float64)
    inputs = np.concatenate([before, rows.qkv.astype(np.float64)])
    keys = shape.k_heads * shape.d_k
    outs = []
    for t in range(len(rows.qkv)):
        window = inputs[t : t + shape.conv_taps]
        mixed = (window * weights.conv).sum(axis=0)
        mixed = mixed / (1 + np.exp(-mixed))
        out = np.empty((shape.v_heads, shape.d_v))
        for head in range(shape.v_heads):
            key_head = head % shape.k_heads
            q = mixed[key_head * shape.d_k :][: shape.d_k]
            k = mixed[keys + key_head * shape.d_k :][: shape.d_k]
            v = mixed[2 * keys + head * shape.d_v :][: shape.d_v]
            q = q / np.sqrt(q @ q + EPS)
            k = k / np.sqrt(k @ k + EPS)
            step = 1 / (1 + np.exp(-np.float64(rows.beta[t, head])))
            softplus = np.log1p(np.exp(np.float64(rows.alpha[t, head]) + weights.dt_bias[head]))
            s[head] *= np.exp(softplus * weights.a[head])
            s[head] += np.outer(k, step * (v - s[head].T @ k))
            o = s[head].T @ q / np.sqrt(shape.d_k)
            o = o / np.sqrt((o @ o) / shape.d_v + EPS) * weights.norm
            gate = np.float64(rows.z[t, head * shape.d_v :][: shape.d_v])
            out[head] = o * gate / (1 + np.exp(-gate))
        outs.append(out.reshape(-1))
    return np.array(outs), s


def _decode(
    y: np.ndarray, weights: GdnWeights, shape: GdnShape, state: GdnState, *, position: int, pending: int
) -> np.ndarray:
    out = np.full((len(y), shape.inner), np.nan, np.float32)
    gdn.gdn_decode(y, weights, shape, state, out, position=position, pending=pending)
    return out


def _prefill(y: np.ndarray, weights: GdnWeights, shape: GdnShape, state: GdnState, position: int) -> np.ndarray:
    out = np.full((len(y), shape.inner), np.nan, np.float32)
    gdn.gdn_prefill(y, weights, shape, state, out, position=position)
    return out


def _assert_close(ours: np.ndarray, exact: np.ndarray) -> None:
    """Within 1e-5 of the largest value: single values may be small by cancellation."""
    np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [None, 0, 1, 14])
def test_decode_follows_the_delta_rule(shape: GdnShape, seed: int | None) -> None:
    """Outputs of 8 rows, and the state once they are applied, are those of the float64 recurrence."""
    rows, weights, state, at = _rows(shape, 8, 1), _weights(shape, 1), _state(shape, seed), _start(seed)
    exact_out, exact_state = _oracle(rows, weights, shape, state, at)
    before = _bits(shape, state, at)
    out = _decode(rows.y, weights, shape, state, position=at, pending=0)
    assert _bits(shape, state, at) == before
    _assert_close(out, exact_out)
    gdn.gdn_apply(shape, state, position=at + 8, pending=8)
    _assert_close(state.state, exact_state)
    assert np.array_equal(state.ring_x[_before(shape, at + 8)], rows.qkv[8 - (shape.conv_taps - 1) :])


@settings(max_examples=examples(40), deadline=None)
@given(st.sampled_from(SHAPES), st.lists(st.integers(1, MAX_ROWS), min_size=1, max_size=5), SEEDS)
def test_rows_in_one_step_are_rows_one_by_one_bit_for_bit(shape: GdnShape, widths: list[int], seed: int) -> None:
    """Any split of a sequence into steps gives the same outputs and, in the end, the same state."""
    n = sum(widths)
    rows, weights, start = _rows(shape, n, seed), _weights(shape, seed), _start(seed)
    results = []
    for steps in (widths, [1] * n):
        state, outs, at, pending = _state(shape, seed), [], 0, 0
        for width in steps:
            part = rows.y[at : at + width]
            outs.append(_decode(part, weights, shape, state, position=start + at, pending=pending))
            at, pending = at + width, width
        gdn.gdn_apply(shape, state, position=start + n, pending=pending)
        results.append(np.concatenate(outs).tobytes() + _bits(shape, state, start + n))
    assert results[0] == results[1]


@settings(max_examples=examples(40), deadline=None)
@given(st.sampled_from(SHAPES), st.integers(1, MAX_ROWS), st.integers(0, MAX_ROWS), SEEDS)
def test_rows_taken_back_leave_no_trace(shape: GdnShape, n: int, keep: int, seed: int) -> None:
    """The first k of n rows applied, by ``gdn_apply`` or by the next step, is a run that had only those k."""
    keep = min(keep, n)
    rows, weights, after, start = _rows(shape, n, seed), _weights(shape, seed), _rows(shape, 2, seed + 1), _start(seed)
    end = start + keep
    verified, next_step, alone = _state(shape, seed), _state(shape, seed), _state(shape, seed)
    _decode(rows.y, weights, shape, verified, position=start, pending=0)
    _decode(rows.y, weights, shape, next_step, position=start, pending=0)
    gdn.gdn_apply(shape, verified, position=end, pending=keep)
    for row in range(keep):
        _decode(rows.y[row : row + 1], weights, shape, alone, position=start + row, pending=0)
        gdn.gdn_apply(shape, alone, position=start + row + 1, pending=1)
    assert _bits(shape, verified, end) == _bits(shape, alone, end)
    out = _decode(after.y, weights, shape, next_step, position=end, pending=keep)
    assert _bits(shape, next_step, end) == _bits(shape, alone, end)
    assert out.tobytes() == _decode(after.y, weights, shape, alone, position=end, pending=0).tobytes()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 2, 3, 63, 64, 65, 150])
@pytest.mark.parametrize("decay", [0.0, 0.3, 30.0])
def test_prefill_follows_the_delta_rule(shape: GdnShape, n: int, decay: float) -> None:
    """Whole chunks and any remainder, with decays from none to a state that is gone after one row."""
    rows, weights, state, at = _rows(shape, n, n), _weights(shape, n, decay=decay), _state(shape, n), _start(n)
    inputs = np.concatenate([state.ring_x[_before(shape, at)], rows.qkv])[-(shape.conv_taps - 1) :]
    exact_out, exact_state = _oracle(rows, weights, shape, state, at)
    out = _prefill(rows.y, weights, shape, state, at)
    _assert_close(out, exact_out)
    _assert_close(state.state, exact_state)
    assert np.array_equal(state.ring_x[_before(shape, at + n)], inputs)


def test_prefill_holds_where_keys_repeat() -> None:
    """Equal keys and full steps make the chunk's system as ill-conditioned as it gets; it still solves."""
    shape = GdnShape(k_heads=1, v_heads=2, d_k=16, d_v=16, conv_taps=2)
    rows, weights, state = _rows(shape, 128, 3), _weights(shape, 3, decay=1e-4), _state(shape)
    rows.qkv[:, : 2 * shape.d_k] = rows.qkv[0, : 2 * shape.d_k]
    rows.beta[:] = 20.0
    exact_out, exact_state = _oracle(rows, weights, shape, state, 0)
    out = _prefill(rows.y, weights, shape, state, 0)
    _assert_close(state.state, exact_state)
    np.testing.assert_allclose(out, exact_out, rtol=1e-4, atol=1e-4 * np.abs(exact_out).max())


def test_prefill_keeps_slow_decay_apart_after_a_fast_one() -> None:
    """A few rows that forget everything do not blur the decay of those that follow them in the chunk."""
    shape = SHAPES[0]
    rows, weights, state = _rows(shape, 64, 4), _weights(shape, 4, decay=5.0), _state(shape, 4)
    rows.alpha[:8], rows.alpha[8:] = 200.0, -5.0
    exact_out, exact_state = _oracle(rows, weights, shape, state, _start(4))
    _assert_close(_prefill(rows.y, weights, shape, state, _start(4)), exact_out)
    _assert_close(state.state, exact_state)


def test_a_prefill_in_parts_goes_on_where_it_stopped() -> None:
    """Two ubatches and then decode rows: one sequence."""
    shape = SHAPES[0]
    rows, weights, state = _rows(shape, 100, 5), _weights(shape, 5), _state(shape)
    exact_out, exact_state = _oracle(rows, weights, shape, state, 0)
    outs = [_prefill(rows.y[first:end], weights, shape, state, first) for first, end in ((0, 37), (37, 39), (39, 95))]
    outs.append(_decode(rows.y[95:], weights, shape, state, position=95, pending=0))
    gdn.gdn_apply(shape, state, position=100, pending=5)
    _assert_close(np.concatenate(outs), exact_out)
    _assert_close(state.state, exact_state)


@pytest.mark.filterwarnings("error")
def test_extreme_gates_give_finite_numbers() -> None:
    """Large projections of either sign: no warning, no NaN, in both forms."""
    shape = SHAPES[0]
    rows, weights = _rows(shape, 70, 6), _weights(shape, 6)
    rows.alpha[::2], rows.alpha[1::2] = 1e4, -1e4
    rows.beta[::3], rows.beta[1::3] = 1e4, -1e4
    rows.z[::2] = -1e4
    state = _state(shape)
    out = _prefill(rows.y, weights, shape, state, 0)
    assert np.isfinite(out).all()
    out = _decode(rows.y[:8], weights, shape, state, position=70, pending=0)
    gdn.gdn_apply(shape, state, position=78, pending=8)
    assert np.isfinite(out).all()
    assert np.isfinite(state.state).all()
