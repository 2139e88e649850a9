"""Recordings of steps: one per kind and width, made anew when the signature changes, the old one gone before."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest

from kvs_core.device.base import StepInputs
from kvs_core.engine import captured
from kvs_core.engine.captured import CapturedSteps
from kvs_core.errors import DeviceError, DeviceMemoryError
from kvs_core.memory.phases import Phase

DECODE = Phase.DECODE


class FakeStep:
    """What ``CapturedSteps`` asks of a ``KvStep``, written down."""

    def __init__(self, signature: Hashable) -> None:
        self.is_signed = signature
        self.said: list[str] = []
        self.bytes = Counter[int]()

    def signature(self, layers: range | None) -> Hashable:
        return self.is_signed, layers

    def before_launch(self) -> None:
        self.said.append("before")

    @property
    def moved(self) -> Counter[int]:
        return self.bytes.copy()

    def after_capture(self, before: Counter[int]) -> Counter[int]:
        self.said.append("after")
        assert before == self.bytes
        return Counter({3: 100})

    def not_captured(self) -> None:
        self.said.append("anew")

    def launched(self, moved: Counter[int]) -> None:
        self.bytes.update(moved)


class FakeWork:
    """Captured work that counts its launches."""

    def __init__(self, error: Exception | None) -> None:
        self.launches = 0
        self._error = error

    def launch(self, inputs: StepInputs) -> None:
        if self._error is not None:
            raise self._error
        self.launches += 1

    def elapsed_s(self) -> float | None:
        return None


class FakeDevice:
    """Counts captures, and the work of earlier ones that is still held at the next."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[FakeWork]] = []
        self.held: list[int] = []
        self.error: Exception | None = None
        self.launch_error: Exception | None = None

    def capture(self, inputs: StepInputs, work: Any) -> FakeWork:
        self.held.append(sum(made() is not None for made in self.made))
        if self.error is not None:
            raise self.error
        work()
        fresh = FakeWork(self.launch_error)
        self.made.append(weakref.ref(fresh))
        return fresh

    @property
    def launches(self) -> list[int]:
        return [work.launches for made in self.made if (work := made()) is not None]


def launch(
    steps: CapturedSteps, rows: int, signature: Hashable, kind: str = "step", layers: range | None = None
) -> list[str]:
    step: Any = FakeStep(signature)
    inputs = StepInputs(np.zeros(rows, np.int32), 0, 0, DECODE)
    launched = steps.launch((kind, rows), inputs, step, lambda: step.said.append("record"), layers)
    assert launched == (step.said[-1:] not in ([], ["anew"]))
    return list(step.said)


def test_a_step_is_recorded_once_per_kind_width_and_signature() -> None:
    """Equal signatures launch what there is; another one is recorded after the old recording has gone. A draft of the
    same width is another step, and one of other layers another signature."""
    fake: Any = FakeDevice()
    steps = CapturedSteps(fake)
    assert launch(steps, 1, "a") == ["before", "record", "after"]
    assert launch(steps, 1, "a") == ["before"]
    assert launch(steps, 4, "a") == ["before", "record", "after"]
    assert launch(steps, 1, "a") == ["before"]
    assert (steps.recorded, fake.launches) == (2, [3, 1])
    launch(steps, 1, "b")
    launch(steps, 4, "b")
    launch(steps, 4, "b")
    assert (steps.recorded, fake.launches) == (4, [1, 2])
    assert fake.held == [0, 1, 1, 1]   # of the other width alone
    assert launch(steps, 1, "b", "draft", range(2)) == ["before", "record", "after"]
    assert launch(steps, 1, "b", "draft", range(2)) == ["before"]
    assert launch(steps, 1, "b", "draft", range(3)) == ["before", "record", "after"]
    assert launch(steps, 1, "b") == ["before"]
    assert steps.recorded == 6
    steps.forget()
    assert fake.launches == []
    launch(steps, 1, "b")
    assert steps.recorded == 7


def test_what_a_capture_would_move_counts_at_each_launch() -> None:
    """Not when it is captured: before the first launch nothing has been moved."""
    fake: Any = FakeDevice()
    steps, step = CapturedSteps(fake), FakeStep("a")
    kv: Any = step
    for launches in (1, 2, 3):
        steps.launch(("step", 1), StepInputs(np.zeros(1, np.int32), 0, 0, DECODE), kv, lambda: None)
        assert step.bytes == {3: 100 * launches}


def test_a_recording_that_fails_leaves_none() -> None:
    """The old one has gone; the streamer is told in any case; the next launch records."""
    fake: Any = FakeDevice()
    steps = CapturedSteps(fake)
    launch(steps, 2, "a")
    fake.error = DeviceError("a broken part; mend it")
    step: Any = FakeStep("b")
    with pytest.raises(DeviceError, match="a broken part"):
        steps.launch(("step", 2), StepInputs(np.zeros(2, np.int32), 0, 0, DECODE), step, lambda: None)
    assert step.said == ["before", "after"]
    assert (steps.recorded, fake.launches) == (1, [])
    fake.error = None
    assert launch(steps, 2, "a") == ["before", "record", "after"]


@pytest.mark.parametrize("where", ["capture", "launch"])
def test_without_memory_nothing_is_recorded_for_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """The step is to run as it comes, with copies begun anew. What is recorded already is launched all the while; it is
    said once, with the error, until a recording goes well."""
    monkeypatch.setattr(captured, "PAUSE_STEPS", 2)
    fake: Any = FakeDevice()
    steps = CapturedSteps(fake)
    launch(steps, 4, "a")
    no_memory = DeviceMemoryError("no memory for a graph; make room")
    failed = ["before", "after", "anew"] if where == "capture" else ["before", "record", "after", "anew"]
    for _ in range(2):
        fake.error, fake.launch_error = (no_memory, None) if where == "capture" else (None, no_memory)
        assert launch(steps, 1, "a") == failed
        assert launch(steps, 1, "a") == []
        assert launch(steps, 4, "a") == ["before"]
        assert launch(steps, 1, "b") == []
    assert [record.getMessage() for record in caplog.records] == [
        "steps are not recorded, which is slower, and it is tried again every 2 steps: no memory for a graph; make room"
    ]
    fake.error = fake.launch_error = None
    assert launch(steps, 1, "b") == ["before", "record", "after"]
    fake.error = no_memory
    assert launch(steps, 2, "b") == ["before", "after", "anew"]
    assert len(caplog.records) == 2
