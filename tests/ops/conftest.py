"""The ``lab`` that kernel tests work in, on each device: the CPU stand-in always, a GPU where there is one.

Environment:
    KVS_TEST_GPU_ONLY    leave the stand-in out, where time on a GPU counts
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest

from kvs_core.device.cuda.context import Context
from kvs_core.device.cuda.modules import CudaFound, find_cuda
from kvs_core.device.cuda.tables import (
    STEP_PENDING,
    STEP_POSITION,
    STEP_ROWS,
    STEP_STORE,
    STEP_TOKENS,
    STEP_WORDS,
)
from kvs_core.device.workspace import BufferSpec
from kvs_core.memory.phases import Phase
from tests.cuda_on_cpu import memory
from tests.cuda_on_cpu.launcher import CpuLauncher
from tests.cuda_on_cpu.path import launcher_on, on_path

DEVICES = ["cuda"] if os.environ.get("KVS_TEST_GPU_ONLY") else ["cuda_on_cpu", "cuda"]


class Lab(ABC):
    """A device to try kernels on.

    launcher  a ``Launcher`` and ``Gemm``
    on_gpu    whether it is a real one: larger cases cost nothing there
    """

    launcher: Any
    on_gpu: bool

    @abstractmethod
    def array(self, values: np.ndarray) -> Any:
        """A copy of ``values`` on the device, contiguous."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...] | int, dtype: np.typing.DTypeLike) -> Any:
        """A buffer of bytes 0xFF: NaN in floats."""

    @abstractmethod
    def host(self, buffer: Any) -> np.ndarray:
        """What is in a buffer after all launches so far."""

    def context(
        self, rows: int, position: int = 0, pending: int = 0, tokens: Sequence[int] | None = None,
        phase: Phase = Phase.DECODE, scratch: Sequence[BufferSpec] = (),
    ) -> Context:
        """What op families get in a step of ``rows`` rows, its table filled in and ``scratch`` bound to poison."""
        ids = np.zeros(rows, np.int32) if tokens is None else np.asarray(tokens, np.int32)
        step = np.zeros(STEP_WORDS, np.int32)
        step[[STEP_POSITION, STEP_ROWS, STEP_PENDING, STEP_STORE]] = position, rows, pending, 1
        if phase is Phase.DECODE:
            step[STEP_TOKENS : STEP_TOKENS + rows] = ids
        return Context(
            launcher=self.launcher, step=self.array(step), tokens=self.array(ids), rows=rows, position=position,
            phase=phase, scratch={spec.name: self.empty(spec.shape, spec.dtype) for spec in scratch},
        )


class CpuLab(Lab):
    """On the stand-in, with guard pages around every buffer."""

    on_gpu = False

    def __init__(self, path: str = "") -> None:
        """``path``: what KVS_CUDA_PATH says."""
        self.launcher = _cpu_launcher(path)

    def array(self, values: np.ndarray) -> np.ndarray:
        buffer = memory.poisoned(values.shape, values.dtype)
        buffer[...] = values
        return buffer

    def empty(self, shape: tuple[int, ...] | int, dtype: np.typing.DTypeLike) -> np.ndarray:
        return memory.poisoned(shape, dtype)

    def host(self, buffer: np.ndarray) -> np.ndarray:
        return buffer.copy()


class GpuLab(Lab):
    """On GPU 0. Memory is filled between two waits for the whole device: the launcher's stream does not wait for CuPy's
    own, and memory that CuPy gives anew may still be read by a launch of before."""

    on_gpu = True

    def __init__(self, path: str = "") -> None:
        """``path``: what KVS_CUDA_PATH says; "": what it says to the tests."""
        import cupy

        self._cupy = cupy
        self.launcher = _gpu_launcher(path)

    def array(self, values: np.ndarray) -> Any:
        self._cupy.cuda.Device().synchronize()
        buffer = self._cupy.asarray(np.ascontiguousarray(values))
        self._cupy.cuda.Device().synchronize()
        return buffer

    def empty(self, shape: tuple[int, ...] | int, dtype: np.typing.DTypeLike) -> Any:
        self._cupy.cuda.Device().synchronize()
        buffer = self._cupy.empty(shape, dtype)
        buffer.data.memset(memory.POISON, buffer.nbytes)
        self._cupy.cuda.Device().synchronize()
        return buffer

    def host(self, buffer: Any) -> np.ndarray:
        self._cupy.cuda.Device().synchronize()
        return self._cupy.asnumpy(buffer)


@cache
def _found() -> CudaFound | str:
    return find_cuda()


@cache
def _cpu_launcher(path: str) -> CpuLauncher:
    return CpuLauncher(**launcher_on(path))


@cache
def _gpu_launcher(path: str) -> Any:
    from kvs_core.device.cuda.cupy_runtime import CupyRuntime

    with on_path(path) if path else nullcontext():
        runtime = CupyRuntime(0)
    launcher: Any = runtime.launcher
    launcher.gemm = runtime.gemm.gemm
    launcher.runtime = runtime   # it owns the streams
    return launcher


@pytest.fixture(params=DEVICES)
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """One per device; see ``Lab``."""
    yield from lab_of(request.param)


def lab_of(device: str, path: str = "") -> Iterator[Lab]:
    """The lab of a device, on a path of the kernels; skips the test if there is none."""
    if device == "cuda_on_cpu":
        yield CpuLab(path)
        memory.check_slack()
        return
    found = _found()
    if not isinstance(found, CudaFound):
        pytest.skip(found)
    yield GpuLab(path)
