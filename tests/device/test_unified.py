"""CUDA's unified memory for weights, which llama.cpp's variable asks for: what lies there, and what does not."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from kvs_core.device.cuda.cupy_runtime import CupyRuntime
from kvs_core.device.cuda.hollow import hollow_device
from kvs_core.device.cuda.weights import held_bytes, part_bytes
from kvs_core.errors import DeviceMemoryError
from kvs_core.units import MIB
from tests.device.tensors import tensor
from tests.engine.machines import MACHINES, Machine, Watched, machine_of
from tests.ops.record_weights import random_tensor

VARIABLE = "GGML_CUDA_ENABLE_UNIFIED_MEMORY"
MATRIX, OTHER = (random_tensor(f"blk.0.{name}.weight", GGMLQuantizationType.Q8_0, 32, 64) for name in ("a", "b"))


class Recorded(Watched):
    """Tells what is allocated, and where."""

    def __init__(self, inner: Watched) -> None:
        super().__init__(inner, False)
        self.plain: list[tuple[int, str]] = []
        self.managed: list[tuple[int, str]] = []

    def allocate(self, size_bytes: int, purpose: str) -> Any:
        self.plain.append((size_bytes, purpose))
        return self._inner.allocate(size_bytes, purpose)

    def allocate_managed(self, size_bytes: int, purpose: str) -> Any:
        self.managed.append((size_bytes, purpose))
        return self._inner.allocate_managed(size_bytes, purpose)


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Machine:
    """See ``MACHINES``."""
    return machine_of(request.param)


@pytest.mark.parametrize("value", [None, "1", ""])
def test_matrices_that_stay_are_managed_and_nothing_else(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    """With the variable, whatever it says: not the arena, recurrent state, vectors, nor what is on its way into the
    file's other forms or to pinned memory. Without it, nothing."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    runtime = Recorded(machine.runtime())
    device = machine.device(runtime)
    try:
        assert device.spills == (value is not None)
        device.load_matrix([MATRIX])
        device.load_passing([OTHER], device.allocate_pinned(part_bytes([OTHER])))
        device.load_vector(tensor("norm", np.ones(64, np.float32)))
        device.allocate((3, 5), np.float32)
        device.allocate_arena(2 * MIB)
        size = held_bytes(MATRIX)
        assert runtime.managed == ([] if value is None else [(size, "weights")])
        plain = [(size, "weights")] if value is None else []
        for entry in [*plain, (held_bytes(OTHER), "weights"), (256, "weights"), (60, "recurrent state"),
                      (2 * MIB, "the arena")]:
            assert entry in runtime.plain
        assert sum(entry == (size, "weights") for entry in runtime.plain) == 1 + len(plain)   # what passes, in between
        assert device.memory_report()["weights"] == size + 256
    finally:
        device.close()


def test_a_token_table_that_cannot_be_pinned_is_managed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As other weights are that the GPU holds."""
    monkeypatch.setenv(VARIABLE, "1")
    machine = machine_of("cuda_on_cpu")
    runtime = Recorded(machine.runtime())
    device = machine.device(runtime)
    runtime.pinned = False
    device.load_table(MATRIX)
    assert runtime.managed == [(MATRIX.n_bytes, "weights")]
    device.close()


def test_free_memory_is_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the driver would move them out for whatever asks."""
    monkeypatch.setenv(VARIABLE, "1")
    machine = machine_of("cuda_on_cpu")
    runtime = machine.runtime()
    free = [50_000]
    runtime.free_bytes = lambda: free[0]
    device = machine.device(runtime)
    device.load_matrix([MATRIX])
    assert device.free_bytes() == 50_000 - held_bytes(MATRIX) == 41_296
    free[0] = 40_000   # something else is there too
    assert device.free_bytes() == 40_000
    for layer in range(1, 6):
        device.load_matrix([random_tensor(f"blk.{layer}.a.weight", GGMLQuantizationType.Q8_0, 32, 64)])
    assert device.free_bytes() == 0
    device.close()


def test_a_driver_that_cannot_is_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As in WSL; then all is as without the variable."""
    machine = machine_of("cuda_on_cpu")
    monkeypatch.setenv(VARIABLE, "1")
    runtime = Recorded(machine.runtime())
    runtime.overcommits = False
    device = machine.device(runtime)
    device.load_matrix([MATRIX])
    assert not device.spills
    assert runtime.managed == []
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == [f"{VARIABLE} has no effect: unified memory must fit cuda on cpu here"]
    device.close()
    hollow_device(device, 1 << 20).close()   # a probe says nothing of it again
    assert len(caplog.records) == 1


class OutOfMemory(RuntimeError):
    """What CuPy raises."""


class Memory:
    """As CuPy's kinds of memory. ``refused``: whether there is none."""

    refused = False

    def __init__(self, size_bytes: int) -> None:
        if self.refused:
            raise OutOfMemory("cudaErrorMemoryAllocation: out of memory")
        self.size_bytes = size_bytes
        self.advice: list[tuple[int, int]] = []

    def advise(self, advice: int, device: int) -> None:
        self.advice.append((advice, device))


class ManagedMemory(Memory):
    """The unified kind."""


def test_what_fits_is_told_to_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA is told that its place is the GPU (advice 3), and nothing of what does not fit; that there is none is an
    error with the numbers."""
    cuda = SimpleNamespace(
        Memory=Memory, ManagedMemory=ManagedMemory, MemoryPointer=lambda memory, offset: SimpleNamespace(mem=memory),
        Device=lambda index: index,
        runtime=SimpleNamespace(CUDARuntimeError=OutOfMemory, memGetInfo=lambda: (4 * MIB, 8 * MIB)),
    )
    runtime = CupyRuntime.__new__(CupyRuntime)
    runtime._index = 2
    runtime._cupy = SimpleNamespace(cuda=cuda, ndarray=lambda shape, dtype, data: SimpleNamespace(data=data))
    monkeypatch.setattr(runtime, "_clear", lambda buffer: None)
    kinds = []
    for size_bytes in (4 * MIB, 4 * MIB + 1):
        memory = runtime.allocate_managed(size_bytes, "weights").data.mem
        kinds.append((type(memory), memory.size_bytes, memory.advice))
    assert kinds == [(ManagedMemory, 4 * MIB, [(3, 2)]), (ManagedMemory, 4 * MIB + 1, [])]
    assert type(runtime.allocate(5, "the arena").data.mem) is Memory
    monkeypatch.setattr(ManagedMemory, "refused", True)
    with pytest.raises(DeviceMemoryError, match=r"^9 MiB of unified memory for weights cannot be had: 4 of 8 MiB are "):
        runtime.allocate_managed(9 * MIB, "weights")
