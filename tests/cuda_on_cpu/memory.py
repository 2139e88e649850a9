"""Arrays with unmapped pages on both sides, so that a kernel that runs over an end stops there.

    | unmapped page | pages of the array: slack, array, slack | unmapped page |

An array begins at a multiple of ``ALIGNMENT`` bytes, as buffers on a GPU do, and ends as close to the page behind it
as that allows. Slack is poison too; ``check_slack`` looks whether a kernel wrote there.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from math import prod
from weakref import finalize

import numpy as np

from kvs_core.units import align_up

ALIGNMENT = 256
POISON = 0xFF
"""Byte of memory that nobody has written: NaN in floats, -1 in integers."""

_SLACK = bytes([POISON]) * mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class _Place:
    begin: int
    size_bytes: int
    slack_before: int
    slack_behind: int
    described: str


_places: dict[int, _Place] = {}


def poisoned(shape: tuple[int, ...] | int, dtype: np.typing.DTypeLike) -> np.ndarray:
    """An array of poison."""
    dtype = np.dtype(dtype)
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    size = max(prod(dims), 1) * dtype.itemsize
    page = mmap.PAGESIZE
    inner = align_up(size, page)
    memory = mmap.mmap(-1, inner + 2 * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(base + page, POISON, inner)
    for guard in (base, base + page + inner):
        if _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = page + (inner - size) // ALIGNMENT * ALIGNMENT
    array = np.frombuffer(memory, dtype, prod(dims), offset).reshape(dims)
    place = _Place(base + offset, size, offset - page, inner + page - offset - size, f"{dtype} {list(dims)}")
    _places[place.begin] = place
    finalize(memory, _places.pop, place.begin, None)
    return array


def check_slack() -> None:
    """Raise ``AssertionError`` if the bytes right before or behind an array are not poison."""
    for place in _places.values():
        for where, begin, size in (
            ("before", place.begin - place.slack_before, place.slack_before),
            ("behind the end of", place.begin + place.size_bytes, place.slack_behind),
        ):
            assert ctypes.string_at(begin, size) == _SLACK[:size], f"a kernel wrote {where} an array {place.described}"


def near(address: int) -> str:
    """Which array an address misses, in words; empty if there is none within a page."""
    for place in _places.values():
        if 0 < place.begin - address <= 2 * mmap.PAGESIZE:
            return f"{place.begin - address} bytes before an array {place.described}"
        past = address - place.begin - place.size_bytes
        if 0 <= past <= 2 * mmap.PAGESIZE:
            return f"{past} bytes behind the end of an array {place.described}"
    return ""
