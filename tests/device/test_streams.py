"""Streams keep their order, fences tell the truth, and a failure reaches whoever waits."""

import random
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.base import Fence
from kvs_core.device.host.streams import ComputeStream, CopyStream
from kvs_core.errors import DeviceError

PATIENCE = 10.0   # seconds after which a wait in a test counts as a hang


@pytest.fixture
def stream() -> Iterator[CopyStream]:
    stream = CopyStream("copy")
    yield stream
    stream.close()


def _fail() -> None:
    raise ValueError("page 7 is missing")


def test_a_fence_is_done_when_the_work_before_it_is_finished_and_not_earlier(stream: CopyStream) -> None:
    """``done`` is false while work before the fence runs, true after it, whatever follows the fence."""
    first, second = threading.Event(), threading.Event()
    stream.enqueue_copy(10, lambda: _wait(first))
    fence = stream.record()
    stream.enqueue_copy(5, lambda: _wait(second))
    assert not fence.done()
    first.set()
    fence.wait()
    assert fence.done()
    assert not stream.record().done()
    second.set()
    stream.synchronize()
    assert stream.record().done()
    assert (stream.copied_bytes, stream.copies) == (15, 2)


def test_an_empty_stream_gives_a_done_fence(stream: CopyStream) -> None:
    """Nothing enqueued, nothing to wait for."""
    assert stream.record().done()
    stream.record().wait()


def test_a_failure_is_raised_by_every_later_call_and_by_the_fences_behind_it(stream: CopyStream) -> None:
    """The error names the stream and the cause; fences before it stay good; work after it does not run."""
    ran = []
    stream.enqueue_copy(1, lambda: ran.append("before"))
    good = stream.record()
    go = threading.Event()
    stream.enqueue_copy(1, lambda: (_wait(go), _fail()))
    behind = stream.record()
    stream.enqueue_copy(1, lambda: ran.append("after"))
    last = stream.record()
    go.set()
    for fence in (behind, last):
        with pytest.raises(DeviceError, match=r"copy stream failed.*page 7"):
            fence.wait()
        assert fence.done()
    good.wait()
    assert ran == ["before"]
    for call in (stream.record, stream.synchronize, lambda: stream.wait(good), lambda: stream.enqueue_copy(1, _fail)):
        with pytest.raises(DeviceError, match="page 7"):
            call()


def test_a_device_error_keeps_its_words(stream: CopyStream) -> None:
    """An error that is already ours is not wrapped in another sentence."""

    def work() -> None:
        raise DeviceError("the link is down; plug it in")

    stream.enqueue_copy(1, work)
    with pytest.raises(DeviceError, match=r"^the link is down; plug it in$"):
        stream.synchronize()


def test_a_stream_that_waits_for_failed_work_fails_too(stream: CopyStream) -> None:
    """What was to run after a failed copy does not run, on whichever stream."""
    other = CopyStream("publish")
    go, ran = threading.Event(), []
    stream.enqueue_copy(1, lambda: (_wait(go), _fail()))
    other.wait(stream.record())
    other.enqueue_copy(1, lambda: ran.append("late"))
    fence = other.record()
    go.set()
    with pytest.raises(DeviceError, match="page 7"):
        fence.wait()
    assert ran == []
    other.close()


def test_a_failure_does_not_touch_the_other_stream(stream: CopyStream) -> None:
    """Pages can still be published after a copy to the device failed."""
    other = CopyStream("publish")
    stream.enqueue_copy(1, _fail)
    with pytest.raises(DeviceError):
        stream.synchronize()
    ran = []
    other.enqueue_copy(1, lambda: ran.append("published"))
    other.synchronize()
    assert ran == ["published"]
    other.close()


def test_close_drops_what_has_not_begun_and_never_hangs() -> None:
    """Running work ends, waiting work is skipped, its fences raise; close may be called again; the thread is gone."""
    stream = CopyStream("closing")
    begun, go, ran = threading.Event(), threading.Event(), []
    stream.enqueue_copy(1, lambda: (begun.set(), _wait(go), ran.append("running")))
    running = stream.record()
    stream.enqueue_copy(1, lambda: ran.append("waiting"))
    waiting = stream.record()
    _wait(begun)
    closer = threading.Thread(target=stream.close)
    closer.start()
    with pytest.raises(DeviceError, match="closed"):
        _record_until_refused(stream)
    go.set()
    closer.join(PATIENCE)
    assert not closer.is_alive()
    running.wait()
    with pytest.raises(DeviceError, match="closed"):
        waiting.wait()
    assert ran == ["running"]
    stream.close()
    assert "kvs closing" not in {thread.name for thread in threading.enumerate()}


def test_the_compute_stream_counts_the_time_it_was_blocked(stream: CopyStream) -> None:
    """A done fence costs no stall; an open one costs the time until it is done; a failed one raises."""
    compute = ComputeStream()
    compute.wait(stream.record())
    compute.wait(compute.record())
    assert compute.stall_ns == 0
    stream.enqueue_copy(1, lambda: time.sleep(0.05))
    compute.wait(stream.record())
    assert compute.stall_ns > 20e6
    stream.enqueue_copy(1, _fail)
    with pytest.raises(DeviceError, match="page 7"):
        compute.wait(_recorded(stream))
    compute.synchronize()


def _recorded(stream: CopyStream) -> Fence:
    """A fence of a stream that may fail at any moment: the failure comes from here, or from waiting for it."""
    return stream.record()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("cp"), st.sampled_from("wwx")), max_size=30), st.integers(0, 2**32 - 1))
def test_any_program_of_work_and_waits_runs_in_an_order_that_its_fences_allow(
    program: list[tuple[str, str]], seed: int
) -> None:
    """Work of one stream is done in order; work after a wait is done after what the fence stands for."""
    rng = random.Random(seed)
    streams = {"c": CopyStream("copy"), "p": CopyStream("publish")}
    done: list[int] = []
    before: dict[str, list[int]] = {"c": [], "p": []}   # work that the stream's next work must follow
    must_follow: dict[int, list[int]] = {}
    for number, (name, action) in enumerate(program):
        other = "p" if name == "c" else "c"
        if action == "w":
            delay = rng.choice([0.0, 0.0, 0.0005])
            must_follow[number] = list(before[name])
            before[name].append(number)
            streams[name].enqueue_copy(1, lambda n=number, s=delay: (time.sleep(s), done.append(n)))
        else:
            streams[name].wait(streams[other].record())
            before[name] = sorted({*before[name], *before[other]})
    for stream in streams.values():
        stream.synchronize()
    place = {number: at for at, number in enumerate(done)}
    assert set(place) == set(must_follow)
    assert all(place[early] < place[late] for late, earlier in must_follow.items() for early in earlier)
    for stream in streams.values():
        stream.close()


def _record_until_refused(stream: CopyStream) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        stream.record()
        time.sleep(0.001)


def _wait(event: threading.Event) -> None:
    assert event.wait(PATIENCE)
