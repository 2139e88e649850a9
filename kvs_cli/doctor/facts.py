"""What the probes found. None: not known, or not there to be asked. Sizes in bytes, rates in bytes per second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvs_core.device.cuda import unified
from kvs_core.device.cuda.about import Gpu
from kvs_core.device.cuda.nvml import Card
from kvs_core.device.cuda.nvrtc import KernelCache
from kvs_core.device.host.machine import BlasLibrary
from kvs_core.device.pinning import Pinned

SETTINGS = ("KVS_CACHE_DIR", "CUDA_VISIBLE_DEVICES", unified.VARIABLE, "OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE")
"""Variables that change what kvs finds here, or are thought to."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Of a GPU: copies from pinned memory to it and back, and within its memory, bytes read and written."""

    to_device: float
    to_host: float
    within: float


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """problem: why kvs cannot use it, in one line.

    card: what NVML says, the link while copies ran if they did; without NVML the free memory alone
    """

    gpu: Gpu
    problem: str | None = None
    card: Card | None = None
    rates: Rates | None = None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """load_problem, cpu_problem: why kvs cannot be loaded, or cannot compute on the CPU.

    memlock_bytes  that a process may lock; None: not known, or ``memlock_is_unlimited``
    """

    system: str = ""
    python: str = ""
    version: str = ""
    is_linux: bool = True
    is_wsl: bool = False
    load_problem: str | None = None
    cpu: str | None = None
    cores: int | None = None
    instruction_sets: tuple[str, ...] | None = None
    blas: tuple[BlasLibrary, ...] | None = None
    cpu_problem: str | None = None
    ram_bytes: int | None = None
    ram_free_bytes: int | None = None
    ram_limit_bytes: int | None = None
    ram_rate: float | None = None
    memlock_bytes: int | None = None
    memlock_is_unlimited: bool | None = None


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """Of everything between kvs and GPUs; CUDA versions such as (13, 0).

    nvidia_cards    on the PCI bus, with a driver or without
    driver_version  NVIDIA's own, such as 580.65; driver_cuda: the newest CUDA that it knows
    *_problem       why it is not there or does not work, in one line
    source          who told of the cards: nvml or nvidia-smi
    pinned          what the first usable GPU could pin
    """

    nvidia_cards: int | None = None
    driver_version: str | None = None
    driver_cuda: tuple[int, int] | None = None
    driver_problem: str | None = None
    source: str | None = None
    gpus: tuple[GpuFacts, ...] = ()
    cupy_packages: tuple[str, ...] | None = None
    cupy_cuda: tuple[int, int] | None = None
    cupy_problem: str | None = None
    nvrtc: tuple[int, int] | None = None
    nvrtc_problem: str | None = None
    pinned: Pinned | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """All. settings: by name, None if not set. failed: what a probe that should have worked says, by its name."""

    host: HostFacts = HostFacts()
    cuda: CudaFacts = CudaFacts()
    cache: KernelCache | None = None
    settings: Mapping[str, str | None] = field(default_factory=lambda: MappingProxyType(dict.fromkeys(SETTINGS)))
    failed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def device(self) -> str | None:
        """What ``--device auto`` takes; None if there is nothing that works."""
        if self.cuda.gpus and self.cuda.gpus[0].problem is None:
            return "cuda:0"
        return "cpu" if self.host.cpu_problem is None else None
