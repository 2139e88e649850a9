"""Tables of which a step takes a row per token: in pinned host memory, where kernels can read them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvs_core.device.cuda.matrices import CudaWeight, RowsSection
from kvs_core.device.cuda.runtime import Runtime
from kvs_core.device.cuda.uploads import FileBytes
from kvs_core.device.operands import Buffer
from kvs_core.errors import DeviceMemoryError
from kvs_core.formats.gguf import TensorInfo
from kvs_core.formats.quants import row_bytes

LOGGER = logging.getLogger(__name__)


class PinnedTables:
    """Each tensor once. Where no pinned memory is left, a table takes memory of the GPU.

    weights     those that are loaded
    held_bytes  of the GPU
    """

    def __init__(self, runtime: Runtime, files: FileBytes, hold: Callable[[int], Buffer]) -> None:
        """``hold``: memory of the GPU for weights, uint8 of that many bytes."""
        self.weights: list[CudaWeight] = []
        self.held_bytes = 0
        self._runtime = runtime
        self._files = files
        self._hold = hold

    def load(self, info: TensorInfo) -> CudaWeight:
        """The table, as it is stored. ``DeviceMemoryError`` where the GPU has no room for it either."""
        for table in self.weights:
            if table.name == info.name:
                return table
        n_in, n_out = info.shape
        section = RowsSection(info.quant, 0, n_out, row_bytes(info.quant, n_in), self._rows(info), None)
        table = CudaWeight(info.name, n_in, n_out, (section,), None)
        self.weights.append(table)
        return table

    def _rows(self, info: TensorInfo) -> Buffer:
        try:
            pinned = self._runtime.allocate_pinned(info.n_bytes, f"tensor {info.name}")
        except DeviceMemoryError as error:
            held = self._hold(info.n_bytes)
            LOGGER.warning("it takes memory of the GPU instead: %s", error)
            self._files.read(info, 0, held)
            self.held_bytes += info.n_bytes
            return held
        self._files.read_here(info, pinned)
        return pinned
