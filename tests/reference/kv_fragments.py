"""Pages in ``PageOrder.FRAGMENTS`` as pages in ROWS order, and back: after ``cuda_src/common/fragments.cuh``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvs_core.paging.geometry import KvType

U8 = npt.NDArray[np.uint8]

_K_PIECE, _V_PIECE = 4352, 4608
_TOKEN_ORDER = [0, 2, 1, 3]   # tokens of the bytes of a word of V


def pack(page: U8, kv_heads: int) -> U8:
    """A page in ROWS order as one in FRAGMENTS order: uint8 [page bytes] both."""
    rows = page.reshape(kv_heads, -1)
    k_bytes = 256 * KvType.Q8_0.row_bytes(256)
    keys = rows[:, :k_bytes].reshape(kv_heads, 256, 8, 34)      # head, token, 32 dims, block
    values = rows[:, k_bytes:].reshape(kv_heads, 256, 8, 18)

    # token = 16 piece + 2 g + odd; dim = 32 block + 16 u + 4 t + byte
    q = keys[..., 2:].reshape(kv_heads, 16, 8, 2, 8, 2, 4, 4) ^ np.uint8(128)   # head, piece, g, odd, block, u, t, byte
    q = q.transpose(0, 1, 4, 2, 6, 3, 5, 7).reshape(kv_heads, 16, 4096)
    scales = keys[..., :2].reshape(kv_heads, 16, 256)
    k_part = np.concatenate([q, scales], axis=2)

    # token = 64 quarter + 16 word + 4 t + r; dims 16 of a tile: g, and g + 8 in the high nibbles
    low, high = values[..., 2:] & 15, values[..., 2:] >> 4            # dims 0..15 and 16..31 of the 32
    tiles = np.stack([low, high], axis=3)                             # head, token, block, tile, 16
    nibbles = tiles[..., :8] | tiles[..., 8:] << 4                    # head, token, block, tile, g
    nibbles = nibbles.reshape(kv_heads, 4, 4, 4, 4, 8, 2, 8)          # head, quarter, word, t, r, block, tile, g
    nibbles = nibbles.transpose(0, 5, 6, 1, 7, 3, 2, 4)[..., _TOKEN_ORDER].reshape(kv_heads, 8, 4096)
    scales = values[..., :2].transpose(0, 2, 1, 3).reshape(kv_heads, 8, 512)
    v_part = np.concatenate([nibbles, scales], axis=2)
    return np.concatenate([k_part.reshape(kv_heads, -1), v_part.reshape(kv_heads, -1)], axis=1).reshape(-1)


def unpack(page: U8, kv_heads: int) -> U8:
    """A page in FRAGMENTS order as one in ROWS order: uint8 [page bytes] both."""
    parts = page.reshape(kv_heads, -1)
    k_part = parts[:, : 16 * _K_PIECE].reshape(kv_heads, 16, _K_PIECE)
    v_part = parts[:, 16 * _K_PIECE :].reshape(kv_heads, 8, _V_PIECE)

    q = k_part[..., :4096].reshape(kv_heads, 16, 8, 8, 4, 2, 2, 4)    # head, piece, block, g, t, odd, u, byte
    q = q.transpose(0, 1, 3, 5, 2, 6, 4, 7).reshape(kv_heads, 256, 8, 32) ^ np.uint8(128)
    keys = np.concatenate([k_part[..., 4096:].reshape(kv_heads, 256, 8, 2), q], axis=3)

    nibbles = v_part[..., :4096].reshape(kv_heads, 8, 2, 4, 8, 4, 4, 4)[..., _TOKEN_ORDER]
    nibbles = nibbles.transpose(0, 3, 6, 5, 7, 1, 2, 4).reshape(kv_heads, 256, 8, 2, 8)   # head, token, block, tile, g
    tiles = np.concatenate([nibbles & 15, nibbles >> 4], axis=4)      # dims of the tile
    packed = tiles[..., 0, :] | tiles[..., 1, :] << 4
    values = np.concatenate([v_part[..., 4096:].reshape(kv_heads, 8, 256, 2).transpose(0, 2, 1, 3), packed], axis=3)
    return np.concatenate([keys.reshape(kv_heads, -1), values.reshape(kv_heads, -1)], axis=1).reshape(-1)
