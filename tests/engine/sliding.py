"""Layers of a ``llama`` file that slide, as those of other archs do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from kvs_core.formats.gguf import GgufFile
from kvs_core.models.blocks import Attention
from kvs_core.models.registry import ARCHS
from kvs_core.models.spec import LayerSpec, ModelSpec
from kvs_core.models.weights import Loader


def slide(monkeypatch: pytest.MonkeyPatch, windows: Mapping[int, int]) -> None:
    """From here on rows of these layers see as many keys as it says."""
    arch, load = ARCHS["llama"], Loader.attention

    def read_spec(file: GgufFile) -> ModelSpec:
        spec = arch.read_spec(file)
        return replace(
            spec, layers=tuple(replace(layer, window=windows.get(layer.index, 0)) for layer in spec.layers)
        )

    def attention(self: Loader, spec: ModelSpec, layer: LayerSpec, rope: Any) -> Attention:
        made = load(self, spec, layer, rope)
        return replace(made, params=replace(made.params, window=layer.window))

    monkeypatch.setitem(ARCHS, "llama", replace(arch, read_spec=read_spec))
    monkeypatch.setattr(Loader, "attention", attention)
