"""Launchers of ``embed.cu``, the first kernels of a step: embeddings of its tokens, rotary angles of its positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from gguf.constants import GGMLQuantizationType

from kvs_core.device.cuda.context import Context
from kvs_core.device.cuda.kernel import F32, I32, I64, PTR, Kernel, address
from kvs_core.device.cuda.matrices import CudaWeight, RowsSection
from kvs_core.device.cuda.ops.matmul_rows import BLOCK_TYPES, TILE
from kvs_core.device.cuda.tables import STEP_TOKENS
from kvs_core.device.cuda.weights import Upload
from kvs_core.device.operands import Buffer, RopeTable
from kvs_core.memory.phases import Phase
from kvs_core.units import ceil_div

Quant = GGMLQuantizationType

_BLOCK_TILES = 8   # a warp each
_ROPE_PAIRS = 64   # of a block
_ROPE = Kernel("embed.cu", "rope_table", (PTR, I32, PTR, I32, PTR))


@dataclass(slots=True, eq=False)
class Rope:
    """A rotary embedding on the device.

    table        what it was made of
    frequencies  [n_rot / 2 + 1] float64: radians per position of each pair, then the magnitude
    cs           [most rows, n_rot / 2, 2] float32: cosine and sine of the step's positions, times the magnitude; None
                 until ``Embed.reserve``
    """

    table: RopeTable
    frequencies: Buffer
    cs: Buffer | None = None

    @property
    def n_rot(self) -> int:
        """Values of a head that turn."""
        return self.table.n_rot

    @property
    def interleaved(self) -> bool:
        """As in ``RopeTable``."""
        return self.table.interleaved

    def cs_of(self, first_row: int) -> int:
        """Address of a row's cosines and sines."""
        return address(self.cs) + 4 * self.n_rot * first_row


class Embed:
    """The op ``embed``, and the rotary tables that go with a step."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ropes: dict[tuple[bytes, bool, float], Rope] = {}

    def add_rope(self, table: RopeTable, upload: Upload) -> Rope:
        """A rotary embedding whose ``cs`` every ``run`` from now on fills. Equal tables are one. At load."""
        key = (table.inv_freq.tobytes(), table.interleaved, table.magnitude)
        if key not in self._ropes:
            frequencies = np.append(table.inv_freq, table.magnitude).astype(np.float64)
            self._ropes[key] = Rope(table, upload(frequencies))
        return self._ropes[key]

    def reserve(self, max_rows: int, upload: Upload) -> None:
        """Give every rotary embedding room for steps of ``max_rows`` rows. At load, after the last ``add_rope``."""
        for rope in self._ropes.values():
            rope.cs = upload(np.zeros((max_rows, rope.n_rot // 2, 2), np.float32))

    def run(self, table: CudaWeight, x: Buffer, factor: float = 1.0) -> None:
        """``rows``; then the rotary tables."""
        self.rows(table, x, factor)
        context, decode = self._context, self._context.phase is Phase.DECODE
        for rope in self._ropes.values():
            pairs = rope.n_rot // 2
            context.launcher.launch(
                _ROPE, (ceil_div(pairs, _ROPE_PAIRS), context.rows, 1), _ROPE_PAIRS,
                (
                    rope.frequencies, pairs, context.step if decode else 0, 0 if decode else context.position,
                    rope.cs_of(context.first_row),
                ),
                overlap=decode,
            )

    def rows(self, table: CudaWeight, x: Buffer, factor: float) -> None:
        """x[t] = row tokens[t] of the table times factor, zeros if it has none.

        x      [T, n_in], contiguous
        table  one ``RowsSection``, in pinned host memory or on the device
        Tokens and positions: in DECODE from the step table, in PREFILL from the context.
        """
        context, (section,) = self._context, table.sections
        assert isinstance(section, RowsSection)
        assert x.shape == (context.rows, table.n_in)
        assert x.flags.c_contiguous
        decode = context.phase is Phase.DECODE
        context.launcher.launch(
            _embed(section.quant), (ceil_div(table.n_in, TILE * _BLOCK_TILES), context.rows, 1), 32 * _BLOCK_TILES,
            (
                section.rows, section.row_bytes, table.n_in, table.n_out,
                address(context.step) + 4 * STEP_TOKENS if decode else context.tokens, factor, x,
            ),
            overlap=decode,
        )


def kernels_for(quant: Quant) -> list[Kernel]:
    """What a table of this type and rotary embeddings need."""
    return [_embed(quant), _ROPE]


def instances(arch: int) -> Iterator[Kernel]:
    """Every type."""
    yield _ROPE
    yield from map(_embed, BLOCK_TYPES)


@cache
def _embed(quant: Quant) -> Kernel:
    return Kernel("embed.cu", "embed", (PTR, I64, I32, I32, PTR, F32, PTR), (("TYPE", quant.name),))
