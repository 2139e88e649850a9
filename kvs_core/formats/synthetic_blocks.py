"""Random weights without a file: a tensor's blocks are drawn from a pool of valid ones by a counter and a hash.

    block i of a tensor = pool[hash(i, seed of the tensor) mod POOL_BLOCKS]

So any range of bytes can be had at any time, on any device, without the bytes before it, and the same everywhere; rows
differ from each other, as their blocks are drawn one by one. The pool of a type is random bits under scales that give
its values a mean near 0 and the standard deviation asked for; floats come in blocks of ``FLOAT_BLOCK`` normal numbers.
The hash is "lowbias32" of C. Wellons, Prospecting for Hash Functions, 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvs_core.formats.quants import dequantize

Quant = GGMLQuantizationType
Bytes = npt.NDArray[np.uint8]

POOL_BLOCKS = 4096
"""A power of two: few enough for a GPU's cache, and a row of 20 blocks is one of 4096^20."""

FLOAT_BLOCK = 128

_SEED = 0x6B7673   # of all pools
_SPREAD = (0.5, 1.5)   # of the blocks' scales around their mean


@dataclass(frozen=True, slots=True)
class _Scales:
    """Where a block has its float16 numbers. Source of the layouts: ggml's ``ggml-common.h``.

    d      byte of the scale
    least  byte of the second number, if there is one, and its value over d that makes the block's mean 0
    signed the scale may be negative: so a mean that is not quite 0 has either sign
    """

    d: int = 0
    least: tuple[int, float] | None = None
    signed: bool = True


_SCALES = {
    Quant.Q8_0: _Scales(),
    Quant.Q4_0: _Scales(),
    Quant.Q5_0: _Scales(),
    Quant.IQ4_NL: _Scales(),
    Quant.IQ4_XS: _Scales(),
    Quant.Q6_K: _Scales(208),
    Quant.Q4_1: _Scales(0, (2, -7.5), signed=False),
    Quant.Q5_1: _Scales(0, (2, -15.5), signed=False),
    Quant.Q4_K: _Scales(0, (2, 7.5), signed=False),
    Quant.Q5_K: _Scales(0, (2, 15.5), signed=False),
}
_FLOATS = (Quant.F16, Quant.BF16)

DRAWN_TYPES = (*_SCALES, *_FLOATS)
"""Types that tensors can be drawn in."""


def block_bytes(quant: Quant) -> int:
    """Bytes of what is drawn at once, an even number: a block of the type, or ``FLOAT_BLOCK`` numbers."""
    size = GGML_QUANT_SIZES[quant][1]
    return size * FLOAT_BLOCK if quant in _FLOATS else size


@cache
def block_pool(quant: Quant, std: float) -> Bytes:
    """uint8 [POOL_BLOCKS, block_bytes]: blocks of values with this standard deviation. Do not change it."""
    assert quant in DRAWN_TYPES, f"{quant.name} cannot be drawn"
    rng = np.random.default_rng((_SEED, int(quant)))
    if quant in _FLOATS:
        pool = _float_pool(quant, std, rng)
    else:
        pool = rng.integers(0, 256, (POOL_BLOCKS, block_bytes(quant)), np.uint8)
        if quant is Quant.Q8_0:
            quants = pool[:, 2:].view(np.int8)
            np.maximum(quants, -127, out=quants)   # -128 is in no file
        if quant in (Quant.Q4_K, Quant.Q5_K):
            # The eight minima are the eight scales: else values would have more in common than not. Both in 6 bits,
            # four by four in bytes 4-7 and 8-11, the rest of the last ones in the halves of bytes 12-15.
            pool[:, 8:12] = pool[:, 4:8]
            pool[:, 12:16] = (pool[:, 12:16] & 15) * 17
        scale = rng.uniform(*_SPREAD, POOL_BLOCKS)
        if _SCALES[quant].signed:
            scale *= rng.choice((-1.0, 1.0), POOL_BLOCKS)
        _set_scales(pool, quant, scale)
        values = dequantize(pool.reshape(-1), quant, (1, POOL_BLOCKS * GGML_QUANT_SIZES[quant][0]))
        _set_scales(pool, quant, scale * std / float(values.std(dtype=np.float64)))
    pool.flags.writeable = False
    return pool


def _float_pool(quant: Quant, std: float, rng: np.random.Generator) -> Bytes:
    values = rng.normal(0.0, std, (POOL_BLOCKS, FLOAT_BLOCK)).astype(np.float32)
    if quant is Quant.F16:
        return values.astype(np.float16).view(np.uint8)
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint8)


def _set_scales(pool: Bytes, quant: Quant, scale: npt.NDArray[np.float64]) -> None:
    places = _SCALES[quant]
    halves = pool.view(np.float16)
    halves[:, places.d // 2] = scale
    if places.least is not None:
        at, ratio = places.least
        halves[:, at // 2] = scale * ratio


@dataclass(frozen=True, slots=True)
class DrawnBytes:
    """The data of a tensor, made when they are read: ``data[first:last]`` is a new uint8 array.

    std   of its values
    seed  [0, 2^32): tensors with other seeds have other blocks
    """

    quant: Quant
    std: float
    seed: int
    n_bytes: int

    def __len__(self) -> int:
        return self.n_bytes

    def __getitem__(self, part: slice, /) -> Bytes:
        first, last, step = part.indices(self.n_bytes)
        assert step == 1
        size = block_bytes(self.quant)
        first_block = first // size
        chosen = drawn_blocks(self.seed, first_block, max(0, -(-last // size) - first_block))
        drawn: Bytes = block_pool(self.quant, self.std).take(chosen, axis=0).reshape(-1)
        skipped = first_block * size
        return drawn[first - skipped : max(first, last) - skipped]


def drawn_blocks(seed: int, first: int, count: int) -> npt.NDArray[np.uint32]:
    """Which blocks of the pool blocks [first, first + count) of a tensor are. ``synthetic.cu`` has the same."""
    x = np.arange(first, first + count, dtype=np.uint32)
    x *= np.uint32(0x9E3779B1)
    x += np.uint32(seed)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(16)
    x &= np.uint32(POOL_BLOCKS - 1)
    return x
