"""Which device the settings lead to: GPUs are pretended, so that these hold on any machine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvs_core.device.choose import begin_opening, open_device
from kvs_core.device.cuda.device import CudaDevice
from kvs_core.device.cuda.modules import CudaFound
from kvs_core.device.host.device import HostDevice
from kvs_core.errors import DeviceError
from kvs_core.settings.rooms import DeviceSettings
from tests.cuda_on_cpu.cpu_runtime import CpuRuntime

Asked = list[int]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Asked]:
    """Pretend so many; the list tells which were asked for."""

    def pretend(count: int) -> Asked:
        asked: Asked = []

        def find(index: int = 0) -> CudaFound | str:
            asked.append(index)
            if index < count:
                return CudaFound(index, f"card {index}", 90, "13.0", "13.0")
            return f"there is no GPU {index}; get one" if count else "there is no driver; install one"

        def runtime(index: int) -> Any:
            opened: Any = CpuRuntime()
            opened.name = f"card {index}"
            return opened

        monkeypatch.setattr("kvs_core.device.cuda.modules.find_cuda", find)
        monkeypatch.setattr("kvs_core.device.cuda.cupy_runtime.CupyRuntime", runtime)
        return asked

    return pretend


@pytest.mark.parametrize(
    ("settings", "index"),
    [
        (DeviceSettings(), 0),
        (DeviceSettings("auto", main_gpu=1), 1),
        (DeviceSettings("cuda"), 0),
        (DeviceSettings("cuda", main_gpu=1), 1),
        (DeviceSettings("cuda:1"), 1),
        (DeviceSettings("cuda:0", main_gpu=1), 0),   # the name says more
        (DeviceSettings("auto", gpu_layers=99), 0),
    ],
)
def test_a_gpu_that_works_is_taken(
    gpus: Callable[[int], Asked], caplog: pytest.LogCaptureFixture, settings: DeviceSettings, index: int
) -> None:
    """By its index, by ``--main-gpu``, or the first one; and one line says which."""
    asked = gpus(2)
    with caplog.at_level(logging.INFO, "kvs_core"):
        device = open_device(settings)
    assert isinstance(device, CudaDevice)
    assert (device.name, asked) == (f"card {index}", [index])
    assert [f"device: cuda:{index}, card {index}, " in line for line in caplog.messages] == [True]
    device.close()


@pytest.mark.parametrize("settings", [DeviceSettings("cpu"), DeviceSettings("auto", gpu_layers=0)])
def test_who_wants_the_cpu_looks_for_no_gpu(gpus: Callable[[int], Asked], settings: DeviceSettings) -> None:
    """``--device cpu`` and ``--gpu-layers 0``."""
    asked = gpus(1)
    device = open_device(settings)
    assert isinstance(device, HostDevice)
    assert asked == []
    device.close()


def test_auto_without_a_gpu_says_why_and_takes_the_cpu(
    gpus: Callable[[int], Asked], caplog: pytest.LogCaptureFixture
) -> None:
    """Two lines: why there is no GPU, and what runs instead."""
    gpus(0)
    with caplog.at_level(logging.INFO, "kvs_core"):
        device = open_device(DeviceSettings(threads=1))
    assert isinstance(device, HostDevice)
    assert caplog.messages == [
        "device: no GPU is used: there is no driver; install one", f"device: {device.name}, 1 thread"
    ]
    device.close()


@pytest.mark.parametrize(
    ("count", "settings", "words"),
    [
        (0, DeviceSettings("cuda"), "--device cuda: there is no driver; install one"),
        (0, DeviceSettings("cuda:0"), "--device cuda:0: there is no driver; install one"),
        (1, DeviceSettings("cuda:3"), "--device cuda:3: there is no GPU 3; get one"),
        (1, DeviceSettings("cuda", main_gpu=2), "--device cuda: there is no GPU 2; get one"),
    ],
)
def test_a_gpu_that_was_asked_for_and_cannot_be_had_is_an_error(
    gpus: Callable[[int], Asked], count: int, settings: DeviceSettings, words: str
) -> None:
    """One line that names the setting and the reason: nothing else is taken in its place."""
    gpus(count)
    with pytest.raises(DeviceError) as caught:
        open_device(settings)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("settings", "index"), [(DeviceSettings(), 0), (DeviceSettings("cuda:1"), 1), (DeviceSettings("cpu"), None)]
)
def test_a_gpu_is_looked_for_ahead(
    gpus: Callable[[int], Asked], monkeypatch: pytest.MonkeyPatch, settings: DeviceSettings, index: int | None
) -> None:
    """In the background, and its context made; not for who wants the CPU."""
    asked, made = gpus(2), []

    class FakeDriver:
        def primary_context(self, gpu: int) -> None:
            made.append(gpu)

    monkeypatch.setattr("kvs_core.device.cuda.driver.Driver", FakeDriver)
    begin_opening(settings)
    for thread in threading.enumerate():
        if thread.name == "kvs-driver":
            thread.join(10)
    assert asked == made == ([] if index is None else [index])


def test_what_is_wrong_ahead_is_said_later(gpus: Callable[[int], Asked], caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is logged or raised in the background, whatever is missing."""
    raised: list[object] = []
    asked = gpus(0)
    hook, threading.excepthook = threading.excepthook, raised.append
    try:
        begin_opening(DeviceSettings())
        for thread in threading.enumerate():
            if thread.name == "kvs-driver":
                thread.join(10)
    finally:
        threading.excepthook = hook
    assert (asked, raised, caplog.messages) == ([0], [], [])
