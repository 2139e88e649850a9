"""Pinned pieces that bytes of other memory pass through: one is filled while the other is copied."""

from __future__ import annotations

import logging

import numpy as np

from kvs_core.device.base import Fence
from kvs_core.device.cuda.kernel import address
from kvs_core.device.cuda.runtime import Runtime
from kvs_core.device.cuda.streams import CudaStream
from kvs_core.device.pageable import PageableBytes, pageable_bytes
from kvs_core.device.shortage import pinning_advice_here
from kvs_core.errors import DeviceMemoryError
from kvs_core.units import MIB

LOGGER = logging.getLogger(__name__)

_LEAST_BYTES = MIB // 4   # below, the calls cost more than the bytes


class Stage:
    """Two pieces of up to ``piece_bytes``, pinned when they are used first.

    Where that much cannot be pinned they are smaller; where nothing can, they are not pinned: a copy then blocks while
    the driver takes the bytes, which is right and slow. Either is said once.
    """

    def __init__(self, runtime: Runtime, purpose: str, piece_bytes: int) -> None:
        self._runtime = runtime
        self._purpose = purpose
        self._piece_bytes = piece_bytes
        self._pieces: list[np.ndarray] = []
        self._fences: list[Fence | None] = [None, None]
        self._turn = 0
        self._said = False

    def open(self) -> None:
        """Have the pieces. ``DeviceMemoryError`` if not even RAM that is not pinned can be had."""
        if not self._pieces:
            self._pieces, self._fences = self._pin(), [None, None]

    def next(self) -> np.ndarray:
        """A piece whose last copy is done, uint8, to be filled; blocks until there is one."""
        self.open()
        self._turn = 1 - self._turn
        fence = self._fences[self._turn]
        if fence is not None:
            fence.wait()
            self._fences[self._turn] = None
        return self._pieces[self._turn]

    def sent(self, fence: Fence) -> None:
        """The copy of the piece that ``next`` gave ends before ``fence``."""
        self._fences[self._turn] = fence

    def close(self) -> None:
        """Give the pieces back; their copies are done."""
        self._pieces = []

    def _pin(self) -> list[np.ndarray]:
        size = self._piece_bytes
        while size >= min(_LEAST_BYTES, self._piece_bytes):
            try:
                pieces = [self._runtime.allocate_pinned(size, self._purpose) for _ in range(2)]
            except DeviceMemoryError:
                size //= 2
            else:
                if size < self._piece_bytes:
                    self._say(f"they pass through {2 * size / MIB:.1f} MiB")
                return pieces
        pieces = [pageable_bytes(min(_LEAST_BYTES, self._piece_bytes), self._purpose) for _ in range(2)]
        self._say("they pass through RAM that is not pinned")
        return pieces

    def _say(self, instead: str) -> None:
        if not self._said:
            self._said = True
            LOGGER.warning("%.0f MiB of RAM for %s cannot be pinned: %s, more slowly; %s",
                           2 * self._piece_bytes / MIB, self._purpose, instead, pinning_advice_here())  # fmt: skip


class PageableCopies:
    """Copies between the device and RAM that is not pinned, in order with a stream. Not within a capture."""

    def __init__(self, runtime: Runtime, piece_bytes: int) -> None:
        self._runtime = runtime
        self._stage = Stage(runtime, "copies of the KV history", piece_bytes)

    def to_device(self, dst: int, src: PageableBytes, stream: CudaStream) -> None:
        """Enqueue it, all but what fits the pieces being on its way when this returns; ``src`` may change then."""
        start = 0
        while start < src.nbytes:
            piece = self._stage.next()
            part = src[start : start + piece.nbytes]
            np.copyto(piece[: part.nbytes], part)
            self._runtime.enqueue_copy(dst + start, address(piece), part.nbytes, stream.raw)
            self._stage.sent(stream.record())
            start += part.nbytes

    def to_host(self, dst: PageableBytes, src: int, stream: CudaStream) -> None:
        """Blocks until all is there."""
        start = 0
        while start < dst.nbytes:
            piece = self._stage.next()
            part = dst[start : start + piece.nbytes]
            self._runtime.enqueue_copy(address(piece), src + start, part.nbytes, stream.raw)
            stream.record().wait()
            np.copyto(part, piece[: part.nbytes])
            start += part.nbytes
