"""``qwen35moe``: the mixers and the MTP block of ``qwen35``, and experts behind a router (Qwen3.5-35B-A3B and larger).

Every row takes one more expert, the shared one, times the sigmoid of a gate. The MTP block has experts of its own.
"""

from __future__ import annotations

from kvs_core.formats.gguf import GgufFile
from kvs_core.models.qwen35 import load_layers, load_nextn, nextn_tensors, read_hybrid, trunk_tensors
from kvs_core.models.spec import ModelSpec, read_experts

__all__ = ["ARCH", "load_layers", "load_nextn", "nextn_tensors", "read_spec", "trunk_tensors"]

ARCH = "qwen35moe"


def read_spec(file: GgufFile) -> ModelSpec:
    """The model that the file's metadata describe. Raises ModelFileError or CapabilityError."""
    return read_hybrid(file, ARCH, read_experts(file, ARCH, shared=True))
