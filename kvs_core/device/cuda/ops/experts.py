"""Launchers of ``experts.cu``, ``experts_records.cu`` and ``experts_rows.cu``: a mixture of experts.

Each line one launch, but for the products of the router and of what all rows take, which are those of any other
matrix:

    x ──add_quant──  x * norm ──router──  logits ──choose──  experts of each row, by number, and their shares
    PREFILL          ──group──  slots of each expert in groups of up to 8
    x * norm         ──product──  activation(gate) * up of each slot       (or gates and ups, then ──swiglu──)
                     ──quant──  ──product──  rows of each slot ──combine──  x += their weighted sum
    x  ── a dense part's products ── rows ──mix── with those of the slots, through norms, x += their sum   add_mixture

A slot is one expert of one row. What rows chose stays on the device: grids have room for any choice. In DECODE a row's
bits do not depend on the others, as each slot is multiplied alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import sqrt

import numpy as np

from kvs_core.device.base import StepSizes
from kvs_core.device.cuda.context import Context
from kvs_core.device.cuda.kernel import F32, I32, I64, PTR, Kernel, address
from kvs_core.device.cuda.matrices import (
    BLOCK,
    RECORD_TYPES,
    ROW_TYPES,
    CudaWeight,
    ExpertPart,
    ExpertStack,
    Quant,
    RecordSection,
    RowsSection,
    record_bytes,
)
from kvs_core.device.cuda.ops.matmul import DecodeMatmul, Normed, quant_grid
from kvs_core.device.cuda.ops.matmul_kernels import ACT_BYTES, GATES, OUTPUTS, QUANT, Output
from kvs_core.device.cuda.ops.prefill_matmul import PrefillMatmul
from kvs_core.device.operands import Activation, Buffer, ExpertWeights, MixtureWeights, Weight
from kvs_core.device.workspace import BufferSpec
from kvs_core.memory.phases import Phase
from kvs_core.units import ceil_div

PREFILL_ROWS = 512
"""Rows of a prefill step that go through the experts at once: enough for full groups, and a bound on the scratch."""

_DECODE_ROWS = 8
_GROUP = 8          # slots of a group
_WARPS = 8          # of experts_records.cu: tiles of a block times warps that share one
_WAVES = 16         # blocks per multiprocessor that a prefill's products have about
_MIX_THREADS = 512

_CHOOSE = Kernel("experts.cu", "choose_experts", (PTR, I32, I32, F32, PTR, PTR, PTR, F32, I32, PTR, PTR, PTR, PTR))
_GROUP_SLOTS = Kernel("experts.cu", "group_slots", (PTR, I32, PTR, PTR))
_COMBINE = Kernel("experts.cu", "combine_experts", (PTR, I32, PTR, PTR, I32, PTR, I32, I32, I32))
_MIX = Kernel("experts.cu", "mix_experts", (PTR, I32, PTR, PTR, I32, PTR, I32, I32, PTR, PTR, PTR, I32, F32))
_CHOICE = (PTR, PTR, PTR, PTR, I32)   # ids, order, groups, y and its stride


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows that slots are multiplied with.

    per_row  slots that share a row
    factors  float32 [rows] of the products, or 0
    """

    records: Buffer
    floats: Buffer
    rows: int
    per_row: int
    factors: Buffer | int = 0


class Experts:
    """See the top of the file."""

    def __init__(self, context: Context, matmul: DecodeMatmul, prefill: PrefillMatmul) -> None:
        """For the router, and for the expert that all rows share."""
        self._context = context
        self._matmul = matmul
        self._prefill = prefill

    def scratch(self, phase: Phase, sizes: StepSizes) -> list[BufferSpec]:
        """What lies between the launches, for as many rows as go through them at once."""
        experts = sizes.experts
        if experts is None:
            return []
        wide = phase is Phase.PREFILL
        rows = min(sizes.rows, PREFILL_ROWS if wide else _DECODE_ROWS)
        slots, n, width = rows * experts.used, sizes.n_embd, experts.n_ff
        shapes: list[tuple[str, tuple[int, ...], type]] = [
            ("records", (ceil_div(n, BLOCK), 2, rows, ACT_BYTES), np.uint8),
            ("normed", (rows, n), np.float32),
            ("sums", (rows, ceil_div(n, BLOCK)), np.float32),
            ("logits", (rows, experts.count), np.float32),
            ("ids", (slots,), np.int32),
            ("shares", (rows, experts.used + 1), np.float32),
            ("factors", (rows,), np.float32),
            ("hidden", (slots, width), np.float32),
            ("hidden_records", (ceil_div(width, BLOCK), 2, slots, ACT_BYTES), np.uint8),
            ("products", (slots, max(n, 2 * width)), np.float32),
        ]
        if experts.n_beside:
            shapes.append(("beside", (rows, experts.n_beside), np.float32))
        if wide:
            shapes += [("order", (slots,), np.int32), ("groups", (_groups(slots, experts.count), 4), np.int32)]
            if experts.n_beside:
                shapes.append(("beside_products", (rows, n), np.float32))
        return [BufferSpec(f"experts.{name}", shape, dtype) for name, shape, dtype in shapes]

    def add(self, x: Buffer, norm: Buffer, weights: ExpertWeights, *, eps: float, phase: Phase) -> None:
        """See ``Ops.add_experts``."""
        for first in range(0, len(x), PREFILL_ROWS):
            self._add(x[first : first + PREFILL_ROWS], norm, weights, eps, phase is Phase.PREFILL)

    def add_mixture(self, x: Buffer, weights: MixtureWeights, *, eps: float, phase: Phase) -> None:
        """See ``Ops.add_mixture``."""
        for first in range(0, len(x), PREFILL_ROWS):
            self._add_mixture(x[first : first + PREFILL_ROWS], weights, eps, phase is Phase.PREFILL)

    def _add(self, x: Buffer, norm: Buffer, weights: ExpertWeights, eps: float, wide: bool) -> None:
        rows, n = x.shape
        normed = self._normed(x, norm)
        self._choose(normed, weights, eps, wide)
        products = self._routed(normed, weights, wide)
        shared: tuple[Buffer | int, int, int] = (0, 0, 0)
        if weights.shared_gate_up is not None:
            assert weights.shared_down is not None
            shared = self._beside(
                x, norm, weights.shared_gate_up, weights.shared_down, eps, wide, weights.activation
            )
        self._launch(
            _COMBINE, (ceil_div(n, 512), rows, 1),
            (x, _stride(x), products, self._buffer("shares"), weights.used, *shared, n),
        )

    def _add_mixture(self, x: Buffer, weights: MixtureWeights, eps: float, wide: bool) -> None:
        experts = weights.experts
        rows, n = x.shape
        asked = self._normed(x, weights.router_scale)
        self._choose(asked, experts, eps, wide, logit_scale=1.0 / sqrt(n), gains=weights.expert_scales)
        products = self._routed(self._normed(x, weights.experts_norm), experts, wide)
        dense = self._beside(x, weights.norm, weights.gate_up, weights.down, eps, wide, experts.activation)
        self._context.launcher.launch(
            _MIX, (rows, 1, 1), _MIX_THREADS,
            (
                x, _stride(x), products, self._buffer("shares"), experts.used, *dense, weights.dense_norm,
                weights.sum_norm, weights.post_norm, n, eps,
            ),
            overlap=True,
        )

    def _normed(self, x: Buffer, norm: Buffer) -> Normed:
        """x * norm in the scratch, until the next."""
        normed = Normed(self._buffer("records"), self._part("normed", *x.shape), self._buffer("sums"))
        self._matmul.norm_into(x, norm, normed)
        return normed

    def _choose(
        self, normed: Normed, weights: ExpertWeights, eps: float, wide: bool, *, logit_scale: float = 1.0,
        gains: Buffer | None = None,
    ) -> None:
        """Leave each row's experts and their shares in the scratch; where rows are many, their slots by expert too.

        gains  factors on the shares, by expert
        """
        router, used = weights.router, weights.used
        assert isinstance(router, CudaWeight)
        rows, n = normed.rows.shape
        count, ids = router.n_out, self._buffer("ids")
        logits = self._part("logits", rows, count)
        self._matmul.project_normed(normed, router, logits, eps=eps)
        launcher = self._context.launcher
        launcher.launch(
            _CHOOSE, (rows, 1, 1), 256,
            (
                logits, count, used, logit_scale, 0 if gains is None else gains, normed.rows, normed.sums, eps, n,
                0 if weights.shared_gate is None else weights.shared_gate, ids, self._buffer("shares"),
                self._buffer("factors"),
            ),
            shared_bytes=_choice_bytes(count), overlap=True,
        )
        if wide:
            launcher.launch(
                _GROUP_SLOTS, (count, 1, 1), 32, (ids, rows * used, self._buffer("order"), self._buffer("groups"))
            )

    def _routed(self, normed: Normed, weights: ExpertWeights, wide: bool) -> Buffer:
        """What the experts of ``_choose`` make of their rows: float32 [slots, E]."""
        gate_up, down = weights.gate_up, weights.down
        assert isinstance(gate_up, ExpertStack)
        assert isinstance(down, ExpertStack)
        rows, n = normed.rows.shape
        slots, width = rows * weights.used, down.n_in
        hidden, records = self._part("hidden", slots, width), self._buffer("hidden_records")
        given = _Rows(normed.records, normed.rows, rows, weights.used, self._buffer("factors"))
        self._gate_up(gate_up, given, slots, hidden, wide, weights.activation)
        if any(isinstance(part.section, RecordSection) for part in down.parts):
            self._launch(QUANT, quant_grid(width, slots), (hidden, width, slots, width, records))
        products = self._part("products", slots, n)
        self._multiply(down, _Rows(records, hidden, slots, 1), slots, products, wide)
        return products

    def _beside(
        self, x: Buffer, norm: Buffer, gate_up: Weight, down: Weight, eps: float, wide: bool, activation: Activation
    ) -> tuple[Buffer, int, int]:
        """Rows of what all take, f(rms(x) * norm): parts of them, how many, and numbers from one's row to the next."""
        assert isinstance(gate_up, CudaWeight)
        assert isinstance(down, CudaWeight)
        hidden = self._part("beside", len(x), down.n_in)
        if wide:
            out = self._part("beside_products", *x.shape)
            self._prefill.project_gated(x, norm, gate_up, hidden, eps=eps, activation=activation)
            self._prefill.multiply(hidden, down, out)
            return out, 1, x.shape[1]
        self._matmul.project_gated(x, norm, gate_up, hidden, eps=eps, activation=activation)
        return (self._context.scratch["matmul_parts"], *self._matmul.multiply(hidden, down))

    def _gate_up(
        self, stack: ExpertStack, rows: _Rows, slots: int, hidden: Buffer, wide: bool, activation: Activation
    ) -> None:
        """hidden [slots, F] = activation(gate) * up"""
        width = hidden.shape[1]
        if stack.swiglu is not None:
            gates = ExpertPart(stack.swiglu, 0, 2 * width, 0)
            self._multiply_records(gates, stack.swiglu, rows, slots, hidden, wide, stack.count, OUTPUTS[activation])
            return
        both = self._part("products", slots, 2 * width)
        self._multiply(stack, rows, slots, both, wide)
        self._launch(GATES[activation], (ceil_div(width, 128), slots, 1), (both, width, hidden, width))

    def _multiply(self, stack: ExpertStack, rows: _Rows, slots: int, out: Buffer, wide: bool) -> None:
        """out [slots, n_out] = rows @ their experts' matrices.T"""
        for part in stack.parts:
            if isinstance(part.section, RowsSection):
                self._multiply_floats(part, part.section, rows, stack.n_in, slots, out, wide, stack.count)
            else:
                self._multiply_records(part, part.section, rows, slots, out, wide, stack.count, Output.PLAIN)

    def _multiply_floats(
        self, part: ExpertPart, section: RowsSection, rows: _Rows, n_in: int, slots: int, out: Buffer, wide: bool,
        count: int,
    ) -> None:
        self._context.launcher.launch(
            _rows_kernel(section.quant, wide), (ceil_div(part.n_rows, 8), self._turns(slots, wide, count), 1), 256,
            (
                address(section.rows) + part.first_row * section.row_bytes, section.row_bytes, n_in, part.n_rows,
                rows.floats, rows.per_row, rows.factors, *self._choice(wide), address(out) + 4 * part.column,
                _stride(out),
            ),
        )

    def _multiply_records(
        self, part: ExpertPart, section: RecordSection, rows: _Rows, slots: int, out: Buffer, wide: bool, count: int,
        output: Output,
    ) -> None:
        n_tiles, turns = part.n_rows // 16, self._turns(slots, wide, count)
        slices = 1 if wide else _slices(section.n_blocks)
        sets = ceil_div(n_tiles * slices, _WARPS)
        if wide:   # a block keeps the rows of its group at hand for several tiles
            sets = min(sets, ceil_div(_WAVES * self._context.launcher.sm_count, turns))
        first = part.first_row // 16 * section.n_blocks * record_bytes(section.quant)
        self._context.launcher.launch(
            _records_kernel(section.quant, wide, output), (sets, turns, 1), 32 * _WARPS,
            (
                address(section.records) + first, n_tiles, section.n_blocks, slices, rows.records, rows.rows,
                rows.per_row, rows.factors, *self._choice(wide), address(out) + 4 * part.column, _stride(out),
            ),
        )

    def _choice(self, wide: bool) -> tuple[Buffer | int, Buffer | int, Buffer | int]:
        if wide:
            return 0, self._buffer("order"), self._buffer("groups")
        return self._buffer("ids"), 0, 0

    def _turns(self, slots: int, wide: bool, count: int) -> int:
        return _groups(slots, count) if wide else slots

    def _launch(self, kernel: Kernel, grid: tuple[int, int, int], args: tuple[object, ...]) -> None:
        self._context.launcher.launch(kernel, grid, 128, args, overlap=True)

    def _buffer(self, name: str) -> Buffer:
        return self._context.scratch[f"experts.{name}"]

    def _part(self, name: str, rows: int, columns: int) -> Buffer:
        """The first numbers of a buffer as rows."""
        return self._buffer(name).reshape(-1)[: rows * columns].reshape(rows, columns)


def _groups(slots: int, count: int) -> int:
    """Groups that slots can make, see ``group_slots``."""
    return slots // _GROUP + count


def _choice_bytes(count: int) -> int:
    """Shared memory of ``choose_experts``: three numbers for each expert, of experts in whole fours."""
    return 12 * ceil_div(count, 4) * 4


def _slices(n_blocks: int) -> int:
    """Warps that share a tile where rows are few: a power of two, by the shape alone."""
    return min(_WARPS, 1 << (n_blocks.bit_length() - 1))


def _stride(rows: Buffer) -> int:
    """Numbers from a float32 row to the next."""
    assert rows.strides[1] == 4
    return int(rows.strides[0]) // 4


def kernels_for(stacks: Iterable[ExpertStack], activation: Activation) -> list[Kernel]:
    """What a mixture of such experts launches, but for the router and what all rows take; and the end of the other
    kind of mixture, which is in the same module."""
    kernels = dict.fromkeys((_CHOOSE, _GROUP_SLOTS, _COMBINE, _MIX, QUANT, GATES[activation]))
    for stack in stacks:
        for part in stack.parts:
            for wide in (False, True):
                if isinstance(part.section, RowsSection):
                    kernels[_rows_kernel(part.section.quant, wide)] = None
                else:
                    output = Output.PLAIN if stack.swiglu is None else OUTPUTS[activation]
                    kernels[_records_kernel(part.section.quant, wide, output)] = None
    return list(kernels)


def instances(arch: int) -> Iterator[Kernel]:
    """All kernels of the family, the same on every GPU."""
    yield from (_CHOOSE, _GROUP_SLOTS, _COMBINE, _MIX)
    for wide in (False, True):
        for quant in RECORD_TYPES:
            for output in Output:
                yield _records_kernel(quant, wide, output)
        for quant in ROW_TYPES:
            yield _rows_kernel(quant, wide)


@cache
def _records_kernel(quant: Quant, wide: bool, output: Output) -> Kernel:
    return Kernel(
        "experts_records.cu", "experts_records", (PTR, I32, I32, I32, PTR, I32, I32, PTR, *_CHOICE),
        (("TYPE", quant.name), ("WIDE", int(wide)), ("OUTPUT", output.value)),
    )


@cache
def _rows_kernel(quant: Quant, wide: bool) -> Kernel:
    return Kernel(
        "experts_rows.cu", "experts_rows", (PTR, I64, I32, I32, PTR, I32, PTR, *_CHOICE),
        (("TYPE", quant.name), ("ROWS", _GROUP if wide else 1)),
    )
