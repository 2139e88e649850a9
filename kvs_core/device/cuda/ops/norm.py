"""Launchers of ``norm.cu``: rows through an RMS norm or a soft cap, and the row of a table that a step names."""

from __future__ import annotations

from collections.abc import Iterator

from kvs_core.device.cuda.context import Context
from kvs_core.device.cuda.kernel import F32, I32, PTR, Kernel
from kvs_core.device.operands import Buffer
from kvs_core.memory.phases import Phase
from kvs_core.units import ceil_div

_THREADS = 256
_RMS_NORM = Kernel("norm.cu", "rms_norm", (PTR, I32, PTR, PTR, I32, I32, F32))
_ADD_NORMED = Kernel("norm.cu", "add_normed", (PTR, I32, I32, PTR, PTR, I32, I32, F32))
_SOFTCAP = Kernel("norm.cu", "softcap", (PTR, I32, I32, F32))
_SCALE = Kernel("norm.cu", "scale_rows", (PTR, I32, I32, F32))
_TAKE_KEPT = Kernel("norm.cu", "take_kept", (PTR, I32, PTR, PTR, I32))


class Norm:
    """The ops ``rms_norm``, ``softcap``, ``scale`` and ``take_kept``, and the end of ``add_normed``. A row's bits
    do not depend on the others."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def rms_norm(self, x: Buffer, norm: Buffer, out: Buffer, *, eps: float) -> None:
        """See ``Ops.rms_norm``.   x, out float32 [T, n], rows any distance apart"""
        rows, n = x.shape
        self._context.launcher.launch(
            _RMS_NORM, (rows, 1, 1), _THREADS, (x, _stride(x), norm, out, _stride(out), n, eps), overlap=self._decoding
        )

    def add_normed(self, parts: Buffer, n_parts: int, stride: int, norm: Buffer, x: Buffer, *, eps: float) -> None:
        """x += rms(sum of parts) * norm, the parts added in order; they are used up.

        parts  float32 [n_parts, T, stride]; x float32 [T, n], rows any distance apart
        """
        rows, n = x.shape
        self._context.launcher.launch(
            _ADD_NORMED, (rows, 1, 1), _THREADS, (parts, n_parts, stride, norm, x, _stride(x), n, eps),
            overlap=self._decoding,
        )

    def softcap(self, logits: Buffer, cap: float) -> None:
        """See ``Ops.softcap``.   logits float32 [T, V], rows any distance apart"""
        rows, n = logits.shape
        self._context.launcher.launch(
            _SOFTCAP, (ceil_div(n, _THREADS), rows, 1), _THREADS, (logits, _stride(logits), n, cap),
            overlap=self._decoding,
        )

    def scale(self, x: Buffer, factor: float) -> None:
        """See ``Ops.scale``.   x float32 [T, n], rows any distance apart"""
        rows, n = x.shape
        self._context.launcher.launch(
            _SCALE, (ceil_div(n, _THREADS), rows, 1), _THREADS, (x, _stride(x), n, factor), overlap=self._decoding
        )

    def take_kept(self, rows: Buffer, out: Buffer) -> None:
        """See ``Ops.take_kept``."""
        n = rows.shape[1]
        self._context.launcher.launch(
            _TAKE_KEPT, (ceil_div(n, _THREADS), 1, 1), _THREADS, (rows, _stride(rows), self._context.step, out, n),
            overlap=self._decoding,
        )

    @property
    def _decoding(self) -> bool:
        return self._context.phase is Phase.DECODE


def _stride(rows: Buffer) -> int:
    """Numbers from row to row."""
    return int(rows.strides[0]) // 4


def instances(arch: int) -> Iterator[Kernel]:
    """All kernels, the same on every GPU."""
    yield from (_RMS_NORM, _ADD_NORMED, _SOFTCAP, _SCALE, _TAKE_KEPT)
