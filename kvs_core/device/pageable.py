"""RAM that is not pinned, told from RAM that is by its type."""

from __future__ import annotations

import numpy as np

from kvs_core.device.host.machine import available_ram_bytes
from kvs_core.device.shortage import no_ram


class PageableBytes(np.ndarray):
    """uint8 in memory that a device cannot copy from or to by itself; views of it are of this type too."""


def pageable_bytes(size_bytes: int, purpose: str) -> PageableBytes:
    """Zeroed. ``DeviceMemoryError`` if there is not that much: the system would promise it, and end the process."""
    if size_bytes <= available_ram_bytes():
        try:
            memory = np.empty(size_bytes, np.uint8)
        except MemoryError:
            pass
        else:
            memory[...] = 0   # now, so that what is free is true for those who ask next
            return memory.view(PageableBytes)
    raise no_ram(purpose, size_bytes)
