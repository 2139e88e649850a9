"""Parts of layers in their ring: there when they are read, whatever the order of work and whatever breaks off.

Parts hold their numbers; reading one is a check that runs when the device would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.base import StepInputs
from kvs_core.device.cuda.device import CudaDevice
from kvs_core.engine.captured import CapturedSteps
from kvs_core.errors import DeviceError
from kvs_core.memory.arena import Arena, RegionRequest
from kvs_core.memory.phases import WEIGHTS_RING, Phase
from kvs_core.paging.weight_ring import WeightRing
from kvs_core.streaming.weight_stream import WeightStream
from tests.engine.test_captured_steps import FakeStep
from tests.streaming.deferred import DeferredRuntime
from tests.support.examples import examples

SIZES = st.lists(st.integers(1, 900), min_size=2, max_size=5).flatmap(
    lambda sizes: st.lists(st.integers(1, 900), min_size=len(sizes), max_size=len(sizes)).map(
        lambda others: tuple(size for pair in zip(sizes, others, strict=True) for size in pair)
    )
)


class Part:
    """A ``WeightPart`` without matrices."""

    def __init__(self, number: int, home: np.ndarray) -> None:
        self.weights: Sequence[Any] = ()
        self.home = home
        self.home[:] = 1 + number
        self.place: np.ndarray = np.empty(0)

    def lie_in(self, place: np.ndarray) -> None:
        assert place.nbytes == self.home.nbytes
        self.place = place


class Simulation:
    """Passes over parts of these sizes on a device without kernels."""

    def __init__(self, seed: int, sizes: Sequence[int], spare_bytes: int = 0) -> None:
        self.runtime = DeferredRuntime(seed)
        runtime: Any = self.runtime
        self.device = CudaDevice(runtime)
        self.device.reserve_steps(1, 1, 8)
        ring_bytes = WeightRing(tuple(sizes)).size_bytes + 256 * spare_bytes
        self.device.allocate_arena(512 + ring_bytes)
        arena = Arena(512 + ring_bytes)
        with arena.begin() as transaction:
            transaction.reserve(RegionRequest("before", 512, persistent=True))
            transaction.reserve(RegionRequest(WEIGHTS_RING, ring_bytes, persistent=True))
            transaction.commit()
        self.parts = [Part(number, self.device.allocate_pinned(size)) for number, size in enumerate(sizes)]
        self.stream = WeightStream(self.device, self.parts, arena.lease(WEIGHTS_RING))
        self.captured = CapturedSteps(self.device, self.stream)
        self.read = 0   # parts

    def run(self, fail_at: int | None = None, *, behind: bool = False) -> None:
        """A pass, which fails before or ``behind`` the reading of a part."""
        self.stream.begin()
        for number, part in enumerate(self.parts):
            if number == fail_at and not behind:
                raise DeviceError("a broken part; mend it")
            self.stream.acquire(part)
            self.runtime.compute.enqueue(lambda number=number: self._check(number))   # type: ignore[misc]
            if number == fail_at:
                raise DeviceError("a broken part; mend it")
            self.stream.release(part)

    def launch(self, kind: str, *, record: Any) -> None:
        step: Any = FakeStep("always")
        inputs = StepInputs(np.zeros(1, np.int32), 0, 0, Phase.DECODE)
        self.captured.launch((kind, 1), inputs, step, record)

    def finish(self) -> None:
        for stream in (self.runtime.compute, self.runtime.copy):
            stream.synchronize()

    def _check(self, number: int) -> None:
        assert set(self.parts[number].place.tolist()) == {1 + number}, f"part {number} is not there"
        self.read += 1


@settings(max_examples=examples(150))
@given(
    sizes=SIZES, spare=st.integers(0, 3), seed=st.integers(0, 1000),
    moves=st.lists(
        st.tuples(st.sampled_from(["run", "run", "launch", "launch", "anew", "no pass", "break", "break behind",
                                   "capture breaks", "capture breaks at its end", "launch breaks"]),
                  st.integers(0, 9)),
        min_size=1, max_size=12,
    ),
)
def test_parts_are_there_when_they_are_read(
    sizes: tuple[int, ...], spare: int, seed: int, moves: list[tuple[str, int]]
) -> None:
    """In passes as they come and captured ones, by turns, after passes that broke off anywhere, captures that failed
    and launches that did; and a captured step is recorded once."""
    made = Simulation(seed, sizes, spare)
    whole, number = 0, 0
    for kind, where in moves:
        part = where % len(sizes)
        if kind == "run":
            made.run()
        elif kind.startswith("break"):
            with pytest.raises(DeviceError):
                made.run(part, behind=kind == "break behind")
        elif kind == "no pass":
            made.launch("none", record=lambda: None)
        elif kind == "capture breaks":
            with pytest.raises(DeviceError):
                made.launch(f"broken {number}", record=lambda part=part: made.run(part, behind=True))
        elif kind == "capture breaks at its end":
            def record() -> None:
                made.run()
                raise DeviceError("a broken part; mend it")

            with pytest.raises(DeviceError):
                made.launch(f"broken {number}", record=record)
        elif kind == "launch breaks":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(made.device._launches, "launch", _refuse)
                with pytest.raises(DeviceError):
                    made.launch(f"unlaunched {number}", record=made.run)
        else:
            number += kind == "anew"
            made.launch(f"step {number}", record=made.run)
        whole += kind in ("run", "launch", "anew")
    made.finish()
    assert made.read >= whole * len(sizes)
    before = made.stream.moved
    made.run()
    made.run()
    assert made.stream.moved.since(before).size_bytes <= 2 * made.stream.pass_bytes + sum(sizes[:2])
    made.finish()


def _refuse(*_: Any) -> None:
    raise DeviceError("a broken part; mend it")


def test_each_pass_moves_each_part_once() -> None:
    """The first one finds the ring empty; every one fills it for the next. A capture itself moves nothing."""
    made = Simulation(1, (300, 500, 200, 700))
    made.run()
    assert (made.stream.moved.size_bytes, made.stream.moved.copies) == (1700 + 800, 6)
    made.run()
    made.launch("step", record=made.run)
    made.launch("step", record=made.run)
    assert (made.stream.moved.size_bytes, made.stream.moved.copies) == (4 * 1700 + 800, 18)
    assert made.device.counters().copy_bytes == made.stream.moved.size_bytes
    assert made.captured.recorded == made.runtime.graphs == 1
    made.finish()
    assert made.read == 16


@given(sizes=SIZES, spare=st.integers(0, 5))
def test_neighbours_do_not_overlap(sizes: tuple[int, ...], spare: int) -> None:
    """Nor do the last part and the first; all lie in the region from a multiple of 256 on, and a region of 256 bytes
    less would not do."""
    ring = WeightRing(sizes)
    for region in (ring.size_bytes, ring.size_bytes + 256 * spare):
        places = ring.places(region)
        assert [len(place) for place in places] == list(sizes)
        for first, second in zip(places, [*places[1:], places[0]], strict=True):
            assert first.stop <= second.start or second.stop <= first.start
            assert first.start % 256 == 0
            assert 0 <= first.start < first.stop <= region
    padded = [-(-size // 256) * 256 for size in sizes]
    assert ring.size_bytes == max(a + b for a, b in zip(padded, [*padded[1:], padded[0]], strict=True))
