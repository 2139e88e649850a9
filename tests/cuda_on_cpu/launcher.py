"""A ``Launcher`` and ``Gemm`` on NumPy arrays, for tests: CUDA sources compiled by g++, blocks one after the other."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvs_core.device.cuda.arguments import ArgumentBlock
from kvs_core.device.cuda.kernel import Arg, Kernel
from kvs_core.units import Progress
from tests.cuda_on_cpu import memory
from tests.cuda_on_cpu.build import CUDA_SRC, kernel_library, runtime_library
from tests.cuda_on_cpu.past import Past, Trigger

# Codes of standin.h for the C types that an argument may have.
_CODES = {Arg.PTR: "PL", Arg.I32: "i", Arg.I64: "l", Arg.U32: "u", Arg.F32: "f"}
_MOST_THREADS = 1024
_MOST_BLOCKS = (2**31 - 1, 65535, 65535)
_RUNTIME_LOCK = threading.Lock()   # the runtime knows one launch at a time


class LaunchError(Exception):
    """A launch that a GPU would refuse, or whose kernel broke a rule; says which kernel, block and thread."""


class CpuLauncher:
    """A GPU that is not there.

    seed      with 0 blocks run in order, else in another order
    seconds   of processor time, after which a launch counts as endless
    portable  switch between threads without assembler: slower
    past      memory in which kernels that are launched ``ahead`` find what was before, as long as they may
    """

    def __init__(
        self, *, arch: int = 90, sm_count: int = 4, shared_bytes: int = 227 * 1024, seed: int = 0, seconds: int = 120,
        portable: bool = False, past: Past | None = None,
    ) -> None:
        self.arch = arch
        self.sm_count = sm_count
        self.shared_bytes = shared_bytes
        self.seed = seed
        self._seconds = seconds
        self._portable = portable
        self._past = past
        self._runtime = ctypes.CDLL(str(runtime_library(portable)))
        self._runtime.kvs_launch.restype = ctypes.c_bool
        self._kernels: dict[Kernel, _Loaded] = {}

    def begin(self, kernels: Iterable[Kernel]) -> None:
        """See ``Launcher.begin``: nothing happens in the background."""

    def close(self) -> None:
        """See ``Launcher.close``."""

    def prepare(self, kernels: Iterable[Kernel], progress: Progress | None = None) -> None:
        """See ``Launcher.prepare``."""
        wanted = list(kernels)
        for done, kernel in enumerate(wanted, 1):
            self._load(kernel)
            if progress:
                progress(done, len(wanted))

    def launch(
        self, kernel: Kernel, grid: Sequence[int], block: int, args: Sequence[Any], *, shared_bytes: int = 0,
        overlap: bool = False, ahead: bool = False,
    ) -> None:
        """See ``Launcher.launch``. Done when it returns. Raises ``LaunchError``.

        ahead  it overlaps, and no plain launch, copy or wait lies between it and the launch before
        """
        dims = (*grid, 1, 1)[:3]
        if len(grid) > 3 or not all(0 < n <= most for n, most in zip(dims, _MOST_BLOCKS, strict=True)):
            raise LaunchError(f"{kernel.name}: a grid of {tuple(grid)} blocks")
        if not 0 < block <= _MOST_THREADS:
            raise LaunchError(f"{kernel.name}: a block of {block} threads")
        if not 0 <= shared_bytes <= self.shared_bytes:
            raise LaunchError(f"{kernel.name}: {shared_bytes} bytes of shared memory of {self.shared_bytes}")
        loaded = self._load(kernel)
        error = ctypes.create_string_buffer(1024)
        trigger, past = ctypes.c_uint32(), self._past
        before = past.now() if past else []
        spans = past.spans() if past and ahead else ()
        with _RUNTIME_LOCK:
            done = self._runtime.kvs_launch(
                loaded.call, loaded.arguments.pack(args), (ctypes.c_uint32 * 3)(*dims), ctypes.c_uint32(block),
                ctypes.c_uint32(shared_bytes), ctypes.c_void_p(loaded.shared_memory()), ctypes.c_uint32(self.seed),
                ctypes.c_bool(overlap and self.arch >= 90), spans or None, ctypes.c_uint32(len(spans)),
                ctypes.byref(trigger), ctypes.c_uint32(self._seconds), error, ctypes.c_uint32(len(error)),
            )
        if not done:
            said = error.value.decode()
            touched = re.search(r"touched address (0x[0-9a-f]+)", said)
            where = touched and memory.near(int(touched[1], 16))
            raise LaunchError(f"{kernel.name} {dict(kernel.defines)}: {said}{f': {where}' if where else ''}")
        if past:
            past.launched(Trigger(trigger.value), ahead, before)

    def left_shared(self, kernel: Kernel, n_bytes: int) -> bytes:
        """The first bytes of dynamic shared memory as the last block that this thread ran has left them: 0xFF where
        it wrote nothing."""
        return ctypes.string_at(self._load(kernel).shared_memory(), n_bytes)

    def plain_next(self) -> None:
        """Launches never overlap here."""

    def gemm(
        self, rows: Any, weight: Any, out: Any, *, n_rows: int, n_out: int, n_in: int, out_stride: int, accumulate: bool
    ) -> None:
        """See ``Gemm.gemm``."""
        left = _floats(rows, n_rows * n_in, np.float16).reshape(n_rows, n_in).astype(np.float32)
        right = _floats(weight, n_out * n_in, np.float16).reshape(n_out, n_in).astype(np.float32)
        flat = _floats(out, (n_rows - 1) * out_stride + n_out, np.float32)
        target = np.lib.stride_tricks.as_strided(flat, (n_rows, n_out), (4 * out_stride, 4))
        product = left @ right.T
        target[...] = target + product if accumulate else product

    def _load(self, kernel: Kernel) -> _Loaded:
        if kernel not in self._kernels:
            self._kernels[kernel] = _Loaded(kernel, self.arch, self._portable)
        return self._kernels[kernel]


class _Loaded:
    """A kernel in this process."""

    def __init__(self, kernel: Kernel, arch: int, portable: bool) -> None:
        library = ctypes.CDLL(str(kernel_library(CUDA_SRC / kernel.source, kernel.defines, arch, portable)))
        try:
            self.call = getattr(library, f"kvs_call_{kernel.name}")
        except AttributeError:
            raise LaunchError(f"{kernel.source} {dict(kernel.defines)} has no kernel {kernel.name}") from None
        signature = getattr(library, f"kvs_signature_{kernel.name}")
        signature.restype = ctypes.c_char_p
        codes = signature().decode()
        if len(codes) != len(kernel.args) or any(c not in _CODES[a] for c, a in zip(codes, kernel.args, strict=True)):
            raise LaunchError(
                f"{kernel.name} takes ({', '.join(codes)}), its Kernel says "
                f"({', '.join(a.name for a in kernel.args)}); P pointer, i int, u unsigned, l and L 64 bits, f float"
            )
        self.shared_memory = library.kvs_shared_memory   # of the thread that calls
        self.shared_memory.restype = ctypes.c_void_p
        self.arguments = ArgumentBlock(kernel)


def _floats(buffer: Any, count: int, dtype: type) -> np.ndarray:
    """``count`` numbers from a buffer or an address on."""
    start = buffer if isinstance(buffer, int) else buffer.ctypes.data
    raw = (ctypes.c_byte * (count * np.dtype(dtype).itemsize)).from_address(start)
    return np.frombuffer(raw, dtype, count)
