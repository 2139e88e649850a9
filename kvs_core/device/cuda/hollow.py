"""A GPU on which steps do everything but their work: to measure what the host does, and the driver, for a step.

Of a model's kernels none is compiled or launched, but for those that pick tokens. Captured work takes its time all the
same, by copies within memory: what the host does behind a launch is hidden by it, as by a step's kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvs_core.device.cuda.device import CudaDevice
from kvs_core.device.cuda.kernel import Kernel, Launcher, address
from kvs_core.device.cuda.runtime import Runtime
from kvs_core.units import MIB, Progress, ceil_div

_PICKING = "sample.cu"
_PIECE_BYTES = 64 * MIB   # of a copy at most


def hollow_device(beside: CudaDevice, load_bytes: int) -> CudaDevice:
    """Another device on the GPU of ``beside``, with memory of its own. What its kernels would compute is whatever lies
    in memory.

    load_bytes  copied by each launch of captured work
    """
    runtime = beside.another_runtime()
    try:
        _make_hollow(runtime, load_bytes)
        return CudaDevice(runtime)
    except BaseException:
        runtime.close()
        raise


def _make_hollow(runtime: Runtime, load_bytes: int) -> None:
    piece = min(_PIECE_BYTES, load_bytes)
    source, target = (runtime.allocate(piece, "a probe of the host") for _ in range(2))
    begin_capture = runtime.begin_capture

    def begin_with_load() -> None:
        begin_capture()
        for _ in range(ceil_div(load_bytes, piece)):
            runtime.enqueue_copy(address(target), address(source), piece, runtime.compute)

    hollow: Any = runtime
    hollow.begin_capture = begin_with_load
    hollow.launcher = _PickingAlone(runtime.launcher)


class _PickingAlone:
    """A launcher that leaves all kernels out but those that pick tokens."""

    def __init__(self, inner: Launcher) -> None:
        self.arch, self.sm_count, self.shared_bytes = inner.arch, inner.sm_count, inner.shared_bytes
        self._inner = inner

    def begin(self, kernels: Iterable[Kernel]) -> None:
        """See ``Launcher``."""
        self._inner.begin(filter(_picks, kernels))

    def prepare(self, kernels: Iterable[Kernel], progress: Progress | None = None) -> None:
        """See ``Launcher``."""
        self._inner.prepare(filter(_picks, kernels), progress)

    def close(self) -> None:
        """See ``Launcher``."""
        self._inner.close()

    def launch(
        self, kernel: Kernel, grid: Sequence[int], block: int, args: Sequence[Any], *, shared_bytes: int = 0,
        overlap: bool = False,
    ) -> None:
        """See ``Launcher``."""
        if _picks(kernel):
            self._inner.launch(kernel, grid, block, args, shared_bytes=shared_bytes, overlap=overlap)


def _picks(kernel: Kernel) -> bool:
    return kernel.source == _PICKING
