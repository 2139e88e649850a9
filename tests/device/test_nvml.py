"""NVML through its package or through nvidia-smi: the same facts, and None for what a GPU does not tell."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvs_core.device.cuda.nvml import Card, Cards, Holder, PcieLink, pci_address, read_cards
from kvs_core.errors import DeviceError
from kvs_core.units import MIB


class Nvml:
    """pynvml with two GPUs, of which the second tells nothing but its memory."""

    class NVMLError(Exception):
        pass

    def __init__(self, init: str = "") -> None:
        self.init = init
        self.open = 0

    def nvmlInit(self) -> None:
        if self.init:
            raise self.NVMLError(self.init)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.65.06"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:0{handle + 1}:00.0".encode())

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=1000 * MIB, free=(600 + handle) * MIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        self.tell(handle)
        return [SimpleNamespace(pid=5, usedGpuMemory=300 * MIB), SimpleNamespace(pid=6, usedGpuMemory=None)]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[Any]:
        self.tell(handle)
        return [SimpleNamespace(pid=5, usedGpuMemory=300 * MIB)]

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        if pid == 6:
            raise self.NVMLError("Not Found")
        return "/usr/bin/python"

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        return self.tell(handle, 1)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return self.tell(handle, 4)

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return self.tell(handle, 8)

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return self.tell(handle, 16)

    def tell(self, handle: int, value: int = 0) -> int:
        if handle:
            raise self.NVMLError("Not Supported")
        return value


def test_the_package_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fact; a process that is listed twice is one; the library is closed again."""
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)   # type: ignore[arg-type]
    assert read_cards() == Cards("nvml", "580.65.06", {
        "0000:01:00.0": Card(1000 * MIB, 600 * MIB, (Holder(5, "/usr/bin/python", 300 * MIB), Holder(6, None, None)),
                             PcieLink(1, 4, 8, 16)),
        "0000:02:00.0": Card(1000 * MIB, 601 * MIB, None, PcieLink()),
    })
    assert nvml.open == 0


def test_a_package_without_its_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is installed and the driver is not."""
    monkeypatch.setitem(sys.modules, "pynvml", Nvml("Library Not Found"))   # type: ignore[arg-type]
    with pytest.raises(DeviceError, match=r"^NVML failed: Library Not Found; look at nvidia-smi"):
        read_cards()


SMI = """#!/bin/sh
case "$1" in
*compute-apps*) echo "00000000:01:00.0, 5, 300, /usr/bin/a, b"; echo "00000000:01:00.0, 6, [N/A], [Not Found]"; echo;;
*) echo "00000000:01:00.0, 580.65.06, 1000, 600, 1, 4, 8, 16"
   echo "00000000:02:00.0, 580.65.06, 1000, 601, [N/A], [N/A], [N/A], [N/A]";;
esac
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program nvidia-smi, to be written, and no package."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "nvidia-smi"


def write(program: Path, text: str) -> None:
    program.write_text(text)
    program.chmod(0o755)


def test_without_the_package_the_program_is_asked(smi: Path) -> None:
    """The same facts, also of a process with a comma in its name and of one that has none."""
    write(smi, SMI)
    assert read_cards() == Cards("nvidia-smi", "580.65.06", {
        "0000:01:00.0": Card(1000 * MIB, 600 * MIB, (Holder(5, "/usr/bin/a, b", 300 * MIB), Holder(6, None, None)),
                             PcieLink(1, 4, 8, 16)),
        "0000:02:00.0": Card(1000 * MIB, 601 * MIB, (), PcieLink()),
    })


@pytest.mark.parametrize(
    ("text", "said"),
    [("#!/bin/sh\necho it broke; exit 9\n", "nvidia-smi failed: it broke; install"),
     ("#!/bin/sh\nexit 9\n", "nvidia-smi failed: exit code 9; install"),
     ("#!/nowhere\n", "nvidia-smi does not answer: .*; install")],
)
def test_a_program_that_fails_is_one_line(smi: Path, text: str, said: str) -> None:
    """What it says itself, or how it ended."""
    write(smi, text)
    with pytest.raises(DeviceError, match=f"^{said}"):
        read_cards()


def test_without_both_nothing_is_known(smi: Path) -> None:
    """And nothing is wrong."""
    assert read_cards() is None


def test_addresses_are_written_as_the_driver_does() -> None:
    """Domains of eight and of four digits are one."""
    assert pci_address("00000000:C1:00.0") == pci_address(" 0000:c1:00.0\n") == "0000:c1:00.0"
    assert pci_address("00010000:01:00.0") == "10000:01:00.0"
