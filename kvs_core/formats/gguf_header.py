"""The bytes of one GGUF file: header parsed, every size and offset checked, tensor data mapped.

Byte order is little-endian throughout; versions 2 and 3 have the same layout:

    magic "GGUF" | version u32 | tensor count u64 | pair count u64
    pairs:    key string | type u32 | value          an array is: element type u32 | count u64 | elements
    tensors:  name string | dimension count u32 | dimensions u64 ... | quant u32 | offset u64
    padding to general.alignment (default 32) | tensor data, each at its offset from here

A string is its length in bytes as u64, then UTF-8. Source of the format: the GGUF specification in ggml's ``docs``.
Enumerations and block sizes come from the ``gguf`` package. Its reader is not used: it makes several arrays per
string, so a vocabulary of 250,000 tokens takes seconds, and it believes the counts a file claims. Here each count is
compared with the bytes that are left before anything is allocated.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)

from kvs_core.errors import ModelFileError
from kvs_core.units import align_up

MetaValue: TypeAlias = "int | float | bool | str | list[str] | npt.NDArray[Any]"

_SCALARS = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<?"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}
_U32 = _SCALARS[GGUFValueType.UINT32]
_U64 = _SCALARS[GGUFValueType.UINT64]

# The least that one entry can take: an empty key and a one-byte value; an empty name and no dimension.
_PAIR_BYTES = 8 + 4 + 1
_TENSOR_BYTES = 8 + 4 + 4 + 8

# Limits where the bytes left are no bound, since a model's file is long, and may be sparse: 64 times the largest
# vocabulary in use, many times the longest chat template or embedded tokenizer, and for all that becomes values of
# Python's, ten times the largest vocabulary with its merges.
_MAX_ARRAY = 1 << 24
_MAX_STRING_BYTES = 1 << 27
_MAX_HEADER_BYTES = 1 << 29
_OBJECT_BYTES = 64  # of a string besides its text, with its place in a list
_WIDER_BYTES = 3    # that a character of a text beyond ASCII can take more than in UTF-8
_MAX_NAME_BYTES = 1024
_MAX_DIMS = 4


class TensorBytes(Protocol):
    """A tensor's data. ``data[first:last]`` is a uint8 array; nothing else holds for data that no file has."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> npt.NDArray[np.uint8]: ...


def let_go(data: TensorBytes, first: int = 0, last: int | None = None) -> None:
    """Bytes [first, last) of a mapped file have been read and will not be soon again: their pages leave this process's
    memory, though not the system's cache of files. Where the bytes are of no file, nothing happens."""
    if not isinstance(data, np.ndarray):
        return
    part = data[first:last]
    owner: Any = part
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    source = getattr(owner.base, "obj", None)   # of a memoryview
    if isinstance(source, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        at = part.ctypes.data - np.frombuffer(source, np.uint8).ctypes.data
        start, stop = align_up(at, mmap.PAGESIZE), (at + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop:
            source.madvise(mmap.MADV_DONTNEED, start, stop - start)


@dataclass(frozen=True, slots=True, eq=False)
class TensorInfo:
    """One tensor of a file, not yet read.

    shape  GGUF order, ne0 (contiguous) first: a matrix [n_in, n_out] is a NumPy array (n_out, n_in)
    data   uint8 [n_bytes], in the blocks of ``quant``: a read-only view on the mapped file, or made as it is read
    """

    name: str
    shape: tuple[int, ...]
    quant: GGMLQuantizationType
    n_elements: int
    n_bytes: int
    data: TensorBytes = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """What one file says: a whole model, or one part of a split one."""

    version: int
    file_bytes: int
    metadata: dict[str, MetaValue] = field(repr=False)
    tensors: dict[str, TensorInfo] = field(repr=False)


class _Cursor:
    """Reads a mapped header front to back, never past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.end = len(data)
        self.pos = 0
        self.budget = _MAX_HEADER_BYTES

    def fail(self, what: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {what}")

    def need(self, n_bytes: int, what: str) -> None:
        """Fail unless ``n_bytes`` more are in the file."""
        if n_bytes > self.end - self.pos:
            self.fail(
                f"{what} takes {n_bytes} bytes, but {self.end - self.pos} are left at byte {self.pos}: "
                "the file is damaged or truncated; download it again"
            )

    def spend(self, n_bytes: int, what: str) -> None:
        """Take what a value needs in memory from the budget of the header."""
        self.budget -= n_bytes
        if self.budget < 0:
            self.fail(
                f"the header up to {what} takes more than {_MAX_HEADER_BYTES} bytes of memory, as no model's does: "
                "the file is damaged; download it again"
            )

    def scalar(self, form: struct.Struct, what: str) -> Any:
        self.need(form.size, what)
        (value,) = form.unpack_from(self.data, self.pos)
        self.pos += form.size
        return value

    def string(self, what: str, limit: int = _MAX_STRING_BYTES) -> str:
        n_bytes = self.scalar(_U64, what)
        self.need(n_bytes, what)
        if n_bytes > limit:
            self.fail(f"{what} is a string of {n_bytes} bytes; at most {limit} make sense")
        self.spend(n_bytes + _OBJECT_BYTES, what)
        try:
            text = str(self.data[self.pos : self.pos + n_bytes], "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")
        if not text.isascii():
            self.spend(_WIDER_BYTES * len(text), what)
        self.pos += n_bytes
        return text

    def name(self, what: str) -> str:
        """A key or the name of a tensor: short and printable, since messages repeat it."""
        name = self.string(what, _MAX_NAME_BYTES)
        if not name.isprintable():
            self.fail(f"{what} is {name!r}, which is no printable text")
        return name

    def strings(self, count: int, what: str) -> list[str]:
        """``count`` strings. The loop is plain for speed: a vocabulary and its merges are half a million."""
        data, pos, end, length_at = self.data, self.pos, self.end, _U64.unpack_from
        self.spend(count * _OBJECT_BYTES, what)
        spent_at = pos + count * _U64.size + self.budget  # where the texts will have taken all that is left of it
        texts: list[str] = []
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + length_at(data, pos)[0]
                if pos > end or pos - start > _MAX_STRING_BYTES:
                    self.fail(f"{what}: entry {len(texts)} claims {pos - start} bytes, {end - start} are left")
                if pos > spent_at:
                    self.spend(pos - spent_at + self.budget, what)
                text = str(data[start:pos], "utf-8")
                if not text.isascii():
                    spent_at -= _WIDER_BYTES * len(text)
                texts.append(text)
        except struct.error:
            self.fail(f"{what} ends after {len(texts)} of {count} entries: the file is truncated; download it again")
        except UnicodeDecodeError:
            self.fail(f"{what}: entry {len(texts)} is not UTF-8")
        self.budget = spent_at - pos
        self.pos = pos
        return texts

    def value_type(self, what: str) -> GGUFValueType:
        number = self.scalar(_U32, what)
        try:
            return GGUFValueType(number)
        except ValueError:
            self.fail(f"{what} has value type {number}, which GGUF does not define")

    def value(self, what: str) -> MetaValue:
        kind = self.value_type(what)
        if kind is GGUFValueType.STRING:
            return self.string(what)
        if kind is GGUFValueType.ARRAY:
            return self.array(what)
        value: int | float | bool = self.scalar(_SCALARS[kind], what)
        return value

    def array(self, what: str) -> MetaValue:
        kind = self.value_type(what)
        count = self.scalar(_U64, what)
        if kind is GGUFValueType.ARRAY:
            self.fail(f"{what} is an array of arrays, which no model uses")
        self.need(count * (8 if kind is GGUFValueType.STRING else _SCALARS[kind].size), f"{what} ({count} entries)")
        if count > _MAX_ARRAY:
            self.fail(f"{what} has {count} entries; at most {_MAX_ARRAY} make sense")
        if kind is GGUFValueType.STRING:
            return self.strings(count, what)
        # A bool is any byte; NumPy's own must be 0 or 1.
        dtype = np.dtype("u1" if kind is GGUFValueType.BOOL else _SCALARS[kind].format)
        array = np.frombuffer(self.data, dtype, count, self.pos) if count else np.empty(0, dtype)
        self.pos += array.nbytes
        if kind is not GGUFValueType.BOOL:
            return array
        self.spend(array.nbytes, what)
        flags: np.ndarray = array != 0
        return flags


def _map(path: Path) -> mmap.mmap:
    try:
        if not path.is_file():  # a pipe would block, a directory cannot be mapped
            raise ModelFileError(f"{path}: " + ("is not a regular file" if path.exists() else "does not exist"))
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise ModelFileError(f"{path}: is empty, not a GGUF file")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path, or a file that shrank meanwhile
        raise ModelFileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def read_header(path: Path) -> Header:
    """Map one file and check all of it. Raises ModelFileError."""
    cursor = _Cursor(path, _map(path))
    if cursor.data[:4] != b"GGUF":
        cursor.fail(f"is not a GGUF file: it starts with {cursor.data[:4]!r}; only GGUF models can be loaded")
    cursor.pos = 4
    version = cursor.scalar(_U32, "the version")
    if version & 0xFFFF == 0 and version:
        cursor.fail("is a big-endian GGUF file; convert it to little-endian")
    if version not in (2, 3):
        cursor.fail(f"is GGUF version {version}; versions 2 and 3 can be loaded: convert the model again")
    n_tensors = cursor.scalar(_U64, "the tensor count")
    n_pairs = cursor.scalar(_U64, "the metadata count")
    cursor.need(n_pairs * _PAIR_BYTES + n_tensors * _TENSOR_BYTES, f"a header of {n_pairs} keys, {n_tensors} tensors")

    metadata: dict[str, MetaValue] = {}
    for index in range(n_pairs):
        key = cursor.name(f"metadata key {index}")
        if key in metadata:
            cursor.fail(f"metadata key {key} appears twice")
        metadata[key] = cursor.value(f"metadata key {key}")
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int:
        cursor.fail("general.alignment is no integer")
    if alignment < 1 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment}; it must be a power of two")

    entries: dict[str, _Entry] = {}
    for index in range(n_tensors):
        name, entry = _read_tensor_entry(cursor, index)
        if name in entries:
            cursor.fail(f"tensor {name} appears twice")
        entries[name] = entry
    start = -(-cursor.pos // alignment) * alignment
    tensors = {name: _place_tensor(cursor, name, *entry, start, alignment) for name, entry in entries.items()}
    return Header(version, cursor.end, metadata, tensors)


_Entry: TypeAlias = "tuple[tuple[int, ...], GGMLQuantizationType, int]"


def _read_tensor_entry(cursor: _Cursor, index: int) -> tuple[str, _Entry]:
    """Name of the next tensor of the header, and its shape, quant and offset."""
    name = cursor.name(f"the name of tensor {index}")
    n_dims = cursor.scalar(_U32, f"tensor {name}")
    if n_dims > _MAX_DIMS:
        cursor.fail(f"tensor {name} has {n_dims} dimensions; at most {_MAX_DIMS} are possible")
    shape = tuple(cursor.scalar(_U64, f"tensor {name}") for _ in range(n_dims)) or (1,)  # no dimension: a scalar
    if 0 in shape:
        cursor.fail(f"tensor {name} has the shape {list(shape)}: a dimension is 0")
    number = cursor.scalar(_U32, f"tensor {name}")
    try:
        quant = GGMLQuantizationType(number)
    except ValueError:
        cursor.fail(f"tensor {name} has quantization type {number}, which is unknown here; use another quantization")
    return name, (shape, quant, cursor.scalar(_U64, f"tensor {name}"))


def _place_tensor(
    cursor: _Cursor, name: str, shape: tuple[int, ...], quant: GGMLQuantizationType, offset: int, start: int,
    alignment: int,
) -> TensorInfo:
    """The tensor whose data begin ``offset`` bytes after ``start``, which must lie in the file."""
    block_elements, block_bytes = GGML_QUANT_SIZES[quant]
    if shape[0] % block_elements:
        cursor.fail(f"tensor {name} has rows of {shape[0]}, no multiple of the {block_elements} of {quant.name}")
    n_elements = prod(shape)
    n_bytes = n_elements // block_elements * block_bytes
    if offset % alignment:
        cursor.fail(f"tensor {name} lies at offset {offset}, no multiple of the alignment {alignment}")
    if start + offset + n_bytes > cursor.end:
        cursor.fail(
            f"tensor {name} {list(shape)} ends at byte {start + offset + n_bytes}, but the file has {cursor.end}: "
            "it is damaged or truncated; download it again"
        )
    data = np.frombuffer(cursor.data, np.uint8, n_bytes, start + offset)
    return TensorInfo(name, shape, quant, n_elements, n_bytes, data)
