"""Pages that tests make and look into, in either order of bytes."""

import numpy as np

from kvs_core.device.host.ops import kv_codec
from kvs_core.paging.geometry import KvType, PageGeometry, PageOrder
from tests.reference.kv_fragments import unpack


def fragments(kv_heads: int, k_rotation: int = 256, v_rotation: int = 64) -> PageGeometry:
    """The geometry that has FRAGMENTS pages."""
    return PageGeometry(
        256, kv_heads, 256, 256, KvType.Q8_0, KvType.Q4_0, k_rotation, v_rotation, order=PageOrder.FRAGMENTS
    )


def query_order() -> np.ndarray:
    """The dim at each place of a decode query for FRAGMENTS pages: int [256]."""
    return np.arange(256).reshape(8, 2, 4, 4).swapaxes(1, 2).reshape(-1)


def dequantise(page: np.ndarray, geometry: PageGeometry) -> tuple[np.ndarray, np.ndarray]:
    """K [G, P, Dk] and V [G, P, Dv] of a page in either order, float32, as stored (rotated if they are)."""
    if geometry.order is PageOrder.FRAGMENTS:
        page = unpack(page, geometry.kv_heads)
    parts = page.reshape(geometry.kv_heads, geometry.head_bytes)
    shape = (geometry.kv_heads, geometry.page_tokens)
    keys, values = (np.empty((*shape, dim), np.float32) for dim in (geometry.k_dim, geometry.v_dim))
    for kv_type, data, out in (
        (geometry.k_type, parts[:, : geometry.k_part_bytes], keys),
        (geometry.v_type, parts[:, geometry.k_part_bytes :], values),
    ):
        kv_codec.decode(kv_type, np.ascontiguousarray(data).reshape(*shape, -1), out)
    return keys, values
