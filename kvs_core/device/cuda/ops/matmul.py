"""Launchers of ``matmul_decode.cu`` and ``act_quant.cu``: products of a decode step; and rows of weights as float16.

How a layer's products hang together (each line one launch):

    x  ──add_quant──  x += parts; records of x * norm, sums of squares  ──matmul──  y          project
                                                                        ──matmul──  gate, up   project_gated
    rows  ──matmul──  parts of the sum, one per range of columns                               add_projected
                      they wait for the next op on x, whose add_quant adds them in order, or for ``flush``
                      ──add_normed──  x += their sum through an RMS norm                       add_normed

A row's bits do not depend on how many rows share the step: neither do partitions, nor any order of sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvs_core.device.base import StepSizes
from kvs_core.device.cuda.context import Context
from kvs_core.device.cuda.kernel import Kernel, address
from kvs_core.device.cuda.matrices import BLOCK, CudaWeight, RecordSection, RowsSection
from kvs_core.device.cuda.ops import matmul_rows
from kvs_core.device.cuda.ops.matmul_kernels import (
    ACT_BYTES,
    ACT_KERNELS,
    ADD_QUANT,
    APPLY_PARTS,
    GATED_NORM,
    GATES,
    MOST_PARTS,
    OUTPUTS,
    QUANT,
    UNQUANT,
    Fit,
    Input,
    Output,
    block_bytes,
    dequant,
    fit,
    matmul,
    splits,
    variants,
    width_for,
)
from kvs_core.device.cuda.ops.matmul_rows import RowsDequant, RowsMatmul
from kvs_core.device.cuda.ops.norm import Norm
from kvs_core.device.cuda.ops.row_forms import GatedNorm, Records, RowForm
from kvs_core.device.operands import Activation, Buffer
from kvs_core.device.workspace import BufferSpec
from kvs_core.memory.phases import Phase
from kvs_core.units import align_up, ceil_div

MAX_ROWS = 8
"""Of a decode step."""

_ROWS_INPUT = 3
"""Up to so many rows are quantised inside the product; more are quantised once, before it."""


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """T rows x * norm, still to be scaled to rms 1, in the forms that weights take; 0 for one that nobody needs.

    records  uint8 [n / 256 rounded up, 2, T, ACT_BYTES]; rows float32 [T, n], contiguous
    sums     float32 [T, n / 256 rounded up]: sums of squares of x
    """

    records: Buffer
    rows: Buffer
    sums: Buffer


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """Parts of a sum that are still to be added to x: float32 [parts, T, stride]."""

    x: Buffer
    parts: int
    stride: int


class DecodeMatmul:
    """See the top of the file. x of one step are rows of one buffer, contiguous or not."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._rows = RowsMatmul(context)
        self._dequant_rows = RowsDequant(context)
        self._post_norm = Norm(context)
        self._kept: _Kept | None = None

    def scratch(self, phase: Phase, sizes: StepSizes) -> list[BufferSpec]:
        """Room for up to 8 rows in both phases: a prefill multiplies its last row with the output head."""
        rows = min(sizes.rows, MAX_ROWS)
        widest = max(sizes.widest_in, sizes.n_embd)
        return [
            BufferSpec("matmul_records", (ceil_div(widest, BLOCK), 2, rows, ACT_BYTES), np.uint8),
            BufferSpec("matmul_sums", (rows, ceil_div(widest, BLOCK)), np.float32),
            BufferSpec(
                "matmul_parts", (MOST_PARTS, rows, align_up(max(sizes.n_embd, sizes.per_layer_columns), 4)), np.float32
            ),
            BufferSpec("matmul_rows", (rows, widest), np.float32),
            BufferSpec("matmul_gate_up", (rows, sizes.widest_out), np.float32),
        ]

    def kernels_for(
        self, weights: Iterable[CudaWeight], *, gated_norm: bool, activation: Activation = Activation.SILU
    ) -> list[Kernel]:
        """Those that products with these weights use; ``gated_norm``: some rows will have that form."""
        kernels = dict.fromkeys(ACT_KERNELS)
        for weight in weights:
            for section in weight.sections:
                if isinstance(section, RowsSection):
                    kernels.update(dict.fromkeys(matmul_rows.kernels_for(section.quant, section.n_rows, MAX_ROWS)))
                    continue
                output = OUTPUTS[activation] if section.interleaved else Output.PLAIN
                kernels[dequant(section.quant)] = None
                for n_splits in {1, self._splits(weight)}:
                    warps = self._fit(section, n_splits, 1).warps
                    for width, rows_as in variants(output, gated_norm=gated_norm):
                        kernels[matmul(section.quant, warps, width, rows_as, output)] = None
        return list(kernels)

    # ---- ops ----

    def begin_step(self) -> None:
        """Forget what a step that was not finished has kept back."""
        self._kept = None
        self._context.forms.clear()

    def project(self, x: Buffer, norm: Buffer, weight: CudaWeight, out: Buffer, *, eps: float) -> None:
        """See ``Ops.project``.   out [T, n_out] float32, rows any distance apart"""
        self.project_normed(self._norm(x, norm, weight), weight, out, eps=eps)

    def project_normed(self, normed: Normed, weight: CudaWeight, out: Buffer, *, eps: float) -> None:
        """``project``, from what ``norm_into`` has left; for any number of rows."""
        # Small products first: what comes next can prepare itself under the large ones.
        for section in sorted(weight.sections, key=lambda section: isinstance(section, RecordSection)):
            if isinstance(section, RowsSection):
                self._rows.run(
                    normed.rows, section, out, n_in=weight.n_in, out_stride=_stride(out), sums=normed.sums, eps=eps
                )
            else:
                self._multiply_normed(normed, weight, section, out, eps)

    def project_gated(
        self, x: Buffer, norm: Buffer, weight: CudaWeight, out: Buffer, *, eps: float,
        activation: Activation = Activation.SILU,
    ) -> None:
        """See ``Ops.project_gated``.   out [T, n_out / 2] float32"""
        self._context.forms.pop(address(out), None)
        if weight.swiglu is not None:
            normed = self._norm(x, norm, weight)
            self._multiply_normed(normed, weight, weight.swiglu, out, eps, OUTPUTS[activation])
            return
        rows, half = len(x), weight.n_out // 2
        both = self._scratch("matmul_gate_up").reshape(-1)[: rows * weight.n_out].reshape(rows, weight.n_out)
        self.project(x, norm, weight, both, eps=eps)
        self._launch(GATES[activation], (ceil_div(half, 128), rows, 1), (both, half, out, _stride(out)))

    def add_projected(self, rows: Buffer, weight: CudaWeight, x: Buffer) -> None:
        """See ``Ops.add_projected``. The sum is kept back until the next op on x, or ``flush``.

        rows  float32 [T, n_in], 16-byte aligned, rows a multiple of 4 numbers apart; or what ``Context.forms`` says
        """
        self._kept = _Kept(x, *self.multiply(rows, weight))

    def add_normed(self, rows: Buffer, weight: CudaWeight, norm: Buffer, x: Buffer, *, eps: float) -> None:
        """See ``Ops.add_normed``.   rows as in ``add_projected``"""
        parts, stride = self.multiply(rows, weight)
        self._post_norm.add_normed(self._scratch("matmul_parts"), parts, stride, norm, x, eps=eps)

    def multiply(self, rows: Buffer, weight: CudaWeight) -> tuple[int, int]:
        """Leave the parts of rows @ weight.T in ``matmul_parts``: how many, and numbers from one's row to the next."""
        self.flush()
        form = self._context.forms.pop(address(rows), None)
        parts, stride = self._splits(weight), align_up(weight.n_out, 4)
        if any(isinstance(section, RowsSection) for section in weight.sections):
            rows = self._plain(rows, form, weight.n_in)
            form = None
        for section in weight.sections:
            if isinstance(section, RowsSection):
                self._rows.run(rows, section, self._scratch("matmul_parts"), n_in=weight.n_in, out_stride=stride)
            else:
                self._multiply_parts(weight, section, rows, form, stride, parts)
        return parts, stride

    def flush(self) -> None:
        """Add what is kept back to its x. Before other ops read x, or any part of it."""
        kept = self._kept
        if kept is None:
            return
        self._kept = None
        rows, n = kept.x.shape
        self._launch(APPLY_PARTS, quant_grid(n, rows), (
            kept.x, _stride(kept.x), self._scratch("matmul_parts"), kept.parts, kept.stride, rows, n,
        ))

    def dequant(self, weight: CudaWeight, first_row: int, n_rows: int, out: Buffer) -> None:
        """out[r] = row first_row + r of the weight, in order of its tensors.   out [n_rows, n_in] float16

        Fastest for whole sections; of an interleaved one, for all its rows at once.
        """
        last_row, n_in = first_row + n_rows, weight.n_in
        for section in weight.sections:
            first, last = max(first_row, section.first_row), min(last_row, section.first_row + section.n_rows)
            if first >= last:
                continue
            place = address(out) + 2 * n_in * (first - first_row)
            first, last = first - section.first_row, last - section.first_row
            if isinstance(section, RowsSection):
                self._dequant_rows.run(section, first, last - first, place, n_in=n_in, half=True)
                continue
            half = section.n_rows // 2
            within = section.interleaved and last - first < section.n_rows and first < half < last
            for begin, end in pairwise([first, half, last] if within else [first, last]):
                self._dequant_piece(section, begin, end, n_in, place + 2 * n_in * (begin - first))

    # ---- parts of them ----

    def _scratch(self, name: str) -> Buffer:
        return self._context.scratch[name]

    def _float_rows(self, rows: int, n: int) -> Buffer:
        return self._scratch("matmul_rows").reshape(-1)[: rows * n].reshape(rows, n)

    def _launch(self, kernel: Kernel, grid: tuple[int, int, int], args: tuple[object, ...]) -> None:
        self._context.launcher.launch(kernel, grid, 128, args, overlap=True)

    def _splits(self, weight: CudaWeight) -> int:
        """Parts of a sum with this weight: rows sections make one."""
        found = 1
        for section in weight.sections:
            if isinstance(section, RowsSection):
                return 1
            found = max(found, splits(section.n_tiles, section.n_blocks, self._context.launcher.sm_count))
        return found

    def _fit(self, section: RecordSection, n_splits: int, rows: int) -> Fit:
        return fit(section.quant, ceil_div(section.n_blocks, n_splits), rows, self._context.launcher.shared_bytes)

    def norm_into(self, x: Buffer, norm: Buffer, normed: Normed) -> None:
        """Add what is kept back for x; leave x * norm and sums of squares there."""
        kept = self._kept
        if kept is not None and address(kept.x) != address(x):
            self.flush()
            kept = None
        self._kept = None
        rows, n = x.shape
        self._launch(ADD_QUANT, quant_grid(n, rows), (
            x, _stride(x), self._scratch("matmul_parts"), 0 if kept is None else kept.parts,
            0 if kept is None else kept.stride, norm, rows, n, normed.records, normed.rows, normed.sums,
        ))

    def _norm(self, x: Buffer, norm: Buffer, weight: CudaWeight) -> Normed:
        """``norm_into`` the scratch, in the forms that the weight takes."""
        rows, n = x.shape
        assert n == weight.n_in
        records = any(isinstance(section, RecordSection) for section in weight.sections)
        plain = any(isinstance(section, RowsSection) for section in weight.sections)
        normed = Normed(
            self._scratch("matmul_records") if records else 0, self._float_rows(rows, n) if plain else 0,
            self._scratch("matmul_sums"),
        )
        self.norm_into(x, norm, normed)
        return normed

    def _multiply_normed(
        self, normed: Normed, weight: CudaWeight, section: RecordSection, out: Buffer, eps: float,
        output: Output = Output.PLAIN,
    ) -> None:
        """The section's columns of out."""
        count = len(out)
        self._multiply(
            weight, section, Input.RECORDS, normed.records, count, count, 1, address(out) + 4 * section.first_row,
            _stride(out), sums=normed.sums, eps=eps, output=output,
        )

    def _multiply_parts(
        self, weight: CudaWeight, section: RecordSection, rows: Buffer, form: RowForm | None, stride: int, parts: int
    ) -> None:
        """The section's columns of the parts of rows @ weight.T, [parts, T, stride]."""
        count, n_in = len(rows), weight.n_in
        at = address(self._scratch("matmul_parts")) + 4 * section.first_row
        if isinstance(form, GatedNorm):
            assert n_in % BLOCK == 0
            self._multiply(
                weight, section, Input.GATED_NORM, form.x, _stride(form.x), count, parts, at, stride, eps=form.eps,
                gate=form,
            )
            return
        if isinstance(form, Records):
            records = form.records
        elif count <= _ROWS_INPUT:
            self._multiply(weight, section, Input.ROWS, rows, _stride(rows), count, parts, at, stride)
            return
        else:
            records = self._scratch("matmul_records")
            if section.first_row == 0:
                self._launch(QUANT, quant_grid(n_in, count), (rows, _stride(rows), count, n_in, records))
        self._multiply(weight, section, Input.RECORDS, records, count, count, parts, at, stride)

    def _multiply(
        self, weight: CudaWeight, section: RecordSection, rows_as: Input, x: Buffer, x_stride: int, count: int,
        n_splits: int, out: int, out_stride: int, *, sums: Buffer | None = None, eps: float = 0.0,
        gate: GatedNorm | None = None, output: Output = Output.PLAIN,
    ) -> None:
        """One launch of ``matmul_decode``, or more where so many rows do not fit a block."""
        launcher = self._context.launcher
        best = self._fit(section, n_splits, min(count, MAX_ROWS))
        grid = n_splits, min(launcher.sm_count // n_splits, section.n_tiles), 1
        step = ACT_BYTES if rows_as is Input.RECORDS else 4 * x_stride
        for first in range(0, count, best.rows):
            rows = min(best.rows, count - first)
            shared = max(
                block_bytes(section.quant, best.warps, best.stages, ceil_div(section.n_blocks, n_splits), rows),
                launcher.shared_bytes // 2 + 1,   # no second block beside it where launches overlap
            )
            launcher.launch(
                matmul(section.quant, best.warps, width_for(rows), rows_as, output), grid, 32 * best.warps,
                (
                    section.records, section.n_tiles, section.n_blocks, best.stages,
                    address(x) + first * step, x_stride, rows, weight.n_in,
                    0 if sums is None else address(sums) + 4 * first * section.n_blocks, eps,
                    0 if gate is None else address(gate.z) + 4 * first * gate.z_stride,
                    0 if gate is None else gate.z_stride, 0 if gate is None else gate.norm,
                    0 if section.bias is None else section.bias,
                    out + 4 * first * out_stride, out_stride, count * out_stride, section.n_rows,
                    section.tile_step, section.half_step,
                ),
                shared_bytes=shared, overlap=True,
            )

    def _plain(self, rows: Buffer, form: RowForm | None, n_in: int) -> Buffer:
        """Rows as float32, whatever form they have."""
        count = len(rows)
        if form is None:
            assert count == 1 or _stride(rows) == n_in, "rows that a product takes in float32 are contiguous"
            return rows
        out = self._float_rows(count, n_in)
        if isinstance(form, Records):
            self._launch(UNQUANT, quant_grid(n_in, count), (form.records, count, n_in, out))
        else:
            self._launch(GATED_NORM, quant_grid(n_in, count), (
                form.x, _stride(form.x), form.z, form.z_stride, form.norm, n_in, form.eps, out,
            ))
        return out

    def _dequant_piece(self, section: RecordSection, first: int, last: int, n_in: int, out: int) -> None:
        """Rows [first, last) of a section: all of it, or of an interleaved one what lies within one half."""
        step = section.tile_step
        if section.interleaved and last - first == section.n_rows:
            tiles = range(section.n_tiles)
        else:
            base = section.half_step if section.interleaved and first >= section.half_step else 0
            tiles = range((first - base) // step, ceil_div(last - base, step))
        self._context.launcher.launch(
            dequant(section.quant), (ceil_div(len(tiles) * section.n_blocks, 8), 1, 1), 256,
            (
                section.records, tiles.start, len(tiles), section.n_blocks, n_in, step, section.half_step, first, last,
                out,
            ),
        )


def _stride(rows: Buffer) -> int:
    """Numbers from a float32 row to the next."""
    assert rows.strides[1] == 4
    return int(rows.strides[0]) // 4


def quant_grid(n: int, rows: int) -> tuple[int, int, int]:
    """Of the kernels in ``act_quant.cu``: one warp per 256 values, four of them in a block."""
    return ceil_div(ceil_div(n, BLOCK), 4), rows, 1

