"""Verdicts on the program, the system, the CPU and RAM. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kvs_cli.doctor.check import Check, gb_per_s, problem, size, told, warning
from kvs_cli.doctor.facts import Facts, HostFacts
from kvs_core.device.cuda import unified
from kvs_core.units import MIB, counted

_LEAST_RAM_BYTES = 256 * MIB    # Python, NumPy and the smallest model
_LITTLE_RAM_BYTES = 4096 * MIB  # less than the weights of most models
_LITTLE_LIMIT_BYTES = 16384 * MIB
_LITTLE_DISK_BYTES = 64 * MIB   # kernels of a few models
# What OpenBLAS calls processors whose code knows no AVX2.
_BEFORE_AVX2 = frozenset(("prescott", "core2", "penryn", "dunnington", "atom", "nehalem", "sandybridge", "barcelona",
                          "bobcat", "bulldozer", "piledriver", "steamroller", "generic"))
_WSL_CONFIG = "memory= under [wsl2] in %UserProfile%\\.wslconfig"


def host_checks(facts: Facts) -> Iterator[Check]:
    """In the order of the table."""
    host = facts.host
    yield _program(host)
    yield _system(host)
    yield _cpu(host)
    if host.blas is not None:
        yield _blas(host, facts.settings.get("OPENBLAS_NUM_THREADS"))
    if host.ram_free_bytes is not None:
        yield _ram(host)
    yield _limit(host)


def cache_check(facts: Facts) -> Iterator[Check]:
    """Where compiled kernels and measured rates are kept."""
    cache = facts.cache
    if cache is None:
        return
    found = f"{cache.folder}: {cache.entries} kernels, {size(cache.size_bytes)}"
    if not cache.writable:
        yield warning("kernel cache", f"{found}, cannot be written",
                      "set KVS_CACHE_DIR to a folder that can be written, or kernels are compiled at every start")
    elif cache.disk_free_bytes is not None and cache.disk_free_bytes < _LITTLE_DISK_BYTES:
        yield warning("kernel cache", f"{found}; {size(cache.disk_free_bytes)} of the disk are free",
                      "make room, or set KVS_CACHE_DIR to a folder on another disk")
    else:
        yield Check("kernel cache", found)


def settings_checks(facts: Facts) -> Iterator[Check]:
    """Variables that are set."""
    for name, value in facts.settings.items():
        if value is None:
            continue
        if name == "CUDA_VISIBLE_DEVICES" and value.strip() in ("", "-1"):
            yield warning(name, f"{value!r} hides every GPU", f"unset {name} to use one")
        elif name == unified.VARIABLE and facts.host.is_wsl:
            yield warning(name, f"{value!r} has no effect in WSL",
                          f"unset {name}; weights beyond the GPU are streamed, see --gpu-layers")
        elif name == unified.VARIABLE and facts.device in (None, "cpu"):
            yield Check(name, f"{value!r}: no effect without a GPU that kvs can use")
        elif name == unified.VARIABLE:
            yield Check(name, f"{value!r}: weights that --gpu-layers keeps on the GPU may exceed its memory, slowly")
        else:
            yield Check(name, repr(value))


def _program(host: HostFacts) -> Check:
    found = f"{host.version}, Python {host.python}"
    if host.load_problem is None:
        return Check("kvs", found)
    return problem("kvs", f"{found}: cannot be loaded: {host.load_problem}",
                   "pip install kvs-llm again, in this environment", fatal=True)


def _system(host: HostFacts) -> Check:
    if host.is_wsl:
        return warning("system", f"{host.system}, in WSL",
                       "install NVIDIA's driver in Windows alone; Linux has half of the RAM unless "
                       f"{_WSL_CONFIG} says more")
    if not host.is_linux:
        return warning("system", host.system, "kvs is made for Linux; in Windows use WSL 2")
    return Check("system", host.system)


def _cpu(host: HostFacts) -> Check:
    sets = host.instruction_sets or ()
    cores = "" if host.cores is None else f", {counted(host.cores, 'core')}"
    found = f"{host.cpu or 'not known'}{cores}{': ' if sets else ''}{' '.join(sets)}"
    if host.cpu_problem is not None:
        return told("CPU", host.cpu_problem, "pip install another version of numpy, or use a GPU")
    if "avx" in sets and "avx2" not in sets:
        return warning("CPU", f"{found}; no AVX2", "expect slow products on the CPU; use a GPU, or a newer processor")
    return Check("CPU", found)


def _blas(host: HostFacts, threads_setting: str | None) -> Check:
    if not host.blas:
        return warning("BLAS", "none that is known", "pip install numpy from PyPI, which brings OpenBLAS")
    first = host.blas[0]
    found = "; ".join(
        f"{blas.name} {blas.version or ''}{f' with code for {blas.architecture}' if blas.architecture else ''}, "
        f"threads at start: {blas.threads}"
        for blas in host.blas
    )
    if (first.architecture or "").lower() in _BEFORE_AVX2 and "avx2" in (host.instruction_sets or ()):
        return warning("BLAS", f"{found}; the processor has AVX2", "unset OPENBLAS_CORETYPE, or install another NumPy")
    threads = min(blas.threads for blas in host.blas)
    if host.cores is not None and threads < host.cores:
        cause = f"unset OPENBLAS_NUM_THREADS ({threads_setting})" if threads_setting else "raise the BLAS's own limit"
        return warning("BLAS", f"{found}, so kvs takes {threads} of {counted(host.cores, 'core')}",
                       f"{cause}, or give --threads {host.cores}")
    return Check("BLAS", found)


def _ram(host: HostFacts) -> Check:
    free, total = host.ram_free_bytes, host.ram_bytes
    assert free is not None
    of_all = "" if total is None else f" of {size(total)}"
    rate = "" if host.ram_rate is None else f"; copies run at {gb_per_s(host.ram_rate)}"
    found = f"{size(free)}{of_all} can be had{rate}"
    if free < _LEAST_RAM_BYTES:
        return problem("RAM", found, f"end other programs: not even {size(_LEAST_RAM_BYTES)} are left", fatal=True)
    if free < _LITTLE_RAM_BYTES:
        return warning("RAM", found, "end other programs, or take small models and contexts: the KV history lives in "
                       "RAM" + (f"; in WSL raise {_WSL_CONFIG}" if host.is_wsl else ""))
    return Check("RAM", found)


def _limit(host: HostFacts) -> Check:
    limit = host.ram_limit_bytes
    if limit is None:
        return Check("container limit", "none on memory")
    found = f"{size(limit)} of memory"
    if limit < _LITTLE_LIMIT_BYTES:
        return warning("container limit", found, "for long contexts raise it (docker run --memory, the pod's limit): "
                       "past it the process is killed")
    return Check("container limit", found)
