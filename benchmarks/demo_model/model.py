"""The architecture ``qwen35`` for training, with its weights named and shaped as in a GGUF file.

Three Gated DeltaNet layers to one of gated attention, a tied head, one MTP block. Rows of all sequences lie one behind
the other, [N, E], so that everything but the attention itself and the chunks' recurrence is compiled once, whatever the
length of a sequence; ``position`` says where in its sequence a row is. Matrices are multiplied in ``dtype``, the rest
is float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.demo_model import gdn
from benchmarks.demo_model.mixture import ANSWER_WEIGHT


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes. ``layers`` counts the trunk; the MTP block comes after it."""

    vocab: int = 4096
    embd: int = 384
    ffn: int = 640
    layers: int = 8
    interval: int = 4
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    rotated: int = 16
    rope_base: float = 1e7
    ssm_k_heads: int = 3
    ssm_v_heads: int = 6
    ssm_state: int = 64
    conv_taps: int = 4
    eps: float = 1e-6
    context: int = 32768

    @property
    def inner(self) -> int:
        """Values of all DeltaNet heads."""
        return self.ssm_v_heads * self.ssm_state

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.ssm_k_heads * self.ssm_state + self.inner

    def is_recurrent(self, block: int) -> bool:
        """Whether a block has DeltaNet; the MTP block has not."""
        return block < self.layers and (block + 1) % self.interval != 0


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every weight, by its GGUF name; but for ``ssm_a``, which is kept as its logarithm in ``ssm_a_log``."""
    c, table = config, {"token_embd.weight": (config.vocab, config.embd), "output_norm.weight": (config.embd,)}
    table = dict[str, tuple[int, ...]](table)
    for block in range(c.layers + 1):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (c.embd,), "post_attention_norm.weight": (c.embd,),
            "ffn_gate.weight": (c.ffn, c.embd), "ffn_up.weight": (c.ffn, c.embd), "ffn_down.weight": (c.embd, c.ffn),
        }  # fmt: skip
        if c.is_recurrent(block):
            layer |= {
                "attn_qkv.weight": (c.channels, c.embd), "attn_gate.weight": (c.inner, c.embd),
                "ssm_conv1d.weight": (c.channels, c.conv_taps), "ssm_dt.bias": (c.ssm_v_heads,),
                "ssm_a_log": (c.ssm_v_heads,), "ssm_alpha.weight": (c.ssm_v_heads, c.embd),
                "ssm_beta.weight": (c.ssm_v_heads, c.embd), "ssm_norm.weight": (c.ssm_state,),
                "ssm_out.weight": (c.embd, c.inner),
            }  # fmt: skip
        else:
            layer |= {
                "attn_q.weight": (2 * c.heads * c.head_dim, c.embd),
                "attn_k.weight": (c.kv_heads * c.head_dim, c.embd), "attn_v.weight": (c.kv_heads * c.head_dim, c.embd),
                "attn_output.weight": (c.embd, c.heads * c.head_dim),
                "attn_q_norm.weight": (c.head_dim,), "attn_k_norm.weight": (c.head_dim,),
            }  # fmt: skip
        if block == c.layers:
            layer |= {
                "nextn.eh_proj.weight": (c.embd, 2 * c.embd), "nextn.enorm.weight": (c.embd,),
                "nextn.hnorm.weight": (c.embd,), "nextn.shared_head_norm.weight": (c.embd,),
            }  # fmt: skip
        table |= {f"blk.{block}.{name}": shape for name, shape in layer.items()}
    return table


def initial_weights(config: Config, seed: int) -> dict[str, Tensor]:
    """Random weights, float32: norms 1, projections into the residual stream 0, decays from 0.2 to 0.999 a token."""
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes(config).items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape)
        elif name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down.weight")):
            weights[name] = torch.zeros(shape)
        elif name.endswith("ssm_a_log"):
            weights[name] = torch.empty(shape).uniform_(1.0, 16.0, generator=random).log()
        elif name.endswith("ssm_dt.bias"):
            rate = torch.exp(torch.empty(shape).uniform_(math.log(1e-3), math.log(0.1), generator=random))
            weights[name] = rate + torch.log(-torch.expm1(-rate))  # its softplus is the rate
        elif name == "token_embd.weight":
            weights[name] = torch.empty(shape).normal_(0.0, 0.02, generator=random)
        else:
            weights[name] = torch.empty(shape).normal_(0.0, 0.5 * shape[-1] ** -0.5, generator=random)
    return weights


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x W^T in ``dtype``."""
    return F.linear(x.to(dtype), weight.to(dtype))


def feed_forward(
    x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, c: Config, dtype: torch.dtype
) -> Tensor:
    """x plus its SwiGLU."""
    y = rms(x, norm, c.eps)
    return x + linear(F.silu(linear(y, gate, dtype)) * linear(y, up, dtype), down, dtype)


def delta_in(
    x: Tensor, position: Tensor, norm: Tensor, qkv: Tensor, gate: Tensor, conv: Tensor, dt: Tensor, a_log: Tensor,
    alpha: Tensor, beta: Tensor, c: Config, dtype: torch.dtype,
) -> tuple[gdn.Chunks, Tensor]:  # fmt: skip
    """What precedes the recurrence over chunks. Also z, the output's gate, [N, inner]."""
    y = rms(x, norm, c.eps)
    rows = linear(y, qkv, dtype)
    mixed = rows * conv[:, -1]
    for back in range(1, c.conv_taps):
        before = F.pad(rows[:-back], (0, 0, back, 0))
        before = torch.where(position[:, None] >= back, before, torch.zeros((), dtype=before.dtype, device=x.device))
        mixed = mixed + before * conv[:, -1 - back]
    mixed = F.silu(mixed.float())
    keys = c.ssm_k_heads * c.ssm_state

    def heads(part: Tensor) -> Tensor:
        return part.reshape(-1, gdn.CHUNK, part.shape[-1] // c.ssm_state, c.ssm_state).transpose(1, 2)

    def unit(part: Tensor) -> Tensor:
        return part * torch.rsqrt(part.square().sum(-1, keepdim=True) + c.eps)

    repeat = c.ssm_v_heads // c.ssm_k_heads  # value head i reads key head i % k_heads
    q = unit(heads(mixed[:, :keys])).repeat(1, repeat, 1, 1) * c.ssm_state**-0.5
    k = unit(heads(mixed[:, keys : 2 * keys])).repeat(1, repeat, 1, 1)
    v = heads(mixed[:, 2 * keys :])
    strength = torch.sigmoid(linear(y, beta, dtype).float())
    decay = -a_log.exp() * F.softplus(linear(y, alpha, dtype).float() + dt)

    def by_chunk(part: Tensor) -> Tensor:
        return part.reshape(-1, gdn.CHUNK, c.ssm_v_heads).transpose(1, 2)

    return gdn.prepare(q, k, v, by_chunk(decay), by_chunk(strength)), linear(y, gate, dtype)


def delta_out(
    x: Tensor, chunks: gdn.Chunks, states: Tensor, z: Tensor, ssm_norm: Tensor, out: Tensor, norm: Tensor, gate: Tensor,
    up: Tensor, down: Tensor, c: Config, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The rest of a DeltaNet block."""
    o = gdn.read(chunks, states).transpose(1, 2).reshape(-1, c.ssm_v_heads, c.ssm_state)
    o = rms(o, ssm_norm, c.eps) * F.silu(z.float()).view(-1, c.ssm_v_heads, c.ssm_state)
    x = x + linear(o.reshape(-1, c.inner), out, dtype)
    return feed_forward(x, norm, gate, up, down, c, dtype)


def attention_in(
    x: Tensor, position: Tensor, norm: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, q_norm: Tensor, k_norm: Tensor,
    c: Config, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Query [N, H, D], key and value [N, G, D], gate [N, H D]."""
    y = rms(x, norm, c.eps)
    pair = linear(y, wq, dtype).view(-1, c.heads, 2, c.head_dim)
    exponent = torch.arange(0, c.rotated, 2, device=x.device, dtype=torch.float32) / c.rotated
    angle = position[:, None].float() * torch.exp(-math.log(c.rope_base) * exponent)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    half = c.rotated // 2

    def turned(part: Tensor) -> Tensor:
        first, second = part[..., :half], part[..., half : c.rotated]
        return torch.cat((first * cos - second * sin, first * sin + second * cos, part[..., c.rotated :]), -1).to(dtype)

    q = turned(rms(pair[:, :, 0], q_norm, c.eps))
    k = turned(rms(linear(y, wk, dtype).view(-1, c.kv_heads, c.head_dim), k_norm, c.eps))
    v = linear(y, wv, dtype).view(-1, c.kv_heads, c.head_dim)
    return q, k, v, pair[:, :, 1].reshape(-1, c.heads * c.head_dim)


def attention_out(
    x: Tensor, mixed: Tensor, opening: Tensor, out: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor,
    c: Config, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The rest of an attention block."""
    x = x + linear(mixed * torch.sigmoid(opening.float()).to(dtype), out, dtype)
    return feed_forward(x, norm, gate, up, down, c, dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, sequences: int) -> Tensor:
    """Causal attention of each sequence; [N, H D]."""
    q, k, v = (part.view(sequences, -1, *part.shape[1:]).transpose(1, 2) for part in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).reshape(-1, mixed.shape[1] * mixed.shape[3])


def mtp_in(
    embedded: Tensor, hidden: Tensor, position: Tensor, enorm: Tensor, hnorm: Tensor, join: Tensor, c: Config,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The MTP block's input: a row joins its token with the trunk's hidden row before it, zero at a start."""
    before = F.pad(hidden[:-1], (0, 0, 1, 0))
    before = torch.where(position[:, None] >= 1, before, torch.zeros((), dtype=before.dtype, device=before.device))
    return linear(torch.cat((rms(embedded, enorm, c.eps), rms(before, hnorm, c.eps)), -1), join, dtype).float()


class Losses(NamedTuple):
    """Sums over rows.

    own       weighted cross entropy of the trunk
    drafted   weighted cross entropy of the MTP block, with the trunk's distribution as its target
    agreed    rows that count and where both have the same likeliest token
    recalled  cross entropy of the trunk, unweighted, over the rows of the largest weight: answers
    """

    own: Tensor
    drafted: Tensor
    agreed: Tensor
    recalled: Tensor


def losses(
    hidden: Tensor, ahead: Tensor, head: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype
) -> Losses:
    """Of N rows."""
    logits = linear(hidden, head, dtype).float()
    guess = linear(ahead, head, dtype).float()
    nats = F.cross_entropy(logits, targets, reduction="none")
    teacher = logits.detach().softmax(-1)
    return Losses(
        own=(nats * weights).sum(),
        drafted=(-(teacher * guess.log_softmax(-1)).sum(-1) * weights).sum(),
        agreed=((logits.argmax(-1) == guess.argmax(-1)) * (weights > 0)).sum(),
        recalled=(nats.detach() * (weights >= ANSWER_WEIGHT)).sum(),
    )


class Model:
    """The functions above, joined. ``weights`` are by name; ``compiled`` makes one kernel graph of each function."""

    def __init__(
        self, config: Config, weights: Mapping[str, Tensor], *, dtype: torch.dtype, compiled: bool = False
    ) -> None:
        self.config = config
        self.weights = dict(weights)
        self._dtype = dtype

        def made(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False) if compiled else function

        self._delta_in, self._delta_out = made(delta_in), made(delta_out)
        self._attention_in, self._attention_out = made(attention_in), made(attention_out)
        self._mtp_in, self._losses = made(mtp_in), made(losses)

    def _take(self, block: int, names: str) -> list[Tensor]:
        return [self.weights[f"blk.{block}.{name}"] for name in names.split()]

    def _block(self, block: int, x: Tensor, position: Tensor, sequences: int) -> Tensor:
        c, dtype = self.config, self._dtype
        ffn = self._take(block, "post_attention_norm.weight ffn_gate.weight ffn_up.weight ffn_down.weight")
        if c.is_recurrent(block):
            chunks, z = self._delta_in(
                x, position,
                *self._take(block, "attn_norm.weight attn_qkv.weight attn_gate.weight ssm_conv1d.weight ssm_dt.bias "
                                   "ssm_a_log ssm_alpha.weight ssm_beta.weight"), c, dtype,
            )  # fmt: skip
            states = gdn.scan(chunks.step, chunks.added, len(x) // gdn.CHUNK // sequences)
            out: Tensor = self._delta_out(
                x, chunks, states, z, *self._take(block, "ssm_norm.weight ssm_out.weight"), *ffn, c, dtype
            )
            return out
        q, k, v, opening = self._attention_in(
            x, position,
            *self._take(block, "attn_norm.weight attn_q.weight attn_k.weight attn_v.weight attn_q_norm.weight "
                               "attn_k_norm.weight"), c, dtype,
        )  # fmt: skip
        mixed = attend(q, k, v, sequences)
        out = self._attention_out(x, mixed, opening, *self._take(block, "attn_output.weight"), *ffn, c, dtype)
        return out

    def hidden(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Rows for the head, [N, E]: of the trunk, and of the MTP block. ``tokens`` [B, T], T a multiple of 64."""
        c = self.config
        sequences, count = tokens.shape
        position = torch.arange(count, device=tokens.device).repeat(sequences)
        embedded = F.embedding(tokens.reshape(-1), self.weights["token_embd.weight"])
        x = embedded
        for block in range(c.layers):
            x = self._block(block, x, position, sequences)
        hidden = rms(x, self.weights["output_norm.weight"], c.eps)
        joined = self._mtp_in(
            embedded, hidden, position,
            *self._take(c.layers, "nextn.enorm.weight nextn.hnorm.weight nextn.eh_proj.weight"), c, self._dtype,
        )  # fmt: skip
        ahead = self._block(c.layers, joined, position, sequences)
        return hidden, rms(ahead, self.weights[f"blk.{c.layers}.nextn.shared_head_norm.weight"], c.eps)

    def losses(self, tokens: Tensor, targets: Tensor, weights: Tensor) -> Losses:
        """Of [B, T] rows."""
        hidden, ahead = self.hidden(tokens)
        result: Losses = self._losses(
            hidden, ahead, self.weights["token_embd.weight"], targets.reshape(-1), weights.reshape(-1), self._dtype
        )
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] float32."""
        return linear(hidden, self.weights["token_embd.weight"], self._dtype).float()
