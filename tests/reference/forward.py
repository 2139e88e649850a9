"""Forward passes of all archs as plain as they can be written: the oracle that needs nothing but NumPy.

One sequence from its start, no cache, no pages, full softmax matrices, the delta rule one token at a time, everything
in float64. Weights come from ``gguf.GGUFReader`` and are dequantised when used. Formulas: the model's own papers
(Llama: arXiv 2302.13971; Gated DeltaNet: arXiv 2412.06464) as llama.cpp applies them to GGUF tensors.

Shapes use T tokens, V vocabulary, E hidden, H query heads, G KV heads, D head size; a matrix is (out, in).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Result:
    """Outputs of one pass over T tokens."""

    logits: Array
    """[T, V]"""
    hidden: Array
    """[T, E] rows after output_norm: what the output head multiplies"""


def forward(path: Path, tokens: Sequence[int], *, gelu_table: bool = False) -> Result:
    """Run ``tokens`` through the model at ``path``, from position 0.

    gelu_table  a gemma's feed-forward rounds as llama.cpp's CPU code does: see ``gelu``
    """
    model = GgufModel(path, gelu_table)
    blocks = {"qwen35": _qwen35_block, "qwen35moe": _qwen35_block, "gemma3": _gemma3_block}
    block = blocks.get(model.arch, _dense_block)
    x = model.rows("token_embd.weight", tokens)
    if model.arch in ("gemma3", "gemma4"):
        x = x * np.sqrt(x.shape[1])
    if model.arch == "gemma4":
        block = Gemma4Blocks(model, tokens, x).run
    for layer in range(model.trunk_layers):
        x = block(model, layer, x)
    hidden = rms_norm(x, model.tensor("output_norm.weight"), model.eps)
    logits = hidden @ model.head.T
    cap = model.key("final_logit_softcapping", 30.0 if model.arch == "gemma4" else 0.0)
    return Result(cap * np.tanh(logits / cap) if cap else logits, hidden)


def forward_mtp(path: Path, tokens: Sequence[int], hidden: Array) -> Result:
    """The MTP block over the same tokens: row ``p`` joins token ``p`` with the trunk's hidden row ``p - 1``.

    hidden  [T, E] from ``forward``; the row before the first one is zero
    Its logits at ``p`` are those of token ``p + 1``; its hidden rows are what the next draft step takes.
    """
    model = GgufModel(path)
    layer = model.trunk_layers
    prefix = f"blk.{layer}.nextn."
    before = np.vstack([np.zeros((1, hidden.shape[1])), hidden[:-1]])
    token_part = rms_norm(model.rows("token_embd.weight", tokens), model.tensor(prefix + "enorm.weight"), model.eps)
    state_part = rms_norm(before, model.tensor(prefix + "hnorm.weight"), model.eps)
    x = np.hstack([token_part, state_part]) @ model.tensor(prefix + "eh_proj.weight").T
    x = x + _gated_attention(model, layer, rms_norm(x, model.tensor(f"blk.{layer}.attn_norm.weight"), model.eps))
    x = x + _feed_forward(model, layer, x, "post_attention_norm")
    out = rms_norm(x, model.tensor(prefix + "shared_head_norm.weight"), model.eps)
    return Result(out @ model.head.T, out)


class GgufModel:
    """Metadata and tensors of one GGUF, as float64."""

    def __init__(self, path: Path, gelu_table: bool = False) -> None:
        self.gelu_table = gelu_table
        self._reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.arch: str = self._reader.fields["general.architecture"].contents()
        self.eps: float = self.key("attention.layer_norm_rms_epsilon")
        self.trunk_layers: int = self.key("block_count") - self.key("nextn_predict_layers", 0)
        self.heads: int = self.key("attention.head_count")
        self.kv_heads: int = self.key("attention.head_count_kv", self.heads)
        self.head_dim: int = self.key("attention.key_length", self.key("embedding_length") // self.heads)
        self.rotated: int = self.key("rope.dimension_count", self.head_dim)
        self.base: float = self.key("rope.freq_base", 10000.0)

    def key(self, name: str, default: Any = None) -> Any:
        """Value of ``<arch>.<name>``."""
        field = self._reader.fields.get(f"{self.arch}.{name}")
        if field is None and default is None:
            raise KeyError(f"{self.arch}.{name}")
        return default if field is None else field.contents()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> Array:
        tensor = self._tensors[name]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)

    def rows(self, name: str, indices: Sequence[int]) -> Array:
        tensor = self._tensors[name]
        return gguf.quants.dequantize(tensor.data[np.asarray(indices)], tensor.tensor_type).astype(np.float64)

    @property
    def head(self) -> Array:
        """[V, E]: the output head, or the token table where the two are tied."""
        return self.tensor("output.weight" if self.has("output.weight") else "token_embd.weight")


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    size: Array = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return x / size * weight


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def gelu(x: Array, table: bool = False) -> Array:
    """The tanh form (Hendrycks and Gimpel, 2016).

    table  as llama.cpp's CPU code has it: number and result rounded to float16, except beyond +-10, where the result is
           0 or the number
    """
    given = x.astype(np.float16).astype(np.float64) if table else x
    out: Array = given / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (given + 0.044715 * given**3)))
    if not table:
        return out
    return np.where(x <= -10, 0.0, np.where(x >= 10, x, out.astype(np.float16).astype(np.float64)))


def attention(q: Array, k: Array, v: Array, *, window: int = 0, scale: float = 0.0) -> Array:
    """Causal softmax attention. q [T, H, D], k and v [T, G, D]; query head ``h`` reads KV head ``h // (H / G)``.

    window  of so many tokens at most, its own the last; 0: all.   scale  on q; 0: 1 / sqrt(D)
    """
    count, heads, dim = q.shape
    mask = np.triu(np.full((count, count), -np.inf), 1)
    if window:
        mask += np.tril(np.full((count, count), -np.inf), -window)
    scale = scale or 1 / np.sqrt(dim)
    out = np.empty_like(q)
    for head in range(heads):
        source = head // (heads // k.shape[1])
        scores = q[:, head] @ k[:, source].T * scale + mask
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, source]
    return out


def angles(count: int, rotated: int, base: float, divisors: Array | None = None) -> Array:
    """[T, rotated / 2]: position times ``base ** (-2i / rotated)``, over the divisors if there are any."""
    frequency = base ** (-np.arange(0, rotated, 2) / rotated)
    return np.arange(count)[:, None] * (frequency if divisors is None else frequency / divisors)


def rotate_neighbours(x: Array, angle: Array) -> Array:
    """Turn the pairs (2i, 2i + 1) of each head of ``x`` [T, heads, D]."""
    out = x.copy()
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
    return out


def rotate_halves(x: Array, angle: Array) -> Array:
    """Turn the pairs (i, i + n / 2) of the first n dimensions of each head of ``x`` [T, heads, D]; the rest pass."""
    half = angle.shape[1]
    out = x.copy()
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    out[..., :half] = x[..., :half] * cos - x[..., half : 2 * half] * sin
    out[..., half : 2 * half] = x[..., :half] * sin + x[..., half : 2 * half] * cos
    return out


def _feed_forward(model: GgufModel, layer: int, x: Array, norm: str) -> Array:
    y = rms_norm(x, model.tensor(f"blk.{layer}.{norm}.weight"), model.eps)
    prefix = f"blk.{layer}.ffn_"
    if model.has(prefix + "gate_inp.weight"):
        return _experts(model, prefix, y)
    return swiglu(y, *(model.tensor(f"{prefix}{name}.weight") for name in ("gate", "up", "down")))


def swiglu(y: Array, gate: Array, up: Array, down: Array) -> Array:
    return (silu(y @ gate.T) * (y @ up.T)) @ down.T


def _experts(model: GgufModel, prefix: str, y: Array) -> Array:
    """Token by token: the likeliest experts, their probabilities scaled to the sum 1; then the one that all take."""
    if model.has(prefix + "gate_up_exps.weight"):
        gates, ups = np.split(model.tensor(prefix + "gate_up_exps.weight"), 2, axis=1)
    else:
        gates, ups = model.tensor(prefix + "gate_exps.weight"), model.tensor(prefix + "up_exps.weight")
    downs = model.tensor(prefix + "down_exps.weight")
    odds = np.exp(y @ model.tensor(prefix + "gate_inp.weight").T)
    odds = odds / odds.sum(axis=1, keepdims=True)
    out = np.zeros_like(y)
    for row, probabilities, total in zip(y, odds, out, strict=True):
        best = np.argsort(probabilities)[-model.key("expert_used_count") :]
        for expert in best:
            share = probabilities[expert] / probabilities[best].sum()
            total += share * swiglu(row, gates[expert], ups[expert], downs[expert])
    if model.has(prefix + "gate_inp_shexp.weight"):
        shared = swiglu(y, *(model.tensor(f"{prefix}{name}_shexp.weight") for name in ("gate", "up", "down")))
        out += sigmoid(y @ model.tensor(prefix + "gate_inp_shexp.weight"))[:, None] * shared
    return out


def _dense_block(model: GgufModel, layer: int, x: Array) -> Array:
    """``llama``; ``qwen2`` with biases and ``qwen3`` with norms of q and k, both with halves that turn; experts."""
    def project(name: str, heads: int) -> Array:
        rows = y @ model.tensor(f"blk.{layer}.{name}.weight").T
        if model.arch == "qwen2":
            rows = rows + model.tensor(f"blk.{layer}.{name}.bias")
        return rows.reshape(len(x), heads, model.head_dim)

    def turn(name: str, heads: int) -> Array:
        rows = project(name, heads)
        if model.arch in ("qwen3", "qwen3moe"):
            rows = rms_norm(rows, model.tensor(f"blk.{layer}.{name}_norm.weight"), model.eps)
        return (rotate_neighbours if model.arch == "llama" else rotate_halves)(rows, angle)

    y = rms_norm(x, model.tensor(f"blk.{layer}.attn_norm.weight"), model.eps)
    divisors = model.tensor("rope_freqs.weight") if model.has("rope_freqs.weight") else None
    angle = angles(len(x), model.rotated, model.base, divisors)
    q, k = turn("attn_q", model.heads), turn("attn_k", model.kv_heads)
    mixed = attention(q, k, project("attn_v", model.kv_heads)).reshape(len(x), -1)
    x = x + mixed @ model.tensor(f"blk.{layer}.attn_output.weight").T
    return x + _feed_forward(model, layer, x, "ffn_norm")


def _gemma3_block(model: GgufModel, layer: int, x: Array) -> Array:
    def tensor(name: str) -> Array:
        return model.tensor(f"blk.{layer}.{name}.weight")

    def heads(name: str, count: int) -> Array:
        return (y @ tensor(name).T).reshape(len(x), count, model.head_dim)

    pattern = model.key("attention.sliding_window_pattern", 6)
    slides = pattern[layer] if isinstance(pattern, list) else layer % pattern < pattern - 1
    base = model.key("rope.freq_base_swa", 10000.0) if slides else model.base
    stretched = 1.0 if slides else model.key("rope.scaling.factor", 1.0)
    angle = angles(len(x), model.rotated, base) / stretched
    y = rms_norm(x, tensor("attn_norm"), model.eps)
    q = rotate_halves(rms_norm(heads("attn_q", model.heads), tensor("attn_q_norm"), model.eps), angle)
    k = rotate_halves(rms_norm(heads("attn_k", model.kv_heads), tensor("attn_k_norm"), model.eps), angle)
    window = model.key("attention.sliding_window") if slides else 0
    scale = 1 / np.sqrt(x.shape[1] // model.heads) if model.trunk_layers == 62 else 0.0
    mixed = attention(q, k, heads("attn_v", model.kv_heads), window=window, scale=scale).reshape(len(x), -1)
    x = x + rms_norm(mixed @ tensor("attn_output").T, tensor("post_attention_norm"), model.eps)
    y = rms_norm(x, tensor("ffn_norm"), model.eps)
    hidden = gelu(y @ tensor("ffn_gate").T, model.gelu_table) * (y @ tensor("ffn_up").T)
    return x + rms_norm(hidden @ tensor("ffn_down").T, tensor("post_ffw_norm"), model.eps)


class Gemma4Blocks:
    """The blocks of one pass, which share keys and values, and what each gets of the tokens' embeddings per layer."""

    def __init__(self, model: GgufModel, tokens: Sequence[int], x: Array) -> None:
        self.stored: dict[int, tuple[Array, Array]] = {}
        self.per_layer: Array | None = None
        size = model.key("embedding_length_per_layer_input")
        if size:
            table = model.rows("per_layer_token_embd.weight", tokens).reshape(len(x), -1, size) * np.sqrt(size)
            made = (x @ model.tensor("per_layer_model_proj.weight").T / np.sqrt(x.shape[1])).reshape(table.shape)
            self.per_layer = (table + rms_norm(made, model.tensor("per_layer_proj_norm.weight"), model.eps)) / 2**0.5

    def run(self, model: GgufModel, layer: int, x: Array) -> Array:
        def tensor(name: str) -> Array:
            return model.tensor(f"blk.{layer}.{name}.weight")

        def norm(rows: Array, name: str) -> Array:
            return rms_norm(rows, tensor(name), model.eps)

        x = x + norm(self._attend(model, layer, norm(x, "attn_norm")) @ tensor("attn_output").T, "post_attention_norm")
        y = norm(x, "ffn_norm")
        dense = (gelu(y @ tensor("ffn_gate").T, model.gelu_table) * (y @ tensor("ffn_up").T)) @ tensor("ffn_down").T
        if model.has(f"blk.{layer}.ffn_gate_inp.weight"):
            dense = norm(dense, "post_ffw_norm_1") + norm(self._experts(model, layer, x), "post_ffw_norm_2")
        x = x + norm(dense, "post_ffw_norm")
        if self.per_layer is not None:
            made = gelu(x @ tensor("inp_gate").T, model.gelu_table) * self.per_layer[:, layer]
            x = x + norm(made @ tensor("proj").T, "post_norm")
        scale = f"blk.{layer}.layer_output_scale.weight"
        return x * model.tensor(scale)[0] if model.has(scale) else x

    def _attend(self, model: GgufModel, layer: int, y: Array) -> Array:
        slides = model.key("attention.sliding_window_pattern")
        own = model.trunk_layers - model.key("attention.shared_kv_layers", 0)
        dim = model.key("attention.key_length_swa") if slides[layer] else model.head_dim
        if slides[layer]:
            angle = angles(len(y), dim, model.key("rope.freq_base_swa"))
        else:
            angle = angles(len(y), dim, model.base, model.tensor("rope_freqs.weight"))

        def project(name: str) -> Array:
            return (y @ model.tensor(f"blk.{layer}.attn_{name}.weight").T).reshape(len(y), -1, dim)

        def turned(rows: Array, name: str) -> Array:
            return rotate_halves(rms_norm(rows, model.tensor(f"blk.{layer}.attn_{name}.weight"), model.eps), angle)

        if layer < own:
            keys = project("k")
            values = project("v") if model.has(f"blk.{layer}.attn_v.weight") else keys
            self.stored[layer] = turned(keys, "k_norm"), rms_norm(values, np.ones(dim), model.eps)
        k, v = self.stored[layer if layer < own else own - 2 if slides[layer] else own - 1]
        window = model.key("attention.sliding_window") if slides[layer] else 0
        return attention(turned(project("q"), "q_norm"), k, v, window=window, scale=1.0).reshape(len(y), -1)

    def _experts(self, model: GgufModel, layer: int, x: Array) -> Array:
        """Token by token, as ``_experts``, with scales of the router's input and of what each expert gives."""
        prefix = f"blk.{layer}.ffn_"
        if model.has(prefix + "gate_up_exps.weight"):
            gates, ups = np.split(model.tensor(prefix + "gate_up_exps.weight"), 2, axis=1)
        else:
            gates, ups = model.tensor(prefix + "gate_exps.weight"), model.tensor(prefix + "up_exps.weight")
        downs, scales = model.tensor(prefix + "down_exps.weight"), model.tensor(prefix + "down_exps.scale")
        size = x.shape[1]
        asked = rms_norm(x, np.ones(size), model.eps) / np.sqrt(size) * model.tensor(prefix + "gate_inp.scale")
        odds = np.exp(asked @ model.tensor(prefix + "gate_inp.weight").T)
        y = rms_norm(x, model.tensor(f"blk.{layer}.pre_ffw_norm_2.weight"), model.eps)
        out = np.zeros_like(y)
        for row, weights, total in zip(y, odds, out, strict=True):
            best = np.argsort(weights)[-model.key("expert_used_count") :]
            for expert in best:
                hidden = gelu(row @ gates[expert].T, model.gelu_table) * (row @ ups[expert].T)
                total += scales[expert] * weights[expert] / weights[best].sum() * (hidden @ downs[expert].T)
        return out


def _qwen35_block(model: GgufModel, layer: int, x: Array) -> Array:
    mixer = _delta_net if model.has(f"blk.{layer}.ssm_a") else _gated_attention
    x = x + mixer(model, layer, rms_norm(x, model.tensor(f"blk.{layer}.attn_norm.weight"), model.eps))
    return x + _feed_forward(model, layer, x, "post_attention_norm")


def _gated_attention(model: GgufModel, layer: int, y: Array) -> Array:
    count, dim = len(y), model.head_dim
    prefix = f"blk.{layer}.attn_"
    # Each head's output is its query and then its gate.
    pair = (y @ model.tensor(prefix + "q.weight").T).reshape(count, model.heads, 2 * dim)
    k = (y @ model.tensor(prefix + "k.weight").T).reshape(count, model.kv_heads, dim)
    v = (y @ model.tensor(prefix + "v.weight").T).reshape(count, model.kv_heads, dim)
    angle = angles(count, model.rotated, model.base)
    q = rotate_halves(rms_norm(pair[..., :dim], model.tensor(prefix + "q_norm.weight"), model.eps), angle)
    k = rotate_halves(rms_norm(k, model.tensor(prefix + "k_norm.weight"), model.eps), angle)
    mixed = attention(q, k, v) * sigmoid(pair[..., dim:])
    return mixed.reshape(count, -1) @ model.tensor(prefix + "output.weight").T


def _delta_net(model: GgufModel, layer: int, y: Array) -> Array:
    prefix = f"blk.{layer}."
    count, dim = len(y), model.key("ssm.state_size")
    k_heads, v_heads = model.key("ssm.group_count"), model.key("ssm.time_step_rank")
    taps = model.tensor(prefix + "ssm_conv1d.weight")  # [channels, taps], the last tap meets the current token

    qkv = y @ model.tensor(prefix + "attn_qkv.weight").T
    padded = np.vstack([np.zeros((taps.shape[1] - 1, qkv.shape[1])), qkv])
    mixed = silu(np.sum([padded[tap : tap + count] * taps[:, tap] for tap in range(taps.shape[1])], axis=0))
    q, k, v = np.split(mixed, [k_heads * dim, 2 * k_heads * dim], axis=1)
    q, k, v = q.reshape(count, k_heads, dim), k.reshape(count, k_heads, dim), v.reshape(count, v_heads, dim)
    q = q / np.sqrt((q * q).sum(axis=-1, keepdims=True) + model.eps) / np.sqrt(dim)
    k = k / np.sqrt((k * k).sum(axis=-1, keepdims=True) + model.eps)

    beta = sigmoid(y @ model.tensor(prefix + "ssm_beta.weight").T)
    step = np.logaddexp(0.0, y @ model.tensor(prefix + "ssm_alpha.weight").T + model.tensor(prefix + "ssm_dt.bias"))
    decay = np.exp(step * model.tensor(prefix + "ssm_a"))

    out = np.empty((count, v_heads, dim))
    for head in range(v_heads):
        source = head % k_heads
        state = np.zeros((dim, dim))  # [key, value]
        for t in range(count):
            state *= decay[t, head]
            update = beta[t, head] * (v[t, head] - k[t, source] @ state)
            state += np.outer(k[t, source], update)
            out[t, head] = q[t, source] @ state
    out = rms_norm(out, model.tensor(prefix + "ssm_norm.weight"), model.eps)
    gate = silu(y @ model.tensor(prefix + "attn_gate.weight").T)
    return (out.reshape(count, -1) * gate) @ model.tensor(prefix + "ssm_out.weight").T
