"""Gated DeltaNet kernels: the host's numbers, bits that do not depend on the step, chunks against the recurrence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvs_core.device.base import StepSizes
from kvs_core.device.cuda.kernel import Kernel, address
from kvs_core.device.cuda.ops import gdn
from kvs_core.device.cuda.ops.gdn import MAX_ROWS, Gdn, kernels_for
from kvs_core.device.cuda.ops.row_forms import GatedNorm
from kvs_core.device.host.ops import gdn as host
from kvs_core.device.host.ops.basic import rms_norm, silu
from kvs_core.device.operands import GdnShape, GdnState, GdnWeights
from kvs_core.errors import CapabilityError
from kvs_core.memory.phases import Phase
from tests.ops import test_gdn as oracle
from tests.ops.test_gdn import Rows

SMALL = (
    GdnShape(k_heads=1, v_heads=2, d_k=32, d_v=32, conv_taps=4),
    GdnShape(k_heads=2, v_heads=2, d_k=64, d_v=64, conv_taps=2),
    GdnShape(k_heads=1, v_heads=3, d_k=128, d_v=128, conv_taps=3),   # an odd number of 128 columns: normed here
    GdnShape(k_heads=1, v_heads=2, d_k=128, d_v=128, conv_taps=4),   # normed by the product that takes the rows
)
LARGE = (
    GdnShape(k_heads=16, v_heads=48, d_k=128, d_v=128, conv_taps=4),
    GdnShape(k_heads=16, v_heads=32, d_k=128, d_v=128, conv_taps=4),
    GdnShape(k_heads=4, v_heads=12, d_k=64, d_v=64, conv_taps=4),
)

DECODE_TOLERANCE = 2e-5
"""Of the largest number: float32 sums in another order, approximate exponentials."""

PREFILL_TOLERANCE = 1e-4
"""Of the largest number: float32 sums, and products of 22-bit numbers."""


class Layer:
    """A layer's state on the device beside the host's, at some position."""

    def __init__(self, lab: Any, shape: GdnShape, seed: int | None = 1, *, decay: float = 0.3) -> None:
        self.lab, self.shape = lab, shape
        self.at, self.pending = oracle._start(seed), 0
        self.host = oracle._state(shape, seed)
        self.host_weights = oracle._weights(shape, 1, decay=decay)
        rings = (self.host.ring_x, self.host.ring_k, self.host.ring_decay, self.host.ring_d)
        transposed = np.ascontiguousarray(self.host.state.swapaxes(1, 2))
        self.device = GdnState(lab.array(transposed), *(lab.array(ring) for ring in rings))
        weights = self.host_weights
        self.weights = GdnWeights(
            *(lab.array(each) for each in (weights.conv, weights.dt_bias, weights.a, weights.norm)), weights.eps
        )

    def state(self) -> np.ndarray:
        """[v_heads, d_k, d_v], as the host has it."""
        return self.lab.host(self.device.state).swapaxes(1, 2)

    def bits(self) -> bytes:
        """What counts of the device's state with nothing pending."""
        past = self.lab.host(self.device.ring_x)[oracle._before(self.shape, self.at)]
        return self.state().tobytes() + past.tobytes()

    def decode(self, y: np.ndarray, keep: int | None = None) -> np.ndarray:
        """A step on the device, of which the first ``keep`` (all) rows count."""
        context = self.lab.context(len(y), position=self.at, pending=self.pending)
        out, device_y = self.lab.empty((len(y), self.shape.inner), np.float32), self.lab.array(y)
        # What changes from step to step comes from the step table alone.
        Gdn(context).gdn_decode(device_y, self.weights, self.shape, self.device, out, position=-7, pending=-7)
        self.pending = len(y) if keep is None else keep
        self.at += self.pending
        rows = self.lab.host(out)
        form = context.forms.get(address(out))
        if form is None:
            return rows
        assert isinstance(form, GatedNorm)
        assert address(form.x) == address(out)
        assert form.eps == oracle.EPS
        z_at = (address(form.z) - address(device_y)) // 4
        assert form.z_stride == self.shape.columns
        heads, z = rows.reshape(len(y), self.shape.v_heads, -1), y[:, z_at : z_at + self.shape.inner]
        rms_norm(heads, self.lab.host(form.norm), heads, eps=form.eps)
        return rows * silu(z)

    def flush(self) -> None:
        Gdn(self.lab.context(1)).gdn_apply(self.shape, self.device, position=self.at, pending=self.pending)
        self.pending = 0

    def prefill(self, y: np.ndarray) -> np.ndarray:
        specs = Gdn(self.lab.context(1)).scratch(Phase.PREFILL, _sizes(self.shape, max(128, len(y))))
        context = self.lab.context(len(y), position=self.at, phase=Phase.PREFILL, scratch=specs)
        out = self.lab.empty((len(y), self.shape.inner), np.float32)
        Gdn(context).gdn_prefill(
            self.lab.array(y), self.weights, self.shape, self.device, out, position=self.at
        )
        self.at += len(y)
        return self.lab.host(out)

    def exact(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """What the recurrence gives from here on, in float64: outputs and the final state."""
        return oracle._oracle(rows, self.host_weights, self.shape, self.host, self.at)


class LessShared:
    """A lab whose launcher says that blocks have so much shared memory."""

    def __init__(self, lab: Any, shared_bytes: int) -> None:
        self._lab = lab
        self._shared_bytes = shared_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lab, name)

    def context(self, *args: Any, **kwargs: Any) -> Any:
        context = self._lab.context(*args, **kwargs)
        context.launcher = Lessened(context.launcher, self._shared_bytes)
        return context


class Lessened:
    """A launcher with other ``shared_bytes``."""

    def __init__(self, launcher: Any, shared_bytes: int) -> None:
        self._launcher = launcher
        self.shared_bytes = shared_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launcher, name)


def _sizes(shape: GdnShape | None, rows: int) -> StepSizes:
    return StepSizes(
        rows=rows, n_embd=32, widest_in=32, widest_out=32, n_vocab=32, heads=0, kv_heads=0, k_dim=0, gdn=shape
    )


def _assert_close(what: str, ours: np.ndarray, exact: np.ndarray, tolerance: float) -> None:
    error = np.abs(ours - exact).max() / np.abs(exact).max()
    assert error <= tolerance, f"{what}: error {error:.2e} of the largest number, more than {tolerance:.0e}"


def _shapes(lab: Any) -> tuple[GdnShape, ...]:
    return SMALL + LARGE if lab.on_gpu else SMALL


@pytest.mark.parametrize("seed", [None, 14, 997])
def test_decode_is_the_hosts(lab: Any, seed: int | None) -> None:
    """Outputs of steps of several rows, the rings, and the state once rows are applied; from position 0 too."""
    for shape in _shapes(lab):
        layer, rows = Layer(lab, shape, seed), oracle._rows(shape, 11, 1)
        first, pending = 0, 0
        for width in (3, 1, 7):
            y = rows.y[first : first + width]
            expected = np.empty((width, shape.inner), np.float32)
            host.gdn_decode(
                y, layer.host_weights, shape, layer.host, expected, position=layer.at, pending=pending
            )
            _assert_close(f"{shape} rows", layer.decode(y), expected, DECODE_TOLERANCE)
            first, pending = first + width, width
        for name in ("ring_x", "ring_k", "ring_decay", "ring_d"):
            ours, theirs = lab.host(getattr(layer.device, name)), getattr(layer.host, name)
            assert np.array_equal(np.isnan(ours), np.isnan(theirs)), f"{shape} {name}"
            _assert_close(f"{shape} {name}", np.nan_to_num(ours), np.nan_to_num(theirs), DECODE_TOLERANCE)
        host.gdn_apply(shape, layer.host, position=layer.at, pending=pending)
        layer.flush()
        _assert_close(f"{shape} state", layer.state(), layer.host.state, DECODE_TOLERANCE)


@pytest.mark.parametrize("shape", SMALL)
def test_rows_in_one_step_are_rows_one_by_one_bit_for_bit(lab: Any, shape: GdnShape) -> None:
    """Any split of a sequence into steps gives the same outputs and, in the end, the same state."""
    for widths in ((8, 1, 2), (3, 6, 2), (4, 7), (5, 6)):
        rows = oracle._rows(shape, sum(widths), 2)
        results = []
        for steps in (widths, [1] * sum(widths)):
            layer, outs, at = Layer(lab, shape, 13), [], 0
            for width in steps:
                outs.append(layer.decode(rows.y[at : at + width]))
                at += width
            layer.flush()
            results.append(np.concatenate(outs).tobytes() + layer.bits())
        assert results[0] == results[1], f"steps of {widths}"


@pytest.mark.parametrize("shape", SMALL)
def test_rows_taken_back_leave_no_trace(lab: Any, shape: GdnShape) -> None:
    """The first k of n rows applied, by ``gdn_apply`` or by the next step, is a run that had only those k."""
    for n, keep in ((8, 8), (8, 3), (5, 1), (4, 0)):
        rows, after = oracle._rows(shape, n, 3), oracle._rows(shape, 2, 4)
        applied, stepped, alone = (Layer(lab, shape, 30) for _ in range(3))
        applied.decode(rows.y, keep)
        stepped.decode(rows.y, keep)
        for row in range(keep):
            alone.decode(rows.y[row : row + 1])
        applied.flush()
        alone.flush()
        assert applied.bits() == alone.bits(), f"{keep} of {n}, applied"
        out = stepped.decode(after.y)
        assert stepped.state().tobytes() == alone.state().tobytes(), f"{keep} of {n}, in the next step"
        assert out.tobytes() == alone.decode(after.y).tobytes(), f"{keep} of {n}, rows of the next step"


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 75])
def test_prefill_follows_the_delta_rule(lab: Any, n: int) -> None:
    """Whole chunks and any remainder, from a fresh state and from the middle of something."""
    for shape in _shapes(lab):
        for seed in (None, n):
            if seed is None and n != 33:
                continue
            layer, rows = Layer(lab, shape, seed), oracle._rows(shape, n, n)
            past = np.concatenate([layer.host.ring_x[oracle._before(shape, layer.at)], rows.qkv])
            exact_out, exact_state = layer.exact(rows)
            _assert_close(f"{shape} rows", layer.prefill(rows.y), exact_out, PREFILL_TOLERANCE)
            _assert_close(f"{shape} state", layer.state(), exact_state, PREFILL_TOLERANCE)
            ring_x = lab.host(layer.device.ring_x)[oracle._before(shape, layer.at)]
            assert np.array_equal(ring_x, past[len(past) - shape.conv_taps + 1 :])


@pytest.mark.parametrize("decay", [0.0, 1e-3, 5.0, 100.0])
def test_prefill_with_any_decay(lab: Any, decay: float) -> None:
    """From none, over rows that forget everything amid slow ones, to a state that is gone after one row."""
    shape = SMALL[0]
    layer, rows = Layer(lab, shape, 4, decay=decay), oracle._rows(shape, 70, 4)
    rows.alpha[:8], rows.alpha[8:40] = 200.0, -5.0
    exact_out, exact_state = layer.exact(rows)
    _assert_close("rows", layer.prefill(rows.y), exact_out, PREFILL_TOLERANCE)
    _assert_close("state", layer.state(), exact_state, PREFILL_TOLERANCE)


def test_prefill_holds_where_keys_repeat(lab: Any) -> None:
    """Equal keys and full steps make a chunk's system as ill-conditioned as it gets; it still solves."""
    shape = GdnShape(k_heads=1, v_heads=2, d_k=32, d_v=32, conv_taps=2)
    layer, rows = Layer(lab, shape, None, decay=1e-4), oracle._rows(shape, 64, 3)
    rows.qkv[:, : 2 * shape.d_k] = rows.qkv[0, : 2 * shape.d_k]
    rows.beta[:] = 20.0
    exact_out, exact_state = layer.exact(rows)
    _assert_close("rows", layer.prefill(rows.y), exact_out, 10 * PREFILL_TOLERANCE)
    _assert_close("state", layer.state(), exact_state, PREFILL_TOLERANCE)


@pytest.mark.parametrize("shape", SMALL)
def test_a_sequence_in_parts_goes_on_where_it_stopped(
    lab: Any, shape: GdnShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ubatches, two of them in passes of a chunk, and decode rows behind them: one sequence."""
    monkeypatch.setattr(gdn, "_PASS_UNITS", shape.v_heads)
    layer, rows = Layer(lab, shape, None), oracle._rows(shape, 110, 5)
    exact_out, exact_state = layer.exact(rows)
    outs = [layer.prefill(rows.y[:70]), layer.prefill(rows.y[70:71]), layer.prefill(rows.y[71:104])]
    outs.append(layer.decode(rows.y[104:]))
    layer.flush()
    _assert_close("rows", np.concatenate(outs), exact_out, PREFILL_TOLERANCE)
    _assert_close("state", layer.state(), exact_state, PREFILL_TOLERANCE)


def test_a_long_prefill_is_the_hosts(lab: Any) -> None:
    """Hundreds of chunks in a row, with decays so slow that the first rows still count, add up no error."""
    shape, n = (LARGE[0], 3000) if lab.on_gpu else (SMALL[0], 300)
    layer, rows = Layer(lab, shape, 8, decay=1e-3), oracle._rows(shape, n, 8)
    expected = np.empty((n, shape.inner), np.float32)
    host.gdn_prefill(rows.y, layer.host_weights, shape, layer.host, expected, position=layer.at)
    _assert_close("rows", layer.prefill(rows.y), expected, PREFILL_TOLERANCE)
    _assert_close("state", layer.state(), layer.host.state, PREFILL_TOLERANCE)


def test_passes_do_not_show_in_the_bits(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes overlap on a GPU, in two scratches: however many chunks they take, none reads what another one left."""
    shape, n = (LARGE[0], 1000) if lab.on_gpu else (SMALL[0], 200)
    rows, results = oracle._rows(shape, n, 9), {}
    for chunks in (n, 1, 2, 3, 8):
        monkeypatch.setattr(gdn, "_PASS_UNITS", chunks * shape.v_heads)
        layer = Layer(lab, shape, 9)
        results[chunks] = layer.prefill(rows.y).tobytes() + layer.bits()
    different = [chunks for chunks in results if results[chunks] != results[n]]
    assert not different, f"passes of {different} chunks"


def test_a_smaller_gpus_scan_gives_the_same_bits(lab: Any) -> None:
    """Whether shared memory holds the operands of two chunks or of one does not show."""
    shape = SMALL[0]
    rows, results = oracle._rows(shape, 100, 6), []
    for shared_bytes in (lab.launcher.shared_bytes, 16 << 10):
        layer = Layer(LessShared(lab, shared_bytes), shape)
        results.append(layer.prefill(rows.y).tobytes() + layer.bits())
    assert results[0] == results[1]
    assert kernels_for(shape, 16 << 10) != kernels_for(shape, lab.launcher.shared_bytes)


def test_extreme_gates_give_finite_numbers(lab: Any) -> None:
    """Large projections of either sign: no NaN, in both forms."""
    shape = SMALL[0]
    layer, rows = Layer(lab, shape), oracle._rows(shape, 78, 6)
    rows.alpha[::2], rows.alpha[1::2] = 1e4, -1e4
    rows.beta[::3], rows.beta[1::3] = 1e4, -1e4
    rows.z[::2] = -1e4
    assert np.isfinite(layer.prefill(rows.y[:70])).all()
    assert np.isfinite(layer.decode(rows.y[70:])).all()
    layer.flush()
    assert np.isfinite(layer.state()).all()


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        (GdnShape(1, 1, 96, 96, 4), "96 x 96"),
        (GdnShape(1, 1, 128, 64, 4), "128 x 64"),
        (GdnShape(1, 1, 64, 64, 5), "5 taps"),
        (GdnShape(1, 1, 64, 64, 1), "1 taps"),
    ],
)
def test_shapes_without_a_kernel_are_refused(shape: GdnShape, named: str) -> None:
    """At load, with the sizes and what to do."""
    with pytest.raises(CapabilityError, match=f"{named}.*use --device cpu"):
        kernels_for(shape, 227 << 10)


def test_every_width_has_a_kernel_and_decode_no_scratch(lab: Any) -> None:
    """Steps of 1 to 8 rows are told apart by their kernel; scratch is for a prefill's passes, and bounded."""
    shape = LARGE[0]
    decode = [kernel for kernel in kernels_for(shape, 227 << 10) if kernel.name == "gdn_decode"]
    assert len(set(decode)) == MAX_ROWS
    family = Gdn(lab.context(1))
    assert family.scratch(Phase.DECODE, _sizes(shape, 8)) == []
    assert family.scratch(Phase.PREFILL, _sizes(None, 512)) == []
    one, two, most = (family.scratch(Phase.PREFILL, _sizes(shape, rows)) for rows in (256, 257, 4096))
    assert two == most
    assert 2 * sum(spec.size_bytes for spec in one) == sum(spec.size_bytes for spec in most) < 53 << 20
    assert all(isinstance(kernel, Kernel) for kernel in decode)
