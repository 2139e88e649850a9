"""What is set aside, and for whom: short prompts do not push long conversations out, a restored one pushes out none."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from kvs_core.units import MIB
from tests.server.running import Running, running
from tests.server.scrapes import scrape
from tests.support.tiny_gguf import write_tiny_gemma3, write_tiny_qwen35

LONG = [7 + index * 31 % 190 for index in range(200)]
SHORT = [[20 + number, *range(100, 112)] for number in range(6)]
ANSWER: dict[str, Any] = {"n_predict": 6, "temperature": 0, "ignore_eos": True, "return_tokens": True}


@pytest.fixture(params=["qwen35", "llama"])
def path(request: pytest.FixtureRequest, llama_path: Path, tmp_path: Path) -> Path:
    """A model with recurrent layers, and one without."""
    return write_tiny_qwen35(tmp_path / "qwen35.gguf", seed=1) if request.param == "qwen35" else llama_path


def serve(path: Path, *flags: object) -> Any:
    """A server for a context of 1024 tokens, which takes 1 or 2 MiB of history, in ubatches of 64."""
    return running("-m", path, "-c", 1024, "-ub", 64, "--metrics", *flags)


def say(server: Running, tokens: list[int], cached: int = 0) -> list[int]:
    """The tokens, of which so many need not be read, and those of the answer."""
    reply = server.post("/completion", prompt=tokens, **ANSWER)
    assert reply["timings"]["cache_n"] == cached
    return [*tokens, *reply["tokens"]]


def go_on(server: Running, tokens: list[int]) -> list[int]:
    """A conversation's next turn, which reads its own tokens, and the last one of the answer before, alone."""
    return say(server, [*tokens, 5, 6, 7], len(tokens) - 1)


@pytest.mark.usefixtures("none_is_short")
def test_short_prompts_do_not_push_out_a_long_conversation(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is room for one: the long one keeps it, turn after turn, and the log says what the short ones lacked."""
    caplog.set_level(logging.INFO)
    with serve(path, "--cache-ram", 3) as server:
        told = say(server, LONG)
        for _ in range(2):
            for prompt in SHORT:
                say(server, prompt)
            told = go_on(server, told)
            assert scrape(server.http)["kvs:parked_conversations"] == 1   # the last short one: there was room again
    lines = [each for each in caplog.messages if "is not kept" in each]
    assert len(lines) == 2 * (len(SHORT) - 1)   # the last ones found room
    for line in lines:
        assert "a conversation of 18 tokens is not kept: it needs " in line
        assert "MiB, of --cache-ram 3 MiB it may have " in line


def test_short_conversations_are_kept_where_there_is_room(path: Path) -> None:
    """Beside a long one, and each other."""
    with serve(path) as server:
        told = [say(server, prompt) for prompt in (LONG, *SHORT)]
        for tokens in told:
            go_on(server, tokens)


def test_short_conversations_take_no_more_than_their_pages(llama_path: Path) -> None:
    """One page of 128 KiB in each of 4 layers: three fit in 2 MiB, where what is pinned for one takes 2 MiB."""
    with serve(llama_path, "--cache-ram", 2) as server:
        told = [say(server, prompt) for prompt in SHORT[:4]]
        found = scrape(server.http)
        assert (found["kvs:parked_conversations"], found["kvs:parked_bytes"] < 1.6 * MIB) == (3, True)
        for tokens in told:
            go_on(server, tokens)


@pytest.mark.usefixtures("none_is_short")
def test_a_long_conversation_that_has_no_room_is_told_of(llama_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With what it needs, and the limit."""
    caplog.set_level(logging.INFO)
    with serve(llama_path, "--cache-ram", 1) as server:
        say(server, LONG)
        say(server, SHORT[0])
    assert ("a conversation of 205 tokens is not kept: it needs 2.0 MiB, of --cache-ram 1 MiB it may have 1.0"
            in caplog.messages)


def test_restore_sets_the_conversation_in_hand_aside(path: Path, tmp_path: Path) -> None:
    """As another prompt would: both go on with their own tokens."""
    with serve(path, "--slot-save-path", tmp_path) as server:
        first = say(server, LONG)
        assert server.post("/slots/0?action=save", filename="first.kvs")["n_saved"] == len(first) - 1
        server.post("/slots/0?action=erase")
        second = say(server, LONG[::-1])
        assert scrape(server.http)["kvs:parked_conversations"] == 0
        server.post("/slots/0?action=restore", filename="first.kvs")
        assert scrape(server.http)["kvs:parked_conversations"] == 1
        go_on(server, first)
        go_on(server, second)


def test_restoring_what_goes_on_with_the_conversation_in_hand_keeps_no_second_one(path: Path, tmp_path: Path) -> None:
    """What is in hand is the beginning of what comes."""
    with serve(path, "--slot-save-path", tmp_path) as server:
        told = say(server, LONG)
        server.post("/slots/0?action=save", filename="talk.kvs")
        server.post("/slots/0?action=restore", filename="talk.kvs")
        assert scrape(server.http)["kvs:parked_conversations"] == 0
        go_on(server, told)


def test_restoring_a_longer_conversation_keeps_the_end_of_the_one_in_hand(path: Path, tmp_path: Path) -> None:
    """The file begins with all that is in hand, but a model with recurrent layers could not go back to where it ends:
    the only checkpoint of the file lies behind."""
    with serve(path, "--slot-save-path", tmp_path, "--ctx-checkpoints", 1) as server:
        told = say(server, LONG)
        say(server, [*told, *LONG[:150]], len(told) - 1)
        server.post("/slots/0?action=save", filename="talk.kvs")
        server.post("/slots/0?action=erase")
        assert say(server, LONG) == told
        server.post("/slots/0?action=restore", filename="talk.kvs")
        reply = server.post("/completion", prompt=[*told, 5, 6, 7], **ANSWER)
        assert reply["timings"]["cache_n"] >= len(told) - 1


@pytest.mark.parametrize("is_whole", [False, True])
def test_restoring_a_file_without_what_windows_have_passed_keeps_its_own_beginning(
    tmp_path: Path, is_whole: bool
) -> None:
    """A file of a server without --swa-full begins with all that is in hand, but nobody could go back to where that
    ends: it is set aside, as it is not for a file that is whole."""
    path = write_tiny_gemma3(tmp_path / "gemma3.gguf", seed=2, window=40)
    flags = "--kv-page-tokens", 32, "--slot-save-path", tmp_path
    with serve(path, *flags, *(["--swa-full"] if is_whole else ["--ctx-checkpoints", 0])) as server:
        told = say(server, LONG)
        say(server, [*told, *LONG, *LONG[:150]], len(told) - 1)
        server.post("/slots/0?action=save", filename="talk.kvs")
    with serve(path, *flags, "--swa-full") as server:
        assert say(server, LONG) == told
        server.post("/slots/0?action=restore", filename="talk.kvs")
        assert scrape(server.http)["kvs:parked_conversations"] == (0 if is_whole else 1)
        say(server, [*told, 5, 6, 7], len(told) if is_whole else len(told) - 1)


@pytest.mark.parametrize("fault", ["damaged", "short", "foreign", "missing"])
def test_a_file_that_does_not_fit_changes_nothing(path: Path, tmp_path: Path, fault: str) -> None:
    """Neither the conversation in hand, nor those that are set aside, nor their number."""
    with serve(path, "--slot-save-path", tmp_path, "-ctk", "f16" if fault == "foreign" else "q8_0") as server:
        say(server, LONG[50:])
        server.post("/slots/0?action=save", filename="talk.kvs")
    data = bytearray((tmp_path / "talk.kvs").read_bytes())
    data[len(data) // 2] ^= fault == "damaged"
    (tmp_path / "talk.kvs").write_bytes(data[:-100] if fault == "short" else data)
    if fault == "missing":
        (tmp_path / "talk.kvs").unlink()
    with serve(path, "--slot-save-path", tmp_path, "-ctk", "q8_0") as server:
        told = [say(server, tokens) for tokens in (LONG[::-1], LONG)]
        before, slots = scrape(server.http), server.get("/slots")
        error = server.post("/slots/0?action=restore", 400, filename="talk.kvs")["error"]["message"]
        assert error.startswith("Unable to save or restore slot: ")
        after = scrape(server.http)
        assert after["kvs:parked_conversations"] == before["kvs:parked_conversations"] == 1
        assert after["kvs:parked_bytes"] == before["kvs:parked_bytes"]
        assert server.get("/slots") == slots
        for tokens in reversed(told):
            go_on(server, tokens)
