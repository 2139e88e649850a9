"""Model files that must be refused: each way a GGUF can be wrong, made from a valid ``llama`` or ``qwen35`` file.

    @pytest.mark.parametrize("name", BREAKAGES)
    def test_...(name, tmp_path):
        path = break_gguf(name, valid, tmp_path / "broken.gguf")
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from tests.support.float_copy import copy_metadata

# A file opens with the magic, then u32 version, u64 number of tensors, u64 number of metadata entries, and the entries,
# each of which opens with the u64 length of its key.
_VERSION_AT, _TENSORS_AT, _ENTRIES_AT, _FIRST_KEY_AT = 4, 8, 16, 24
_ABSURD = 1 << 60


def break_gguf(name: str, source: Path, target: Path) -> Path:
    """Write ``source``, broken in the way that ``name`` says, to ``target``; returns ``target``."""
    BREAKAGES[name](source, target)
    return target


def rewrite(
    source: Path,
    target: Path,
    *,
    arch: str | None = None,
    without_keys: tuple[str, ...] = (),
    change: Callable[[str, np.ndarray], np.ndarray | None] = lambda name, data: data,
) -> None:
    """Copy ``source`` with another architecture name, fewer keys, or tensors that ``change`` replaced or dropped."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, arch or str(reader.fields["general.architecture"].contents()))
    copy_metadata(reader, writer, without=without_keys)
    for tensor in reader.tensors:
        data = change(tensor.name, tensor.data)
        if data is not None:
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _bytes(edit: Callable[[bytearray], bytes | bytearray]) -> Callable[[Path, Path], None]:
    def write(source: Path, target: Path) -> None:
        target.write_bytes(edit(bytearray(source.read_bytes())))

    return write


def _patch(find: Callable[[bytearray], int], form: str, value: int) -> Callable[[Path, Path], None]:
    def edit(data: bytearray) -> bytearray:
        struct.pack_into(form, data, find(data), value)
        return data

    return _bytes(edit)


def _at(offset: int) -> Callable[[bytearray], int]:
    return lambda data: offset


def _after(name: bytes, skip: int) -> Callable[[bytearray], int]:
    """Where the ``skip``-th byte after the length-prefixed string ``name`` lies."""
    text = struct.pack("<Q", len(name)) + name
    return lambda data: data.index(text) + len(text) + skip


def _tensor(skip: int) -> Callable[[bytearray], int]:
    """A byte of the entry of ``output_norm.weight``: u32 dimensions = 1, u64 size, u32 type, u64 offset."""
    return _after(b"output_norm.weight", skip)


def _without_tensor(name: str) -> Callable[[Path, Path], None]:
    return lambda source, target: rewrite(source, target, change=lambda n, data: None if n == name else data)


def _cut(name: str) -> Callable[[Path, Path], None]:
    """Without the last row (or the last number) of one tensor."""
    return lambda source, target: rewrite(source, target, change=lambda n, data: data[:-1] if n == name else data)


def _without_key(name: str) -> Callable[[Path, Path], None]:
    def write(source: Path, target: Path) -> None:
        arch = gguf.GGUFReader(source).fields["general.architecture"].contents()
        rewrite(source, target, without_keys=(name.format(arch=arch),))

    return write


BREAKAGES: dict[str, Callable[[Path, Path], None]] = {
    "empty file": _bytes(lambda data: b""),
    "text file": _bytes(lambda data: b"This is not a model.\n" * 100),
    "wrong magic": _bytes(lambda data: b"GGML" + data[4:]),
    "unknown version": _patch(_at(_VERSION_AT), "<I", 99),
    "magic alone": _bytes(lambda data: data[:4]),
    "cut in the metadata": _bytes(lambda data: data[:3000]),
    "cut in the tensors": _bytes(lambda data: data[: len(data) // 2]),
    "cut in the last tensor": _bytes(lambda data: data[:-64]),
    "absurd tensor count": _patch(_at(_TENSORS_AT), "<Q", _ABSURD),
    "absurd metadata count": _patch(_at(_ENTRIES_AT), "<Q", _ABSURD),
    "absurd key length": _patch(_at(_FIRST_KEY_AT), "<Q", _ABSURD),
    "absurd token count": _patch(_after(b"tokenizer.ggml.tokens", 8), "<Q", _ABSURD),
    "unknown metadata type": _patch(_after(b"tokenizer.ggml.model", 0), "<I", 77),
    "absurd dimension count": _patch(_tensor(0), "<I", 1 << 30),
    "absurd tensor size": _patch(_tensor(4), "<Q", _ABSURD),
    "unknown tensor type": _patch(_tensor(12), "<I", 999),
    "tensor offset past the end": _patch(_tensor(16), "<Q", 1 << 40),
    "unknown architecture": lambda source, target: rewrite(source, target, arch="perceptron"),
    "missing embedding length": _without_key("{arch}.embedding_length"),
    "missing block count": _without_key("{arch}.block_count"),
    "missing tokens": _without_key("tokenizer.ggml.tokens"),
    "missing merges": _without_key("tokenizer.ggml.merges"),
    "missing token table": _without_tensor("token_embd.weight"),
    "missing output norm": _without_tensor("output_norm.weight"),
    "missing layer tensor": _without_tensor("blk.1.ffn_down.weight"),
    "short output norm": _cut("output_norm.weight"),
    "short token table": _cut("token_embd.weight"),
    "short layer matrix": _cut("blk.1.ffn_down.weight"),
}
