"""Every kernel compiles for every GPU that the package promises. NVRTC needs no GPU for that."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pkgutil import walk_packages

import pytest

from kvs_core.device import cuda
from kvs_core.device.cuda.kernel import Kernel
from kvs_core.device.cuda.nvrtc import SOURCES, compile_only, nvrtc
from kvs_core.errors import DeviceError

ARCHS = (75, 80, 86, 89, 90, 100, 120)

# Instances with every value of every define are shared out, every other one to sm_90, which has code of its own; each
# arch compiles something of each source. KVS_TEST_LONG: all instances on all archs.
SHARED_OUT = (90, 75, 90, 80, 90, 86, 90, 89)
ALL_INSTANCES = bool(os.environ.get("KVS_TEST_LONG"))

_Unit = tuple[str, tuple[tuple[str, int | str], ...]]

FAMILIES = {
    module.name.rsplit(".", 1)[-1]: import_module(module.name)
    for module in walk_packages(cuda.__path__, f"{cuda.__name__}.")
    if hasattr(import_module(module.name), "instances")
}
"""The modules that launch kernels, and say which: ``instances(arch)``."""


def instances(family: str, arch: int) -> Iterator[Kernel]:
    """What a family launches on such a GPU."""
    yield from FAMILIES[family].instances(arch)


def every_value(units: Iterable[_Unit]) -> list[_Unit]:
    """Few of ``units``, so that each value of each define is compiled at least once for each source."""
    met: set[tuple[str, object]] = set()
    chosen = []
    for source, defines in units:
        new = {(source, define) for define in (*defines, None)} - met
        if new:
            met |= new
            chosen.append((source, defines))
    return chosen


def one_of_each_source(units: Iterable[_Unit]) -> Iterable[_Unit]:
    """The last one of each source."""
    return {source: (source, defines) for source, defines in units}.values()


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    """Skips where NVRTC is missing; in CI it must be there."""
    try:
        nvrtc()
    except DeviceError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile(family: str, arch: int) -> None:
    """Every value of every define, on one arch or another; every source on each."""
    names: dict[_Unit, set[str]] = {}
    for kernel in instances(family, arch):
        names.setdefault((kernel.source, kernel.defines), set()).add(kernel.name)
    assert names
    if ALL_INSTANCES:
        units = list(names)
    else:
        turns = itertools.cycle(SHARED_OUT)
        mine = [unit for unit, turn in zip(every_value(names), turns, strict=False) if turn == arch]
        units = list(dict.fromkeys((*mine, *one_of_each_source(names))))

    def compiled(unit: _Unit) -> str:
        try:
            cubin = compile_only(*unit, f"sm_{arch}")
        except DeviceError as error:
            return str(error)
        missing = [name for name in sorted(names[unit]) if f".text.{name}\0".encode() not in cubin]
        return f"{unit}: no {', '.join(missing)}" if missing else ""

    workers = (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with ThreadPoolExecutor(max(workers, 1)) as pool:
        errors = list(filter(None, pool.map(compiled, units)))
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_of_the_forced_path_are_ptx(family: str) -> None:
    """Every source, for sm_80 with 99 KiB of shared memory a block, which sm_86 has: nothing of sm_90, and weights come
    by cp.async instead."""
    names = {(kernel.source, kernel.defines): kernel.name for kernel in instances(family, 86)}
    for unit in one_of_each_source(names):
        ptx = compile_only(*unit, "compute_80").decode()
        assert "\n.target sm_80\n" in ptx
        assert f".entry {names[unit]}(" in ptx
        assert not re.search(r"mbarrier|griddepcontrol|cp\.async\.bulk", ptx)
        assert "cp.async.cg" in ptx or unit[0] != "matmul_decode.cu"


def test_no_source_is_left_out() -> None:
    """Every source belongs to a family that names its instances, on the newest arch and the oldest."""
    for arch in (ARCHS[0], ARCHS[-1]):
        compiled = {kernel.source for family in FAMILIES for kernel in instances(family, arch)}
        assert compiled == {path.name for path in SOURCES.glob("*.cu")}, arch
