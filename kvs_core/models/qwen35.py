"""``qwen35``: three Gated DeltaNet layers to one of gated attention, and an MTP block (Qwen3.5, 3.6 and 3.8, dense).

    x += mixer(rms(x, attn_norm))
    x += down(silu(gate(y)) * up(y))       y = rms(x, post_attention_norm)

Attention: each head of ``attn_q`` yields its query and a gate; q and k have an RMSNorm per head; the first n_rot values
of a head turn, in pairs (i, i + n_rot / 2). DeltaNet: Yang et al., Gated Delta Networks, 2024; value head i belongs to
key head i % k_heads, in which order the converter has put them.

Positions have several ids (interleaved M-RoPE); ``rope.dimension_sections`` [t, h, w, extra] says which id turns which
pair. In a text the first three are the position and the last is 0, so a pair left to the last id does not turn. The
published models leave none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import numpy as np

from kvs_core.device.operands import GdnShape, GdnWeights
from kvs_core.errors import CapabilityError, ModelFileError
from kvs_core.formats.gguf import GgufFile
from kvs_core.models.blocks import Attention, DeltaNet
from kvs_core.models.model import Layer
from kvs_core.models.nextn import TABLE_ROWS, NextN
from kvs_core.models.rope import Ropes, RopeSpec, read_rope
from kvs_core.models.spec import (
    MAX_HEADS,
    CommonKeys,
    ExpertSpec,
    LayerKind,
    LayerSpec,
    ModelSpec,
    TensorSpec,
    feed_forward_shapes,
    read_common,
    rope_tensors,
)
from kvs_core.models.weights import Loader

ARCH = "qwen35"

_MAX_STATE_SIZE = 512
_MAX_CONV_TAPS = 64


def read_spec(file: GgufFile) -> ModelSpec:
    """The model that the file's metadata describe. Raises ModelFileError or CapabilityError."""
    return read_hybrid(file, ARCH)


def read_hybrid(file: GgufFile, arch: str, experts: ExpertSpec | None = None) -> ModelSpec:
    """The same for any arch of these blocks.

    experts  of a mixture of experts
    """
    keys = read_common(file, arch, experts)
    if keys.k_dim != keys.v_dim:
        raise ModelFileError(
            f"{file.path}: {arch} heads have keys of {keys.k_dim} and values of {keys.v_dim} numbers; "
            "the gate needs equal sizes"
        )
    n_nextn = file.get_u32(f"{arch}.nextn_predict_layers", 0)
    if n_nextn > 1:
        raise CapabilityError(
            f"{file.path}: {arch}.nextn_predict_layers is {n_nextn}; kvs has code for one MTP block"
        )
    if n_nextn >= keys.n_block:
        raise ModelFileError(
            f"{file.path}: {arch}.block_count is {keys.n_block}, MTP block included, which leaves no trunk"
        )
    n_layer = keys.n_block - n_nextn
    recurrent = _read_pattern(file, arch, keys.n_block)
    gdn = _read_gdn(file, arch)
    layers: list[LayerSpec] = []
    n_kv = 0
    for index in range(n_layer):
        if recurrent[index]:
            layers.append(LayerSpec(index, LayerKind.RECURRENT, gdn=gdn))
        else:
            layers.append(keys.attention_layer(index, n_kv, gated=True))
            n_kv += 1
    if n_nextn and "blk.0.attn_norm.weight" not in file.tensors and f"blk.{n_layer}.attn_norm.weight" in file.tensors:
        raise ModelFileError(
            f"{file.path}: holds only the MTP block of a model, not its {n_layer} layers; give the full model's file"
        )
    return keys.model(
        attention_scale=1.0 / sqrt(keys.k_dim),
        rope=_read_rope(file, keys),
        layers=tuple(layers),
        nextn=tuple(keys.attention_layer(n_layer + index, n_kv + index, gated=True) for index in range(n_nextn)),
    )


def _read_pattern(file: GgufFile, arch: str, n_block: int) -> list[bool]:
    """Per block, whether it is recurrent. The entry of the MTP block, which has attention, means nothing."""
    interval = file.get_u32(f"{arch}.full_attention_interval", 4, least=1)
    listed = file.get_array(f"{arch}.attention.recurrent_layers", np.bool_, None, length=n_block)
    if listed is not None:
        return [bool(entry) for entry in listed]
    return [(index + 1) % interval != 0 for index in range(n_block)]


def _read_gdn(file: GgufFile, arch: str) -> GdnShape:
    head_dim = file.get_u32(f"{arch}.ssm.state_size", least=1, most=_MAX_STATE_SIZE)
    k_heads = file.get_u32(f"{arch}.ssm.group_count", least=1, most=MAX_HEADS)
    v_heads = file.get_u32(f"{arch}.ssm.time_step_rank", least=1, most=MAX_HEADS)
    inner = file.get_u32(f"{arch}.ssm.inner_size", least=1)
    if v_heads % k_heads:
        raise ModelFileError(
            f"{file.path}: {arch}.ssm.time_step_rank is {v_heads}, no multiple of ssm.group_count, which is {k_heads}"
        )
    if inner != v_heads * head_dim:
        raise ModelFileError(
            f"{file.path}: {arch}.ssm.inner_size is {inner}; {v_heads} heads of {head_dim} values make "
            f"{v_heads * head_dim}"
        )
    taps = file.get_u32(f"{arch}.ssm.conv_kernel", least=2, most=_MAX_CONV_TAPS)
    return GdnShape(k_heads, v_heads, head_dim, head_dim, taps)


def _read_rope(file: GgufFile, keys: CommonKeys) -> RopeSpec:
    arch = keys.arch
    n_rot = file.get_u32(f"{arch}.rope.dimension_count", keys.k_dim, least=2)
    if n_rot > keys.k_dim or n_rot % 2:
        raise ModelFileError(
            f"{file.path}: {arch}.rope.dimension_count is {n_rot} with heads of {keys.k_dim} values; "
            "it must be even and no larger"
        )
    sections = [int(n) for n in file.get_array(f"{arch}.rope.dimension_sections", np.int64, length=4)]
    if min(sections) < 0 or not 0 < sum(sections) <= n_rot // 2:
        raise ModelFileError(
            f"{file.path}: {arch}.rope.dimension_sections is {sections}; "
            f"four parts of the {n_rot // 2} rotary pairs are expected"
        )
    rope = read_rope(file, arch, n_rot=n_rot, n_ctx_train=keys.n_ctx_train, interleaved=False)
    return replace(rope, still_pairs=still_pairs(n_rot // 2, sections))


def still_pairs(pairs: int, sections: Sequence[int]) -> tuple[int, ...]:
    """The pairs that no position id of a text reaches, by the interleaving rule of ggml's ``rope_multi``.

    Within each run of sum(sections) pairs, pair i takes id i % 3 (t, h, w) if i < 3 * sections[i % 3], else the last.
    """
    period = sum(sections)
    return tuple(pair for pair in range(pairs) if pair % period >= 3 * sections[pair % period % 3])


def trunk_tensors(spec: ModelSpec) -> list[TensorSpec]:
    """Every tensor of the model but those of the MTP block."""
    table = [
        TensorSpec("token_embd.weight", (spec.n_embd, spec.n_vocab)),
        TensorSpec("output_norm.weight", (spec.n_embd,)),
        TensorSpec("output.weight", (spec.n_embd, spec.n_vocab), optional=True),
        *rope_tensors(spec.rope),
    ]
    for layer in spec.layers:
        table += _block_tensors(spec, layer)
    return table


def nextn_tensors(spec: ModelSpec) -> list[TensorSpec]:
    """The tensors of the MTP block: one attention block, and what joins it to the trunk."""
    table = []
    for layer in spec.nextn:
        table += _block_tensors(spec, layer)
        block = f"blk.{layer.index}.nextn"
        table += [
            TensorSpec(f"{block}.eh_proj.weight", (2 * spec.n_embd, spec.n_embd)),
            TensorSpec(f"{block}.enorm.weight", (spec.n_embd,)),
            TensorSpec(f"{block}.hnorm.weight", (spec.n_embd,)),
            TensorSpec(f"{block}.shared_head_norm.weight", (spec.n_embd,), optional=True),
            TensorSpec(f"{block}.embed_tokens.weight", (spec.n_embd, spec.n_vocab), optional=True),
            TensorSpec(f"{block}.shared_head_head.weight", (spec.n_embd, spec.n_vocab), optional=True),
        ]
    return table


def _block_tensors(spec: ModelSpec, layer: LayerSpec) -> list[TensorSpec]:
    n_embd, gdn = spec.n_embd, layer.gdn
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (n_embd,),
        "post_attention_norm.weight": (n_embd,),
        **{f"{name}.weight": shape for name, shape in feed_forward_shapes(spec).items()},
    }
    if gdn is None:
        shapes |= {
            "attn_q.weight": (n_embd, 2 * layer.heads * layer.k_dim),
            "attn_k.weight": (n_embd, layer.kv_heads * layer.k_dim),
            "attn_v.weight": (n_embd, layer.kv_heads * layer.v_dim),
            "attn_output.weight": (layer.heads * layer.v_dim, n_embd),
            "attn_q_norm.weight": (layer.k_dim,),
            "attn_k_norm.weight": (layer.k_dim,),
        }
    else:
        inner = gdn.v_heads * gdn.d_v
        shapes |= {
            "attn_qkv.weight": (n_embd, gdn.conv_channels),
            "attn_gate.weight": (n_embd, inner),
            "ssm_conv1d.weight": (gdn.conv_taps, gdn.conv_channels),
            "ssm_dt.bias": (gdn.v_heads,),
            "ssm_a": (gdn.v_heads,),
            "ssm_alpha.weight": (n_embd, gdn.v_heads),
            "ssm_beta.weight": (n_embd, gdn.v_heads),
            "ssm_norm.weight": (gdn.d_v,),
            "ssm_out.weight": (inner, n_embd),
        }
    return [TensorSpec(f"blk.{layer.index}.{name}", shape) for name, shape in shapes.items()]


def load_layers(spec: ModelSpec, loader: Loader, ropes: Ropes) -> list[Layer]:
    """The trunk on the device."""
    layers = []
    turned = loader.rope(ropes.full)
    for layer in spec.layers:
        if layer.gdn:
            mixer: Attention | DeltaNet = _load_delta_net(spec, layer, loader)
        else:
            mixer = loader.attention(spec, layer, turned)
        layers.append(Layer(mixer, loader.feed_forward(spec, layer, "post_attention_norm")))
    return layers


def load_nextn(spec: ModelSpec, loader: Loader, ropes: Ropes) -> NextN:
    """The MTP block on the device."""
    layer = spec.nextn[0]
    block = f"blk.{layer.index}"
    own = f"{block}.nextn"
    head = f"{own}.shared_head_head" if loader.has(f"{own}.shared_head_head.weight") else loader.head
    head_norm = f"{own}.shared_head_norm.weight"
    table = f"{own}.embed_tokens.weight"
    return NextN(
        table=loader.table(table if loader.has(table) else "token_embd.weight"),
        embed_norm=loader.vector(f"{own}.enorm.weight"),
        hidden_norm=loader.vector(f"{own}.hnorm.weight"),
        join=loader.matrix(f"{own}.eh_proj"),
        attention=loader.attention(spec, layer, loader.rope(ropes.full)),
        feed_forward=loader.feed_forward(spec, layer, "post_attention_norm"),
        head_norm=loader.vector(head_norm if loader.has(head_norm) else "output_norm.weight"),
        head=loader.matrix(head),
        hidden=loader.zeros((TABLE_ROWS, spec.n_embd)),
    )


def _load_delta_net(spec: ModelSpec, layer: LayerSpec, loader: Loader) -> DeltaNet:
    block = f"blk.{layer.index}"
    return DeltaNet(
        layer=layer,
        norm=loader.vector(f"{block}.attn_norm.weight"),
        joint=loader.matrix(f"{block}.attn_qkv", f"{block}.attn_gate", f"{block}.ssm_beta", f"{block}.ssm_alpha"),
        out=loader.matrix(f"{block}.ssm_out"),
        weights=GdnWeights(
            conv=loader.transposed(f"{block}.ssm_conv1d.weight"),
            dt_bias=loader.vector(f"{block}.ssm_dt.bias"),
            a=loader.vector(f"{block}.ssm_a"),
            norm=loader.vector(f"{block}.ssm_norm.weight"),
            eps=spec.rms_eps,
        ),
    )
