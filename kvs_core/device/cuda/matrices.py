"""Forms in which the GPU holds matrices: weight records where ``matmul_decode.cu`` has the type, else as in the file.

A ``CudaWeight`` joins tensors, their rows one after the other. Consecutive tensors whose type is kept in the same way
form a section:

    RecordSection  tiles of 16 rows x 256 columns, see ``cuda_src/common/records.cuh``; rows and columns padded by zeros
    RowsSection    rows of GGUF blocks, back to back: a type of ``ROW_TYPES``
"""

from __future__ import annotations

from dataclasses import dataclass

from gguf.constants import GGMLQuantizationType

from kvs_core.device.operands import Buffer
from kvs_core.formats.quants import row_bytes
from kvs_core.units import ceil_div

Quant = GGMLQuantizationType

RECORD_TYPES = (
    Quant.Q8_0, Quant.Q4_K, Quant.Q5_K, Quant.Q6_K, Quant.IQ4_XS, Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1,
    Quant.IQ4_NL,
)
"""Types that are kept as records."""

ROW_TYPES = (Quant.F32, Quant.F16, Quant.BF16, Quant.Q2_K, Quant.Q3_K)
"""Types that stay as in the file. Those of neither list become float16."""

TILE_ROWS = 16
BLOCK = 256
"""Columns of a record."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordSection:
    """Rows [first_row, first_row + n_rows) of a weight as records.

    records      uint8 [n_tiles * n_blocks * record bytes]
    interleaved  tile i holds rows 8 i .. 8 i + 7 of the first half (gates) and the same of the second half (ups); of
                 experts whose gate and up lie in one tensor, the first half has the gates of all
    bias         float32 [n_rows] or None
    """

    quant: Quant
    first_row: int
    n_rows: int
    n_blocks: int
    records: Buffer
    interleaved: bool
    bias: Buffer | None

    @property
    def n_tiles(self) -> int:
        """Row tiles."""
        return ceil_div(self.n_rows, TILE_ROWS)

    @property
    def tile_step(self) -> int:
        """Rows from the first of a tile to the first of the next."""
        return TILE_ROWS // 2 if self.interleaved else TILE_ROWS

    @property
    def half_step(self) -> int:
        """Rows from the first half of a tile to the second."""
        return self.n_rows // 2 if self.interleaved else TILE_ROWS // 2


@dataclass(frozen=True, slots=True, eq=False)
class RowsSection:
    """Rows [first_row, first_row + n_rows) of a weight as in the file, or as float16.

    rows  uint8 [n_rows * row_bytes]: blocks of ``quant``
    bias  float32 [n_rows] or None
    """

    quant: Quant
    first_row: int
    n_rows: int
    row_bytes: int
    rows: Buffer
    bias: Buffer | None


Section = RecordSection | RowsSection


@dataclass(slots=True, eq=False)
class CudaWeight:
    """A matrix [n_out, n_in], perhaps of several tensors. See ``Weight`` in ``device/operands.py``.

    sections  others, in another place, after ``CudaPart.lie_in``; so are the ``parts`` of an ``ExpertStack``
    bias      float32 [n_out] or None; sections have views of it
    """

    name: str
    n_in: int
    n_out: int
    sections: tuple[Section, ...]
    bias: Buffer | None

    @property
    def swiglu(self) -> RecordSection | None:
        """The only section, if its tiles hold gate and up rows side by side."""
        return _swiglu(self.sections[0])


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPart:
    """One tensor of experts: expert e has ``n_rows`` rows of the section, the first at ``first_row + e * n_rows``.

    column  of an expert's products with them, the first
    """

    section: Section
    first_row: int
    n_rows: int
    column: int


@dataclass(slots=True, eq=False)
class ExpertStack:
    """The matrices [n_out, n_in] of ``count`` experts."""

    n_in: int
    n_out: int
    count: int
    parts: tuple[ExpertPart, ...]

    @property
    def swiglu(self) -> RecordSection | None:
        """The only section, if its tiles hold gate and up rows side by side: those of an expert follow each other."""
        return _swiglu(self.parts[0].section)

    def __len__(self) -> int:
        return self.count


def record_bytes(quant: Quant) -> int:
    """Bytes of a record: those of 16 rows of 256 values in the file."""
    return TILE_ROWS * row_bytes(quant, BLOCK)


def held_type(quant: Quant) -> Quant:
    """The type in which values of that type are held."""
    return quant if quant in RECORD_TYPES or quant in ROW_TYPES else Quant.F16


def _swiglu(first: Section) -> RecordSection | None:
    return first if isinstance(first, RecordSection) and first.interleaved else None
