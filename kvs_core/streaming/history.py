"""HostHistory: the complete KV of one cache in host memory, per layer a list of slabs. The authority.

Slabs grow with the context (``paging.slabs``). A helper thread pins the next ones before they are needed, a layer at a
time, since pinning is slow; ``ensure`` waits for it only if the context has caught up. Where no more can be pinned but
there is RAM, as in WSL, slabs are pageable from then on, until the history is another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from kvs_core.device.base import Buffer, Device
from kvs_core.device.pageable import PageableBytes, pageable_bytes
from kvs_core.device.shortage import pinning_advice_here, ram_left
from kvs_core.errors import DeviceError, DeviceMemoryError
from kvs_core.paging.schedule import Run
from kvs_core.paging.slabs import slab, slab_of
from kvs_core.units import MIB

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ParkedHistory:
    """The published pages of ``tokens`` tokens, per layer the slabs that hold them, while no cache uses them."""

    tokens: int
    page_bytes: tuple[int, ...]   # by layer
    slabs: tuple[tuple[np.ndarray, ...], ...]

    @property
    def size_bytes(self) -> int:
        """Host memory."""
        return sum(part.nbytes for slabs in self.slabs for part in slabs)

    def page(self, layer: int, page: int) -> np.ndarray:
        """The bytes of one page, uint8 [page_bytes]."""
        return _pages_of(self.slabs[layer], page, 1, self.page_bytes[layer])


class HostHistory:
    """Pages of attention layers, up to ``capacity_pages`` of each, by layer of ``page_bytes``.

    What has been published into it stays valid whatever happens on the device.

    reclaim       called where there is no more memory: gives some back, or says False
    has_pageable  some slab is not pinned
    """

    def __init__(self, device: Device, page_bytes: Sequence[int], capacity_pages: int) -> None:
        self._device = device
        self._page_bytes = tuple(page_bytes)
        self._capacity_pages = capacity_pages
        layers = len(self._page_bytes)
        self._slabs: list[list[np.ndarray]] = [[] for _ in range(layers)]
        self._helper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvs-pin")
        self._ahead: list[Future[np.ndarray] | None] = [None] * layers
        self.reclaim: Callable[[], bool] = lambda: False
        self.has_pageable = False
        self._warned = False

    @property
    def size_bytes(self) -> int:
        """Bytes held now."""
        return sum(part.nbytes for slabs in self._slabs for part in slabs)

    def is_pinned(self, layer: int, run: Run) -> bool:
        """Whether a layer's bytes of a run's pages are: only then can a step that copies them be captured."""
        return not isinstance(self._slabs[layer][slab_of(run.first_page).index], PageableBytes)

    def ensure(self, pages: int) -> None:
        """Have room for pages [0, pages) of every layer. ``DeviceError`` if there is no more; nothing is lost."""
        if pages == 0:
            return
        last = slab_of(pages - 1)
        for layer, slabs in enumerate(self._slabs):
            while len(slabs) <= last.index:
                slabs.append(self._take(layer, len(slabs)))
        # Begin with the next slab when the last one is half full, one layer after the other.
        ahead = last.index + 1
        if self.has_pageable:
            return   # there is nothing to be pinned
        if pages - last.first_page > last.pages // 2 and slab(ahead).first_page < self._capacity_pages:
            for layer in range(len(self._slabs)):
                if self._ahead[layer] is None and len(self._slabs[layer]) == ahead:
                    self._ahead[layer] = self._helper.submit(self._allocate, layer, ahead)

    def page(self, layer: int, page: int) -> Buffer:
        """The bytes of one page, uint8 [page_bytes]."""
        return self._range(layer, page, 1)

    def run(self, layer: int, run: Run) -> Buffer:
        """A layer's bytes of a run's pages, uint8 [pages * page_bytes]: one contiguous piece of one slab."""
        return self._range(layer, run.first_page, run.pages)

    def bytes_of(self, pages: int) -> int:
        """Bytes that ``hand_over`` would give away."""
        return sum(part.nbytes for slabs in self._slabs for part in slabs[: _slabs_for(pages)])

    def hand_over(self, pages: int, tokens: int) -> ParkedHistory:
        """Give away the memory of pages [0, pages), which hold ``tokens`` tokens, and be empty. Nothing is copied."""
        given = tuple(tuple(slabs[: _slabs_for(pages)]) for slabs in self._slabs)
        self._let_go()
        return ParkedHistory(tokens, self._page_bytes, given)

    def adopt(self, parked: ParkedHistory) -> None:
        """Be what was handed over, in the same memory; ``parked`` is not to be used any more."""
        self._let_go()
        self._slabs = [list(slabs) for slabs in parked.slabs]
        self.has_pageable = any(isinstance(part, PageableBytes) for slabs in self._slabs for part in slabs)

    def close(self) -> None:
        """Let go of the memory."""
        self._helper.shutdown(wait=True, cancel_futures=True)
        self._slabs = [[] for _ in self._slabs]

    def _range(self, layer: int, first_page: int, pages: int) -> Buffer:
        return _pages_of(self._slabs[layer], first_page, pages, self._page_bytes[layer])

    def _let_go(self) -> None:
        for future in self._ahead:
            if future is not None:
                future.cancel()   # one that is under way ends, and nobody takes what it has made
        self._ahead = [None for _ in self._slabs]
        self._slabs = [[] for _ in self._slabs]
        self.has_pageable = False

    def _take(self, layer: int, index: int) -> np.ndarray:
        future = self._ahead[layer]
        self._ahead[layer] = None
        if future is not None:
            with suppress(DeviceError):   # there may be memory now where there was none ahead of need
                return future.result()
        while True:
            try:
                return self._allocate(layer, index, pinned=not self.has_pageable)
            except DeviceError:
                if self.reclaim():
                    continue
                if self._device.is_host or self.has_pageable:
                    raise
            memory = self._allocate(layer, index, pinned=False)
            if not self._warned:
                self._warned = True
                LOGGER.warning("%.0f MiB of KV history are pinned, no more can be: the rest is copied more slowly; %s",
                               self.size_bytes / MIB, pinning_advice_here())  # fmt: skip
            self.has_pageable = True
            return memory

    def _allocate(self, layer: int, index: int, *, pinned: bool = True) -> np.ndarray:
        where = slab(index)
        pages = min(where.pages, self._capacity_pages - where.first_page)
        size = pages * self._page_bytes[layer]
        try:
            return self._device.allocate_pinned(size) if pinned else pageable_bytes(size, "the KV history")
        except (DeviceError, MemoryError) as error:
            raise DeviceMemoryError(
                f"no host memory for {size / MIB:.1f} MiB more of KV history ({self.size_bytes / MIB:.0f} MiB held, "
                f"{ram_left()}); lower --ctx-size or use smaller --cache-type-k and --cache-type-v"
            ) from error


def _slabs_for(pages: int) -> int:
    return slab_of(pages - 1).index + 1 if pages else 0


def _pages_of(slabs: Sequence[np.ndarray], first_page: int, pages: int, page_bytes: int) -> np.ndarray:
    """Consecutive pages of one slab."""
    where = slab_of(first_page)
    assert first_page + pages <= where.end_page, f"pages [{first_page}, {first_page + pages}) cross a slab's end"
    start = (first_page - where.first_page) * page_bytes
    return slabs[where.index][start : start + pages * page_bytes]
