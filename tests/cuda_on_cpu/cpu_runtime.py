"""``Runtime`` on NumPy arrays: a whole CUDA device whose kernels run on the CPU stand-in, work done as it is enqueued.

While a capture is open, launches, products and copies are remembered instead, in order, and done whenever the graph is
launched. Streams order nothing that the order of calls does not; missing waits are the traced host device's business.
Kernels may run ahead: what one reads before its ``pdl_wait`` can be as old as on a GPU (``past``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvs_core.device.cuda.kernel import Kernel
from kvs_core.units import Progress
from tests.cuda_on_cpu import memory
from tests.cuda_on_cpu.launcher import CpuLauncher
from tests.cuda_on_cpu.past import Past


class _Event:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _Stream:
    """``before_plain``: as in ``CupyRuntime``."""

    def __init__(self, name: str, before_plain: Callable[[], None]) -> None:
        self.name = name
        self._before_plain = before_plain

    def record(self, event: _Event) -> None:
        pass

    def wait(self, event: _Event) -> None:
        self._before_plain()

    def synchronize(self) -> None:
        pass


class CpuGraph:
    """Work that was captured."""

    def __init__(self, work: Sequence[Callable[[], None]], before_plain: Callable[[], None]) -> None:
        self.work = work
        self._before_plain = before_plain

    def launch(self) -> None:
        for each in self.work:
            each()
        self._before_plain()


class _Recorder:
    """Does work, or remembers it."""

    def __init__(self) -> None:
        self.captured: list[Callable[[], None]] | None = None

    def do(self, work: Callable[[], None]) -> None:
        if self.captured is None:
            work()
        else:
            self.captured.append(work)


class _Launcher:
    """The stand-in's launcher and products, which a capture remembers."""

    def __init__(self, inner: CpuLauncher, recorder: _Recorder) -> None:
        self.arch, self.sm_count, self.shared_bytes = inner.arch, inner.sm_count, inner.shared_bytes
        self._inner = inner
        self._recorder = recorder
        self._plain = True

    def plain_next(self) -> None:
        """See ``CudaModules.plain_next``."""
        self._plain = True

    def begin(self, kernels: Iterable[Kernel]) -> None:
        """See ``prepare``."""

    def prepare(self, kernels: Iterable[Kernel], progress: Progress | None = None) -> None:
        """Kernels are compiled when they are launched first: a model's test uses few of those it may need."""

    def close(self) -> None:
        pass

    def launch(
        self, kernel: Kernel, grid: Sequence[int], block: int, args: Sequence[Any], *, shared_bytes: int = 0,
        overlap: bool = False,
    ) -> None:
        ahead, self._plain = overlap and self.arch >= 90 and not self._plain, False
        self._recorder.do(
            lambda: self._inner.launch(
                kernel, grid, block, args, shared_bytes=shared_bytes, overlap=overlap, ahead=ahead
            )
        )

    def gemm(self, rows: Any, weight: Any, out: Any, **sizes: Any) -> None:
        self._recorder.do(lambda: self._inner.gemm(rows, weight, out, **sizes))
        self.plain_next()   # it lets nobody in before it is done


class CpuRuntime:
    """See above. ``allocations`` counts device memory taken; ``ahead``: kernels run ahead."""

    name = "cuda on cpu"
    overcommits = True

    def __init__(self, *, ahead: bool = False, **launcher: Any) -> None:
        self._recorder = _Recorder()
        self._past = Past() if ahead else None
        both: Any = _Launcher(CpuLauncher(past=self._past, **launcher), self._recorder)
        self.launcher = both
        self.gemm = both
        self._plain_next = both.plain_next
        self.compute = _Stream("compute", self._plain_next)
        self.copy, self.publish = (_Stream(name, lambda: None) for name in ("copy", "publish"))
        self.allocations = 0
        self.graphs = 0

    def allocate(self, size_bytes: int, purpose: str) -> np.ndarray:
        self.allocations += 1
        buffer = memory.poisoned(max(size_bytes, 1), np.uint8)
        buffer[...] = 0
        if self._past is not None:
            self._past.memories.append(buffer)
        return buffer[:size_bytes]

    def allocate_managed(self, size_bytes: int, purpose: str) -> np.ndarray:
        return self.allocate(size_bytes, purpose)

    def allocate_pinned(self, size_bytes: int, purpose: str) -> np.ndarray:
        return memory.poisoned(max(size_bytes, 1), np.uint8)[:size_bytes]

    def view(self, buffer: np.ndarray, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        size = int(np.prod(shape)) * dtype.itemsize
        return buffer[offset : offset + size].view(dtype).reshape(shape)

    def event(self, *, timed: bool = False) -> _Event:
        return _Event()

    def seconds_between(self, first: _Event, last: _Event) -> float:
        return 1e-3

    def enqueue_copy(self, dst: int, src: int, size_bytes: int, stream: _Stream) -> None:
        self._recorder.do(lambda: ctypes.memmove(dst, src, size_bytes))   # type: ignore[arg-type, return-value]
        if stream is self.compute:
            self._plain_next()

    def begin_capture(self) -> None:
        assert self._recorder.captured is None
        self._recorder.captured = []
        self._plain_next()

    def end_capture(self) -> CpuGraph:
        work = self._recorder.captured
        assert work is not None
        self._recorder.captured = None
        self.graphs += 1
        return CpuGraph(work, self._plain_next)

    def abandon_capture(self) -> None:
        self._recorder.captured = None
        self._plain_next()

    def measure_copies(self, size_bytes: int, times: int) -> float:
        return 1e9

    def free_bytes(self) -> int:
        return 1 << 30

    def another(self) -> CpuRuntime:
        return CpuRuntime()

    def close(self) -> None:
        pass
