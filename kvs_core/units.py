"""Units. Bytes and tokens inside, MiB only in flags and in what is printed."""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30


def ceil_div(value: int, step: int) -> int:
    """The least ``n`` with ``n * step >= value``."""
    return -(-value // step)


def align_up(value: int, step: int) -> int:
    """``value`` rounded up to a multiple of ``step``."""
    return ceil_div(value, step) * step


def mib_ceil(size_bytes: int) -> int:
    """Whole MiB that hold ``size_bytes``."""
    return ceil_div(size_bytes, MIB)
