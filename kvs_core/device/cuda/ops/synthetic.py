"""Launcher of ``synthetic.cu``: tensors of synthetic models are made where they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
from gguf.constants import GGMLQuantizationType

from kvs_core.device.cuda.kernel import PTR, U32, Kernel, Launcher
from kvs_core.device.operands import Buffer
from kvs_core.formats.synthetic_blocks import DRAWN_TYPES, POOL_BLOCKS, DrawnBytes, block_bytes, block_pool
from kvs_core.units import ceil_div

Quant = GGMLQuantizationType

_THREADS = 256
_WORDS_PER_THREAD = 16
_MAX_BYTES = 1 << 31   # of one launch: words are counted in 32 bits


class DrawBlocks:
    """Fills device memory with ranges of ``DrawnBytes``."""

    def __init__(self, launcher: Launcher, upload: Callable[[np.ndarray], Buffer]) -> None:
        """``upload``: a copy of a host array on the device, kept until ``finish``."""
        self._launcher = launcher
        self._upload = upload
        self._pools: dict[tuple[Quant, float], Buffer] = {}

    def enqueue(self, data: DrawnBytes, first: int, out: Buffer) -> None:
        """out, uint8 on the device, = data[first : first + len(out)], both even; in order on the compute stream."""
        size = block_bytes(data.quant)
        assert first % 2 == out.nbytes % 2 == 0
        assert out.nbytes < _MAX_BYTES
        pool = self._pools.get((data.quant, data.std))
        if pool is None:
            pool = self._pools[data.quant, data.std] = self._upload(block_pool(data.quant, data.std))
        words = out.nbytes // 2
        self._launcher.launch(
            _draw(data.quant), (ceil_div(words, _THREADS * _WORDS_PER_THREAD), 1, 1), _THREADS,
            (pool, data.seed, first // size, first % size // 2, words, out),
        )

    def finish(self) -> None:
        """Give up the pools. The caller has waited for the launches."""
        self._pools.clear()


def instances(arch: int) -> Iterator[Kernel]:
    """Every type."""
    yield from map(_draw, DRAWN_TYPES)


@cache
def _draw(quant: Quant) -> Kernel:
    words = block_bytes(quant) // 2
    return Kernel(
        "synthetic.cu", "draw_blocks", (PTR, U32, U32, U32, U32, PTR),
        (("BLOCK_WORDS", words), ("POOL_BLOCKS", POOL_BLOCKS)),
    )
