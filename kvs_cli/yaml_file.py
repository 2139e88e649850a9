"""Settings from a YAML file: one mapping from flag names to values.

Scalars are read as text and go through the same grammar as on the command line, so ``off``, ``010`` and ``1e3`` mean
what they mean there.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from kvs_core.errors import SettingsError

_MAX_BYTES = 1 << 18


class _TextLoader(yaml.BaseLoader):
    """Scalars stay text, and a key may stand only once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value!r} stands twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: Path) -> dict[str, str | list[str]]:
    """The file's entries in order. Raises SettingsError, naming the file, for anything but a mapping from names to
    scalars or lists of scalars."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror or error}; give a readable YAML file") from None
    if len(raw) > _MAX_BYTES:
        raise SettingsError(f"--config {path}: larger than {_MAX_BYTES} bytes; give a file of settings")
    try:
        loaded = yaml.load(raw, Loader=_TextLoader)  # a BaseLoader builds text, lists and mappings only
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"--config {path}: not valid YAML: {_one_line(error)}") from None
    if loaded in (None, ""):
        return {}
    if not isinstance(loaded, dict):
        raise SettingsError(f"--config {path}: expected lines such as 'ctx-size: 8192'")
    for name, value in loaded.items():
        parts = value if isinstance(value, list) else [value]
        if not isinstance(name, str) or not all(isinstance(part, str) for part in parts):
            raise SettingsError(f"--config {path}: {name!r}: expected one value or a list of values")
    return loaded


def _one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem or error.context} at line {error.problem_mark.line + 1}"
    return " ".join(str(error).split()) or type(error).__name__
