"""Conversations set aside and taken up again: the same bits, memory that is given and not copied, failures."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvs_core.device.host.device import HostDebug, HostDevice
from kvs_core.engine.budget import Drafting
from kvs_core.engine.checkpoints import Checkpoints
from kvs_core.engine.engine import Engine
from kvs_core.engine.parked import ParkedSessions
from kvs_core.engine.session import ParkedSession, Session
from kvs_core.engine.session_file import load_session, save_session
from kvs_core.errors import DeviceError
from kvs_core.paging.slabs import slab_of
from kvs_core.streaming import history
from tests.engine.tiny import engine, kv_settings

A = [7 + index * 31 % 190 for index in range(300)]
B = [11 + index * 17 % 190 for index in range(210)]
TAIL = range(20, 28)
POOLS = [None, 0.0, 0.3]


@pytest.fixture(params=["qwen35", "llama"])
def path(request: pytest.FixtureRequest) -> Path:
    """A model with recurrent layers, and one without."""
    return Path(request.getfixturevalue(f"tiny_{request.param}"))


@contextmanager
def session_on(
    path: Path, *, pool: float | None = None, debug: HostDebug | None = None, device: HostDevice | None = None,
    drafting: bool = False,
) -> Iterator[Session]:
    """A session on an engine whose decode steps stream too."""
    with engine(
        path, kv=kv_settings(), pool=pool, fixed=pool is not None, debug=debug, drafting=Drafting(drafting),
        device=None if device is None else lambda: device,
    ) as built:
        yield Session(built, Checkpoints(8, 1 << 30), checkpoint_tokens=64)


def go_on(session: Session) -> bytes:
    """Some tokens more, and their logits."""
    return b"".join(np.asarray(session.decode(token)).tobytes() for token in TAIL)


def alone(path: Path, prompt: list[int], rounds: int) -> list[bytes]:
    """What a conversation that never was away gives."""
    with session_on(path) as session:
        session.prefill(prompt)
        return [go_on(session) for _ in range(rounds)]


@pytest.mark.parametrize("pool", POOLS)
def test_conversations_that_alternate_have_the_bits_of_those_that_do_not(path: Path, pool: float | None) -> None:
    """Whatever the arena, with copies that dawdle and freed slots poisoned: three turns of two conversations."""
    debug = HostDebug(copy_delay=lambda: 0.0002, poison=True)
    with session_on(path, pool=pool, debug=debug) as session:
        made: dict[str, list[bytes]] = {"a": [], "b": []}
        away: dict[str, ParkedSession] = {}
        for _ in range(3):
            for name, prompt in (("a", A), ("b", B)):
                if name in away:
                    session.unpark(away.pop(name))
                else:
                    session.prefill(prompt)
                made[name].append(go_on(session))
                assert session.tokens == [*prompt, *list(TAIL) * len(made[name])]
                away[name] = session.park()
                assert (session.tokens, session.engine.committed, len(session.checkpoints)) == ([], 0, 0)
    assert made == {"a": alone(path, A, 3), "b": alone(path, B, 3)}


@pytest.mark.parametrize("pool", POOLS)
def test_one_that_was_away_goes_back_as_if_it_had_not_been(path: Path, pool: float | None) -> None:
    """To the same token, over the same checkpoints, with the same bits."""
    edited = [*A[:200], 3, 4, 5, 6]
    outcome = []
    for is_away in (False, True):
        with session_on(path, pool=pool) as session:
            session.prefill(A, border=250)
            go_on(session)
            if is_away:
                parked = session.park()
                session.prefill(B)
                session.rewind(0)
                assert parked.reusable(edited) == (200 if parked.can_rewind else 192)
                session.unpark(parked)
            places = [held.position for held in session.checkpoints]
            kept = session.keep_common(edited)
            logits = session.prefill(edited[kept:])
            outcome.append((places, kept, logits.tobytes(), go_on(session)))
    assert outcome[0] == outcome[1]


@pytest.mark.parametrize("pool", POOLS)
def test_a_fork_has_the_bits_of_one_that_went_back(path: Path, pool: float | None) -> None:
    """The first tokens of a conversation that stays aside are not read again; it goes on later as if nothing had been.
    """
    other = [*A[:100], *B]
    with session_on(path, pool=pool) as session:
        session.prefill(A)
        kept = session.keep_common(other)
        wanted = (kept, session.prefill(other[kept:]).tobytes(), go_on(session))
    with session_on(path, pool=pool) as session:
        session.prefill(A)
        parked = session.park()
        kept = parked.reusable(other)
        assert kept == (100 if parked.can_rewind else 64)
        session.fork(parked, kept)
        assert session.tokens == other[:kept]
        assert (kept, session.prefill(other[kept:]).tobytes(), go_on(session)) == wanted
        session.rewind(0)
        session.unpark(parked)
        assert [go_on(session)] == alone(path, A, 1)


def test_memory_is_given_away_and_not_copied(path: Path) -> None:
    """Parking frees what was pinned ahead of need, gives the rest away as it is, and is told of beforehand."""
    with session_on(path) as session:
        session.prefill(A)
        slabs = session.engine._kv._history._slabs
        expected = session.parked_bytes
        parked = session.park()
        assert expected == sum(part.size_bytes for part in parked.parts) > 0
        assert session.engine.report().stats.history_bytes == 0
        given = parked.sequence.history.slabs
        needed = slab_of(session.engine.geometry.pages_of(len(A)) - 1).index + 1
        assert [[id(part) for part in layer.values()] for layer in given] == [
            [id(layer[index]) for index in range(needed)] for layer in slabs
        ]
        session.unpark(parked)
        assert [[id(part) for part in layer.values()] for layer in session.engine._kv._history._slabs] == [
            [id(part) for part in layer.values()] for layer in given
        ]


def test_drafts_of_the_block_are_those_of_the_first_time(tiny_qwen35: Path) -> None:
    """The MTP block's rows and the row before it come back too."""
    with session_on(tiny_qwen35, drafting=True) as session:
        session.prefill(A[:70])

        def drafts() -> bytes:
            with session.engine.open(3) as step:
                step.draft_next(7)
                return step.logits().tobytes()

        wanted = drafts()
        parked = session.park()
        session.prefill(B)
        session.decode(3)
        assert drafts() != wanted
        session.rewind(0)
        session.unpark(parked)
        assert drafts() == wanted


def test_a_saved_session_replaces_one_that_is_streamed(path: Path, tmp_path: Path) -> None:
    """Pages of the old one that were copied ahead are not taken for pages of the new one."""
    with session_on(path, pool=0.0) as session:
        session.prefill(A)
        save_session(session, tmp_path / "a", "key")
        wanted = go_on(session)
        session.rewind(0)
        session.prefill(A[::-1])
        go_on(session)
        load_session(session, tmp_path / "a", "key")
        assert go_on(session) == wanted


class Failing(HostDevice):
    """Raises when told to; pinned memory ends at ``most_bytes``."""

    def __init__(self) -> None:
        super().__init__(1)
        self.fails = ""
        self.most_bytes = 1 << 40
        self.held_bytes = 0

    def upload(self, buffer: np.ndarray, values: np.ndarray) -> None:
        self._check("upload")
        super().upload(buffer, values)

    def download(self, buffer: np.ndarray) -> np.ndarray:
        self._check("download")
        return super().download(buffer)

    def allocate_pinned(self, size_bytes: int) -> np.ndarray:
        self._check("allocate")
        if self.held_bytes + size_bytes > self.most_bytes:
            raise DeviceError(f"{size_bytes} bytes cannot be had")
        made = super().allocate_pinned(size_bytes)
        self.held_bytes += size_bytes
        weakref.finalize(made, self._freed, size_bytes)
        return made

    def _freed(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes

    def _check(self, what: str) -> None:
        if self.fails == what:
            self.fails = ""
            raise DeviceError(f"{what} fails, as asked for")


def test_a_conversation_that_could_not_be_parked_goes_on(tiny_qwen35: Path) -> None:
    """Nothing has happened to it."""
    device = Failing()
    with session_on(tiny_qwen35, device=device) as session:
        session.prefill(A)
        device.fails = "download"
        with pytest.raises(DeviceError, match="download fails"):
            session.park()
        assert session.tokens == A
        assert [go_on(session)] == alone(tiny_qwen35, A, 1)


def test_one_whose_pages_cannot_be_sent_home_stays_where_it_is(tiny_llama: Path) -> None:
    """A copy stream that has failed does not come back; what the session says of itself is true."""
    with engine(tiny_llama, kv=kv_settings()) as counted:
        Session(counted).prefill(A)
        copies = counted._device.counters().publish_calls
    with session_on(tiny_llama, debug=HostDebug(fail_copy_at=copies)) as session:
        session.prefill(A)
        for _ in range(2):
            with pytest.raises(DeviceError, match=f"copy {copies} "):
                session.park()
            assert (session.tokens, session.engine.committed) == (A, len(A))


def test_a_session_that_could_not_be_emptied_says_that_it_is_empty(
    tiny_qwen35: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is lost until it is emptied, and no step runs on it before."""
    with session_on(tiny_qwen35) as session:
        session.prefill(A)
        ops = session.engine._device.ops
        with monkeypatch.context() as patch:
            patch.setattr(ops, "clear", lambda buffer: fail())
            with pytest.raises(DeviceError, match="as asked for"):
                session.park()
        assert (session.tokens, session.engine.committed) == ([], 0)
        with pytest.raises(DeviceError, match="the recurrent state is lost"):
            session.prefill(A)
        session.rewind(0)
        session.prefill(A)
        assert [go_on(session)] == alone(tiny_qwen35, A, 1)


def fail() -> None:
    raise DeviceError("it fails, as asked for")


@pytest.mark.parametrize("what", ["upload", "adopt"])
def test_one_that_could_not_be_taken_up_is_whole(
    tiny_qwen35: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session is empty, and a second try has the same bits."""
    device = Failing()
    with session_on(tiny_qwen35, pool=0.0, device=device) as session:
        session.prefill(A)
        parked = session.park()
        with monkeypatch.context() as patch:
            if what == "upload":
                device.fails = what
            else:
                patch.setattr(session.engine._kv.streamer, "empty", fail)
            with pytest.raises(DeviceError, match="as asked for"):
                session.unpark(parked)
        assert (session.tokens, session.engine.committed) == ([], 0)
        session.prefill(B)
        assert [go_on(session)] == alone(tiny_qwen35, B, 1)
        session.rewind(0)
        session.unpark(parked)
        assert [go_on(session)] == alone(tiny_qwen35, A, 1)


def test_a_fork_without_memory_leaves_the_session_empty_and_the_other_whole(path: Path) -> None:
    device = Failing()
    with session_on(path, device=device) as session:
        session.prefill(A)
        parked = session.park()
        device.fails = "allocate"
        with pytest.raises(DeviceError, match="no host memory for"):
            session.fork(parked, parked.reusable([*A[:130], 1]))
        assert (session.tokens, session.engine.committed) == ([], 0)
        session.unpark(parked)
        assert [go_on(session)] == alone(path, A, 1)


def test_where_memory_ends_the_least_recently_used_one_goes(tiny_llama: Path) -> None:
    """As many as it takes; when there is none left the step is refused, and nothing else changes."""
    device, other = Failing(), [*B, *A[:90]]   # long ones, whose memory goes with them
    with session_on(tiny_llama, device=device) as session:
        held = ParkedSessions(1 << 40)
        session.engine.reclaim_with(held.drop_one)
        for prompt in (A, other, A[::-1]):
            session.prefill(prompt)
            held.add(session.park())
        device.most_bytes = device.held_bytes + 1
        session.prefill(other[::-1])
        assert (len(held), held.best([*A, 1]), held.best([*other, 1]) is None) == (2, None, False)
        assert [go_on(session)] == alone(tiny_llama, other[::-1], 1)
        device.most_bytes = 1
        held.add(session.park())
        with pytest.raises(DeviceError, match="no host memory for"):
            session.prefill(A)
        assert (len(held), session.tokens, device.held_bytes) == (0, [], 0)
        device.most_bytes = 1 << 40
        session.prefill(A)
        assert [go_on(session)] == alone(tiny_llama, A, 1)


def test_a_short_one_is_copied_and_leaves_its_memory_to_the_next(path: Path) -> None:
    """It takes no more than its pages, and nothing is pinned for the one that follows, or for its own return."""
    device = Failing()
    with session_on(path, device=device) as session:
        session.prefill(B)
        kv, pinned = session.engine._kv, device.held_bytes
        expected = sum(kv.geometry.pages_of(len(B)) * size for size in kv._page_bytes)
        said = kv.parked_bytes()
        parked = session.park()
        assert parked.sequence.history.size_bytes == said == expected < pinned / 2
        assert device.held_bytes == pinned
        device.fails = "allocate"
        session.prefill(A)
        assert [go_on(session)] == alone(path, A, 1)
        session.rewind(0)
        session.unpark(parked)
        assert [go_on(session)] == alone(path, B, 1)
        assert device.fails == "allocate"   # nobody asked


def test_a_short_one_that_has_no_memory_to_come_back_to_is_whole(path: Path) -> None:
    """A long one went with its own, and there is no more: it is refused, and taken up once there is."""
    device = Failing()
    with session_on(path, device=device) as session:
        session.prefill(B)
        short = session.park()
        session.prefill(A)
        session.park()
        device.fails = "allocate"
        with pytest.raises(DeviceError, match="no host memory for"):
            session.unpark(short)
        assert (session.tokens, session.engine.committed) == ([], 0)
        device.fails = ""
        session.unpark(short)
        assert [go_on(session)] == alone(path, B, 1)


def test_short_and_long_ones_by_turns_pin_nothing_more(path: Path) -> None:
    """A long one comes with its own memory; what the short one leaves waits for its return."""
    device = Failing()
    with session_on(path, device=device) as session:
        session.prefill(A)
        long = session.park()
        session.prefill(B)
        short = session.park()
        device.fails = "allocate"
        for _ in range(3):
            session.unpark(long)
            long = session.park()
            session.unpark(short)
            short = session.park()
        assert device.fails == "allocate"   # nobody asked
        for parked, prompt in ((long, A), (short, B)):
            session.unpark(parked)
            assert [go_on(session)] == alone(path, prompt, 1)
            session.rewind(0)


def test_a_short_one_that_cannot_be_copied_takes_its_memory_along(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RAM for the copy is not there: it is set aside all the same."""

    def full(values: np.ndarray) -> np.ndarray:
        raise MemoryError

    with session_on(path) as session:
        session.prefill(B)
        with monkeypatch.context() as patch:
            patch.setattr(history, "copied", full)
            parked = session.park()
        session.prefill(A)
        assert [go_on(session)] == alone(path, A, 1)
        session.rewind(0)
        session.unpark(parked)
        assert [go_on(session)] == alone(path, B, 1)


def test_what_was_not_pinned_stays_with_the_text_it_was_for(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short one that comes back where a text had pageable memory has pinned memory once there is some."""
    device = Failing()
    monkeypatch.setattr(HostDevice, "is_host", False)
    with session_on(tiny_llama, device=device) as session:
        kept = session.engine._kv._history
        session.prefill(A)
        session.park()
        session.prefill(B)
        short = session.park()
        kept._free_spare()
        device.most_bytes = 0
        session.prefill(B[::-1])
        assert kept.has_pageable
        device.most_bytes = 1 << 40
        session.rewind(0)
        session.unpark(short)
        assert not kept.has_pageable
        assert [go_on(session)] == alone(tiny_llama, B, 1)


def test_an_empty_engine_is_parked_and_taken_up(path: Path) -> None:
    """A conversation of no tokens is one too."""
    with session_on(path) as session:
        parked = session.park()
        assert (parked.tokens, parked.sequence.history.size_bytes) == ((), 0)
        session.prefill(B)
        session.rewind(0)
        session.unpark(parked)
        assert is_empty(session.engine)


def is_empty(engine: Engine) -> bool:
    return engine.committed == 0 and engine.report().stats.active_pages == 0
