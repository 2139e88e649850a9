"""A model's weights by shape and type alone: enough to know, before they are loaded, which kernels its steps launch.

    load_model(file, outline) ─ begin_ops ─ compiling in the background ─┐
    load_model(file, device) ───────────────────────────────────────────┴─ Device.prepare_ops waits for what is left
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import Any

import numpy as np

from kvs_core.device.cuda.cuda_ops import CudaOps
from kvs_core.device.cuda.kernel import Launcher
from kvs_core.device.cuda.matrices import CudaWeight, Quant, RecordSection, RowsSection
from kvs_core.device.cuda.ops.embed import Rope
from kvs_core.device.cuda.weights import WeightStore, part_bytes, repack_kernel
from kvs_core.device.operands import Activation, AttentionParams, Buffer, GdnShape, PassingWeight, RopeTable, Weight
from kvs_core.device.ops import Ops
from kvs_core.formats.gguf import TensorInfo
from kvs_core.formats.quants import row_bytes
from kvs_core.paging.geometry import PageGeometry
from kvs_core.units import Progress


class CudaOutline:
    """``Outline`` for a ``CudaDevice`` with these ops. Its buffers have shapes and no memory: all ones, read-only."""

    def __init__(self, ops: CudaOps, launcher: Launcher) -> None:
        self._ops = ops
        self.ops: Ops = ops
        self._launcher = launcher
        self._weights = _Shapes(launcher)
        self._tables: list[CudaWeight] = []

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any] | type) -> Buffer:
        """See ``ModelDevice``."""
        return _ones(shape, dtype)

    def allocate_pinned(self, size_bytes: int) -> np.ndarray:
        """See ``ModelDevice``."""
        return _ones((size_bytes,), np.uint8)

    def load_vector(self, info: TensorInfo, *, transposed: bool = False) -> Buffer:
        """See ``ModelDevice``."""
        return _ones(info.shape if transposed else info.shape[::-1], np.float32)

    def load_matrix(self, infos: Sequence[TensorInfo], biases: Sequence[TensorInfo | None] = ()) -> Weight:
        """See ``ModelDevice``."""
        return self._weights.load(infos, biases)

    def load_experts(self, infos: Sequence[TensorInfo]) -> Sized:
        """See ``ModelDevice``."""
        return self._weights.load_experts(infos)

    def load_passing(
        self, infos: Sequence[TensorInfo], home: np.ndarray, biases: Sequence[TensorInfo | None] = ()
    ) -> PassingWeight:
        """See ``ModelDevice``."""
        return self._weights.load_passing(infos, home, biases, lambda to, source: None)

    def part_bytes(self, infos: Iterable[TensorInfo]) -> int:
        """See ``ModelDevice``."""
        return part_bytes(infos)

    def load_table(self, info: TensorInfo) -> Weight:
        """See ``ModelDevice``."""
        for table in self._tables:
            if table.name == info.name:
                return table
        n_in, n_out = info.shape
        rows = RowsSection(info.quant, 0, n_out, row_bytes(info.quant, n_in), None, None)
        self._tables.append(CudaWeight(info.name, n_in, n_out, (rows,), None))
        return self._tables[-1]

    def load_rope(self, table: RopeTable) -> Any:
        """See ``ModelDevice``."""
        return Rope(table, None)

    def prepare_weights(
        self, infos: Sequence[TensorInfo], progress: Progress | None = None, *, passing: Sequence[TensorInfo] = ()
    ) -> None:
        """See ``ModelDevice``."""

    def download(self, buffer: Buffer) -> np.ndarray:
        """See ``ModelDevice``."""
        return np.array(buffer)

    def begin_ops(
        self, geometries: Sequence[PageGeometry], attention: Sequence[AttentionParams],
        recurrent: Sequence[GdnShape], activation: Activation,
    ) -> None:
        """See ``Outline``."""
        weights, stacks = list(self._weights.weights), self._weights.stacks
        sections = [section for weight in weights for section in weight.sections]
        sections += [part.section for stack in stacks for part in stack.parts]
        records = {section.quant for section in sections if isinstance(section, RecordSection)}
        kernels = self._ops.kernels(weights, stacks, self._tables, geometries, attention, recurrent, activation)
        self._launcher.begin([*map(repack_kernel, sorted(records)), *kernels])


class _Shapes(WeightStore):
    """Weights that are never filled."""

    def __init__(self, launcher: Launcher) -> None:
        super().__init__(launcher, lambda size: _ones((size,), np.uint8), np.asarray, lambda info, first, out: None)

    def _fill_rows(self, infos: Sequence[TensorInfo], quant: Quant, held: Buffer) -> None:
        pass

    def _fill_records(self, infos: Sequence[TensorInfo], n_rows: int, half_rows: int, records: Buffer) -> None:
        pass


def _ones(shape: tuple[int, ...], dtype: np.dtype[Any] | type) -> np.ndarray:
    return np.broadcast_to(np.ones((), dtype), shape)
