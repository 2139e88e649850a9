"""``Runtime`` on CuPy: the only module, beside the compiler and cuBLAS bindings, that knows CuPy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from kvs_core.device.cuda.cublas import CublasGemm
from kvs_core.device.cuda.driver import OUT_OF_MEMORY
from kvs_core.device.cuda.kernel import Gemm, Launcher
from kvs_core.device.cuda.modules import CudaModules
from kvs_core.device.cuda.runtime import Event, RawStream
from kvs_core.device.operands import Buffer
from kvs_core.device.shortage import no_memory, no_pinned
from kvs_core.errors import LESS_MEMORY, DeviceError, DeviceMemoryError

_COPY_DEFAULT = 4             # cudaMemcpyDefault: from the addresses
_PREFERRED_LOCATION = 3       # cudaMemAdviseSetPreferredLocation
_CONCURRENT_MANAGED = 89      # cudaDevAttrConcurrentManagedAccess, without which managed memory must fit the device


_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def _ours(what: str) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]:
    """A method that does ``what``, whose errors, RuntimeErrors of CuPy, become ours."""

    def decorate(method: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
        @wraps(method)
        def call(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
            try:
                return method(*args, **kwargs)
            except RuntimeError as error:
                if getattr(error, "status", None) == OUT_OF_MEMORY:
                    raise DeviceMemoryError(f"CUDA has no memory for {what} ({error}); {LESS_MEMORY}") from error
                raise DeviceError(f"CUDA failed in {what}: {error}") from error

        return call

    return decorate


class _CupyEvent:
    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    @_ours("work on a stream")
    def done(self) -> bool:
        return bool(self.raw.done)

    @_ours("work on a stream")
    def wait(self) -> None:
        self.raw.synchronize()


class _CupyStream:
    """``before_plain`` is told when a kernel that follows must not start early."""

    __slots__ = ("_before_plain", "raw")

    def __init__(self, raw: Any, before_plain: Any) -> None:
        self.raw = raw
        self._before_plain = before_plain

    @_ours("recording an event")
    def record(self, event: Event) -> None:
        assert isinstance(event, _CupyEvent)
        event.raw.record(self.raw)

    @_ours("waiting for an event")
    def wait(self, event: Event) -> None:
        assert isinstance(event, _CupyEvent)
        self.raw.wait_event(event.raw)
        self._before_plain()

    @_ours("work on a stream")
    def synchronize(self) -> None:
        self.raw.synchronize()


class _CupyGraph:
    """``before_plain``: see ``_CupyStream``."""

    __slots__ = ("_before_plain", "_graph", "_stream")

    def __init__(self, graph: Any, stream: Any, before_plain: Any) -> None:
        self._graph = graph
        self._stream = stream
        self._before_plain = before_plain

    @_ours("launching a captured step")
    def launch(self) -> None:
        self._graph.launch(self._stream)
        self._before_plain()


class CupyRuntime:
    """GPU ``index``. Device memory is taken from the driver as it is asked for: no pool holds what was given back."""

    @_ours("starting the GPU")
    def __init__(self, index: int = 0) -> None:
        """Raises ``DeviceError`` if the GPU cannot be used, ``SettingsError`` as ``CudaModules`` does."""
        import cupy

        self._cupy = cupy
        self._index = index
        cupy.cuda.Device(index).use()
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        compute = cupy.cuda.Stream(non_blocking=True)
        modules = CudaModules(compute.ptr, index)
        self.name = modules.path.named(properties["name"].decode())
        self.overcommits = bool(cupy.cuda.runtime.deviceGetAttribute(_CONCURRENT_MANAGED, index))
        self.launcher: Launcher = modules
        self._cublas = CublasGemm(compute.ptr, lambda size: self.allocate(size, "the workspace of cuBLAS"))
        self.gemm: Gemm = self._cublas
        self._plain_next = modules.plain_next
        self.compute: RawStream = _CupyStream(compute, self._plain_next)
        self.copy: RawStream = _CupyStream(cupy.cuda.Stream(non_blocking=True), _nothing)
        self.publish: RawStream = _CupyStream(cupy.cuda.Stream(non_blocking=True), _nothing)
        self._compute = compute

    @_ours("asking for memory")
    def allocate(self, size_bytes: int, purpose: str) -> Buffer:
        """See ``Runtime``."""
        return self._allocate(self._cupy.cuda.Memory, "GPU memory", size_bytes, purpose)

    @_ours("asking for memory")
    def allocate_managed(self, size_bytes: int, purpose: str) -> Buffer:
        """See ``Runtime``. What fits now is told to stay, so that what comes later moves itself."""
        cuda = self._cupy.cuda
        fits = size_bytes <= self.free_bytes()
        buffer = self._allocate(cuda.ManagedMemory, "unified memory", size_bytes, purpose)
        if fits:
            with suppress(RuntimeError):   # it is advice
                buffer.data.mem.advise(_PREFERRED_LOCATION, cuda.Device(self._index))
        return buffer

    def _allocate(self, memory_type: Any, kind: str, size_bytes: int, purpose: str) -> Buffer:
        cupy = self._cupy
        try:
            memory = memory_type(max(size_bytes, 1))
        except cupy.cuda.runtime.CUDARuntimeError as error:
            free, total = cupy.cuda.runtime.memGetInfo()
            raise no_memory(kind, purpose, size_bytes, free_bytes=free, total_bytes=total) from error
        buffer = cupy.ndarray((size_bytes,), np.uint8, cupy.cuda.MemoryPointer(memory, 0))
        self._clear(buffer)
        return buffer

    def allocate_pinned(self, size_bytes: int, purpose: str) -> np.ndarray:
        """See ``Runtime``. Not zeroed. Any thread may ask."""
        cupy = self._cupy
        try:
            with cupy.cuda.Device(self._index):
                memory = cupy.cuda.PinnedMemory(max(size_bytes, 1))
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise no_pinned(purpose, size_bytes) from error
        return np.frombuffer(cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8, size_bytes)

    def view(self, memory: Buffer, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        """See ``Runtime``."""
        return self._cupy.ndarray(shape, dtype, memory.data + offset)

    @_ours("making an event")
    def event(self, *, timed: bool = False) -> Event:
        """See ``Runtime``. Those without a time are cheaper."""
        return _CupyEvent(self._cupy.cuda.Event(disable_timing=not timed))

    def seconds_between(self, first: Event, last: Event) -> float:
        """See ``Runtime``."""
        assert isinstance(first, _CupyEvent)
        assert isinstance(last, _CupyEvent)
        return float(self._cupy.cuda.get_elapsed_time(first.raw, last.raw)) / 1e3

    @_ours("a copy")
    def enqueue_copy(self, dst: int, src: int, size_bytes: int, stream: RawStream) -> None:
        """See ``Runtime``."""
        assert isinstance(stream, _CupyStream)
        self._cupy.cuda.runtime.memcpyAsync(dst, src, size_bytes, _COPY_DEFAULT, stream.raw.ptr)
        if stream is self.compute:
            self._plain_next()

    @_ours("capturing a step")
    def begin_capture(self) -> None:
        """See ``Runtime``. No other call breaks the capture: the helper that pins memory goes on, and Python may free
        the memory of an earlier engine at any moment."""
        self._compute.begin_capture(self._cupy.cuda.runtime.streamCaptureModeRelaxed)
        self._plain_next()

    @_ours("making a graph of a step")
    def end_capture(self) -> _CupyGraph:
        """See ``Runtime``."""
        return _CupyGraph(self._compute.end_capture(), self._compute, self._plain_next)

    def abandon_capture(self) -> None:
        """See ``Runtime``."""
        # CUDA's complaint about what was left open, or about the error that broke the capture, is no news.
        with suppress(RuntimeError):
            self._compute.end_capture()
        self._plain_next()

    @_ours("measuring the link")
    def measure_copies(self, size_bytes: int, times: int) -> float:
        """See ``Runtime``."""
        cuda = self._cupy.cuda
        source = self.allocate_pinned(size_bytes, "a probe of the link")
        target = self.allocate(size_bytes, "a probe of the link")
        assert isinstance(self.copy, _CupyStream)
        stream = self.copy.raw
        seconds = []
        for _ in range(times + 1):   # the first one pays for what is set up on the way
            begin, end = cuda.Event(), cuda.Event()
            begin.record(stream)
            cuda.runtime.memcpyAsync(target.data.ptr, source.ctypes.data, size_bytes, _COPY_DEFAULT, stream.ptr)
            end.record(stream)
            end.synchronize()
            seconds.append(cuda.get_elapsed_time(begin, end) / 1e3)
        return size_bytes / float(np.median(seconds[1:]))

    @_ours("asking for memory")
    def free_bytes(self) -> int:
        """See ``Runtime``."""
        return int(self._cupy.cuda.runtime.memGetInfo()[0])

    def another(self) -> CupyRuntime:
        """See ``Runtime``."""
        return CupyRuntime(self._index)

    def close(self) -> None:
        """See ``Runtime``. Memory goes with its last view."""
        self.launcher.close()
        try:
            self._compute.synchronize()
        finally:
            self._cublas.close()

    @_ours("clearing memory")
    def _clear(self, buffer: Buffer) -> None:
        """Zeros, there when this returns: streams that do not block would not wait for them."""
        self._cupy.cuda.runtime.memset(buffer.data.ptr, 0, buffer.nbytes)
        self._cupy.cuda.Stream.null.synchronize()


def _nothing() -> None:
    """Copies have no kernels behind them."""
