"""GGUF model files: typed, validated metadata and tensors, from one file or from all parts of a split model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, overload

import numpy as np
import numpy.typing as npt

from kvs_core.errors import ModelFileError, SettingsError
from kvs_core.formats.gguf_header import MetaValue, TensorBytes, TensorInfo, read_header

__all__ = ["SYNTHETIC_KEY", "GgufFile", "MetaValue", "TensorInfo", "parse_override", "part_names", "split_experts"]

D = TypeVar("D")

SYNTHETIC_KEY = "kvs.synthetic"
"""Metadata key of a model with random weights, made for measuring: true."""

_OWN_KEYS = re.compile(r"general\.alignment|split\..*|kvs\..*")
_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)
_MAX_PARTS = 99_999  # as many as five digits tell apart


class _Missing:
    """The type of ``_MISSING``, the default that makes a key required."""


_MISSING = _Missing()


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """A model file, or all parts of a split one, with every size and offset checked.

    The getters return a key's value as the type they name. They raise ModelFileError naming the file and the key when
    the value has another type or lies outside its bounds, and when the key is absent and no default was given.
    """

    path: Path
    version: int
    file_bytes: int
    metadata: Mapping[str, MetaValue] = field(repr=False)
    tensors: Mapping[str, TensorInfo] = field(repr=False)

    @staticmethod
    def open(path: Path) -> GgufFile:
        """Map ``path`` and, if it is the first part of a split model, the other parts beside it.

        Raises ModelFileError, with one line that says which part of which file is wrong.
        """
        first = _read_part(path)
        count = first.get_u32("split.count", 0, most=_MAX_PARTS)
        if count <= 1:
            return first
        number = first.get_u32("split.no") + 1
        names = part_names(path.name)
        if len(names) != count or number > count or names[number - 1] != path.name:
            raise ModelFileError(
                f"{path}: holds part {number} of {count} of a split model, so its name must end in "
                f"-{number:05d}-of-{count:05d}.gguf; rename it back"
            )
        if number != 1:
            raise ModelFileError(f"{path}: is part {number} of {count} of a split model; give {names[0]}")
        tensors = dict(first.tensors)
        file_bytes = first.file_bytes
        for index, name in enumerate(names[1:], start=1):
            part_path = path.with_name(name)
            if not part_path.exists():
                raise ModelFileError(f"{part_path}: is missing; it is part {index + 1} of {count} of this model")
            part = _read_part(part_path)
            if (part.get_u32("split.no"), part.get_u32("split.count")) != (index, count):
                raise ModelFileError(f"{part_path}: does not say, in split.no, that it is part {index + 1} of {count}")
            if twice := tensors.keys() & part.tensors.keys():
                raise ModelFileError(f"{part_path}: tensor {min(twice)} is also in an earlier part")
            tensors.update(part.tensors)
            file_bytes += part.file_bytes
        expected = first.get_u32("split.tensors.count")
        if len(tensors) != expected:
            raise ModelFileError(f"{path}: split.tensors.count is {expected}, but the parts hold {len(tensors)}")
        return replace(first, tensors=MappingProxyType(tensors), file_bytes=file_bytes)

    @property
    def arch(self) -> str:
        """The architecture that the keys are named after, such as ``llama``."""
        return self.get_str("general.architecture")

    @property
    def synthetic(self) -> bool:
        """Whether its weights are random, so that all that is said of it must say so."""
        return self.metadata.get(SYNTHETIC_KEY) is True

    def override(self, pairs: Iterable[tuple[str, MetaValue]]) -> GgufFile:
        """The same file with these pairs in place of, or beside, its own (``--override-kv``).

        Raises SettingsError for a pair of another type than the file's, and for a key that describes the file itself.
        """
        metadata = dict(self.metadata)
        for key, value in pairs:
            if _OWN_KEYS.fullmatch(key):
                raise SettingsError(f"--override-kv {key}: describes the file itself; it cannot be overridden")
            if key in metadata and type(metadata[key]) is not type(value):
                raise SettingsError(
                    f"--override-kv {key}: is {_kind(value)}, but in {self.path.name} it is {_kind(metadata[key])}; "
                    "give the type it has there"
                )
            metadata[key] = value
        return replace(self, metadata=MappingProxyType(metadata))

    @overload
    def get_u32(self, key: str, *, least: int = ..., most: int = ...) -> int: ...
    @overload
    def get_u32(self, key: str, default: D, *, least: int = ..., most: int = ...) -> int | D: ...
    def get_u32(self, key: str, default: Any = _MISSING, *, least: int = 0, most: int = (1 << 32) - 1) -> Any:
        """An integer of any width within [least, most]."""
        value = self._find(key, default)
        if value is default:
            return default
        if type(value) is not int:
            self._wrong_type(key, value, "an integer")
        if not least <= value <= most:
            raise ModelFileError(f"{self.path}: {key} is {value}; it must lie between {least} and {most}")
        return value

    @overload
    def get_f32(self, key: str) -> float: ...
    @overload
    def get_f32(self, key: str, default: D) -> float | D: ...
    def get_f32(self, key: str, default: Any = _MISSING) -> Any:
        """A finite number; an integer counts."""
        value = self._find(key, default)
        if value is default:
            return default
        if type(value) not in (float, int):
            self._wrong_type(key, value, "a number")
        if not isfinite(value):
            raise ModelFileError(f"{self.path}: {key} is {value}; it must be finite")
        return float(value)

    @overload
    def get_str(self, key: str) -> str: ...
    @overload
    def get_str(self, key: str, default: D) -> str | D: ...
    def get_str(self, key: str, default: Any = _MISSING) -> Any:
        """A string."""
        value = self._find(key, default)
        if value is not default and type(value) is not str:
            self._wrong_type(key, value, "a string")
        return value

    @overload
    def get_strings(self, key: str) -> list[str]: ...
    @overload
    def get_strings(self, key: str, default: D) -> list[str] | D: ...
    def get_strings(self, key: str, default: Any = _MISSING) -> Any:
        """An array of strings. The list is the file's own: do not change it."""
        value = self._find(key, default)
        if value is not default and type(value) is not list:
            self._wrong_type(key, value, "an array of strings")
        return value

    @overload
    def get_array(self, key: str, dtype: npt.DTypeLike, *, length: int | None = ...) -> npt.NDArray[Any]: ...
    @overload
    def get_array(
        self, key: str, dtype: npt.DTypeLike, default: D, *, length: int | None = ...
    ) -> npt.NDArray[Any] | D: ...
    def get_array(
        self, key: str, dtype: npt.DTypeLike, default: Any = _MISSING, *, length: int | None = None
    ) -> Any:
        """A numeric array [length] as ``dtype``, which must be of the file's kind: integer, float or bool.

        Raises ModelFileError also when an integer does not fit ``dtype`` or the length is not ``length``.
        """
        value = self._find(key, default)
        if value is default:
            return default
        wanted = np.dtype(dtype)
        kind = {"i": "integers", "u": "integers", "f": "floats", "b": "bools"}
        if not isinstance(value, np.ndarray) or kind[value.dtype.kind] != kind[wanted.kind]:
            self._wrong_type(key, value, f"an array of {kind[wanted.kind]}")
        if length is not None and len(value) != length:
            raise ModelFileError(f"{self.path}: {key} has {len(value)} entries; {length} are expected")
        if wanted.kind in "iu" and value.size:
            for extreme in (int(value.min()), int(value.max())):
                if not np.iinfo(wanted).min <= extreme <= np.iinfo(wanted).max:
                    raise ModelFileError(f"{self.path}: {key} holds {extreme}, which is no {wanted.name}")
        return value.astype(wanted)

    def _find(self, key: str, default: Any) -> Any:
        value = self.metadata.get(key, default)
        if value is _MISSING:
            raise ModelFileError(f"{self.path}: has no metadata key {key}, which this model needs")
        return value

    def _wrong_type(self, key: str, value: MetaValue, wanted: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {key} is {_kind(value)}; {wanted} is expected")


def _read_part(path: Path) -> GgufFile:
    """One file, whether a whole model or a part of one."""
    header = read_header(path)
    return GgufFile(
        path, header.version, header.file_bytes, MappingProxyType(header.metadata), MappingProxyType(header.tensors)
    )


def part_names(name: str) -> list[str]:
    """The names of all parts of the split model that a file name belongs to, in order; else the name alone."""
    match = _PART_NAME.fullmatch(name)
    if match is None or not 1 <= int(match["no"]) <= int(match["count"]):
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{no:05d}-of-{count:05d}.gguf" for no in range(1, count + 1)]


@dataclass(frozen=True, slots=True)
class _Part:
    """``n_bytes`` of a tensor from byte ``first`` on, no more read, or made, than is asked for."""

    data: TensorBytes
    first: int
    n_bytes: int

    def __len__(self) -> int:
        return self.n_bytes

    def __getitem__(self, part: slice, /) -> npt.NDArray[np.uint8]:
        first, last, step = part.indices(self.n_bytes)
        assert step == 1
        return self.data[self.first + first : self.first + max(first, last)]


def split_experts(info: TensorInfo) -> Iterator[TensorInfo]:
    """The matrices [n_in, n_out] of a tensor [n_in, n_out, n], which lie one behind the other."""
    n_in, n_out, count = info.shape
    size = info.n_bytes // count
    for number in range(count):
        yield replace(
            info, name=f"{info.name}[{number}]", shape=(n_in, n_out), n_elements=n_in * n_out, n_bytes=size,
            data=_Part(info.data, number * size, size),
        )


def parse_override(text: str) -> tuple[str, MetaValue]:
    """``key=type:value`` of ``--override-kv``, type one of int, float, bool, str. Raises SettingsError."""
    key, equals, typed = text.partition("=")
    type_name, colon, raw = typed.partition(":")
    if not (key and equals and colon):
        raise SettingsError(f"--override-kv {text}: write key=type:value, as in llama.context_length=int:4096")
    try:
        match type_name:
            case "int":
                number = int(raw)
                if not -(1 << 63) <= number < 1 << 63:
                    raise ValueError
                return key, number
            case "float":
                real = float(raw)
                if not isfinite(real):
                    raise ValueError
                return key, real
            case "bool":
                return key, {"true": True, "false": False}[raw]
            case "str":
                return key, raw
    except (ValueError, KeyError):
        forms = {"int": "a 64-bit integer", "float": "a finite number", "bool": "true or false"}
        raise SettingsError(f"--override-kv {text}: {raw!r} is not {forms[type_name]}") from None
    raise SettingsError(f"--override-kv {text}: type {type_name!r} is unknown; use int, float, bool or str")


def _kind(value: MetaValue) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {len(value)} {value.dtype.name}"
    if isinstance(value, list):
        return f"an array of {len(value)} strings"
    return {bool: "a bool", int: "an integer", float: "a float", str: "a string"}[type(value)]
