"""What is installed for GPUs, asked one thing at a time, so that one that is missing or broken hides no other."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvs_core.device.cuda.driver import Driver
from kvs_core.device.cuda.nvrtc import compile_only, nvrtc
from kvs_core.device.cuda.requirements import LEAST_ARCH

_PROBE_SOURCE = "zero_page.cu"   # the shortest
_CUPY_PACKAGES = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
_PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"   # vendor; class of graphics cards and of GPUs without a screen


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the driver counts them. arch: compute capability times ten; address: on the PCI bus."""

    index: int
    name: str
    arch: int
    memory_bytes: int
    address: str


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """cuda: the newest that it knows, such as (13, 0)."""

    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]


def driver_facts() -> DriverFacts:
    """The driver and the GPUs that it shows this process. ``DeviceError`` if there is none."""
    driver = Driver()
    return DriverFacts(driver.cuda_version, tuple(
        Gpu(index, driver.name(index), driver.arch(index), driver.memory_bytes(index), driver.pci_address(index))
        for index in range(driver.gpus)
    ))


def nvidia_cards() -> int | None:
    """NVIDIA's GPUs on the PCI bus, with a driver or without; None where Linux shows no bus."""
    try:
        devices = list(_PCI.iterdir())
        return sum(
            (device / "vendor").read_text().strip() == _NVIDIA
            and (device / "class").read_text().startswith(_DISPLAY)
            for device in devices
        )
    except OSError:
        return None


def cupy_packages() -> tuple[str, ...]:
    """Names and versions of all that bring the module cupy: more than one break each other."""
    found = []
    for name in _CUPY_PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return tuple(found)


def nvrtc_version() -> tuple[int, int]:
    """``DeviceError`` if NVRTC is not installed."""
    return nvrtc().version


def check_compiler(arch: int = LEAST_ARCH) -> None:
    """Compile a short source for ``arch``, without the cache. ``DeviceError`` if that fails."""
    compile_only(_PROBE_SOURCE, (), f"sm_{arch}")
