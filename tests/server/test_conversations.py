"""Several conversations with one server: each turn reads its own tokens alone, while memory allows."""

from __future__ import annotations

import threading
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from kvs_cli.server import slot
from kvs_core.device.host.device import HostDevice
from kvs_core.engine.checkpoints import Checkpoints
from kvs_core.engine.engine import Engine
from kvs_core.engine.parked import ParkedSessions
from kvs_core.engine.session import Session
from kvs_core.errors import DeviceError
from kvs_core.units import MIB
from tests.engine.test_parked import Failing
from tests.engine.tiny import engine, kv_settings
from tests.server.running import Running, running
from tests.server.scrapes import scrape
from tests.support.tiny_gguf import write_tiny_gemma3, write_tiny_qwen35

ONE_OFF = [9, *range(100, 112)]
SHARED = [7 + index * 31 % 190 for index in range(120)]


@pytest.fixture(scope="module")
def qwen_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 recurrent and 2 attention layers."""
    return write_tiny_qwen35(tmp_path_factory.mktemp("tiny") / "qwen35.gguf", seed=1)


@pytest.fixture(params=["qwen35", "llama", "gemma3"])
def path(request: pytest.FixtureRequest, tmp_path: Path, qwen_path: Path, llama_path: Path) -> Path:
    """A model with recurrent layers, one without, and one whose windows of 40 tokens pass most of a text."""
    if request.param == "gemma3":
        return write_tiny_gemma3(tmp_path / "gemma3.gguf", seed=2, window=40)
    return qwen_path if request.param == "qwen35" else llama_path


class Talk:
    """A conversation in tokens: nothing depends on a template, and different ones share what they are given to share.
    """

    def __init__(self, server: Running, number: int, shared: list[int] | None = None) -> None:
        self.server = server
        self.number = number
        self.tokens = [*(shared or ()), 20 + number]
        self.told: list[tuple[list[int], str]] = []
        self.timings: list[dict[str, Any]] = []

    def turn(self) -> int:
        """Say something and note the answer; tokens of the prompt that were not read."""
        self.tokens += [30 + (self.number * 37 + len(self.tokens) * 11 + index * 7) % 150 for index in range(25)]
        reply = self.server.post(
            "/completion", prompt=self.tokens, n_predict=6, temperature=0, n_probs=2, return_tokens=True,
            ignore_eos=True,
        )
        self.tokens += reply["tokens"]
        self.told.append((reply["tokens"], str(reply["completion_probabilities"])))
        self.timings.append(reply["timings"])
        return int(reply["timings"]["cache_n"])

    @property
    def read_its_own_tokens_alone(self) -> bool:
        """Each turn but the first found all tokens of the last one, but for its last, which had not been run."""
        return all(
            this["cache_n"] == last["cache_n"] + last["prompt_n"] + last["predicted_n"] - 1
            for last, this in pairwise(self.timings)
        )


def serve(path: Path, *flags: object) -> Any:
    """A server for a context of 1024 tokens: at most 4 pages in a layer, but for small ones where windows pass them."""
    small = ("--kv-page-tokens", 32) if "gemma3" in path.name else ()
    return running("-m", path, "-c", 1024, *small, *flags)


def alternate(server: Running, talks: int, turns: int) -> list[Talk]:
    """So many conversations, turn by turn."""
    made = [Talk(server, number) for number in range(talks)]
    for _ in range(turns):
        for talk in made:
            talk.turn()
    return made


def test_conversations_that_alternate(path: Path) -> None:
    """Three of them, and requests in between that keep nothing: all have the tokens, the probabilities and the counts
    of conversations that have the server to themselves."""
    with serve(path) as server:
        talks = [Talk(server, number) for number in range(3)]
        for turn in range(4):
            for talk in talks:
                talk.turn()
                if turn > 0:
                    server.post("/completion", prompt=ONE_OFF, n_predict=2, cache_prompt=turn == 1)
        for talk in talks:
            assert talk.read_its_own_tokens_alone
    with serve(path, "--cache-ram", 0) as server:
        for talk in talks:
            single = Talk(server, talk.number)
            for _ in range(4):
                single.turn()
            assert single.read_its_own_tokens_alone
            assert single.told == talk.told


def test_without_memory_each_turn_begins_anew(path: Path) -> None:
    """--cache-ram 0."""
    with serve(path, "--cache-ram", 0) as server:
        talks = alternate(server, talks=2, turns=3)
        assert [timing["cache_n"] for talk in talks for timing in talk.timings] == [0] * 6


def test_no_limit_on_memory(path: Path) -> None:
    """--cache-ram -1."""
    with serve(path, "--cache-ram", -1) as server:
        assert all(talk.read_its_own_tokens_alone for talk in alternate(server, talks=5, turns=2))


@pytest.mark.usefixtures("none_is_short")
def test_the_least_recently_used_conversation_goes_first(llama_path: Path) -> None:
    """4 pages of 128 KiB in each of 4 layers are 2 MiB for a conversation: two can be set aside."""
    with serve(llama_path, "--cache-ram", 5) as server:
        talks = [Talk(server, number) for number in range(4)]
        for number in (0, 1, 0, 2, 3):
            talks[number].turn()
        assert [talks[number].turn() > 0 for number in (2, 0, 1)] == [True, True, False]


def test_a_machine_that_has_no_ram_to_spare(llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is set aside, and what was goes."""
    with serve(llama_path) as server:
        talks = alternate(server, talks=2, turns=1)
        monkeypatch.setattr(slot, "available_ram_bytes", lambda: slot.LEAST_FREE_BYTES - 1)
        server.post("/completion", prompt=ONE_OFF, n_predict=2)
        assert [talk.turn() for talk in talks] == [0, 0]


def test_a_conversation_that_could_not_be_taken_up_is_not_lost(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request fails, with the device's words; the next one for it, and for the one in hand then, read little."""
    with serve(path) as server:
        talks = alternate(server, talks=2, turns=1)
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "unpark", fail)
            error = server.post("/completion", 500, prompt=[*talks[0].tokens, 1], n_predict=1)["error"]
            assert error["message"] == "the device is on fire"
        for talk in talks:
            talk.turn()
            assert talk.read_its_own_tokens_alone


def fail(*_given: object) -> NoReturn:
    raise DeviceError("the device is on fire")


def test_what_conversations_share_is_read_once(path: Path) -> None:
    """A second one begins with a copy of what it shares with the first, which stays whole; a recurrent model can share
    up to a checkpoint, and the end of a prompt is one. From then on both read their own tokens alone."""
    with serve(path) as server:
        server.post("/completion", prompt=SHARED, n_predict=0)
        talks = [Talk(server, number, SHARED) for number in range(3)]
        for _ in range(3):
            for talk in talks:
                talk.turn()
        assert [talk.timings[0]["cache_n"] for talk in talks] == [len(SHARED)] * 3
        assert all(talk.read_its_own_tokens_alone for talk in talks)
    with serve(path, "--cache-ram", 0) as server:
        for talk in talks:
            server.post("/slots/0?action=erase")
            server.post("/completion", prompt=SHARED, n_predict=0)
            single = Talk(server, talk.number, SHARED)
            for _ in range(3):
                single.turn()
            assert single.told == talk.told


def test_counters_tell_of_what_was_taken_up(llama_path: Path) -> None:
    """/metrics and /slots count the tokens of a conversation that was away as they count those of one that was not."""
    with serve(llama_path, "--metrics") as server:
        talks = alternate(server, talks=2, turns=2)
        cached = sum(timing["cache_n"] for talk in talks for timing in talk.timings)
        assert scrape(server.http)["llamacpp:prompt_tokens_cached_total"] == cached
        [shown] = server.get("/slots")
        assert shown["n_prompt_tokens_cache"] == talks[1].timings[1]["cache_n"] > 0


@pytest.mark.usefixtures("none_is_short")
def test_metrics_tell_what_is_set_aside(llama_path: Path) -> None:
    """How many conversations, and their bytes: 2 MiB of pages each and a little more. Two fit; going on with one of
    them sets another aside."""
    with serve(llama_path, "--cache-ram", 5, "--metrics") as server:
        assert parked(server) == (0, 0)
        talks = [Talk(server, number) for number in range(4)]
        counts = []
        for talk in (*talks, talks[2]):
            talk.turn()
            counts.append(parked(server)[0])
        assert counts == [0, 1, 2, 2, 2]
        assert 4 * MIB <= parked(server)[1] <= 5 * MIB


@pytest.mark.usefixtures("none_is_short")
def test_metrics_tell_at_once_what_had_to_go(llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a request runs that found no memory for its pages until a conversation was given up for it."""
    with serve(llama_path, "--metrics") as server:
        alternate(server, talks=2, turns=1)
        before = parked(server)
        gone = threading.Event()
        drop_one, allocate = ParkedSessions.drop_one, HostDevice.allocate_pinned

        def give_up(sessions: ParkedSessions, **options: Any) -> bool:
            gone.set()
            return drop_one(sessions, **options)

        def allocate_then(device: HostDevice, size_bytes: int) -> np.ndarray:
            return allocate(device, size_bytes) if gone.is_set() else fail()

        monkeypatch.setattr(ParkedSessions, "drop_one", give_up)
        monkeypatch.setattr(HostDevice, "allocate_pinned", allocate_then)
        long = {"prompt": [9] * 100, "n_predict": 800, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/completion", json=long) as reply:
            lines = reply.iter_lines()   # dropping it would close the connection
            next(lines)
            assert gone.is_set()
            assert parked(server) == before   # the first went, the second was set aside
            assert scrape(server.http)["llamacpp:requests_processing"] == 1
        assert before[0] == 1
        assert server.idle()


def parked(server: Running) -> tuple[float, float]:
    """Conversations that are set aside, and their bytes, as told."""
    seen = scrape(server.http)
    return seen["kvs:parked_conversations"], seen["kvs:parked_bytes"]


def test_erase_save_and_restore_are_of_the_one_in_hand(path: Path, tmp_path: Path) -> None:
    """Those that are set aside stay as they are, and a restored one takes nobody's place."""
    with serve(path, "--slot-save-path", tmp_path) as server:
        talks = alternate(server, talks=3, turns=1)
        held = len(talks[2].tokens) - 1   # of 32
        assert server.post("/slots/0?action=save", filename="c.kvs")["n_saved"] == held
        assert server.post("/slots/0?action=erase")["n_erased"] == held
        assert server.post("/slots/0?action=erase")["n_erased"] == 0
        assert talks[0].turn() == held
        server.post("/slots/0?action=restore", filename="c.kvs")   # the first one is set aside again
        assert [talks[number].turn() for number in (2, 1, 0)] == [held, held, 2 * held]


@pytest.mark.parametrize("missing", [None, 1, 2, 3, 100])
def test_a_prompt_that_parts_is_exact_whatever_had_to_go(qwen_path: Path, missing: int | None) -> None:
    """``missing`` checkpoints have no room beside the rest: what is kept of the prompt is what the engine holds, its
    logits are those of a conversation that went back there, and where nothing fits all checkpoints stay."""
    told = [7 + index * 31 % 190 for index in range(300)]
    prompt = [*told[:200], *range(20, 180)]
    with engine(qwen_path, kv=kv_settings()) as built:
        session = Session(built, Checkpoints(8, 1 << 30), checkpoint_tokens=64)
        session.prefill(told)
        one = session.checkpoints[0].size_bytes
        most = 1 << 40 if missing is None else max(0, session.parked_bytes - missing * one)
        kept = slot.Conversation(session, "", None, ParkedSessions(most)).begin(prompt, reuse=True)
        assert kept == built.committed == len(session.tokens)
        assert kept == (128 if missing == 3 else 192)
        logits = session.prefill(prompt[kept:])
    with engine(qwen_path, kv=kv_settings()) as built:
        session = Session(built)
        session.prefill(prompt[:kept])
        assert session.prefill(prompt[kept:]).tobytes() == logits.tobytes()


def test_where_memory_ends_checkpoints_of_the_one_in_hand_go(tmp_path: Path) -> None:
    """What the history keeps for them is used again, first what waits to be; two stay. The text has the same bits, and
    what is left of its checkpoints is true."""
    gemma3 = write_tiny_gemma3(tmp_path / "gemma3.gguf", seed=2, window=40)
    told = [7 + index * 31 % 190 for index in range(1500)]
    outcome = []
    for ends in (False, True):
        device = Failing()
        with engine(gemma3, kv=kv_settings(), context=2048, device=partial(lambda made: made, device)) as built:
            session = Session(built, built.make_checkpoints(64, 1 << 30), checkpoint_tokens=64)
            slot.Conversation(session, "", None, ParkedSessions(1 << 30))
            session.prefill(told[:800])
            if ends:
                device.most_bytes = device.held_bytes
            before = len(session.checkpoints)
            logits = session.prefill(told[800:]).tobytes()
            assert 2 <= len(session.checkpoints) < before if ends else len(session.checkpoints) > before
            places = [held.position for held in session.checkpoints]
            assert session.keep_common([*told[: places[0]], 1, 2]) == places[0]
            outcome.append(logits)
    assert outcome[0] == outcome[1]


def test_where_memory_ends_the_one_that_is_copied_stays(llama_path: Path) -> None:
    """To let go of it would free nothing. The request fails, and nothing is lost."""
    told = [7 + index * 31 % 190 for index in range(900)]
    device = Failing()
    with engine(llama_path, kv=kv_settings(), context=1024, device=partial(lambda made: made, device)) as built:
        session = Session(built)
        conversation = slot.Conversation(session, "", None, ParkedSessions(1 << 30))
        session.prefill(told)
        device.most_bytes = device.held_bytes
        with pytest.raises(DeviceError):
            conversation.begin([*told[:700], *range(50)], reuse=True)
        assert len(conversation.parked) == 1
        device.most_bytes = 1 << 40
        assert conversation.begin([*told, 1], reuse=True) == 900
