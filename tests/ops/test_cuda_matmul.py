"""Products with weight records are right, in float64's judgement; a row's bits never depend on other rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from kvs_core.device.base import StepSizes
from kvs_core.device.cuda.context import Context
from kvs_core.device.cuda.kernel import Kernel, Launcher, address
from kvs_core.device.cuda.matrices import RECORD_TYPES, CudaWeight
from kvs_core.device.cuda.ops.matmul import MAX_ROWS, DecodeMatmul, quant_grid
from kvs_core.device.cuda.ops.matmul_kernels import ACT_BYTES, QUANT, block_bytes, fit, instances, splits
from kvs_core.device.cuda.ops.row_forms import GatedNorm, Records
from kvs_core.device.operands import Activation
from kvs_core.errors import CapabilityError
from kvs_core.formats.gguf import TensorInfo
from kvs_core.formats.quants import dequantize_rows
from kvs_core.memory.phases import Phase
from tests.ops.record_weights import random_tensor, store_in
from tests.reference.forward import gelu

Quant = GGMLQuantizationType
ALL_TYPES = pytest.mark.parametrize("quant", RECORD_TYPES, ids=lambda quant: quant.name)
BY_BLOCKS_OF_256 = (Quant.Q4_K, Quant.Q5_K, Quant.Q6_K, Quant.IQ4_XS)
EPS = 1e-5

STEP = 0.52 / 32639
"""Rounding of activations: half a step of the largest of 256 values, and the error of the division."""
SUMS = 2e-6
"""Float32 sums, and the GPU's approximate reciprocal square root, as a part of the sum of magnitudes."""


def sizes(n_embd: int, widest_in: int, widest_out: int) -> StepSizes:
    return StepSizes(MAX_ROWS, n_embd, widest_in, widest_out, n_vocab=0, heads=0, kv_heads=0, k_dim=0)


class Bench:
    """Ops of one step in a lab."""

    def __init__(
        self, lab: Any, rows: int, *, n_embd: int = 512, widest_in: int = 512, widest_out: int = 512,
        launcher: Launcher | None = None,
    ) -> None:
        self.lab = lab
        self.context: Context = lab.context(rows)
        if launcher is not None:
            self.context.launcher = launcher
        self.ops = DecodeMatmul(self.context)
        specs = self.ops.scratch(Phase.DECODE, sizes(n_embd, widest_in, widest_out))
        self.context.scratch = {spec.name: lab.empty(spec.shape, spec.dtype) for spec in specs}

    def project(self, x: np.ndarray, norm: np.ndarray, weight: CudaWeight, gap: int = 0) -> np.ndarray:
        """Rows of ``project``, written ``gap`` numbers apart."""
        out = self.lab.empty((len(x), weight.n_out + gap), np.float32)
        self.ops.project(self.lab.array(x), self.lab.array(norm), weight, out[:, : weight.n_out], eps=EPS)
        host = self.lab.host(out)
        assert np.isnan(host[:, weight.n_out :]).all(), "columns beyond the matrix were written"
        return host[:, : weight.n_out]

    def gated(
        self, x: np.ndarray, norm: np.ndarray, weight: CudaWeight, activation: Activation = Activation.SILU
    ) -> np.ndarray:
        """Rows of ``project_gated``."""
        out = self.lab.empty((len(x), weight.n_out // 2), np.float32)
        self.ops.project_gated(self.lab.array(x), self.lab.array(norm), weight, out, eps=EPS, activation=activation)
        return self.lab.host(out)

    def normed(self, x: np.ndarray, rows: Any, weight: CudaWeight, norm: np.ndarray) -> np.ndarray:
        """x after ``add_normed``, at once. ``rows`` are on the device."""
        buffer = self.lab.array(x)
        self.ops.add_normed(rows, weight, self.lab.array(norm), buffer, eps=EPS)
        return self.lab.host(buffer)

    def added(self, x: np.ndarray, rows: Any, weight: CudaWeight) -> np.ndarray:
        """x after ``add_projected`` and ``flush``. ``rows`` are on the device."""
        buffer = self.lab.array(x)
        self.ops.add_projected(rows, weight, buffer)
        self.ops.flush()
        return self.lab.host(buffer)


@dataclass
class OtherGpu:
    """A launcher that claims to be another GPU, and lists what it launches."""

    launcher: Launcher
    sm_count: int
    shared_bytes: int
    launched: list[Kernel]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.launcher, name)

    def launch(self, kernel: Kernel, *args: Any, **options: Any) -> None:
        self.launched.append(kernel)
        self.launcher.launch(kernel, *args, **options)


def rows_of(count: int, n: int, seed: int = 0) -> np.ndarray:
    """Rows as activations are: a few numbers are large."""
    rng = np.random.default_rng((count, n, seed))
    rows = rng.normal(size=(count, n))
    rows[:, rng.integers(0, n, 3)] *= 30
    return rows.astype(np.float32)


def values_of(infos: Sequence[TensorInfo]) -> np.ndarray:
    """The joined matrix in float64."""
    return np.concatenate([dequantize_rows(info, 0, info.shape[1]) for info in infos]).astype(np.float64)


def rounding(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """How far a product of float64 ``rows`` may be off for the rounding of rows and of sums."""
    blocks = -(-rows.shape[1] // 256)
    padded = np.zeros((len(rows), blocks * 256))
    padded[:, : rows.shape[1]] = np.abs(rows)
    peaks = np.repeat(padded.reshape(len(rows), blocks, 256).max(-1), 256, axis=1)[:, : rows.shape[1]]
    return (STEP * peaks + SUMS * np.abs(rows)) @ np.abs(weight.T)


def check_error(got: np.ndarray, expected: np.ndarray, allowed: np.ndarray) -> None:
    assert np.isfinite(got).all()
    error = np.abs(got - expected)
    worst = (error / np.maximum(allowed, 1e-30)).max()
    assert worst <= 1, f"error is {worst:.2f} times what rounding explains, {error.max():.3g} at most"


def check_product(got: np.ndarray, rows: np.ndarray, weight: np.ndarray, factor: np.ndarray | float = 1.0) -> None:
    """got = factor * rows @ weight.T for float64 ``rows``."""
    check_error(got, factor * (rows @ weight.T), factor * rounding(rows, weight))


def rms_factor(x: np.ndarray) -> np.ndarray:
    return 1 / np.sqrt(np.mean(np.square(x.astype(np.float64)), axis=1, keepdims=True) + EPS)


def widths(lab: Any, quant: Quant) -> list[int]:
    small = [256, 512] if quant in BY_BLOCKS_OF_256 else [32, 64, 288]
    return [*small, 2560] if lab.on_gpu else small


@ALL_TYPES
def test_products_are_right(lab: Any, quant: Quant) -> None:
    """One to eight rows, tails of rows and columns; only the matrix's own columns are written."""
    for n_in in widths(lab, quant):
        for n_out, count in ((300, 1), (24, 8)) if not lab.on_gpu else ((1, 1), (300, 5), (24, 8), (2200, 4)):
            info = random_tensor("w", quant, n_out, n_in)
            x, norm = rows_of(count, n_in), rows_of(1, n_in, 1)[0]
            weight = store_in(lab).load([info])
            got = Bench(lab, count, n_embd=n_in).project(x, norm, weight, gap=3)
            check_product(got, x.astype(np.float64) * norm, values_of([info]), rms_factor(x))


@ALL_TYPES
def test_bits_do_not_depend_on_other_rows(lab: Any, quant: Quant) -> None:
    """Each of eight rows is the same in steps of one to eight rows, in every op."""
    n_in, n_out, n_ff = (1024, 640, 1536) if lab.on_gpu else (256, 40, 512)
    store = store_in(lab)
    plain = store.load([random_tensor("w", quant, n_out, n_in)])
    up = store.load([random_tensor(f"ffn_{name}", quant, n_out, n_in, i) for i, name in enumerate(("gate", "up"))])
    down = store.load([random_tensor("d", quant, n_in, n_ff, 3)])
    assert up.swiglu is not None
    x, norm, wide = rows_of(8, n_in), rows_of(1, n_in, 1)[0], rows_of(8, n_ff)
    ones = []
    for count in range(8, 0, -1) if lab.on_gpu else (8, 6, 5, 4, 3, 1):   # kernels change above 3 and above 4
        bench = Bench(lab, count, n_embd=n_in, widest_in=n_ff)
        got = [
            bench.project(x[:count], norm, plain),
            *(bench.gated(x[:count], norm, up, activation) for activation in Activation),
            bench.added(x[:count], lab.array(wide[:count]), down),
            bench.normed(x[:count], lab.array(wide[:count]), down, norm),
        ]
        ones = ones or got
        for name, one, other in zip(("project", "silu", "gelu", "add_projected", "add_normed"), ones, got, strict=True):
            np.testing.assert_array_equal(one[:count].view(np.uint32), other.view(np.uint32), f"{name} of {count} rows")


def test_rows_of_joined_matrices(lab: Any) -> None:
    """Types with records, others and a bias in one matrix: columns in the order of the tensors."""
    infos = [
        random_tensor("q", Quant.Q8_0, 40, 96), random_tensor("k", Quant.F16, 9, 96),
        random_tensor("v", Quant.Q4_1, 17, 96),
    ]
    bias = np.arange(40, dtype=np.float32)
    bias_info = TensorInfo("b", (40,), Quant.F32, 40, 160, bias.view(np.uint8))
    weight = store_in(lab).load(infos, [bias_info, None, None])
    for count in (1, 3, 8):
        x, norm = rows_of(count, 96), rows_of(1, 96, 1)[0]
        got = Bench(lab, count, n_embd=96).project(x, norm, weight, gap=5)
        got[:, :40] -= bias
        rows, values, factor = x.astype(np.float64) * norm, values_of(infos), rms_factor(x)
        check_error(got, factor * (rows @ values.T), factor * rounding(rows, values) + 1e-5)


def test_rows_of_any_length(lab: Any) -> None:
    """Matrices that are kept as in the file have any number of columns, and so has the residual."""
    infos = [random_tensor("w", Quant.F32, 7, 30), random_tensor("d", Quant.F32, 30, 6)]
    store = store_in(lab)
    weight, down = (store.load([info]) for info in infos)
    x, norm, rows = rows_of(3, 30), rows_of(1, 30, 1)[0], rows_of(3, 6)
    bench = Bench(lab, 3, n_embd=30)
    check_product(bench.project(x, norm, weight), x.astype(np.float64) * norm, values_of(infos[:1]), rms_factor(x))
    got = bench.added(np.zeros_like(x), lab.array(rows), down)
    check_product(got, rows.astype(np.float64), values_of(infos[1:]))
    buffer, out = lab.array(x), lab.empty((3, 7), np.float32)
    bench.ops.add_projected(lab.array(rows), down, buffer)
    bench.ops.project(buffer, lab.array(norm), weight, out, eps=EPS)
    np.testing.assert_array_equal(lab.host(buffer), x + got)


@pytest.mark.parametrize("quants", [(Quant.Q4_0, Quant.Q4_0), (Quant.Q4_K, Quant.Q6_K), (Quant.F16, Quant.F16)])
def test_gated(lab: Any, quants: tuple[Quant, Quant]) -> None:
    """g * sigmoid(g) * u, and gelu(g) * u, whether gate and up share tiles or not; in the former case ``project`` keeps
    their order."""
    infos = [random_tensor(f"ffn_{name}", quant, 24, 256, i) for i, (name, quant) in
             enumerate(zip(("gate", "up"), quants, strict=True))]
    weight = store_in(lab).load(infos)
    assert (weight.swiglu is not None) == (quants[0] is Quant.Q4_0)
    for count in (2, 8):
        x, norm = rows_of(count, 256), rows_of(1, 256, 1)[0] / 50
        rows, values, factor = x.astype(np.float64) * norm, values_of(infos), rms_factor(x)
        gate, up = np.split(factor * (rows @ values.T), 2, axis=1)
        gate_error, up_error = np.split(factor * rounding(rows, values), 2, axis=1)
        allowed = 1.1 * gate_error * np.abs(up) + np.abs(gate) * up_error + 1e-6 * np.abs(gate * up)
        bench = Bench(lab, count, n_embd=256)
        check_error(bench.gated(x, norm, weight), gate / (1 + np.exp(-gate)) * up, allowed)
        check_error(bench.gated(x, norm, weight, Activation.GELU), gelu(gate) * up, 1.1 * allowed)
        check_product(bench.project(x, norm, weight), rows, values, factor)


def test_sums_wait_for_the_next_op(lab: Any) -> None:
    """Parts are added when x is used next, or another sum begins, or at ``flush``; exactly once."""
    infos = [random_tensor("d", Quant.Q4_0, 64, 544), random_tensor("y", Quant.Q8_0, 48, 64)]
    store = store_in(lab)
    down, head = store.load(infos[:1]), store.load(infos[1:])
    x, rows, norm = rows_of(2, 64), rows_of(2, 544), np.ones(64, np.float32)
    bench = Bench(lab, 2, n_embd=64, widest_in=544)
    buffer, wide, out = lab.array(x), lab.array(rows), lab.empty((2, 48), np.float32)

    def check_added(times: int) -> None:
        got = (lab.host(buffer).astype(np.float64) - x) / times
        check_product(got, rows.astype(np.float64), values_of(infos[:1]))

    bench.ops.add_projected(wide, down, buffer)
    np.testing.assert_array_equal(lab.host(buffer), x)
    bench.ops.project(buffer, lab.array(norm), head, out, eps=EPS)
    once = lab.host(buffer)
    check_added(1)
    check_product(lab.host(out), once.astype(np.float64), values_of(infos[1:]), rms_factor(once))
    bench.ops.flush()
    np.testing.assert_array_equal(lab.host(buffer), once)
    bench.ops.add_projected(wide, down, buffer)
    np.testing.assert_array_equal(lab.host(buffer), once)
    bench.ops.add_projected(wide, down, buffer)   # the one before it is added first
    check_added(2)
    bench.ops.flush()
    check_added(3)
    bench.ops.add_projected(wide, down, buffer)
    bench.ops.begin_step()
    bench.ops.flush()
    check_added(3)


@pytest.mark.parametrize("quant", [Quant.Q4_0, Quant.F16])
def test_sums_through_a_norm(lab: Any, quant: Quant) -> None:
    """x += rms(rows @ weight.T) * norm at once, of records and of rows; what was kept back for x is added before."""
    info = random_tensor("d", quant, 64, 544)
    down = store_in(lab).load([info])
    values = values_of([info])
    for count in (1, 2, 8):
        x, rows, norm = rows_of(count, 64), rows_of(count, 544), rows_of(1, 64, 1)[0]
        wide = rows.astype(np.float64)
        product, wrong = wide @ values.T, rounding(wide, values)
        factor = 1 / np.sqrt(np.mean(product**2, axis=1, keepdims=True) + EPS)
        # A row's factor is off by no more than its numbers are.
        share = np.linalg.norm(wrong, axis=1, keepdims=True) / np.linalg.norm(product, axis=1, keepdims=True)
        allowed = factor * np.abs(norm) * (wrong + share * np.abs(product)) + 1e-6 * np.abs(x) + 1e-6
        bench = Bench(lab, count, n_embd=64, widest_in=544)
        check_error(bench.normed(x, lab.array(rows), down, norm), x + factor * product * norm, allowed)
        buffer = lab.array(x)
        bench.ops.add_projected(lab.array(rows), down, buffer)
        bench.ops.add_normed(lab.array(rows), down, lab.array(norm), buffer, eps=EPS)
        both = lab.host(buffer)
        bench.ops.flush()
        np.testing.assert_array_equal(lab.host(buffer), both)
        check_error(both, x + product + factor * product * norm, allowed + wrong + 1e-6 * np.abs(product))


@ALL_TYPES
def test_sums_are_right(lab: Any, quant: Quant) -> None:
    """x += rows @ weight.T with rows far apart and a split of the columns."""
    n_in = 4096 if lab.on_gpu else 768
    info = random_tensor("d", quant, 48, n_in)
    weight = store_in(lab).load([info])
    for count in (2, 6):
        rows = rows_of(count, n_in + 8)
        got = Bench(lab, count, n_embd=48, widest_in=n_in).added(
            np.zeros((count, 48), np.float32), lab.array(rows)[:, :n_in], weight
        )
        check_product(got, rows[:, :n_in].astype(np.float64), values_of([info]))


def test_sums_with_rows_sections(lab: Any) -> None:
    """A matrix that is kept as in the file is added too, whatever form the rows have."""
    info = random_tensor("d", Quant.F16, 48, 256)
    weight = store_in(lab).load([info])
    rows = rows_of(3, 256)
    zeros, bench = np.zeros((3, 48), np.float32), Bench(lab, 3, n_embd=48)
    check_product(bench.added(zeros, lab.array(rows), weight), rows.astype(np.float64), values_of([info]))
    place = lab.empty((3, 256), np.float32)
    bench.context.forms[address(place)] = Records(records_of(bench, rows))
    check_product(bench.added(zeros, place, weight), rows.astype(np.float64), values_of([info]))
    assert not bench.context.forms
    form, expected = gated(lab, 3, 256)
    bench.context.forms[address(place)] = form
    check_product(bench.added(zeros, place, weight), expected, values_of([info]))


def records_of(bench: Bench, rows: np.ndarray) -> Any:
    """Activation records of rows, as another op would leave them."""
    count, n = rows.shape
    records = bench.lab.empty((-(-n // 256), 2, count, ACT_BYTES), np.uint8)
    bench.context.launcher.launch(QUANT, quant_grid(n, count), 128, (bench.lab.array(rows), n, count, n, records))
    return records


def gated(lab: Any, count: int, n: int) -> tuple[GatedNorm, np.ndarray]:
    """Rows that are still to be normed and gated, and what they become. The gate is part of wider rows."""
    x, y, norm = rows_of(count, n, 4), rows_of(count, n + 32, 5), rows_of(1, 128, 6)[0]
    buffer = lab.array(y)
    form = GatedNorm(lab.array(x), buffer[:, 16:], n + 32, lab.array(norm), EPS)
    heads = x.astype(np.float64).reshape(count, -1, 128)
    normed = heads / np.sqrt(np.mean(heads * heads, axis=-1, keepdims=True) + EPS) * norm
    z = y[:, 16 : 16 + n].astype(np.float64)
    return form, normed.reshape(count, n) * z / (1 + np.exp(-z))


def test_forms_of_rows(lab: Any) -> None:
    """Records give the bits of plain rows; rows to be normed and gated are right and do not depend on other rows."""
    info = random_tensor("d", Quant.Q4_K, 48, 512)
    weight = store_in(lab).load([info])
    rows, place = rows_of(8, 512), lab.empty((8, 512), np.float32)
    ones: list[np.ndarray] = []
    for count in (8, 5, 4, 2, 1):
        bench = Bench(lab, count, n_embd=48)
        zeros = np.zeros((count, 48), np.float32)
        plain = bench.added(zeros, lab.array(rows[:count]), weight)
        bench.context.forms[address(place)] = Records(records_of(bench, rows[:count]))
        np.testing.assert_array_equal(bench.added(zeros, place[:count], weight), plain)
        form, expected = gated(lab, 8, 512)
        bench.context.forms[address(place)] = form
        got = bench.added(zeros, place[:count], weight)
        check_product(got, expected[:count], values_of([info]))
        ones = ones or [got]
        np.testing.assert_array_equal(got, ones[0][:count])
        assert not bench.context.forms


def test_rows_that_do_not_fit_a_block_take_turns(lab: Any) -> None:
    """With less shared memory a step is made in several launches, with the same bits."""
    quant, n_in = Quant.Q8_0, 512
    store = store_in(lab)
    weight, down = (store.load([random_tensor(name, quant, 48, n_in)]) for name in ("w", "d"))
    x, norm, wide = rows_of(8, n_in), rows_of(1, n_in, 1)[0], rows_of(8, n_in)
    form, _ = gated(lab, 8, n_in)
    place = lab.empty((8, n_in), np.float32)

    def run(launcher: Launcher) -> list[np.ndarray]:
        bench = Bench(lab, 8, n_embd=n_in, launcher=launcher)
        zeros = np.zeros((8, 48), np.float32)
        got = [bench.project(x, norm, weight), bench.added(zeros, lab.array(wide), down)]
        bench.context.forms[address(place)] = form
        return [*got, bench.added(zeros, place, down)]

    own = lab.launcher
    parts = -(-2 // splits(3, 2, own.sm_count))   # blocks of a row that a product of ``down`` stages
    small = OtherGpu(own, own.sm_count, block_bytes(quant, 12, 1, 2, 3), [])
    assert fit(quant, 2, 8, small.shared_bytes).rows == 3
    for one, other in zip(run(own), run(small), strict=True):
        np.testing.assert_array_equal(one, other)
    turns = -(-8 // 3) + 2 * -(-8 // fit(quant, parts, 8, small.shared_bytes).rows)
    assert sum(kernel.name == "matmul_decode" for kernel in small.launched) == turns


@ALL_TYPES
def test_rows_as_float16(lab: Any, quant: Quant) -> None:
    """Any range of rows, of joined and of interleaved matrices, rounded to float16 from the exact values."""
    n_in = 512 if quant in BY_BLOCKS_OF_256 else 288
    store = store_in(lab)
    joined = [
        random_tensor("a", quant, 40, n_in), random_tensor("b", Quant.F16, 8, n_in),
        random_tensor("c", quant, 19, n_in, 1),
    ]
    pair = [random_tensor(f"ffn_{name}", quant, 32, n_in, i) for i, name in enumerate(("gate", "up"))]
    joined_ranges, pair_ranges = ((0, 67), (16, 16), (32, 35)), ((0, 64), (0, 16), (16, 16), (48, 16), (16, 32))
    for infos, ranges in ((joined, joined_ranges), (pair, pair_ranges)):
        weight = store.load(infos)
        values = values_of(infos)
        for first, count in ranges:
            out = lab.empty((count, n_in), np.float16)
            DecodeMatmul(lab.context(1)).dequant(weight, first, count, out)
            np.testing.assert_allclose(lab.host(out), values[first : first + count], rtol=6e-4, atol=1e-7)


def test_partitions() -> None:
    """On an H200 the matrices of large models have all warps and room for eight rows; sums are split evenly."""
    shared_bytes = 227 * 1024
    for quant in RECORD_TYPES:
        for blocks in (20, 32, 68 // 4):
            best = fit(quant, blocks, 8, shared_bytes)
            assert (best.warps, best.rows) == (12, 8), (quant, blocks, best)
        for blocks in (1, 20, 112):
            warps = {fit(quant, blocks, rows, shared_bytes).warps for rows in range(1, 9)}
            assert len(warps) == 1
    assert splits(320, 68, 132) == splits(320, 24, 132) == 4
    assert splits(3, 1, 132) == 1
    assert splits(40, 60, 1) == 1
    with pytest.raises(CapabilityError, match="shared memory"):
        fit(Quant.Q8_0, 400, 1, 64 * 1024)


def test_loaded_weights_need_few_kernels(lab: Any) -> None:
    """What is compiled for a model is part of all instances, and all that its ops launch."""
    store = store_in(lab)
    pair = [random_tensor(f"ffn_{name}", Quant.Q8_0, 16, 64, i) for i, name in enumerate(("gate", "up"))]
    gate_up, down = store.load(pair), store.load([random_tensor("d", Quant.Q4_0, 64, 64)])
    spy = OtherGpu(lab.launcher, lab.launcher.sm_count, lab.launcher.shared_bytes, [])
    needed = set[Kernel]()
    for count in (1, 8):
        bench = Bench(lab, count, n_embd=64, launcher=spy)
        needed = set(bench.ops.kernels_for(store.weights, gated_norm=False))
        rows = bench.gated(rows_of(count, 64), rows_of(1, 64)[0], gate_up)
        bench.added(rows_of(count, 64), lab.array(np.repeat(rows, 4, axis=1)), down)
    assert set(spy.launched) <= needed <= set(instances(lab.launcher.arch))
