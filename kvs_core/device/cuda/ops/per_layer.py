"""Launchers of ``per_layer.cu``: embeddings of a token per layer."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

import numpy as np

from kvs_core.device.base import StepSizes
from kvs_core.device.cuda.context import Context
from kvs_core.device.cuda.kernel import F32, I32, PTR, Kernel
from kvs_core.device.operands import Buffer
from kvs_core.device.workspace import BufferSpec
from kvs_core.memory.phases import Phase
from kvs_core.units import ceil_div

_THREADS = 256
_INPUTS = Kernel("per_layer.cu", "per_layer_inputs", (PTR, PTR, PTR, I32, F32, F32))
_GATE = Kernel("per_layer.cu", "per_layer_gate", (PTR, PTR, I32, I32))
_ROWS = "per_layer_rows"


class PerLayer:
    """What the ops ``per_layer_inputs`` and ``add_per_layer`` do between their products."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def scratch(self, phase: Phase, sizes: StepSizes) -> list[BufferSpec]:
        """Products of a step's rows; none in a model without."""
        columns = sizes.per_layer_columns
        return [BufferSpec(_ROWS, (sizes.rows * columns,), np.float32)] if columns else []

    def rows(self, count: int, columns: int) -> Buffer:
        """The scratch as float32 [count, columns], contiguous."""
        return self._context.scratch[_ROWS][: count * columns].reshape(count, columns)

    def inputs(self, out: Buffer, projected: Buffer, norm: Buffer, n_embd: int, *, eps: float) -> None:
        """See the source. n_embd: of the rows that were projected."""
        (rows, columns), size = out.shape, norm.shape[0]
        self._launch(_INPUTS, columns // size, rows, out, projected, norm, size, 1.0 / sqrt(n_embd), eps)

    def gate(self, rows: Buffer, inputs: Buffer) -> None:
        """See the source."""
        count, size = rows.shape
        self._launch(_GATE, ceil_div(size, _THREADS), count, rows, inputs, inputs.strides[0] // 4, size)

    def _launch(self, kernel: Kernel, blocks: int, rows: int, *args: Buffer | int | float) -> None:
        self._context.launcher.launch(
            kernel, (blocks, rows, 1), _THREADS, args, overlap=self._context.phase is Phase.DECODE
        )


def instances(arch: int) -> Iterator[Kernel]:
    """All kernels, the same on every GPU."""
    yield from (_INPUTS, _GATE)
