"""Writes a GGUF file, version 3. The layout is drawn in ``gguf_header.py``, which reads it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGUFValueType

from kvs_core.formats.gguf_header import MetaValue, TensorInfo
from kvs_core.units import MIB, Progress, align_up

_PIECE_BYTES = 8 * MIB
_NUMBERS = {
    np.dtype("u1"): GGUFValueType.UINT8, np.dtype("i1"): GGUFValueType.INT8,
    np.dtype("u2"): GGUFValueType.UINT16, np.dtype("i2"): GGUFValueType.INT16,
    np.dtype("u4"): GGUFValueType.UINT32, np.dtype("i4"): GGUFValueType.INT32,
    np.dtype("u8"): GGUFValueType.UINT64, np.dtype("i8"): GGUFValueType.INT64,
    np.dtype("f4"): GGUFValueType.FLOAT32, np.dtype("f8"): GGUFValueType.FLOAT64,
    np.dtype("?"): GGUFValueType.BOOL,
}


def gguf_header(metadata: Mapping[str, MetaValue], tensors: Mapping[str, TensorInfo]) -> bytes:
    """All before the tensors' data, padding included. Integers become uint32, floats float32; arrays keep their type.

    Tensors lie in the order given, each at a multiple of the default alignment: ``general.alignment`` is not set.
    """
    assert "general.alignment" not in metadata
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), _value(value)]
    offset = 0
    for info in tensors.values():
        parts.append(_string(info.name))
        parts.append(struct.pack(f"<I{len(info.shape)}QIQ", len(info.shape), *info.shape, int(info.quant), offset))
        offset += align_up(info.n_bytes, GGUF_DEFAULT_ALIGNMENT)
    header = b"".join(parts)
    return header.ljust(align_up(len(header), GGUF_DEFAULT_ALIGNMENT), b"\0")


def data_bytes(tensors: Iterable[TensorInfo]) -> int:
    """Bytes that follow the header."""
    return sum(align_up(info.n_bytes, GGUF_DEFAULT_ALIGNMENT) for info in tensors)


def write_gguf(
    path: Path, metadata: Mapping[str, MetaValue], tensors: Mapping[str, TensorInfo], progress: Progress | None = None
) -> None:
    """Write a new file, in pieces of a few MiB; ``progress`` is in bytes. A file that is not finished is removed.

    Raises OSError: FileExistsError if there is a file already, which then stays as it is.
    """
    header = gguf_header(metadata, tensors)
    total = len(header) + data_bytes(tensors.values())
    with path.open("xb") as file:
        try:
            file.write(header)
            for info in tensors.values():
                for first in range(0, info.n_bytes, _PIECE_BYTES):
                    file.write(info.data[first : first + _PIECE_BYTES].data)
                    if progress is not None:
                        progress(file.tell(), total)
                file.write(bytes(-info.n_bytes % GGUF_DEFAULT_ALIGNMENT))
            file.flush()
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: MetaValue) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", GGUFValueType.BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", GGUFValueType.UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", GGUFValueType.FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", GGUFValueType.STRING) + _string(value)
    if isinstance(value, list):
        texts = b"".join(map(_string, value))
        return struct.pack("<IIQ", GGUFValueType.ARRAY, GGUFValueType.STRING, len(value)) + texts
    return struct.pack("<IIQ", GGUFValueType.ARRAY, _NUMBERS[value.dtype], len(value)) + value.tobytes()
