"""What ops work on: arrays, weights, and the sizes and parameters of layers.

What is done with them is said in ``ops.py``; who makes them and moves their bytes, in ``base.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np

Buffer = Any
"""An array on the device: numpy.ndarray on the host, cupy.ndarray on CUDA. Shapes stand in each op's docstring."""


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotary embedding of one kind of layer.

    inv_freq   [n_rot / 2] float64: radians per position of each pair, scaling and per-dimension factors included
    interleaved True: pairs (2i, 2i + 1) ("norm", llama); False: pairs (i, i + n_rot / 2) (NeoX, qwen)
    magnitude  factor on cos and sin (YaRN's attention factor), 1.0 otherwise
    """

    inv_freq: np.ndarray
    interleaved: bool
    magnitude: float = 1.0

    @property
    def n_rot(self) -> int:
        """Rotated values per head; the rest pass."""
        return 2 * len(self.inv_freq)


class Activation(Enum):
    """What a gated feed-forward makes of its gate g before it multiplies the up row."""

    SILU = "silu"   # g * sigmoid(g)
    GELU = "gelu"   # g * sigmoid(2 u) = g / 2 * (1 + tanh(u)), u = sqrt(2 / pi) * (g + 0.044715 g^3)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParams:
    """What makes queries, keys and values of an attention layer's projected rows y [T, columns]:

        y   H x (query [Dk], gate [Dk] if gated) | G x key [Dk] | G x value [Dv]

    q_norm, k_norm  [Dk] RMSNorm per head before the rotary embedding, or None
    v_norm          an RMSNorm without weights of each head's value
    shares          y has queries alone: the layer reads what another one has stored
    rope            what ``Device.load_rope`` returned
    scale           factor on the query
    gated           sigmoid(gate) multiplies the head's output (then Dk = Dv)
    window          keys that a row sees at most, its own the last of them; 0: all up to its own
                    (sliding-window attention: Gemma 3, arXiv 2503.19786; GGUF ``attention.sliding_window``)
    """

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    gated: bool
    scale: float
    rope: Any
    eps: float
    q_norm: Buffer | None = None
    k_norm: Buffer | None = None
    window: int = 0
    v_norm: bool = False
    shares: bool = False

    def __post_init__(self) -> None:
        assert 0 <= self.window < 1 << 31, f"a window of {self.window} keys"

    @property
    def q_columns(self) -> int:
        """Columns of queries and gates, and the first column of the keys."""
        return self.heads * self.k_dim * (2 if self.gated else 1)

    @property
    def columns(self) -> int:
        """Columns of y."""
        return self.q_columns + (0 if self.shares else self.kv_heads * (self.k_dim + self.v_dim))


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRows:
    """Rows of a step, or of one tile of it, at an attention layer.

    y [T, params.columns] projected; q: memory for queries, see ``Ops.write_kv``; out [T, H * Dv]
    """

    y: Buffer
    q: Buffer
    out: Buffer


@dataclass(frozen=True, slots=True)
class GdnShape:
    """Sizes of a Gated DeltaNet layer: ``v_heads`` states of [d_k, d_v]; v head i uses key head ``i % k_heads``.

    Its projected rows y [T, columns]:   queries, keys, values (``conv_channels``) | z [v_heads * d_v] | beta [v_heads]
    | alpha [v_heads]
    """

    k_heads: int
    v_heads: int
    d_k: int
    d_v: int
    conv_taps: int

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: queries, keys, values."""
        return 2 * self.k_heads * self.d_k + self.inner

    @property
    def inner(self) -> int:
        """Columns of z and of the output."""
        return self.v_heads * self.d_v

    @property
    def columns(self) -> int:
        """Columns of y."""
        return self.conv_channels + self.inner + 2 * self.v_heads

    def ring_rows(self, max_rows: int) -> int:
        """Slots of a ring that holds, by position, a step's rows, as many pending ones, and a convolution's past."""
        return 1 << (max(2 * max_rows, max_rows + self.conv_taps - 1) - 1).bit_length()


@dataclass(slots=True)
class GdnState:
    """One layer's recurrent state and the rows that are not applied to it yet (all float32).

    state  [v_heads, d_k, d_v]     after every applied row; CUDA keeps each head transposed, [d_v, d_k]
    ring_* [N, ...]                what rows leave behind, at slot ``position % N``, N = ``GdnShape.ring_rows``:
           x [channels] inputs of the convolution; k [k_heads, d_k] normalised keys;
           decay [v_heads] exp(g); d [v_heads, d_v] update vectors
    """

    state: Buffer
    ring_x: Buffer
    ring_k: Buffer
    ring_decay: Buffer
    ring_d: Buffer


@dataclass(frozen=True, slots=True)
class GdnWeights:
    """conv [conv_taps, channels]; dt_bias, a [v_heads]; norm [d_v]; all float32. eps: of the L2 and RMS norms."""

    conv: Buffer
    dt_bias: Buffer
    a: Buffer
    norm: Buffer
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The feed-forward part of a block in a mixture of experts; F is an expert's width, Fs the shared one's.

    router          [experts, E]
    used            experts that a row takes
    gate_up, down   of each expert: [2 F, E], its gate and then its up, and [E, F], from ``Device.load_experts``
    shared_gate     [E]; None, as the two below, where no expert is shared
    shared_gate_up  [2 Fs, E]
    shared_down     [E, Fs]
    activation      of the gates
    """

    router: Weight
    used: int
    gate_up: Any
    down: Any
    shared_gate: Buffer | None
    shared_gate_up: Weight | None
    shared_down: Weight | None
    activation: Activation = Activation.SILU

    def __post_init__(self) -> None:
        assert 0 < self.used <= self.router.n_out == len(self.gate_up) == len(self.down)
        assert (self.shared_gate is None) == (self.shared_gate_up is None) == (self.shared_down is None)


@dataclass(frozen=True, slots=True, eq=False)
class MixtureWeights:
    """A dense feed-forward part and experts beside it, each between two norms: see ``Ops.add_mixture``.

    norm, gate_up, down, dense_norm  of the dense one: [E], [2 F, E], [E, F], [E]
    experts_norm, experts, sum_norm  of the experts, none of which is shared
    router_scale                     [E] of the router's input
    expert_scales                    [experts] of what each gives, or None
    post_norm                        [E] of the sum of both
    """

    norm: Buffer
    gate_up: Weight
    down: Weight
    dense_norm: Buffer
    experts_norm: Buffer
    experts: ExpertWeights
    sum_norm: Buffer
    router_scale: Buffer
    expert_scales: Buffer | None
    post_norm: Buffer

    def __post_init__(self) -> None:
        assert self.experts.shared_gate is None


@dataclass(frozen=True, slots=True, eq=False)
class PerLayerWeights:
    """What makes a token's inputs to every layer, P values for each of L: see ``Ops.per_layer_inputs``.

    table  of L P values per token, for ``Ops.embed``; project [L P, E]; norm [P]
    """

    table: Weight
    project: Weight
    norm: Buffer


class Weight(Protocol):
    """A matrix [n_out, n_in] on the device, in the form it multiplies fastest, perhaps with a bias [n_out].

    It may join several tensors of the file: their rows one after the other.
    """

    @property
    def name(self) -> str: ...

    @property
    def n_in(self) -> int: ...

    @property
    def n_out(self) -> int: ...


class WeightPart(Protocol):
    """Weights that do not stay on the device: they pass through a place in the arena, all of them in one copy.

    home  uint8 [n] of pinned host memory: what is to be copied there, in the form in which the device multiplies it;
          n is a multiple of 256
    """

    @property
    def home(self) -> np.ndarray: ...

    def lie_in(self, place: Buffer) -> None:
        """From now on ops find the matrices in ``place``, uint8 [n] of the arena. No copy."""
        ...


class PassingWeight(WeightPart, Protocol):
    """One of them.

    weight  to multiply with, once ``lie_in`` has told where it is and its bytes are there: a ``Weight``, or what
            ``Device.load_experts`` gives
    """

    @property
    def weight(self) -> Any: ...
