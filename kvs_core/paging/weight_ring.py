"""WeightSplit and WeightRing: layers whose weights do not stay on the device, and where in the arena they pass. Pure.

Parts come in an order that repeats; two that follow each other lie at opposite ends, so that one is copied while the
other is read. Each has one place for good, which a captured step may know:

    | part 0 |      part 1 |
    | part 2 ....|  part 3 |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvs_core.memory.arena import ALIGNMENT
from kvs_core.units import align_up


@dataclass(frozen=True, slots=True)
class WeightRing:
    """``part_bytes``: of each part in order; an even number of them, since the last is followed by the first."""

    part_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.part_bytes) % 2 == 0, f"{len(self.part_bytes)} parts"
        assert all(size > 0 for size in self.part_bytes), self.part_bytes

    @property
    def size_bytes(self) -> int:
        """Of the region: the two largest neighbours. 0 without parts."""
        sizes = [align_up(size, ALIGNMENT) for size in self.part_bytes]
        return max((first + second for first, second in pairwise([*sizes, *sizes[:1]])), default=0)

    def places(self, region_bytes: int) -> Sequence[range]:
        """The bytes of each part in a region of at least ``size_bytes``, a multiple of 256."""
        assert self.size_bytes <= region_bytes, (self.size_bytes, region_bytes)
        starts = [
            region_bytes - align_up(size, ALIGNMENT) if number % 2 else 0
            for number, size in enumerate(self.part_bytes)
        ]
        return [range(start, start + size) for start, size in zip(starts, self.part_bytes, strict=True)]


@dataclass(frozen=True, slots=True)
class WeightSplit:
    """passing: layers of the trunk whose matrices pass; ring: their parts, as large as they may be"""

    passing: tuple[int, ...] = ()
    ring: WeightRing = field(default_factory=lambda: WeightRing(()))

    @property
    def pass_bytes(self) -> int:
        """That a pass over the layers moves to the device, and that host memory holds."""
        return sum(self.ring.part_bytes)


ALL_STAY = WeightSplit()


def spread(count: int, layers: int) -> tuple[int, ...]:
    """``count`` of so many layers, evenly: the link then has as much to do everywhere in a step."""
    return tuple(layer for layer in range(layers) if (layer + 1) * count // layers > layer * count // layers)
