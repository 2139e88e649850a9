"""Bytes of a model's file on their way to the GPU, through two pinned pieces in turn: one is filled while the other is
copied. Several threads fill a piece: one alone reads a file slower than the link takes it. Those of a synthetic model
are made there."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvs_core.device.cuda.kernel import address
from kvs_core.device.cuda.ops.synthetic import DrawBlocks
from kvs_core.device.cuda.runtime import Runtime
from kvs_core.device.cuda.stage import Stage
from kvs_core.device.cuda.streams import CudaStream
from kvs_core.device.operands import Buffer
from kvs_core.formats.gguf import TensorInfo, let_go
from kvs_core.formats.synthetic_blocks import DrawnBytes
from kvs_core.units import MIB, Progress, ceil_div

_PIECE_BYTES = 32 * MIB
_READERS = 4
_READER_BYTES = MIB   # what is worth a thread


class FileBytes:
    """Uploads in pieces; ``progress`` hears of the bytes that ``expect`` announced."""

    def __init__(self, runtime: Runtime, compute: CudaStream) -> None:
        self._runtime = runtime
        self._compute = compute
        self._stage = Stage(runtime, "weights on their way", _PIECE_BYTES)
        self._done = 0
        self._total = 0
        self._progress: Progress | None = None
        self._draw = DrawBlocks(runtime.launcher, self.upload)
        self._readers: ThreadPoolExecutor | None = None

    def expect(self, total_bytes: int, progress: Progress | None) -> None:
        """So many bytes are to come."""
        self._done, self._total, self._progress = 0, total_bytes, progress

    def read(self, info: TensorInfo, first: int, out: Buffer) -> None:
        """Fill ``out``, uint8 on the device, with bytes [first, first + len(out)) of a tensor, in stream order."""
        if isinstance(info.data, DrawnBytes):
            self._draw.enqueue(info.data, first, out)
        else:
            self._copy(info.data[first : first + out.nbytes], address(out))
        self._done = min(self._done + out.nbytes, self._total)
        if self._progress is not None:
            self._progress(self._done, self._total)

    def read_here(self, info: TensorInfo, out: np.ndarray) -> None:
        """Fill ``out``, uint8 on the host, with all bytes of a tensor."""
        for start in range(0, out.size, _PIECE_BYTES):
            part = out[start : start + _PIECE_BYTES]
            data = info.data[start : start + part.size]
            self._fill(part, data)
            let_go(data)

    def upload(self, array: np.ndarray) -> Buffer:
        """A small host array on the device for good, same shape and type."""
        array = np.ascontiguousarray(array)
        memory = self._runtime.allocate(array.nbytes, "weights")
        self._copy(array.reshape(-1).view(np.uint8), address(memory))
        return self._runtime.view(memory, 0, array.shape, array.dtype)

    def finish(self) -> None:
        """All is there; the pinned pieces go. More uploads take new ones."""
        self._compute.synchronize()
        self._draw.finish()
        self._progress = None
        self.close()

    def close(self) -> None:
        """Let go of memory and threads, of work that was broken off too; no copy is under way. Idempotent."""
        self._stage.close()
        if self._readers is not None:
            self._readers.shutdown()
            self._readers = None

    def _copy(self, data: np.ndarray, target: int) -> None:
        start = 0
        while start < data.size:
            piece = self._stage.next()
            part = data[start : start + piece.size]
            self._fill(piece[: part.size], part)
            let_go(part)   # it counts as memory of this process otherwise
            self._runtime.enqueue_copy(target + start, address(piece), part.size, self._compute.raw)
            self._stage.sent(self._compute.record())
            start += part.size

    def _fill(self, out: np.ndarray, data: np.ndarray) -> None:
        if out.size <= _READER_BYTES:
            np.copyto(out, data)
            return
        if self._readers is None:
            self._readers = ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1), "kvs-read")
        step = max(_READER_BYTES, ceil_div(out.size, _READERS))
        cuts = range(0, out.size, step)
        list(self._readers.map(
            np.copyto, (out[cut : cut + step] for cut in cuts), (data[cut : cut + step] for cut in cuts)
        ))
