"""One NVIDIA GPU: memory, streams and fences, captured steps; its ops are in ``ops``.

Device memory is the arena, the weights, the recurrent state, and small tables made at load; nothing is allocated after
that. A decode step is a CUDA graph with a compute branch and a copy branch, launched once per token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from kvs_core.device.base import Capabilities, Captured, Counters, Outline, StepInputs, StepSizes, Stream
from kvs_core.device.copied import NONE_COPIED, Copied
from kvs_core.device.cuda import unified
from kvs_core.device.cuda.context import Context
from kvs_core.device.cuda.cuda_ops import CudaOps
from kvs_core.device.cuda.graphs import CapturedStep, Launches
from kvs_core.device.cuda.kernel import address
from kvs_core.device.cuda.outline import CudaOutline
from kvs_core.device.cuda.pinned_tables import PinnedTables
from kvs_core.device.cuda.runtime import Runtime
from kvs_core.device.cuda.stage import PageableCopies
from kvs_core.device.cuda.steps import PlanTables, StepTable
from kvs_core.device.cuda.streams import CaptureState, CudaStream, EventPool
from kvs_core.device.cuda.uploads import FileBytes
from kvs_core.device.cuda.weights import WeightStore, part_bytes
from kvs_core.device.host.ops.basic import turn_by
from kvs_core.device.operands import Activation, AttentionParams, Buffer, GdnShape, PassingWeight, RopeTable, Weight
from kvs_core.device.ops import Ops
from kvs_core.device.pageable import PageableBytes, pageable_bytes
from kvs_core.device.workspace import BufferSpec, Workspace
from kvs_core.errors import DeviceMemoryError
from kvs_core.formats.gguf import TensorInfo
from kvs_core.formats.quants import dequantize_rows
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import PageGeometry
from kvs_core.units import MIB, Progress

LOGGER = logging.getLogger(__name__)

_EVENTS = 256            # made at start; a schedule with more runs makes more before it is captured
_PROBE_BYTES, _LEAST_PROBE_BYTES = 64 * MIB, MIB
_PAGEABLE_BYTES = 8 * MIB
_PROBES = 5


class CudaDevice:
    """``Device`` on a CUDA runtime."""

    captures = True
    is_host = False

    def __init__(self, runtime: Runtime, *, may_spill: bool = True) -> None:
        """Takes the runtime over: ``close`` closes it.

        may_spill  whether the variable of unified memory is looked at
        """
        self.name = runtime.name
        self._runtime = runtime
        self._capture = CaptureState()
        self._pool = EventPool(runtime, _EVENTS)
        self._compute, self._copy, self._publish = (
            CudaStream(name, raw, self._pool, self._capture)
            for name, raw in (("compute", runtime.compute), ("copy", runtime.copy), ("publish", runtime.publish))
        )
        self.compute: Stream = self._compute
        self.copy: Stream = self._copy
        self.publish: Stream = self._publish
        self._closed = False
        asked = may_spill and unified.is_asked()
        self.spills = asked and runtime.overcommits
        if asked and not runtime.overcommits:
            LOGGER.warning("%s has no effect: unified memory must fit %s here", unified.VARIABLE, self.name)
        self._first_free_bytes = runtime.free_bytes() if self.spills else 0
        self._state_bytes = 0
        self._vector_bytes = 0
        self._arena: Buffer | None = None
        self._downloads = np.empty(0, np.uint8)
        self._link_bytes_per_s = 0.0
        self._copied = NONE_COPIED
        self._published = NONE_COPIED
        self._files = FileBytes(runtime, self._compute)
        self._pageable = PageableCopies(runtime, _PAGEABLE_BYTES)
        self._weights = WeightStore(
            runtime.launcher, self._allocate_weights, self._files.upload, self._files.read, hold=self._hold_weights
        )
        self._tables = PinnedTables(runtime, self._files, self._hold_weights)
        self._steps = StepTable(runtime, self._compute)
        self._launches = Launches(runtime, self._compute, self._steps)
        self._plans: PlanTables | None = None
        self._ops = CudaOps(Context(runtime.launcher, self._steps.memory), runtime.gemm, self._files.upload)
        self.ops: Ops = self._ops
        self.capabilities: Capabilities = self._ops.capabilities(runtime.name)

    def another_runtime(self) -> Runtime:
        """A runtime of its own on the same GPU."""
        return self._runtime.another()

    # Memory.

    def allocate_arena(self, size_bytes: int) -> None:
        """See ``Device``. Zeroed."""
        assert self._arena is None, "the arena is allocated once"
        self._arena = self._runtime.allocate(size_bytes, "the arena")

    def arena_view(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any] | type) -> Buffer:
        """See ``Device``."""
        item = np.dtype(dtype)
        assert self._arena is not None
        end = offset + prod(shape) * item.itemsize
        assert 0 <= offset <= end <= self._arena.size, f"bytes [{offset}, {end}) of an arena of {self._arena.size}"
        return self._runtime.view(self._arena, offset, shape, item)

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any] | type) -> Buffer:
        """See ``Device``."""
        item = np.dtype(dtype)
        size = prod(shape) * item.itemsize
        self._state_bytes += size
        return self._runtime.view(self._runtime.allocate(size, "recurrent state"), 0, shape, item)

    def allocate_pinned(self, size_bytes: int) -> np.ndarray:
        """See ``Device``."""
        return self._runtime.allocate_pinned(size_bytes, "the KV history")

    def free_bytes(self) -> int:
        """See ``Device``."""
        free = self._runtime.free_bytes()
        if self.spills:   # whether or not the driver counts weights that would give way
            free = min(free, max(0, self._first_free_bytes - self._weights.held_bytes))
        return free

    def memory_report(self) -> dict[str, int]:
        """See ``Device``."""
        return {
            "weights": self._weights.held_bytes + self._vector_bytes + self._tables.held_bytes,
            "state": self._state_bytes,
            "arena": 0 if self._arena is None else int(self._arena.size),
            "tables": 0 if self._plans is None else self._plans.size_bytes,
        }

    # Weights.

    def prepare_weights(
        self, infos: Sequence[TensorInfo], progress: Progress | None = None, *, passing: Sequence[TensorInfo] = ()
    ) -> None:
        """See ``Device``. Matrices are uploaded as they are asked for, and ``progress`` hears of it then."""
        self._files.expect(sum(info.n_bytes for info in (*infos, *passing)), progress)

    def load_vector(self, info: TensorInfo, *, transposed: bool = False) -> Buffer:
        """See ``Device``."""
        values = dequantize_rows(info, 0, info.n_elements // info.shape[0]).reshape(info.shape[::-1])
        self._vector_bytes += values.nbytes
        return self._files.upload(np.ascontiguousarray(values.T if transposed else values))

    def load_matrix(self, infos: Sequence[TensorInfo], biases: Sequence[TensorInfo | None] = ()) -> Weight:
        """See ``Device``. Types without a kernel become float16."""
        return self._weights.load(infos, biases)

    def load_experts(self, infos: Sequence[TensorInfo]) -> Any:
        """See ``Device``. Raises ``CapabilityError`` for sizes without a kernel."""
        return self._weights.load_experts(infos)

    def load_passing(
        self, infos: Sequence[TensorInfo], home: np.ndarray, biases: Sequence[TensorInfo | None] = ()
    ) -> PassingWeight:
        """See ``Device``. Records as those of ``load_matrix``; in between the device has room for them."""
        return self._weights.load_passing(infos, home, biases, self._bring_home)

    def part_bytes(self, infos: Iterable[TensorInfo]) -> int:
        """See ``Device``."""
        return part_bytes(infos)

    def load_table(self, info: TensorInfo) -> Weight:
        """See ``Device``. It stays in pinned host memory, where kernels can read it: a step takes a row per token. If
        that cannot be had, it takes memory of the GPU."""
        return self._tables.load(info)

    def load_rope(self, table: RopeTable) -> Any:
        """See ``Device``."""
        return self._ops.load_rope(table)

    def outline(self) -> Outline:
        """See ``Device``: compiling begins while weights are loaded."""
        return CudaOutline(self._ops, self._runtime.launcher)

    def prepare_ops(
        self, geometries: Sequence[PageGeometry], attention: Sequence[AttentionParams],
        recurrent: Sequence[GdnShape], activation: Activation, progress: Progress | None = None,
    ) -> None:
        """See ``Device``: compile what the model's steps will launch, or find it in the cache on disk."""
        self._files.finish()
        self._weights.finish()
        weights = list(self._weights.weights)
        kernels = self._ops.kernels(
            weights, self._weights.stacks, self._tables.weights, geometries, attention, recurrent, activation
        )
        self._runtime.launcher.prepare(kernels, progress)

    def _allocate_weights(self, size_bytes: int) -> Buffer:
        return self._runtime.allocate(size_bytes, "weights")

    def _hold_weights(self, size_bytes: int) -> Buffer:
        if self.spills:
            return self._runtime.allocate_managed(size_bytes, "weights")
        return self._allocate_weights(size_bytes)

    def _bring_home(self, home: np.ndarray, memory: Buffer) -> None:
        self._runtime.enqueue_copy(address(home), address(memory), home.nbytes, self._compute.raw)
        self._compute.synchronize()

    # Layout.

    def page_layout(self, geometry: PageGeometry) -> PageGeometry:
        """See ``Device``."""
        return replace(geometry, order=self._ops.page_order(geometry))

    def scratch(self, phase: Phase, sizes: StepSizes) -> Sequence[BufferSpec]:
        """See ``Device``."""
        return self._ops.scratch(phase, sizes)

    def bind_scratch(self, workspace: Workspace, phase: Phase) -> None:
        """See ``Device``."""
        self._ops.bind_scratch(workspace, phase)

    def reserve_steps(self, layers: int, pages: int, max_rows: int) -> None:
        """See ``Device``."""
        self._steps.reserve(max_rows)
        self._plans = PlanTables(self._runtime, self._compute, layers, pages, self.capabilities.max_decode_rows)
        self._ops.reserve(self._steps.tokens, self._plans, max_rows)
        self._files.finish()

    # Steps.

    def begin_step(self, inputs: StepInputs) -> None:
        """See ``Device``."""
        self._ops.begin_step(inputs)
        if inputs.phase is Phase.PREFILL:
            self._steps.enqueue_prefill(inputs)
        else:
            self._steps.write(inputs)
            self._steps.enqueue()
            self._steps.launched()

    def begin_tiles(self, tiles: Sequence[StepInputs]) -> None:
        """See ``Device``."""
        self._ops.begin_tiles()
        self._steps.enqueue_tiles(tiles)

    def use_tile(self, index: int) -> None:
        """See ``Device``."""
        self._ops.use_tile(index, self._steps.tiles[index], self._steps.tile_rows[index])

    def begin_shift(self, attention: Sequence[AttentionParams], positions: int) -> None:
        """See ``Device``. The angles lie where a step has those of its first row."""
        for rope in dict.fromkeys(params.rope for params in attention):
            self.upload(rope.cs[0], turn_by(positions, rope.table))

    def capture(self, inputs: StepInputs, work: Callable[[], None]) -> Captured:
        """See ``Device``."""
        self._ops.begin_step(inputs)
        before = self._copied
        self._capture.active = True
        try:
            self._runtime.begin_capture()
            try:
                self._steps.enqueue()
                self._copy.wait(self._compute.record())
                work()
                self._compute.wait(self._copy.record())
                graph = self._runtime.end_capture()
            except BaseException:
                self._runtime.abandon_capture()
                raise
        finally:
            self._capture.active = False
            copied = self._copied.since(before)
            self._copied = before
        return CapturedStep(self._launches, graph, copied)

    def drop_captured(self) -> None:
        """See ``Device``. Their owner has let go of them."""

    def enqueue_copy(self, dst: Buffer, src: Buffer, stream: Stream) -> None:
        """See ``Device``."""
        assert dst.nbytes == src.nbytes, f"{src.nbytes} bytes into {dst.nbytes}"
        assert isinstance(stream, CudaStream)
        if isinstance(src, PageableBytes):
            self._pageable.to_device(address(dst), src, stream)
        elif isinstance(dst, PageableBytes):
            self._pageable.to_host(dst, address(src), stream)
        else:
            self._runtime.enqueue_copy(address(dst), address(src), dst.nbytes, stream.raw)
        if stream is self.copy:
            self._copied = self._copied.plus(Copied(dst.nbytes, 1))
        elif stream is self.publish:
            self._published = self._published.plus(Copied(dst.nbytes, 1))

    def discard(self, buffer: Buffer) -> None:
        """See ``Device``."""

    def upload(self, buffer: Buffer, values: np.ndarray) -> None:
        """See ``Device``."""
        assert values.nbytes == buffer.nbytes, f"{values.nbytes} bytes into {buffer.nbytes}"
        size = int(buffer.nbytes)
        self._room_for(size)
        self._downloads[:size] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._runtime.enqueue_copy(address(buffer), address(self._downloads), size, self._compute.raw)
        self._compute.synchronize()

    def download(self, buffer: Buffer) -> np.ndarray:
        """See ``Device``."""
        size = int(buffer.nbytes)
        self._room_for(size)
        self._runtime.enqueue_copy(address(self._downloads), address(buffer), size, self._compute.raw)
        self._compute.synchronize()
        host: np.ndarray = self._downloads[:size].view(buffer.dtype).reshape(buffer.shape).copy()
        return host

    def _room_for(self, size_bytes: int) -> None:
        """Copies that the host waits for need no pinned memory, they are faster with it."""
        if self._downloads.size < size_bytes:
            purpose = "copies to and from the GPU"
            try:
                self._downloads = self._runtime.allocate_pinned(size_bytes, purpose)
            except DeviceMemoryError:
                self._downloads = np.asarray(pageable_bytes(size_bytes, purpose))

    # Facts.

    def link_bytes_per_s(self) -> float:
        """See ``Device``."""
        size = _PROBE_BYTES
        while not self._link_bytes_per_s:
            try:
                self._link_bytes_per_s = self._runtime.measure_copies(size, _PROBES)
            except DeviceMemoryError:
                if size <= _LEAST_PROBE_BYTES:
                    raise
                size //= 2
        return self._link_bytes_per_s

    def counters(self) -> Counters:
        """See ``Device``."""
        copied = self._copied.plus(self._launches.copied)
        return Counters(
            copy_bytes=copied.size_bytes,
            copy_calls=copied.copies,
            publish_bytes=self._published.size_bytes,
            publish_calls=self._published.copies,
            stall_ns=None,
        )

    def close(self) -> None:
        """See ``Device``."""
        if self._closed:
            return
        self._closed = True
        try:
            for stream in (self._compute, self._copy, self._publish):
                stream.synchronize()
        finally:
            self._arena = None
            self._files.close()
            self._runtime.close()
