"""Layers of a ``llama`` file that slide, as those of other archs do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from kvs_core.formats.gguf import GgufFile
from kvs_core.models.registry import ARCHS
from kvs_core.models.spec import ModelSpec


def slide(monkeypatch: pytest.MonkeyPatch, windows: Mapping[int, int]) -> None:
    """From here on rows of these layers see as many keys as it says."""
    arch = ARCHS["llama"]

    def read_spec(file: GgufFile) -> ModelSpec:
        spec = arch.read_spec(file)
        return replace(
            spec, layers=tuple(replace(layer, window=windows.get(layer.index, 0)) for layer in spec.layers)
        )

    monkeypatch.setitem(ARCHS, "llama", replace(arch, read_spec=read_spec))
