"""A model's matrices on the host: held as float32, or left in the mapped file and dequantised piece by piece.

Both kinds have the same pieces of rows, and every product is made piece by piece: a BLAS may add in another order for
another shape, so only so does a result not depend on how a matrix is held, nor on how many threads share its pieces.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from kvs_core.device.host.machine import available_cores, available_ram_bytes
from kvs_core.device.shortage import no_ram
from kvs_core.formats.gguf import TensorInfo, let_go
from kvs_core.formats.quants import dequantize_rows, row_bytes
from kvs_core.memory.phases import Phase
from kvs_core.units import MIB, Progress, ceil_div

Floats = npt.NDArray[np.float32]

PIECE_BYTES = {Phase.DECODE: (MIB // 2, 2 * MIB), Phase.PREFILL: (MIB, 8 * MIB)}
"""Float32 bytes of a small matrix's pieces and of a large one's, if a row is no longer.

Small ones are long beside a call of another thread, and still let threads share a matrix of a few MiB; large ones make
few calls. DECODE: what one row of a step has multiplied is still in a core's cache for the next row, so that four rows
cost about two passes over memory. PREFILL: one product packs all rows of the step anew, so pieces are larger.
"""

_PIECES = 16   # of a matrix between small and large

HELD_SHARE = 0.6    # of the available RAM; the rest is for the KV history, the arena and the mapped file
_LOAD_THREADS = 8    # at most; a few fill the memory bus
_ALIGNMENT = 4096


def aligned_bytes(size_bytes: int, purpose: str) -> npt.NDArray[np.uint8]:
    """Unset memory that begins at a page. Raises ``DeviceMemoryError`` if there is not that much."""
    if size_bytes <= available_ram_bytes():
        try:
            memory = np.empty(size_bytes + _ALIGNMENT, np.uint8)
        except MemoryError:
            pass
        else:
            start = -memory.ctypes.data % _ALIGNMENT
            return memory[start : start + size_bytes]
    raise no_ram(purpose, size_bytes)


class HostMatrix(ABC):
    """A matrix [n_out, n_in] of float32 values. Subclasses say where they are."""

    def __init__(self, name: str, n_out: int, n_in: int) -> None:
        self.name = name
        self.n_out = n_out
        self.n_in = n_in

    @abstractmethod
    def read(self, first: int, rows: int) -> Floats:
        """Rows [first, first + rows), contiguous; good until this thread's next call. Threads may read together."""

    def pieces(self, phase: Phase) -> range:
        """The first row of each piece; all have ``step`` rows, the last one what is left."""
        return range(0, self.n_out, _piece_rows(self.n_out, self.n_in, phase))


class HostWeight:
    """Matrices with rows of one length, one under the other, and perhaps a bias [n_out]."""

    def __init__(self, matrices: Sequence[HostMatrix], bias: Floats | None = None) -> None:
        assert len({matrix.n_in for matrix in matrices}) == 1
        self.name = ", ".join(matrix.name for matrix in matrices)
        self.n_in = matrices[0].n_in
        self.n_out = sum(matrix.n_out for matrix in matrices)
        self.bias = bias
        self._pieces = {phase: tuple(_pieces(matrices, phase)) for phase in Phase}

    def pieces(self, phase: Phase) -> Sequence[Piece]:
        """What products are made of."""
        return self._pieces[phase]


class Piece(NamedTuple):
    """Rows [first, first + rows) of a matrix; their products go to columns [column, column + rows)."""

    matrix: HostMatrix
    first: int
    rows: int
    column: int


def _pieces(matrices: Sequence[HostMatrix], phase: Phase) -> Iterator[Piece]:
    column = 0
    for matrix in matrices:
        pieces = matrix.pieces(phase)
        for first in pieces:
            yield Piece(matrix, first, min(pieces.step, matrix.n_out - first), column + first)
        column += matrix.n_out


class HeldMatrix(HostMatrix):
    """Values in memory, or in a mapped file that holds float32."""

    def __init__(self, name: str, values: Floats) -> None:
        assert values.flags.c_contiguous
        super().__init__(name, *values.shape)
        self._values = values

    def read(self, first: int, rows: int) -> Floats:
        """A view."""
        return self._values[first : first + rows]


class MappedMatrix(HostMatrix):
    """A quantised matrix in a mapped file. All matrices of a device share each thread's scratch for its piece."""

    def __init__(self, info: TensorInfo, scratch: Scratch) -> None:
        n_in, n_out = info.shape
        super().__init__(info.name, n_out, n_in)
        self._info = info
        self._scratch = scratch

    def read(self, first: int, rows: int) -> Floats:
        """Rows dequantised into the scratch."""
        return dequantize_rows(self._info, first, rows, self._scratch.floats(rows, self.n_in))


class Scratch(threading.local):
    """Memory of each thread for the piece in use, as large as the largest so far."""

    def __init__(self) -> None:
        self._values = np.empty(0, np.float32)

    def floats(self, rows: int, n_in: int) -> Floats:
        """Undefined values [rows, n_in]; what this thread had before is given up."""
        size = rows * n_in
        if self._values.size < size:
            self._values = aligned_bytes(4 * size, "a piece of a matrix").view(np.float32)
        return self._values[:size].reshape(rows, n_in)


class HostWeights:
    """The matrices of a model. A matrix that ``prepare`` was not given stays in the file: right for a table that only
    ``embed`` reads, a few rows at a time.

    scratch  of each thread, for pieces of matrices that are not held
    """

    def __init__(self, limit_bytes: int | None) -> None:
        """``limit_bytes`` of float32 matrices are held at most; None: a share of the RAM available at ``prepare``."""
        self.held_bytes = 0
        self._limit_bytes = limit_bytes
        self._matrices: dict[str, HostMatrix] = {}
        self.scratch = Scratch()

    def prepare(self, infos: Sequence[TensorInfo], progress: Progress | None = None) -> None:
        """Hold, in the order given, each matrix that still fits the limit; the others stay in the file.

        Float32 tensors are used where they are mapped and do not count. Progress is in bytes of the file.
        """
        limit = self._limit_bytes
        if limit is None:
            limit = self.held_bytes + int(HELD_SHARE * available_ram_bytes())
        wanted = {info.name: info for info in infos if info.name not in self._matrices}
        held: list[tuple[TensorInfo, Floats]] = []
        for info in wanted.values():
            n_in, n_out = info.shape
            size = 4 * info.n_elements
            if info.quant is not GGMLQuantizationType.F32 and self.held_bytes + size <= limit:
                values = aligned_bytes(size, f"tensor {info.name}").view(np.float32).reshape(n_out, n_in)
                self.held_bytes += size
                self._matrices[info.name] = HeldMatrix(info.name, values)
                held.append((info, values))
            else:
                self._matrices[info.name] = self._in_file(info)
        _fill(held, progress)

    def matrix(self, info: TensorInfo) -> HostMatrix:
        """The matrix of that name."""
        found = self._matrices.get(info.name)
        if found is None:
            found = self._matrices[info.name] = self._in_file(info)
        return found

    def _in_file(self, info: TensorInfo) -> HostMatrix:
        n_in, n_out = info.shape
        if info.quant is GGMLQuantizationType.F32:
            return HeldMatrix(info.name, info.data[:].view(np.float32).reshape(n_out, n_in))
        return MappedMatrix(info, self.scratch)


def _piece_rows(n_out: int, n_in: int, phase: Phase) -> int:
    """Rows of a piece, by the matrix's shape alone: all are about as long, so that threads are done together."""
    least_bytes, most_bytes = PIECE_BYTES[phase]
    piece_bytes = min(max(least_bytes, 4 * n_in * n_out // _PIECES), most_bytes)
    most = max(1, piece_bytes // (4 * n_in))
    return ceil_div(n_out, ceil_div(n_out, most))


def _fill(held: Sequence[tuple[TensorInfo, Floats]], progress: Progress | None) -> None:
    """Dequantise each tensor into its array, by pieces on a few threads: NumPy works outside the interpreter lock."""
    total = sum(info.n_bytes for info, _ in held)
    jobs = []
    for info, values in held:
        rows = _piece_rows(len(values), values.shape[1], Phase.DECODE)
        jobs += [(info, first, values[first : first + rows]) for first in range(0, len(values), rows)]

    def fill(job: tuple[TensorInfo, int, Floats]) -> int:
        info, first, out = job
        dequantize_rows(info, first, len(out), out)
        size = row_bytes(info.quant, out.shape[1])
        let_go(info.data, first * size, (first + len(out)) * size)
        return info.n_bytes * out.size // info.n_elements

    done = 0
    pool = ThreadPoolExecutor(min(_LOAD_THREADS, available_cores()))
    try:
        for size in pool.map(fill, jobs):
            done += size
            if progress is not None:
                progress(done, total)
    finally:
        pool.shutdown(cancel_futures=True)   # after an error or Ctrl-C nothing more is read
