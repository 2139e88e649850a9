"""The parts that models are built from: attention, SwiGLU feed-forward, Gated DeltaNet.

Each part adds its result to the residual rows ``x`` of a step: ``x += part(rms(x, norm))``. All arrays are views on the
workspace; nothing large is made here. Letters: T rows, E hidden, F feed-forward, H query heads, G KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvs_core.device.base import Buffer, GdnWeights, Ops, RopeTable, Weight
from kvs_core.device.workspace import BufferSpec, Workspace
from kvs_core.memory.phases import Phase
from kvs_core.models.recurrent import RecurrentState
from kvs_core.models.spec import LayerSpec

ACTIVATION = np.float32


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The rows of one step: tokens int32 [T] at positions first_position, first_position + 1, ..."""

    tokens: np.ndarray
    first_position: int
    phase: Phase

    def __post_init__(self) -> None:
        assert self.tokens.dtype == np.int32
        assert self.tokens.ndim == 1
        assert len(self.tokens) > 0
        assert self.first_position >= 0

    @property
    def rows(self) -> int:
        """T."""
        return len(self.tokens)


class LayerView(Protocol):
    """What a model sees of one attention layer's keys and values."""

    def write(self, k: Buffer, v: Buffer) -> None:
        """Append the step's rows. k [T, G, Dk], after norm and rotation; v [T, G, Dv]. Both may be overwritten."""
        ...

    def attend(self, q: Buffer, out: Buffer) -> None:
        """out = causal softmax(q k) v over all positions up to each row's own, which ``write`` has added.

        q [T, H, Dk] scaled, may be overwritten; out [T, H, Dv]. Query head h reads KV head h // (H / G).
        """
        ...


class KvView(Protocol):
    """What a model sees of the KV cache in one step."""

    def layer(self, kv_index: int) -> LayerView:
        """The attention layer with that ``LayerSpec.kv_index``."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """What the parts of one forward pass share. ``state`` is None for models without recurrent layers."""

    ops: Ops
    batch: Batch
    kv: KvView
    state: RecurrentState | None
    ws: Workspace
    eps: float

    def rows(self, name: str) -> Buffer:
        """This step's rows of a workspace buffer."""
        return self.ws.rows(name, self.batch.rows)

    def normed(self, weight: Buffer) -> Buffer:
        """The residual rows through an RMSNorm, [T, E], in a buffer that ``add`` may be given back."""
        out = self.rows("normed")
        self.ops.rms_norm(self.rows("x"), weight, out, eps=self.eps)
        return out

    def add(self, linear: Linear, rows: Buffer) -> None:
        """x += linear(rows)   rows [T, ...]; overwrites ``normed``"""
        out = self.rows("normed")
        linear.apply(self, rows, out)
        self.ops.add(self.rows("x"), out)


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix and perhaps a bias."""

    weight: Weight
    bias: Buffer | None = None

    def apply(self, step: Step, x: Buffer, out: Buffer) -> None:
        """out = x @ weight.T + bias; the axes behind the rows are taken as one."""
        rows = step.batch.rows
        flat = out.reshape(rows, -1)
        step.ops.matmul(x.reshape(rows, -1), self.weight, flat, phase=step.batch.phase)
        if self.bias is not None:
            step.ops.add_bias(flat, self.bias)


def residual_buffers(rows: int, n_embd: int) -> list[BufferSpec]:
    """What every part needs."""
    return [BufferSpec("x", (rows, n_embd), ACTIVATION), BufferSpec("normed", (rows, n_embd), ACTIVATION)]


@dataclass(frozen=True, slots=True)
class FeedForward:
    """SwiGLU: down(silu(gate(y)) * up(y))."""

    norm: Buffer
    gate: Linear
    up: Linear
    down: Linear

    @staticmethod
    def buffers(rows: int, n_ff: int) -> list[BufferSpec]:
        """Gate and up rows."""
        return [BufferSpec(name, (rows, n_ff), ACTIVATION, overlay="ffn") for name in ("ffn_gate", "ffn_up")]

    def add_to(self, step: Step) -> None:
        """x += down(silu(gate(y)) * up(y)), y = rms(x, norm)"""
        normed, gate, up = step.normed(self.norm), step.rows("ffn_gate"), step.rows("ffn_up")
        self.gate.apply(step, normed, gate)
        self.up.apply(step, normed, up)
        step.ops.swiglu(gate, up, gate)
        step.add(self.down, gate)


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention with rotary positions.

    q_norm, k_norm  RMSNorm per head before the rotation, or None
    scale           factor on q
    """

    layer: LayerSpec
    norm: Buffer
    q: Linear
    k: Linear
    v: Linear
    out: Linear
    rope: RopeTable
    scale: float
    q_norm: Buffer | None = None
    k_norm: Buffer | None = None

    @staticmethod
    def buffers(layer: LayerSpec, rows: int) -> list[BufferSpec]:
        """Projections and the attended rows."""
        shapes = {
            "q": (rows, layer.heads, layer.k_dim),
            "k": (rows, layer.kv_heads, layer.k_dim),
            "v": (rows, layer.kv_heads, layer.v_dim),
            "attended": (rows, layer.heads, layer.v_dim),
        }
        if layer.gated:
            shapes["q_and_gate"] = (rows, layer.heads, 2 * layer.k_dim)
        return [BufferSpec(name, shape, ACTIVATION, overlay="attention") for name, shape in shapes.items()]

    def add_to(self, step: Step) -> None:
        """x += out(attention(q, k, v) [* sigmoid(gate)]), all of rms(x, norm)"""
        ops, position = step.ops, step.batch.first_position
        normed = step.normed(self.norm)
        q, k, v, attended = step.rows("q"), step.rows("k"), step.rows("v"), step.rows("attended")
        gate: Buffer | None = None
        source = q
        if self.layer.gated:
            both = step.rows("q_and_gate")
            source, gate = both[..., : self.layer.k_dim], both[..., self.layer.k_dim :]
            self.q.apply(step, normed, both)
        else:
            self.q.apply(step, normed, q)
        self.k.apply(step, normed, k)
        self.v.apply(step, normed, v)
        if self.q_norm is not None:
            ops.rms_norm(source, self.q_norm, q, eps=step.eps)
        if self.k_norm is not None:
            ops.rms_norm(k, self.k_norm, k, eps=step.eps)
        ops.rope(q, position, self.rope)
        ops.rope(k, position, self.rope)
        ops.scale(q, self.scale)

        assert self.layer.kv_index is not None
        kv = step.kv.layer(self.layer.kv_index)
        kv.write(k, v)
        kv.attend(q, attended)
        if gate is not None:
            ops.gate_heads(attended, gate)
        step.add(self.out, attended)


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated DeltaNet (Yang et al., 2024) with a short convolution; its state lies in the step's ``RecurrentState``."""

    layer: LayerSpec
    norm: Buffer
    qkv: Linear
    z: Linear
    alpha: Linear
    beta: Linear
    out: Linear
    weights: GdnWeights

    @staticmethod
    def buffers(layer: LayerSpec, rows: int) -> list[BufferSpec]:
        """Projections and the mixed rows."""
        gdn = layer.gdn
        assert gdn is not None
        widths = {
            "qkv": gdn.conv_channels,
            "z": gdn.v_heads * gdn.d_v,
            "alpha": gdn.v_heads,
            "beta": gdn.v_heads,
            "mixed": gdn.v_heads * gdn.d_v,
        }
        return [BufferSpec(name, (rows, width), ACTIVATION, overlay="delta_net") for name, width in widths.items()]

    def add_to(self, step: Step) -> None:
        """x += out(mixed rows of rms(x, norm))"""
        assert step.state is not None, "a model with recurrent layers needs their state"
        normed = step.normed(self.norm)
        qkv, z, alpha, beta = step.rows("qkv"), step.rows("z"), step.rows("alpha"), step.rows("beta")
        mixed = step.rows("mixed")
        for linear, rows in ((self.qkv, qkv), (self.z, z), (self.alpha, alpha), (self.beta, beta)):
            linear.apply(step, normed, rows)
        step.state.run_layer(self.layer.index, qkv, z, alpha, beta, self.weights, mixed)
        step.add(self.out, mixed)
