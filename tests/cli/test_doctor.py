"""``kvs doctor``: on this machine without its GPU, on one with a pretended GPU, and where nothing works."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from kvs_cli.doctor import gather
from kvs_core.device.cuda.about import DriverFacts, Gpu
from kvs_core.device.cuda.modules import CudaFound
from kvs_core.device.cuda.nvml import Card, Cards, Holder, PcieLink
from kvs_core.device.host import machine
from kvs_core.errors import DeviceError
from kvs_core.units import MIB
from tests.cli.conftest import Ended, Kvs

GIB = 1024 * MIB
NO_DRIVER = "there is no NVIDIA driver (libcuda.so.1); install one, or use --device cpu"


def failing(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise error

    return fail


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No driver, no card, no CuPy; a cache of its own and no variables."""
    monkeypatch.setattr(gather, "driver_facts", failing(DeviceError(NO_DRIVER)))
    monkeypatch.setattr(gather, "nvidia_cards", lambda: 0)
    monkeypatch.setattr(gather, "read_cards", lambda: None)
    monkeypatch.setattr(gather, "cupy_packages", tuple)
    monkeypatch.setattr(gather, "cupy_cuda", failing(DeviceError("CuPy is not installed; pip install it")))
    monkeypatch.setattr(gather, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(gather, "check_compiler", lambda arch: None)
    for name in gather.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KVS_CACHE_DIR", str(tmp_path / "cache"))


class Rig:
    """Two GPUs that are pretended. ``done``: what was asked of them, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.slabs = 0
        self.found: dict[int, CudaFound | str] = {i: CudaFound(i, "Some GPU", 90, "13.0", "13.0") for i in (0, 1)}

    def open_device(self, settings: Any) -> Any:
        self.done.append(f"open {settings.name}")
        return self

    def measure(self, device: Any) -> dict[str, float]:
        assert device is self
        self.done.append("measure")
        return {"link": 50e9, "back": 49e9, "memory": 4e12}

    def cards(self) -> Cards:
        self.done.append("cards")
        gen = 5 if "measure" in self.done else 1
        holders = (Holder(7, "python", 30 * GIB),)
        return Cards("nvml", "580.65", {"0000:c1:00.0": Card(80 * GIB, 50 * GIB, holders, PcieLink(gen, 5, 16, 16))})

    def allocate_pinned(self, size_bytes: int) -> np.ndarray:
        self.slabs += 1
        if self.slabs > 3:
            raise DeviceError("no more")
        return np.empty(size_bytes, np.uint8)

    def free_bytes(self) -> int:
        return 70 * GIB

    def close(self) -> None:
        self.done.append("close")


@pytest.fixture
def rig(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> Rig:
    made = Rig()
    gpus = tuple(Gpu(index, "Some GPU", 90, 80 * GIB, f"0000:c{index + 1}:00.0") for index in (0, 1))
    monkeypatch.setattr(gather, "driver_facts", lambda: DriverFacts((13, 0), gpus))
    monkeypatch.setattr(gather, "read_cards", made.cards)
    monkeypatch.setattr(gather, "find_cuda", lambda index: made.found[index])
    monkeypatch.setattr(gather, "open_device", made.open_device)
    monkeypatch.setattr(gather, "measure_gpu", made.measure)
    monkeypatch.setattr(gather, "cupy_packages", lambda: ("cupy-cuda13x 14.2.0",))
    monkeypatch.setattr(gather, "cupy_cuda", lambda driver: (13, 0))
    monkeypatch.setattr(gather, "available_ram_bytes", lambda: 6 * GIB)
    return made


def checks(ended: Ended) -> dict[str, dict[str, Any]]:
    """By name."""
    return {check["name"]: check for check in ended.json["checks"]}


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_a_gpu(kvs: Kvs, tmp_path: Path) -> None:
    """kvs runs on its CPU, so the code is 0; the table and the JSON object say the same."""
    told = kvs("doctor", "--json")
    found = told.json
    assert (found["can_run"], found["device"]) == (True, "cpu")
    assert found["cuda"]["driver_problem"] == NO_DRIVER
    assert found["cuda"]["driver_cuda"] is None
    assert found["cuda"]["gpus"] == []
    assert found["host"]["ram_rate"] > 1e8
    assert found["host"]["ram_bytes"] >= found["host"]["ram_free_bytes"] > 0
    assert found["cache"] == {
        "folder": str(tmp_path / "cache/kernels"), "entries": 0, "size_bytes": 0, "writable": True,
        "disk_free_bytes": found["cache"]["disk_free_bytes"],
    }
    assert found["settings"]["CUDA_VISIBLE_DEVICES"] is None
    assert found["failed_probes"] == {}
    assert not (tmp_path / "cache").exists()

    table = kvs("doctor")
    assert table.code == 0
    lines = table.out.splitlines()
    assert lines[0].split() == ["check", "verdict", "found", "what", "to", "do"]
    for name, check in checks(told).items():
        (line,) = [line for line in lines if line.startswith(f"{name}  ")]
        assert line.removeprefix(name).split()[0] == check["verdict"]
    assert lines[-1].startswith("kvs runs here, on cpu; ")


def test_gpus_are_measured(kvs: Kvs, rig: Rig) -> None:
    """Each that works: the link is looked at again after copies, and memory is pinned through the first alone."""
    found = kvs("doctor", "--json").json
    assert rig.done == ["cards", "open cuda:0", "measure", "cards", "close", "open cuda:1", "measure", "cards", "close"]
    assert found["device"] == "cuda:0"
    first, second = found["cuda"]["gpus"]
    assert first == {
        "index": 0, "name": "Some GPU", "compute_capability": "9.0", "pci_address": "0000:c1:00.0", "problem": None,
        "memory_bytes": 80 * GIB, "free_bytes": 50 * GIB,
        "holders": [{"pid": 7, "name": "python", "size_bytes": 30 * GIB}],
        "pcie": {"gen": 5, "max_gen": 5, "width": 16, "max_width": 16},
        "to_device_bytes_per_s": 50e9, "to_host_bytes_per_s": 49e9, "within_bytes_per_s": 4e12,
    }
    assert second.keys() == first.keys()
    assert second["pcie"] == dict.fromkeys(first["pcie"])
    assert (second["free_bytes"], second["holders"]) == (70 * GIB, None)
    assert found["cuda"]["pinned"] == {"asked_bytes": 1536 * MIB, "got_bytes": 192 * MIB, "error": "no more"}
    assert (found["cuda"]["driver_version"], found["cuda"]["source"]) == ("580.65", "nvml")


@pytest.mark.usefixtures("no_gpu")
def test_keys_do_not_depend_on_the_machine(kvs: Kvs, request: pytest.FixtureRequest) -> None:
    """What is not known is null and not left out."""
    without = kvs("doctor", "--json").json
    request.getfixturevalue("rig")
    with_gpus = kvs("doctor", "--json").json
    assert without.keys() == with_gpus.keys()
    for part in ("host", "cuda", "settings", "cache"):
        assert without[part].keys() == with_gpus[part].keys()


def test_a_gpu_that_fails_is_a_line(kvs: Kvs, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be opened, one whose copies fail: the report goes on to the next, and the device is closed."""
    rig.found[0] = "CuPy is broken; mend it"
    monkeypatch.setattr(gather, "measure_gpu", failing(DeviceError("CUDA failed in a copy: odd (700)")))
    ended = kvs("doctor", "--json")
    found = checks(ended)
    assert (found["cuda:0"]["verdict"], found["cuda:0"]["advice"]) == ("problem", "mend it")
    assert found["cuda:1"]["verdict"] == "ok"
    assert found["cuda:1 rates"]["found"] == "not known: CUDA failed in a copy: odd (700)"
    assert ended.json["failed_probes"] == {"cuda:1 rates": "CUDA failed in a copy: odd (700)"}
    assert rig.done == ["cards", "open cuda:1", "cards", "close"]
    assert ended.json["device"] == "cpu"

    monkeypatch.setattr(gather, "open_device", failing(DeviceError("no memory; end other programs")))
    assert checks(kvs("doctor", "--json"))["cuda:1"]["advice"] == "end other programs"


PROBES = ("blas_libraries", "cpu_model", "available_cores", "instruction_sets", "total_ram_bytes", "memory_limit_bytes",
          "available_ram_bytes", "kernel_cache", "read_cards", "driver_facts", "nvidia_cards", "cupy_packages",
          "cupy_cuda", "nvrtc_version", "check_compiler", "find_cuda", "open_device", "measure_gpu", "pin_stepwise",
          "_memlock", "is_wsl", "_ram_rate")


@pytest.mark.usefixtures("rig")
@pytest.mark.parametrize("probe", PROBES)
def test_whatever_breaks_is_named_and_stops_nothing(
    kvs: Kvs, monkeypatch: pytest.MonkeyPatch, probe: str
) -> None:
    """An error that nobody has foreseen, of any probe: it stands in the report, and kvs can still run."""
    monkeypatch.setattr(gather, probe, failing(ValueError("very odd\nand more")))
    ended = kvs("doctor", "--json")
    assert ended.json["can_run"]
    assert any("ValueError: very odd" in check["found"] for check in ended.json["checks"]), ended.json["checks"]
    assert "and more" not in ended.out
    assert "Traceback" not in ended.err
    table = kvs("doctor")
    assert table.code == 0
    assert "very odd" in table.out


@pytest.mark.usefixtures("no_gpu")
def test_where_nothing_works_the_code_is_1(kvs: Kvs, monkeypatch: pytest.MonkeyPatch) -> None:
    """All probes fail at once: still a whole report, on stdout."""
    for probe in PROBES:
        monkeypatch.setattr(gather, probe, failing(MemoryError()))
    table, told = kvs("doctor"), kvs("doctor", "--json")
    assert (table.code, told.code) == (1, 1)
    assert table.out.splitlines()[-1] == "kvs cannot run here: see device"
    assert replace(told, code=0).json["can_run"] is False
    assert "MemoryError" in table.out


@pytest.mark.usefixtures("no_gpu")
def test_a_package_that_is_missing_is_named(kvs: Kvs, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that kvs needs later, in the report; one that this command needs itself, as an error of one line."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    table = kvs("doctor")
    assert table.code == 1
    assert table.out.splitlines()[-1] == "kvs cannot run here: see kvs"
    assert "jinja2" in table.out
    monkeypatch.setitem(sys.modules, "kvs_cli.commands.doctor", None)
    assert kvs("doctor").error.startswith("kvs cannot be loaded: import of kvs_cli.commands.doctor halted")


@pytest.mark.usefixtures("no_gpu")
def test_wsl_limits_and_variables_are_seen(kvs: Kvs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From /proc/version, the limits of this process, and its environment."""
    version = tmp_path / "version"
    version.write_text("Linux version 5.15.167.4-microsoft-standard-WSL2 (root@1) #1 SMP\n")
    monkeypatch.setattr(machine, "_PROC_VERSION", version)
    monkeypatch.setattr(resource, "getrlimit", lambda which: {resource.RLIMIT_MEMLOCK: (65536, 65536)}[which])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("GGML_CUDA_ENABLE_UNIFIED_MEMORY", "1")
    ended = kvs("doctor", "--json")
    host = ended.json["host"]
    assert (host["is_wsl"], host["memlock_bytes"], host["memlock_is_unlimited"]) == (True, 65536, False)
    found = checks(ended)
    assert {name for name in ("system", "CUDA_VISIBLE_DEVICES", "GGML_CUDA_ENABLE_UNIFIED_MEMORY")
            if found[name]["verdict"] == "warning"} == {"system", "CUDA_VISIBLE_DEVICES",
                                                        "GGML_CUDA_ENABLE_UNIFIED_MEMORY"}
    version.write_text("Linux version 6.1.0 (debian)\n")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    host = kvs("doctor", "--json").json["host"]
    assert (host["is_wsl"], host["memlock_bytes"], host["memlock_is_unlimited"]) == (False, None, True)
