"""Launchers of ``gdn_decode.cu``, ``gdn_chunks.cu``, ``gdn_scan.cu`` and ``gdn_norm.cu``: Gated DeltaNet layers.

A head's state is held transposed, [d_v, d_k]: its columns, which are what threads and warps share out, are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from kvs_core.device.base import StepSizes
from kvs_core.device.cuda.context import Context
from kvs_core.device.cuda.kernel import F32, I32, PTR, Kernel, address
from kvs_core.device.cuda.ops.row_forms import GatedNorm
from kvs_core.device.operands import Buffer, GdnShape, GdnState, GdnWeights
from kvs_core.device.workspace import BufferSpec
from kvs_core.errors import CapabilityError
from kvs_core.memory.phases import Phase
from kvs_core.units import ceil_div

MAX_ROWS = 8
"""Rows of a decode step."""

_HEAD_DIMS = (32, 64, 128)
_TAPS = (2, 3, 4)

# As in the sources.
_DECODE_COLUMNS = 32   # of a block
_DECODE_THREADS = 256
_NORM_HEADS = 4        # of a block, a warp each
_NORMED_HEAD, _NORMED_COLUMNS = 128, 256   # d_v, and divisor of d_v * v_heads, of rows that a product norms and gates
_CHUNK = 32            # rows
_CHUNK_THREADS = 128
_SCAN_COLUMNS = 64     # of a block, 16 of a warp

_PASS_UNITS = 384
"""Chunks times heads of one pass of prefill kernels: enough to fill a GPU, and 26 MiB of scratch, which an L2 holds."""

_DECODE_ARGS = (
    PTR, PTR, PTR, PTR, PTR, I32,   # state, rings, slots
    I32, I32, PTR,                  # key heads, value heads, step table
    PTR, I32,                       # y and its stride
    PTR, PTR, PTR, F32, PTR,        # convolution, gates, eps, out
)
_APPLY_ARGS = (PTR, PTR, PTR, PTR, I32, I32, I32, I32, I32)   # state, rings, slots, heads, position, pending
_NORM_ARGS = (PTR, PTR, I32, PTR, F32, I32, I32)              # out, z and its stride, norm, eps, rows, heads
_CHUNKS_ARGS = (
    PTR, I32, PTR, I32,             # y and its stride, ring of inputs, slots
    PTR, PTR, PTR, F32,             # convolution, gates, eps
    I32, I32, I32, I32, I32,        # heads, rows, position, first row of this pass
    PTR, PTR, PTR,                  # scratch
)
_SCAN_ARGS = (
    PTR, PTR, I32, PTR, I32,        # state, ring of inputs, slots, y and its stride
    I32, I32, I32, I32, I32,        # heads, rows, position, first row of this pass
    I32, I32,                       # its chunks, whether it is the last
    PTR, PTR, PTR, PTR,             # scratch, out
)


class Gdn:
    """The ops of Gated DeltaNet layers, with the semantics of ``Ops``."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def scratch(self, phase: Phase, sizes: StepSizes) -> list[BufferSpec]:
        """What the chunks of a prefill pass leave for its scan, twice if there are several passes. None in DECODE."""
        shape = sizes.gdn
        if shape is None or phase is Phase.DECODE:
            return []
        chunks = ceil_div(sizes.rows, _CHUNK)
        pass_chunks = min(chunks, max(1, _PASS_UNITS // shape.v_heads))
        units = (1 if chunks == pass_chunks else 2, pass_chunks, shape.v_heads)
        return [
            BufferSpec("gdn_operands", (*units, _operand_bytes(shape)), np.uint8),
            BufferSpec("gdn_updates", (*units, _CHUNK, shape.d_v), np.float32),
            BufferSpec("gdn_keeps", units, np.float32),
        ]

    def gdn_decode(
        self, y: Buffer, weights: GdnWeights, shape: GdnShape, state: GdnState, out: Buffer, *, position: int,
        pending: int, store: bool = True,
    ) -> None:
        """See ``Ops.gdn_decode``; position, pending and store are those of the step table.

        If ``add_projected`` can do it, norm and gate are left to it: ``out`` has o, and a form says so.
        """
        rows, slots = len(y), len(state.ring_x)
        assert rows + max(rows, shape.conv_taps - 1) <= slots, f"{rows} rows in rings of {slots}"
        self._context.launcher.launch(
            _decode_kernel(shape, rows), _decode_grid(shape), _DECODE_THREADS,
            (
                state.state, state.ring_x, state.ring_k, state.ring_decay, state.ring_d, slots,
                shape.k_heads, shape.v_heads, self._context.step,
                y, _stride(y),
                weights.conv, weights.dt_bias, weights.a, weights.eps, out,
            ),
            overlap=self._context.first_row == 0,   # a later tile reads at once what those before it left in the rings
        )
        forms = self._context.forms
        forms.pop(address(out), None)
        if shape.d_v == _NORMED_HEAD and shape.inner % _NORMED_COLUMNS == 0:
            z = y[:, shape.conv_channels : shape.conv_channels + shape.inner]
            forms[address(out)] = GatedNorm(out, z, _stride(y), weights.norm, weights.eps)
        else:
            self._norm(y, weights, shape, out, overlap=True)

    def gdn_apply(self, shape: GdnShape, state: GdnState, *, position: int, pending: int) -> None:
        """See ``Ops.gdn_apply``."""
        self._context.launcher.launch(
            _apply_kernel(shape), _decode_grid(shape), _DECODE_THREADS,
            (
                state.state, state.ring_k, state.ring_decay, state.ring_d, len(state.ring_x),
                shape.k_heads, shape.v_heads, position, pending,
            ),
        )

    def gdn_prefill(
        self, y: Buffer, weights: GdnWeights, shape: GdnShape, state: GdnState, out: Buffer, *, position: int
    ) -> None:
        """See ``Ops.gdn_prefill``."""
        launcher = self._context.launcher
        buffers = [self._context.scratch[name] for name in ("gdn_operands", "gdn_updates", "gdn_keeps")]
        turns, pass_chunks = buffers[0].shape[:2]
        rows, slots, heads = len(y), len(state.ring_x), (shape.k_heads, shape.v_heads)
        assert rows <= _CHUNK * pass_chunks or turns == 2, f"{rows} rows in scratch for {_CHUNK * pass_chunks}"
        stages = _stages(shape, launcher.shared_bytes)
        scan_columns = min(_SCAN_COLUMNS, shape.d_v)
        for turn, first in enumerate(range(0, rows, _CHUNK * pass_chunks)):
            chunks = min(pass_chunks, ceil_div(rows - first, _CHUNK))
            last = first + _CHUNK * chunks >= rows
            scratch = [buffer[turn % turns] for buffer in buffers]
            launcher.launch(
                _chunks_kernel(shape), (shape.v_heads, chunks, 1), _CHUNK_THREADS,
                (
                    y, _stride(y), state.ring_x, slots,
                    weights.conv, weights.dt_bias, weights.a, weights.eps,
                    *heads, rows, position, first,
                    *scratch,
                ),
                overlap=turn > 0,
            )
            launcher.launch(
                _scan_kernel(shape, stages), (shape.v_heads * shape.d_v // scan_columns, 1, 1), 2 * scan_columns,
                (
                    state.state, state.ring_x, slots, y, _stride(y),
                    *heads, rows, position, first,
                    chunks, int(last),
                    *scratch, out,
                ),
                shared_bytes=stages * _operand_bytes(shape), overlap=True,
            )
        self._norm(y, weights, shape, out, overlap=False)

    def _norm(self, y: Buffer, weights: GdnWeights, shape: GdnShape, out: Buffer, *, overlap: bool) -> None:
        """Norm and gate of the rows in ``out``."""
        rows = len(y)
        self._context.launcher.launch(
            _norm_kernel(shape), (ceil_div(rows * shape.v_heads, _NORM_HEADS), 1, 1), 32 * _NORM_HEADS,
            (
                out, address(y) + shape.conv_channels * y.itemsize, _stride(y), weights.norm, weights.eps,
                rows, shape.v_heads,
            ),
            overlap=overlap,
        )


def kernels_for(shape: GdnShape, shared_bytes: int) -> list[Kernel]:
    """What layers of this shape need on a GPU with so much shared memory. ``CapabilityError`` if there is no kernel."""
    if shape.d_k != shape.d_v or shape.d_k not in _HEAD_DIMS:
        known = ", ".join(map(str, _HEAD_DIMS))
        raise CapabilityError(
            f"Gated DeltaNet heads of {shape.d_k} x {shape.d_v} have no CUDA kernel, equal sizes of {known} have; "
            "use --device cpu"
        )
    if shape.conv_taps not in _TAPS:
        raise CapabilityError(
            f"a Gated DeltaNet convolution of {shape.conv_taps} taps has no CUDA kernel, {_TAPS[0]} to {_TAPS[-1]} "
            "have; use --device cpu"
        )
    stages = _stages(shape, shared_bytes)
    return [
        *(_decode_kernel(shape, rows) for rows in range(1, MAX_ROWS + 1)),
        _apply_kernel(shape), _chunks_kernel(shape), _scan_kernel(shape, stages), _norm_kernel(shape),
    ]


def instances(arch: int) -> Iterator[Kernel]:
    """Every head size, number of rows, of taps and of stages."""
    for dim, taps in zip(_HEAD_DIMS, _TAPS, strict=True):
        shape = GdnShape(1, 1, dim, dim, taps)
        yield from kernels_for(shape, 2 * _operand_bytes(shape))
        yield from kernels_for(shape, _operand_bytes(shape))


def _operand_bytes(shape: GdnShape) -> int:
    """Of a chunk and head: W, Q, K [rows, d_k] and P [rows, rows], four bytes a number."""
    return 4 * _CHUNK * (3 * shape.d_k + _CHUNK)


def _stages(shape: GdnShape, shared_bytes: int) -> int:
    """Chunks whose operands the scan holds in shared memory. The bits are the same."""
    return 2 if 2 * _operand_bytes(shape) <= shared_bytes else 1


def _decode_grid(shape: GdnShape) -> tuple[int, int, int]:
    return shape.v_heads * shape.d_v // _DECODE_COLUMNS, 1, 1


def _stride(y: Buffer) -> int:
    """Numbers from row to row."""
    return int(y.strides[0]) // int(y.itemsize)


@cache
def _decode_kernel(shape: GdnShape, rows: int) -> Kernel:
    return Kernel("gdn_decode.cu", "gdn_decode", _DECODE_ARGS, _decode_facts(shape, rows))


@cache
def _apply_kernel(shape: GdnShape) -> Kernel:
    return Kernel("gdn_decode.cu", "gdn_apply", _APPLY_ARGS, _decode_facts(shape, 1))


@cache
def _chunks_kernel(shape: GdnShape) -> Kernel:
    return Kernel("gdn_chunks.cu", "gdn_chunks", _CHUNKS_ARGS, (("DIM", shape.d_k), ("TAPS", shape.conv_taps)))


@cache
def _scan_kernel(shape: GdnShape, stages: int) -> Kernel:
    facts = (("DIM", shape.d_k), ("TAPS", shape.conv_taps), ("STAGES", stages))
    return Kernel("gdn_scan.cu", "gdn_scan", _SCAN_ARGS, facts)


@cache
def _norm_kernel(shape: GdnShape) -> Kernel:
    return Kernel("gdn_norm.cu", "gdn_norm", _NORM_ARGS, (("DIM", shape.d_v),))


def _decode_facts(shape: GdnShape, rows: int) -> tuple[tuple[str, int | str], ...]:
    return (("DIM", shape.d_k), ("ROWS", rows), ("TAPS", shape.conv_taps))
