"""Products of many rows against float64, with the rounding to float16 as the only error; rows of any size."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.device.base import StepSizes
from kvs_core.device.cuda.cublas import CublasGemm
from kvs_core.device.cuda.matrices import CudaWeight
from kvs_core.device.cuda.ops.matmul import DecodeMatmul
from kvs_core.device.cuda.ops.prefill_matmul import SLAB_BYTES, PrefillMatmul, slab_rows
from kvs_core.device.cuda.weights import WeightStore
from kvs_core.device.operands import Activation, Buffer
from kvs_core.errors import DeviceError
from kvs_core.formats.gguf import TensorInfo
from kvs_core.formats.quants import dequantize_rows
from kvs_core.memory.phases import Phase
from kvs_core.units import align_up
from tests.device.tensors import tensor
from tests.reference.forward import gelu

Quant = gguf.GGMLQuantizationType
EPS = 1e-6

# Rows and weights are each rounded to float16, to half of 2^-10: of a sum of products no more than this share of the
# product of their norms is lost (Cauchy). The rest are float32 sums, relative to what is there.
HALF_ERROR = 1.01 * 2.0**-10
SUM_ERROR = 2.0**-20
# Gates and ups with such errors, multiplied, then rounded and summed again: of the product of the norms, per row.
CHAIN_ERROR = 4e-3


class Bench:
    """A family with its scratch, and weights made as a model's are."""

    def __init__(
        self, lab: Any, rows: int, n_embd: int, widest_in: int, widest_out: int, slab: int | None = None
    ) -> None:
        sizes = StepSizes(
            rows=rows, n_embd=n_embd, widest_in=widest_in, widest_out=widest_out, n_vocab=32, heads=0, kv_heads=0,
            k_dim=0, post_norms=True,
        )
        self.lab = lab
        self._stores: list[WeightStore] = []
        context = lab.context(rows, phase=Phase.PREFILL)
        decode = DecodeMatmul(context)
        self.family = PrefillMatmul(context, lab.launcher, decode.dequant)
        specs = [*self.family.scratch(Phase.PREFILL, sizes), *decode.scratch(Phase.PREFILL, sizes)]
        if slab is not None:
            specs = [replace(spec, shape=(slab,)) if spec.name == "prefill_matmul.slab" else spec for spec in specs]
        context.scratch = {spec.name: lab.empty(spec.shape, spec.dtype) for spec in specs}

    def weight(self, *infos: TensorInfo, biases: list[TensorInfo | None] | None = None) -> CudaWeight:
        """Tensors on the device."""
        lab = self.lab

        def source(info: TensorInfo, first: int, out: Buffer) -> None:
            lab.host(out[:1])   # what was enqueued is done
            out[...] = lab.array(info.data[first : first + len(out)])
            lab.host(out[:1])

        store = WeightStore(lab.launcher, lambda size: lab.empty((size,), np.uint8), lab.array, source)
        self._stores.append(store)   # what its kernels read stays
        return store.load(infos, biases or ())

    def project(self, x: np.ndarray, norm: np.ndarray, weight: CudaWeight) -> np.ndarray:
        """Host in, host out."""
        out = self.lab.empty((len(x), weight.n_out), np.float32)
        self.family.project(self.lab.array(x), self.lab.array(norm), weight, out, eps=EPS)
        return self.lab.host(out)

    def add_projected(self, rows: np.ndarray, weight: CudaWeight, x: np.ndarray) -> np.ndarray:
        """Host in, host out."""
        total = self.lab.array(x)
        self.family.add_projected(self.lab.array(rows), weight, total)
        return self.lab.host(total)


def _normal(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def _matrix(seed: int, n_out: int, n_in: int, quant: Quant, name: str = "w") -> tuple[TensorInfo, np.ndarray]:
    """A tensor and what is in it, float64."""
    info = tensor(name, _normal(seed, n_out, n_in, scale=n_in**-0.5), quant)
    return info, dequantize_rows(info, 0, n_out).astype(np.float64)


def _rms(x: np.ndarray, norm: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPS) * norm


def _check(got: np.ndarray, rows: np.ndarray, matrix: np.ndarray, added: np.ndarray | float = 0.0) -> None:
    """got = rows @ matrix.T + added, within the errors above."""
    rows = rows.astype(np.float64)
    expected = rows @ matrix.T + added
    norms = np.linalg.norm(rows, axis=1)[:, None] * np.linalg.norm(matrix, axis=1)[None]
    allowed = HALF_ERROR * norms + SUM_ERROR * (np.abs(expected) + np.abs(added)) + 1e-30
    share = np.abs(got - expected) / allowed
    assert np.isfinite(got).all()
    worst = np.unravel_index(share.argmax(), share.shape)
    assert share.max() < 1.0, f"{share.max():.3g} of the allowed error in row and column {worst}"


# rows, E, n_out, halves of the slab: one slab and several, tails everywhere
SHAPES = [(1, 32, 16, None), (3, 64, 200, 64 * 96), (17, 576, 112, 576 * 32), (40, 96, 700, 96 * 300)]
GPU_SHAPES = [
    (512, 576, 960, None), (600, 5120, 6160, None), (300, 6144, 2560, 6144 * 2048), (129, 4096, 14336, None),
]


@pytest.mark.parametrize("quant", [Quant.F32, Quant.Q8_0, Quant.Q4_0])
@pytest.mark.parametrize("biased", [False, True])
def test_project(lab: Any, quant: Quant, biased: bool) -> None:
    """rms(x) * norm @ weight.T + bias for any shape, of rows or of records, however many slabs there are."""
    for rows, n_in, n_out, slab in SHAPES + (GPU_SHAPES if lab.on_gpu else []):
        bench = Bench(lab, rows, n_in, n_in, n_out, slab)
        info, matrix = _matrix(1, n_out, n_in, quant)
        bias = _normal(2, n_out)
        weight = bench.weight(info, biases=[tensor("b", bias[None])] if biased else None)
        x, norm = _normal(3, rows, n_in, scale=5.0), _normal(4, n_in)
        _check(bench.project(x, norm, weight), _rms(x, norm), matrix, bias if biased else 0.0)


def test_project_with_joined_tensors(lab: Any) -> None:
    """Sections of different types, with and without bias, give their columns in the order of the tensors."""
    bench = Bench(lab, 9, 256, 256, 112)
    parts = [_matrix(10, 48, 256, Quant.Q8_0), _matrix(11, 32, 256, Quant.F16), _matrix(12, 32, 256, Quant.Q4_0)]
    bias = _normal(13, 48)
    weight = bench.weight(*(info for info, _ in parts), biases=[tensor("b", bias[None]), None, None])
    assert len(weight.sections) == 3
    x, norm = _normal(14, 9, 256), _normal(15, 256)
    added = np.concatenate([bias, np.zeros(64, np.float32)])
    _check(bench.project(x, norm, weight), _rms(x, norm), np.concatenate([matrix for _, matrix in parts]), added)


@pytest.mark.parametrize("scale", [1e-9, 1e-4, 1e5, 1e8])
def test_rows_outside_of_float16s_range(lab: Any, scale: float) -> None:
    """A row's relative error does not depend on its size, nor on that of other rows; zeros stay zeros."""
    rows, n_in, n_out = 12, 64, 48
    bench = Bench(lab, rows, n_in, n_in, n_out)
    info, matrix = _matrix(20, n_out, n_in, Quant.F32)
    weight = bench.weight(info)
    x, norm = _normal(21, rows, n_in), _normal(22, n_in)
    uniform = norm * np.float32(scale)
    _check(bench.project(x, uniform, weight), _rms(x, uniform), matrix)
    norm[7] = scale
    x[:3] *= 1e-12
    x[:3, 7] = 1.0   # rows of one number, times the scale
    x[5] = 0.0
    got = bench.project(x, norm, weight)
    _check(got, _rms(x, norm), matrix)
    assert not got[5].any()


def test_add_projected(lab: Any) -> None:
    """x += rows @ weight.T + bias, also where rows are wider than the scratch for them, for rows of any size."""
    shapes = [(1, 32, 48, 32), (19, 192, 64, 64), (7, 64, 96, 64)]
    for rows, n_in, n_out, n_embd in shapes + ([(500, 6144, 5120, 5120), (300, 4096, 640, 640)] if lab.on_gpu else []):
        bench = Bench(lab, rows, n_embd, n_in, n_out)
        info, matrix = _matrix(30, n_out, n_in, Quant.F32)
        bias = _normal(31, n_out)
        for biased in (False, True):
            weight = bench.weight(info, biases=[tensor("b", bias[None])] if biased else None)
            sizes = np.float32(10.0) ** np.random.default_rng(32).integers(-9, 10, (rows, 1)).astype(np.float32)
            values, x = _normal(33, rows, n_in) * sizes, _normal(34, rows, n_out) * sizes
            added = x.astype(np.float64) + (bias if biased else 0.0)
            _check(bench.add_projected(values, weight, x), values, matrix, added)


def test_add_normed(lab: Any) -> None:
    """x += rms(rows @ weight.T + bias) * norm for the same shapes: rows of any size and of x that lie apart."""
    for rows, n_in, n_embd in [(1, 32, 48), (19, 192, 64), (7, 64, 96), (5, 96, 32)]:
        bench = Bench(lab, rows, n_embd, n_in, n_embd)
        info, matrix = _matrix(30, n_embd, n_in, Quant.F32)
        bias, norm = _normal(31, n_embd), _normal(35, n_embd)
        for biased in (False, True):
            weight = bench.weight(info, biases=[tensor("b", bias[None])] if biased else None)
            sizes = np.float32(10.0) ** np.random.default_rng(32).integers(-2, 10, (rows, 1)).astype(np.float32)
            values, x = _normal(33, rows, n_in) * sizes, _normal(34, rows, n_embd + 4)
            total = lab.array(x)
            bench.family.add_normed(lab.array(values), weight, lab.array(norm), total[:, :n_embd], eps=EPS)
            got = lab.host(total)
            wide = values.astype(np.float64)
            expected = _rms(wide @ matrix.T + (bias if biased else 0.0), norm)
            # The product's error, and that of the row's size, as parts of that size.
            norms = np.linalg.norm(wide, axis=1)[:, None] * np.linalg.norm(matrix, axis=1).max()
            size = np.sqrt(np.mean((wide @ matrix.T + (bias if biased else 0.0)) ** 2, axis=1, keepdims=True) + EPS)
            allowed = 2 * HALF_ERROR * norms / size * (np.abs(norm) + np.abs(expected)) + 1e-5
            assert (np.abs(got[:, :n_embd] - x[:, :n_embd] - expected) < allowed).all(), (rows, n_in, biased)
            np.testing.assert_array_equal(got[:, n_embd:], x[:, n_embd:])


def test_adding_nothing_changes_no_bit(lab: Any) -> None:
    """A product of 0 leaves x as it was, whatever scale its rows needed."""
    bench = Bench(lab, 8, 64, 64, 64)
    weight = bench.weight(tensor("w", np.zeros((64, 64), np.float32)))
    rows = _normal(40, 8, 64) * np.float32([[1e-12], [1e-6], [1.0], [1e3], [1e6], [1e12], [0.0], [1e4]])
    x = _normal(41, 8, 64, scale=100.0)
    assert np.array_equal(bench.add_projected(rows, weight, x).view(np.uint32), x.view(np.uint32))


def _feed_forward(
    bench: Bench, x: np.ndarray, norm: np.ndarray, gate: TensorInfo, up: TensorInfo, down: TensorInfo,
    total: np.ndarray, bias: np.ndarray | None = None, activation: Activation = Activation.SILU,
) -> np.ndarray:
    """total + down(gated(x)), on the device."""
    lab = bench.lab
    half = len(bias) // 2 if bias is not None else 0
    biases = None if bias is None else [tensor("g", bias[None, :half]), tensor("u", bias[None, half:])]
    both, last = bench.weight(gate, up, biases=biases), bench.weight(down)
    rows, device = lab.empty((len(x), last.n_in), np.float32), lab.array(total)
    bench.family.project_gated(lab.array(x), lab.array(norm), both, rows, eps=EPS, activation=activation)
    bench.family.add_projected(rows, last, device)
    return lab.host(device)


def _gated(
    rows: np.ndarray, gate: np.ndarray, up: np.ndarray, bias: np.ndarray | None,
    activation: Activation = Activation.SILU,
) -> np.ndarray:
    g, u = rows @ gate.T, rows @ up.T
    if bias is not None:
        g, u = g + bias[: len(gate)], u + bias[len(gate) :]
    return (gelu(g) if activation is Activation.GELU else g / (1.0 + np.exp(-g))) * u


def _check_feed_forward(got: np.ndarray, hidden: np.ndarray, down: np.ndarray, total: np.ndarray) -> None:
    expected = hidden @ down.T + total
    norms = np.linalg.norm(hidden, axis=1)[:, None] * np.linalg.norm(down, axis=1)[None]
    share = np.abs(got - expected) / (norms + np.abs(total))
    assert share.max() < CHAIN_ERROR, f"{share.max():.3g} of the norms"


# rows, E, F, halves of the slab
FFN_SHAPES = [(5, 64, 32, None), (1, 64, 64, None), (9, 96, 160, None), (4, 256, 288, 256 * 64)]
GPU_FFN_SHAPES = [(512, 576, 1536, None), (2048, 1024, 3072, None), (300, 2560, 8704, None)]


@pytest.mark.parametrize("quant", [Quant.F32, Quant.Q8_0])
@pytest.mark.parametrize("biased", [False, True])
def test_feed_forward(lab: Any, quant: Quant, biased: bool) -> None:
    """project_gated, then add_projected: for gates and ups in tiles of their own and in common ones, slab by slab."""
    for rows, n_embd, width, slab in FFN_SHAPES + (GPU_FFN_SHAPES if lab.on_gpu else []):
        bench = Bench(lab, rows, n_embd, max(n_embd, width), 2 * width, slab)
        gate, gate_values = _matrix(50, width, n_embd, quant, "blk.0.ffn_gate.weight")
        up, up_values = _matrix(51, width, n_embd, quant, "blk.0.ffn_up.weight")
        down, down_values = _matrix(52, n_embd, width, quant)
        x, norm, total = _normal(53, rows, n_embd), _normal(54, n_embd), _normal(55, rows, n_embd, scale=0.1)
        bias = _normal(56, 2 * width) if biased else None
        for activation in Activation:
            got = _feed_forward(bench, x, norm, gate, up, down, total, bias, activation)
            hidden = _gated(_rms(x, norm), gate_values, up_values, bias, activation)
            _check_feed_forward(got, hidden, down_values, total)


@pytest.mark.parametrize("scale", [1e-3, 30.0, 3e3])
@pytest.mark.parametrize("place", [3, 100, 255])
def test_feed_forward_of_any_size(lab: Any, scale: float, place: int) -> None:
    """A value that float16 does not hold may come in any slab, in some rows: all columns of a row stay precise."""
    rows, n_embd, width = 6, 64, 256
    bench = Bench(lab, rows, n_embd, width, 2 * width)
    gate, up = (_normal(seed, width, n_embd, scale=min(scale, 1.0)) for seed in (60, 61))
    gate[place] = np.abs(gate[place]) * np.float32(scale)
    up[place] = 0.0
    up[place, 0] = scale
    x = np.abs(_normal(62, rows, n_embd))
    x[::2, 0] = 0.0   # these rows do not see it
    gate_info, up_info = tensor("blk.0.ffn_gate.weight", gate), tensor("blk.0.ffn_up.weight", up)
    down, down_values = _matrix(63, n_embd, width, Quant.F32)
    norm, total = np.ones(n_embd, np.float32), np.zeros((rows, n_embd), np.float32)
    got = _feed_forward(bench, x, norm, gate_info, up_info, down, total)
    hidden = _gated(_rms(x, norm), gate.astype(np.float64), up.astype(np.float64), None)
    _check_feed_forward(got, hidden, down_values, total)


@pytest.mark.parametrize("scale", [1e-5, 1e5])
def test_feed_forward_of_scaled_rows(lab: Any, scale: float) -> None:
    """Normed rows that float16 does not hold give the gates and ups of their real size, biases added to these."""
    rows, n_embd, width = 3, 64, 128
    bench = Bench(lab, rows, n_embd, width, 2 * width)
    gate, up = (_normal(seed, width, n_embd, scale=0.1 / scale**0.75) for seed in (90, 91))
    down, down_values = _matrix(92, n_embd, width, Quant.F32)
    x, norm, bias = _normal(93, rows, n_embd), _normal(94, n_embd, scale=scale), _normal(95, 2 * width)
    total = np.zeros((rows, n_embd), np.float32)
    got = _feed_forward(bench, x, norm, tensor("gate", gate), tensor("up", up), down, total, bias)
    hidden = _gated(_rms(x, norm), gate.astype(np.float64), up.astype(np.float64), bias)
    _check_feed_forward(got, hidden, down_values, total)


def test_float32_rows_where_halves_were(lab: Any) -> None:
    """Rows that project_gated left are taken once: later ones at the same address are float32 again."""
    bench = Bench(lab, 4, 64, 64, 128)
    x, norm = _normal(70, 4, 64), _normal(71, 64)
    gate, up = _matrix(72, 64, 64, Quant.F32, "gate"), _matrix(73, 64, 64, Quant.F32, "up")
    down, down_values = _matrix(74, 64, 64, Quant.F32)
    both, last = bench.weight(gate[0], up[0]), bench.weight(down)
    values, total = _normal(75, 4, 64), _normal(76, 4, 64)
    device_x, device_norm, sink = bench.lab.array(x), bench.lab.array(norm), bench.lab.array(total)
    rows = bench.lab.empty((4, 64), np.float32)
    for next_op in ("add_projected", "project"):
        bench.family.project_gated(device_x, device_norm, both, rows, eps=EPS)
        if next_op == "add_projected":
            bench.family.add_projected(rows, last, sink)
        else:
            bench.project(x, norm, both)
        bench.lab.host(rows)
        rows[...] = bench.lab.array(values)
        device = bench.lab.array(total)
        bench.family.add_projected(rows, last, device)
        _check(bench.lab.host(device), values, down_values, total)


@given(
    st.integers(1, 40000), st.integers(1, 600), st.integers(32, 20000), st.integers(1, 3000), st.integers(1, 160)
)
def test_slabs(n_out: int, blocks: int, most: int, n_rows: int, sm_count: int) -> None:
    """A slab fits, and is the whole matrix or begins where tiles of weights do."""
    step = slab_rows(n_out, 32 * blocks, most=most, n_rows=n_rows, sm_count=sm_count)
    assert 1 <= step <= min(most, n_out)
    assert step == n_out or step % 32 == 0


def test_slabs_fill_waves() -> None:
    """At 2,048 rows on 132 multiprocessors the shapes of a 27B model take no more waves of tiles than a single GEMM."""
    for n_out, n_in, most, slabs in ((34816, 5120, 8704, 5), (16480, 5120, 10**6, 2), (5120, 6144, 10**6, 1)):
        held = SLAB_BYTES // 2 // n_in
        step = slab_rows(n_out, n_in, most=min(most, held), n_rows=2048, sm_count=132)
        sizes = [min(step, n_out - first) for first in range(0, n_out, step)]
        waves = [-(-(16 * -(-size // 256)) // 132) for size in sizes]
        assert len(sizes) == slabs
        assert sum(waves) == -(-(16 * -(-n_out // 256)) // 132)


def test_gemm(lab: Any) -> None:
    """out = rows @ weight.T into some columns of a wider buffer, or added to them; other columns stay."""
    large = [(777, 1030, 5120), (2048, 8448, 576)] if lab.on_gpu else []
    for rows, n_out, n_in in [(1, 16, 32), (5, 33, 64), *large]:
        left, right = (_normal(seed, n, n_in).astype(np.float16) for seed, n in ((80, rows), (81, n_out)))
        expected = left.astype(np.float64) @ right.astype(np.float64).T
        stride = align_up(n_out, 8) + 8
        before = _normal(82, rows, stride)
        for accumulate in (False, True):
            out = lab.array(before)
            lab.launcher.gemm(
                lab.array(left), lab.array(right), out[:, 4:], n_rows=rows, n_out=n_out, n_in=n_in, out_stride=stride,
                accumulate=accumulate,
            )
            got = lab.host(out)
            wanted = expected + (before[:, 4 : 4 + n_out] if accumulate else 0.0)
            error = np.abs(got[:, 4 : 4 + n_out] - wanted).max() / n_in**0.5
            assert error < 2e-5, (rows, n_out, n_in, accumulate, error)
            got[:, 4 : 4 + n_out] = before[:, 4 : 4 + n_out]
            assert np.array_equal(got, before)


def test_no_cublas_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CuPy or its cuBLAS is missing the error names cuBLAS and how to install it."""
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"cuBLAS cannot be loaded .*pip install"):
        CublasGemm(0, lambda size: np.zeros(size, np.uint8))
