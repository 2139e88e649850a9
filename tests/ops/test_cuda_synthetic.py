"""Weights that the device makes are those that the host makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from kvs_core.device.cuda.ops.synthetic import DrawBlocks
from kvs_core.formats.synthetic_blocks import DRAWN_TYPES, DrawnBytes, block_bytes

Quant = GGMLQuantizationType


@pytest.mark.parametrize("quant", DRAWN_TYPES, ids=lambda quant: quant.name)
def test_bytes_are_the_host_s(lab: Any, quant: Quant) -> None:
    """Ranges that begin and end inside blocks, at the start of a tensor and far from it; one upload of the pool."""
    uploads = []

    def upload(array: np.ndarray) -> Any:
        uploads.append(array.nbytes)
        return lab.array(array)

    draw = DrawBlocks(lab.launcher, upload)
    data = DrawnBytes(quant, 0.02, 0xFEDCBA98, 40_000_000 * block_bytes(quant))
    for first, size in ((0, 2), (0, 9000), (block_bytes(quant) - 2, 4 * block_bytes(quant) + 4),
                        (data.n_bytes - 3000, 3000), (2 * 7_654_321, (32 << 20 if lab.on_gpu else 1 << 12) + 2)):
        out = lab.empty(size, np.uint8)
        draw.enqueue(data, first, out)
        np.testing.assert_array_equal(lab.host(out), data[first : first + size], f"{size} bytes from {first}")
    assert len(uploads) == 1
    draw.finish()
    draw.enqueue(data, 0, lab.empty(2, np.uint8))
    assert len(uploads) == 2
