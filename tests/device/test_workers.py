"""A team does every piece once, waits for what helpers have begun and for nothing else, and leaves nothing behind."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.host import workers
from kvs_core.device.host.workers import Team
from kvs_core.errors import DeviceError

_LONG_S = 10.0   # nothing that works takes as long


@pytest.fixture
def pair() -> Iterator[Team]:
    team = Team(2)
    yield team
    team.close()


def _helpers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvs worker")}


def _soon(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + _LONG_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.lists(st.lists(st.sampled_from([0.0, 1e-5, 1e-4]), max_size=12), max_size=4))
def test_every_piece_is_done_once_before_share_returns(threads: int, jobs: list[list[float]]) -> None:
    """Whatever the pieces take, and however many threads and jobs there are."""
    team = Team(threads)
    for pauses in jobs:
        done: list[int] = []

        def work(piece: int, pauses: list[float] = pauses, done: list[int] = done) -> None:
            time.sleep(pauses[piece])
            done.append(piece)

        team.share(len(pauses), work)
        assert sorted(done) == list(range(len(pauses)))
    team.close()


def test_all_threads_are_at_work_together() -> None:
    """Three pieces that wait for each other are done by a team of three."""
    team = Team(3)
    _meet(team, 3)
    team.close()


def test_helpers_that_do_not_come_are_not_waited_for(pair: Team) -> None:
    """A helper kept busy elsewhere costs nothing: the caller does all pieces, and calls do not pile up."""
    busy, go = threading.Event(), threading.Event()

    def long(_: int) -> None:
        if threading.current_thread() in _helpers():
            busy.set()
            assert go.wait(_LONG_S)
        else:
            assert busy.wait(_LONG_S)

    other = threading.Thread(target=pair.share, args=(2, long))
    other.start()
    assert busy.wait(_LONG_S)
    for _ in range(50):
        threads = set()
        pair.share(5, lambda _, threads=threads: threads.add(threading.current_thread()))   # type: ignore[misc]
        assert threads == {threading.current_thread()}
    assert pair._calls.empty()
    assert other.is_alive()
    go.set()
    other.join(_LONG_S)
    assert not other.is_alive()


def test_a_helper_that_held_its_caller_up_is_not_called_for_a_while(
    pair: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that took longer than it would have alone is followed by a pause in proportion, and then by a new try."""
    monkeypatch.setattr(workers, "_PAUSE", 10)
    helping = threading.Event()
    threads: list[threading.Thread] = []

    def work(_: int) -> None:
        threads.append(threading.current_thread())
        if threads[-1] in _helpers():
            helping.set()
            time.sleep(0.05)
        else:
            helping.wait(_LONG_S)

    pair.share(2, work)
    lost_until = time.monotonic() + 0.3
    assert len(set(threads)) == 2
    del threads[:]
    while time.monotonic() < lost_until:
        pair.share(2, work)
    assert set(threads) == {threading.current_thread()}
    time.sleep(0.3)
    _meet(pair, 2)


def test_a_stray_delay_is_forgiven_when_more_was_saved_before(pair: Team) -> None:
    """One late helper on a quiet machine does not make the next token slow; many do."""
    pair._judge(took_s=0.001, alone_s=0.006)
    pair._judge(took_s=0.005, alone_s=0.001)
    _meet(pair, 2)
    pair._judge(took_s=1.0, alone_s=0.0)
    threads = set()
    pair.share(5, lambda _: threads.add(threading.current_thread()))
    assert threads == {threading.current_thread()}


def test_a_helpers_error_is_the_callers_and_ends_the_job(pair: Team) -> None:
    """It is raised as it is, pieces not begun are dropped, and the team goes on."""
    begun: list[int] = []
    failing = threading.Event()

    def work(piece: int) -> None:
        begun.append(piece)
        if threading.current_thread() in _helpers():
            failing.set()
            raise IndexError("from a helper")
        assert failing.wait(_LONG_S)
        time.sleep(0.001)

    with pytest.raises(IndexError, match="from a helper"):
        pair.share(10_000, work)
    assert len(begun) < 10_000
    _meet(pair, 2)


def test_the_callers_error_is_raised_once_no_helper_is_at_work(pair: Team) -> None:
    """Nothing writes into an array after the call that was given it, and pieces not begun are dropped."""
    helping, left = threading.Event(), threading.Event()
    begun: list[int] = []

    def work(piece: int) -> None:
        begun.append(piece)
        if threading.current_thread() in _helpers():
            helping.set()
            time.sleep(0.02)
            left.set()
        else:
            assert helping.wait(_LONG_S)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair.share(10, work)
    assert left.is_set()
    assert sorted(begun) == [0, 1]
    _meet(pair, 2)


def test_a_sleeping_helper_keeps_nothing_of_its_last_job(pair: Team) -> None:
    """An arena or a model's weights go when their device does, not when the next job comes."""

    class Array:
        pass

    array = Array()
    gone = weakref.ref(array)
    meeting = threading.Barrier(2)

    def work(_: int, array: Array = array) -> None:
        meeting.wait(_LONG_S)

    pair.share(2, work)
    del array, work
    assert _soon(lambda: gone() is None)


def test_close_ends_the_helpers_and_can_be_repeated() -> None:
    """A team without helpers does all on the calling thread; a team of one never had any."""
    before = _helpers()
    for threads in (1, 4):
        team = Team(threads)
        assert len(_helpers() - before) == threads - 1
        team.close()
        team.close()
        assert _helpers() == before
        threads_seen = set()
        team.share(5, lambda _, seen=threads_seen: seen.add(threading.current_thread()))   # type: ignore[misc]
        assert threads_seen == {threading.current_thread()}


def test_a_team_that_nobody_holds_ends_its_helpers() -> None:
    """Forgetting to close leaks no threads."""
    before = _helpers()
    team = Team(3)
    team.share(6, lambda _: None)
    assert len(_helpers() - before) == 2
    del team
    gc.collect()
    assert _soon(lambda: _helpers() == before)


def test_more_threads_than_the_system_gives_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the number that was wanted and what to do; the threads that were started end."""
    before = _helpers()
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if len(_helpers() - before) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(DeviceError, match="4000 threads cannot be had, the system refused after 3; use a smaller --th"):
        Team(4000)
    gc.collect()
    assert _soon(lambda: _helpers() == before)


def _meet(team: Team, threads: int) -> None:
    """Have pieces wait for each other: returns if all threads are at work together."""
    meeting = threading.Barrier(threads)
    team.share(threads, lambda _: meeting.wait(_LONG_S) and None)
