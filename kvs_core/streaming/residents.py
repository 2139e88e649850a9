"""Residents: the resident pages of a cache come, move, go home and go. Which of them is decided elsewhere.

    grow      new, cleared           publish    their bytes to the history
    promote   from the history       evict      and release their slots
                                     move_away  to other slots

Each move is complete in itself: an error in between leaves a table that is true. Behind a page that is promoted stands
a fence until somebody has waited for it; whoever reads, moves or releases the page does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvs_core.device.base import Device, Fence
from kvs_core.paging.geometry import PageGeometry
from kvs_core.paging.slots import PageId
from kvs_core.streaming.history import HostHistory
from kvs_core.streaming.pools import Pools
from kvs_core.streaming.publisher import Publisher
from kvs_core.streaming.streamer import Streamer


class Residents:
    """The pages in ``pools``, and the copies that bring them there, move them or publish them.

    promoted  resident pages whose bytes are still on their way, and what tells that they have come
    """

    def __init__(
        self, device: Device, geometries: Sequence[PageGeometry], pools: Pools, history: HostHistory,
        publisher: Publisher, streamer: Streamer,
    ) -> None:
        """
        geometries  of the pages of each layer, all of as many tokens
        streamer    counts what is copied to the device
        """
        self.promoted: dict[PageId, Fence] = {}
        self._device = device
        self._geometries = tuple(geometries)
        self._pools = pools
        self._history = history
        self._publisher = publisher
        self._streamer = streamer

    def grow(self, pages: range) -> None:
        """New tail pages of every layer, cleared: stale scales times zero weights would be NaN."""
        for page in pages:
            for layer, geometry in enumerate(self._geometries):
                slot = self._pools.assign(PageId(layer, page))
                self._device.ops.zero_page(self._pools.memory(layer), geometry, slot)

    def promote(self, streamed: Sequence[range], firsts: Sequence[int], pages: int) -> None:
        """Bring back from the history, to stay, what is neither ``streamed`` nor resident; a layer waits for its own
        before use. ``DeviceError`` if a copy cannot be enqueued.

        streamed, firsts  by layer: the pages that stream, and the first one that anybody reads
        pages             per layer that exist
        """
        if len(self._pools) == pages * len(streamed) - sum(map(len, streamed)) - sum(firsts):
            return
        back = [
            PageId(layer, page)
            for layer, (going, first) in enumerate(zip(streamed, firsts, strict=True))
            for page in (*range(going.start), *range(max(first, going.stop), pages))
            if not self._pools.holds(PageId(layer, page))
        ]
        self._device.copy.wait(self._device.compute.record())
        for page in back:
            self._pools.assign(page)
            try:
                view = self._pools.bytes_of(page)
                self._device.enqueue_copy(view, self._history.page(page.layer, page.page), self._device.copy)
                self.promoted[page] = self._device.copy.record()
                self._streamer.moved[page.layer] += self._geometries[page.layer].page_bytes
            except BaseException:
                self._pools.release(page)   # a page in the table is one whose bytes are there, or on their way
                raise

    def publish(self, tokens: int) -> None:
        """Send home every page that holds rows of [0, tokens), all committed, which have not been sent."""
        enqueued, page_tokens = self._publisher.enqueued, self._geometries[0].page_tokens
        if enqueued < tokens:
            pages = range(enqueued // page_tokens, self._geometries[0].pages_of(tokens))
            ids = [PageId(layer, page) for page in pages for layer in range(len(self._geometries))]
            self._publisher.enqueue([(page, self._pools.bytes_of(page)) for page in ids], tokens)

    def evict(self, goes: Callable[[PageId], bool]) -> None:
        """Pages that are to stream, or that nobody reads, give their slots back; their bytes are in the history, or
        are awaited on their way there."""
        going = [page for page in self._pools if goes(page)]
        if going:
            self._publisher.wait_for((max(page.page for page in going) + 1) * self._geometries[0].page_tokens)
        for page in going:
            self._release(page)

    def release_from(self, pages: int) -> None:
        """Pages from ``pages`` on hold no committed row: their slots are free."""
        for page in [page for page in self._pools if page.page >= pages]:
            self._release(page)

    def move_away(self, *, ring_slots: int, pool_slots: int) -> None:
        """Out of slots that the ring takes or the pool gives up."""
        table = self._pools.shared
        moving = table.in_the_way(ring_slots=ring_slots, pool_slots=pool_slots)
        if moving:
            self._publisher.wait_all()
        targets = table.free_slots(range(max(ring_slots, table.ring_slots), pool_slots))
        assert len(moving) <= len(targets), "the policy kept more pages than fit"
        for page in moving:
            # On the compute stream: behind all that has read the target and, once awaited, what filled the source.
            self._wait(page)
            target = targets.pop()
            source = self._pools.bytes_of(page)
            self._device.enqueue_copy(self._pools.view(target, 1), source, self._device.compute)
            table.move_to(page, target)
            self._device.discard(source)

    def wait_layer(self, layer: int) -> None:
        """Let the compute stream wait for the pages of a layer that are on their way."""
        if not self.promoted:
            return
        for coming in [page for page in self.promoted if page.layer == layer]:
            self._wait(coming)

    def wait_from(self, pages: int) -> None:
        """The same for pages from ``pages`` on, in every layer."""
        for coming in [page for page in self.promoted if page.page >= pages]:
            self._wait(coming)

    def _release(self, page: PageId) -> None:
        self._wait(page)
        self._device.discard(self._pools.release(page))

    def _wait(self, page: PageId) -> None:
        fence = self.promoted.get(page)
        if fence is not None:
            self._device.compute.wait(fence)   # raises if the copy failed, and again whenever the page is asked for
            del self.promoted[page]
