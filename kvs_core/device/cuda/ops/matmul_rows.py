"""Launchers of ``matmul_rows.cu`` and ``dequant_rows.cu``: weights that stay on the device as rows of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from gguf.constants import GGMLQuantizationType

from kvs_core.device.cuda.context import Context
from kvs_core.device.cuda.kernel import F32, I32, I64, PTR, Kernel, address
from kvs_core.device.cuda.matrices import RowsSection
from kvs_core.device.operands import Buffer
from kvs_core.units import align_up, ceil_div

Quant = GGMLQuantizationType

BLOCK_TYPES = (
    Quant.F32, Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1, Quant.IQ4_NL,
    Quant.Q2_K, Quant.Q3_K, Quant.Q4_K, Quant.Q5_K, Quant.Q6_K, Quant.IQ4_XS,
)
"""Types that ``cuda_src/common/gguf_blocks.cuh`` reads."""

MAX_ROWS = 8
"""Activation rows that share what is read of a weight."""

TILE = 256
"""Columns that a warp takes at a time."""

_WIDTHS = (1, 2, 4, 6, 8)   # activation rows that kernels are made for

# matmul_rows.cu.
_WARPS = 8
_WARP_ROWS = 4
_BLOCKS_PER_SM = 2
_FEW_SLICES = 16
_FEW_ROWS = 128             # of a weight: up to here a block each keeps more warps busy than sharing x would save
_TILE_BYTES = 4 * TILE      # of a staged row of x
_STATIC_BYTES = 4096        # of shared memory: the static part, and what the driver takes of each block
_ARGS = (
    PTR, I32,               # x and its stride
    PTR, F32,               # sums of squares, eps
    PTR, I64, I32, I32,     # weights, bytes of a row, n_in, n_out
    PTR,                    # bias
    PTR, I32,               # out and its stride
    I32,                    # activation rows
)

# dequant_rows.cu.
_DEQUANT_TILES = 32         # of a block


class RowsMatmul:
    """Products of rows with a ``RowsSection``: made for the few of a decode step, or the last one of a prompt."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def run(
        self, x: Buffer, section: RowsSection, out: Buffer | int, *, n_in: int, out_stride: int,
        sums: Buffer | int | None = None, eps: float = 0.0,
    ) -> None:
        """out[t, section.first_row + n] = scale[t] * (section row n . x[t]) + bias[n], for the T rows of x.

        x           [T, n_in] float32, contiguous
        out         float32, rows ``out_stride`` numbers apart; a buffer or an address, column 0 of the whole weight
        sums        [T, ceil(n_in / 256)] float32, sums of squares: scale[t] = 1 / sqrt(their sum / n_in + eps), else 1
        The bits of a row depend on neither T nor the GPU.
        """
        launcher, n_rows, n_out = self._context.launcher, len(x), section.n_rows
        width = _width(min(n_rows, MAX_ROWS))
        turns = ceil_div(n_rows, width)
        args = (
            x, n_in, 0 if sums is None else sums, eps, section.rows, section.row_bytes, n_in, n_out,
            0 if section.bias is None else section.bias,
            _address(out) + 4 * section.first_row, out_stride, n_rows,
        )
        if n_out <= _FEW_ROWS:
            launcher.launch(_few_rows(section.quant, width), (n_out, turns, 1), 32 * _FEW_SLICES, args, overlap=True)
            return
        tiles, slices = ceil_div(n_in, TILE), _slices(n_in, n_out)
        chunk_tiles = _chunk_tiles(tiles, slices, width, launcher.shared_bytes // _BLOCKS_PER_SM)
        sets = ceil_div(n_out, _WARP_ROWS * _WARPS // slices)
        launcher.launch(
            _many_rows(section.quant, width), (min(sets, _BLOCKS_PER_SM * launcher.sm_count), turns, 1),
            32 * _WARPS,
            (*args, slices, chunk_tiles), shared_bytes=width * chunk_tiles * _TILE_BYTES, overlap=True,
        )


class RowsDequant:
    """Rows of a ``RowsSection`` as plain numbers."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def run(self, section: RowsSection, first: int, n_rows: int, out: Buffer | int, *, n_in: int, half: bool) -> None:
        """out [n_rows, n_in] = the section's rows [first, first + n_rows), contiguous.

        half  float16, clamped to +-65504; else float32
        """
        self._context.launcher.launch(
            _dequant(section.quant, half), (ceil_div(n_rows * ceil_div(n_in, TILE), _DEQUANT_TILES), 1, 1), 256,
            (address(section.rows) + first * section.row_bytes, section.row_bytes, n_in, n_rows, out),
        )


def kernels_for(quant: Quant, n_out: int, max_rows: int) -> list[Kernel]:
    """What products of a weight of ``n_out`` rows with up to ``max_rows`` rows need, and its float16 form."""
    make = _few_rows if n_out <= _FEW_ROWS else _many_rows
    return [_dequant(quant, True), *(make(quant, width) for width in _WIDTHS[: _WIDTHS.index(_width(max_rows)) + 1])]


def instances(arch: int) -> Iterator[Kernel]:
    """Every type in every kernel, and every width, though not each with each."""
    for index, quant in enumerate(BLOCK_TYPES):
        width = _WIDTHS[index % len(_WIDTHS)]
        yield _many_rows(quant, width)
        yield _few_rows(quant, width)
        yield _dequant(quant, index % 2 == 0)


def _address(buffer: Buffer | int) -> int:
    return buffer if isinstance(buffer, int) else address(buffer)


def _width(n_rows: int) -> int:
    """Rows of the kernel for ``n_rows`` rows."""
    assert 0 < n_rows <= MAX_ROWS, f"{n_rows} rows"
    return next(width for width in _WIDTHS if width >= n_rows)


def _slices(n_in: int, n_out: int) -> int:
    """Warps that share a row's tiles: enough to keep a GPU busy where there are not many rows.

    Long rows have fewer, so that a block has more rows of the weight for each chunk of x that it stages.
    """
    wanted = 8 if n_out <= 2048 else 4 if n_in <= 8192 else 2
    while wanted > ceil_div(n_in, TILE):
        wanted //= 2
    return wanted


def _chunk_tiles(tiles: int, slices: int, width: int, shared_bytes: int) -> int:
    """Tiles of x staged at once: all if they fit, else about the same number each time, all warps busy if possible."""
    most = max((shared_bytes - _STATIC_BYTES) // (width * _TILE_BYTES), 1)
    if tiles <= most:
        return tiles
    if most >= slices:
        most -= most % slices
    return min(align_up(ceil_div(tiles, ceil_div(tiles, most)), slices), most)


@cache
def _many_rows(quant: Quant, width: int) -> Kernel:
    return Kernel("matmul_rows.cu", "matmul_rows", (*_ARGS, I32, I32), (("TYPE", quant.name), ("ROWS", width)))


@cache
def _few_rows(quant: Quant, width: int) -> Kernel:
    return Kernel("matmul_rows.cu", "matmul_few_rows", _ARGS, (("TYPE", quant.name), ("ROWS", width)))


@cache
def _dequant(quant: Quant, half: bool) -> Kernel:
    return Kernel(
        "dequant_rows.cu", "dequant_rows", (PTR, I64, I32, I32, PTR),
        (("TYPE", quant.name), ("OUT", "F16" if half else "F32")),
    )
