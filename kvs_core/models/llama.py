"""``llama``: grouped-query attention and SwiGLU (Touvron et al., 2023), as GGUF files carry it; see ``dense.py``.

Rotary pairs are neighbours (2i, 2i + 1): the converter has permuted the rows of q and k for it. Any matrix may have a
bias.
"""

from __future__ import annotations

from kvs_core.errors import ModelFileError
from kvs_core.formats.gguf import GgufFile
from kvs_core.models.dense import dense_tensors, load_layers, load_nextn, nextn_tensors, read_dense
from kvs_core.models.rope import DIVISORS
from kvs_core.models.spec import ModelSpec, TensorSpec

__all__ = ["ARCH", "load_layers", "load_nextn", "nextn_tensors", "read_spec", "trunk_tensors"]

ARCH = "llama"

_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def read_spec(file: GgufFile) -> ModelSpec:
    """The model that the file's metadata describe. Raises ModelFileError or CapabilityError."""
    scale = file.get_f32(f"{ARCH}.attention.scale", 0.0)
    if scale < 0.0:
        raise ModelFileError(f"{file.path}: {ARCH}.attention.scale is {scale:g}; it must not be negative")
    return read_dense(file, ARCH, interleaved=True, scale=scale)


def trunk_tensors(spec: ModelSpec) -> list[TensorSpec]:
    """Every tensor of the model."""
    return [
        *dense_tensors(spec, maybe_biases=_MATRICES),
        TensorSpec(DIVISORS, (spec.rope.n_rot // 2,), optional=True),
    ]
