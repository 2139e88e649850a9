"""What the machine has to give: cores and RAM, containers' limits included, and the BLAS's thread count."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


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
    available = None
    for line in (_text(Path("/proc/meminfo")) or "").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            available = int(value.split()[0]) * 1024
    if available is None:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, used = _text(_CGROUP / "memory.max"), _text(_CGROUP / "memory.current")
    if limit and used and limit.isdecimal() and used.isdecimal():
        # Pages of files count as used, but give way.
        stat = dict(line.split() for line in (_text(_CGROUP / "memory.stat") or "").splitlines())
        files = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
        available = min(available, int(limit) - max(0, int(used) - files))
    return max(0, available)


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


def _text(path: Path) -> str | None:
    """A small file of the kernel's, or None where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
