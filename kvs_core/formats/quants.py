"""Quantized weights to float32, bit for bit as ``gguf.quants`` does it, in pieces that stay in the CPU's cache.

A row of n values is n / block elements blocks of fixed size, back to back. The types that most model files are made of
have an unpacker here that writes straight into the result; every other type goes through ``gguf`` piece by piece.
Source of the block layouts: ggml's ``ggml-common.h``; the operations and their order are those of ``gguf.quants``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import gguf.quants
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvs_core.errors import ModelFileError
from kvs_core.formats.gguf_header import TensorInfo

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
Floats: TypeAlias = "npt.NDArray[np.float32]"
Quant: TypeAlias = GGMLQuantizationType

# Values unpacked at a time: a float32 result of 256 KiB and its temporaries fit a core's second-level cache.
_PIECE = 1 << 16


def row_bytes(quant: Quant, cols: int) -> int:
    """Bytes of one row of ``cols`` values, a multiple of the type's block."""
    block_elements, block_bytes = GGML_QUANT_SIZES[quant]
    assert cols % block_elements == 0, f"{cols} values are no whole number of {quant.name} blocks"
    return cols // block_elements * block_bytes


@cache
def can_dequantize(quant: Quant) -> bool:
    """Whether ``dequantize`` takes this type. Integer types and those of intermediate results it does not."""
    try:
        gguf.quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[quant][1]), np.uint8), quant)
    except NotImplementedError:
        return False
    return True


def dequantize(data: Bytes, quant: Quant, shape: tuple[int, int], out: Floats | None = None) -> Floats:
    """The values of ``data``, uint8 [rows * row_bytes], as float32 [rows, cols] in C order, in ``out`` if given.

    ``can_dequantize(quant)`` holds; the result shares no memory with ``data``.
    """
    if out is None:
        out = np.empty(shape, np.float32)
    assert out.shape == shape
    assert out.dtype == np.float32
    assert out.flags.c_contiguous
    block_elements, block_bytes = GGML_QUANT_SIZES[quant]
    assert data.size == shape[0] * row_bytes(quant, shape[1])
    blocks = data.reshape(-1, block_bytes)
    values = out.reshape(-1, block_elements)
    unpack = _UNPACKERS.get(quant) or _through_gguf(quant)
    step = _PIECE // block_elements
    with np.errstate(all="ignore"):  # a damaged scale gives inf or NaN, as it does in every other reader
        for first in range(0, len(blocks), step):
            unpack(blocks[first : first + step], values[first : first + step])
    return out


def dequantize_rows(info: TensorInfo, first_row: int, n_rows: int, out: Floats | None = None) -> Floats:
    """Rows [first_row, first_row + n_rows) of a tensor as float32 [n_rows, ne0], in ``out`` if given.

    A tensor of shape [ne0, ne1, ...] has ne1 * ... rows; a vector is one row.
    Raises ModelFileError if nothing can unpack the tensor's type.
    """
    if not can_dequantize(info.quant):
        raise ModelFileError(f"tensor {info.name} has type {info.quant.name}, which cannot be read as weights")
    cols = info.shape[0]
    assert 0 <= first_row <= first_row + n_rows <= info.n_elements // cols
    size = row_bytes(info.quant, cols)
    data = info.data[first_row * size : (first_row + n_rows) * size]
    return dequantize(data, info.quant, (n_rows, cols), out)


def _through_gguf(quant: Quant) -> Unpacker:
    def unpack(blocks: Bytes, out: Floats) -> None:
        # As one long row: gguf works on 16 rows at a time, however short they are.
        out[:] = gguf.quants.dequantize(blocks.reshape(1, -1), quant).reshape(out.shape)

    return unpack


def _half(blocks: Bytes, index: int) -> Floats:
    """Each block's float16 number ``index``, counted in pairs of bytes, as float32 [blocks, 1]."""
    return blocks.view(np.float16)[:, index : index + 1].astype(np.float32)


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """Bytes [blocks, n] to their halves [blocks, 2 n]: of each ``run`` bytes the low halves, then the high ones."""
    wide = np.dtype(f"V{run}")  # run bytes as one item: copied at once
    packed = np.ascontiguousarray(packed)
    halves = np.empty((packed.size // run, 2), wide)
    halves[:, 0] = (packed & np.uint8(15)).view(wide).ravel()
    halves[:, 1] = (packed >> np.uint8(4)).view(wide).ravel()
    return halves.view(np.uint8).reshape(len(packed), -1)


def _f32(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view(np.float32)


def _f16(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view(np.float16)


def _bf16(blocks: Bytes, out: Floats) -> None:
    bits = out.view(np.uint32)
    bits[:] = blocks.view(np.uint16)
    bits <<= np.uint32(16)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    """Per 32 values: d float16, q int8 [32];  q * d"""
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    """Per 32 values: d float16, q nibbles [32];  (q - 8) * d"""
    out[:] = _nibbles(blocks[:, 2:], 16)
    out -= np.float32(8)
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    """Per 32 values: d, m float16, q nibbles [32];  q * d + m"""
    out[:] = _nibbles(blocks[:, 4:], 16)
    out *= _half(blocks, 0)
    out += _half(blocks, 1)


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """The 6-bit scales and minima of Q4_K and Q5_K, packed [blocks, 12], as float32 [blocks, 8] each.

    Bytes 0-3 and 4-7: the first four scales and minima in the low 6 bits; bytes 8-11: the low nibbles of the last four,
    whose upper 2 bits are the upper 2 of bytes 0-7.
    """
    scale, least, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([scale & 63, (low & 15) | ((scale >> 2) & 48)], axis=1)
    minima = np.concatenate([least & 63, (low >> 4) | ((least >> 2) & 48)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _scale_k(blocks: Bytes, out: Floats) -> None:
    """out [blocks, 8 groups of 32] = out * (d sc) - dmin m, with d, dmin and the scales from the head of each block."""
    scales, minima = _k_scales(blocks[:, 4:16])
    scales *= _half(blocks, 0)
    minima *= _half(blocks, 1)
    groups = out.reshape(-1, 8, 32)
    groups *= scales[:, :, None]
    groups -= minima[:, :, None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    """Per 256 values: d, dmin float16, 8 scales and minima [12 bytes], q nibbles [256];  q * (d sc) - dmin m"""
    out[:] = _nibbles(blocks[:, 16:], 32)
    _scale_k(blocks, out)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    """As Q4_K, with the fifth bits [32 bytes] before the nibbles: bit g of byte j belongs to value j of group g."""
    q = _nibbles(blocks[:, 48:], 32)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]
    high &= np.uint8(1)
    high <<= np.uint8(4)
    q |= high.reshape(q.shape)
    out[:] = q
    _scale_k(blocks, out)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    """Per 256 values: low nibbles [256], high bit pairs [256], scales int8 [16], d float16;  (q - 32) * (d sc)"""
    q = _nibbles(blocks[:, :128], 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    high &= np.uint8(3)
    high <<= np.uint8(4)
    q |= high.reshape(q.shape)
    out[:] = q
    out -= np.float32(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    scales *= _half(blocks, 104)
    groups = out.reshape(-1, 16, 16)
    groups *= scales[:, :, None]


Unpacker: TypeAlias = Callable[[Bytes, Floats], None]

_UNPACKERS: dict[Quant, Unpacker] = {
    Quant.F32: _f32,
    Quant.F16: _f16,
    Quant.BF16: _bf16,
    Quant.Q8_0: _q8_0,
    Quant.Q4_0: _q4_0,
    Quant.Q4_1: _q4_1,
    Quant.Q4_K: _q4_k,
    Quant.Q5_K: _q5_k,
    Quant.Q6_K: _q6_k,
}
