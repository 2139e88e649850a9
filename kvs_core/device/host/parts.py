"""Weights that pass through the arena, on the host: bytes of the file, dequantised at each use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvs_core.device.host.weights import Floats, HostWeight, MappedMatrix, Scratch
from kvs_core.device.operands import Buffer
from kvs_core.formats.gguf import TensorInfo, split_experts
from kvs_core.memory.arena import ALIGNMENT
from kvs_core.units import MIB, align_up

_PIECE_BYTES = 8 * MIB


def part_bytes(infos: Iterable[TensorInfo]) -> int:
    """See ``Device.part_bytes``."""
    return sum(align_up(info.n_bytes, ALIGNMENT) for info in infos)


class _PassingMatrix(MappedMatrix):
    """A matrix whose bytes are elsewhere than in the file."""

    def lie_in(self, place: Buffer) -> None:
        """Its bytes are there from now on."""
        self._info = replace(self._info, data=place)


class HostPart:
    """``PassingWeight``: the bytes of its tensors, each from a multiple of 256 on.

    weight  of all tensors joined; for experts one of each
    """

    def __init__(self, infos: Sequence[TensorInfo], bias: Floats | None, scratch: Scratch, home: np.ndarray) -> None:
        """Fills ``home`` from the file. ``scratch``: for the pieces in use."""
        self._infos = infos
        self._matrices = [[_PassingMatrix(each, scratch) for each in _matrices(info)] for info in infos]
        weights = tuple(HostWeight(joined, bias) for joined in zip(*self._matrices, strict=True))
        self.weight = weights if _of_experts(infos[0]) else weights[0]
        self.home = home[: part_bytes(infos)]
        for info, place in zip(infos, self._places(self.home), strict=True):
            for first in range(0, info.n_bytes, _PIECE_BYTES):
                piece = info.data[first : first + _PIECE_BYTES]
                place[first : first + piece.size] = piece
        self.lie_in(self.home)

    def lie_in(self, place: Buffer) -> None:
        """See ``WeightPart``."""
        for matrices, own in zip(self._matrices, self._places(place), strict=True):
            size = own.size // len(matrices)
            for number, matrix in enumerate(matrices):
                matrix.lie_in(own[number * size : (number + 1) * size])

    def _places(self, memory: Buffer) -> Iterator[Buffer]:
        at = 0
        for info in self._infos:
            yield memory[at : at + info.n_bytes]
            at += align_up(info.n_bytes, ALIGNMENT)


def _of_experts(info: TensorInfo) -> bool:
    return len(info.shape) == 3


def _matrices(info: TensorInfo) -> Iterable[TensorInfo]:
    return split_experts(info) if _of_experts(info) else (info,)
