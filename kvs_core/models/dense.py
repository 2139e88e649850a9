"""What the archs of plain attention and a gated feed-forward share: their keys, their tensors and their layers.

    x += out(attention(rope(norm(q(y))), rope(norm(k(y))), v(y)))      y = rms(x, attn_norm)
    x += down(activation(gate(y)) * up(y))                             y = rms(x, ffn_norm)

or, in a mixture of experts, what ``Ops.add_experts`` says of the same norm.

An arch says in which pairs a head turns, which biases it has and whether q and k, and what is added, have a norm. All
of a head turns. What layers have in common is told of each of them, so that a layer may differ from the next one.
"""

from __future__ import annotations

from collections.abc import Collection
from math import sqrt

from kvs_core.errors import ModelFileError
from kvs_core.formats.gguf import GgufFile
from kvs_core.models.model import Layer
from kvs_core.models.nextn import NextN
from kvs_core.models.rope import Ropes, read_rope
from kvs_core.models.spec import ExpertSpec, ModelSpec, TensorSpec, feed_forward_shapes, read_common, rope_tensors
from kvs_core.models.weights import POST_NORMS, Loader


def read_dense(
    file: GgufFile, arch: str, *, interleaved: bool, scale: float = 0.0, experts: ExpertSpec | None = None
) -> ModelSpec:
    """The model that the file's metadata describe: ``arch.block_count`` attention layers.

    interleaved  see ``RopeTable``
    scale        factor on q before the softmax; 0: 1 / sqrt(head size)
    experts      of a mixture of experts
    Raises ModelFileError or CapabilityError.
    """
    keys = read_common(file, arch, experts)
    n_rot = file.get_u32(f"{arch}.rope.dimension_count", keys.k_dim)
    if n_rot != keys.k_dim or n_rot % 2:
        raise ModelFileError(
            f"{file.path}: {arch}.rope.dimension_count is {n_rot} with heads of {keys.k_dim} values; "
            "they must be equal and even"
        )
    return keys.model(
        attention_scale=scale or 1.0 / sqrt(keys.k_dim),
        rope=read_rope(file, arch, n_rot=n_rot, n_ctx_train=keys.n_ctx_train, interleaved=interleaved),
        layers=tuple(keys.attention_layer(index, index) for index in range(keys.n_block)),
    )


def dense_tensors(
    spec: ModelSpec, *, biases: Collection[str] = (), maybe_biases: Collection[str] = (), head_norms: bool = False
) -> list[TensorSpec]:
    """Every tensor of the model.

    biases, maybe_biases  the matrices of a block that have one, and those that may, such as ``attn_q``
    head_norms            q and k have an RMSNorm per head
    """
    n_embd = spec.n_embd
    table = [
        TensorSpec("token_embd.weight", (n_embd, spec.n_vocab)),
        TensorSpec("output_norm.weight", (n_embd,)),
        TensorSpec("output.weight", (n_embd, spec.n_vocab), optional=True),
        *rope_tensors(spec.rope),
    ]
    for layer in spec.layers:
        block = f"blk.{layer.index}"
        matrices: dict[str, tuple[int, ...]] = {
            "attn_q": (n_embd, layer.heads * layer.k_dim),
            "attn_k": (n_embd, layer.kv_heads * layer.k_dim),
            "attn_v": (n_embd, layer.kv_heads * layer.v_dim),
            "attn_output": (layer.heads * layer.v_dim, n_embd),
            **feed_forward_shapes(spec),
        }
        for name, shape in matrices.items():
            table.append(TensorSpec(f"{block}.{name}.weight", shape))
            if name in biases or name in maybe_biases:
                table.append(TensorSpec(f"{block}.{name}.bias", shape[1:], optional=name in maybe_biases))
        table.append(TensorSpec(f"{block}.attn_norm.weight", (n_embd,)))
        table.append(TensorSpec(f"{block}.ffn_norm.weight", (n_embd,)))
        if spec.post_norms:
            table += [TensorSpec(f"{block}.{name}.weight", (n_embd,)) for name in POST_NORMS]
        if head_norms:
            table.append(TensorSpec(f"{block}.attn_q_norm.weight", (layer.k_dim,)))
            table.append(TensorSpec(f"{block}.attn_k_norm.weight", (layer.k_dim,)))
    return table


def nextn_tensors(spec: ModelSpec) -> list[TensorSpec]:
    """None: no file of these archs has an MTP block."""
    return []


def load_nextn(spec: ModelSpec, loader: Loader, ropes: Ropes) -> NextN:
    """See ``nextn_tensors``: nobody asks."""
    raise AssertionError(f"a {spec.arch} model has no MTP block")


def load_layers(spec: ModelSpec, loader: Loader, ropes: Ropes) -> list[Layer]:
    """The trunk on the device."""
    full, sliding = loader.rope(ropes.full), loader.rope(ropes.sliding)
    return [
        Layer(
            loader.attention(spec, layer, sliding if layer.window else full),
            loader.feed_forward(spec, layer, "ffn_norm"),
        )
        for layer in spec.layers
    ]
