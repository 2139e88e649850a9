"""The CPU stand-in as a whole CUDA device whose streams run out of order (``tests.streaming.deferred``), and whose
kernels run ahead (``tests.cuda_on_cpu.past``): a missing wait is a wrong bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvs_core.device.cuda.kernel import Kernel
from tests.cuda_on_cpu import memory
from tests.cuda_on_cpu.launcher import CpuLauncher
from tests.cuda_on_cpu.past import Past
from tests.streaming.deferred import DeferredEvent, DeferredGraph, DeferredRuntime, DeferredStream


class _Launcher:
    """Kernels and products as work of the compute stream."""

    def __init__(self, runtime: DeferredRuntime, past: Past) -> None:
        self._inner = CpuLauncher(past=past)
        self.arch, self.sm_count, self.shared_bytes = (
            self._inner.arch, self._inner.sm_count, self._inner.shared_bytes
        )
        self._runtime = runtime
        self._plain = True

    def begin(self, kernels: Iterable[Kernel]) -> None:
        """See ``prepare``."""

    def prepare(self, kernels: Iterable[Kernel], progress: object = None) -> None:
        """Kernels are compiled when they run first."""

    def close(self) -> None:
        pass

    def plain_next(self) -> None:
        """See ``CudaModules.plain_next``."""
        self._plain = True

    def launch(
        self, kernel: Kernel, grid: Sequence[int], block: int, args: Sequence[Any], *, shared_bytes: int = 0,
        overlap: bool = False,
    ) -> None:
        ahead, self._plain = overlap and not self._plain, False
        self._runtime.compute.enqueue(lambda: self._inner.launch(
            kernel, grid, block, args, shared_bytes=shared_bytes, overlap=overlap, ahead=ahead
        ))

    def gemm(self, rows: Any, weight: Any, out: Any, **sizes: Any) -> None:
        self._runtime.compute.enqueue(lambda: self._inner.gemm(rows, weight, out, **sizes))
        self.plain_next()   # it lets nobody in before it is done


class _Compute(DeferredStream):
    """The compute stream: behind what it waits for no kernel starts early."""

    def __init__(self, runtime: DeferredRuntime, launcher: _Launcher) -> None:
        super().__init__(runtime)
        self._launcher = launcher

    def wait(self, event: DeferredEvent) -> None:
        super().wait(event)
        self._launcher.plain_next()


class _Graph:
    """The same behind a graph."""

    def __init__(self, graph: DeferredGraph, launcher: _Launcher) -> None:
        self._graph = graph
        self._launcher = launcher

    def launch(self) -> None:
        self._graph.launch()
        self._launcher.plain_next()


class OutOfOrder(DeferredRuntime):
    """See the top of the file."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._past = Past()
        self._kernels = _Launcher(self, self._past)
        own: Any = self._kernels
        self.launcher = self.gemm = own
        self.compute = _Compute(self, self._kernels)

    def allocate(self, size_bytes: int, purpose: str) -> np.ndarray:
        buffer = memory.poisoned(max(size_bytes, 16), np.uint8)
        buffer[...] = 0
        self._past.memories.append(buffer)
        return buffer[:size_bytes]

    def enqueue_copy(self, dst: int, src: int, size_bytes: int, stream: DeferredStream) -> None:
        super().enqueue_copy(dst, src, size_bytes, stream)
        if stream is self.compute:
            self._kernels.plain_next()

    def begin_capture(self) -> None:
        super().begin_capture()
        self._kernels.plain_next()

    def end_capture(self) -> Any:
        graph: Any = _Graph(super().end_capture(), self._kernels)
        return graph

    def abandon_capture(self) -> None:
        super().abandon_capture()
        self._kernels.plain_next()
