"""K and V rows in the formats of ``KvType``, to and from float32.

The block formats are ggml's (32 values a block; byte layouts in ggml-common.h, rounding as in its reference quantisers):

    q8_0    d f16, q int8 [32]                      x = d q                   d = amax / 127
    q4_0    d f16, nibbles [16]                     x = d (q - 8)             d = (value of largest size) / -8
    q4_1    d f16, m f16, nibbles [16]              x = d q + m               d = (max - min) / 15
    q5_0    d f16, fifth bits [4], nibbles [16]     x = d (q - 16)            d = (value of largest size) / -16
    q5_1    d f16, m f16, fifth bits [4], nibbles   x = d q + m               d = (max - min) / 31
    iq4_nl  d f16, nibbles [16]                     x = d table[q]            d fitted by least squares, weights x^2

Byte j of the nibbles holds value j in its low and value j + 16 in its high half; bit j of the fifth bits is value j's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvs_core.paging.geometry import KvType

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_BLOCK = 32
_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
_IQ4_NL_MIDPOINTS = (_IQ4_NL[1:] + _IQ4_NL[:-1]) / 2   # a value on one goes to the higher entry
_TINY = np.float32(1e-15)                              # a block of iq4_nl below this is stored as zeros


def encode(kv_type: KvType, rows: F32) -> U8:
    """float32 [..., D] to bytes [..., row_bytes]."""
    if kv_type is KvType.F32:
        return np.ascontiguousarray(rows, dtype=np.float32).view(np.uint8)
    if kv_type is KvType.F16:
        with np.errstate(over="ignore"):
            return rows.astype(np.float16).view(np.uint8)
    if kv_type is KvType.BF16:
        return _to_bf16(np.ascontiguousarray(rows)).view(np.uint8)
    blocks = rows.reshape(*rows.shape[:-1], -1, _BLOCK)
    with np.errstate(over="ignore", invalid="ignore"):
        packed = _ENCODERS[kv_type](blocks)
    return packed.reshape(*rows.shape[:-1], -1)


def decode(kv_type: KvType, data: U8) -> F32:
    """bytes [..., n * row_bytes], contiguous, to float32 [..., values]."""
    if kv_type is KvType.F32:
        return data.view(np.float32)
    if kv_type is KvType.F16:
        return data.view(np.float16).astype(np.float32)
    if kv_type is KvType.BF16:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    blocks = data.reshape(-1, kv_type.block_bytes)
    values = _DECODERS[kv_type](blocks)
    return values.reshape(*data.shape[:-1], -1)


def _to_bf16(rows: F32) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = rows.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 64
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).astype(np.uint16)


def _inverse(d: F32) -> F32:
    """1 / d, and 0 for 0."""
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)


def _largest(blocks: F32) -> F32:
    """The signed value of largest size of each block, the first of several."""
    where = np.abs(blocks).argmax(axis=-1)[..., None]
    return np.take_along_axis(blocks, where, axis=-1)


def _round_half_away(x: F32) -> F32:
    size = np.abs(x)
    whole = np.floor(size)
    return np.copysign(whole + (size - whole >= 0.5), x)


def _pack(*fields: npt.NDArray[np.generic]) -> U8:
    """Fields [..., n] of a block, one after the other, as bytes."""
    return np.concatenate([np.ascontiguousarray(field).view(np.uint8) for field in fields], axis=-1)


def _nibbles(q: U8) -> U8:
    return (q[..., :16] & 15) | (q[..., 16:] << 4)


def _fifth_bits(q: U8) -> U8:
    return np.packbits(q >> 4, axis=-1, bitorder="little")


def _encode_q8_0(blocks: F32) -> U8:
    d = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    q = _round_half_away(blocks * _inverse(d)).astype(np.int8)
    return _pack(d.astype(np.float16), q)


def _symmetric(blocks: F32, levels: int) -> tuple[F32, U8]:
    d = _largest(blocks) / np.float32(-levels)
    q = (blocks * _inverse(d) + np.float32(levels + 0.5)).astype(np.int8)
    return d, np.minimum(q, 2 * levels - 1).astype(np.uint8)


def _affine(blocks: F32, levels: int) -> tuple[F32, F32, U8]:
    low = blocks.min(axis=-1, keepdims=True)
    d = (blocks.max(axis=-1, keepdims=True) - low) / np.float32(levels)
    q = ((blocks - low) * _inverse(d) + np.float32(0.5)).astype(np.int8)
    return d, low, np.minimum(q, levels).astype(np.uint8)


def _encode_q4_0(blocks: F32) -> U8:
    d, q = _symmetric(blocks, 8)
    return _pack(d.astype(np.float16), _nibbles(q))


def _encode_q4_1(blocks: F32) -> U8:
    d, low, q = _affine(blocks, 15)
    return _pack(d.astype(np.float16), low.astype(np.float16), _nibbles(q))


def _encode_q5_0(blocks: F32) -> U8:
    d, q = _symmetric(blocks, 16)
    return _pack(d.astype(np.float16), _fifth_bits(q), _nibbles(q))


def _encode_q5_1(blocks: F32) -> U8:
    d, low, q = _affine(blocks, 31)
    return _pack(d.astype(np.float16), low.astype(np.float16), _fifth_bits(q), _nibbles(q))


def _encode_iq4_nl(blocks: F32) -> U8:
    first = _largest(blocks) / _IQ4_NL[0]
    q = np.searchsorted(_IQ4_NL_MIDPOINTS, blocks * _inverse(first), side="right")
    entry = _IQ4_NL[q]
    weight = blocks * blocks
    # Sums run in value order, as in ggml: the last bit of d depends on it.
    fit = np.add.accumulate(weight * entry * blocks, axis=-1)[..., -1:]
    norm = np.add.accumulate(weight * entry * entry, axis=-1)[..., -1:]
    d = np.divide(fit, norm, out=np.zeros_like(fit), where=norm != 0)
    silent = np.abs(_largest(blocks)) < _TINY
    d = np.where(silent, np.float32(0), d)
    return _pack(d.astype(np.float16), _nibbles(np.where(silent, 0, q).astype(np.uint8)))


def _f16(blocks: U8, at: int) -> F32:
    """The f16 field at byte ``at`` of every block, float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _open_nibbles(blocks: U8, at: int) -> U8:
    packed = blocks[:, at : at + 16]
    q = np.empty((len(blocks), _BLOCK), dtype=np.uint8)
    np.bitwise_and(packed, 15, out=q[:, :16])
    np.right_shift(packed, 4, out=q[:, 16:])
    return q


def _open_fives(blocks: U8, bits_at: int) -> U8:
    q = _open_nibbles(blocks, bits_at + 4)
    q |= np.unpackbits(blocks[:, bits_at : bits_at + 4], axis=-1, bitorder="little") << 4
    return q


def _decode_q8_0(blocks: U8) -> F32:
    values = blocks[:, 2:].view(np.int8).astype(np.float32)
    values *= _f16(blocks, 0)
    return values


def _decode_q4_0(blocks: U8) -> F32:
    values = _open_nibbles(blocks, 2).astype(np.float32)
    values -= 8
    values *= _f16(blocks, 0)
    return values


def _decode_q4_1(blocks: U8) -> F32:
    values = _open_nibbles(blocks, 4).astype(np.float32)
    values *= _f16(blocks, 0)
    values += _f16(blocks, 2)
    return values


def _decode_q5_0(blocks: U8) -> F32:
    values = _open_fives(blocks, 2).astype(np.float32)
    values -= 16
    values *= _f16(blocks, 0)
    return values


def _decode_q5_1(blocks: U8) -> F32:
    values = _open_fives(blocks, 4).astype(np.float32)
    values *= _f16(blocks, 0)
    values += _f16(blocks, 2)
    return values


def _decode_iq4_nl(blocks: U8) -> F32:
    values = _IQ4_NL[_open_nibbles(blocks, 2)]
    values *= _f16(blocks, 0)
    return values


_ENCODERS: dict[KvType, Callable[[F32], U8]] = {
    KvType.Q8_0: _encode_q8_0,
    KvType.Q4_0: _encode_q4_0,
    KvType.Q4_1: _encode_q4_1,
    KvType.Q5_0: _encode_q5_0,
    KvType.Q5_1: _encode_q5_1,
    KvType.IQ4_NL: _encode_iq4_nl,
}

_DECODERS: dict[KvType, Callable[[U8], F32]] = {
    KvType.Q8_0: _decode_q8_0,
    KvType.Q4_0: _decode_q4_0,
    KvType.Q4_1: _decode_q4_1,
    KvType.Q5_0: _decode_q5_0,
    KvType.Q5_1: _decode_q5_1,
    KvType.IQ4_NL: _decode_iq4_nl,
}
