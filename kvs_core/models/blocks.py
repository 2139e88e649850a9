"""The parts that models are built from: attention, gated feed-forward, experts, Gated DeltaNet.

Each part adds its result to the residual rows ``x`` of a step: ``x += part(rms(x, norm))``, or, where it has a norm
behind it, ``x += rms(part(rms(x, norm)), post_norm)``. All arrays are views on the
workspace; nothing large is made here. Letters: T rows, E hidden, F feed-forward, H query heads, G KV heads.

A part is few ops, each as large as a device can fuse: projected rows y of all that one norm feeds, the mixing of rows,
and the projection back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvs_core.device.base import Turn
from kvs_core.device.operands import (
    Activation,
    AttentionParams,
    AttentionRows,
    Buffer,
    ExpertWeights,
    GdnWeights,
    MixtureWeights,
    Weight,
)
from kvs_core.device.ops import Ops
from kvs_core.device.workspace import BufferSpec, Workspace
from kvs_core.memory.phases import Phase
from kvs_core.models.spec import LayerSpec
from kvs_core.units import align_up

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

    def attend(self, rows: AttentionRows, params: AttentionParams) -> None:
        """Append the step's rows; out = causal softmax(q k) v over all positions up to each row's own, gated.

        Query head h reads KV head h // (H / G).
        """
        ...

    def attend_tiles(self, tiles: Sequence[AttentionRows], params: AttentionParams, turn: Turn) -> None:
        """The same for a step in tiles: pages are read once for all of them."""
        ...


class KvView(Protocol):
    """What a model sees of the KV cache in one step."""

    def layer(self, read_index: int) -> LayerView:
        """What the attention layer with that ``LayerSpec.read_index`` reads."""
        ...


class LayerStates(Protocol):
    """What a model sees of the states of recurrent layers in one step."""

    def run_layer(self, index: int, y: Buffer, weights: GdnWeights, out: Buffer) -> None:
        """Mix the step's rows in layer ``index``; see ``Ops.gdn_decode``."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """What the parts of one forward pass share.

    state     None for models without recurrent layers
    residual  name of the buffer that parts add to
    """

    ops: Ops
    batch: Batch
    kv: KvView
    state: LayerStates | None
    ws: Workspace
    eps: float
    residual: str = "x"

    def rows(self, name: str) -> Buffer:
        """This step's rows of a workspace buffer."""
        return self.ws.rows(name, self.batch.rows)

    @property
    def x(self) -> Buffer:
        """The residual rows."""
        return self.rows(self.residual)

    def project(self, norm: Buffer, weight: Weight, name: str) -> Buffer:
        """The residual rows through an RMSNorm and a matrix, in the workspace buffer of that name."""
        out = self.rows(name)
        self.ops.project(self.x, norm, weight, out, eps=self.eps, phase=self.batch.phase)
        return out

    def add(self, rows: Buffer, weight: Weight, post_norm: Buffer | None = None) -> None:
        """x += rows @ weight.T, perhaps through an RMSNorm"""
        if post_norm is None:
            self.ops.add_projected(rows, weight, self.x, phase=self.batch.phase)
        else:
            self.ops.add_normed(rows, weight, post_norm, self.x, eps=self.eps, phase=self.batch.phase)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """SwiGLU and its kin: down(activation(gate(y)) * up(y)), y = rms(x, norm)."""

    norm: Buffer
    gate_up: Weight
    down: Weight
    activation: Activation = Activation.SILU
    post_norm: Buffer | None = None

    @staticmethod
    def buffers(rows: int, n_ff: int) -> list[BufferSpec]:
        """The rows between the matrices."""
        return [BufferSpec(f"ffn {n_ff}", (rows, n_ff), ACTIVATION, overlay=f"ffn {n_ff}")]

    def add_to(self, step: Step) -> None:
        """x += down(activation(gate(y)) * up(y))"""
        rows = step.rows(f"ffn {self.down.n_in}")
        step.ops.project_gated(
            step.x, self.norm, self.gate_up, rows, eps=step.eps, phase=step.batch.phase, activation=self.activation
        )
        step.add(rows, self.down, self.post_norm)


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward part of a mixture of experts: see ``Ops.add_experts``, whose rows between are the device's."""

    norm: Buffer
    weights: ExpertWeights

    def add_to(self, step: Step) -> None:
        """x += what the experts make of rms(x, norm)"""
        step.ops.add_experts(step.x, self.norm, self.weights, eps=step.eps, phase=step.batch.phase)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts with a dense feed-forward part beside them: see ``Ops.add_mixture``."""

    weights: MixtureWeights

    def add_to(self, step: Step) -> None:
        """x += what both make of it"""
        step.ops.add_mixture(step.x, self.weights, eps=step.eps, phase=step.batch.phase)


@dataclass(frozen=True, slots=True)
class PerLayer:
    """A layer's part of the embeddings per layer: see ``Ops.add_per_layer``.   columns: of the inputs, the layer's"""

    columns: slice
    gate: Weight
    project: Weight
    norm: Buffer

    @staticmethod
    def buffers(rows: int, columns: int) -> list[BufferSpec]:
        """The inputs of all layers; they stay from the first to the last."""
        return [BufferSpec("per_layer", (rows, columns), ACTIVATION)]

    def add_to(self, step: Step) -> None:
        """x += what the layer makes of its inputs"""
        given = step.rows("per_layer")[:, self.columns]
        step.ops.add_per_layer(
            step.x, given, self.gate, self.project, self.norm, eps=step.eps, phase=step.batch.phase
        )


def attention_columns(layer: LayerSpec) -> int:
    """Columns of an attention layer's projected rows: ``AttentionParams.columns``, from the sizes alone."""
    stored = 0 if layer.shares else layer.kv_heads * (layer.k_dim + layer.v_dim)
    return layer.heads * layer.k_dim * (2 if layer.gated else 1) + stored


def attention_buffer(layer: LayerSpec, name: str) -> str:
    """Name, in a workspace, of a buffer that layers of one shape share: ``qkv``, ``q`` or ``attended``."""
    return f"{name} {attention_columns(layer)} {layer.heads} {layer.k_dim} {layer.v_dim}"


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention with rotary positions."""

    layer: LayerSpec
    norm: Buffer
    qkv: Weight
    out: Weight
    params: AttentionParams
    post_norm: Buffer | None = None

    @staticmethod
    def buffers(layer: LayerSpec, rows: int) -> list[BufferSpec]:
        """Projections, queries and the attended rows."""
        shapes = {
            "qkv": (rows, attention_columns(layer)),
            "q": (align_up(rows, 8), layer.heads, layer.k_dim),
            "attended": (rows, layer.heads * layer.v_dim),
        }
        overlay = attention_buffer(layer, "attention")
        return [
            BufferSpec(attention_buffer(layer, name), shape, ACTIVATION, overlay) for name, shape in shapes.items()
        ]

    def add_to(self, step: Step) -> None:
        """x += out(attention(q, k, v) [* sigmoid(gate)]), all of rms(x, norm)"""
        rows = self._rows(step)
        step.kv.layer(self._read_index).attend(rows, self.params)
        step.add(rows.out, self.out, self.post_norm)

    def add_to_tiles(self, tiles: Sequence[Step], turn: Turn) -> None:
        """The same in every tile of a step."""
        parts = []
        for number, tile in enumerate(tiles):
            turn(number)
            parts.append(self._rows(tile))
        tiles[0].kv.layer(self._read_index).attend_tiles(parts, self.params, turn)
        for number, (tile, rows) in enumerate(zip(tiles, parts, strict=True)):
            turn(number)
            tile.add(rows.out, self.out, self.post_norm)

    @property
    def _read_index(self) -> int:
        assert self.layer.read_index is not None
        return self.layer.read_index

    def _rows(self, step: Step) -> AttentionRows:
        qkv, q, attended = (attention_buffer(self.layer, name) for name in ("qkv", "q", "attended"))
        return AttentionRows(step.project(self.norm, self.qkv, qkv), step.ws[q], step.rows(attended))


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated DeltaNet (Yang et al., 2024) with a short convolution; its state lies in the step's ``RecurrentState``.

    joint  the rows of qkv, z, beta and alpha
    """

    layer: LayerSpec
    norm: Buffer
    joint: Weight
    out: Weight
    weights: GdnWeights

    @staticmethod
    def buffers(layer: LayerSpec, rows: int) -> list[BufferSpec]:
        """Projections and the mixed rows."""
        gdn = layer.gdn
        assert gdn is not None
        widths = {"joint": gdn.columns, "mixed": gdn.inner}
        return [BufferSpec(name, (rows, width), ACTIVATION, overlay="delta_net") for name, width in widths.items()]

    def add_to(self, step: Step) -> None:
        """x += out(mixed rows of rms(x, norm))"""
        assert step.state is not None, "a model with recurrent layers needs their state"
        y = step.project(self.norm, self.joint, "joint")
        mixed = step.rows("mixed")
        step.state.run_layer(self.layer.index, y, self.weights, mixed)
        step.add(mixed, self.out)
