"""Publisher: pages go home in batches that cover every layer, and the frontier follows what has arrived."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvs_core.device.host.device import HostDebug, HostDevice
from kvs_core.device.operands import Buffer
from kvs_core.errors import DeviceError
from kvs_core.paging.cache import LogicalCache
from kvs_core.paging.slots import PageId
from kvs_core.streaming.history import HostHistory
from kvs_core.streaming.publisher import Publisher
from tests.streaming.rig import LAYERS, PAGE, ROTATED

TOKENS = 3 * PAGE


class Bench:
    """Three committed pages per layer in slots, and copies that wait for a turn each."""

    def __init__(self, fail_copy_at: int | None = None) -> None:
        self.turns = threading.Semaphore(0)
        debug = HostDebug(copy_delay=self._wait_for_turn, poison=True, fail_copy_at=fail_copy_at)
        self.device = HostDevice(1, debug=debug)
        self.cache = LogicalCache(4 * PAGE)
        self.history = HostHistory(self.device, [ROTATED.page_bytes] * LAYERS, 4)
        self.history.ensure(3)
        self.publisher = Publisher(self.device, self.cache, self.history)
        self.cache.reserve(TOKENS)
        self.cache.settle(TOKENS)
        self.slots = np.random.default_rng(0).integers(0, 255, (3 * LAYERS, ROTATED.page_bytes), np.uint8)

    def _wait_for_turn(self) -> float:
        assert self.turns.acquire(timeout=20)
        return 0.0

    def send(self, page: int, tokens: int) -> None:
        self.publisher.enqueue([(PageId(layer, page), self.slot(layer, page)) for layer in range(LAYERS)], tokens)

    def slot(self, layer: int, page: int) -> Buffer:
        return self.slots[layer * 3 + page]

    def let(self, copies: int) -> None:
        """So many more copies may be done."""
        self.turns.release(copies)

    def is_home(self, page: int) -> bool:
        return all(
            self.history.page(layer, page).tobytes() == self.slot(layer, page).tobytes() for layer in range(LAYERS)
        )

    def close(self) -> None:
        self.turns.release(100)
        self.device.close()
        self.history.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def test_the_frontier_moves_only_when_all_layers_have_arrived(bench: Bench) -> None:
    """A page that is home in one layer and on its way in another is not published."""
    bench.send(0, PAGE)
    assert (bench.publisher.enqueued, bench.cache.published) == (PAGE, 0)
    bench.let(LAYERS - 1)
    bench.publisher.poll()
    assert bench.cache.published == 0
    bench.let(1)
    bench.publisher.wait_for(PAGE)
    assert bench.cache.published == PAGE
    assert bench.is_home(0)


def test_waiting_for_a_page_does_not_wait_for_later_ones(bench: Bench) -> None:
    """``wait_for`` returns while younger batches are under way; ``poll`` never blocks; ``wait_all`` takes the rest."""
    bench.send(0, PAGE)
    bench.send(1, 2 * PAGE)
    bench.let(LAYERS)
    bench.publisher.wait_for(PAGE)
    bench.publisher.poll()
    assert (bench.cache.published, bench.publisher.enqueued) == (PAGE, 2 * PAGE)
    bench.let(LAYERS)
    bench.publisher.wait_all()
    assert bench.cache.published == 2 * PAGE
    assert bench.is_home(1)
    bench.publisher.wait_all()


def test_what_was_never_sent_is_not_waited_for(bench: Bench) -> None:
    """Waiting for rows that are nowhere on their way would last for ever: refused."""
    bench.send(0, PAGE)
    with pytest.raises(AssertionError):
        bench.publisher.wait_for(PAGE + 1)


def test_a_part_filled_page_can_be_sent_again(bench: Bench) -> None:
    """The second copy of a page brings the rows that came since."""
    bench.send(0, 5)
    bench.let(LAYERS)
    bench.publisher.wait_all()
    assert bench.cache.published == 5
    bench.slot(1, 0)[100:200] = 3
    bench.send(0, PAGE)
    bench.let(LAYERS)
    bench.publisher.wait_all()
    assert bench.cache.published == PAGE
    assert bench.is_home(0)


@pytest.mark.parametrize("failing", range(2 * LAYERS))
def test_a_failed_copy_holds_the_frontier_where_it_was(failing: int) -> None:
    """The error comes with every wait, the frontier stays behind the failure, and what had arrived is untouched."""
    bench = Bench(fail_copy_at=failing)
    try:
        bench.send(0, PAGE)
        bench.send(1, 2 * PAGE)
        bench.let(2 * LAYERS)
        for wait in (bench.publisher.wait_all, lambda: bench.publisher.wait_for(2 * PAGE), bench.publisher.poll):
            with pytest.raises(DeviceError, match=f"copy {failing} .* failed"):
                wait()
        assert bench.cache.published == failing // LAYERS * PAGE
        assert all(bench.is_home(page) for page in range(failing // LAYERS))
    finally:
        bench.close()
