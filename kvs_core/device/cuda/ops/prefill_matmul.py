"""Matrix products of many rows: weights become float16 slab by slab, and a GEMM multiplies them with float16 rows.

    x ─ rms_rows ─ float16 rows ─┐
    weight ─ dequant ─ slab ─────┴─ GEMM ─ float32 columns of out ─ finish_rows (row scale, bias)

A float16 row whose values would overflow, or drown, is kept divided by a power of two (see
``cuda_src/prefill_rows.cu``). The host does not know which rows are, so no step waits for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import numpy as np

from kvs_core.device.base import StepSizes
from kvs_core.device.cuda.context import Context
from kvs_core.device.cuda.kernel import F32, I32, PTR, Gemm, Kernel, address
from kvs_core.device.cuda.matrices import CudaWeight, RecordSection, record_bytes
from kvs_core.device.cuda.ops.norm import Norm
from kvs_core.device.operands import Activation, Buffer
from kvs_core.device.workspace import BufferSpec
from kvs_core.memory.phases import Phase
from kvs_core.units import MIB, align_up, ceil_div

SLAB_BYTES = 88 * MIB
"""Of dequantised weights at most: 8,448 rows of 5,120, a whole number of waves of tiles at 2,048 rows on 132 SMs."""

_BLOCK = 256
_TILE_ROWS, _TILE_COLUMNS = 128, 256   # of a GEMM's large tiles
_SLAB_STEP = 32                        # weights come 16 rows at a time, gates and ups in halves of a slab
_SLAB_OVERHEAD = 1024                  # launches and drain of a slab, as columns of n_in that a wave of tiles passes
_NARROW = 64                           # a quarter of so many gates is no slab yet

_RMS_ROWS = Kernel("prefill_rows.cu", "rms_rows", (PTR, I32, PTR, F32, I32, PTR, PTR))
_ROUND_ROWS = Kernel("prefill_rows.cu", "round_rows", (PTR, I32, I32, PTR, PTR))
_SWIGLU_ROWS = Kernel("prefill_rows.cu", "swiglu_rows", (PTR, I32, PTR, PTR, I32, I32, PTR, PTR))
_GEGLU_ROWS = Kernel("prefill_rows.cu", "geglu_rows", (PTR, I32, PTR, PTR, I32, I32, PTR, PTR))
_GATES = {Activation.SILU: _SWIGLU_ROWS, Activation.GELU: _GEGLU_ROWS}
_DIVIDE_ROWS = Kernel("prefill_rows.cu", "divide_rows", (PTR, I32, I32, PTR))
_FINISH_ROWS = Kernel("prefill_rows.cu", "finish_rows", (PTR, I32, I32, PTR, PTR))


class Dequant(Protocol):
    """Turns rows of a weight into float16."""

    def __call__(self, weight: CudaWeight, first_row: int, n_rows: int, out: Buffer) -> None:
        """out [n_rows, n_in] float16, flat = rows [first_row, first_row + n_rows), on the compute stream."""
        ...


class PrefillMatmul:
    """``project``, ``project_gated``, ``add_projected`` and ``add_normed`` of a PREFILL step, for any number of rows.

    Inputs are rounded to float16, products have float32 sums. n_in is a multiple of 32.
    """

    def __init__(self, context: Context, gemm: Gemm, dequant: Dequant) -> None:
        self._context = context
        self._gemm = gemm
        self._dequant = dequant
        self._post_norm = Norm(context)
        self._half_rows = 0   # address of the rows that project_gated has left in float16

    def scratch(self, phase: Phase, sizes: StepSizes) -> list[BufferSpec]:
        """In PREFILL: rows and a slab in float16, peaks of rows, products where ``project_gated`` is narrow, and those
        that go through a norm."""
        if phase is not Phase.PREFILL:
            return []
        slab = min(SLAB_BYTES // 2, sizes.widest_in * align_up(sizes.widest_out, _SLAB_STEP))
        widest = max(sizes.n_embd, sizes.heads * sizes.k_dim, 0 if sizes.gdn is None else sizes.gdn.inner)
        products = [BufferSpec("prefill_matmul.products", (sizes.rows, sizes.n_embd), np.float32)]
        return (products if sizes.post_norms else []) + [
            BufferSpec("prefill_matmul.rows", (sizes.rows * widest,), np.float16),
            BufferSpec("prefill_matmul.slab", (slab,), np.float16),
            BufferSpec("prefill_matmul.norm_peaks", (sizes.rows,), np.float32),
            BufferSpec("prefill_matmul.row_peaks", (sizes.rows,), np.float32),
            BufferSpec("prefill_matmul.narrow", (sizes.rows * 2 * _NARROW,), np.float32),
        ]

    def project(self, x: Buffer, norm: Buffer, weight: CudaWeight, out: Buffer, *, eps: float) -> None:
        """See ``Ops.project``. Rows of x and of out may be any distance apart."""
        self._half_rows = 0
        rows, at, stride = self._norm_rows(x, norm, eps), address(out), _stride(out)
        self._multiply(rows, len(x), weight, at, stride, accumulate=False)
        self._finish(at, stride, len(x), weight, "norm_peaks")

    def project_gated(
        self, x: Buffer, norm: Buffer, weight: CudaWeight, out: Buffer, *, eps: float,
        activation: Activation = Activation.SILU,
    ) -> None:
        """See ``Ops.project_gated``. out, contiguous, becomes

            float16 [T, F]  | float32 [T, 2 n]: products of n gates and n ups, slab by slab

        and its row peaks stay in the scratch until ``add_projected``.
        """
        n_rows, width, at = len(x), weight.n_out // 2, address(out)
        assert _stride(out) == width, (out.shape, out.strides)
        rows = self._norm_rows(x, norm, eps)
        if width < _NARROW:
            products, most = address(self._buffer("narrow")), 2 * width
        else:
            products, most = at + 2 * n_rows * width, 2 * (width // 4)
        step = self._slab_rows(weight, n_rows, most) // 2
        for first in range(0, width, step):
            n = min(step, width - first)
            slab = self._dequant_pairs(weight, first, n)
            self._gemm.gemm(
                rows, slab, products, n_rows=n_rows, n_out=2 * n, n_in=weight.n_in, out_stride=2 * n, accumulate=False
            )
            self._launch(
                _GATES[activation], n_rows, products, n, self._buffer("norm_peaks"), _bias(weight), first, width, at,
                self._buffer("row_peaks"),
            )
        self._half_rows = at

    def add_projected(self, rows: Buffer, weight: CudaWeight, x: Buffer) -> None:
        """See ``Ops.add_projected``. Float32 rows wider than the scratch are multiplied a part of them at a time."""
        for halves, first, n in self._halves(rows, len(x), weight.n_in):
            self._add(halves, n, weight, address(x) + 4 * first * _stride(x), _stride(x))

    def add_normed(self, rows: Buffer, weight: CudaWeight, norm: Buffer, x: Buffer, *, eps: float) -> None:
        """See ``Ops.add_normed``. Rows as in ``add_projected``."""
        products, stride = self._buffer("products"), weight.n_out
        for halves, first, n in self._halves(rows, len(x), weight.n_in):
            self._multiply(halves, n, weight, address(products), stride, accumulate=False)
            self._finish(address(products), stride, n, weight, "row_peaks")
            self._post_norm.add_normed(products, 1, stride, norm, x[first : first + n], eps=eps)

    def multiply(self, rows: Buffer, weight: CudaWeight, out: Buffer) -> None:
        """out = rows @ weight.T + bias   rows as in ``add_projected``; out float32 [T, n_out]"""
        stride = _stride(out)
        for halves, first, n in self._halves(rows, len(out), weight.n_in):
            at = address(out) + 4 * first * stride
            self._multiply(halves, n, weight, at, stride, accumulate=False)
            self._finish(at, stride, n, weight, "row_peaks")

    def _halves(self, rows: Buffer, n_rows: int, n_in: int) -> Iterator[tuple[int, int, int]]:
        """Rows in float16, some at a time: address, first row, rows. Their peaks are in the scratch until the next."""
        at = address(rows)
        if at == self._half_rows:
            self._half_rows = 0
            yield at, 0, n_rows
            return
        halves = self._buffer("rows")
        step = min(n_rows, halves.size // n_in)
        assert step > 0, f"rows of {n_in} in a scratch of {halves.size}"
        for first in range(0, n_rows, step):
            n, stride = min(step, n_rows - first), _stride(rows)
            self._launch(_ROUND_ROWS, n, at + 4 * first * stride, stride, n_in, halves, self._buffer("row_peaks"))
            yield address(halves), first, n

    def _norm_rows(self, x: Buffer, norm: Buffer, eps: float) -> int:
        """The normed rows in float16; their peaks are in the scratch."""
        rows = self._buffer("rows")
        assert x.size <= rows.size, (x.shape, rows.size)
        self._launch(_RMS_ROWS, len(x), x, _stride(x), norm, eps, x.shape[1], rows, self._buffer("norm_peaks"))
        return address(rows)

    def _add(self, rows: int, n_rows: int, weight: CudaWeight, x: int, stride: int) -> None:
        """x = (x / scale + rows @ weight.T) * scale + bias. Scales are powers of two: exact but for the product."""
        self._launch(_DIVIDE_ROWS, n_rows, x, stride, weight.n_out, self._buffer("row_peaks"))
        self._multiply(rows, n_rows, weight, x, stride, accumulate=True)
        self._finish(x, stride, n_rows, weight, "row_peaks")

    def _finish(self, out: int, stride: int, n_rows: int, weight: CudaWeight, peaks: str) -> None:
        self._launch(_FINISH_ROWS, n_rows, out, stride, weight.n_out, self._buffer(peaks), _bias(weight))

    def _multiply(
        self, rows: int, n_rows: int, weight: CudaWeight, out: int, out_stride: int, *, accumulate: bool
    ) -> None:
        step = self._slab_rows(weight, n_rows, weight.n_out)
        for first in range(0, weight.n_out, step):
            n = min(step, weight.n_out - first)
            slab = self._buffer("slab")[: n * weight.n_in]
            self._dequant(weight, first, n, slab)
            self._gemm.gemm(
                rows, slab, out + 4 * first, n_rows=n_rows, n_out=n, n_in=weight.n_in, out_stride=out_stride,
                accumulate=accumulate,
            )

    def _dequant_pairs(self, weight: CudaWeight, first: int, n: int) -> Buffer:
        """Gate rows [first, first + n) and the same of the up rows, one after the other."""
        half = n * weight.n_in
        slab = self._buffer("slab")[: 2 * half]
        if weight.swiglu is None:
            self._dequant(weight, first, n, slab[:half])
            self._dequant(weight, weight.n_out // 2 + first, n, slab[half:])
        else:   # tiles have both: some of them are a matrix of the same kind, read once
            self._dequant(_some_tiles(weight, weight.swiglu, first, n), 0, 2 * n, slab)
        return slab

    def _slab_rows(self, weight: CudaWeight, n_rows: int, most: int) -> int:
        """Weight rows of a slab, at most ``most`` and what the scratch holds."""
        held = self._buffer("slab").size // weight.n_in
        return slab_rows(
            weight.n_out, weight.n_in, most=min(most, held), n_rows=n_rows, sm_count=self._context.launcher.sm_count
        )

    def _launch(self, kernel: Kernel, n_rows: int, *args: Buffer | int | float) -> None:
        self._context.launcher.launch(kernel, (n_rows, 1, 1), _BLOCK, args)

    def _buffer(self, name: str) -> Buffer:
        return self._context.scratch[f"prefill_matmul.{name}"]


@lru_cache(maxsize=1024)
def slab_rows(n_out: int, n_in: int, *, most: int, n_rows: int, sm_count: int) -> int:
    """Weight rows of a slab so that all slabs of a matrix take the fewest waves of GEMM tiles, slabs counted too.

    n_out itself if it is no more than ``most`` and best, else a multiple of 32.
    """
    if n_out <= most < 2 * _TILE_COLUMNS:
        return n_out
    whole = n_out if n_out <= most else most // _SLAB_STEP * _SLAB_STEP
    assert whole > 0, f"{most} rows of {n_in} are no slab"

    def passed(columns: int) -> int:
        tiles = ceil_div(n_rows, _TILE_ROWS) * ceil_div(columns, _TILE_COLUMNS)
        return ceil_div(tiles, sm_count) * n_in + _SLAB_OVERHEAD if columns else 0

    def cost(step: int) -> tuple[int, int]:
        return n_out // step * passed(step) + passed(n_out % step), -step

    steps: list[int] = [whole, *range(_TILE_COLUMNS, whole, _TILE_COLUMNS)]
    return min(steps, key=cost)


def _some_tiles(weight: CudaWeight, section: RecordSection, first: int, n: int) -> CudaWeight:
    """Of an interleaved weight, gate rows [first, first + n) and the same of the up rows."""
    step, tile_bytes = section.tile_step, section.n_blocks * record_bytes(section.quant)
    assert (first % step, n % step) == (0, 0), (first, n)
    records = section.records[first // step * tile_bytes : (first + n) // step * tile_bytes]
    part = replace(section, n_rows=2 * n, records=records)
    return replace(weight, n_out=2 * n, sections=(part,))


def _bias(weight: CudaWeight) -> int:
    """Address of a weight's bias [n_out], or 0: it is one array, of which each section has its part."""
    bias = weight.sections[0].bias
    if bias is None:
        return 0
    at = address(bias)
    for section in weight.sections:
        assert section.bias is not None
        assert address(section.bias) == at + 4 * section.first_row, weight.name
    return at


def _stride(rows: Buffer) -> int:
    """Numbers from a float32 row to the next."""
    assert rows.strides[1] == 4
    return int(rows.strides[0]) // 4


def instances(arch: int) -> Iterator[Kernel]:
    """All kernels of the family, the same on every GPU."""
    yield from (_RMS_ROWS, _ROUND_ROWS, _SWIGLU_ROWS, _GEGLU_ROWS, _DIVIDE_ROWS, _FINISH_ROWS)
