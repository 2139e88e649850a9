"""``gemma3``: the blocks of ``dense.py``, most of which see a window alone (Gemma 3 report, 2025; Gemma 3 and its kin).

    x  = sqrt(E) * embedding                                  no factor on the head, which is the same table
    x += rms(attention(rms(x, attn_norm)), post_attention_norm)
    x += rms(down(gelu(gate(y)) * up(y)), post_ffw_norm)      y = rms(x, ffn_norm)

q and k have a norm per head; rotary pairs are (i, i + D / 2). Of n layers in a row the first n - 1 slide: a row sees
the last ``attention.sliding_window`` keys, turned by a base of their own and never scaled. The last sees everything.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import numpy as np

from kvs_core.device.operands import Activation
from kvs_core.errors import ModelFileError
from kvs_core.formats.gguf import GgufFile
from kvs_core.models.dense import dense_tensors, load_layers, load_nextn, nextn_tensors, read_dense
from kvs_core.models.rope import RopeSpec
from kvs_core.models.spec import MAX_CONTEXT, ModelSpec, TensorSpec

__all__ = ["ARCH", "load_layers", "load_nextn", "nextn_tensors", "read_spec", "trunk_tensors"]

ARCH = "gemma3"

_PERIOD = 6          # layers from one that sees everything to the next
_ODD_LAYERS = 62     # of the 27B, whose queries are scaled by what a head would have of E, not by what it has


def read_spec(file: GgufFile) -> ModelSpec:
    """The model that the file's metadata describe. Raises ModelFileError or CapabilityError."""
    spec = read_dense(file, ARCH, interleaved=False)
    window = file.get_u32(f"{ARCH}.attention.sliding_window", 0, most=MAX_CONTEXT)
    slides = _read_pattern(file, spec.n_layer)
    layers = tuple(replace(layer, window=window if slides[layer.index] else 0) for layer in spec.layers)
    if spec.n_layer == _ODD_LAYERS:
        spec = replace(spec, attention_scale=1.0 / sqrt(spec.n_embd // layers[0].heads))
    return replace(
        spec,
        layers=layers,
        rope_sliding=_read_sliding_rope(file, spec.rope) if any(layer.window for layer in layers) else None,
        embedding_factor=sqrt(spec.n_embd),
        activation=Activation.GELU,
        post_norms=True,
        logit_softcap=read_softcap(file, ARCH),
    )


def trunk_tensors(spec: ModelSpec) -> list[TensorSpec]:
    """Every tensor of the model."""
    return dense_tensors(spec, head_norms=True)


def _read_pattern(file: GgufFile, n_layer: int) -> list[bool]:
    """Per layer, whether it slides: an entry each, or the number of layers of which the last does not."""
    key = f"{ARCH}.attention.sliding_window_pattern"
    if isinstance(file.metadata.get(key), np.ndarray):
        return [bool(entry) for entry in file.get_array(key, np.bool_, length=n_layer)]
    period = file.get_u32(key, _PERIOD)
    return [period == 0 or index % period < period - 1 for index in range(n_layer)]


def _read_sliding_rope(file: GgufFile, rope: RopeSpec) -> RopeSpec:
    key = f"{ARCH}.rope.freq_base_swa"
    base = file.get_f32(key, 10000.0)
    if base <= 1.0:
        raise ModelFileError(f"{file.path}: {key} is {base:g}; it must exceed 1")
    return replace(rope, freq_base=base, scaling="none")


def read_softcap(file: GgufFile, arch: str, default: float = 0.0) -> float:
    """``ModelSpec.logit_softcap`` of an arch's file; ModelFileError for one that is no cap."""
    key = f"{arch}.final_logit_softcapping"
    cap = file.get_f32(key, default)
    if cap < 0.0:
        raise ModelFileError(f"{file.path}: {key} is {cap:g}; it must not be negative")
    return cap
