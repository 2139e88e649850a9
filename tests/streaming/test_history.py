"""HostHistory: slabs that grow with the context, pinned ahead of need, and errors that lose nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.device.host.device import HostDebug, HostDevice
from kvs_core.errors import DeviceError
from kvs_core.paging.passed import Slides, first_page
from kvs_core.paging.schedule import Run, plan_schedule
from kvs_core.paging.slabs import slab, slab_of
from kvs_core.streaming import history as module
from kvs_core.streaming.history import HostHistory
from tests.streaming.rig import LAYERS, ROTATED

SIZE = ROTATED.page_bytes


class CountingDevice(HostDevice):
    """Notes every pinned allocation and the thread that asked for it."""

    def __init__(self, debug: HostDebug | None = None) -> None:
        super().__init__(1, debug=debug)
        self.asked: list[tuple[int, str]] = []

    def allocate_pinned(self, size_bytes: int) -> np.ndarray:
        self.asked.append((size_bytes, threading.current_thread().name))
        return super().allocate_pinned(size_bytes)


@contextmanager
def history(capacity: int, debug: HostDebug | None = None) -> Iterator[tuple[CountingDevice, HostHistory]]:
    device = CountingDevice(debug)
    made = HostHistory(device, [ROTATED.page_bytes] * LAYERS, capacity)
    try:
        yield device, made
    finally:
        device.close()
        made.close()


def by_thread(device: CountingDevice, helper: bool) -> int:
    return sum(("kvs-pin" in name) == helper for _, name in device.asked)


@given(st.lists(st.integers(0, 200), max_size=12), st.integers(1, 200))
def test_every_page_has_bytes_of_its_own_that_stay(lengths: list[int], capacity: int) -> None:
    """Whatever the growth: pages hold what was put into them, runs are the same bytes, nothing beyond the capacity."""
    with history(capacity) as (_, made):
        filled = 0
        for length in lengths:
            length = min(length, capacity)
            made.ensure(length)
            for page in range(filled, length):
                for layer in range(LAYERS):
                    made.page(layer, page)[:] = (7 * page + layer) % 251
            filled = max(filled, length)
        for run in plan_schedule([range(filled)] * LAYERS, ring_slots=16, run_pages=16).runs:
            stored = made.run(run.layer, run).reshape(run.pages, SIZE)
            expected = (7 * np.arange(run.first_page, run.end_page) + run.layer) % 251
            assert (stored == expected[:, None]).all()
        for layer in range(LAYERS):
            assert all((made.page(layer, page) == (7 * page + layer) % 251).all() for page in range(filled))
        held = slab_of(filled - 1).end_page if filled else 0
        assert made.size_bytes == LAYERS * SIZE * min(held, capacity)


def test_nothing_is_held_until_it_is_used() -> None:
    """A large context costs nothing at first, then the first slab."""
    with history(1024) as (device, made):
        made.ensure(0)
        assert (made.size_bytes, device.asked) == (0, [])
        made.ensure(1)
        assert made.size_bytes == LAYERS * slab(0).pages * SIZE


def test_the_next_slab_is_pinned_ahead_by_a_helper() -> None:
    """Once the last slab is more than half full the helper pins the next, for every layer: growth pins nothing."""
    with history(1024) as (device, made):
        made.ensure(8)
        assert by_thread(device, helper=True) == 0
        made.ensure(9)
        made._helper.submit(lambda: None).result()   # behind all that was submitted
        assert device.asked[LAYERS:] == [(slab(1).pages * SIZE, name) for _, name in device.asked[LAYERS:]]
        assert by_thread(device, helper=True) == LAYERS
        for pages in range(10, 200):
            made.ensure(pages)
        assert by_thread(device, helper=False) == LAYERS
        assert by_thread(device, helper=True) == LAYERS * slab_of(198).index


@pytest.mark.parametrize(
    ("capacity", "slabs"), [(7, [7]), (16, [16]), (23, [16, 7]), (64, [16, 48]), (70, [16, 48, 6])]
)
def test_the_last_slab_ends_with_the_context(capacity: int, slabs: list[int]) -> None:
    """Nothing is pinned that no page can use, neither now nor ahead."""
    sizes = [pages * SIZE for pages in slabs]
    with history(capacity) as (device, made):
        made.ensure(capacity)
        made._helper.submit(lambda: None).result()
        assert [size for size, _ in device.asked] == sizes * LAYERS
    with history(capacity) as (device, made):
        for pages in range(1, capacity + 1):   # each slab but the first comes from the helper
            made.ensure(pages)
            made._helper.submit(lambda: None).result()
        assert [size for size, _ in device.asked] == [size for size in sizes for _ in range(LAYERS)]
        assert by_thread(device, helper=True) == LAYERS * (len(slabs) - 1)


def test_a_jump_takes_all_slabs_in_between() -> None:
    """A long prompt's first step finds its pages."""
    with history(1024) as (_, made):
        made.ensure(65)
        assert made.run(1, Run(1, 64, 1, 0)).nbytes == SIZE
        for first_page in (15, 63):
            with pytest.raises(AssertionError, match="cross a slab's end"):
                made.run(0, Run(0, first_page, 2, 0))


@pytest.mark.parametrize("failing", range(2 * LAYERS))
def test_without_pinned_memory_nothing_is_lost_and_the_next_call_may_succeed(failing: int) -> None:
    """The error says how much was asked for and held; what is there stays, and a later call tries again. A helper that
    failed ahead of need has failed nobody: who needs the memory asks again."""
    with history(1024, HostDebug(fail_alloc_at=failing)) as (_, made):
        for pages in (16, 64):
            if pages == 16 and failing < LAYERS:
                with pytest.raises(DeviceError, match=r"no host memory for .* MiB more .*--ctx-size"):
                    made.ensure(pages)
            made.ensure(pages)
            for layer in range(LAYERS):
                made.page(layer, pages - 1)[:] = pages
        assert all((made.page(layer, pages - 1) == pages).all() for layer in range(LAYERS) for pages in (16, 64))


def test_closing_gives_the_memory_back() -> None:
    """Also with an allocation under way."""
    with history(1024) as (_, made):
        made.ensure(9)
        assert all(made._ahead)
        made.close()
        assert made.size_bytes == 0


def test_a_layer_that_slides_uses_its_slabs_again() -> None:
    """A window goes over 200 pages and each asks for no more memory than the first ones did; what a position needs that
    is to be gone back to stays, with its bytes; the other layer has everything."""
    device = CountingDevice(HostDebug(poison=True))
    made = HostHistory(device, [SIZE, SIZE], 200, Slides((None, 3), 32))
    try:
        for page in range(200):
            first = first_page(3, page)
            made.ensure(page + 1, [0, first])
            for layer in range(2):
                made.page(layer, page)[:] = page % 251
            made.drop([0, first], [17 * 32 + 5])
            assert all((made.page(1, held)[0]) == held % 251 for held in range(first, page + 1))
            made._helper.submit(lambda: None).result()
        of_one = 4 * SIZE
        assert [size for size, _ in device.asked].count(of_one) == 5   # the first three, one ahead, one for what stays
        assert sorted(made._slabs[1]) == [3, 4, 49]
        assert [int(made.page(1, page)[0]) for page in range(12, 18)] == list(range(12, 18))
        assert made.nearest(200 * 32 - 1) == 200 * 32 - 1
        assert made.nearest(190 * 32) == 20 * 32   # behind page 19, which shares a group with 16 and 17
        assert [int(made.page(0, page)[0]) for page in (0, 199)] == [0, 199]
        made.cut(13)
        assert sorted(made._slabs[1]) == [3]
        assert made.size_bytes == 200 * SIZE + (1 + 2) * of_one   # two wait to be used again
    finally:
        device.close()
        made.close()


def test_where_memory_ends_what_waits_to_be_used_again_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that slides has given back two groups: they make room for another layer's slab, and nobody is asked."""
    device = HostDevice(1)
    made = HostHistory(device, [SIZE] * 2, 64, Slides((1, None), 32))
    allocate, most = device.allocate_pinned, (3 * 4 + 16 + 48 - 8) * SIZE

    def limited(size_bytes: int) -> np.ndarray:
        if made.size_bytes + size_bytes > most:
            raise DeviceError(f"{size_bytes} bytes cannot be had")
        return allocate(size_bytes)

    asked: list[bool] = []
    made.reclaim = lambda: bool(asked.append(True))
    try:
        made.ensure(8, [0, 0])
        made.drop([8, 0], ())
        monkeypatch.setattr(device, "allocate_pinned", limited)
        made.ensure_page(1, 63)
        assert (made.size_bytes, asked) == ((16 + 48) * SIZE, [])
        made.ensure_page(0, 0)
        with pytest.raises(DeviceError, match="no host memory for"):
            made.ensure(40, [16, 0])
        assert asked
    finally:
        device.close()
        made.close()


def test_a_step_that_changes_nothing_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for the same again, ``ensure`` looks at no slab and ``drop`` at no position, which 62 layers and 32
    checkpoints would feel in every step. What was held anew, given back or taken up is looked at; layers that see as
    many pages share what their positions need."""
    looked, wanted = Mock(wraps=slab_of), Mock(wraps=Slides.groups)
    monkeypatch.setattr(module, "slab_of", looked)
    monkeypatch.setattr(Slides, "groups", lambda *args: wanted(*args))

    def seen(call: Callable[[], object]) -> tuple[int, int]:
        looked.reset_mock()
        wanted.reset_mock()
        call()
        return looked.call_count, wanted.call_count

    device = HostDevice(1)
    made = HostHistory(device, [SIZE] * 5, 200, Slides((1, None, 1, 3, 1), 32))
    try:
        firsts = [8, 0, 8, 4, 8]
        made.ensure(10)
        assert seen(lambda: made.drop(firsts, (70, 300))) == (0, 4)   # two positions of two kinds of layers
        assert seen(lambda: made.drop(firsts, (70, 300))) == (0, 0)
        assert [sorted(slabs) for slabs in made._slabs] == [[0, 2], [0], [0, 2], [0, 1, 2], [0, 2]]
        made.ensure(10, firsts)
        assert seen(lambda: made.ensure(10, firsts)) == (0, 0)
        assert seen(lambda: made.drop(firsts, (300,))) == (0, 2)
        assert seen(lambda: made.ensure(10, firsts))[0] > 0
        made.ensure_page(0, 5)
        assert seen(lambda: made.drop(firsts, (300,)))[1] == 2
        assert sorted(made._slabs[0]) == [2]
        made.cut(0)
        made.ensure(10, firsts)
        assert sorted(made._slabs[0]) == [2]
        parked = made.hand_over(10, 320)
        made.ensure(10, firsts)
        assert sorted(made._slabs[0]) == [2]
        made.drop(firsts, ())
        made.adopt(replace(parked, slabs=tuple({0: np.zeros(64 * SIZE, np.uint8)} for _ in range(5))))
        made.drop(firsts, ())
        assert [sorted(slabs) for slabs in made._slabs] == [[], [0], [], [], []]
        made.ensure(10, firsts)
        assert sorted(made._slabs[0]) == [2]
    finally:
        device.close()
        made.close()
