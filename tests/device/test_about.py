"""What is installed for GPUs: each thing is asked by itself, on machines that have it and on others."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from kvs_core.device.cuda import about, nvrtc
from kvs_core.device.cuda.about import DriverFacts, Gpu
from kvs_core.device.cuda.modules import cupy_cuda
from kvs_core.device.host.device import HostDebug, HostDevice
from kvs_core.device.pinning import Pinned, pin_stepwise
from kvs_core.errors import DeviceError
from kvs_core.units import MIB
from tests.device.test_modules import FakeCuda, fake_cupy, install


def test_the_driver_tells_of_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, whatever their age, with the address under which other programs know them."""
    install(monkeypatch, FakeCuda(arch=61, gpus=2, version=12080))
    assert about.driver_facts() == DriverFacts((12, 8), (
        Gpu(0, "Fake GPU", 61, 24 << 30, "0000:c0:00.0"), Gpu(1, "Fake GPU", 61, 25 << 30, "0000:c1:00.0"),
    ))
    install(monkeypatch, None)
    with pytest.raises(DeviceError, match="there is no NVIDIA driver"):
        about.driver_facts()


def test_cards_on_the_bus_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's graphics cards, and not their sound, nor others' cards; where there is no bus nobody knows."""
    devices = {"0": ("0x10de", "0x030000"), "1": ("0x10de", "0x030200"), "2": ("0x10de", "0x040300"),
               "3": ("0x8086", "0x030000")}
    for name, (vendor, kind) in devices.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    monkeypatch.setattr(about, "_PCI", tmp_path)
    assert about.nvidia_cards() == 2
    monkeypatch.setattr(about, "_PCI", tmp_path / "nowhere")
    assert about.nvidia_cards() is None


def test_the_packages_of_cupy_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All of them: two break each other."""
    for name, version in (("cupy_cuda12x", "14.2.0"), ("cupy_cuda13x", "14.3.0")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert about.cupy_packages() == ("cupy-cuda12x 14.2.0", "cupy-cuda13x 14.3.0")


def test_the_cuda_of_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """That it is built for; without CuPy, the extra for this driver."""
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(12090))
    assert cupy_cuda((13, 0)) == (12, 9)
    monkeypatch.setitem(sys.modules, "cupy", None)
    for driver, extra in (((12, 4), "cuda12"), ((13, 0), "cuda13"), (None, "cuda13")):
        with pytest.raises(DeviceError, match=rf"^CuPy is not installed; pip install 'kvs-llm\[{extra}\]'$"):
            cupy_cuda(driver)


def test_the_compiler_is_tried() -> None:
    """A source of kvs itself goes through it, without a GPU; for a GPU that it does not know it fails."""
    try:
        version = about.nvrtc_version()
    except DeviceError as error:
        pytest.skip(str(error))
    assert version >= (12, 0)
    about.check_compiler()
    with pytest.raises(DeviceError, match=r"^zero_page\.cu .* does not compile for sm_77 "):
        about.check_compiler(77)


def test_the_kernel_cache_is_looked_at_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries and bytes; one that is not there yet could be made, and is not; under a file it could not."""
    monkeypatch.setenv("KVS_CACHE_DIR", str(tmp_path / "new/cache"))
    state = nvrtc.kernel_cache()
    assert (state.folder, state.entries, state.size_bytes) == (tmp_path / "new/cache/kernels", 0, 0)
    assert state.writable
    disk = os.statvfs(tmp_path)
    assert state.disk_free_bytes == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.1)
    assert list(tmp_path.iterdir()) == []

    state.folder.mkdir(parents=True)
    for name, size in (("a-1.cubin", 100), ("b-2.cubin", 23), (".unfinished", 7)):
        (state.folder / name).write_bytes(bytes(size))
    state = nvrtc.kernel_cache()
    assert (state.entries, state.size_bytes, state.writable) == (2, 123, True)
    assert len(list(state.folder.iterdir())) == 3

    monkeypatch.setenv("KVS_CACHE_DIR", str(state.folder / "a-1.cubin"))
    state = nvrtc.kernel_cache()
    assert (state.entries, state.writable) == (0, False)


class Pinning(HostDevice):
    """Remembers what it pinned."""

    def allocate_pinned(self, size_bytes: int) -> np.ndarray:
        slab = super().allocate_pinned(size_bytes)
        sizes.append(size_bytes)
        return slab


sizes: list[int] = []


def test_memory_is_pinned_in_steps_until_it_is_refused() -> None:
    """Whole slabs up to the most; the error of the first that is refused is kept."""
    for fail_at, most, expected in (
        (None, 5 * MIB, Pinned(4 * MIB, 4 * MIB, None)), (None, MIB, Pinned(0, 0, None)),
        (2, 8 * MIB, Pinned(8 * MIB, 4 * MIB, "")),
    ):
        sizes.clear()
        device = Pinning(1, debug=HostDebug(fail_alloc_at=fail_at))
        found = pin_stepwise(device, most, 2 * MIB)
        device.close()
        assert (found.asked_bytes, found.got_bytes) == (expected.asked_bytes, expected.got_bytes)
        assert sizes == [2 * MIB] * (found.got_bytes // (2 * MIB))
        assert (found.error is None) == (expected.error is None)
