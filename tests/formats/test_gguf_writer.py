"""What is written is what is read: by kvs and by the gguf package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from kvs_core.formats.gguf import GgufFile, MetaValue, TensorInfo
from kvs_core.formats.gguf_writer import data_bytes, gguf_header, write_gguf

F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0

METADATA: dict[str, MetaValue] = {
    "general.architecture": "llama", "a.bool": True, "a.int": 4_000_000_000, "a.float": 0.5, "a.text": "häß\n",
    "an.array": ["", "x", "ÿ"], "ints": np.array([-1, 2, 3], np.int32), "flags": np.array([True, False]),
    "floats": np.array([1.5], np.float64),
}


def tensors() -> dict[str, TensorInfo]:
    rng = np.random.default_rng(0)
    infos = [
        TensorInfo("v", (5,), F32, 5, 20, rng.integers(0, 255, 20, np.uint8)),
        TensorInfo("m", (64, 3), Q8_0, 192, 204, rng.integers(0, 255, 204, np.uint8)),
        TensorInfo("n", (2, 3, 2), F32, 12, 48, rng.integers(0, 255, 48, np.uint8)),
    ]
    return {info.name: info for info in infos}


def test_a_file_reads_back(tmp_path: Path) -> None:
    """Every kind of value, tensors of odd sizes; the size is known before; progress ends at all bytes."""
    path, seen = tmp_path / "a.gguf", []
    write_gguf(path, METADATA, tensors(), lambda done, total: seen.append((done, total)))
    file = GgufFile.open(path)
    assert file.metadata.keys() == METADATA.keys()
    for key, value in METADATA.items():
        np.testing.assert_array_equal(file.metadata[key], value)
        assert isinstance(file.metadata[key], type(value))
    assert list(file.tensors) == ["v", "m", "n"]
    for name, info in tensors().items():
        read = file.tensors[name]
        assert (read.shape, read.quant, read.n_bytes) == (info.shape, info.quant, info.n_bytes)
        np.testing.assert_array_equal(read.data[:], info.data[:])
    assert path.stat().st_size == len(gguf_header(METADATA, tensors())) + data_bytes(tensors().values())
    assert seen[-1][1] == path.stat().st_size
    by_gguf = gguf.GGUFReader(path)
    assert [(tensor.name, tensor.shape.tolist()) for tensor in by_gguf.tensors] == [
        ("v", [5]), ("m", [64, 3]), ("n", [2, 3, 2])]


def test_no_file_is_overwritten_and_none_is_left_half(tmp_path: Path) -> None:
    """A file that is there stays; one whose data cannot be had goes."""
    path = tmp_path / "a.gguf"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_gguf(path, METADATA, tensors())
    assert path.read_bytes() == b"mine"

    class Broken:
        def __len__(self) -> int:
            return 20

        def __getitem__(self, part: slice, /) -> np.ndarray:
            raise KeyboardInterrupt

    other = tmp_path / "b.gguf"
    with pytest.raises(KeyboardInterrupt):
        write_gguf(other, METADATA, {"v": TensorInfo("v", (5,), F32, 5, 20, Broken())})
    assert not other.exists()
