"""Kernels on a GPU: compiled for it, loaded, launched with as little work per launch as Python allows."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from kvs_core.device.cuda.arguments import ArgumentBlock
from kvs_core.device.cuda.driver import INVALID_CONTEXT, Driver
from kvs_core.device.cuda.kernel import Kernel, Launcher
from kvs_core.device.cuda.nvrtc import cached_code, compile_cached, nvrtc
from kvs_core.device.cuda.path import asked_path, kernel_path
from kvs_core.device.cuda.requirements import arch_problem, cupy_problem, dotted, driver_problem, extra, nvrtc_problem
from kvs_core.errors import DeviceError
from kvs_core.units import Progress

# CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes, their number
_CONFIG = struct.Struct("7IQQI0Q")
# CUlaunchAttribute: id, value; of programmatic stream serialization the value is an int
_OVERLAP = struct.pack("iiI60x", 6, 0, 1)
_COMPILERS = 8
"""Threads that compile at most: each takes some hundred MB."""

_MOST_ENTRIES = 4096

_Unit = tuple[str, tuple[tuple[str, int | str], ...]]   # source, defines


class _Entry:
    """A kernel that can be launched. It holds ``kernel``, whose id is its key."""

    __slots__ = ("arguments", "function", "kernel")

    def __init__(self, kernel: Kernel, function: int) -> None:
        self.kernel = kernel
        self.function = function
        self.arguments = ArgumentBlock(kernel)


class CudaModules(Launcher):
    """Launches on one stream of one GPU, from one thread at a time. Works while the stream is captured.

    Launches with ``overlap`` are programmatic dependent launches; where the path has none they are plain.

    path  what kernels are compiled for
    """

    def __init__(self, stream: int, index: int = 0) -> None:
        """``stream``: a CUstream of GPU ``index``. Raises ``DeviceError`` if there is no driver or compiler,
        ``SettingsError`` for a path that this GPU cannot run."""
        self._driver = Driver()
        self._context = self._driver.primary_context(index)
        self.path = kernel_path(self._driver.arch(index), self._driver.attribute(index, "shared_bytes"))
        self.arch, self.shared_bytes = self.path.arch, self.path.shared_bytes
        self.sm_count = self._driver.attribute(index, "sm_count")
        self._stream = stream
        self._can_overlap = self.path.can_overlap
        self._plain = True
        self._jobs: dict[_Unit, Future[ctypes.c_void_p]] = {}   # a module each
        self._pool = ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1), "kvs-compile")
        self._functions: dict[Kernel, int] = {}
        self._entries: dict[int, _Entry] = {}   # by id of a Kernel: hashing one takes longer than a launch
        self._config = ctypes.create_string_buffer(_CONFIG.size)
        self._attribute = ctypes.create_string_buffer(_OVERLAP, len(_OVERLAP))
        self._config_at = ctypes.addressof(self._config)
        self._attribute_at = ctypes.addressof(self._attribute)
        self._launch = self._driver.library.cuLaunchKernelEx
        self._launch.argtypes = [ctypes.c_void_p] * 4

    def begin(self, kernels: Iterable[Kernel]) -> None:
        """See ``Launcher.begin``. Modules are made in threads: NVRTC's part and the driver's take as long."""
        for kernel in kernels:
            unit = kernel.source, kernel.defines
            if unit not in self._jobs:
                self._jobs[unit] = self._pool.submit(self._module, unit)

    def prepare(self, kernels: Iterable[Kernel], progress: Progress | None = None) -> None:
        """See ``Launcher.prepare``. ``progress`` counts modules; those found on disk are done at once."""
        kernels = list(kernels)
        self.begin(kernels)
        units = {(kernel.source, kernel.defines): None for kernel in kernels}
        if progress:
            progress(0, len(units))
        try:
            for done, job in enumerate(as_completed([self._jobs[unit] for unit in units]), 1):
                job.result()
                if progress:
                    progress(done, len(units))
        except BaseException:
            self._forget_unfinished()
            raise
        for kernel in kernels:
            self._enter(kernel)

    def launch(
        self, kernel: Kernel, grid: Sequence[int], block: int, args: Sequence[Any], *, shared_bytes: int = 0,
        overlap: bool = False,
    ) -> None:
        """See ``Launcher.launch``. Raises ``DeviceError`` if the launch, or earlier work on the GPU, failed."""
        entry = self._entries.get(id(kernel)) or self._enter(kernel)
        pointers = entry.arguments.pack(args)
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        early = overlap and self._can_overlap and not self._plain
        self._plain = False
        _CONFIG.pack_into(
            self._config, 0, x, y, z, block, 1, 1, shared_bytes, self._stream, self._attribute_at, 1 if early else 0
        )
        status = self._launch(self._config_at, entry.function, pointers, None)
        if status:
            self._retry(status, entry, f"{kernel.name} ({x}, {y}, {z}) x {block}, {shared_bytes} bytes shared")

    def plain_next(self) -> None:
        """The next launch waits for all before it, whatever ``overlap`` says: a copy or an event comes before it."""
        self._plain = True

    def close(self) -> None:
        """Compile no more. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _forget_unfinished(self) -> None:
        """Modules that failed or are not begun: they can be asked for again."""
        for unit, job in list(self._jobs.items()):
            if job.cancel() or (job.done() and job.exception() is not None):
                del self._jobs[unit]

    def _module(self, unit: _Unit) -> ctypes.c_void_p:
        code = cached_code(*unit, self.path.target)
        if code is None:
            code = compile_cached(*unit, self.path.target)
        self._driver.call("cuCtxSetCurrent", self._context)
        return self._load(unit, code)

    def _load(self, unit: _Unit, code: bytes) -> ctypes.c_void_p:
        try:
            return self._driver.load_module(code)
        except DeviceError as error:
            raise DeviceError(
                f"{unit[0]}: {error}; compiled by NVRTC {dotted(nvrtc().version)} for a driver of CUDA "
                f"{dotted(self._driver.cuda_version)}: update the driver if that is older"
            ) from error

    def _enter(self, kernel: Kernel) -> _Entry:
        if len(self._entries) > _MOST_ENTRIES:   # somebody makes Kernels as he goes
            self._entries.clear()
        function = self._functions.get(kernel)
        if function is None:
            unit = kernel.source, kernel.defines
            if unit not in self._jobs:
                self.prepare([kernel])
                return self._entries[id(kernel)]
            function = self._driver.function(self._jobs[unit].result(), kernel.name, self.shared_bytes)
            self._functions[kernel] = function
        entry = self._entries[id(kernel)] = _Entry(kernel, function)
        return entry

    def _retry(self, status: int, entry: _Entry, what: str) -> None:
        """A thread that launches for the first time has no context yet."""
        if status == INVALID_CONTEXT:
            self._driver.call("cuCtxSetCurrent", self._context)
            status = self._launch(self._config_at, entry.function, entry.arguments.pointers, None)
        self._driver.check(status, f"launching {what}")


@dataclass(frozen=True, slots=True)
class CudaFound:
    """A GPU that can be used. arch: compute capability times ten; versions of CUDA such as 13.0."""

    index: int
    name: str
    arch: int
    driver_cuda: str
    nvrtc: str


def find_cuda(index: int = 0) -> CudaFound | str:
    """GPU ``index``, or in one line why it cannot be used and what to do.

    Raises ``SettingsError`` for a path of the kernels that is none, or none of this GPU: no other device makes it good.
    """
    asked_path()
    try:
        driver = Driver()
        gpus = driver.gpus
        if index >= gpus:
            return f"there is no GPU {index}; the driver sees {gpus}, counted from 0"
        name, arch, knows = driver.name(index), driver.arch(index), driver.cuda_version
        problem = arch_problem(index, name, arch) or driver_problem(knows) or cupy_problem(knows, cupy_cuda(knows))
        if problem:
            return problem
        compiler = nvrtc()
        problem = nvrtc_problem(knows, compiler.version)
        if problem:
            return problem
        compiled_for = kernel_path(arch, driver.attribute(index, "shared_bytes")).arch
        if not compiler.supports(compiled_for):
            return f"NVRTC {dotted(compiler.version)} does not know sm_{compiled_for} ({name}); install a newer one"
    except DeviceError as error:
        return str(error)
    return CudaFound(index, name, arch, dotted(knows), dotted(compiler.version))


def cupy_cuda(driver_cuda: tuple[int, int] | None) -> tuple[int, int]:
    """The CUDA that CuPy is built for. ``DeviceError`` if it cannot be loaded, with the extra for that driver."""
    try:
        import cupy
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            raise DeviceError(f"CuPy is not installed; pip install '{extra(driver_cuda)}'") from None
        raise DeviceError(
            f"CuPy cannot be loaded ({str(error).splitlines()[0]}); pip install '{extra(driver_cuda)}'"
        ) from error
    version = cupy.cuda.runtime.runtimeGetVersion()
    return version // 1000, version % 1000 // 10
