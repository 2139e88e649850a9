"""Small, valid GGUF models with seeded random weights and a working tokenizer, for tests.

    write_tiny_qwen35   Gated DeltaNet and gated attention, three to one, with or without an MTP block
    write_tiny_llama    plain grouped-query attention
    write_tiny_qwen2    the same with other rotary pairs and biases
    write_tiny_qwen3    the same with other rotary pairs and norms of q and k
    write_tiny_gemma3   the same, most layers seeing a window alone, and norms of all that is added
    write_tiny_gemma4   the same with two shapes of heads, and all that models of its kind may have besides
    write_tiny_qwen3moe, write_tiny_qwen35moe    write_tiny_qwen3 and write_tiny_qwen35 with experts behind a router

Weights are scaled so that a forward pass behaves like one of a trained model: logits spread over a few nats, attention
looks both near and far, recurrent state decays by 0.6 to 0.999 a token, greedy text does not settle on one token, and
each layer adds a part of what it gets, so rounding errors do not grow. Equal arguments give equal bytes. Files are
below 2 MiB with the default sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.tiny_vocab import PLAIN_BPE, SPM, Vocab, add_vocab

# Types that gguf-py can quantise to.
WEIGHT_TYPES = {
    name: gguf.GGMLQuantizationType[name.upper()]
    for name in ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
}
LOGIT_STD = 2.0


@dataclass(frozen=True, slots=True)
class Experts:
    """Feed-forward parts of a mixture of experts. shared: width of the one for all rows, or 0; joined: see ExpertSpec.

    A router's logits spread widely, so that few choices are close, and the last expert chosen counts little.
    """

    count: int = 6
    used: int = 3
    ffn: int = 32
    shared: int = 0
    joined: bool = False


ROUTED = Experts()
SHARED = Experts(count=5, used=2, shared=32)


class _Tensors:
    """Draws random tensors and adds them to a file. Matrices have shape (out, in) and apply as ``x @ W.T``."""

    def __init__(self, writer: gguf.GGUFWriter, rng: np.random.Generator, weight_type: str) -> None:
        self.writer = writer
        self.rng = rng
        self.weight_type = WEIGHT_TYPES[weight_type]

    def matrix(self, name: str, rows: int, cols: int, *, gain: float | np.ndarray = 1.0, count: int = 0) -> None:
        """Rows of ``cols`` normal numbers: an input of rms 1 gives outputs of rms ``gain``, a number or one per row.

        count  of matrices in the tensor, if it has a dimension for them
        """
        shape = (count, rows, cols) if count else (rows, cols)
        values = self.rng.normal(0.0, 1.0, shape) * np.reshape(gain / np.sqrt(cols), (-1, 1))
        data = gguf.quants.quantize(values.astype(np.float32), self.weight_type)
        self.writer.add_tensor(name, data, raw_dtype=self.weight_type)

    def plain(self, name: str, values: np.ndarray) -> None:
        """A tensor that stays float32 in every file."""
        self.writer.add_tensor(name, values.astype(np.float32))

    def norm(self, name: str, size: int) -> None:
        """Weights near 1."""
        self.plain(name, self.rng.normal(1.0, 0.1, size))

    def embeddings(self, vocab: Vocab, embd: int, *, tied: bool) -> None:
        """Token table, output norm and, unless tied, the output head.

        Logits get a standard deviation of ``LOGIT_STD``; those of control tokens less, so that text rarely ends early.
        The norm's random signs keep a tied head from predicting the token that it has just read.
        """
        gain = np.full(vocab.size, LOGIT_STD)
        gain[vocab.control] /= 8
        self.matrix("token_embd.weight", vocab.size, embd, gain=gain)
        self.plain("output_norm.weight", self.rng.choice([-1.0, 1.0], embd) * self.rng.normal(1.0, 0.1, embd))
        if not tied:
            self.matrix("output.weight", vocab.size, embd, gain=gain)

    def feed_forward(self, block: str, embd: int, ffn: int) -> None:
        self.matrix(f"{block}.ffn_gate.weight", ffn, embd)
        self.matrix(f"{block}.ffn_up.weight", ffn, embd)
        self.matrix(f"{block}.ffn_down.weight", embd, ffn, gain=0.6)

    def experts(self, block: str, embd: int, experts: Experts) -> None:
        count, ffn, shared = experts.count, experts.ffn, experts.shared
        self.matrix(f"{block}.ffn_gate_inp.weight", count, embd, gain=2.0)
        if experts.joined:
            self.matrix(f"{block}.ffn_gate_up_exps.weight", 2 * ffn, embd, count=count)
        else:
            self.matrix(f"{block}.ffn_gate_exps.weight", ffn, embd, count=count)
            self.matrix(f"{block}.ffn_up_exps.weight", ffn, embd, count=count)
        self.matrix(f"{block}.ffn_down_exps.weight", embd, ffn, gain=0.6, count=count)
        if shared:
            self.plain(f"{block}.ffn_gate_inp_shexp.weight", self.rng.normal(0.0, 1.0 / np.sqrt(embd), embd))
            self.matrix(f"{block}.ffn_gate_shexp.weight", shared, embd)
            self.matrix(f"{block}.ffn_up_shexp.weight", shared, embd)
            self.matrix(f"{block}.ffn_down_shexp.weight", embd, shared, gain=0.6)


def write_tiny_qwen35(
    path: Path,
    *,
    seed: int,
    mtp: bool = True,
    tied: bool = True,
    weight_type: str = "f32",
    n_layer: int = 8,
    embd: int = 64,
    ffn: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    ssm_state: int = 32,
    ssm_k_heads: int = 2,
    ssm_v_heads: int = 4,
    interval: int = 4,
    context_length: int = 32768,
    experts: Experts | None = None,
) -> Path:
    """Write a ``qwen35`` model: layer ``i`` is full attention iff ``(i + 1) % interval == 0``, the others DeltaNet.

    With ``mtp`` one more block, a full-attention one, follows the ``n_layer`` trunk layers. A quarter of each head is
    rotated. ``ssm_state`` is the head size of the DeltaNet layers. llama.cpp aborts on a trunk that has no layer of
    one of the two kinds. With ``experts`` it is a ``qwen35moe`` model. Returns ``path``.
    """
    arch = "qwen35moe" if experts else "qwen35"
    writer = gguf.GGUFWriter(path, arch)
    _add_general(writer, f"tiny {arch}", weight_type)
    blocks = n_layer + int(mtp)
    rotated = head_dim // 4
    pairs = rotated // 2
    _add_common(
        writer, blocks, embd, 0 if experts else ffn, heads, kv_heads, head_dim, rotated, context_length,
        eps=1e-6, base=1e6,
    )
    if experts:
        _add_experts(writer, experts)
    # Pair i belongs to section i % 3: sections that are too short would leave the last pairs unrotated.
    writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(ssm_state)
    writer.add_ssm_group_count(ssm_k_heads)
    writer.add_ssm_time_step_rank(ssm_v_heads)
    writer.add_ssm_inner_size(ssm_v_heads * ssm_state)
    writer.add_uint32(f"{arch}.full_attention_interval", interval)
    if mtp:
        writer.add_uint32(f"{arch}.nextn_predict_layers", 1)
    vocab = add_vocab(writer, "qwen35")

    put = _Tensors(writer, np.random.default_rng(seed), weight_type)
    put.embeddings(vocab, embd, tied=tied)
    for layer in range(blocks):
        block = f"blk.{layer}"
        put.norm(f"{block}.attn_norm.weight", embd)
        put.norm(f"{block}.post_attention_norm.weight", embd)
        if experts:
            put.experts(block, embd, experts)
        else:
            put.feed_forward(block, embd, ffn)
        if layer == n_layer or (layer + 1) % interval == 0:
            _put_gated_attention(put, block, embd, heads, kv_heads, head_dim)
        else:
            _put_delta_net(put, block, embd, ssm_state, ssm_k_heads, ssm_v_heads)
    if mtp:
        put.matrix(f"blk.{n_layer}.nextn.eh_proj.weight", embd, 2 * embd)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            put.norm(f"blk.{n_layer}.nextn.{name}.weight", embd)
    return _finish(writer, path)


def write_tiny_qwen35moe(
    path: Path, *, seed: int, experts: Experts = SHARED, n_layer: int = 4, interval: int = 2, **options: Any
) -> Path:
    """Write a ``qwen35moe`` model, as ``write_tiny_qwen35`` with experts, also in the MTP block. Returns ``path``."""
    return write_tiny_qwen35(path, seed=seed, experts=experts, n_layer=n_layer, interval=interval, **options)


def write_tiny_llama(
    path: Path,
    *,
    seed: int,
    tied: bool = True,
    weight_type: str = "f32",
    n_layer: int = 4,
    embd: int = 64,
    ffn: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    rope_freqs: bool = False,
    pre: str = "smollm",
    context_length: int = 32768,
) -> Path:
    """Write a ``llama`` model; ``pre`` is ``smollm`` (no BOS, ChatML) or ``llama-bpe`` (BOS, header tokens).

    ``rope_freqs`` adds the divisors of the rotary angles that long-context models carry. Returns ``path``.
    """
    writer = gguf.GGUFWriter(path, "llama")
    _add_general(writer, "tiny llama", weight_type)
    _add_common(writer, n_layer, embd, ffn, heads, kv_heads, head_dim, head_dim, context_length, eps=1e-5, base=1e4)
    vocab = add_vocab(writer, pre)

    put = _Tensors(writer, np.random.default_rng(seed), weight_type)
    put.embeddings(vocab, embd, tied=tied)
    if rope_freqs:
        # Fast angles stay, slow ones are divided by 8, with a ramp between: the shape that Llama 3.1 files have.
        put.plain("rope_freqs.weight", np.interp(np.arange(head_dim // 2), [head_dim / 8, head_dim / 4], [1.0, 8.0]))
    for layer in range(n_layer):
        _put_dense_block(put, f"blk.{layer}", embd, ffn, heads, kv_heads, head_dim, gain=0.1)
    return _finish(writer, path)


def write_tiny_qwen2(
    path: Path,
    *,
    seed: int,
    tied: bool = True,
    weight_type: str = "f32",
    n_layer: int = 3,
    embd: int = 128,
    ffn: int = 64,
    heads: int = 2,
    kv_heads: int = 1,
    context_length: int = 32768,
) -> Path:
    """Write a ``qwen2`` model: heads of ``embd / heads`` values, which no key of the file says. Returns ``path``."""
    writer = gguf.GGUFWriter(path, "qwen2")
    _add_general(writer, "tiny qwen2", weight_type)
    _add_common(writer, n_layer, embd, ffn, heads, kv_heads, None, None, context_length, eps=1e-6, base=1e6)
    vocab = add_vocab(writer, "qwen2")

    head_dim = embd // heads
    put = _Tensors(writer, np.random.default_rng(seed), weight_type)
    put.embeddings(vocab, embd, tied=tied)
    for layer in range(n_layer):
        block = f"blk.{layer}"
        _put_dense_block(put, block, embd, ffn, heads, kv_heads, head_dim, gain=0.1)
        for name, size in {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}.items():
            put.plain(f"{block}.attn_{name}.bias", put.rng.normal(0.0, 0.2, size))
    return _finish(writer, path)


def write_tiny_qwen3(
    path: Path,
    *,
    seed: int,
    tied: bool = True,
    weight_type: str = "f32",
    n_layer: int = 4,
    embd: int = 64,
    ffn: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    context_length: int = 32768,
    experts: Experts | None = None,
) -> Path:
    """Write a ``qwen3`` model: its heads together are wider than its rows. With ``experts`` it is a ``qwen3moe`` one.

    Returns ``path``.
    """
    arch = "qwen3moe" if experts else "qwen3"
    writer = gguf.GGUFWriter(path, arch)
    _add_general(writer, f"tiny {arch}", weight_type)
    _add_common(writer, n_layer, embd, ffn, heads, kv_heads, head_dim, None, context_length, eps=1e-6, base=1e6)
    if experts:
        _add_experts(writer, experts)
    vocab = add_vocab(writer, "qwen2")

    put = _Tensors(writer, np.random.default_rng(seed), weight_type)
    put.embeddings(vocab, embd, tied=tied)
    for layer in range(n_layer):
        block = f"blk.{layer}"
        _put_dense_block(put, block, embd, experts or ffn, heads, kv_heads, head_dim, gain=0.2)
        put.norm(f"{block}.attn_q_norm.weight", head_dim)
        put.norm(f"{block}.attn_k_norm.weight", head_dim)
    return _finish(writer, path)


def write_tiny_qwen3moe(path: Path, *, seed: int, experts: Experts = ROUTED, **options: Any) -> Path:
    """Write a ``qwen3moe`` model, as ``write_tiny_qwen3`` with experts. Returns ``path``."""
    return write_tiny_qwen3(path, seed=seed, experts=experts, **options)


def write_tiny_gemma3(
    path: Path,
    *,
    seed: int,
    tied: bool = True,
    weight_type: str = "f32",
    n_layer: int = 4,
    embd: int = 64,
    ffn: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    window: int = 80,
    pattern: int | list[bool] = 2,
    rope_scale: float = 1.0,
    softcap: float = 0.0,
    context_length: int = 32768,
) -> Path:
    """Write a ``gemma3`` model: of ``pattern`` layers in a row the last sees all, the others ``window`` tokens; or an
    entry per layer, whether it slides. ``rope_scale`` stretches the positions of those that see all. Returns ``path``.
    """
    writer = gguf.GGUFWriter(path, "gemma3")
    _add_general(writer, "tiny gemma3", weight_type)
    _add_common(writer, n_layer, embd, ffn, heads, kv_heads, head_dim, None, context_length, eps=1e-6, base=1e6)
    writer.add_sliding_window(window)
    writer.add_sliding_window_pattern(pattern)
    if rope_scale != 1.0:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope_scale)
    if softcap:
        writer.add_final_logit_softcapping(softcap)
    vocab = add_vocab(writer, SPM)

    put = _Tensors(writer, np.random.default_rng(seed), weight_type)
    put.embeddings(vocab, embd, tied=tied)
    for layer in range(n_layer):
        block = f"blk.{layer}"
        _put_dense_block(put, block, embd, ffn, heads, kv_heads, head_dim, gain=1.0)
        put.norm(f"{block}.attn_q_norm.weight", head_dim)
        put.norm(f"{block}.attn_k_norm.weight", head_dim)
        # What is added has the size of its norm; rows of the table have ``LOGIT_STD``, times the factor on them.
        put.plain(f"{block}.post_attention_norm.weight", put.rng.normal(0.3, 0.03, embd))
        put.plain(f"{block}.post_ffw_norm.weight", put.rng.normal(2.5, 0.25, embd))
    return _finish(writer, path)


@dataclass(frozen=True, slots=True)
class Gemma4:
    """What a ``gemma4`` model may have besides.

    shared     of the last layers, which read the keys and values of others
    per_layer  values of a token's embedding per layer
    values     layers that see everything have a matrix for values
    scaled     layers scale the rows behind them
    experts    beside the dense feed-forward part
    spread     of the router's logits, beside what other models have: at 2, where several experts are used, the last one
               counts so little that another in its place makes no difference
    """

    shared: int = 0
    per_layer: int = 0
    values: bool = True
    scaled: bool = True
    experts: Experts | None = None
    spread: float = 1.0


def write_tiny_gemma4(
    path: Path,
    *,
    seed: int,
    weight_type: str = "f32",
    embd: int = 64,
    ffn: int | list[int] = 96,
    heads: int = 4,
    kv_heads: tuple[int, int] = (4, 1),
    head_dims: tuple[int, int] = (64, 128),
    window: int = 80,
    pattern: Sequence[bool] = (True, True, False, True, False),
    softcap: float | None = 20.0,
    context_length: int = 32768,
    more: Gemma4 = Gemma4(),
) -> Path:
    """Write a ``gemma4`` model: a layer for each entry of ``pattern``, whether it slides. ``kv_heads`` and
    ``head_dims`` of layers that slide and of the others. Returns ``path``.
    """
    arch = "gemma4"
    n_layer, (dim_swa, dim) = len(pattern), head_dims
    writer = gguf.GGUFWriter(path, arch)
    _add_general(writer, f"tiny {arch}", weight_type)
    counts = [kv_heads[not slides] for slides in pattern]
    _add_common(writer, n_layer, embd, ffn, heads, counts, dim, dim, context_length, eps=1e-6, base=1e6)
    writer.add_key_length_swa(dim_swa)
    writer.add_value_length_swa(dim_swa)
    writer.add_rope_dimension_count_swa(dim_swa)
    writer.add_rope_freq_base_swa(1e4)
    writer.add_sliding_window(window)
    writer.add_sliding_window_pattern(list(pattern))
    writer.add_shared_kv_layers(more.shared)
    writer.add_embedding_length_per_layer_input(more.per_layer)
    if softcap is not None:
        writer.add_final_logit_softcapping(softcap)
    if more.experts:
        _add_experts(writer, more.experts)
    vocab = add_vocab(writer, PLAIN_BPE)

    put = _Tensors(writer, np.random.default_rng(seed), weight_type)
    put.embeddings(vocab, embd, tied=True)
    # Of the pairs of a head a quarter turns.
    put.plain("rope_freqs.weight", np.where(np.arange(dim // 2) < dim // 8, 1.0, 1e30))
    if more.per_layer:
        put.matrix("per_layer_token_embd.weight", vocab.size, n_layer * more.per_layer)
        put.matrix("per_layer_model_proj.weight", n_layer * more.per_layer, embd)
        put.norm("per_layer_proj_norm.weight", more.per_layer)
    for layer, slides in enumerate(pattern):
        width = ffn if isinstance(ffn, int) else ffn[layer]
        _put_gemma4_block(
            put, f"blk.{layer}", embd, width, heads, kv_heads[not slides], dim_swa if slides else dim, more,
            keys=layer < n_layer - more.shared, values=slides or more.values,
        )
    return _finish(writer, path)


def _put_gemma4_block(
    put: _Tensors, block: str, embd: int, ffn: int, heads: int, kv_heads: int, head_dim: int, more: Gemma4, *,
    keys: bool, values: bool,
) -> None:
    """``keys``: it has some of its own; ``values``: with a matrix of their own."""
    put.norm(f"{block}.attn_norm.weight", embd)
    put.matrix(f"{block}.attn_q.weight", heads * head_dim, embd)
    # Scores are not scaled: norms of queries and keys decide how far they spread.
    put.plain(f"{block}.attn_q_norm.weight", put.rng.normal(0.4, 0.04, head_dim))
    if keys:
        put.matrix(f"{block}.attn_k.weight", kv_heads * head_dim, embd)
        put.plain(f"{block}.attn_k_norm.weight", put.rng.normal(0.4, 0.04, head_dim))
        if values:
            put.matrix(f"{block}.attn_v.weight", kv_heads * head_dim, embd)
    put.matrix(f"{block}.attn_output.weight", embd, heads * head_dim)
    put.plain(f"{block}.post_attention_norm.weight", put.rng.normal(0.5, 0.05, embd))
    put.norm(f"{block}.ffn_norm.weight", embd)
    put.feed_forward(block, embd, ffn)
    put.plain(f"{block}.post_ffw_norm.weight", put.rng.normal(2.5, 0.25, embd))
    if more.experts:
        put.experts(block, embd, more.experts)
        # The router's input is divided by sqrt(E).
        put.plain(f"{block}.ffn_gate_inp.scale", put.rng.normal(1.0, 0.1, embd) * np.sqrt(embd) * more.spread)
        put.norm(f"{block}.ffn_down_exps.scale", more.experts.count)
        for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            put.norm(f"{block}.{name}.weight", embd)
    if more.per_layer:
        put.matrix(f"{block}.inp_gate.weight", more.per_layer, embd)
        put.matrix(f"{block}.proj.weight", embd, more.per_layer)
        put.norm(f"{block}.post_norm.weight", embd)
    if more.scaled:
        put.plain(f"{block}.layer_output_scale.weight", put.rng.normal(0.8, 0.1, 1))


def _add_general(writer: gguf.GGUFWriter, name: str, weight_type: str) -> None:
    writer.add_name(name)
    if weight_type not in ("f32", "f16", "bf16"):
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _add_common(
    writer: gguf.GGUFWriter,
    blocks: int,
    embd: int,
    ffn: int | list[int],
    heads: int,
    kv_heads: int | list[int],
    head_dim: int | None,
    rotated: int | None,
    context_length: int,
    *,
    eps: float,
    base: float,
) -> None:
    writer.add_block_count(blocks)
    writer.add_context_length(context_length)
    writer.add_embedding_length(embd)
    if ffn:
        writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(eps)
    if rotated is not None:
        writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(base)


def _add_experts(writer: gguf.GGUFWriter, experts: Experts) -> None:
    writer.add_expert_count(experts.count)
    writer.add_expert_used_count(experts.used)
    writer.add_expert_feed_forward_length(experts.ffn)
    if experts.shared:
        writer.add_expert_shared_feed_forward_length(experts.shared)


def _put_dense_block(
    put: _Tensors, block: str, embd: int, ffn: int | Experts, heads: int, kv_heads: int, head_dim: int, *, gain: float
) -> None:
    """``ffn``: the feed-forward part's width, or experts; ``gain``: of what attention adds."""
    put.norm(f"{block}.attn_norm.weight", embd)
    put.matrix(f"{block}.attn_q.weight", heads * head_dim, embd, gain=1.2)
    put.matrix(f"{block}.attn_k.weight", kv_heads * head_dim, embd, gain=1.2)
    put.matrix(f"{block}.attn_v.weight", kv_heads * head_dim, embd)
    put.matrix(f"{block}.attn_output.weight", embd, heads * head_dim, gain=gain)
    put.norm(f"{block}.ffn_norm.weight", embd)
    if isinstance(ffn, Experts):
        put.experts(block, embd, ffn)
    else:
        put.feed_forward(block, embd, ffn)


def _put_gated_attention(put: _Tensors, block: str, embd: int, heads: int, kv_heads: int, head_dim: int) -> None:
    put.matrix(f"{block}.attn_q.weight", heads * head_dim * 2, embd)
    put.matrix(f"{block}.attn_k.weight", kv_heads * head_dim, embd)
    put.matrix(f"{block}.attn_v.weight", kv_heads * head_dim, embd)
    put.matrix(f"{block}.attn_output.weight", embd, heads * head_dim, gain=0.2)
    put.norm(f"{block}.attn_q_norm.weight", head_dim)
    put.norm(f"{block}.attn_k_norm.weight", head_dim)


def _put_delta_net(put: _Tensors, block: str, embd: int, state: int, k_heads: int, v_heads: int) -> None:
    channels = (2 * k_heads + v_heads) * state
    inner = v_heads * state
    put.matrix(f"{block}.attn_qkv.weight", channels, embd)
    put.matrix(f"{block}.attn_gate.weight", inner, embd)
    put.matrix(f"{block}.ssm_alpha.weight", v_heads, embd, gain=0.3)
    put.matrix(f"{block}.ssm_beta.weight", v_heads, embd)
    put.matrix(f"{block}.ssm_out.weight", embd, inner, gain=0.25)
    put.norm(f"{block}.ssm_norm.weight", state)
    taps = put.rng.normal(0.0, 0.3, (channels, 4))
    taps[:, -1] += 0.8
    put.plain(f"{block}.ssm_conv1d.weight", taps)
    # log(decay) is softplus(alpha + dt) * a. Choose the decay and dt; a is what is left.
    rate = np.exp(put.rng.uniform(np.log(0.003), np.log(0.25), v_heads))
    dt = put.rng.uniform(-4.0, 0.0, v_heads)
    put.plain(f"{block}.ssm_dt.bias", dt)
    put.plain(f"{block}.ssm_a", -rate / np.log1p(np.exp(dt)))


def _finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
