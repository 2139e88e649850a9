"""Better forms of rows than float32, for the product that takes them next: noted by their producer in ``Context.forms``
under ``address(rows)``.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvs_core.device.operands import Buffer


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Rows that are activation records already: uint8 [n_in / 256 rounded up, 2, T, ACT_BYTES]."""

    records: Buffer


@dataclass(frozen=True, slots=True, eq=False)
class GatedNorm:
    """Rows that are still to be: RMSNorm of x per head of 128, times norm, times silu(z). n_in is a multiple of 256.

    x  float32 [T, n_in]; z float32, its first number of row 0, rows ``z_stride`` numbers apart; norm [128]
    """

    x: Buffer
    z: Buffer
    z_stride: int
    norm: Buffer
    eps: float


RowForm = Records | GatedNorm
