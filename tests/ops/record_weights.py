"""Weight records made by NumPy, the reference for ``repack.cu``, and a ``WeightStore`` that loads tensors in a lab."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvs_core.device.cuda.weights import WeightStore
from kvs_core.formats.gguf import TensorInfo
from kvs_core.units import align_up
from tests.ops.test_cuda_matmul_rows import random_rows

Quant = GGMLQuantizationType
K_TYPES = (Quant.Q4_K, Quant.Q5_K)
NIBBLES = (Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1)


def random_tensor(name: str, quant: Quant, n_out: int, n_in: int, seed: int = 0) -> TensorInfo:
    """Any quants, as a file would hold them."""
    data = random_rows(quant, n_out, n_in, seed).reshape(-1)
    return TensorInfo(name, (n_in, n_out), quant, n_in * n_out, data.nbytes, data)


def store_in(lab: Any, piece_bytes: int = 4096) -> WeightStore:
    """A store whose tensors come in pieces of that many bytes."""
    def fill(info: TensorInfo, first: int, out: Any) -> None:
        values = info.data[first : first + len(out)]
        if lab.on_gpu:
            import cupy

            cupy.cuda.Device().synchronize()
            out.set(np.ascontiguousarray(values))
            cupy.cuda.Device().synchronize()
        else:
            out[...] = values

    return WeightStore(lab.launcher, lambda size: lab.empty(size, np.uint8), lab.array, fill, piece_bytes)


def interleave(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Rows [N, ...] of each to [2 N, ...]: eight of gate, eight of up, and so on."""
    both = np.stack([gate.reshape(-1, 8, *gate.shape[1:]), up.reshape(-1, 8, *up.shape[1:])], axis=1)
    return both.reshape(-1, *gate.shape[1:])


def repack(quant: Quant, rows: np.ndarray) -> np.ndarray:
    """uint8 [N, row bytes] as in the file to [record tiles, n_in / 256, record bytes], padded with zero bytes."""
    block, size = GGML_QUANT_SIZES[quant]
    per_record = 256 // block
    blocks = rows.reshape(len(rows), -1, size)
    padding = [(0, align_up(n, step) - n) for n, step in zip(blocks.shape[:2], (16, per_record), strict=True)]
    real = np.pad(np.ones(blocks.shape[:2], bool), padding)
    blocks = np.pad(blocks, [*padding, (0, 0)])
    n, n_records = len(blocks), blocks.shape[1] // per_record
    raw = blocks.reshape(n, n_records, per_record * size)
    small = blocks.reshape(n, n_records, per_record, size)
    if quant in K_TYPES:
        chunks = [_fragments(_words(raw[..., -128:]), 4)]
        if quant is Quant.Q5_K:
            chunks.append(_fragments(_words(raw[..., 16:48]), 1))
        chunks.append(_by_row(raw[..., :16]))
    elif quant is Quant.Q6_K:
        low = _words(raw[..., :128])
        low = _fragments((low << 2) | (low >> 30), 4).reshape(n // 16, n_records, 2, 2, 512)
        pairs = raw[..., 128:192] ^ np.where(real[:, ::per_record, None], np.uint8(0xAA), np.uint8(0))
        high = _fragments(_words(pairs), 2).reshape(n // 16, n_records, 2, 1, 512)
        chunks = [np.concatenate([low, high], axis=3), _by_row(raw[..., 192:208]), _by_row(raw[..., 208:210])]
    elif quant is Quant.IQ4_XS:
        chunks = [_iq4_words(raw[..., 8:].reshape(n, n_records, 8, 16)), _by_row(_iq4_heads(raw, real))]
    elif quant is Quant.IQ4_NL:
        chunks = [_iq4_words(small[..., 2:]), _by_row(small[..., :2])]
    elif quant in NIBBLES:
        q = small[..., -16:]
        values = np.concatenate([q & 15, q >> 4], axis=-1)
        chunks = [_fragments(_words(values[:, :, 0::2] | values[:, :, 1::2] << 4), 4)]
        if quant in (Quant.Q5_0, Quant.Q5_1):
            bits = np.unpackbits(small[..., -20:-16], axis=-1, bitorder="little")   # [.., block, value]
            chunks.append(_fragments(_words(np.packbits(bits, axis=2, bitorder="little").reshape(n, n_records, 32)), 1))
        chunks += [_by_row(small[..., at : at + 2]) for at in ((0, 2) if quant in (Quant.Q4_1, Quant.Q5_1) else (0,))]
    else:
        assert quant is Quant.Q8_0
        chunks = [_fragments(_words(small[..., 2:]), 8), _by_row(small[..., :2])]
    return np.concatenate([chunk.reshape(n // 16, n_records, -1) for chunk in chunks], axis=2)


def _words(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint32)


def _bytes(values: np.ndarray, tiles: int, records: int) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint8).reshape(tiles, records, -1)


def _fragments(words: np.ndarray, chunks: int) -> np.ndarray:
    """Words (chunk, half of 16 columns, t) of each row and record to chunks of (g, t, row half, half)."""
    n, records = words.shape[:2]
    split = words.reshape(n // 16, 2, 8, records, chunks, 2, 4)
    return _bytes(split.transpose(0, 3, 4, 2, 6, 1, 5), n // 16, records)


def _by_row(values: np.ndarray) -> np.ndarray:
    """Scales, [N, records, ...] to [tiles, records, 16 rows, ...]."""
    n, records = values.shape[:2]
    return _bytes(values.reshape(n // 16, 16, records, -1).transpose(0, 2, 1, 3), n // 16, records)


def _iq4_words(packed: np.ndarray) -> np.ndarray:
    """Bytes [N, records, 8 blocks, 16] to chunks of (g, t, block, row half)."""
    n, records = packed.shape[:2]
    q = packed.reshape(n, records, 8, 4, 4).astype(np.uint32)
    words = np.zeros(q.shape[:-1], np.uint32)
    for j in range(4):
        words |= (q[..., j] & 15) << 4 * j | (q[..., j] >> 4) << 16 + 4 * j
    split = words.reshape(n // 16, 2, 8, records, 4, 2, 4)
    return _bytes(split.transpose(0, 3, 4, 2, 6, 5, 1), n // 16, records)


def _iq4_heads(raw: np.ndarray, real: np.ndarray) -> np.ndarray:
    """d and scales of IQ4_XS as the kernels take them apart: see ``iq4_scales`` in ``records.cuh``."""
    d, high = (raw[..., at].astype(np.uint32) | raw[..., at + 1].astype(np.uint32) << 8 for at in (0, 2))
    low = raw[..., 4:8].astype(np.uint32)
    flipped = np.zeros_like(high)
    scales = np.zeros_like(high)
    for b, place in enumerate((0, 8, 2, 10, 4, 12, 6, 14)):
        flipped |= ((high >> 2 * b & 3) ^ 2) << place
        scales |= (low[..., b // 2] >> 4 * (b % 2) & 15) << 8 * (b % 4) + 4 * (b // 4)
    return np.stack([np.where(real, d | flipped << 16, 0), scales], axis=-1).astype(np.uint32)
