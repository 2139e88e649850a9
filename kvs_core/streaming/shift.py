"""A history whose rows move down over dropped ones: in place where it is the device's own memory, else through the
device, whose results go home and may stay.

    copy      pages that are taken from ─> sources        compute waits for it
    compute   sources ─> results                          publish waits for it
    publish   results ─> history                          the copy after the next waits for it

In the history no access has to wait: what a page takes lies in none before it, so copies of later pages do not touch
what goes home of earlier ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product

from kvs_core.device.base import Device, Fence
from kvs_core.device.operands import AttentionParams, Buffer
from kvs_core.errors import BudgetError
from kvs_core.paging.geometry import PageGeometry
from kvs_core.paging.shift import PageMove
from kvs_core.paging.slots import PageId
from kvs_core.streaming.history import HostHistory
from kvs_core.streaming.pools import Pools
from kvs_core.units import MIB, ceil_div, mib_ceil

_BATCH_BYTES = 8 * MIB   # of sources: the link is at its rate, and the pool is hardly touched
_AREAS = 2               # one is filled and emptied while the other is worked on


@dataclass(frozen=True, slots=True)
class ShiftLayer:
    """A layer whose rows move.   index: in the cache"""

    index: int
    geometry: PageGeometry
    params: AttentionParams


def shift_in_place(
    device: Device, history: HostHistory, layers: Sequence[ShiftLayer], moves: Sequence[PageMove]
) -> None:
    """On a device whose memory is the host's: a thread per layer."""

    def shift(layer: ShiftLayer) -> None:
        for move in moves:
            page, *sources = (history.page(layer.index, number) for number in (move.page, *move.sources))
            device.ops.shift_rows(page, sources, layer.params, layer.geometry, move)

    with ThreadPoolExecutor(os.cpu_count(), "kvs-shift") as threads:
        list(threads.map(shift, layers))


def work_bytes(layers: Sequence[ShiftLayer]) -> int:
    """Device memory with which ``ShiftThrough`` does not wait for itself."""
    return _AREAS * max((2 * _batch_pages(page_bytes) + 1) * page_bytes for page_bytes in _sizes(layers))


def shift_through(
    device: Device, history: HostHistory, pools: Pools, layers: Sequence[ShiftLayer], moves: Sequence[PageMove],
    stays: Callable[[PageId], bool],
) -> list[int]:
    """On other devices: through slots that are free, in pools where no page is resident. Those that are to be resident
    stay, the newest first, as far as slots are left for them.

    Returns the bytes copied to the device for each layer, blocks and fails as ``ShiftThrough.run`` does.
    """

    def place(layer: int, page: int) -> Buffer | None:
        kept = PageId(layer, page)
        return pools.bytes_of(kept) if pools.holds(kept) else None

    with pools.borrow(work_bytes(layers)) as work:
        for move, layer in product(reversed(moves), layers):
            page = PageId(layer.index, move.page)
            if stays(page) and pools.has_free(layer.index):
                pools.assign(page)
        moved = ShiftThrough(device, history, work).run(layers, moves, place)
        device.discard(work)
    return moved


class ShiftThrough:
    """Moves rows through the device's memory, layer by layer, in batches of pages.

    work  device memory that nobody uses, uint8:

          | sources: n + 1 pages | results: n pages | sources | results |       two areas in turn, if there is room
    """

    def __init__(self, device: Device, history: HostHistory, work: Buffer) -> None:
        self._device = device
        self._history = history
        self._work = work
        self._page_bytes = 0
        begin = device.compute.record()   # behind all that has used the memory
        self._home: tuple[Fence, Fence] = (begin, begin)   # results of the batch before the last, and of the last
        self._batches = 0

    def run(
        self, layers: Sequence[ShiftLayer], moves: Sequence[PageMove], place: Callable[[int, int], Buffer | None],
    ) -> list[int]:
        """Do all moves in every layer; returns the bytes copied to the device for each. Blocks.

        place(layer, page)  where on the device the page stays when it is done; None: nowhere

        After an error no copy is on its way, and the history is lost where the moves had begun.
        """
        self._check(layers, moves)
        device = self._device
        with ExitStack() as stack:
            for stream in (device.compute, device.publish, device.copy):
                stack.callback(stream.synchronize)
            return [self._shift(layer, moves, place) for layer in layers]

    def _check(self, layers: Sequence[ShiftLayer], moves: Sequence[PageMove]) -> None:
        needed = (max(len(move.sources) for move in moves) + 1) * max(_sizes(layers))
        if self._work.nbytes < needed:
            raise BudgetError(
                f"KV pool too small: a context shift needs {needed / MIB:.1f} MiB of it, it has "
                f"{self._work.nbytes / MIB:.1f} MiB; raise --kv-stream-arena-mib",
                needed_mib=mib_ceil(needed), given_mib=self._work.nbytes // MIB,
            )

    def _shift(
        self, layer: ShiftLayer, moves: Sequence[PageMove], place: Callable[[int, int], Buffer | None]
    ) -> int:
        size = layer.geometry.page_bytes
        pages = self._work.nbytes // size
        areas = _AREAS if pages >= 3 * _AREAS else 1
        batch = max(1, min(_batch_pages(size), (pages // areas - 1) // 2))
        moved = 0
        for first in range(0, len(moves), batch):
            # Areas of another size lie across both of before.
            in_turn = areas == _AREAS and size == self._page_bytes
            self._page_bytes = size
            self._device.copy.wait(self._home[0] if in_turn else self._home[1])
            area = self._batches % areas * (pages // areas)
            moved += self._batch(layer, moves[first : first + batch], area, place)
            self._batches += 1
        return moved

    def _batch(
        self, layer: ShiftLayer, moves: Sequence[PageMove], area: int, place: Callable[[int, int], Buffer | None]
    ) -> int:
        """The area begins at page ``area`` of the work memory; returns the bytes copied to the device."""
        device, history, size = self._device, self._history, layer.geometry.page_bytes
        moved = 0
        sources = range(moves[0].sources.start, moves[-1].sources.stop)
        at = {page: self._pages(size, area + number, 1) for number, page in enumerate(sources)}
        for run in history.runs(layer.index, sources):
            there = self._pages(size, area + run.first_page - sources.start, run.pages)
            device.enqueue_copy(there, history.run(layer.index, run), device.copy)
            moved += there.nbytes
        results = []
        for number, move in enumerate(moves):
            kept = place(layer.index, move.page)
            result = self._pages(size, area + len(sources) + number, 1) if kept is None else kept
            if move.rows < layer.geometry.page_tokens:   # its other rows stay as they are
                device.enqueue_copy(result, history.page(layer.index, move.page), device.copy)
                moved += size
            results.append(result)
        device.compute.wait(device.copy.record())
        for move, result in zip(moves, results, strict=True):
            device.ops.shift_rows(result, [at[page] for page in move.sources], layer.params, layer.geometry, move)
        device.publish.wait(device.compute.record())
        for move, result in zip(moves, results, strict=True):
            device.enqueue_copy(history.page(layer.index, move.page), result, device.publish)
        self._home = (self._home[1], device.publish.record())
        return moved

    def _pages(self, size: int, first: int, pages: int) -> Buffer:
        return self._work[first * size : (first + pages) * size]


def _sizes(layers: Sequence[ShiftLayer]) -> set[int]:
    return {layer.geometry.page_bytes for layer in layers}


def _batch_pages(page_bytes: int) -> int:
    return ceil_div(_BATCH_BYTES, page_bytes)

