"""What NVIDIA's management library knows of the GPUs: memory, who holds it, and the PCIe link.

Asked through ``nvidia-ml-py`` (module pynvml) if it is installed, else by nvidia-smi if that is there; kvs needs
neither. What a GPU or a virtual machine does not tell is None.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvs_core.errors import DeviceError
from kvs_core.units import MIB

_SMI_S = 20   # after which nvidia-smi is given up
_SMI_GPU = ("pci.bus_id", "driver_version", "memory.total", "memory.free", "pcie.link.gen.current",
            "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max")
_SMI_PROCESS = ("gpu_bus_id", "pid", "used_memory", "process_name")   # a name may have commas, so it comes last


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds memory of a GPU."""

    pid: int
    name: str | None
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class PcieLink:
    """Generation and lanes, now and at most with this GPU in this machine. An idle GPU lowers its generation."""

    gen: int | None = None
    max_gen: int | None = None
    width: int | None = None
    max_width: int | None = None


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU. holders: None where nobody tells; they are seen in this container alone."""

    total_bytes: int | None
    free_bytes: int | None
    holders: tuple[Holder, ...] | None
    link: PcieLink


@dataclass(frozen=True, slots=True)
class Cards:
    """All GPUs, by PCI address as the driver writes it, such as 0000:01:00.0; driver: its version, such as 580.65."""

    source: Literal["nvml", "nvidia-smi"]
    driver: str | None
    by_address: Mapping[str, Card]


def read_cards() -> Cards | None:
    """All GPUs now; None if neither source is installed. ``DeviceError`` if one is and does not work."""
    try:
        import pynvml
    except ImportError:
        return _from_smi() if shutil.which("nvidia-smi") else None
    try:
        return _from_nvml(pynvml)
    except pynvml.NVMLError as error:
        raise DeviceError(f"NVML failed: {error}; look at nvidia-smi, and install the driver again") from error


def pci_address(text: str) -> str:
    """NVML writes eight digits for the domain, the driver four."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _from_nvml(nvml: Any) -> Cards:
    def tell(name: str, *args: Any) -> Any:
        try:
            return getattr(nvml, name)(*args)
        except (nvml.NVMLError, AttributeError):   # an older GPU, library or package does not have it
            return None

    def card(handle: Any) -> Card:
        memory = tell("nvmlDeviceGetMemoryInfo", handle)
        return Card(
            None if memory is None else int(memory.total),
            None if memory is None else int(memory.free),
            _nvml_holders(tell, handle),
            PcieLink(
                tell("nvmlDeviceGetCurrPcieLinkGeneration", handle), tell("nvmlDeviceGetMaxPcieLinkGeneration", handle),
                tell("nvmlDeviceGetCurrPcieLinkWidth", handle), tell("nvmlDeviceGetMaxPcieLinkWidth", handle),
            ),
        )

    nvml.nvmlInit()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        by_address = {pci_address(_str(nvml.nvmlDeviceGetPciInfo(handle).busId)): card(handle) for handle in handles}
        driver = tell("nvmlSystemGetDriverVersion")
    finally:
        nvml.nvmlShutdown()
    return Cards("nvml", None if driver is None else _str(driver), by_address)


def _nvml_holders(tell: Callable[..., Any], handle: Any) -> tuple[Holder, ...] | None:
    lists = [tell(f"nvmlDeviceGet{kind}RunningProcesses", handle) for kind in ("Compute", "Graphics")]
    if lists == [None, None]:
        return None
    found = {}
    for process in (process for each in lists for process in each or ()):
        name = tell("nvmlSystemGetProcessName", process.pid)
        found[process.pid] = Holder(process.pid, None if name is None else _str(name), process.usedGpuMemory)
    return tuple(found.values())


def _from_smi() -> Cards:
    holders: dict[str, list[Holder]] = {}
    for address, pid, mib, name in _smi("compute-apps", _SMI_PROCESS):
        number = _number(pid)
        if number is not None:
            known = None if name.startswith("[") else name   # [Not Found], [Insufficient Permissions]
            holders.setdefault(pci_address(address), []).append(Holder(number, known, _mib(mib)))
    driver, by_address = None, {}
    for address, version, total, free, *link in _smi("gpu", _SMI_GPU):
        driver, at = version, pci_address(address)
        by_address[at] = Card(_mib(total), _mib(free), tuple(holders.get(at, ())), PcieLink(*map(_number, link)))
    return Cards("nvidia-smi", driver, by_address)


def _smi(what: str, fields: tuple[str, ...]) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SMI_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeviceError(f"nvidia-smi does not answer: {error}; install the NVIDIA driver again") from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise DeviceError(
            f"nvidia-smi failed: {said[0] if said else f'exit code {done.returncode}'}; install the NVIDIA driver again"
        )
    rows = (line.strip().split(", ", len(fields) - 1) for line in done.stdout.splitlines())
    return [row for row in rows if len(row) == len(fields)]


def _number(text: str) -> int | None:
    """None for what nvidia-smi does not know: [N/A], [Not Supported]."""
    return int(text) if text.strip().isdecimal() else None


def _mib(text: str) -> int | None:
    number = _number(text)
    return None if number is None else number * MIB


def _str(text: str | bytes) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else text
