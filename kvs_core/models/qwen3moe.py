"""``qwen3moe``: the attention of ``qwen3`` and experts behind a router (Qwen3-30B-A3B, Qwen3-235B-A22B).

No expert is shared.
"""

from __future__ import annotations

from kvs_core.formats.gguf import GgufFile
from kvs_core.models.dense import load_layers, load_nextn, nextn_tensors, read_dense
from kvs_core.models.qwen3 import trunk_tensors
from kvs_core.models.spec import ModelSpec, read_experts

__all__ = ["ARCH", "load_layers", "load_nextn", "nextn_tensors", "read_spec", "trunk_tensors"]

ARCH = "qwen3moe"


def read_spec(file: GgufFile) -> ModelSpec:
    """The model that the file's metadata describe. Raises ModelFileError or CapabilityError."""
    return read_dense(file, ARCH, interleaved=False, experts=read_experts(file, ARCH, shared=False))
