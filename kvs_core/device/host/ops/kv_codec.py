"""K and V rows in the formats of ``KvType``, to and from float32.

The block formats are ggml's (32 values a block; bytes as in ggml-common.h, rounding as in its reference quantisers):

    q8_0    d f16, q int8 [32]                      x = d q                   d = amax / 127
    q4_0    d f16, nibbles [16]                     x = d (q - 8)             d = (value of largest size) / -8
    q4_1    d f16, m f16, nibbles [16]              x = d q + m               d = (max - min) / 15
    q5_0    d f16, fifth bits [4], nibbles [16]     x = d (q - 16)            d = (value of largest size) / -16
    q5_1    d f16, m f16, fifth bits [4], nibbles   x = d q + m               d = (max - min) / 31
    iq4_nl  d f16, nibbles [16]                     x = d table[q]            d fitted by least squares, weights x^2

Byte j of the nibbles holds value j in its low and value j + 16 in its high half; bit j of the fifth bits is value j's.
Infinite, NaN and too large values are stored as the formats can, without a word.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvs_core.paging.geometry import KvType

F32 = npt.NDArray[np.float32]
I16 = npt.NDArray[np.int16]
U8 = npt.NDArray[np.uint8]

_BLOCK = 32
_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
_IQ4_NL_MIDPOINTS = (_IQ4_NL[1:] + _IQ4_NL[:-1]) / 2   # a value on one goes to the higher entry
_TINY = np.float32(1e-15)                              # a block of iq4_nl below this gets d = 0
_LOW, _FOUR = np.uint8(15), np.uint8(4)


def encode(kv_type: KvType, rows: F32) -> U8:
    """float32 [..., D] to bytes [..., row_bytes]."""
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    with np.errstate(all="ignore"):
        match kv_type:
            case KvType.F32:
                return rows.view(np.uint8)
            case KvType.F16:
                return rows.astype(np.float16).view(np.uint8)
            case KvType.BF16:
                return _to_bf16(rows).view(np.uint8)
        packed = _ENCODERS[kv_type](rows.reshape(-1, _BLOCK))
    return packed.reshape(*rows.shape[:-1], -1)


def decode(kv_type: KvType, data: U8, out: F32) -> None:
    """bytes [..., n * row_bytes] to float32 [..., values].   data's last axis and out are contiguous"""
    with np.errstate(all="ignore"):
        match kv_type:
            case KvType.F32:
                np.copyto(out, data.view(np.float32))
            case KvType.F16:
                _widen(data.view(np.int16), out)
            case KvType.BF16:
                wide = out.view(np.uint32)
                np.copyto(wide, data.view(np.uint16))
                wide <<= 16
            case _:
                lead = data.shape[:-1]
                _DECODERS[kv_type](data.reshape(*lead, -1, kv_type.block_bytes), out.reshape(*lead, -1, _BLOCK))


def _to_bf16(rows: F32) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = rows.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 64
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).astype(np.uint16)


def _widen(halves: I16, out: F32) -> None:
    """f16 to float32 as ``astype`` has it, which goes one by one: move the exponent, then multiply its bias in."""
    if halves.max() >= 0x7C00 or halves.view(np.uint16).max() >= 0xFC00:   # infinite or NaN
        np.copyto(out, halves.view(np.float16))
        return
    wide = out.view(np.int32)
    np.copyto(wide, halves)
    wide <<= 13
    wide &= ~0x7000_1FFF   # of the copies of the sign, the first stays
    out *= np.float32(2.0**112)


def _inverse(d: F32) -> F32:
    """1 / d, and 0 for 0."""
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)


def _largest(blocks: F32) -> F32:
    """The signed value of largest size of each block, the first of several; never -0."""
    return _pick(blocks, np.abs(blocks).argmax(axis=-1)) + np.float32(0)


def _pick(blocks: F32, index: npt.NDArray[np.intp]) -> F32:
    """One value of every block: [n, 1]"""
    return blocks[np.arange(len(blocks)), index, None]


def _pack(*fields: npt.NDArray[np.generic]) -> U8:
    """Fields [n, ...] of every block, one after the other, as bytes."""
    return np.concatenate([field.view(np.uint8) for field in fields], axis=-1)


def _nibbles(q: U8) -> U8:
    return (q[:, :16] & _LOW) | (q[:, 16:] << _FOUR)


def _fifth_bits(q: U8) -> U8:
    return np.packbits(q >> _FOUR, axis=-1, bitorder="little")


def _encode_q8_0(blocks: F32) -> U8:
    d = np.maximum.reduce(np.abs(blocks), axis=-1, keepdims=True)
    d /= 127
    x = blocks * _inverse(d)
    whole = np.trunc(x)
    x -= whole
    x += x
    whole += np.trunc(x, out=x)   # halves go away from zero
    return _pack(d.astype(np.float16), whole.astype(np.int8))


def _symmetric(blocks: F32, levels: int) -> tuple[F32, U8]:
    d = _largest(blocks) / np.float32(-levels)
    q = (blocks * _inverse(d) + np.float32(levels + 0.5)).astype(np.int8)
    return d, np.minimum(q, 2 * levels - 1).view(np.uint8)


def _affine(blocks: F32, levels: int) -> tuple[F32, F32, U8]:
    low = _pick(blocks, blocks.argmin(axis=-1))   # the first of several, for the sign of a zero
    d = (_pick(blocks, blocks.argmax(axis=-1)) - low) / np.float32(levels)
    q = ((blocks - low) * _inverse(d) + np.float32(0.5)).astype(np.int8)
    return d, low, np.minimum(q, levels).view(np.uint8)


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
    largest = _largest(blocks)
    scaled = blocks * _inverse(largest / _IQ4_NL[0])
    q = np.zeros(blocks.shape, dtype=np.uint8)
    for midpoint in _IQ4_NL_MIDPOINTS:
        q += scaled >= midpoint
    entry = _IQ4_NL[q]
    weighted = blocks * blocks * entry
    # Sums run in value order, as in ggml: the last bit of d depends on it.
    fit = np.add.accumulate(weighted * blocks, axis=-1)[:, -1:]
    norm = np.add.accumulate(weighted * entry, axis=-1)[:, -1:]
    d = np.divide(fit, norm, out=np.zeros_like(fit), where=np.abs(largest) >= _TINY)
    return _pack(d.astype(np.float16), _nibbles(q))


def _f16(blocks: U8, at: int) -> F32:
    """The f16 field at byte ``at`` of every block: [..., 1]"""
    halves = np.ascontiguousarray(blocks.view(np.int16)[..., at // 2 : at // 2 + 1])
    values = np.empty(halves.shape, dtype=np.float32)
    _widen(halves, values)
    return values


def _field(blocks: U8, at: int, size: int) -> npt.NDArray[np.void]:
    """Bytes [at, at + size) of contiguous blocks as one value each, which NumPy copies faster than single bytes."""
    return np.ndarray(blocks.shape[:-1], f"V{size}", buffer=blocks, offset=at, strides=blocks.strides[:-1])


def _open_nibbles(blocks: U8, at: int) -> U8:
    """[..., 32]"""
    q = np.empty((*blocks.shape[:-1], 2), dtype="V16")
    q[..., 0] = _field(blocks & _LOW, at, 16)
    q[..., 1] = _field(blocks >> _FOUR, at, 16)
    return q.view(np.uint8)


def _open_fives(blocks: U8, bits_at: int) -> U8:
    """[..., 32]"""
    bits = _field(np.ascontiguousarray(blocks), bits_at, 4).copy()
    fifths = np.unpackbits(bits.view(np.uint8), axis=None, bitorder="little")
    fifths *= 16           # NumPy shifts bytes left one at a time
    q = _open_nibbles(blocks, bits_at + 4)
    q |= fifths.reshape(q.shape)
    return q


def _decode_q8_0(blocks: U8, out: F32) -> None:
    np.copyto(out, blocks[..., 2:].view(np.int8))
    out *= _f16(blocks, 0)


def _decode_q4_0(blocks: U8, out: F32) -> None:
    q = _open_nibbles(blocks, 2)
    q -= 8                 # wraps: right as int8
    np.copyto(out, q.view(np.int8))
    out *= _f16(blocks, 0)


def _decode_q4_1(blocks: U8, out: F32) -> None:
    np.copyto(out, _open_nibbles(blocks, 4))
    out *= _f16(blocks, 0)
    out += _f16(blocks, 2)


def _decode_q5_0(blocks: U8, out: F32) -> None:
    q = _open_fives(blocks, 2)
    q -= 16
    np.copyto(out, q.view(np.int8))
    out *= _f16(blocks, 0)


def _decode_q5_1(blocks: U8, out: F32) -> None:
    np.copyto(out, _open_fives(blocks, 4))
    out *= _f16(blocks, 0)
    out += _f16(blocks, 2)


def _decode_iq4_nl(blocks: U8, out: F32) -> None:
    _IQ4_NL.take(_open_nibbles(blocks, 2), out=out, mode="clip")   # all in range; the default mode is slower
    out *= _f16(blocks, 0)


_ENCODERS: dict[KvType, Callable[[F32], U8]] = {
    KvType.Q8_0: _encode_q8_0,
    KvType.Q4_0: _encode_q4_0,
    KvType.Q4_1: _encode_q4_1,
    KvType.Q5_0: _encode_q5_0,
    KvType.Q5_1: _encode_q5_1,
    KvType.IQ4_NL: _encode_iq4_nl,
}

_DECODERS: dict[KvType, Callable[[U8, F32], None]] = {
    KvType.Q8_0: _decode_q8_0,
    KvType.Q4_0: _decode_q4_0,
    KvType.Q4_1: _decode_q4_1,
    KvType.Q5_0: _decode_q5_0,
    KvType.Q5_1: _decode_q5_1,
    KvType.IQ4_NL: _decode_iq4_nl,
}
