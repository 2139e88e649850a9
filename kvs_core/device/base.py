"""The only door to bytes: what every device offers, and what the rooms above and below may rely on.

A device owns one arena, three streams and a set of ``Ops``. On CUDA an ``enqueue_*`` or an op returns before the work
is done and a stream keeps its order; on the host the compute stream is the calling thread itself (an op is done when it
returns) while the copy streams are real threads. Both keep the same rules, so a missing wait is a wrong bit on either:

    fence = copy.record()        the work enqueued on ``copy`` so far
    compute.wait(fence)          later work on ``compute`` runs after it
    fence.wait()                 blocks the host; never inside a step but for the sampled ids

Absent here: which page is where (paging), when to move it (streaming), what a layer computes (models).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvs_core.errors import CapabilityError
from kvs_core.formats.gguf import TensorInfo
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import KvType, PageGeometry
from kvs_core.paging.spans import Fold, GroupPart, PageRef, RowSpan
from kvs_core.units import Progress

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


@dataclass(frozen=True, slots=True)
class GdnShape:
    """Sizes of a Gated DeltaNet layer: ``v_heads`` states of [d_k, d_v]; v head i uses key head ``i % k_heads``."""

    k_heads: int
    v_heads: int
    d_k: int
    d_v: int
    conv_taps: int

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: queries, keys, values."""
        return 2 * self.k_heads * self.d_k + self.v_heads * self.d_v


@dataclass(slots=True)
class GdnState:
    """One layer's recurrent state and the rows of the last step that are not applied to it yet (all float32).

    state  [v_heads, d_k, d_v]          after every applied row
    conv   [conv_taps - 1, channels]    inputs of the convolution before the first unapplied row, oldest first
    bank_* [2, max_rows, ...]           saved rows of a step, in two banks used in turn:
           x [channels] inputs of the convolution; k [k_heads, d_k] normalised keys;
           decay [v_heads] exp(g); d [v_heads, d_v] update vectors
    """

    state: Buffer
    conv: Buffer
    bank_x: Buffer
    bank_k: Buffer
    bank_decay: Buffer
    bank_d: Buffer


@dataclass(frozen=True, slots=True)
class GdnWeights:
    """conv [conv_taps, channels]; dt_bias, a [v_heads]; norm [d_v]; all float32. eps: of the L2 and RMS norms."""

    conv: Buffer
    dt_bias: Buffer
    a: Buffer
    norm: Buffer
    eps: float


class Weight(Protocol):
    """A matrix [n_out, n_in] on the device, in whatever form the device multiplies fastest."""

    n_in: int
    n_out: int
    name: str


class Ops(Protocol):
    """What models and streaming compute with. All on the compute stream; T = rows of the step.

    Activations are float32 on the host. ``phase`` picks the kernel family: DECODE ops give a row the same bits however
    many rows share the step; a PREFILL op's bits may depend on T.
    """

    def embed(self, table: Weight, tokens: np.ndarray, out: Buffer) -> None:
        """out[t] = row tokens[t] of the table.   tokens [T] int32; out [T, E]"""
        ...

    def matmul(self, x: Buffer, weight: Weight, out: Buffer, *, phase: Phase) -> None:
        """out = x @ weight.T   x [T, n_in]; out [T, n_out]; out and x do not overlap"""
        ...

    def rms_norm(self, x: Buffer, weight: Buffer, out: Buffer, *, eps: float) -> None:
        """out = x / sqrt(mean(x^2) + eps) * weight over the last axis.   x, out [..., n]; weight [n]; out may be x"""
        ...

    def add(self, x: Buffer, y: Buffer) -> None:
        """x += y   any equal shapes"""
        ...

    def add_bias(self, x: Buffer, bias: Buffer) -> None:
        """x += bias   x [T, n]; bias [n]"""
        ...

    def swiglu(self, gate: Buffer, up: Buffer, out: Buffer) -> None:
        """out = gate * sigmoid(gate) * up   all [T, F]; out may be gate"""
        ...

    def gate_heads(self, x: Buffer, gate: Buffer) -> None:
        """x *= sigmoid(gate)   x, gate [T, H, D] (gate may be strided)"""
        ...

    def rope(self, x: Buffer, first_position: int, table: RopeTable) -> None:
        """Turn the first n_rot values of each head in place; row t is at first_position + t.   x [T, H, D]"""
        ...

    def hadamard(self, x: Buffer, block: int) -> None:
        """x [T, H, D] times an orthonormal Walsh-Hadamard matrix (Sylvester order) per ``block`` values, in place.

        The matrix is its own inverse.
        """
        ...

    def scale(self, x: Buffer, factor: float) -> None:
        """x *= factor"""
        ...

    def zero_page(self, pool: Buffer, geometry: PageGeometry, slot: int) -> None:
        """Clear a slot that becomes a tail page: stale scales times zero weights would be NaN."""
        ...

    def kv_write(self, k: Buffer, v: Buffer, pool: Buffer, geometry: PageGeometry, spans: Sequence[RowSpan]) -> None:
        """Store rows (already rotated where the geometry says so) in the pages' format.

        k [T, G, Dk]; v [T, G, Dv]; pool [slots, page_bytes] uint8
        """
        ...

    def attend_decode(
        self, q: Buffer, pool: Buffer, geometry: PageGeometry, parts: Sequence[GroupPart], scratch: Buffer, *,
        first_position: int,
    ) -> None:
        """Add the attention of T rows over each part's pages to its scratch row; row t sees keys <= first_position + t.

        q        [T, H, Dk] scaled, rotated like K
        scratch  [rows, T, H, Dv + 2] float32: acc, l, m (running, un-normalised softmax)
        A group's pages are added one by one in logical order, so the bits do not depend on slots, nor on how a group is
        split into calls.
        The caller has waited for ready of every slot; it records consumed after this call.
        """
        ...

    def fold(self, scratch: Buffer, segments: Buffer, folds: Sequence[Fold]) -> None:
        """Merge group partials into segment partials, in the order given.   segments [n, T, H, Dv + 2]"""
        ...

    def finish_decode(self, segments: Buffer, n_segments: int, out: Buffer) -> None:
        """Merge segments [0, n_segments) in order and normalise.   out [T, H, Dv]"""
        ...

    def attend_prefill(
        self, q: Buffer, pool: Buffer, geometry: PageGeometry, pages: Sequence[PageRef], running: Buffer, *,
        fresh: bool, first_position: int,
    ) -> None:
        """Add T rows' attention over consecutive pages to the running partial, page by page in logical order.

        q [T, H, Dk] scaled; running [T, H, Dv + 2] as in ``attend_decode``. Calls for one layer come in logical order.
        """
        ...

    def finish_prefill(self, running: Buffer, out: Buffer) -> None:
        """Normalise.   running [T, H, Dv + 2]; out [T, H, Dv]"""
        ...

    def gdn_decode(
        self, qkv: Buffer, z: Buffer, alpha: Buffer, beta: Buffer, weights: GdnWeights, shape: GdnShape,
        state: GdnState, out: Buffer, *, bank: int, pending: int,
    ) -> None:
        """Gated DeltaNet rows with deferred commit.

        First applies rows [0, pending) saved in ``bank`` to ``state`` and ``conv`` and stores those; then computes its
        own T rows on a copy, without storing the state, and saves them in the other bank.
        qkv [T, channels] before the convolution; z [T, v_heads * d_v]; alpha, beta [T, v_heads] raw projections;
        out [T, v_heads * d_v]: normed and gated by silu(z).   Source: Yang et al., Gated Delta Networks, 2024.
        """
        ...

    def gdn_apply(self, shape: GdnShape, state: GdnState, *, bank: int, pending: int) -> None:
        """Apply rows [0, pending) saved in ``bank`` to the state and store it: the bits that ``gdn_decode`` gives."""
        ...

    def gdn_prefill(
        self, qkv: Buffer, z: Buffer, alpha: Buffer, beta: Buffer, weights: GdnWeights, shape: GdnShape,
        state: GdnState, out: Buffer,
    ) -> None:
        """The same for many rows, in chunks, storing the state after the last one. No rows may be pending."""
        ...


@dataclass(frozen=True, slots=True)
class Counters:
    """Since the device was made. ``stall_ns``: time in which the compute stream waited for the copy streams."""

    copy_bytes: int
    copy_calls: int
    publish_bytes: int
    publish_calls: int
    stall_ns: int


class Device(Protocol):
    """One accelerator (or the host playing one)."""

    name: str
    capabilities: Capabilities
    ops: Ops
    compute: Stream
    copy: Stream      # history -> slots
    publish: Stream   # slots -> history

    def allocate_arena(self, size_bytes: int) -> None:
        """The one arena, exactly that many bytes. ``DeviceError`` if it cannot be had."""
        ...

    def arena_view(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any] | type) -> Buffer:
        """A window on the arena as an array. No copy; valid as long as the region's lease is held."""
        ...

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any] | type) -> Buffer:
        """Zeroed device memory beside the arena (recurrent state), for load time only."""
        ...

    def allocate_pinned(self, size_bytes: int) -> np.ndarray:
        """Host memory that the copy streams can move fast, uint8 [size_bytes]. ``DeviceError`` if there is none."""
        ...

    def load_vector(self, info: TensorInfo) -> Buffer:
        """A small tensor as float32, shape as in the file reversed."""
        ...

    def load_matrix(self, info: TensorInfo) -> Weight:
        """A matrix of GGUF shape [n_in, n_out], ready for ``ops.matmul`` and ``ops.embed``."""
        ...

    def prepare_weights(self, infos: Sequence[TensorInfo], progress: Progress | None = None) -> None:
        """Decide how the matrices of a model are held, and do the loading work. Once, before ``load_matrix``."""
        ...

    def enqueue_copy(self, dst: Buffer, src: Buffer, stream: Stream) -> None:
        """Copy equal-sized uint8 buffers (host or device each) on ``stream``; returns at once."""
        ...

    def discard(self, buffer: Buffer) -> None:
        """The contents will be overwritten before they are read again (a debug device poisons them)."""
        ...

    def download(self, buffer: Buffer) -> np.ndarray:
        """A host copy, after all work on the compute stream. The only synchronisation in a step, for logits or ids."""
        ...

    def drop_captured(self) -> None:
        """Forget captured work that holds arena addresses (CUDA graphs). Before a hand-over commits."""
        ...

    def free_bytes(self) -> int:
        """Device memory that could be had now, for choosing an arena's size."""
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
