"""What the machine gives: containers' limits count, and the BLAS keeps to the calling thread."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from threadpoolctl import ThreadpoolController, threadpool_limits

from kvs_core.device.host import machine
from kvs_core.device.host.device import HostDevice
from kvs_core.units import MIB


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A container's limits, empty: none."""
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    return tmp_path


@pytest.fixture
def restored_threads() -> Iterator[None]:
    with threadpool_limits(None, user_api="blas"):
        yield


def test_a_memory_limit_counts_less_what_is_used_but_for_cached_files(cgroup: Path) -> None:
    """A process is killed at the container's limit, however much RAM the machine has."""
    free = machine.available_ram_bytes()
    assert free > 16 * MIB
    (cgroup / "memory.max").write_text(f"{10 * MIB}\n")
    (cgroup / "memory.current").write_text(f"{7 * MIB}\n")
    assert machine.available_ram_bytes() == 3 * MIB
    (cgroup / "memory.stat").write_text(f"anon {2 * MIB}\ninactive_file {3 * MIB}\nactive_file {2 * MIB}\n")
    assert machine.available_ram_bytes() == 8 * MIB
    (cgroup / "memory.current").write_text(f"{99 * MIB}\n")
    assert machine.available_ram_bytes() == 0
    (cgroup / "memory.max").write_text("max\n")
    assert machine.available_ram_bytes() > 16 * MIB


def test_version_1_of_cgroups_counts_too(cgroup: Path) -> None:
    """Its limit stands elsewhere, and one that is no limit is a huge number."""
    folder = cgroup / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(f"{10 * MIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{7 * MIB}\n")
    (folder / "memory.stat").write_text(f"active_file 5\ntotal_inactive_file {2 * MIB}\ntotal_active_file {MIB}\n")
    assert machine.memory_limit_bytes() == 10 * MIB
    assert machine.available_ram_bytes() == 6 * MIB
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert machine.memory_limit_bytes() is None
    assert machine.available_ram_bytes() > 16 * MIB


def test_the_machine_is_described(cgroup: Path) -> None:
    """All of its RAM, which is more than can be had; no limit; a processor with a name and instruction sets."""
    assert machine.total_ram_bytes() >= machine.available_ram_bytes()
    assert machine.memory_limit_bytes() is None
    assert machine.cpu_model().strip()
    flags = Path("/proc/cpuinfo").read_text().split()
    assert ("avx2" in machine.instruction_sets()) == ("avx2" in flags)
    assert ("asimd" in machine.instruction_sets()) == ("asimd" in flags)


@pytest.mark.usefixtures("restored_threads")
def test_the_blas_is_described_as_it_started() -> None:
    """With the threads that it had before kvs left it one."""
    before = machine.blas_libraries()
    HostDevice(1).close()
    assert machine.blas_libraries() == before
    pools = [pool for pool in ThreadpoolController().info() if pool["user_api"] == "blas"]
    assert [(blas.name, blas.version) for blas in before] == [(pool["internal_api"], pool["version"]) for pool in pools]
    assert all(blas.threads >= 1 for blas in before)


def test_a_cpu_quota_counts(cgroup: Path) -> None:
    """Threads beyond the quota would only wait for each other; there is always one core."""
    cores = machine.available_cores()
    assert cores >= 1
    for text, expected in (("max 100000", cores), ("150000 100000", 1), ("20000 100000", 1), ("9900000 100000", cores)):
        (cgroup / "cpu.max").write_text(text + "\n")
        assert machine.available_cores() == expected


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("threads", [1, 2, None])
def test_the_blas_has_one_thread_however_many_a_device_has(threads: int | None) -> None:
    """Its own threads spin at each other's barriers; a device's threads sleep. Unset: no more than there are cores."""
    ThreadpoolController().limit(limits=2, user_api="blas")
    device = HostDevice(threads)
    device.close()
    pools = [pool for pool in ThreadpoolController().info() if pool["user_api"] == "blas"]
    assert {pool["num_threads"] for pool in pools} <= {1}
    assert device.threads == threads or (threads is None and 1 <= device.threads <= machine.available_cores())
