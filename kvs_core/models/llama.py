"""``llama``: grouped-query attention and SwiGLU (Touvron et al., 2023), as GGUF files carry it.

    x += out(attention(rope(q(y)), rope(k(y)), v(y)))      y = rms(x, attn_norm)
    x += down(silu(gate(y)) * up(y))                       y = rms(x, ffn_norm)

Rotary pairs are neighbours (2i, 2i + 1): the converter has permuted the rows of q and k for it. All of a head turns.
"""

from __future__ import annotations

from math import sqrt

from kvs_core.device.base import RopeTable
from kvs_core.errors import ModelFileError
from kvs_core.formats.gguf import GgufFile
from kvs_core.models.model import Layer
from kvs_core.models.nextn import NextN
from kvs_core.models.rope import read_rope
from kvs_core.models.spec import ModelSpec, TensorSpec, read_common
from kvs_core.models.weights import Loader

ARCH = "llama"


def read_spec(file: GgufFile) -> ModelSpec:
    """The model that the file's metadata describe. Raises ModelFileError or CapabilityError."""
    keys = read_common(file, ARCH)
    n_rot = file.get_u32(f"{ARCH}.rope.dimension_count", keys.k_dim)
    if n_rot != keys.k_dim or n_rot % 2:
        raise ModelFileError(
            f"{file.path}: {ARCH}.rope.dimension_count is {n_rot} with heads of {keys.k_dim} values; "
            "they must be equal and even"
        )
    scale = file.get_f32(f"{ARCH}.attention.scale", 0.0)
    if scale < 0.0:
        raise ModelFileError(f"{file.path}: {ARCH}.attention.scale is {scale:g}; it must not be negative")
    return keys.model(
        attention_scale=scale or 1.0 / sqrt(keys.k_dim),
        rope=read_rope(file, ARCH, n_rot=n_rot, n_ctx_train=keys.n_ctx_train, interleaved=True),
        layers=tuple(keys.attention_layer(index, index) for index in range(keys.n_block)),
    )


def trunk_tensors(spec: ModelSpec) -> list[TensorSpec]:
    """Every tensor of the model."""
    n_embd, n_ff = spec.n_embd, spec.n_ff
    table = [
        TensorSpec("token_embd.weight", (n_embd, spec.n_vocab)),
        TensorSpec("output_norm.weight", (n_embd,)),
        TensorSpec("output.weight", (n_embd, spec.n_vocab), optional=True),
        TensorSpec("rope_freqs.weight", (spec.rope.n_rot // 2,), optional=True),
    ]
    for layer in spec.layers:
        block = f"blk.{layer.index}"
        matrices = {
            "attn_q": (n_embd, layer.heads * layer.k_dim),
            "attn_k": (n_embd, layer.kv_heads * layer.k_dim),
            "attn_v": (n_embd, layer.kv_heads * layer.v_dim),
            "attn_output": (layer.heads * layer.v_dim, n_embd),
            "ffn_gate": (n_embd, n_ff),
            "ffn_up": (n_embd, n_ff),
            "ffn_down": (n_ff, n_embd),
        }
        for name, shape in matrices.items():
            table.append(TensorSpec(f"{block}.{name}.weight", shape))
            table.append(TensorSpec(f"{block}.{name}.bias", shape[1:], optional=True))
        table.append(TensorSpec(f"{block}.attn_norm.weight", (n_embd,)))
        table.append(TensorSpec(f"{block}.ffn_norm.weight", (n_embd,)))
    return table


def nextn_tensors(spec: ModelSpec) -> list[TensorSpec]:
    """None: no ``llama`` file has an MTP block."""
    return []


def load_nextn(spec: ModelSpec, loader: Loader, rope: RopeTable) -> NextN:
    """See ``nextn_tensors``: nobody asks."""
    raise AssertionError("a llama model has no MTP block")


def load_layers(spec: ModelSpec, loader: Loader, rope: RopeTable) -> list[Layer]:
    """The trunk on the device."""
    layers = []
    turned = loader.rope(rope)
    for layer in spec.layers:
        mixer = loader.attention(spec, layer, turned, head_norms=False)
        layers.append(Layer(mixer, loader.feed_forward(f"blk.{layer.index}", "ffn_norm")))
    return layers
