"""Publisher: brings full and dirty pages home, on a stream of its own, off the critical path. Then the frontier moves.

A slot whose page is on its way may be read, but not overwritten, until ``wait_for`` has seen the page arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvs_core.device.base import Device, Fence
from kvs_core.device.operands import Buffer
from kvs_core.paging.cache import LogicalCache
from kvs_core.paging.slots import PageId
from kvs_core.streaming.history import HostHistory


@dataclass(frozen=True, slots=True)
class _Batch:
    """Copies that bring the published frontier to ``tokens`` once ``fence`` is done."""

    tokens: int
    fence: Fence


class Publisher:
    """Copies pages from their slots to the history, in batches that cover every layer."""

    def __init__(self, device: Device, cache: LogicalCache, history: HostHistory) -> None:
        self._device = device
        self._cache = cache
        self._history = history
        self._batches: deque[_Batch] = deque()

    @property
    def enqueued(self) -> int:
        """Tokens that are published or on their way."""
        return self._batches[-1].tokens if self._batches else self._cache.published

    def enqueue(self, pages: Iterable[tuple[PageId, Buffer]], tokens: int) -> None:
        """Send pages home from these slots; [0, tokens), all committed, is published when they have arrived."""
        self._device.publish.wait(self._device.compute.record())
        for page, slot in pages:
            self._device.enqueue_copy(self._history.page(page.layer, page.page), slot, self._device.publish)
        self._batches.append(_Batch(tokens, self._device.publish.record()))

    def poll(self) -> None:
        """Move the frontier over what has arrived."""
        while self._batches and self._batches[0].fence.done():
            self._arrive()

    def wait_for(self, tokens: int) -> None:
        """Block until [0, tokens) is published; it has been enqueued."""
        assert tokens <= self.enqueued, (tokens, self.enqueued)
        while self._cache.published < tokens:
            self._arrive()

    def wait_all(self) -> None:
        """Block until nothing is on its way."""
        while self._batches:
            self._arrive()

    def _arrive(self) -> None:
        batch = self._batches[0]
        batch.fence.wait()      # raises if a copy failed; the batch stays and the frontier does not move
        self._batches.popleft()
        self._cache.publish(min(batch.tokens, self._cache.committed))
