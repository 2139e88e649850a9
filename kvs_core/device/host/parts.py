"""Parts of layers that pass through the arena, on the host: bytes of the file, dequantised at each use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvs_core.device.base import Buffer, Joined
from kvs_core.device.host.weights import Floats, HostWeight, MappedMatrix, Scratch
from kvs_core.formats.gguf import TensorInfo
from kvs_core.units import MIB, align_up

_ALIGNMENT = 256
_PIECE_BYTES = 8 * MIB


def part_bytes(infos: Iterable[TensorInfo]) -> int:
    """See ``Device.part_bytes``."""
    return sum(align_up(info.n_bytes, _ALIGNMENT) for info in infos)


class _PassingMatrix(MappedMatrix):
    """A matrix whose bytes are elsewhere than in the file."""

    def lie_in(self, place: Buffer) -> None:
        """Its bytes are there from now on."""
        self._info = replace(self._info, data=place)


class HostPart:
    """``WeightPart``: the bytes of its tensors, each from a multiple of 256 on."""

    def __init__(
        self, matrices: Sequence[Joined], biases: Sequence[Floats | None], scratch: Scratch, home: np.ndarray
    ) -> None:
        """Fills ``home`` from the file. ``scratch``: for the pieces in use."""
        self._infos = [info for joined, _ in matrices for info in joined]
        self._matrices = [_PassingMatrix(info, scratch) for info in self._infos]
        left = iter(self._matrices)
        self.weights = tuple(
            HostWeight([next(left) for _ in joined], bias) for (joined, _), bias in zip(matrices, biases, strict=True)
        )
        self.home = home[: part_bytes(self._infos)]
        for info, place in zip(self._infos, self._places(self.home), strict=True):
            for first in range(0, info.n_bytes, _PIECE_BYTES):
                piece = info.data[first : first + _PIECE_BYTES]
                place[first : first + piece.size] = piece
        self.lie_in(self.home)

    def lie_in(self, place: Buffer) -> None:
        """See ``WeightPart``."""
        for matrix, own in zip(self._matrices, self._places(place), strict=True):
            matrix.lie_in(own)

    def _places(self, memory: Buffer) -> Iterator[Buffer]:
        at = 0
        for info in self._infos:
            yield memory[at : at + info.n_bytes]
            at += align_up(info.n_bytes, _ALIGNMENT)
