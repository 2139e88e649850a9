"""The host playing an accelerator: NumPy for the ops, a real copy thread and real fences, one arena of exact size.

It is the reference for numbers and the default where there is no GPU. ``HostDebug`` makes it hostile: copies are slow,
what nobody may read is poisoned, copies and allocations fail on demand, so that a missing wait shows as a wrong bit.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np

from kvs_core.device.base import Capabilities, Captured, Counters, StepInputs, StepSizes, Stream
from kvs_core.device.host.machine import available_ram_bytes, default_threads, use_one_blas_thread
from kvs_core.device.host.ops import HostOps
from kvs_core.device.host.ops.basic import matmul
from kvs_core.device.host.parts import HostPart, part_bytes
from kvs_core.device.host.streams import ComputeStream, CopyStream
from kvs_core.device.host.weights import HeldMatrix, HostWeight, HostWeights, aligned_bytes
from kvs_core.device.host.workers import Team
from kvs_core.device.operands import Activation, AttentionParams, Buffer, GdnShape, PassingWeight, RopeTable, Weight
from kvs_core.device.ops import Ops
from kvs_core.device.workspace import BufferSpec, Workspace
from kvs_core.errors import DeviceError, DeviceMemoryError
from kvs_core.formats.gguf import TensorInfo, split_experts
from kvs_core.formats.quants import dequantize_rows
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import KvType, PageGeometry
from kvs_core.units import MIB, Progress

_POISON = 0xFF   # NaN as float32, as float16 and as a block's scale

# Products small and large, square and flat, of one piece and of several.
_PROBE_SHAPES = ((7, 33), (64, 64), (576, 576), (1536, 576), (576, 1536), (2048, 1024))
_PROBE_ROWS = 8


@dataclass(frozen=True, slots=True)
class HostDebug:
    """What a test may have a host device do.

    copy_delay     gives the seconds that each copy waits before it begins; called on the copy threads
    poison         the arena, discarded buffers, and the target of a copy from its turn until it is done, read as 0xFF
    fail_copy_at   the copy of that number, counted from 0 over both copy streams, fails
    fail_alloc_at  the allocation of that number (arena, device or pinned memory, counted from 0) fails
    round_q        see ``HostOps``
    """

    copy_delay: Callable[[], float] | None = None
    poison: bool = False
    fail_copy_at: int | None = None
    fail_alloc_at: int | None = None
    round_q: bool = False


class HostDevice:
    """``Device`` on this machine's cores and RAM. ``compute`` is the calling thread, so one thread uses a device.

    It shares large products with helpers of its own. The number of threads changes the time they take and no bit.
    """

    name = "cpu"
    captures = False
    is_host = True
    spills = False

    def __init__(
        self, threads: int | None = None, *, debug: HostDebug | None = None, memory_limit_bytes: int | None = None
    ) -> None:
        """Start the threads, and check that decode products are row-invariant.

        threads             that compute, the calling one included; None: one per available core. The BLAS itself has
                            one thread from now on, in the whole process
        memory_limit_bytes  float32 weights held at most; None: most of the available RAM
        Raises ``DeviceError`` if the BLAS gives a row other bits when its neighbours change.
        """
        use_one_blas_thread()
        _check_row_invariance()
        self.threads = default_threads() if threads is None else threads
        self._team = Team(self.threads)
        self.capabilities = Capabilities(
            device=self.name,
            kv_pairs=frozenset(itertools.product(KvType, KvType)),
            head_dims=None,
            max_decode_rows=_PROBE_ROWS,
        )
        self._debug = debug or HostDebug()
        self._compute, self._copy, self._publish = ComputeStream(), CopyStream("copy"), CopyStream("publish")
        self.compute: Stream = self._compute
        self.copy: Stream = self._copy
        self.publish: Stream = self._publish
        self._ops = HostOps(self._team, round_q=self._debug.round_q)
        self.ops: Ops = self._ops
        self._weights = HostWeights(memory_limit_bytes)
        self._arena = np.empty(0, np.uint8)
        self._vector_bytes = 0
        self._state_bytes = 0
        self._copy_numbers = itertools.count()
        self._alloc_numbers = itertools.count()
        self._link_bytes_per_s: float | None = None
        self._tiles: tuple[StepInputs, ...] = ()

    def allocate_arena(self, size_bytes: int) -> None:
        """See ``Device``. The memory begins at a page and is not cleared."""
        assert self._arena.size == 0, "the arena is allocated once"
        self._arena = self._allocate_bytes(size_bytes, "the arena")
        self.discard(self._arena)

    def arena_view(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any] | type) -> Buffer:
        """See ``Device``."""
        item = np.dtype(dtype)
        end = offset + prod(shape) * item.itemsize
        assert 0 <= offset <= end <= self._arena.size, f"bytes [{offset}, {end}) of an arena of {self._arena.size}"
        assert offset % item.itemsize == 0, f"{item} at offset {offset}"
        return self._arena[offset:end].view(item).reshape(shape)

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any] | type) -> Buffer:
        """See ``Device``."""
        item = np.dtype(dtype)
        memory = self._allocate_bytes(prod(shape) * item.itemsize, "recurrent state")
        memory[:] = 0
        self._state_bytes += memory.size
        return memory.view(item).reshape(shape)

    def allocate_pinned(self, size_bytes: int) -> np.ndarray:
        """See ``Device``. All host memory is as good; it is not cleared."""
        memory = self._allocate_bytes(size_bytes, "the KV history")
        self.discard(memory)
        return memory

    def load_vector(self, info: TensorInfo, *, transposed: bool = False) -> Buffer:
        """See ``Device``."""
        rows = info.n_elements // info.shape[0]
        values = dequantize_rows(info, 0, rows).reshape(info.shape[::-1])
        if transposed:
            values = values.T.copy()
        self._vector_bytes += values.nbytes
        return values

    def load_matrix(self, infos: Sequence[TensorInfo], biases: Sequence[TensorInfo | None] = ()) -> Weight:
        """See ``Device``. The same tensor is held once, so a tied output head costs nothing."""
        return HostWeight([self._weights.matrix(info) for info in infos], self._bias(infos, biases))

    def load_passing(
        self, infos: Sequence[TensorInfo], home: np.ndarray, biases: Sequence[TensorInfo | None] = ()
    ) -> PassingWeight:
        """See ``Device``. Bytes stay as they are in the file, and each use dequantises them."""
        return HostPart(infos, self._bias(infos, biases), self._weights.scratch, home)

    def part_bytes(self, infos: Iterable[TensorInfo]) -> int:
        """See ``Device``."""
        return part_bytes(infos)

    def load_experts(self, infos: Sequence[TensorInfo]) -> Any:
        """See ``Device``."""
        return tuple(self.load_matrix(parts) for parts in zip(*map(split_experts, infos), strict=True))

    def load_table(self, info: TensorInfo) -> Weight:
        """See ``Device``."""
        return self._weights.matrix(info)

    def load_rope(self, table: RopeTable) -> RopeTable:
        """See ``Device``."""
        return table

    def prepare_weights(
        self, infos: Sequence[TensorInfo], progress: Progress | None = None, *, passing: Sequence[TensorInfo] = ()
    ) -> None:
        """See ``Device`` and ``HostWeights.prepare``."""
        self._weights.prepare(infos, progress)

    def enqueue_copy(self, dst: Buffer, src: Buffer, stream: Stream) -> None:
        """See ``Device``. On ``compute`` the copy is done at once."""
        assert dst.dtype == src.dtype == np.uint8
        assert dst.nbytes == src.nbytes, f"{src.nbytes} bytes into {dst.nbytes}"
        assert dst.flags.c_contiguous
        assert src.flags.c_contiguous
        target, source = dst.reshape(-1), src.reshape(-1)
        if isinstance(stream, CopyStream):
            number = next(self._copy_numbers)
            stream.enqueue_copy(target.nbytes, lambda: self._move(target, source, number))
        else:
            assert stream is self.compute
            np.copyto(target, source)

    def discard(self, buffer: Buffer) -> None:
        """See ``Device``."""
        if self._debug.poison:
            buffer.view(np.uint8)[...] = _POISON

    def upload(self, buffer: Buffer, values: np.ndarray) -> None:
        """See ``Device``."""
        np.copyto(buffer, values)

    def download(self, buffer: Buffer) -> np.ndarray:
        """See ``Device``."""
        host: np.ndarray = np.array(buffer)
        return host

    def outline(self) -> None:
        """See ``Device``."""

    def prepare_ops(
        self, geometries: Sequence[PageGeometry], attention: Sequence[AttentionParams],
        recurrent: Sequence[GdnShape], activation: Activation, progress: Progress | None = None,
    ) -> None:
        """See ``Device``. Nothing is compiled."""

    def page_layout(self, geometry: PageGeometry) -> PageGeometry:
        """See ``Device``. The host keeps rows in order."""
        return geometry

    def scratch(self, phase: Phase, sizes: StepSizes) -> Sequence[BufferSpec]:
        """See ``Device``. The host's ops have memory of their own."""
        return ()

    def bind_scratch(self, workspace: Workspace, phase: Phase) -> None:
        """See ``Device``."""

    def begin_step(self, inputs: StepInputs) -> None:
        """See ``Device``."""
        self._ops.begin_step(inputs)

    def begin_tiles(self, tiles: Sequence[StepInputs]) -> None:
        """See ``Device``."""
        self._tiles = tuple(tiles)

    def use_tile(self, index: int) -> None:
        """See ``Device``."""
        self._ops.begin_step(self._tiles[index])

    def begin_shift(self, attention: Sequence[AttentionParams], positions: int) -> None:
        """See ``Device``."""
        self._ops.begin_shift(positions)

    def reserve_steps(self, layers: int, pages: int, max_rows: int) -> None:
        """See ``Device``. The host reads plans and inputs where they are."""

    def capture(self, inputs: StepInputs, work: Callable[[], None]) -> Captured:
        """See ``Device``. The host runs steps as they come."""
        raise AssertionError("the host captures nothing")

    def drop_captured(self) -> None:
        """See ``Device``. The host captures nothing."""

    def free_bytes(self) -> int:
        """See ``Device``: what the system says can be had without swapping."""
        return available_ram_bytes()

    def counters(self) -> Counters:
        """See ``Device``."""
        return Counters(
            copy_bytes=self._copy.copied_bytes,
            copy_calls=self._copy.copies,
            publish_bytes=self._publish.copied_bytes,
            publish_calls=self._publish.copies,
            stall_ns=self._compute.stall_ns,
        )

    def link_bytes_per_s(self) -> float:
        """See ``Device``. The host's link is its memory; measured once, on the first call."""
        if self._link_bytes_per_s is None:
            source, target = np.zeros(16 * MIB, np.uint8), np.ones(16 * MIB, np.uint8)
            best = float("inf")
            for _ in range(3):
                start = time.perf_counter()
                np.copyto(target, source)
                best = min(best, time.perf_counter() - start)
            self._link_bytes_per_s = source.nbytes / best
        return self._link_bytes_per_s

    def memory_report(self) -> dict[str, int]:
        """See ``Device``. Weights used where the file is mapped do not count."""
        return {
            "weights": self._weights.held_bytes + self._vector_bytes,
            "state": self._state_bytes,
            "arena": self._arena.size,
        }

    def close(self) -> None:
        """See ``Device``. Copies that have not begun are dropped; their fences raise ``DeviceError``."""
        self._team.close()
        self._copy.close()
        self._publish.close()
        self._arena = np.empty(0, np.uint8)
        self._weights = HostWeights(0)

    def _bias(self, infos: Sequence[TensorInfo], biases: Sequence[TensorInfo | None]) -> Buffer | None:
        if all(info is None for info in biases):
            return None
        return np.concatenate([
            np.zeros(info.shape[1], np.float32) if given is None else self.load_vector(given)
            for info, given in zip(infos, biases, strict=True)
        ])

    def _move(self, target: Buffer, source: Buffer, number: int) -> None:
        self.discard(target)
        if self._debug.copy_delay is not None:
            time.sleep(self._debug.copy_delay())
        if number == self._debug.fail_copy_at:
            raise DeviceError(f"copy {number} of {target.nbytes} bytes failed, as asked for")
        np.copyto(target, source)

    def _allocate_bytes(self, size_bytes: int, purpose: str) -> np.ndarray:
        if next(self._alloc_numbers) == self._debug.fail_alloc_at:
            raise DeviceMemoryError(f"{size_bytes} bytes for {purpose} cannot be had, as asked for")
        return aligned_bytes(size_bytes, purpose)


@cache
def _check_row_invariance() -> None:
    """Compare rows multiplied together with the same rows alone, at another address, bit for bit.

    Products of a fixed shape should be safe; whether they are is up to the BLAS, so it is tried, once in a process.
    """
    rng = np.random.default_rng(0)
    for n_out, n_in in _PROBE_SHAPES:
        weight = HostWeight([HeldMatrix("probe", rng.random((n_out, n_in), np.float32) - np.float32(0.5))])
        x = rng.random((_PROBE_ROWS, n_in), np.float32) - np.float32(0.5)
        together = np.empty((_PROBE_ROWS, n_out), np.float32)
        matmul(x, weight, together, phase=Phase.DECODE)
        for row in range(_PROBE_ROWS):
            alone = np.empty((1, n_out), np.float32)
            matmul(x[row : row + 1].copy(), weight, alone, phase=Phase.DECODE)
            if alone.tobytes() != together[row].tobytes():
                raise DeviceError(
                    f"this machine's BLAS gives a row of a [{n_out}, {n_in}] product other bits beside other rows; "
                    "use a NumPy with OpenBLAS"
                )
