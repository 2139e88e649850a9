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
        hollow: Any = _Hollow(runtime, load_bytes)
        return CudaDevice(hollow, may_spill=False)
    except BaseException:
        runtime.close()
        raise


class _Hollow:
    """A runtime whose captured work is a load of copies and what is no kernel; in all else ``inner``."""

    def __init__(self, inner: Runtime, load_bytes: int) -> None:
        self._inner = inner
        self.launcher: Launcher = _PickingAlone(inner.launcher)
        self._piece_bytes = min(_PIECE_BYTES, load_bytes)
        self._copies = ceil_div(load_bytes, self._piece_bytes)
        self._source, self._target = (inner.allocate(self._piece_bytes, "a probe of the host") for _ in range(2))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin_capture(self) -> None:
        """See ``Runtime``."""
        self._inner.begin_capture()
        target, source = address(self._target), address(self._source)
        for _ in range(self._copies):
            self._inner.enqueue_copy(target, source, self._piece_bytes, self._inner.compute)


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
