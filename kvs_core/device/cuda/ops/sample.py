"""Launchers of ``sample.cu``: tokens and candidates from logits, without moving the logits to the host.

Everything is exact and independent of the number of rows. Results lie in the family's scratch: they are good until its
next call that makes the same kind, and captured work finds them in the same place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvs_core.device.base import StepSizes
from kvs_core.device.cuda.context import Context
from kvs_core.device.cuda.kernel import F32, I32, PTR, Kernel
from kvs_core.device.operands import Buffer
from kvs_core.device.workspace import BufferSpec
from kvs_core.memory.phases import Phase
from kvs_core.units import ceil_div

MAX_ROWS = 8
"""Rows of logits at most: those of a decode step; a prefill asks for as few."""
MAX_TOP_K = 256
"""Candidates of a row at most."""

SLICE = 8192
"""Logits of a slice, as in the source. A row of up to that many has one slice."""

_SLICE_BLOCK, _MERGE_BLOCK = 512, 1024

_ARGMAX_SLICES = Kernel("sample.cu", "argmax_slices", (PTR, I32, PTR, PTR))
_ARGMAX_MERGE = Kernel("sample.cu", "argmax_merge", (PTR, PTR, I32, PTR))
_TOP_SLICES = Kernel("sample.cu", "top_slices", (PTR, I32, I32, PTR, PTR, PTR))
_TOP_MERGE = Kernel("sample.cu", "top_merge", (PTR, PTR, PTR, I32, I32, I32, PTR, PTR, PTR))
_DRAW = Kernel("sample.cu", "draw", (PTR, PTR, I32, F32, PTR, PTR))


@dataclass(frozen=True, slots=True)
class TopK:
    """The k largest logits of each row, largest first, of equal ones the lower id first; NaN counts as largest.

    ids         [T, k] int32
    values      [T, k] float32; -0 has become 0
    log_totals  [T] float32: ln of the sum of exp(logit) over the whole row, so that a candidate's log-probability is
                value - log_total; NaN if the row has a NaN or +inf, -inf if all is -inf
    """

    ids: Buffer
    values: Buffer
    log_totals: Buffer


class Sample:
    """Picks from logits [T, V] float32, contiguous, T <= MAX_ROWS. Launched in either phase; may be captured."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def scratch(self, phase: Phase, sizes: StepSizes) -> list[BufferSpec]:
        """What slices hand on, and the results."""
        rows, slices = min(sizes.rows, MAX_ROWS), ceil_div(sizes.n_vocab, SLICE)
        return [
            BufferSpec("sample.slice_values", (rows * slices * MAX_TOP_K,), np.float32),
            BufferSpec("sample.slice_ids", (rows * slices * MAX_TOP_K,), np.int32),
            BufferSpec("sample.slice_sums", (rows * slices * 2,), np.float32),
            BufferSpec("sample.top_ids", (rows * MAX_TOP_K,), np.int32),
            BufferSpec("sample.top_values", (rows * MAX_TOP_K,), np.float32),
            BufferSpec("sample.log_totals", (rows,), np.float32),
            BufferSpec("sample.ids", (rows,), np.int32),
        ]

    def argmax(self, logits: Buffer) -> Buffer:
        """Each row's id of the largest logit, the lowest of equal ones, as ``np.argmax``: int32 [T].

        A NaN counts as largest, so a broken row gives the id of its first one.
        """
        rows, n_vocab, slices = self._shape(logits)
        values, ids, out = (self._buffer(name) for name in ("slice_values", "slice_ids", "ids"))
        launch = self._context.launcher.launch
        launch(_ARGMAX_SLICES, (slices, rows, 1), _SLICE_BLOCK, (logits, n_vocab, values, ids), overlap=True)
        launch(_ARGMAX_MERGE, (rows, 1, 1), 32, (values, ids, slices, out), overlap=True)
        return out[:rows]

    def top_k(self, logits: Buffer, k: int) -> TopK:
        """The k largest of each row. 1 <= k <= min(MAX_TOP_K, V)"""
        rows, n_vocab, slices = self._shape(logits)
        assert 1 <= k <= min(MAX_TOP_K, n_vocab), (k, n_vocab)
        parts = [self._buffer(name) for name in ("slice_values", "slice_ids", "slice_sums")]
        top_ids, top_values, log_totals = (self._buffer(name) for name in ("top_ids", "top_values", "log_totals"))
        launch = self._context.launcher.launch
        launch(_TOP_SLICES, (slices, rows, 1), _SLICE_BLOCK, (logits, n_vocab, k, *parts), overlap=True)
        launch(
            _TOP_MERGE, (rows, 1, 1), _MERGE_BLOCK,
            (*parts, n_vocab, slices, k, top_ids, top_values, log_totals), overlap=True,
        )
        return TopK(
            top_ids[: rows * k].reshape(rows, k), top_values[: rows * k].reshape(rows, k), log_totals[:rows]
        )

    def draw(self, logits: Buffer, k: int, temperature: float, u: Buffer) -> Buffer:
        """One of each row's k largest, with probability softmax(values / temperature): int32 [T].

        u [T] float32 in [0, 1]: the first candidate whose running sum of probability, from the largest on, reaches
        u[t]; never one of probability 0. A captured launch reads u anew, while k and temperature stay as they were.
        A row with NaN or +inf, or of -inf alone, gives the first candidate.
        """
        assert temperature > 0.0, temperature
        top = self.top_k(logits, k)
        rows, out = len(logits), self._buffer("ids")
        self._context.launcher.launch(
            _DRAW, (rows, 1, 1), MAX_TOP_K, (top.ids, top.values, k, temperature, u, out), overlap=True
        )
        return out[:rows]

    def _shape(self, logits: Buffer) -> tuple[int, int, int]:
        rows, n_vocab = logits.shape
        assert 1 <= rows <= MAX_ROWS, rows
        slices = ceil_div(n_vocab, SLICE)
        assert rows * slices * MAX_TOP_K <= self._buffer("slice_values").size, (rows, n_vocab)
        return rows, n_vocab, slices

    def _buffer(self, name: str) -> Buffer:
        return self._context.scratch[f"sample.{name}"]


def instances(arch: int) -> Iterator[Kernel]:
    """All kernels of the family, the same on every GPU."""
    yield from (_ARGMAX_SLICES, _ARGMAX_MERGE, _TOP_SLICES, _TOP_MERGE, _DRAW)
