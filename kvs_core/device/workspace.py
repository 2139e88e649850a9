"""Named scratch arrays in one window of the arena.

What a step needs besides KV pages is listed as ``BufferSpec`` values, summed by ``workspace_bytes`` when the arena is
planned, and bound to addresses by ``Workspace`` when a phase begins. Buffers of different overlays are never alive at
the same time and share their bytes:

    | buffers without overlay | overlay "attention" ........ |
                              | overlay "ffn" ..... |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from kvs_core.device.base import Device
from kvs_core.device.operands import Buffer
from kvs_core.memory.arena import ALIGNMENT
from kvs_core.units import align_up


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One array of a workspace. An ``overlay`` names the buffers that may share bytes with those of other overlays."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | type
    overlay: str = ""

    @property
    def size_bytes(self) -> int:
        """Bytes of the array, rounded up so that the next one is aligned."""
        return align_up(prod(self.shape) * np.dtype(self.dtype).itemsize, ALIGNMENT)


def workspace_bytes(specs: Sequence[BufferSpec]) -> int:
    """Bytes of the arena that a ``Workspace`` of these buffers takes."""
    return max((offset + spec.size_bytes for spec, offset in _placed(specs)), default=0)


def _placed(specs: Sequence[BufferSpec]) -> Iterator[tuple[BufferSpec, int]]:
    """Each buffer with its offset in the workspace: those without an overlay first, then every overlay from there."""
    common_bytes = sum(spec.size_bytes for spec in specs if not spec.overlay)
    ends = {"": 0}
    for spec in specs:
        offset = ends.get(spec.overlay, common_bytes)
        yield spec, offset
        ends[spec.overlay] = offset + spec.size_bytes


class Workspace:
    """The buffers of one phase, bound to the arena at ``offset``. Valid as long as that region's lease is held."""

    def __init__(self, device: Device, offset: int, size: int, specs: Sequence[BufferSpec]) -> None:
        """Bind ``specs`` in arena bytes [offset, offset + size); ``size`` is at least ``workspace_bytes(specs)``."""
        assert offset % ALIGNMENT == 0, f"a workspace at offset {offset}"
        assert workspace_bytes(specs) <= size, f"{workspace_bytes(specs)} bytes in a workspace of {size}"
        self._buffers: dict[str, Buffer] = {}
        for spec, at in _placed(specs):
            assert spec.name not in self._buffers, f"two buffers named {spec.name}"
            self._buffers[spec.name] = device.arena_view(offset + at, spec.shape, spec.dtype)

    def __contains__(self, name: str) -> bool:
        """Whether there is a buffer of that name."""
        return name in self._buffers

    def __getitem__(self, name: str) -> Buffer:
        """The whole buffer, shaped as specified."""
        return self._buffers[name]

    def rows(self, name: str, n: int) -> Buffer:
        """The first ``n`` rows of a buffer: a contiguous view."""
        buffer = self._buffers[name]
        assert 0 < n <= buffer.shape[0], f"{n} rows of {name}, which has {buffer.shape[0]}"
        return buffer[:n]
