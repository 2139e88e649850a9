"""Units, and progress in them. Bytes and tokens inside, MiB only in flags and in what is printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

MIB = 1 << 20

Progress: TypeAlias = Callable[[int, int], None]
"""Called with how much of something long is done and how much there is in all, in one unit; 0 in all: not known."""


def ceil_div(value: int, step: int) -> int:
    """The least ``n`` with ``n * step >= value``."""
    return -(-value // step)


def align_up(value: int, step: int) -> int:
    """``value`` rounded up to a multiple of ``step``."""
    return ceil_div(value, step) * step


def counted(number: int, noun: str) -> str:
    """``1 token``, ``2 tokens``: a number of what has a regular plural."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def mib_ceil(size_bytes: int) -> int:
    """Whole MiB that hold ``size_bytes``."""
    return ceil_div(size_bytes, MIB)
