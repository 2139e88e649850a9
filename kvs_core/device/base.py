"""The only door to bytes: what every device offers, and what the rooms above and below may rely on.

A device owns one arena, three streams and a set of ``Ops``. On CUDA an ``enqueue_*`` or an op returns before the work
is done and a stream keeps its order; on the host the compute stream is the calling thread itself (an op is done when it
returns) while the copy streams are real threads. Both keep the same rules, so a missing wait is a wrong bit on either:

    fence = copy.record()        the work enqueued on ``copy`` so far
    compute.wait(fence)          later work on ``compute`` runs after it
    fence.wait()                 blocks the host; never inside a step but for the sampled ids

Absent here: which page is where (paging), when to move it (streaming), what a layer is made of (models).
The ops themselves are in ``ops.py``, what they work on in ``operands.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvs_core.device.operands import (
    Activation,
    AttentionParams,
    Buffer,
    GdnShape,
    PassingWeight,
    RopeTable,
    Weight,
)
from kvs_core.device.ops import Ops
from kvs_core.errors import CapabilityError
from kvs_core.formats.gguf import TensorInfo
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import KvType, PageGeometry
from kvs_core.units import Progress

if TYPE_CHECKING:
    from kvs_core.device.workspace import BufferSpec, Workspace


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


Turn = Callable[[int], None]
"""``Device.use_tile``: the ops from here on belong to the tile of that number."""


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
