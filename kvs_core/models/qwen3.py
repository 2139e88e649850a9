"""``qwen3``: the blocks of ``dense.py`` with an RMSNorm on each head of q and k before it turns, and no biases.

Rotary pairs are (i, i + D / 2). The head size is a key of its own: H heads of D values need not be E wide.
"""

from __future__ import annotations

from kvs_core.formats.gguf import GgufFile
from kvs_core.models.dense import dense_tensors, load_layers, load_nextn, nextn_tensors, read_dense
from kvs_core.models.spec import ModelSpec, TensorSpec

__all__ = ["ARCH", "load_layers", "load_nextn", "nextn_tensors", "read_spec", "trunk_tensors"]

ARCH = "qwen3"


def read_spec(file: GgufFile) -> ModelSpec:
    """The model that the file's metadata describe. Raises ModelFileError or CapabilityError."""
    return read_dense(file, ARCH, interleaved=False)


def trunk_tensors(spec: ModelSpec) -> list[TensorSpec]:
    """Every tensor of the model."""
    return dense_tensors(spec, head_norms=True)
