"""The only door to bytes: what every device offers, and what the rooms above and below may rely on.

A device owns one arena, three streams and a set of ``Ops``. On CUDA an ``enqueue_*`` or an op returns before the work
is done and a stream keeps its order; on the host the compute stream is the calling thread itself (an op is done when it
returns) while the copy streams are real threads. Both keep the same rules, so a missing wait is a wrong bit on either:

    fence = copy.record()        the work enqueued on ``copy`` so far
    compute.wait(fence)          later work on ``compute`` runs after it
    fence.wait()                 blocks the host; never inside a step but for the sampled ids

Absent here: which page is where (paging), when to move it (streaming), what a layer is made of (models).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvs_core.errors import CapabilityError
from kvs_core.formats.gguf import TensorInfo
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import KvType, PageGeometry
from kvs_core.paging.shift import PageMove
from kvs_core.paging.spans import LayerPlan
from kvs_core.units import Progress

if TYPE_CHECKING:
    from kvs_core.device.workspace import BufferSpec, Workspace

Buffer = Any
"""An array on the device: numpy.ndarray on the host, cupy.ndarray on CUDA. Shapes stand in each op's docstring."""


class Fence(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """True once all work before the fence is finished."""
        ...

    def wait(self) -> None:
        """Block the host until then. Raises ``DeviceError`` if that work failed."""
        ...


class PassedFence:
    """A point that lies behind: nothing to wait for."""

    __slots__ = ()

    def done(self) -> bool:
        """True."""
        return True

    def wait(self) -> None:
        """Nothing."""


PASSED = PassedFence()


class Stream(Protocol):
    """Work in order."""

    name: str

    def record(self) -> Fence:
        """A fence behind all work enqueued so far."""
        ...

    def wait(self, fence: Fence) -> None:
        """Later work on this stream runs after ``fence``."""
        ...

    def synchronize(self) -> None:
        """Block the host until the stream is empty. Raises ``DeviceError`` if work on it failed."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What really works on a device. Asked at load, so that nothing is refused in the middle of a prompt."""

    device: str
    kv_pairs: frozenset[tuple[KvType, KvType]]
    head_dims: frozenset[int] | None   # None: any
    max_decode_rows: int

    def check(self, geometry: PageGeometry) -> None:
        """Raise ``CapabilityError`` unless pages of this geometry can be written and attended."""
        if (geometry.k_type, geometry.v_type) not in self.kv_pairs:
            raise CapabilityError(
                f"K {geometry.k_type.label} with V {geometry.v_type.label} has no attention kernel on {self.device}; "
                "use another --cache-type-k or --cache-type-v"
            )
        for head_dim in (geometry.k_dim, geometry.v_dim):
            if self.head_dims is not None and head_dim not in self.head_dims:
                known = ", ".join(str(dim) for dim in sorted(self.head_dims))
                raise CapabilityError(
                    f"head dim {head_dim} has no attention kernel on {self.device}, which has {known}; use --device cpu"
                )


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


# Whose plan ``Ops.load_plan`` takes, where it is not that of a decode step of so many rows.
PREFILL_PLAN = 0
DRAFT_PLAN = -1   # one row that attends to what is resident
TILES_PLAN = -2   # a decode step in tiles

Turn = Callable[[int], None]
"""``Device.use_tile``: the ops from here on belong to the tile of that number."""


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


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """``count`` experts with n_ff values within, of which a row takes ``used``.

    n_beside  values within the part beside them that all rows take, at most; 0: there is none
    """

    count: int
    used: int
    n_ff: int
    n_beside: int


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What a device's private scratch for one phase depends on.

    rows        of a step at most
    n_embd      E
    widest_in   columns of the widest matrix
    widest_out  rows of the longest matrix, the output head aside
    n_vocab     rows of the output head
    heads, kv_heads, k_dim  of the attention layers; 0 without
    gdn         of the recurrent layers; None without
    post_norms  whether there is an ``add_normed``
    per_layer_columns  of ``per_layer_inputs``; 0 without
    experts     of a mixture of experts, else None
    """

    rows: int
    n_embd: int
    widest_in: int
    widest_out: int
    n_vocab: int
    heads: int
    kv_heads: int
    k_dim: int
    gdn: GdnShape | None = None
    post_norms: bool = False
    per_layer_columns: int = 0
    experts: ExpertSizes | None = None


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


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step is about. Set with ``Device.begin_step`` before its first op.

    tokens          int32 [T]
    first_position  of row 0; row t is at first_position + t
    pending         rows before it that recurrent layers have not applied yet
    store           recurrent layers store their state with the pending rows applied; not in a draft
    kept            rows of the last step that were kept, for ``Ops.take_kept``
    """

    tokens: np.ndarray
    first_position: int
    pending: int
    phase: Phase
    store: bool = True
    kept: int = 0


class Ops(Protocol):
    """What models and streaming compute with. All on the compute stream; T = rows of the step.

    ``phase`` picks the kernel family: DECODE ops give a row the same bits however many rows share the step; a PREFILL
    op's bits may depend on T. A device that captures steps reads positions, tokens and pending rows of a DECODE step
    from the ``StepInputs`` on the device, so they are no arguments; a plan's pages from what ``load_plan`` put there.
    """

    def embed(self, table: Weight, x: Buffer, *, factor: float = 1.0) -> None:
        """x[t] = row tokens[t] of the table times factor, for the step's tokens. The first op of a step.   x [T, E]"""
        ...

    def project(self, x: Buffer, norm: Buffer, weight: Weight, out: Buffer, *, eps: float, phase: Phase) -> None:
        """out = rms(x) * norm @ weight.T + bias, where rms(x) = x / sqrt(mean(x^2) + eps).

        x [T, E]; norm [E]; out [T, n_out]
        """
        ...

    def project_gated(
        self, x: Buffer, norm: Buffer, weight: Weight, out: Buffer, *, eps: float, phase: Phase,
        activation: Activation = Activation.SILU,
    ) -> None:
        """out = activation(g) * u, where g and u are the halves of ``project``'s rows.   weight [2 F, E]; out [T, F]

        out is what ``add_projected`` takes next; its form on the device is the device's own.
        """
        ...

    def add_projected(self, rows: Buffer, weight: Weight, x: Buffer, *, phase: Phase) -> None:
        """x += rows @ weight.T + bias   rows [T, n_in]; x [T, E]

        In DECODE a device may keep the sum back until the next op that takes x.
        """
        ...

    def add_normed(self, rows: Buffer, weight: Weight, norm: Buffer, x: Buffer, *, eps: float, phase: Phase) -> None:
        """x += rms(rows @ weight.T + bias) * norm   rows [T, n_in]; norm [E]; x [T, E]

        rows as in ``add_projected``. Source: Gemma 2 report, 2024, section 2 (post-norm).
        """
        ...

    def add_experts(self, x: Buffer, norm: Buffer, weights: ExpertWeights, *, eps: float, phase: Phase) -> None:
        """x += sum over a row's experts e of w_e f_e(y), then sigmoid(y . shared_gate) f_shared(y), y = rms(x) * norm.

        f(y) = down(activation(gate(y)) * up(y)), with the matrices of that expert. A row's experts are the ``used``
        ones of the largest logits y @ router.T, in float32, of equal ones the lower numbers; w is the softmax over all
        experts, scaled so that those of the row sum to 1. They are added in the order of their numbers, the shared one
        last.   x [T, E]; norm [E]
        Source: Qwen3 report, arXiv 2505.09388; the shared expert: Qwen2 report, arXiv 2407.10671; ggml's qwen35moe.
        """
        ...

    def add_mixture(self, x: Buffer, weights: MixtureWeights, *, eps: float, phase: Phase) -> None:
        """x += rms(rms(f(rms(x) * norm)) * dense_norm + rms(m(rms(x) * experts_norm)) * sum_norm) * post_norm

        f is the dense part; m sums, as in ``add_experts``, what a row's experts make of it, each times its scale. They
        are chosen by rms(x) / sqrt(E) * router_scale. All gates have the experts' activation.   x [T, E]
        Source: ggml's gemma4.
        """
        ...

    def per_layer_inputs(self, x: Buffer, weights: PerLayerWeights, out: Buffer, *, eps: float, phase: Phase) -> None:
        """out[t, i] = (sqrt(P) table[token t, i] + rms((x @ project.T)[t, i] / sqrt(E)) * norm) / sqrt(2) per layer i.

        Directly behind ``embed``.   x [T, E]; out [T, L P]   Source: ggml's gemma4.
        """
        ...

    def add_per_layer(
        self, x: Buffer, inputs: Buffer, gate: Weight, project: Weight, norm: Buffer, *, eps: float, phase: Phase
    ) -> None:
        """x += rms((gelu(x @ gate.T) * inputs) @ project.T) * norm

        x [T, E]; inputs [T, P], strided: a layer's part of ``per_layer_inputs``; gate [P, E]; project [E, P]; norm [E]
        """
        ...

    def scale(self, x: Buffer, factor: float) -> None:
        """x *= factor, in the same form in both phases.   x [T, E], the residual rows"""
        ...

    def load_plan(self, layer: int, rows: int, plan: LayerPlan) -> Any:
        """Make the pages of an attention layer known; what is returned stands for the plan in the ops below.

        It replaces the layer's plan for decode steps of ``rows`` rows, or for those that ``PREFILL_PLAN`` and its kind
        name.
        Captured work stays valid if ``plan.shape`` has not changed.
        """
        ...

    def write_kv(
        self, y: Buffer, params: AttentionParams, q: Buffer, pool: Buffer, geometry: PageGeometry, plan: Any, *,
        phase: Phase,
    ) -> None:
        """Turn projected rows into queries and store their keys and values in the plan's pages.

        Norms, rotary embedding, scale (queries) and, where the geometry says so, Hadamard rotation. Where the layer
        shares another's, there are queries alone and nothing is stored.
        y [T, params.columns]; q [T rounded up to 8, H, Dk] float32, or as many bytes in the device's own form;
        pool [slots, page_bytes] uint8
        """
        ...

    def attend_decode(
        self, q: Buffer, params: AttentionParams, pool: Buffer, geometry: PageGeometry, plan: Any, call: int,
        scratch: Buffer,
    ) -> None:
        """Add the attention of T rows over the pages of the plan's call ``call`` to the partials of their groups.

        scratch  [rows, T, H, Dv + 2] float32: per scratch row a group's partial (acc, l, m of a running softmax), in
                 the device's own order
        A row sees keys up to its own position, of those the last ``params.window`` if that is not 0. A group's pages
        are added one by one in logical order, so the bits do not depend on slots, nor on how a group is split into
        calls. Pages before all that the rows see add exactly nothing: a plan may leave out such groups, whole ones,
        and the bits are the same. What they hold, and what rows of a page hold that no row sees, is not looked at.
        The caller has waited for ready of every slot; it records consumed after this call.
        """
        ...

    def fold(self, params: AttentionParams, plan: Any, call: int, scratch: Buffer, segments: Buffer) -> None:
        """Merge the group partials of the call's folds into segment partials, in order.   segments [n, T, H, Dv + 2]"""
        ...

    def finish_decode(
        self, y: Buffer, params: AttentionParams, geometry: PageGeometry, plan: Any, scratch: Buffer, segments: Buffer,
        out: Buffer,
    ) -> None:
        """Do the plan's last folds, merge the segments in order, normalise, undo V's rotation, gate.   out [T, H * Dv]

        out is what ``add_projected`` takes next; its form on the device is the device's own.
        """
        ...

    def attend_prefill(
        self, q: Buffer, params: AttentionParams, pool: Buffer, geometry: PageGeometry, plan: Any, pages: range,
        running: Buffer, *, fresh: bool,
    ) -> None:
        """Add T rows' attention over consecutive pages to the running partial, page by page in logical order.

        running [T, H, Dv + 2] as a scratch row in ``attend_decode``. Calls for one layer come in logical order. A row
        sees the same keys as there; pages before all that the rows see may be left out.
        """
        ...

    def finish_prefill(
        self, y: Buffer, params: AttentionParams, geometry: PageGeometry, running: Buffer, out: Buffer
    ) -> None:
        """Normalise, undo V's rotation, gate.   running [T, H, Dv + 2]; out [T, H * Dv]"""
        ...

    def prefill_sums(self, running: Buffer) -> Buffer:
        """Of a running partial the sum of weights and the largest score of each row and head: [T, H, 2], no copy."""
        ...

    def log_sums(self, sums: np.ndarray) -> np.ndarray:
        """Of ``prefill_sums``, downloaded: ln of the sum of exp(score) over the keys added, float64 [T, H]."""
        ...

    def shift_rows(
        self, page: Buffer, sources: Sequence[Buffer], params: AttentionParams, geometry: PageGeometry, move: PageMove
    ) -> None:
        """Move rows of ``sources`` into ``page`` as ``move`` says, with the bits of the host's op on every device.

        Keys are turned by the positions that ``Device.begin_shift`` was told, and stored anew; values' bytes are moved.
        page, sources  uint8 [page_bytes] each; the page may be one of the sources only where the device is the host
        The caller has waited for ready of all of them; it records consumed after this call.
        """
        ...

    def zero_page(self, pool: Buffer, geometry: PageGeometry, slot: int) -> None:
        """Clear a slot that becomes a tail page: stale scales times zero weights would be NaN."""
        ...

    def gdn_decode(
        self, y: Buffer, weights: GdnWeights, shape: GdnShape, state: GdnState, out: Buffer, *, position: int,
        pending: int, store: bool = True,
    ) -> None:
        """Gated DeltaNet rows with deferred commit; row 0 is at ``position``.

        First applies the rows at positions [position - pending, position), which an earlier step left in the rings, to
        ``state`` and, if ``store``, stores it; then computes its own T rows on a copy, without storing the state, and
        leaves them in the rings. A device that captures steps reads these three from the step's inputs.
        y [T, shape.columns] before the convolution; out [T, v_heads * d_v]: normed and gated by silu(z), and what
        ``add_projected`` takes next.   Source: Yang et al., Gated Delta Networks, 2024.
        """
        ...

    def top_logits(self, logits: Buffer, k: int) -> tuple[Buffer, Buffer] | None:
        """The k largest of each row, largest first, of equal ones the lower id first; NaN counts as largest.

        logits [T, V]; results int32 and float32 [T, k], good until the next call. None if k is more than a device can.
        """
        ...

    def softcap(self, logits: Buffer, cap: float) -> None:
        """logits = cap * tanh(logits / cap), in place.   logits [T, V]; cap > 0. Source: as ``add_normed``."""
        ...

    def rms_norm(self, x: Buffer, norm: Buffer, out: Buffer, *, eps: float) -> None:
        """out = rms(x) * norm, in the same form in both phases.   x, out [T, n], out perhaps strided; norm [n]"""
        ...

    def take_kept(self, rows: Buffer, out: Buffer) -> None:
        """out[0] = rows[kept], where ``kept`` is the step's input.   rows [n, E]; out [1, E], perhaps rows[0] itself"""
        ...

    def clear(self, buffer: Buffer) -> None:
        """Every byte becomes 0. Of whole 16 bytes."""
        ...

    def gdn_apply(self, shape: GdnShape, state: GdnState, *, position: int, pending: int) -> None:
        """Apply the rows at positions [position - pending, position) to the state: the bits ``gdn_decode`` gives."""
        ...

    def gdn_prefill(
        self, y: Buffer, weights: GdnWeights, shape: GdnShape, state: GdnState, out: Buffer, *, position: int
    ) -> None:
        """The same for many rows, in chunks, storing the state after the last one. No rows may be pending."""
        ...


@dataclass(frozen=True, slots=True)
class Counters:
    """Since the device was made.

    stall_ns  time in which the compute stream waited for the copy streams; None where the device does not tell
    """

    copy_bytes: int
    copy_calls: int
    publish_bytes: int
    publish_calls: int
    stall_ns: int | None


class Captured(Protocol):
    """Recorded work on the compute and copy streams."""

    def launch(self, inputs: StepInputs) -> None:
        """Enqueue it all on the compute stream, for a step with these inputs."""
        ...

    def elapsed_s(self) -> float | None:
        """Seconds that the last launch took on the device, once it is done; until then None. Never blocks."""
        ...


class ModelDevice(Protocol):
    """What a model is loaded onto."""

    ops: Ops

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any] | type) -> Buffer:
        """Zeroed device memory beside the arena (recurrent state), for load time only."""
        ...

    def allocate_pinned(self, size_bytes: int) -> np.ndarray:
        """Host memory that the copy streams can move fast, uint8 [size_bytes]. ``DeviceMemoryError`` if there is none.
        """
        ...

    def load_vector(self, info: TensorInfo, *, transposed: bool = False) -> Buffer:
        """A small tensor as float32, shape as in the file reversed; if ``transposed``, as in the file."""
        ...

    def load_matrix(self, infos: Sequence[TensorInfo], biases: Sequence[TensorInfo | None] = ()) -> Weight:
        """Matrices of GGUF shapes [n_in, n_out], joined, to be multiplied. ``biases``: none, or one entry each."""
        ...

    def load_experts(self, infos: Sequence[TensorInfo]) -> Any:
        """Tensors of GGUF shapes [n_in, n_out, experts] as a matrix for each expert, its rows of all of them joined.

        For ``ExpertWeights``.
        """
        ...

    def load_passing(
        self, infos: Sequence[TensorInfo], home: np.ndarray, biases: Sequence[TensorInfo | None] = ()
    ) -> PassingWeight:
        """What ``load_matrix``, or for tensors of three dimensions ``load_experts``, would load, to pass through the
        arena; put into ``home``: pinned, uint8, with room for ``part_bytes``."""
        ...

    def part_bytes(self, infos: Iterable[TensorInfo]) -> int:
        """Room that suffices for these tensors, at home and in the arena: a multiple of 256."""
        ...

    def load_table(self, info: TensorInfo) -> Weight:
        """A matrix of GGUF shape [n_in, n_out] for ``ops.embed``."""
        ...

    def load_rope(self, table: RopeTable) -> Any:
        """A rotary embedding for ``AttentionParams``."""
        ...

    def prepare_weights(
        self, infos: Sequence[TensorInfo], progress: Progress | None = None, *, passing: Sequence[TensorInfo] = ()
    ) -> None:
        """Decide how the matrices of a model are held, and do the loading work. Once, before ``load_matrix``.

        passing  those that will come with ``load_passing``
        """
        ...

    def download(self, buffer: Buffer) -> np.ndarray:
        """A host copy, after all work on the compute stream. The only synchronisation in a step, for logits or ids."""
        ...


class Outline(ModelDevice, Protocol):
    """Takes a model without reading or holding its weights."""

    def begin_ops(
        self, geometries: Sequence[PageGeometry], attention: Sequence[AttentionParams],
        recurrent: Sequence[GdnShape], activation: Activation,
    ) -> None:
        """Begin, in the background, what ``Device.prepare_ops`` will do for this model, told alike, once it is loaded.

        Errors are left for then.
        """
        ...


class Device(ModelDevice, Protocol):
    """One accelerator (or the host playing one)."""

    name: str
    captures: bool    # decode steps are captured, where there is memory for that
    is_host: bool     # its memory is the host's, which the history needs too
    spills: bool      # weights that stay may exceed its memory: the rest of them is in the host's
    capabilities: Capabilities
    compute: Stream
    copy: Stream      # history -> slots
    publish: Stream   # slots -> history

    def allocate_arena(self, size_bytes: int) -> None:
        """The one arena, exactly that many bytes. ``DeviceError`` if it cannot be had."""
        ...

    def arena_view(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any] | type) -> Buffer:
        """A window on the arena as an array. No copy; valid as long as the region's lease is held."""
        ...

    def enqueue_copy(self, dst: Buffer, src: Buffer, stream: Stream) -> None:
        """Copy equal-sized uint8 buffers (host or device each) on ``stream``; returns at once, unless one of them is of
        ``PageableBytes``. Those cannot be copied in captured work."""
        ...

    def discard(self, buffer: Buffer) -> None:
        """The contents will be overwritten before they are read again (a debug device poisons them)."""
        ...

    def upload(self, buffer: Buffer, values: np.ndarray) -> None:
        """Fill a buffer from the host, in order with the compute stream; blocks until that is done. Between steps."""
        ...

    def outline(self) -> Outline | None:
        """For the model that is about to be loaded; None: nothing of it takes long enough to begin early."""
        ...

    def prepare_ops(
        self, geometries: Sequence[PageGeometry], attention: Sequence[AttentionParams],
        recurrent: Sequence[GdnShape], activation: Activation, progress: Progress | None = None,
    ) -> None:
        """Make ready all that steps of the model that was loaded will use. Once, after its last tensor.

        geometries  of the pages that each of ``attention`` reads
        Raises ``CapabilityError`` for what has no kernel. Progress is in kernels.
        """
        ...

    def page_layout(self, geometry: PageGeometry) -> PageGeometry:
        """The geometry with the order of bytes in which this device keeps such pages."""
        ...

    def scratch(self, phase: Phase, sizes: StepSizes) -> Sequence[BufferSpec]:
        """Buffers of its own that the device needs in a phase's workspace."""
        ...

    def bind_scratch(self, workspace: Workspace, phase: Phase) -> None:
        """Use this workspace's buffers, ``scratch``'s among them, from now on."""
        ...

    def begin_step(self, inputs: StepInputs) -> None:
        """The step that the ops from here on belong to."""
        ...

    def begin_tiles(self, tiles: Sequence[StepInputs]) -> None:
        """A decode step of more rows than one op takes: it runs as it comes, in tiles whose ops alternate.

        Each tile is given as a step of up to ``max_decode_rows`` rows; the first row of tile i is row
        ``i * max_decode_rows`` of the step, which has no more rows than a prefill step may have.
        """
        ...

    def use_tile(self, index: int) -> None:
        """The tile that the ops from here on belong to."""
        ...

    def begin_shift(self, attention: Sequence[AttentionParams], positions: int) -> None:
        """``Ops.shift_rows`` turns keys of these layers by so many positions from now until the next step. Blocks.
        """
        ...

    def reserve_steps(self, layers: int, pages: int, max_rows: int) -> None:
        """Room for what steps of up to ``max_rows`` rows are told: inputs, and plans of so many attention layers of up
        to ``pages`` pages. Once, at load."""
        ...

    def capture(self, inputs: StepInputs, work: Callable[[], None]) -> Captured:
        """Record what ``work`` enqueues on compute and copy streams, without running it: decode steps of this width.

        Only where ``captures``. Inside ``work`` no fence from before it is waited for and nothing is downloaded.
        ``DeviceMemoryError`` if there is no memory for a recording.
        """
        ...

    def drop_captured(self) -> None:
        """Forget captured work that holds arena addresses (CUDA graphs). Before a hand-over commits."""
        ...

    def free_bytes(self) -> int:
        """Device memory that could be had now, for choosing an arena's size, with no weights moved out for it."""
        ...

    def link_bytes_per_s(self) -> float:
        """Measured host-to-device rate of large copies."""
        ...

    def counters(self) -> Counters:
        """What the streams have done so far."""
        ...

    def memory_report(self) -> dict[str, int]:
        """Bytes by purpose: weights, state, arena."""
        ...

    def close(self) -> None:
        """Stop threads and release memory. Idempotent."""
        ...
