"""A model's matrices on their way to the GPU, into the forms of ``matrices.py``.

Bytes come from the file (or from a generator) through ``Source``, piece by piece, and are repacked on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from math import prod

import numpy as np

from kvs_core.device.cuda.kernel import I32, PTR, Kernel, Launcher
from kvs_core.device.cuda.matrices import (
    BLOCK,
    RECORD_TYPES,
    TILE_ROWS,
    CudaWeight,
    ExpertPart,
    ExpertStack,
    Quant,
    RecordSection,
    RowsSection,
    Section,
    held_type,
    record_bytes,
)
from kvs_core.device.operands import Buffer
from kvs_core.errors import CapabilityError
from kvs_core.formats.gguf import TensorInfo
from kvs_core.formats.quants import dequantize_rows, row_bytes
from kvs_core.memory.arena import ALIGNMENT
from kvs_core.units import MIB, align_up, ceil_div

PIECE_BYTES = 64 * MIB
"""Of the file, on the device at once while records are made of them; long enough for the link's full rate."""

_ROWS_PER_GROUP = 8   # warps of a block of repack.cu

Allocate = Callable[[int], Buffer]
"""Device memory of so many bytes, uint8, for good."""
Upload = Callable[[np.ndarray], Buffer]
"""A small host array on the device, same shape and type, for good."""
Download = Callable[[np.ndarray, Buffer], None]
"""download(home, memory): fill pinned memory with as many bytes of the device; blocks."""
Source = Callable[[TensorInfo, int, Buffer], None]
"""source(info, first, out): fill ``out``, uint8 on the device, with the tensor's bytes [first, first + len(out)).
On the compute stream: it may return before they are there, and work enqueued earlier may still read ``out``."""


class CudaPart:
    """``PassingWeight``: the sections of a matrix, or of experts, each from a multiple of 256 bytes on."""

    def __init__(self, weight: CudaWeight, stack: ExpertStack | None, home: np.ndarray) -> None:
        """``stack``: the experts that the matrix is made of."""
        self.weight = weight if stack is None else stack
        self.home = home
        self._matrix = weight
        self._stack = stack
        self.lie_in(home)

    def lie_in(self, place: Buffer) -> None:
        """See ``WeightPart``."""
        at = 0
        moved: dict[Section, Section] = {}
        for section in self._matrix.sections:
            if isinstance(section, RecordSection):
                size = int(section.records.nbytes)
                moved[section] = replace(section, records=place[at : at + size])
            else:
                size = int(section.rows.nbytes)
                moved[section] = replace(section, rows=place[at : at + size])
            at += align_up(size, ALIGNMENT)
        self._matrix.sections = tuple(moved.values())
        if self._stack is not None:
            self._stack.parts = tuple(replace(part, section=moved[part.section]) for part in self._stack.parts)


def held_bytes(info: TensorInfo) -> int:
    """Bytes of a matrix of its own, in whole tiles or in rows; of experts, of all of them."""
    n_in, n_out = _flat(info).shape
    quant = held_type(info.quant)
    if quant in RECORD_TYPES:
        return ceil_div(n_out, TILE_ROWS) * ceil_div(n_in, BLOCK) * record_bytes(quant)
    return n_out * row_bytes(quant, n_in)


def _flat(info: TensorInfo) -> TensorInfo:
    """The matrices of experts, one under the other."""
    n_in, *n_out = info.shape
    return replace(info, shape=(n_in, prod(n_out)))


def part_bytes(infos: Iterable[TensorInfo]) -> int:
    """See ``Device.part_bytes``. Joined matrices take no more than each for itself."""
    return sum(align_up(held_bytes(info), ALIGNMENT) for info in infos)


@cache
def repack_kernel(quant: Quant) -> Kernel:
    """GGUF rows to records."""
    return Kernel("repack.cu", "repack", (PTR, I32, I32, I32, I32, I32, PTR), (("TYPE", quant.name),))


def instances(arch: int) -> Iterator[Kernel]:
    """Every record type."""
    yield from map(repack_kernel, RECORD_TYPES)


class WeightStore:
    """Loads matrices, each once: the same tensors give the same weight."""

    def __init__(
        self, launcher: Launcher, allocate: Allocate, upload: Upload, source: Source, piece_bytes: int = PIECE_BYTES,
        *, hold: Allocate | None = None,
    ) -> None:
        """``hold``: allocates what stays, where that is other memory than ``allocate`` has for what is on its way."""
        self.held_bytes = 0
        self._launcher = launcher
        self._allocate = allocate
        self._hold = hold or allocate
        self._upload = upload
        self._source = source
        self._piece_bytes = piece_bytes
        self._piece: Buffer = None
        self._weights: dict[tuple[tuple[str, ...], tuple[str | None, ...]], CudaWeight] = {}
        self.stacks: list[ExpertStack] = []
        self._passing: list[CudaWeight] = []

    @property
    def weights(self) -> Iterable[CudaWeight]:
        """All that was loaded, but for experts, which are in ``stacks``."""
        return [*self._weights.values(), *self._passing]

    def load(self, infos: Sequence[TensorInfo], biases: Sequence[TensorInfo | None] = ()) -> CudaWeight:
        """Matrices of GGUF shape [n_in, n_out], joined. ``biases``: none, or one entry each.

        A gate and an up matrix of a feed-forward (told by their names) of one record type are interleaved, so that one
        kernel can multiply both and join them.
        """
        biases = _given(infos, biases)
        key = tuple(info.name for info in infos), tuple(None if bias is None else bias.name for bias in biases)
        found = self._weights.get(key)
        if found is None:
            found = self._weights[key] = self._load(infos, biases, self._take)
        return found

    def load_experts(self, infos: Sequence[TensorInfo]) -> ExpertStack:
        """Tensors [n_in, n_out, experts]; each expert's matrix has its rows of all of them. Not for the same twice.

        Raises ``CapabilityError`` for sizes that the kernels do not take.
        """
        return self._load_stack(infos, self._take)[1]

    def load_passing(
        self, infos: Sequence[TensorInfo], home: np.ndarray, biases: Sequence[TensorInfo | None], download: Download
    ) -> CudaPart:
        """What ``load``, or of experts ``load_experts``, takes, made on the GPU and brought to ``home``."""
        staged, at = self._allocate(part_bytes(infos)), 0

        def take(size_bytes: int) -> Buffer:
            nonlocal at
            start, at = at, at + align_up(size_bytes, ALIGNMENT)
            return staged[start : start + size_bytes]

        stack: ExpertStack | None = None
        if len(infos[0].shape) == 3:
            weight, stack = self._load_stack(infos, take)
        else:
            weight = self._load(infos, _given(infos, biases), take)
            self._passing.append(weight)
        home = home[:at]
        download(home, staged[:at])
        return CudaPart(weight, stack, home)

    def finish(self) -> None:
        """Give up the memory that only loading needs; the next ``load`` takes it again."""
        self._piece = None

    def _load_stack(self, infos: Sequence[TensorInfo], take: Allocate) -> tuple[CudaWeight, ExpertStack]:
        n_in, _, count = infos[0].shape
        for info in infos:
            step = TILE_ROWS if held_type(info.quant) in RECORD_TYPES else 4
            if info.shape[1] % step or n_in % 4:
                raise CapabilityError(
                    f"{info.name}: experts of {info.shape[1]} rows of {n_in} {info.quant.name} have no kernel on a "
                    f"GPU, which takes multiples of {step} and 4; use --device cpu"
                )
        weight = self._load(infos, (None,) * len(infos), take)
        parts = []
        row = column = 0   # of the weight, and of an expert
        for info in infos:
            section = next(part for part in reversed(weight.sections) if part.first_row <= row)
            parts.append(ExpertPart(section, row - section.first_row, info.shape[1], column))
            row += info.shape[1] * count
            column += info.shape[1]
        stack = ExpertStack(n_in, column, count, tuple(parts))
        self.stacks.append(stack)
        return weight, stack

    def _load(
        self, infos: Sequence[TensorInfo], biases: Sequence[TensorInfo | None], take: Allocate
    ) -> CudaWeight:
        bias = self._bias(infos, biases)
        half_rows = _half_rows(infos) if bias is None else 0
        infos = [_flat(info) for info in infos]
        n_in = infos[0].shape[0]
        assert all(info.shape[0] == n_in for info in infos)
        sections: list[Section] = []
        first_row = 0
        for quant, group in groupby(infos, key=lambda info: held_type(info.quant)):
            parts = list(group)
            n_rows = sum(info.shape[1] for info in parts)
            own_bias = None if bias is None else bias[first_row : first_row + n_rows]
            if quant in RECORD_TYPES:
                records = self._records(parts, n_rows, half_rows, take)
                n_blocks = ceil_div(n_in, BLOCK)
                sections.append(RecordSection(quant, first_row, n_rows, n_blocks, records, half_rows > 0, own_bias))
            else:
                rows = self._rows(parts, quant, take)
                sections.append(RowsSection(quant, first_row, n_rows, row_bytes(quant, n_in), rows, own_bias))
            first_row += n_rows
        name = "+".join(info.name for info in infos)
        return CudaWeight(name, n_in, first_row, tuple(sections), bias)

    def _take(self, size_bytes: int) -> Buffer:
        self.held_bytes += size_bytes
        return self._hold(size_bytes)

    def _bias(self, infos: Sequence[TensorInfo], biases: Sequence[TensorInfo | None]) -> Buffer | None:
        if all(bias is None for bias in biases):
            return None
        values = [
            np.zeros(info.shape[1], np.float32) if bias is None else dequantize_rows(bias, 0, 1)[0]
            for info, bias in zip(infos, biases, strict=True)
        ]
        joined = np.concatenate(values)
        self.held_bytes += joined.nbytes
        return self._upload(joined)

    def _rows(self, infos: Sequence[TensorInfo], quant: Quant, take: Allocate) -> Buffer:
        size = row_bytes(quant, infos[0].shape[0])
        held = take(size * sum(info.shape[1] for info in infos))
        self._fill_rows(infos, quant, held)
        return held

    def _fill_rows(self, infos: Sequence[TensorInfo], quant: Quant, held: Buffer) -> None:
        size = row_bytes(quant, infos[0].shape[0])
        step = max(1, self._piece_bytes // size)
        at = 0
        for info in infos:
            for row in range(0, info.shape[1], step):
                count = min(step, info.shape[1] - row)
                out = held[at : at + count * size]
                if info.quant is quant:
                    self._source(info, row * size, out)
                else:
                    self._source(_as_halves(info, row, count), 0, out)
                at += count * size

    def _records(self, infos: Sequence[TensorInfo], n_rows: int, half_rows: int, take: Allocate) -> Buffer:
        quant, n_in = infos[0].quant, infos[0].shape[0]
        n_tiles, n_blocks = ceil_div(n_rows, TILE_ROWS), ceil_div(n_in, BLOCK)
        records = take(n_tiles * n_blocks * record_bytes(quant))
        self._fill_records(infos, n_rows, half_rows, records)
        return records

    def _fill_records(self, infos: Sequence[TensorInfo], n_rows: int, half_rows: int, records: Buffer) -> None:
        """``half_rows``: see ``_half_rows``."""
        quant, n_in = infos[0].quant, infos[0].shape[0]
        first_row = 0
        for info in infos:
            ends = first_row + info.shape[1] == n_rows
            for row, count, piece in self._pieces(info):
                # The last rows bring the padding of the last tile with them.
                written = count
                if ends and row + count == info.shape[1]:
                    written += align_up(n_rows, TILE_ROWS) - n_rows
                self._launcher.launch(
                    repack_kernel(quant), (ceil_div(written, _ROWS_PER_GROUP), ceil_div(n_in, BLOCK), 1),
                    32 * _ROWS_PER_GROUP, (piece, count, written, n_in, first_row + row, half_rows, records),
                )
            first_row += info.shape[1]

    def _pieces(self, info: TensorInfo) -> Iterator[tuple[int, int, Buffer]]:
        """A tensor's rows on the device, some at a time: first row, rows, bytes. Each is good until the next."""
        size = row_bytes(info.quant, info.shape[0])
        step = max(1, self._piece_bytes // size)
        for row in range(0, info.shape[1], step):
            count = min(step, info.shape[1] - row)
            if self._piece is None or len(self._piece) < count * size:
                self._piece = self._allocate(max(count * size, self._piece_bytes))
            piece = self._piece[: count * size]
            self._source(info, row * size, piece)
            yield row, count, piece


def _given(infos: Sequence[TensorInfo], biases: Sequence[TensorInfo | None]) -> Sequence[TensorInfo | None]:
    """An entry for each tensor."""
    assert infos
    assert not biases or len(biases) == len(infos)
    return tuple(biases) if any(bias is not None for bias in biases) else (None,) * len(infos)


def _half_rows(infos: Sequence[TensorInfo]) -> int:
    """Of gates and ups that can share tiles: rows of gates before as many of ups, again and again. Of others 0."""
    if len(infos) == 1:   # an expert's gate before its up, in one tensor
        (both,) = infos
        rows = both.shape[1] // 2
        alike = "ffn_gate_up_exps" in both.name
    elif len(infos) == 2:
        gate, up = infos
        rows = _flat(gate).shape[1]
        alike = "ffn_gate" in gate.name and "ffn_up" in up.name and gate.quant is up.quant and gate.shape == up.shape
    else:
        return 0
    return rows if alike and infos[0].quant in RECORD_TYPES and rows % (TILE_ROWS // 2) == 0 else 0


def _as_halves(info: TensorInfo, first_row: int, n_rows: int) -> TensorInfo:
    """Rows of a tensor as a float16 tensor of their own; what float16 does not hold becomes its largest number."""
    values = dequantize_rows(info, first_row, n_rows)
    limit = np.finfo(np.float16).max
    halves = np.clip(values, -limit, limit).astype(np.float16)
    data = halves.reshape(-1).view(np.uint8)
    return TensorInfo(info.name, (info.shape[0], n_rows), Quant.F16, halves.size, data.size, data)
