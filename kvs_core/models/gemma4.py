"""``gemma4``: the blocks of ``gemma3`` with layers of two shapes, dense or with experts (GGUF arch of Gemma 4's text).

    x  = sqrt(E) * embedding                                  no factor on the head, which is the same table
    x += rms(attention(rms(x, attn_norm)), post_attention_norm)
    x += rms(down(gelu(gate(y)) * up(y)), post_ffw_norm)      y = rms(x, ffn_norm); or ``Ops.add_mixture``
    x += per-layer embedding                                  of some models: ``Ops.add_per_layer``
    x *= layer_output_scale

Layers that slide have other heads than those that see everything, and other positions; the angles of the latter are
divided by ``rope_freqs``, which lets most pairs stand still. Scores are not scaled. Queries, keys and values have a
norm per head, that of values without weights; where a layer has no matrix for values they are its projected keys. The
last layers may have no keys and values: they read those of the last layer of their kind that has some.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np

from kvs_core.device.operands import Activation, MixtureWeights, PerLayerWeights
from kvs_core.errors import CapabilityError, ModelFileError
from kvs_core.formats.gguf import GgufFile
from kvs_core.models.blocks import Experts, FeedForward, Mixture, PerLayer
from kvs_core.models.dense import load_nextn, nextn_tensors
from kvs_core.models.gemma3 import read_softcap
from kvs_core.models.model import Layer
from kvs_core.models.rope import DIVISORS, Ropes, RopeSpec, read_rope
from kvs_core.models.spec import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_WIDTH,
    CommonKeys,
    ExpertSpec,
    LayerKind,
    LayerSpec,
    ModelSpec,
    TensorSpec,
    read_common,
    read_experts,
)
from kvs_core.models.weights import PER_LAYER_TABLE, Loader

__all__ = ["ARCH", "load_layers", "load_nextn", "load_per_layer", "nextn_tensors", "read_spec", "trunk_tensors"]

ARCH = "gemma4"

_SOFTCAP = 30.0   # of logits where the file says nothing, as in llama.cpp


def read_spec(file: GgufFile) -> ModelSpec:
    """The model that the file's metadata describe. Raises ModelFileError or CapabilityError."""
    n_block = file.get_u32(f"{ARCH}.block_count", least=1, most=MAX_CONTEXT)
    widths = _per_layer(file, f"{ARCH}.feed_forward_length", n_block, MAX_WIDTH)
    kv_heads = _per_layer(file, f"{ARCH}.attention.head_count_kv", n_block, MAX_HEADS)
    experts = read_experts(file, ARCH, shared=False) if file.get_u32(f"{ARCH}.expert_count", 0) else None
    keys = read_common(file, ARCH, experts, n_ff=max(widths), kv_heads=max(kv_heads))
    n_rot = file.get_u32(f"{ARCH}.rope.dimension_count", keys.k_dim)
    _check_rot(file, "rope.dimension_count", n_rot, keys.k_dim)
    rope = read_rope(file, ARCH, n_rot=n_rot, n_ctx_train=keys.n_ctx_train, interleaved=False)
    layers = _read_layers(file, keys, kv_heads, widths)
    sliding = next((layer for layer in layers if layer.window), None)
    return replace(
        keys.model(attention_scale=1.0, rope=rope, layers=layers),
        rope_sliding=None if sliding is None else _read_sliding_rope(file, rope, sliding.k_dim),
        embedding_factor=sqrt(keys.n_embd),
        activation=Activation.GELU,
        post_norms=True,
        logit_softcap=read_softcap(file, ARCH, _SOFTCAP),
        v_norms=True,
        n_ff=max(widths),
        n_per_layer=file.get_u32(f"{ARCH}.embedding_length_per_layer_input", 0, most=MAX_WIDTH),
    )


def trunk_tensors(spec: ModelSpec) -> list[TensorSpec]:
    """Every tensor of the model."""
    n_embd, n_per_layer = spec.n_embd, spec.n_per_layer
    table = [
        TensorSpec("token_embd.weight", (n_embd, spec.n_vocab)),
        TensorSpec("output_norm.weight", (n_embd,)),
        TensorSpec("output.weight", (n_embd, spec.n_vocab), optional=True),
        TensorSpec(DIVISORS, (spec.rope.n_rot // 2,), optional=True),
    ]
    if n_per_layer:
        every = n_per_layer * spec.n_layer
        table += [
            TensorSpec(PER_LAYER_TABLE, (every, spec.n_vocab)),
            TensorSpec("per_layer_model_proj.weight", (n_embd, every)),
            TensorSpec("per_layer_proj_norm.weight", (n_per_layer,)),
        ]
    for layer in spec.layers:
        block = f"blk.{layer.index}"
        table += [TensorSpec(f"{block}.{name}.weight", shape) for name, shape in _needed(spec, layer).items()]
        kv = layer.kv_heads * layer.k_dim
        # A layer that shares may carry keys and values that nobody computes.
        table += [
            TensorSpec(f"{block}.attn_k.weight", (n_embd, kv), optional=layer.shares),
            TensorSpec(f"{block}.attn_v.weight", (n_embd, kv), optional=layer.shares or not layer.window),
            TensorSpec(f"{block}.attn_k_norm.weight", (layer.k_dim,), optional=layer.shares),
            TensorSpec(f"{block}.layer_output_scale.weight", (1,), optional=True),
        ]
        if spec.experts is not None:
            table += list(_expert_tensors(spec.experts, block, n_embd))
    return table


def load_layers(spec: ModelSpec, loader: Loader, ropes: Ropes) -> list[Layer]:
    """The trunk on the device."""
    full, sliding = loader.rope(ropes.full), loader.rope(ropes.sliding)
    layers = []
    for layer in spec.layers:
        scale = f"blk.{layer.index}.layer_output_scale.weight"
        layers.append(Layer(
            loader.attention(spec, layer, sliding if layer.window else full),
            _load_feed_forward(spec, layer, loader),
            _load_per_layer(spec, layer, loader) if spec.n_per_layer else None,
            float(loader.numbers(scale)[0]) if loader.has(scale) else 1.0,
        ))
    return layers


def load_per_layer(spec: ModelSpec, loader: Loader) -> PerLayerWeights | None:
    """What makes a token's embeddings per layer; None in a model without."""
    if not spec.n_per_layer:
        return None
    return PerLayerWeights(
        loader.table(PER_LAYER_TABLE), loader.matrix("per_layer_model_proj"),
        loader.vector("per_layer_proj_norm.weight"),
    )


def _per_layer(file: GgufFile, key: str, n_block: int, most: int) -> list[int]:
    """A number per layer: an entry each, or one for all."""
    if not isinstance(file.metadata.get(key), np.ndarray):
        return [file.get_u32(key, least=1, most=most)] * n_block
    values = [int(value) for value in file.get_array(key, np.int32, length=n_block)]
    if not all(1 <= value <= most for value in values):
        raise ModelFileError(f"{file.path}: {key} has numbers from {min(values)} to {max(values)}; 1 to {most} will do")
    return values


def _check_rot(file: GgufFile, name: str, n_rot: int, k_dim: int) -> None:
    if n_rot != k_dim or n_rot % 2:
        raise ModelFileError(
            f"{file.path}: {ARCH}.{name} is {n_rot} with heads of {k_dim} values; they must be equal and even"
        )


def _read_sliding_rope(file: GgufFile, rope: RopeSpec, k_dim: int) -> RopeSpec:
    n_rot = file.get_u32(f"{ARCH}.rope.dimension_count_swa", k_dim)
    _check_rot(file, "rope.dimension_count_swa", n_rot, k_dim)
    base = file.get_f32(f"{ARCH}.rope.freq_base_swa", 10000.0)
    if base <= 1.0:
        raise ModelFileError(f"{file.path}: {ARCH}.rope.freq_base_swa is {base:g}; it must exceed 1")
    return replace(rope, n_rot=n_rot, freq_base=base, scaling="none")


def _read_layers(
    file: GgufFile, keys: CommonKeys, kv_heads: list[int], widths: list[int]
) -> tuple[LayerSpec, ...]:
    """The layers, and whose keys and values each reads."""
    n_layer = keys.n_block
    window = file.get_u32(f"{ARCH}.attention.sliding_window", least=1, most=MAX_CONTEXT)
    slides = file.get_array(f"{ARCH}.attention.sliding_window_pattern", np.bool_, length=n_layer).tolist()
    k_swa, v_swa = (
        file.get_u32(f"{ARCH}.attention.{name}_length_swa", least=1, most=MAX_HEAD_DIM) for name in ("key", "value")
    )
    shared = file.get_u32(f"{ARCH}.attention.shared_kv_layers", 0)
    own = n_layer - shared
    if shared and (own < 2 or not slides[own - 2] or slides[own - 1]):
        raise CapabilityError(
            f"{file.path}: {ARCH}.attention.shared_kv_layers is {shared} of {n_layer} layers; kvs has code where the "
            "last two layers before them are one that slides and one that sees everything"
        )
    for index in range(n_layer):
        if keys.heads % kv_heads[index]:
            raise ModelFileError(
                f"{file.path}: {ARCH}.attention.head_count is {keys.heads}, no multiple of {kv_heads[index]} in "
                f"head_count_kv of layer {index}"
            )
    layers = []
    for index in range(n_layer):
        shares = index >= own
        kv_index = (own - 2 if slides[index] else own - 1) if shares else index
        k_dim, v_dim = (k_swa, v_swa) if slides[index] else (keys.k_dim, keys.v_dim)
        if k_dim != v_dim:
            raise CapabilityError(
                f"{file.path}: layer {index} has keys of {k_dim} values and values of {v_dim}; kvs has code for equal "
                f"ones in {ARCH} models"
            )
        layers.append(LayerSpec(
            index, LayerKind.FULL, keys.heads, kv_heads[kv_index], k_dim, v_dim, kv_index,
            window=window if slides[index] else 0, read_index=index, shares=shares, n_ff=widths[index],
        ))
    return tuple(layers)


def _needed(spec: ModelSpec, layer: LayerSpec) -> dict[str, tuple[int, ...]]:
    """The tensors that a block must have but for keys, by name, without ``.weight``; shapes in GGUF order."""
    n_embd, n_ff, n_per_layer = spec.n_embd, layer.n_ff, spec.n_per_layer
    own = {"inp_gate": (n_embd, n_per_layer), "proj": (n_per_layer, n_embd), "post_norm": (n_embd,)}
    return {
        "attn_q": (n_embd, layer.heads * layer.k_dim),
        "attn_output": (layer.heads * layer.v_dim, n_embd),
        "attn_q_norm": (layer.k_dim,),
        "ffn_gate": (n_embd, n_ff), "ffn_up": (n_embd, n_ff), "ffn_down": (n_ff, n_embd),
        **dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), (n_embd,)),
        **(own if n_per_layer else {}),
    }


def _expert_tensors(experts: ExpertSpec, block: str, n_embd: int) -> Iterator[TensorSpec]:
    count, n_ff = experts.count, experts.n_ff
    yield TensorSpec(f"{block}.ffn_gate_inp.weight", (n_embd, count))
    yield TensorSpec(f"{block}.ffn_gate_inp.scale", (n_embd,))
    if experts.joined:
        yield TensorSpec(f"{block}.ffn_gate_up_exps.weight", (n_embd, 2 * n_ff, count))
    else:
        yield TensorSpec(f"{block}.ffn_gate_exps.weight", (n_embd, n_ff, count))
        yield TensorSpec(f"{block}.ffn_up_exps.weight", (n_embd, n_ff, count))
    yield TensorSpec(f"{block}.ffn_down_exps.weight", (n_ff, n_embd, count))
    yield TensorSpec(f"{block}.ffn_down_exps.scale", (count,), optional=True)
    for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
        yield TensorSpec(f"{block}.{name}.weight", (n_embd,))


def _load_feed_forward(spec: ModelSpec, layer: LayerSpec, loader: Loader) -> FeedForward | Experts | Mixture:
    if spec.experts is None:
        return loader.feed_forward(spec, layer, "ffn_norm")
    block = f"blk.{layer.index}"

    def norm(name: str) -> Any:
        return loader.vector(f"{block}.{name}.weight")

    scales = f"{block}.ffn_down_exps.scale"
    return Mixture(MixtureWeights(
        norm=norm("ffn_norm"),
        gate_up=loader.matrix(f"{block}.ffn_gate", f"{block}.ffn_up"),
        down=loader.matrix(f"{block}.ffn_down"),
        dense_norm=norm("post_ffw_norm_1"),
        experts_norm=norm("pre_ffw_norm_2"),
        experts=loader.experts(spec.experts, block, spec.activation),
        sum_norm=norm("post_ffw_norm_2"),
        router_scale=loader.vector(f"{block}.ffn_gate_inp.scale"),
        expert_scales=loader.vector(scales) if loader.has(scales) else None,
        post_norm=norm("post_ffw_norm"),
    ))


def _load_per_layer(spec: ModelSpec, layer: LayerSpec, loader: Loader) -> PerLayer:
    block, size = f"blk.{layer.index}", spec.n_per_layer
    return PerLayer(
        slice(layer.index * size, (layer.index + 1) * size), loader.matrix(f"{block}.inp_gate"),
        loader.matrix(f"{block}.proj"), loader.vector(f"{block}.post_norm.weight"),
    )
