"""HostHistory: the KV of one cache in host memory, per layer a number of slabs. The authority, and complete: but of
layers that slide, what windows have passed may be gone if nothing is to come back to it.

Slabs grow with the context (``paging.slabs``). A helper thread pins the next ones before they are needed, a layer at a
time, since pinning is slow; ``ensure`` waits for it only if the context has caught up. Where no more can be pinned but
there is RAM, as in WSL, slabs are pageable from then on, until the history is another.

Slabs that layers give back, see ``drop``, are used again for their next ones, as in a ring.

A sequence that is set aside takes its slabs with it, and the next one has to wait for memory to be pinned. A short one,
which fills little of what is pinned for it, is copied instead, away and back: its slabs are there for the next one, and
wait for another short one while a long one has its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from kvs_core.device.base import Device
from kvs_core.device.operands import Buffer
from kvs_core.device.pageable import PageableBytes, pageable_bytes
from kvs_core.device.shortage import pinning_advice_here, ram_left
from kvs_core.errors import DeviceError, DeviceMemoryError
from kvs_core.paging.geometry import GROUP_PAGES
from kvs_core.paging.passed import Slides
from kvs_core.paging.schedule import Run
from kvs_core.paging.slabs import Slab, slab, slab_of
from kvs_core.units import MIB, ceil_div

LOGGER = logging.getLogger(__name__)

_MOST_SPARE = 2   # slabs of a layer that slides which wait to be used again; of others one, the first
_SHORT = 2        # a sequence that fills at most a half of the first slab is


@dataclass(frozen=True, slots=True, eq=False)
class ParkedHistory:
    """The published pages of ``tokens`` tokens while no cache uses them: per layer the slabs that hold them, by number;
    of a short sequence only the pages that it has.
    """

    tokens: int
    page_bytes: tuple[int, ...]   # by layer
    slides: Slides
    slabs: tuple[Mapping[int, np.ndarray], ...]

    @property
    def size_bytes(self) -> int:
        """Host memory."""
        return sum(part.nbytes for slabs in self.slabs for part in slabs.values())

    def nearest(self, tokens: int) -> int:
        """The last position up to ``tokens`` at which all pages are there that a sequence needs to go on."""
        return self.slides.nearest(tokens, self.slabs)

    def pages(self, layer: int, tokens: int) -> Iterator[tuple[int, np.ndarray]]:
        """The pages of a layer that are there of the first ``tokens`` tokens, and the bytes of each."""
        slides = self.slides.before[layer] is not None
        for page in range(ceil_div(tokens, self.slides.page_tokens)):
            if slab_of(page, slides=slides).index in self.slabs[layer]:
                yield page, _pages_of(self.slabs[layer], page, 1, self.page_bytes[layer], slides)


class HostHistory:
    """Pages of attention layers, up to ``capacity_pages`` of each, by layer of ``page_bytes``.

    What has been published into it stays valid whatever happens on the device.

    reclaim       called where there is no more memory: gives some back, or says False
    has_pageable  some slab is not pinned
    """

    def __init__(
        self, device: Device, page_bytes: Sequence[int], capacity_pages: int, slides: Slides | None = None
    ) -> None:
        """``slides``: None: no layer does."""
        self._device = device
        self.slides = Slides((None,) * len(page_bytes), 1) if slides is None else slides
        self._page_bytes = tuple(page_bytes)
        self._capacity_pages = capacity_pages
        layers = len(self._page_bytes)
        self._slabs: list[dict[int, np.ndarray]] = [{} for _ in range(layers)]
        self._spare: list[list[np.ndarray]] = [[] for _ in range(layers)]
        self._helper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvs-pin")
        self._ahead: list[Future[np.ndarray] | None] = [None] * layers
        self._ensured: tuple[int, tuple[int, ...]] | None = None             # what holds since, see ``ensure``
        self._dropped: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # and ``drop``: each is asked every step
        self.reclaim: Callable[[], bool] = lambda: False
        self.has_pageable = False
        self._warned = False

    @property
    def size_bytes(self) -> int:
        """Bytes held now. Whatever thread asks."""
        held = sum(part.nbytes for slabs in self._slabs for part in tuple(slabs.values()))
        return held + sum(part.nbytes for spare in self._spare for part in spare)

    def is_pinned(self, layer: int, run: Run) -> bool:
        """Whether a layer's bytes of a run's pages are: only then can a step that copies them be captured."""
        return not isinstance(self._slabs[layer][self._slab_of(layer, run.first_page).index], PageableBytes)

    def ensure(self, pages: int, firsts: Sequence[int] = ()) -> None:
        """Have room for the pages of every layer from its first one, (): 0, up to ``pages``. ``DeviceError`` if there
        is no more; nothing is lost."""
        asked = (pages, tuple(firsts))
        if asked != self._ensured:
            self._ensure(pages, firsts)
            self._ensured = asked

    def _ensure(self, pages: int, firsts: Sequence[int]) -> None:
        for layer, slabs in enumerate(self._slabs):
            first = firsts[layer] if firsts else 0
            if first < pages:
                for index in range(self._slab_of(layer, first).index, self._slab_of(layer, pages - 1).index + 1):
                    if index not in slabs:
                        self._hold(layer, index)
        # Begin with the next slab when the last one is half full, one layer after the other.
        if pages == 0 or self.has_pageable:
            return   # there is nothing to be pinned
        for layer, slabs in enumerate(self._slabs):
            last = self._slab_of(layer, pages - 1)
            following = last.index + 1
            if pages - last.first_page <= last.pages // 2 or last.end_page >= self._capacity_pages:
                continue
            if self._ahead[layer] is None and not self._has_spare(layer, following) and following not in slabs:
                self._ahead[layer] = self._helper.submit(self._allocate, layer, following)

    def ensure_page(self, layer: int, page: int) -> None:
        """Have room for one page and, of a layer that sees everything, those before it. Errors as above."""
        index = self._slab_of(layer, page).index
        for each in (index,) if self._slides(layer) else range(index + 1):
            if each not in self._slabs[layer]:
                self._hold(layer, each)

    def nearest(self, tokens: int) -> int:
        """See ``ParkedHistory``."""
        return self.slides.nearest(tokens, self._slabs)

    def holds(self, layer: int, page: int) -> bool:
        """Whether there is memory for a page."""
        return self._slab_of(layer, page).index in self._slabs[layer]

    def drop(self, firsts: Sequence[int], positions: Sequence[int]) -> None:
        """Give back what lies before the first page of each layer, but for what a sequence needs to go on at one of
        these positions. Every page of it has been published."""
        asked = (tuple(firsts), tuple(positions))
        if asked != self._dropped:
            for layer, index in self._passed(firsts, positions):
                self._give_back(layer, index)
            self._dropped = asked

    def cut(self, pages: int) -> None:
        """Give back the memory of layers that slide behind the first ``pages`` pages, which hold nothing."""
        for layer, slabs in enumerate(self._slabs):
            if self._slides(layer):
                for index in [index for index in slabs if index >= _slabs_for(pages, slides=True)]:
                    self._give_back(layer, index)

    def page(self, layer: int, page: int) -> Buffer:
        """The bytes of one page, uint8 [page_bytes]."""
        return self._range(layer, page, 1)

    def run(self, layer: int, run: Run) -> Buffer:
        """A layer's bytes of a run's pages, uint8 [pages * page_bytes]: one contiguous piece of one slab."""
        return self._range(layer, run.first_page, run.pages)

    def runs(self, layer: int, pages: range) -> list[Run]:
        """Consecutive pages of a layer in pieces that lie in one slab each; no slots."""
        runs, first = [], pages.start
        while first < pages.stop:
            end = min(pages.stop, self._slab_of(layer, first).end_page)
            runs.append(Run(layer, first, end - first, 0))
            first = end
        return runs

    def bytes_of(self, pages: int) -> int:
        """Bytes that ``hand_over`` would give away."""
        return sum(part.nbytes for slabs in self._given(pages) for part in slabs.values())

    def passed_bytes(self, firsts: Sequence[int], positions: Sequence[int]) -> int:
        """Bytes that ``drop`` would give back."""
        return sum(self._slabs[layer][index].nbytes for layer, index in self._passed(firsts, positions))

    def hand_over(self, pages: int, tokens: int) -> ParkedHistory:
        """Give away pages [0, pages), which hold ``tokens`` tokens, and be empty. Only those of a short sequence are
        copied."""
        given, kept = self._given(pages), self._first_slabs()
        for layer, slabs in enumerate(given):
            if 0 not in slabs:
                continue
            if self._is_short(layer, pages):
                try:
                    slabs[0] = copied(slabs[0])
                    continue
                except MemoryError:   # nothing may fail here
                    slabs[0] = self._slabs[layer][0]
            kept[layer] = None if self._slides(layer) else next(iter(self._spare[layer]), None)
        self._let_go(kept)
        return ParkedHistory(tokens, self._page_bytes, self.slides, given)

    def adopt(self, parked: ParkedHistory) -> None:
        """Be what was handed over, in the same memory; the pages of a short sequence are copied. ``parked`` is used up.
        ``DeviceError`` if there is no memory for them: then it is not, and what is here means nothing."""
        slabs, kept = [dict(each) for each in parked.slabs], self._first_slabs()
        self.has_pageable = False   # of what was here before
        try:
            for layer, held in enumerate(slabs):
                pages = held.get(0)
                if pages is not None and pages.nbytes < self._slab_bytes(layer, 0):
                    memory, kept[layer] = kept[layer], None
                    held[0] = self._take(layer, 0) if memory is None else memory
                    held[0][: pages.nbytes] = pages
            self._let_go(kept)
            self._dropped = None
            self._slabs = slabs
        finally:
            self.has_pageable = any(isinstance(part, PageableBytes) for held in self._slabs for part in held.values())

    def close(self) -> None:
        """Let go of the memory."""
        self._helper.shutdown(wait=True, cancel_futures=True)
        self._empty()

    def _range(self, layer: int, first_page: int, pages: int) -> Buffer:
        return _pages_of(self._slabs[layer], first_page, pages, self._page_bytes[layer], self._slides(layer))

    def _slides(self, layer: int) -> bool:
        return self.slides.before[layer] is not None

    def _slab_of(self, layer: int, page: int) -> Slab:
        return slab_of(page, slides=self._slides(layer))

    def _given(self, pages: int) -> tuple[dict[int, np.ndarray], ...]:
        return tuple(
            {0: self._range(layer, 0, pages)} if self._is_short(layer, pages) else
            {index: part for index, part in slabs.items() if index < _slabs_for(pages, slides=self._slides(layer))}
            for layer, slabs in enumerate(self._slabs)
        )

    def _first_slabs(self) -> list[np.ndarray | None]:
        """Of each layer that sees everything, a first slab that is pinned and can be used again."""
        found: list[np.ndarray | None] = []
        for layer, slabs in enumerate(self._slabs):
            held = slabs.get(0)
            if held is None or isinstance(held, PageableBytes):   # memory may be had for pinning by then
                held = next(iter(self._spare[layer]), None)
            found.append(None if self._slides(layer) else held)
        return found

    def _is_short(self, layer: int, pages: int) -> bool:
        """Whether copying so many pages costs less than to pin what they lie in."""
        return not self._slides(layer) and 0 < pages * self._page_bytes[layer] * _SHORT <= self._slab_bytes(layer, 0)

    def _passed(self, firsts: Sequence[int], positions: Sequence[int]) -> list[tuple[int, int]]:
        """Layer and number of the slabs that ``drop`` gives back."""
        wanted, passed = self.slides.groups_by_layer(positions), []
        for layer, slabs in enumerate(self._slabs):
            if self._slides(layer):
                end = firsts[layer] // GROUP_PAGES   # slabs are groups
                passed += [(layer, index) for index in slabs if index < end and index not in wanted[layer]]
        return passed

    def _give_back(self, layer: int, index: int) -> None:
        self._ensured = None
        memory = self._slabs[layer].pop(index)
        self._device.discard(memory)
        if len(self._spare[layer]) < _MOST_SPARE:
            self._spare[layer].append(memory)

    def _free_spare(self) -> bool:
        """Give back what waits to be used again; False if nothing does."""
        had_some = any(self._spare)
        self._spare = [[] for _ in self._slabs]
        return had_some

    def _has_spare(self, layer: int, index: int) -> bool:
        """Whether something waits to be used again that is as large as that slab."""
        return bool(self._spare[layer]) and (index == 0 or self._slides(layer))

    def _empty(self) -> None:
        self._ensured = None
        self._slabs = [{} for _ in self._slabs]
        self._free_spare()

    def _let_go(self, kept: Sequence[np.ndarray | None]) -> None:
        """Be empty, but for the first slabs of some layers, which wait to be used again."""
        for future in self._ahead:
            if future is not None:
                future.cancel()   # one that is under way ends, and nobody takes what it has made
        self._ahead = [None for _ in self._slabs]
        self._empty()
        self._spare = [[] if memory is None else [memory] for memory in kept]
        self.has_pageable = False

    def _hold(self, layer: int, index: int) -> None:
        self._slabs[layer][index] = self._take(layer, index)
        self._ensured = self._dropped = None   # last: to take one may have dropped others

    def _take(self, layer: int, index: int) -> np.ndarray:
        future = None if self._has_spare(layer, index) else self._ahead[layer]
        if future is not None:
            self._ahead[layer] = None
            with suppress(DeviceError):   # there may be memory now where there was none ahead of need
                return future.result()
        while True:
            if self._has_spare(layer, index):
                return self._spare[layer].pop()
            try:
                return self._allocate(layer, index, pinned=not self.has_pageable)
            except DeviceError:
                if self._free_spare() or self.reclaim():
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

    def _slab_bytes(self, layer: int, index: int) -> int:
        where = slab(index, slides=self._slides(layer))
        # One that is used again is as large as any of its layer.
        pages = where.pages if self._slides(layer) else min(where.pages, self._capacity_pages - where.first_page)
        return pages * self._page_bytes[layer]

    def _allocate(self, layer: int, index: int, *, pinned: bool = True) -> np.ndarray:
        size = self._slab_bytes(layer, index)
        try:
            return self._device.allocate_pinned(size) if pinned else pageable_bytes(size, "the KV history")
        except (DeviceError, MemoryError) as error:
            raise DeviceMemoryError(
                f"no host memory for {size / MIB:.1f} MiB more of KV history ({self.size_bytes / MIB:.0f} MiB held, "
                f"{ram_left()}); lower --ctx-size or use smaller --cache-type-k and --cache-type-v"
            ) from error


def copied(pages: np.ndarray) -> np.ndarray:
    """In memory of its own. ``MemoryError`` if there is none."""
    return np.array(pages)


def _slabs_for(pages: int, *, slides: bool) -> int:
    return slab_of(pages - 1, slides=slides).index + 1 if pages else 0


def _pages_of(
    slabs: Mapping[int, np.ndarray], first_page: int, pages: int, page_bytes: int, slides: bool
) -> np.ndarray:
    """Consecutive pages of one slab."""
    where = slab_of(first_page, slides=slides)
    assert first_page + pages <= where.end_page, f"pages [{first_page}, {first_page + pages}) cross a slab's end"
    start = (first_page - where.first_page) * page_bytes
    return slabs[where.index][start : start + pages * page_bytes]
