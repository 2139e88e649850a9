"""What the host does in a round while a GPU waits: rounds of a device without a model's work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from kvs_core.device.cuda.device import CudaDevice
from kvs_core.device.cuda.hollow import hollow_device
from kvs_core.engine import host_part
from kvs_core.engine.engine import Engine
from kvs_core.engine.host_part import measure_host_part
from kvs_core.engine.measuring import launch_seconds
from kvs_core.memory.phases import Phase
from kvs_core.models.synthetic import synthetic_model
from kvs_core.settings.rooms import ContextSettings, KvSettings, RopeSettings
from tests.cuda_on_cpu.cpu_runtime import CpuGraph, CpuRuntime
from tests.cuda_on_cpu.launcher import CpuLauncher
from tests.engine.machines import MACHINES, machine_of

LAUNCH_S = 1e-3   # of every launch of captured work, as the stand-in's events have it
READ_S = 1e-4     # of the host, every time it reads what the device has left


class Clock:
    """A host that does nothing but read, a device that takes its time for captured work, and what was launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.sources: set[str] = set()
        launch, download, compute = CpuGraph.launch, CudaDevice.download, CpuLauncher.launch

        def timed_launch(graph: CpuGraph) -> None:
            self.now += LAUNCH_S
            launch(graph)

        def timed_download(device: CudaDevice, buffer: Any) -> Any:
            self.now += READ_S
            return download(device, buffer)

        def noted(launcher: CpuLauncher, kernel: Any, *args: Any, **more: Any) -> None:
            self.sources.add(kernel.source)
            compute(launcher, kernel, *args, **more)

        monkeypatch.setattr(CpuGraph, "launch", timed_launch)
        monkeypatch.setattr(CudaDevice, "download", timed_download)
        monkeypatch.setattr(CpuLauncher, "launch", noted)
        monkeypatch.setattr(host_part, "perf_counter", lambda: self.now)


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    with closing(CudaDevice(CpuRuntime())) as made:
        yield made


def test_the_host_part_by_hand(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round reads ids and values once for its step, and once for each draft: that is what no launch covers. Of the
    model's kernels none runs."""
    clock = Clock(monkeypatch)
    found = measure_host_part(device, 1e9)
    assert found == {"round": pytest.approx(2 * READ_S), "draft": pytest.approx(2 * READ_S)}
    assert clock.sources == {"sample.cu"}


def test_times_are_never_nothing(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rounds with drafts seem to be no longer, a rate is still a number that can be kept."""
    monkeypatch.setattr(host_part, "perf_counter", lambda: 0.0)
    assert measure_host_part(device, 1e9) == {"round": 1e-6, "draft": 1e-6}


def test_captured_work_takes_its_time(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch copies at least as many bytes as were asked for, in pieces; and nothing else does."""
    monkeypatch.setattr("kvs_core.device.cuda.hollow._PIECE_BYTES", 3000)
    copies: list[int] = []
    copy = CpuRuntime.enqueue_copy

    def noted(runtime: CpuRuntime, dst: int, src: int, size_bytes: int, stream: Any) -> None:
        copies.append(size_bytes)
        copy(runtime, dst, src, size_bytes, stream)

    monkeypatch.setattr(CpuRuntime, "enqueue_copy", noted)
    engine = Engine(
        synthetic_model("tiny:q8_0"), hollow_device(device, 10_000), context=ContextSettings(ctx_size=256, ubatch=64),
        kv=KvSettings(), rope=RopeSettings(),
    )
    with closing(engine), launch_seconds(engine) as spent_s:
        for count in (1, 1, 2):
            with engine.step([0] * count, Phase.DECODE) as step:
                step.logits()
                step.settle()
        assert engine._captured.recorded == 2   # widths of one and of two rows
        assert copies.count(3000) == 2 * 4
        assert spent_s() == pytest.approx(3 * LAUNCH_S)
        assert spent_s() == 0.0


@pytest.mark.parametrize("name", MACHINES)
def test_the_host_part_is_measured(name: str) -> None:
    """By the real clock: times that a host takes; the stand-in's are long, for its kernels are the host's work."""
    machine = machine_of(name)
    with closing(machine.device()) as device:
        found = measure_host_part(device, machine.choose(1e9, 1e12))
    assert found.keys() == {"round", "draft"}
    assert all(1e-6 <= seconds < machine.choose(1.0, 3e-3) for seconds in found.values()), found
