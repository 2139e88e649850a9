"""Verdicts on the driver, CuPy, NVRTC, pinned memory and each GPU. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kvs_cli.doctor.check import Check, gb_per_s, problem, size, told, warning
from kvs_cli.doctor.facts import CudaFacts, Facts, GpuFacts
from kvs_core.device.cuda.nvml import Holder, PcieLink
from kvs_core.device.cuda.requirements import (
    LEAST_ARCH,
    arch_problem,
    cupy_problem,
    dotted,
    driver_problem,
    extra,
    nvrtc_problem,
)
from kvs_core.device.shortage import pinning_advice
from kvs_core.units import MIB

_LEAST_FREE_BYTES = 512 * MIB   # contexts of CUDA and cuBLAS, and the smallest model
_LITTLE_FREE_SHARE = 0.5
_FEW_LANES = 4
_LANE_RATES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.56e9}   # bytes/s each way, by generation
_LINK_SHARE = 0.6               # of the lanes' rate; healthy links reach 0.8 and more
_LITTLE_PINNED_BYTES = 256 * MIB
_SHOWN_HOLDERS = 3
_DRIVER = "look whether nvidia-smi works; if not, start the machine again or install NVIDIA's driver again"


def gpu_checks(facts: Facts) -> Iterator[Check]:
    """In the order of the table."""
    cuda = facts.cuda
    yield _driver(facts)
    for each in cuda.gpus:
        yield from _gpu(each)
    yield _cupy(cuda)
    yield _nvrtc(cuda)
    yield _pinned(facts)


def _driver(facts: Facts) -> Check:
    cuda = facts.cuda
    if cuda.driver_cuda is not None:
        version = "" if cuda.driver_version is None else f"{cuda.driver_version}, "
        if line := driver_problem(cuda.driver_cuda):
            return told("driver", f"{version}{line}", _DRIVER)
        return Check("driver", f"{version}knows CUDA {dotted(cuda.driver_cuda)}")
    said = cuda.driver_problem or "not known"
    found = said.partition("; ")[0]
    if facts.host.is_wsl:
        return warning("driver", found, "for a GPU update NVIDIA's driver in Windows, and install none in WSL")
    hidden = facts.settings.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and "sees no GPU" in said:
        return warning("driver", found, f"unset CUDA_VISIBLE_DEVICES, which is {hidden!r}, to use one")
    if cuda.nvidia_cards:
        return told("driver", said, _DRIVER)
    if cuda.nvidia_cards is None:
        return warning("driver", found, "if there is an NVIDIA GPU, install its driver")
    return Check("driver", f"{found}; there is no NVIDIA GPU on the bus either")


def _gpu(facts: GpuFacts) -> Iterator[Check]:
    gpu, card = facts.gpu, facts.card
    name = f"cuda:{gpu.index}"
    described = f"{gpu.name}, compute capability {gpu.arch / 10}"
    if arch_problem(gpu.index, gpu.name, gpu.arch):
        yield problem(name, f"{described}", f"use a GPU of {LEAST_ARCH / 10} or newer, or --device cpu")
    elif facts.problem is not None:
        yield told(name, f"{described}: {facts.problem}", _DRIVER)
    else:
        yield Check(name, described)
    free = None if card is None else card.free_bytes
    if card is not None and free is not None:
        yield _memory(f"{name} memory", free, card.total_bytes or gpu.memory_bytes, card.holders)
    else:
        yield Check(f"{name} memory", f"{size(gpu.memory_bytes)}; how much is free is not known")
    yield _link(f"{name} PCIe", PcieLink() if card is None else card.link)
    if facts.rates is not None:
        yield _rates(f"{name} rates", facts)


def _memory(name: str, free: int, total: int, holders: tuple[Holder, ...] | None) -> Check:
    biggest = sorted(holders or (), key=lambda holder: -(holder.size_bytes or 0))
    held = ", ".join(_holder(holder) for holder in biggest[:_SHOWN_HOLDERS])
    if len(biggest) > _SHOWN_HOLDERS:
        held += f" and {len(biggest) - _SHOWN_HOLDERS} others"
    if not held:
        held = "who holds the rest is not known" if holders is None or free < _LITTLE_FREE_SHARE * total else ""
    else:
        held = f"held by {held}"
    found = f"{size(free)} of {size(total)} free{f'; {held}' if held else ''}"
    if free < _LEAST_FREE_BYTES:
        return problem(name, found, "end the programs that hold it, or give --device cpu")
    if free < _LITTLE_FREE_SHARE * total:
        return warning(name, found, "end the programs that hold it, or take an arena and a model that fit what is free")
    return Check(name, found)


def _holder(holder: Holder) -> str:
    held = "" if holder.size_bytes is None else f" ({size(holder.size_bytes)})"
    return f"{holder.name or 'process'} [{holder.pid}]{held}"


def _link(name: str, link: PcieLink) -> Check:
    if link.gen is None and link.width is None:
        return Check(name, "not known")
    found = f"generation {_of(link.gen, link.max_gen)}, {_of(link.width, link.max_width)} lanes"
    if link.width is not None and link.max_width is not None and link.width < link.max_width:
        return warning(name, found, "seat the card again, or look for a riser, a shared slot or a setting of the BIOS: "
                       "pages stream at the link's rate")
    if link.width is not None and link.width <= _FEW_LANES:
        return warning(name, found, "put the card into a slot with 16 lanes: pages stream at the link's rate")
    if link.gen is not None and link.max_gen is not None and link.gen < link.max_gen:
        found += "; an idle GPU lowers its generation"
    return Check(name, found)


def _of(now: int | None, most: int | None) -> str:
    return f"{now or '?'}{'' if most is None else f' of {most}'}"


def _rates(name: str, facts: GpuFacts) -> Check:
    rates = facts.rates
    assert rates is not None
    found = (f"{gb_per_s(rates.to_device)} to the GPU, {gb_per_s(rates.to_host)} back, {gb_per_s(rates.within)} within "
             "its memory")
    link = PcieLink() if facts.card is None else facts.card.link
    if link.max_gen in _LANE_RATES and link.max_width:
        could = _LANE_RATES[link.max_gen] * link.max_width
        slower = min(rates.to_device, rates.to_host)
        if slower < _LINK_SHARE * could:
            return warning(name, f"{found}; the link could carry {gb_per_s(could)}",
                           "end what else uses the link or the RAM; else look for a riser, a power plan or an IOMMU "
                           "setting, and run kvs doctor again")
    return Check(name, found)


def _cupy(cuda: CudaFacts) -> Check:
    packages = ", ".join(cuda.cupy_packages or ())
    if not cuda.gpus:
        return Check("CuPy", f"{packages or 'not installed'}; without a GPU it is not needed")
    again = f"pip install --force-reinstall '{extra(cuda.driver_cuda)}'"
    if len(cuda.cupy_packages or ()) > 1:
        return problem("CuPy", f"{packages}: they break each other",
                       f"pip uninstall all of them, then pip install '{extra(cuda.driver_cuda)}'")
    if cuda.cupy_cuda is not None:
        found = f"{packages or 'there'}, built for CUDA {dotted(cuda.cupy_cuda)}"
        line = "" if cuda.driver_cuda is None else cupy_problem(cuda.driver_cuda, cuda.cupy_cuda)
        return told("CuPy", line, again) if line else Check("CuPy", found)
    return told("CuPy", cuda.cupy_problem or "not known", again)


def _nvrtc(cuda: CudaFacts) -> Check:
    again = f"pip install --force-reinstall '{extra(cuda.driver_cuda)}'"
    if not cuda.gpus:
        version = "not installed" if cuda.nvrtc is None else dotted(cuda.nvrtc)
        return Check("NVRTC", f"{version}; without a GPU it is not needed")
    if cuda.nvrtc is None:
        return told("NVRTC", cuda.nvrtc_problem or "not known", again)
    if cuda.nvrtc_problem is not None:
        return told("NVRTC", f"{dotted(cuda.nvrtc)}: {cuda.nvrtc_problem}", again)
    line = "" if cuda.driver_cuda is None else nvrtc_problem(cuda.driver_cuda, cuda.nvrtc)
    return told("NVRTC", line, again) if line else Check("NVRTC", f"{dotted(cuda.nvrtc)}, compiles")


def _pinned(facts: Facts) -> Check:
    host, pinned = facts.host, facts.cuda.pinned
    if host.memlock_is_unlimited:
        limit = "no limit for locked memory"
    elif host.memlock_bytes is None:
        limit = "the limit for locked memory is not known"
    else:
        limit = f"the limit for locked memory is {host.memlock_bytes / MIB:,.2f} MiB"
    if not facts.cuda.gpus:
        return Check("pinned memory", f"{limit}; without a GPU nothing is pinned")
    advice = pinning_advice(is_wsl=host.is_wsl, is_limited=host.memlock_bytes is not None)
    if pinned is None:
        if host.memlock_bytes is not None and not host.memlock_is_unlimited:
            return warning("pinned memory", f"{limit}; nothing could be tried", advice)
        return Check("pinned memory", f"{limit}; nothing could be tried")
    found = f"{size(pinned.got_bytes)} pinned of {size(pinned.asked_bytes)} tried; {limit}"
    if pinned.got_bytes < min(_LITTLE_PINNED_BYTES, pinned.asked_bytes):
        return problem("pinned memory", found, advice)
    if pinned.got_bytes < pinned.asked_bytes:
        return warning("pinned memory", found, advice)
    return Check("pinned memory", found)
