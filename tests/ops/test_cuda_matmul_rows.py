"""Rows of a GGUF file multiplied and dequantised on the GPU are those of ``formats/quants.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvs_core.device.cuda.kernel import Kernel
from kvs_core.device.cuda.matrices import RowsSection
from kvs_core.device.cuda.ops.matmul_rows import BLOCK_TYPES, MAX_ROWS, RowsDequant, RowsMatmul, instances, kernels_for
from kvs_core.formats import quants

Quant = GGMLQuantizationType

# Where a block's float16 scales are.
SCALES = {
    Quant.Q8_0: (0,), Quant.Q4_0: (0,), Quant.Q4_1: (0, 2), Quant.Q5_0: (0,), Quant.Q5_1: (0, 2), Quant.IQ4_NL: (0,),
    Quant.Q2_K: (80, 82), Quant.Q3_K: (108,), Quant.Q4_K: (0, 2), Quant.Q5_K: (0, 2), Quant.Q6_K: (208,),
    Quant.IQ4_XS: (0,),
}
PLAIN = (Quant.F32, Quant.F16, Quant.BF16)
ALL_TYPES = pytest.mark.parametrize("quant", BLOCK_TYPES, ids=lambda quant: quant.name)

# Error of a product against float64, as a part of the sum of its terms' magnitudes: sums are float32.
TOLERANCE = 1e-6


def random_rows(quant: Quant, rows: int, cols: int, seed: int = 0, scale: float = 0.01) -> np.ndarray:
    """uint8 [rows, row bytes]: any quants, with scales up to ``scale`` in magnitude."""
    rng = np.random.default_rng((seed, int(quant)))
    if quant in PLAIN:
        values = (rng.normal(size=(rows, cols)) * scale).astype(np.float32)
        if quant is Quant.BF16:
            return np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8)
        return values.astype(np.float16 if quant is Quant.F16 else np.float32).view(np.uint8)
    block, size = GGML_QUANT_SIZES[quant]
    data = rng.integers(0, 256, (rows * cols // block, size), dtype=np.uint8)
    for at in SCALES[quant]:
        scales = rng.uniform(-scale, scale, len(data)) * rng.choice([1.0, 1e-4], len(data))
        data[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    return data.reshape(rows, -1)


def row_section(
    lab: Any, quant: Quant, rows: np.ndarray, bias: np.ndarray | None = None, first_row: int = 0
) -> RowsSection:
    """``rows`` on the device."""
    return RowsSection(
        quant, first_row, len(rows), rows.shape[1], lab.array(rows), None if bias is None else lab.array(bias)
    )


def values_of(quant: Quant, rows: np.ndarray, cols: int) -> np.ndarray:
    """The reference: float32 [rows, cols]."""
    return quants.dequantize(rows.reshape(-1), quant, (len(rows), cols))


def some_columns(quant: Quant) -> list[int]:
    """One block, a tail, whole tiles."""
    if quant in PLAIN:
        return [1, 6, 264, 512]
    block = GGML_QUANT_SIZES[quant][0]
    return [block, 256 + block, 768]


@dataclass
class OtherGpu:
    """A launcher that claims to be on another GPU. It notes kernels and their bytes of shared memory."""

    launcher: Any
    sm_count: int
    shared_bytes: int
    launched: list[tuple[Kernel, int]] = field(default_factory=list)

    def launch(self, kernel: Kernel, *args: Any, shared_bytes: int = 0, **options: Any) -> None:
        self.launched.append((kernel, shared_bytes))
        self.launcher.launch(kernel, *args, shared_bytes=shared_bytes, **options)


def products(
    lab: Any, section: RowsSection, x: np.ndarray, *, gpu: OtherGpu | None = None, columns: int | None = None,
    **options: Any,
) -> np.ndarray:
    """[T, columns] that ``RowsMatmul`` makes, on a background of 0xFF bytes."""
    context = lab.context(1)
    if gpu is not None:
        context.launcher = gpu
    columns = columns or section.n_rows
    out = lab.empty((len(x), columns), np.float32)
    RowsMatmul(context).run(lab.array(x), section, out, n_in=x.shape[1], out_stride=columns, **options)
    return lab.host(out)


def errors(out: np.ndarray, values: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Of each product, as a part of the sum of magnitudes."""
    exact = x.astype(np.float64) @ values.astype(np.float64).T
    return np.abs(out - exact) / (np.abs(x).astype(np.float64) @ np.abs(values).astype(np.float64).T)


def random_x(rows: int, cols: int, seed: int = 1) -> np.ndarray:
    """Activations."""
    return np.random.default_rng(seed).normal(size=(rows, cols)).astype(np.float32)


@ALL_TYPES
def test_dequantised_rows_are_the_host_s_bit_for_bit(lab: Any, quant: Quant) -> None:
    """Any type, any number of columns, from a row in the middle; float16 is those values rounded, within its range."""
    for cols in some_columns(quant):
        rows = random_rows(quant, 7, cols, scale=0.5)
        section = row_section(lab, quant, rows)
        exact = values_of(quant, rows, cols)[2:7]
        for half in (False, True):
            out = lab.empty((5, cols), np.float16 if half else np.float32)
            RowsDequant(lab.context(1)).run(section, 2, 5, out, n_in=cols, half=half)
            np.testing.assert_array_equal(lab.host(out), exact.astype(np.float16) if half else exact, f"{cols} columns")


@pytest.mark.parametrize("quant", [Quant.F32, Quant.BF16, Quant.Q8_0, Quant.Q6_K], ids=lambda quant: quant.name)
def test_values_beyond_float16_are_its_largest(lab: Any, quant: Quant) -> None:
    """What float16 cannot hold becomes +-65504, not infinite."""
    rows = random_rows(quant, 4, 256, scale=3e4)
    if quant in PLAIN:
        rows[0].view(np.uint8)[-2:] = 0x7F, 0x47   # 65,280 and more as float32, and as bfloat16
    exact = values_of(quant, rows, 256)
    out = lab.empty((4, 256), np.float16)
    RowsDequant(lab.context(1)).run(row_section(lab, quant, rows), 0, 4, out, n_in=256, half=True)
    np.testing.assert_array_equal(lab.host(out), np.clip(exact, -65504, 65504).astype(np.float16))


@ALL_TYPES
def test_products_are_exact_to_float32(lab: Any, quant: Quant) -> None:
    """Any type; few rows of the weight and many, with tails in both directions."""
    block = GGML_QUANT_SIZES[quant][0]
    shapes = [(256 + block, 3, 2), (768, 133, 1)]
    if lab.on_gpu:
        shapes += [(5120, 48, 4), (4096 + block, 600, 3), (1280, 9000, 2), (17408, 140, 8), (8704, 257, 6)]
    for cols, n_out, n_rows in shapes:
        rows, x = random_rows(quant, n_out, cols), random_x(n_rows, cols)
        off = errors(products(lab, row_section(lab, quant, rows), x), values_of(quant, rows, cols), x)
        assert off.max() < TOLERANCE, f"{n_rows} x {cols} x {n_out}: error {off.max():.2e}"


@pytest.mark.parametrize("quant", PLAIN, ids=lambda quant: quant.name)
@pytest.mark.parametrize("cols", [1, 7, 258])
def test_plain_rows_may_have_any_length(lab: Any, quant: Quant, cols: int) -> None:
    """Lengths that do not divide by 4 leave rows unaligned."""
    for n_out in (5, 130):
        rows, x = random_rows(quant, n_out, cols), random_x(2, cols)
        off = errors(products(lab, row_section(lab, quant, rows), x), values_of(quant, rows, cols), x)
        assert off.max() < TOLERANCE, f"{cols} x {n_out}: error {off.max():.2e}"


@pytest.mark.parametrize(
    ("quant", "cols", "n_out"),
    [
        (Quant.F16, 520, 9), (Quant.Q4_K, 1280, 3), (Quant.Q8_0, 544, 132), (Quant.Q3_K, 256, 129),
        (Quant.F32, 1028, 130),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_row_s_bits_do_not_depend_on_the_others(lab: Any, quant: Quant, cols: int, n_out: int) -> None:
    """Of a step of 8 rows each has the bits that it has alone and in any smaller step, with its scale."""
    x, sums = random_x(MAX_ROWS, cols), random_x(MAX_ROWS, -(-cols // 256), seed=2) ** 2
    section = row_section(lab, quant, random_rows(quant, n_out, cols))
    whole = products(lab, section, x, sums=lab.array(sums), eps=1e-6)
    assert np.isfinite(whole).all()
    for n_rows in range(1, MAX_ROWS):
        for first in range(0, MAX_ROWS - n_rows + 1, 3 if lab.on_gpu else 5):
            part = slice(first, first + n_rows)
            out = products(lab, section, x[part], sums=lab.array(sums[part]), eps=1e-6)
            assert out.tobytes() == whole[part].tobytes(), f"rows [{first}, {first + n_rows})"


@pytest.mark.parametrize("n_rows", [1, 5])
def test_bits_do_not_depend_on_the_gpu(lab: Any, n_rows: int) -> None:
    """Fewer multiprocessors, and shared memory for chunks of x instead of all of it, change the grid but no bit."""
    cols, n_out = 2344, 150   # ten tiles
    section, x = row_section(lab, Quant.F16, random_rows(Quant.F16, n_out, cols)), random_x(n_rows, cols)
    chunks, results = set(), []
    for sm_count, shared_kib in ((1, 227), (3, 64), (132, 22), (2, 16)):
        gpu = OtherGpu(lab.launcher, sm_count, shared_kib << 10)
        results.append(products(lab, section, x, gpu=gpu))
        chunks.add(gpu.launched[-1][1])
    assert len(chunks) > 2
    assert np.isfinite(results[0]).all()
    for result in results[1:]:
        assert result.tobytes() == results[0].tobytes()


@pytest.mark.parametrize("n_out", [6, 131])
def test_scale_bias_and_place(lab: Any, n_out: int) -> None:
    """A row is scaled by 1 / rms before the bias is added; other columns keep what they held."""
    cols, n_rows, eps = 544, 3, 1e-5
    rows, x = random_rows(Quant.Q8_0, n_out, cols), random_x(n_rows, cols)
    bias = np.random.default_rng(3).normal(size=n_out).astype(np.float32)
    blocks = np.add.reduceat(np.square(x), range(0, cols, 256), axis=1)
    section = row_section(lab, Quant.Q8_0, rows, bias, first_row=5)
    out = products(lab, section, x, columns=n_out + 7, sums=lab.array(blocks), eps=eps)
    scale = 1 / np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=1, keepdims=True) + eps)
    exact = scale * (x.astype(np.float64) @ values_of(Quant.Q8_0, rows, cols).astype(np.float64).T) + bias
    np.testing.assert_allclose(out[:, 5 : 5 + n_out], exact, rtol=1e-5, atol=1e-5)
    assert (np.delete(out, np.s_[5 : 5 + n_out], axis=1).view(np.uint32) == 0xFFFFFFFF).all()


def test_kernels_are_known_before_they_are_launched(lab: Any) -> None:
    """What a load prepares is all that products of up to so many rows launch."""
    for n_out in (100, 200):
        gpu = OtherGpu(lab.launcher, 4, lab.launcher.shared_bytes)
        section = row_section(lab, Quant.Q2_K, random_rows(Quant.Q2_K, n_out, 256))
        for n_rows in range(1, 4):
            products(lab, section, random_x(n_rows, 256), gpu=gpu)
        context = lab.context(1)
        context.launcher = gpu
        RowsDequant(context).run(section, 0, 1, lab.empty(256, np.float16), n_in=256, half=True)
        assert {kernel for kernel, _ in gpu.launched} == set(kernels_for(Quant.Q2_K, n_out, 3))


def test_instances_have_every_type() -> None:
    """The list that is compiled for every architecture has each type in each kernel."""
    listed = [(kernel.name, dict(kernel.defines)["TYPE"]) for kernel in instances(90)]
    assert len(set(listed)) == len(listed) == 3 * len(BLOCK_TYPES)
