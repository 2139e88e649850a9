"""What the machine has to give: cores and RAM, containers' limits included, and the BLAS's thread count."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")
_PROC_VERSION = Path("/proc/version")
_INSTRUCTION_SETS = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile",
                     "asimd", "asimdhp", "asimddp", "sve", "sve2")


def available_cores() -> int:
    """Physical cores that this process may use: hardware threads of one core share its arithmetic and count once."""
    if hasattr(os, "sched_getaffinity"):
        cpus = os.sched_getaffinity(0)
    else:
        cpus = set(range(os.cpu_count() or 1))
    cores = {_text(_CPUS / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}
    count = len(cores)
    match (_text(_CGROUP / "cpu.max") or "").split():
        case [quota, period] if quota.isdecimal() and period.isdecimal():
            count = min(count, int(quota) // int(period))
    return max(1, count)


def available_ram_bytes() -> int:
    """RAM that can be taken without pushing anything else out, within the container's limit if there is one."""
    available = _meminfo_bytes("MemAvailable")
    if available is None:
        available = total_ram_bytes()
    limit = memory_limit_bytes()
    if limit is not None:
        folder, _, used_name, prefix = _memory_cgroup()
        used = _text(folder / used_name)
        if used and used.isdecimal():
            # Pages of files count as used, but give way.
            stat = dict(line.split() for line in (_text(folder / "memory.stat") or "").splitlines())
            files = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            available = min(available, limit - max(0, int(used) - files))
    return max(0, available)


def total_ram_bytes() -> int:
    """The machine's RAM, whatever a container may have of it."""
    return _meminfo_bytes("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_limit_bytes() -> int | None:
    """The container's limit of RAM; None if there is none below what the machine has."""
    folder, limit_name, _, _ = _memory_cgroup()
    limit = _text(folder / limit_name)
    return int(limit) if limit and limit.isdecimal() and int(limit) < total_ram_bytes() else None


def locked_limit_bytes() -> int | None:
    """What a process may lock in RAM; None: no limit."""
    import resource  # not on every system

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def is_wsl() -> bool:
    """Whether this is Linux within Windows."""
    return sys.platform == "linux" and "microsoft" in (_text(_PROC_VERSION) or "").lower()


def cpu_model() -> str:
    """What the processor calls itself, or what is known instead."""
    lines = (_text(Path("/proc/cpuinfo")) or "").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def instruction_sets() -> tuple[str, ...]:
    """Those of the processor, as Linux names them, that matter for products; empty if Linux does not say."""
    for line in (_text(Path("/proc/cpuinfo")) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            has = set(value.split())
            return tuple(each for each in _INSTRUCTION_SETS if each in has)
    return ()


@dataclass(frozen=True, slots=True)
class BlasLibrary:
    """A BLAS that is loaded. architecture: the processor whose code it took; threads: as it started."""

    name: str
    version: str | None
    architecture: str | None
    threads: int


def blas_libraries() -> tuple[BlasLibrary, ...]:
    """Those of this process. NumPy's are among them if NumPy is loaded before the first question about threads."""
    pools = [pool for pool in _blas().info() if pool["user_api"] == "blas"]
    return tuple(
        BlasLibrary(str(pool["internal_api"]), pool.get("version"), pool.get("architecture"), threads)
        for pool, threads in zip(pools, _first_blas_threads(), strict=True)
    )


def default_threads() -> int:
    """One per available core, or fewer if the BLAS's own environment variable says so."""
    return min([available_cores(), *_first_blas_threads()])


def use_one_blas_thread() -> None:
    """Have the BLAS compute each product on the thread that asks for it, in the whole process.

    Its own threads wait for each other in busy loops: on cores that have other work too, a product takes ten times as
    long with two of them as with one. And it adds in another order with another number of them.
    """
    _first_blas_threads()   # remember them
    _blas().limit(limits=1, user_api="blas")


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()


@cache
def _first_blas_threads() -> tuple[int, ...]:
    """The thread counts that the loaded BLAS libraries started with, before ``use_one_blas_thread``."""
    return tuple(pool["num_threads"] for pool in _blas().info() if pool["user_api"] == "blas")


def _memory_cgroup() -> tuple[Path, str, str, str]:
    """Folder, names of the limit and of what is used, how totals in memory.stat begin; of version 2, else of 1."""
    if not (_CGROUP / "memory.max").exists() and (_CGROUP / "memory/memory.limit_in_bytes").exists():
        return _CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
    return _CGROUP, "memory.max", "memory.current", ""


def _meminfo_bytes(name: str) -> int | None:
    for line in (_text(Path("/proc/meminfo")) or "").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return None


def _text(path: Path) -> str | None:
    """A small file of the kernel's, or None where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
