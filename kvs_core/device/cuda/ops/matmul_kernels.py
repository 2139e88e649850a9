"""The kernels of ``matmul_decode.cu``, ``act_quant.cu`` and ``dequant_records.cu``, and how they fit a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache

from kvs_core.device.cuda.kernel import F32, I32, I64, PTR, Kernel
from kvs_core.device.cuda.matrices import BLOCK, RECORD_TYPES, Quant, record_bytes
from kvs_core.device.operands import Activation
from kvs_core.errors import CapabilityError
from kvs_core.units import align_up, ceil_div

ACT_BYTES = 320
"""Of an activation record: one plane of 256 values, see ``cuda_src/common/quant256.cuh``."""
WIDTHS = (1, 4, 8)
"""Rows of activations that kernels are made for: of one, those that one tensor-core product takes, and two."""
MOST_PARTS = 4
"""Parts of a sum that ``add_quant`` adds."""

_MOST_STAGES = 4            # of a warp's ring; more does not help
_WARPS = (12, 8, 4, 2, 1)   # of a block, most wanted first


class Input(Enum):
    """INPUT of ``matmul_decode.cu``."""

    RECORDS = "RECORDS"
    ROWS = "ROWS"
    GATED_NORM = "GATED_NORM"


class Output(Enum):
    """OUTPUT of ``matmul_decode.cu``."""

    PLAIN = "PLAIN"
    SWIGLU = "SWIGLU"
    GEGLU = "GEGLU"


@dataclass(frozen=True, slots=True)
class Fit:
    """What a block's shared memory has room for.

    warps   with a ring each
    stages  of a ring
    rows    of activations; a step of more takes several launches
    """

    warps: int
    stages: int
    rows: int


@cache
def fit(quant: Quant, blocks: int, rows: int, shared_bytes: int) -> Fit:
    """The best fit for ``blocks`` activation blocks per row. Warps do not depend on ``rows``: bits depend on warps."""
    for warps in _WARPS:
        if block_bytes(quant, warps, 1, blocks, 1) <= shared_bytes:
            break
    else:
        raise CapabilityError(
            f"a {quant.name} matrix of {blocks * BLOCK} columns needs {block_bytes(quant, 1, 1, blocks, 1)} bytes of "
            f"shared memory, this GPU has {shared_bytes}; use --device cpu"
        )
    while block_bytes(quant, warps, 1, blocks, rows) > shared_bytes:
        rows -= 1
    stages = _MOST_STAGES
    while block_bytes(quant, warps, stages, blocks, rows) > shared_bytes:
        stages -= 1
    return Fit(warps, stages, rows)


def block_bytes(quant: Quant, warps: int, stages: int, blocks: int, rows: int) -> int:
    """Shared memory that ``matmul_decode`` takes: rings, barriers, activations, factors and value table."""
    rings = align_up(warps * stages * record_bytes(quant), 128)
    return rings + align_up(warps * stages * 8, 128) + blocks * 2 * rows * ACT_BYTES + 64


@cache
def splits(n_tiles: int, n_blocks: int, sm_count: int) -> int:
    """Ranges of columns for a product whose parts are summed later, so that multiprocessors have equal work.

    The longest share of a multiprocessor in records, plus what staging its range costs; by shape alone.
    """
    def cost(n: int) -> float:
        return ceil_div(n_tiles, sm_count // n) * ceil_div(n_blocks, n) + 0.25 * ceil_div(n_blocks, n)

    return min(range(1, min(MOST_PARTS, n_blocks, sm_count) + 1), key=lambda n: (cost(n), -n))


@cache
def matmul(quant: Quant, warps: int, width: int, rows_as: Input, output: Output) -> Kernel:
    """A product with records of that type. ``width``: of ``WIDTHS``."""
    args = (
        PTR, I32, I32, I32,             # weight, tiles, blocks, stages
        PTR, I32, I32, I32,             # x, its stride, rows, n_in
        PTR, F32,                       # sums of squares, eps
        PTR, I32, PTR,                  # z, its stride, norm
        PTR,                            # bias
        PTR, I32, I64, I32, I32, I32,   # y, its stride, stride of splits, n_out, tile and half steps
    )
    defines = (
        ("TYPE", quant.name), ("WIDE", int(width > 4)), ("SINGLE", int(width == 1)), ("WARPS", warps),
        ("INPUT", rows_as.value), ("OUTPUT", output.value),
    )
    return Kernel("matmul_decode.cu", "matmul_decode", args, defines)


@cache
def dequant(quant: Quant) -> Kernel:
    """Records as rows of float16."""
    args = (PTR, I32, I32, I32, I32, I32, I32, I32, I32, PTR)
    return Kernel("dequant_records.cu", "dequant_records", args, (("TYPE", quant.name),))


ADD_QUANT = Kernel("act_quant.cu", "add_quant", (PTR, I32, PTR, I32, I32, PTR, I32, I32, PTR, PTR, PTR))
APPLY_PARTS = Kernel("act_quant.cu", "apply_parts", (PTR, I32, PTR, I32, I32, I32, I32))
QUANT = Kernel("act_quant.cu", "quant", (PTR, I32, I32, I32, PTR))
UNQUANT = Kernel("act_quant.cu", "unquant", (PTR, I32, I32, PTR))
GATED_NORM = Kernel("act_quant.cu", "gated_norm", (PTR, I32, PTR, I32, PTR, I32, F32, PTR))
SWIGLU = Kernel("act_quant.cu", "swiglu", (PTR, I32, PTR, I32))
GEGLU = Kernel("act_quant.cu", "geglu", (PTR, I32, PTR, I32))
ACT_KERNELS = (ADD_QUANT, APPLY_PARTS, QUANT, UNQUANT, GATED_NORM, SWIGLU, GEGLU)

OUTPUTS = {Activation.SILU: Output.SWIGLU, Activation.GELU: Output.GEGLU}
"""Of products with gate and up rows in common tiles."""
GATES = {Activation.SILU: SWIGLU, Activation.GELU: GEGLU}
"""What joins gate and up rows otherwise."""


def width_for(rows: int) -> int:
    """Of the kernel for so many rows."""
    return next(width for width in WIDTHS if width >= rows)


def variants(output: Output, *, gated_norm: bool) -> Iterator[tuple[int, Input]]:
    """(width, input) of the products with this output."""
    for width in WIDTHS:
        yield width, Input.RECORDS
        if output is Output.PLAIN and width < WIDTHS[-1]:
            yield width, Input.ROWS
        if output is Output.PLAIN and gated_norm:
            yield width, Input.GATED_NORM


def instances(arch: int) -> Iterator[Kernel]:
    """Every kernel of these ops on a GPU whose blocks have room for the usual number of warps."""
    yield from ACT_KERNELS
    for quant in RECORD_TYPES:
        yield dequant(quant)
        for output in Output:
            for width, rows_as in variants(output, gated_norm=True):
                yield matmul(quant, _WARPS[0], width, rows_as, output)
