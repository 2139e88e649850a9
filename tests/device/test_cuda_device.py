"""The CUDA device around its kernels: memory, tables, streams, captures and errors, on the stand-in and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvs_core.device.base import PASSED, StepInputs
from kvs_core.device.cuda.cupy_runtime import _CupyEvent, _CupyGraph, _CupyStream
from kvs_core.device.cuda.device import CudaDevice
from kvs_core.device.cuda.streams import EventPool
from kvs_core.device.cuda.tables import STEP_PENDING, STEP_POSITION, STEP_ROWS, STEP_TOKENS
from kvs_core.errors import DeviceError
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import KvType, PageGeometry, PageOrder
from kvs_core.paging.schedule import Run
from kvs_core.paging.spans import Chunk, plan_layer
from tests.engine.machines import MACHINES, Machine, machine_of

ARENA = 1 << 16


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Machine:
    """See ``MACHINES``."""
    return machine_of(request.param)


@pytest.fixture
def device(machine: Machine) -> Iterator[CudaDevice]:
    """With an arena, and tables for two layers of eight pages."""
    device = machine.device()
    device.allocate_arena(ARENA)
    device.reserve_steps(2, 8, 16)
    yield device
    device.close()


def pinned(device: CudaDevice, values: np.ndarray) -> np.ndarray:
    """A copy in pinned memory."""
    memory = device.allocate_pinned(values.nbytes).view(values.dtype).reshape(values.shape)
    memory[...] = values
    return memory


def inputs(tokens: list[int], position: int = 0, pending: int = 0, phase: Phase = Phase.DECODE) -> StepInputs:
    return StepInputs(np.array(tokens, np.int32), position, pending, phase)


def test_memory_is_zero_at_first_and_views_share_it(device: CudaDevice) -> None:
    """Views of the arena have the type and shape asked for, lie where asked, and never beyond the end."""
    assert not device.download(device.arena_view(0, (ARENA,), np.uint8)).any()
    assert not device.download(device.allocate((3, 5), np.float32)).any()
    values = pinned(device, np.arange(24, dtype=np.float32).reshape(4, 6))
    device.enqueue_copy(device.arena_view(256, (4, 6), np.float32), values, device.compute)
    assert device.download(device.arena_view(256 + 24, (3, 6), np.float32)).tolist() == values[1:].tolist()
    assert device.download(device.arena_view(256, (24,), np.int32)).tobytes() == values.tobytes()
    for offset, size in ((ARENA - 4, 2), (-4, 1), (ARENA + 4, 1)):
        with pytest.raises(AssertionError):
            device.arena_view(offset, (size,), np.float32)
    with pytest.raises(AssertionError, match="allocated once"):
        device.allocate_arena(256)


def test_the_report_counts_every_purpose(device: CudaDevice) -> None:
    """Arena and recurrent state to the byte, and the plan tables."""
    before = device.memory_report()
    device.allocate((7, 11), np.float32)
    after = device.memory_report()
    assert after["state"] - before["state"] == 4 * 77
    assert after["arena"] == ARENA
    assert after["tables"] > 0
    assert set(after) == {"weights", "state", "arena", "tables"}


def test_downloads_are_copies(device: CudaDevice) -> None:
    """What has been downloaded does not change with later downloads, of any size."""
    view = device.arena_view(0, (1000,), np.int32)
    first = pinned(device, np.arange(1000, dtype=np.int32))
    device.enqueue_copy(view, first, device.compute)
    small, large = device.download(view[:10]), device.download(view)
    second = pinned(device, -first)
    device.enqueue_copy(view, second, device.compute)
    assert device.download(view).tolist() == second.tolist()
    assert small.tolist() == list(range(10))
    assert large.tolist() == first.tolist()


def test_steps_are_told_through_the_table(device: CudaDevice) -> None:
    """Position, rows, pending rows and tokens of each step, however many are begun one after the other."""
    for number in range(12):
        tokens = list(range(number, number + 1 + number % 8))
        device.begin_step(inputs(tokens, position=100 + number, pending=number % 3))
        table = device.download(device._steps.memory)
        assert table[[STEP_POSITION, STEP_ROWS, STEP_PENDING]].tolist() == [100 + number, len(tokens), number % 3]
        assert table[STEP_TOKENS : STEP_TOKENS + len(tokens)].tolist() == tokens
    for number in range(12):   # more than wait in pinned memory
        device.begin_step(inputs([number] * (number + 1), position=number, phase=Phase.PREFILL))
    assert device.download(device._steps.memory)[[STEP_POSITION, STEP_ROWS]].tolist() == [11, 12]
    assert device.download(device._steps.tokens)[:12].tolist() == [11] * 12


def test_a_captured_step_is_done_at_every_launch_and_not_before(device: CudaDevice) -> None:
    """Its copies, and its inputs, which are those of the launch; counters and events of a capture mean nothing else."""
    source, target = pinned(device, np.zeros(64, np.int32)), device.arena_view(0, (64,), np.int32)
    source[:] = 7
    fences = []

    def work() -> None:
        device.copy.wait(device.compute.record())
        device.enqueue_copy(target, source, device.copy)
        fences.append(device.copy.record())
        assert not fences[0].done()
        device.compute.wait(fences[0])

    captured = device.capture(inputs([1, 2, 3]), work)
    assert device.counters().copy_calls == 0
    assert not device.download(target).any()
    for number in (1, 2):
        source[:] = number
        captured.launch(inputs([4, 5, 6], position=number))
        assert device.download(target).tolist() == [number] * 64
        assert device.download(device._steps.memory)[STEP_POSITION] == number
        assert (device.counters().copy_calls, device.counters().copy_bytes) == (number, number * 256)
    with pytest.raises(AssertionError, match="border of a capture"):
        device.compute.wait(fences[0])
    with pytest.raises(AssertionError, match="a fence of a graph"):
        fences[0].wait()


def test_a_fence_of_before_is_not_waited_for_in_a_capture(device: CudaDevice) -> None:
    """CUDA would refuse the whole capture; one that has passed is nothing to wait for."""
    fence = device.copy.record()
    device.capture(inputs([1]), lambda: device.compute.wait(PASSED))
    with pytest.raises(AssertionError, match="border of a capture"):
        device.capture(inputs([1]), lambda: device.compute.wait(fence))


def test_a_capture_that_fails_leaves_the_streams_usable(device: CudaDevice) -> None:
    """Half-made captures are dropped, joined or not: eager work and other captures go on, counters as before."""
    source, target = pinned(device, np.full(16, 5, np.int32)), device.arena_view(0, (16,), np.int32)

    def fail() -> None:
        device.enqueue_copy(target, source, device.copy)   # a branch that nobody joins
        raise DeviceError("a broken part; mend it")

    for _ in range(3):
        with pytest.raises(DeviceError, match="a broken part"):
            device.capture(inputs([1]), fail)
    assert device.counters().copy_calls == 0
    assert not device.download(target).any()
    device.enqueue_copy(target, source, device.copy)
    device.compute.wait(device.copy.record())
    assert device.download(target).tolist() == [5] * 16
    other = device.capture(inputs([1]), lambda: device.enqueue_copy(target[:8], source[8:], device.copy))
    other.launch(inputs([1]))
    device.compute.synchronize()
    assert device.counters().copy_calls == 2


def test_plan_tables_hold_the_last_plan_of_every_layer_and_width(device: CudaDevice) -> None:
    """Layers and widths do not share memory, and a plan that replaces another lies in the same place."""
    run = Run(0, 0, 4, 0)
    placed = {}
    for turn in (0, 1):
        for layer in (0, 1):
            for rows in (1, 8):
                slots = [*range(4), *(10 + 10 * turn + layer + 2 * rows + page for page in range(3))]
                plan = plan_layer(slots, [Chunk(range(4), run), Chunk(range(4, 7), None)], scratch_groups=32)
                loaded = device.ops.load_plan(layer, rows, plan)
                at = (loaded.header - int(device._plans._memory.ctypes.data)) // 4 if _is_host(device) else None
                assert placed.setdefault((layer, rows), loaded.header) == loaded.header
                if at is not None:
                    words = device.download(device._plans._memory).view(np.int32)[at:]
                    assert words[0] == 7
                    assert words[4 : 4 + 7].tolist() == slots
    assert len(set(placed.values())) == 4


def _is_host(device: CudaDevice) -> bool:
    assert device._plans is not None
    return isinstance(device._plans._memory, np.ndarray)


def test_events_are_used_again() -> None:
    """A fence that is forgotten gives its event back: steps make no new ones."""
    made: list[object] = []

    class Runtime:
        def event(self) -> object:
            made.append(object())
            return made[-1]

    runtime: Any = Runtime()
    pool = EventPool(runtime, 2)
    assert len(made) == 2
    for _ in range(10):
        first, second = pool.take(), pool.take()
        pool.give(first)
        pool.give(second)
    assert len(made) == 2
    taken = [pool.take() for _ in range(3)]
    assert len(made) == 3
    assert len(set(map(id, taken))) == 3


def test_pages_of_the_fast_kernel_have_its_order(device: CudaDevice) -> None:
    """Fragments where the kernel for them exists, rows elsewhere; the number of bytes is the same."""
    fast = PageGeometry(256, 2, 256, 256, KvType.Q8_0, KvType.Q4_0)
    other = PageGeometry(32, 2, 64, 64, KvType.Q8_0, KvType.Q4_0)
    assert device.page_layout(fast).order is PageOrder.FRAGMENTS
    assert device.page_layout(fast).page_bytes == fast.page_bytes
    assert device.page_layout(other) == other


def test_a_device_can_be_closed_twice(machine: Machine) -> None:
    """As ends of programs do."""
    device = machine.device()
    device.allocate_arena(256)
    device.close()
    device.close()


class Broken:
    """What CuPy's objects do after an error on the GPU."""

    ptr = 0

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")


def test_errors_of_cuda_are_ours() -> None:
    """Whatever is asked of streams, events and graphs after an error, one line says what failed."""
    event, stream = _CupyEvent(Broken()), _CupyStream(Broken(), lambda: None)
    graph = _CupyGraph(Broken(), Broken(), lambda: None)
    for call in (
        event.done, event.wait, stream.synchronize, graph.launch, lambda: stream.record(event),
        lambda: stream.wait(event),
    ):
        with pytest.raises(DeviceError, match=r"^CUDA failed in .*: cudaErrorIllegalAddress: an illegal [a-z ]+$"):
            call()
