"""The probes, one guarded attempt each: what one of them runs into is a line of the report and stops no other."""

from __future__ import annotations

import importlib
import logging
import os
import platform
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import TypeVar

import numpy  # noqa: F401  loads the BLAS that is asked about

from kvs_cli.doctor.facts import SETTINGS, CudaFacts, Facts, GpuFacts, HostFacts, Rates
from kvs_core.device.base import Device
from kvs_core.device.choose import open_device
from kvs_core.device.cuda.about import (
    Gpu,
    check_compiler,
    cupy_packages,
    driver_facts,
    nvidia_cards,
    nvrtc_version,
)
from kvs_core.device.cuda.modules import cupy_cuda, find_cuda
from kvs_core.device.cuda.nvml import Card, Cards, PcieLink, read_cards
from kvs_core.device.cuda.nvrtc import kernel_cache
from kvs_core.device.cuda.requirements import LEAST_ARCH
from kvs_core.device.host.device import HostDevice
from kvs_core.device.host.machine import (
    available_cores,
    available_ram_bytes,
    blas_libraries,
    cpu_model,
    instruction_sets,
    is_wsl,
    locked_limit_bytes,
    memory_limit_bytes,
    total_ram_bytes,
)
from kvs_core.device.pinning import Pinned, pin_stepwise
from kvs_core.engine.rates import measure_gpu
from kvs_core.errors import KvsError
from kvs_core.settings.rooms import DeviceSettings
from kvs_core.units import MIB

LOGGER = logging.getLogger(__name__)

_MOST_PINNED_BYTES, _SLAB_BYTES = 2048 * MIB, 64 * MIB
_PINNED_SHARE = 4   # of the free RAM one such part at most
_NEEDED = ("kvs_cli.commands.serve", "jinja2", "huggingface_hub")   # the last two are imported when they are used

_T = TypeVar("_T")


class _Probes:
    """failed: by a probe's name, what it ran into, in one line."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}

    def ask(self, name: str, probe: Callable[[], _T]) -> _T | None:
        """The probe's answer, or None if it fails."""
        answer, self.failed[name] = _attempt(probe)
        if not self.failed[name]:
            del self.failed[name]
        return answer


def gather(version: str) -> Facts:
    """Everything, in a few seconds; ``version``: of kvs. Never raises for what it finds."""
    probes = _Probes()
    LOGGER.info("looking at this machine; copies are measured, which takes some seconds")
    host = _host(probes, version)
    cuda = _cuda(probes, host.ram_free_bytes)
    cache = probes.ask("kernel cache", kernel_cache)
    return Facts(host, cuda, cache, {name: os.environ.get(name) for name in SETTINGS}, probes.failed)


def _host(probes: _Probes, version: str) -> HostFacts:
    blas = probes.ask("BLAS", blas_libraries)   # before a device gives it one thread
    _, load_problem = _attempt(lambda: [importlib.import_module(name) for name in _NEEDED])
    rate, cpu_problem = _attempt(_ram_rate)
    unlimited, memlock = probes.ask("memlock limit", _memlock) or (None, None)
    return HostFacts(
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        version=version,
        is_linux=sys.platform == "linux",
        is_wsl=bool(probes.ask("WSL", is_wsl)),
        load_problem=load_problem or None,
        cpu=probes.ask("CPU model", cpu_model),
        cores=probes.ask("cores", available_cores),
        instruction_sets=probes.ask("instruction sets", instruction_sets),
        blas=blas,
        cpu_problem=cpu_problem or None,
        ram_bytes=probes.ask("RAM", total_ram_bytes),
        ram_free_bytes=probes.ask("free RAM", available_ram_bytes),
        ram_limit_bytes=probes.ask("container limit", memory_limit_bytes),
        ram_rate=rate,
        memlock_bytes=memlock,
        memlock_is_unlimited=unlimited,
    )


def _cuda(probes: _Probes, ram_free_bytes: int | None) -> CudaFacts:
    cards = probes.ask("NVML", read_cards)
    driver, driver_problem = _attempt(driver_facts)
    knows = None if driver is None else driver.cuda
    cupy, cupy_problem = _attempt(lambda: cupy_cuda(knows))
    nvrtc, nvrtc_problem = _attempt(nvrtc_version)
    found = () if driver is None else driver.gpus
    if nvrtc is not None:
        _, nvrtc_problem = _attempt(lambda: check_compiler(max(found[0].arch, LEAST_ARCH) if found else LEAST_ARCH))
    facts = CudaFacts(
        nvidia_cards=probes.ask("PCI bus", nvidia_cards),
        driver_version=None if cards is None else cards.driver,
        driver_cuda=knows,
        driver_problem=driver_problem or None,
        source=None if cards is None else cards.source,
        cupy_packages=probes.ask("CuPy packages", cupy_packages),
        cupy_cuda=cupy,
        cupy_problem=cupy_problem or None,
        nvrtc=nvrtc,
        nvrtc_problem=nvrtc_problem or None,
    )
    for gpu in found:
        most = min(_MOST_PINNED_BYTES, (ram_free_bytes or 0) // _PINNED_SHARE) if facts.pinned is None else 0
        one, pinned = _gpu(probes, gpu, cards, most)
        facts = replace(facts, gpus=(*facts.gpus, one), pinned=facts.pinned or pinned)
    return facts


def _gpu(probes: _Probes, gpu: Gpu, cards: Cards | None, pin_bytes: int) -> tuple[GpuFacts, Pinned | None]:
    """A GPU, and what it could pin of ``pin_bytes``."""
    answer, failure = _attempt(lambda: find_cuda(gpu.index))
    problem = failure or (answer if isinstance(answer, str) else None)
    card = _card_of(cards, gpu)
    if problem is not None:
        return GpuFacts(gpu, problem, card), None
    device, failure = _attempt(lambda: open_device(DeviceSettings(f"cuda:{gpu.index}")))
    if device is None:
        return GpuFacts(gpu, failure, card), None
    name, pinned = f"cuda:{gpu.index}", None
    if card is None:   # the driver tells what is left when this program has its part, and not who holds the rest
        card = Card(None, probes.ask(f"{name} memory", device.free_bytes), None, PcieLink())
    rates = probes.ask(f"{name} rates", lambda: _gpu_rates(device))
    awake = _card_of(probes.ask("NVML", read_cards), gpu)   # now that copies have woken the link
    if pin_bytes:
        pinned = probes.ask(f"{name} pinned memory", lambda: pin_stepwise(device, pin_bytes, _SLAB_BYTES))
    probes.ask(f"{name} closing", device.close)
    if awake is not None:
        card = replace(card, link=awake.link)
    return GpuFacts(gpu, None, card, rates), pinned


def _card_of(cards: Cards | None, gpu: Gpu) -> Card | None:
    return None if cards is None else cards.by_address.get(gpu.address)


def _gpu_rates(device: Device) -> Rates:
    numbers = measure_gpu(device)
    return Rates(numbers["link"], numbers["back"], numbers["memory"])


def _ram_rate() -> float:
    with closing(HostDevice(1)) as device:
        return device.link_bytes_per_s()


def _memlock() -> tuple[bool, int | None]:
    """Whether there is no limit, else its bytes."""
    limit = locked_limit_bytes()
    return limit is None, limit


def _attempt(probe: Callable[[], _T]) -> tuple[_T | None, str]:
    """The answer, and what went wrong instead, in one line; empty if nothing did."""
    try:
        return probe(), ""
    except KvsError as error:
        return None, str(error)
    except Exception as error:   # whatever is broken: the report is about that
        said = str(error).strip().splitlines()
        return None, f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
