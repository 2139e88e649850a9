"""Kernels as data, and the launcher that runs them.

``Kernel`` exists because a launch checks nothing: a bare Python int would go as 8 bytes and a float as a double. Its
argument types stand beside its name, and the launcher packs by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np

from kvs_core.units import Progress


class Arg(Enum):
    """C type of a kernel argument. ``value`` is the NumPy type that has its bytes."""

    PTR = "u8"
    I32 = "i4"
    I64 = "i8"
    U32 = "u4"
    F32 = "f4"


PTR, I32, I64, U32, F32 = Arg.PTR, Arg.I32, Arg.I64, Arg.U32, Arg.F32


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled instance of a ``__global__`` function.

    source   file in ``cuda_src``
    name     its ``extern "C"`` name
    args     C types of its parameters
    defines  compile-time facts, as (name, value) pairs: ``-Dname=value``; listed at the top of the source
    """

    source: str
    name: str
    args: tuple[Arg, ...]
    defines: tuple[tuple[str, int | str], ...] = ()


class Launcher(Protocol):
    """Runs kernels on the compute stream.

    arch          compute capability times ten that kernels are compiled for: 90 for sm_90
    sm_count      multiprocessors
    shared_bytes  of one block at most
    """

    arch: int
    sm_count: int
    shared_bytes: int

    def begin(self, kernels: Iterable[Kernel]) -> None:
        """Begin what ``prepare`` will wait for, in the background; its errors come then."""
        ...

    def prepare(self, kernels: Iterable[Kernel], progress: Progress | None = None) -> None:
        """Compile what is not compiled yet; a kernel that was prepared launches without delay."""
        ...

    def close(self) -> None:
        """Begin nothing more."""
        ...

    def launch(
        self, kernel: Kernel, grid: Sequence[int], block: int, args: Sequence[Any], *, shared_bytes: int = 0,
        overlap: bool = False,
    ) -> None:
        """Enqueue one launch.

        grid     blocks in x, y, z
        block    threads
        args     a buffer (its address is passed) or an int for PTR; numbers for the others
        overlap  the kernel may start before those launched before it have finished, as far back as the last plain
                 launch, copy or wait: it calls ``pdl_wait`` before it touches anything that these write, and every
                 block calls it
        """
        ...


class Gemm(Protocol):
    """Large products for prefill."""

    def gemm(
        self, rows: Any, weight: Any, out: Any, *, n_rows: int, n_out: int, n_in: int, out_stride: int, accumulate: bool
    ) -> None:
        """out = rows @ weight.T, added to what is there if ``accumulate``; on the compute stream.

        rows [n_rows, n_in], weight [n_out, n_in] float16, contiguous; out float32, rows ``out_stride`` numbers apart.
        Buffers or addresses. float32 accumulation; the same shapes give the same bits.
        """
        ...


def address(buffer: Any) -> int:
    """Where a NumPy or CuPy array begins."""
    if isinstance(buffer, np.ndarray):
        return int(buffer.ctypes.data)
    return int(buffer.data.ptr)
