"""What is loaded from a mapped file does not stay in memory twice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from kvs_core.device.cuda.device import CudaDevice
from kvs_core.device.host.device import HostDevice
from kvs_core.formats.gguf import GgufFile, let_go
from kvs_core.units import MIB
from tests.cuda_on_cpu.cpu_runtime import CpuRuntime

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages are in memory")

ROWS, ROW_BYTES = 2048, 1088   # of 1024 values in Q8_0


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three matrices of 2.1 MiB."""
    made = tmp_path_factory.mktemp("mapped") / "m.gguf"
    writer = GGUFWriter(str(made), "llama")
    rng = np.random.default_rng(0)
    for name in "abc":
        # Scales of 0x2020, so that no value is without a number.
        rows = rng.integers(0, 255, (ROWS, ROW_BYTES), np.uint8).reshape(ROWS, -1, 34)
        rows[:, :, :2] = 0x20
        writer.add_tensor(f"{name}.weight", rows.reshape(ROWS, ROW_BYTES), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


def in_memory(path: Path) -> int:
    """Bytes of the mapped file that are in this process's memory."""
    return sum(_sizes(path))


def _sizes(path: Path) -> Iterator[int]:
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            ours = rest[-1:] == [str(path)]
        elif ours and name == "Rss:":
            yield int(rest[0]) * 1024


def test_pages_that_are_let_go_are_read_again_if_need_be(path: Path) -> None:
    """Whole ones alone, in the part that is named; bytes that no file has stay as they are."""
    data: Any = GgufFile.open(path).tensors["b.weight"].data
    whole = data[:].tobytes()
    assert in_memory(path) >= len(whole)
    let_go(data, MIB // 2, MIB + MIB // 2)
    assert len(whole) - MIB <= in_memory(path) <= 3 * len(whole) - MIB + 2 * 4096
    let_go(data[100:-100])
    left = in_memory(path)
    let_go(data)
    assert in_memory(path) <= left
    assert data[:].tobytes() == whole
    own = np.arange(1 << 16, dtype=np.uint8)
    let_go(own)
    assert own[255] == 255


@pytest.mark.parametrize("kind", ["matrix on a GPU", "table on a GPU", "matrix on the host"])
def test_what_was_loaded_is_not_kept_mapped_too(path: Path, kind: str) -> None:
    """But for the pages at the edges of pieces."""
    infos = list(GgufFile.open(path).tensors.values())
    if kind == "matrix on the host":
        host = HostDevice(1, memory_limit_bytes=1 << 30)
        host.prepare_weights(infos)
        assert in_memory(path) < MIB // 2
        assert host.memory_report()["weights"] == 3 * 4 * ROWS * 1024
        host.close()
        return
    runtime: Any = CpuRuntime()
    device = CudaDevice(runtime)
    loaded = [np.empty(info.n_bytes, np.uint8) for info in infos]
    if kind == "table on a GPU":
        tables: list[Any] = [device.load_table(info) for info in infos]
        loaded = [table.sections[0].rows for table in tables]
    else:
        for info, out in zip(infos, loaded, strict=True):
            device._files.read(info, 0, out)
    assert in_memory(path) < MIB // 2
    for info, out in zip(infos, loaded, strict=True):
        assert (out == info.data[:]).all()
    device.close()
