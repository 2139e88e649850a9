"""Memory that cannot be pinned: what bytes pass through instead, what takes another place, and what is said of it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvs_core.device import pageable
from kvs_core.device.cuda import stage as stage_module
from kvs_core.device.cuda.device import CudaDevice
from kvs_core.device.cuda.stage import Stage
from kvs_core.device.pageable import PageableBytes, pageable_bytes
from kvs_core.device.shortage import pinning_advice, pinning_advice_here
from kvs_core.errors import DeviceMemoryError
from kvs_core.formats.gguf import GgufFile
from kvs_core.units import MIB
from tests.cuda_on_cpu.cpu_runtime import CpuRuntime
from tests.support.tiny_gguf import write_tiny_llama

SIZE = 1 << 20


def device_on(runtime: Any) -> CudaDevice:
    return CudaDevice(runtime)


class LittlePinned(CpuRuntime):
    """Pins pieces of ``most`` bytes at most; ``pinned`` are the sizes. A probe of the link larger than that fails."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.pinned: list[int] = []
        self.probed: list[int] = []

    def allocate_pinned(self, size_bytes: int, purpose: str) -> np.ndarray:
        if size_bytes > self.most:
            raise DeviceMemoryError(f"no pinned memory for {purpose}")
        self.pinned.append(size_bytes)
        return super().allocate_pinned(size_bytes, purpose)

    def measure_copies(self, size_bytes: int, times: int) -> float:
        self.probed.append(size_bytes)
        if size_bytes > self.most:
            raise DeviceMemoryError("no pinned memory for a probe of the link")
        return 7e9


@pytest.mark.parametrize(
    ("most", "pieces", "said"),
    [
        (8 * MIB, 8 * MIB, None),
        (3 * MIB, 2 * MIB, "16 MiB of RAM for a test cannot be pinned: they pass through 4.0 MiB, more slowly; "),
        (MIB // 4, MIB // 4, "16 MiB of RAM for a test cannot be pinned: they pass through 0.5 MiB, more slowly; "),
        (1000, None, "16 MiB of RAM for a test cannot be pinned: they pass through RAM that is not pinned, more slow"),
    ],
)
def test_pieces_are_as_large_as_can_be_pinned(
    caplog: pytest.LogCaptureFixture, most: int, pieces: int | None, said: str | None
) -> None:
    """Else they are RAM that is not pinned. That is said once, however often they are opened."""
    runtime: Any = LittlePinned(most)
    made = Stage(runtime, "a test", 8 * MIB)
    for _ in range(2):
        first, second, again = made.next(), made.next(), made.next()
        assert first is again
        assert not np.shares_memory(first, second)
        assert [first.nbytes, second.nbytes] == [pieces or MIB // 4] * 2
        assert isinstance(first, PageableBytes) == (pieces is None)
        made.close()
    assert runtime.pinned == ([] if pieces is None else [pieces] * 4)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (said is not None)
    assert all(line.startswith(said or "") and line.endswith(pinning_advice_here()) for line in lines)


@pytest.mark.parametrize("most", [1 << 30, MIB, 1000])
def test_weights_arrive_whatever_can_be_pinned(most: int) -> None:
    """Through large pieces, small ones or none that are pinned: the same bytes. Loading that is broken off leaves no
    thread that reads."""
    runtime = LittlePinned(1 << 30)
    device = device_on(runtime)
    runtime.most = most
    values = np.random.default_rng(1).integers(0, 255, 5 * MIB + 17, np.uint8)
    assert (np.asarray(device._files.upload(values)) == values).all()
    assert any(thread.name.startswith("kvs-read") for thread in threading.enumerate()) == (most > MIB)
    device.close()
    assert not any(thread.name.startswith("kvs-read") for thread in threading.enumerate())


def test_a_table_that_cannot_be_pinned_lies_on_the_gpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its bytes are the same, it counts as weights, and it is said for which tensor."""
    info = GgufFile.open(write_tiny_llama(tmp_path / "m.gguf", seed=1, weight_type="q8_0")).tensors["token_embd.weight"]
    runtime = LittlePinned(1 << 30)
    device = device_on(runtime)
    before, runtime.most = runtime.allocations, info.n_bytes - 1
    table: Any = device.load_table(info)
    assert (np.asarray(table.sections[0].rows) == info.data[:]).all()
    assert runtime.allocations == before + 1
    assert device.memory_report()["weights"] == info.n_bytes
    assert "it takes memory of the GPU instead: no pinned memory for tensor token_embd.weight" in caplog.text
    device.close()


def test_the_link_is_measured_with_what_can_be_pinned() -> None:
    """64 MiB, or half of it, down to 1 MiB; less is an error."""
    runtime = LittlePinned(1 << 30)
    device = device_on(runtime)
    runtime.most = 1000
    with pytest.raises(DeviceMemoryError, match="a probe of the link"):
        device.link_bytes_per_s()
    assert runtime.probed == [64 * MIB >> step for step in range(7)]
    runtime.most = 20 * MIB
    assert device.link_bytes_per_s() == 7e9
    assert runtime.probed[7:] == [64 * MIB, 32 * MIB, 16 * MIB]
    device.close()


def test_what_the_host_waits_for_needs_no_pinned_memory() -> None:
    """Downloads and uploads of any size."""
    runtime = LittlePinned(1 << 30)
    device = device_on(runtime)
    runtime.most = 0
    buffer = device.allocate((1000,), np.float32)
    values = np.arange(1000, dtype=np.float32)
    device.upload(buffer, values)
    got = device.download(buffer)
    assert (got == values).all()
    assert type(got) is np.ndarray
    device.close()


def test_ram_that_is_not_there_is_not_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both numbers are told; what can be had is cleared, and its views tell that it is not pinned."""
    memory = pageable_bytes(SIZE, "a test")
    assert not memory.any()
    assert isinstance(memory[5:10].reshape(-1), PageableBytes)
    monkeypatch.setattr(pageable, "available_ram_bytes", lambda: SIZE - 1)
    with pytest.raises(DeviceMemoryError, match=r"^1 MiB of RAM for a test cannot be had: \d+ of \d+ MiB are free"):
        pageable_bytes(SIZE, "a test")


def test_the_advice_is_of_the_machine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The one that ``kvs doctor`` gives."""
    assert ".wslconfig" in pinning_advice(is_wsl=True, is_limited=True)
    assert "--ulimit memlock=-1" in pinning_advice(is_wsl=False, is_limited=True)
    assert "--ctx-size" in pinning_advice(is_wsl=False, is_limited=False)
    runtime: Any = LittlePinned(0)
    monkeypatch.setattr(stage_module, "pinning_advice_here", lambda: pinning_advice(is_wsl=True, is_limited=False))
    with caplog.at_level(logging.WARNING):
        Stage(runtime, "a test", MIB).open()
    assert caplog.records[0].getMessage().endswith("; " + pinning_advice(is_wsl=True, is_limited=False))
