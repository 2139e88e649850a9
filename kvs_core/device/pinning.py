"""How much host memory can be pinned: found by pinning some."""

from __future__ import annotations

from dataclasses import dataclass

from kvs_core.device.base import Device
from kvs_core.errors import DeviceError


@dataclass(frozen=True, slots=True)
class Pinned:
    """got_bytes < asked_bytes: the next slab was refused, with ``error``."""

    asked_bytes: int
    got_bytes: int
    error: str | None


def pin_stepwise(device: Device, most_bytes: int, slab_bytes: int) -> Pinned:
    """Pin whole slabs, up to ``most_bytes``, until one is refused; all are released again before this returns."""
    count = most_bytes // slab_bytes
    slabs = []
    error = None
    try:
        for _ in range(count):
            slabs.append(device.allocate_pinned(slab_bytes))
    except DeviceError as refused:
        error = str(refused)
    return Pinned(count * slab_bytes, len(slabs) * slab_bytes, error)
