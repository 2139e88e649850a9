"""What stays between requests: a turn reads its new tokens alone, thoughts are dropped at a border, slots are saved."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvs_core.errors import SettingsError
from tests.server.conftest import THINKING
from tests.server.running import Running, running
from tests.support.tiny_gguf import write_tiny_qwen35

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Keeps what was written, to the letter."""
FORGETFUL = THINKING.replace("<think>{{ m.reasoning_content }}</think>", "")
"""Opens thoughts, and drops them from the messages before."""
TURN = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 recurrent and 2 attention layers."""
    return write_tiny_qwen35(tmp_path_factory.mktemp("tiny") / "qwen35.gguf", seed=1)


def talk(server: Running, turns: int, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """So many turns of a conversation, which grows; the timings of each."""
    timings = []
    for _ in range(turns):
        messages.append({"role": "user", "content": f"Turn {len(messages)}: tell me more about the harbour."})
        reply = server.post("/v1/chat/completions", messages=list(messages), **TURN)
        messages.append(reply["choices"][0]["message"])
        timings.append(reply["timings"] | {"text": reply["choices"][0]["message"]})
    return timings


def total(timing: dict[str, Any]) -> int:
    """Tokens of a prompt."""
    return int(timing["cache_n"] + timing["prompt_n"])


@pytest.mark.parametrize("template", [PLAIN, FORGETFUL])
def test_a_turn_reads_its_own_tokens(path: Path, template: str) -> None:
    """A template that drops thoughts costs those and the answer again, never what was there before the last message."""
    with running("-m", path, "-c", 2048, "--chat-template", template) as server:
        timings = talk(server, 5, [])
    assert timings[0]["cache_n"] == 0
    for last, this in pairwise(timings):
        assert this["cache_n"] >= total(last) - len("<|im_start|>assistant\n<think>\n")
        assert this["prompt_n"] <= 110


def test_the_same_text_again(path: Path) -> None:
    """A completion that is asked for twice, or a little changed at its end, reads some tokens, with or without a limit
    on memory; without checkpoints it reads them all."""
    asked = {"prompt": "The harbour at night is full of lights and of boats", "n_predict": 3, "temperature": 0}
    for flags, reused in (((), True), (("-cram", 0), True), (("-ctxcp", 0), False)):
        with running("-m", path, *flags) as server:
            first = server.post("/completion", **asked)
            again = server.post("/completion", **asked)
            assert again["content"] == first["content"]
            assert (again["timings"]["prompt_n"] == 4) is reused
            changed = server.post("/completion", **asked | {"prompt": f"{asked['prompt'][:-2]}ts"})
            assert (changed["timings"]["cache_n"] > 0) is reused


def test_many_prompts_at_once(plain: Running) -> None:
    """As many as can wait; more are refused before any runs."""
    assert len(plain.post("/completion", prompt=["a"] * 128, n_predict=1)) == 128
    assert "1 to 128" in plain.post("/completion", 400, prompt=["a"] * 129, n_predict=1)["error"]["message"]


def test_a_conversation_survives_the_server(path: Path, tmp_path: Path) -> None:
    """Saved, served anew, restored: the next turn reads what it would have read, and answers the same."""
    flags = ("-m", path, "-c", 2048, "--chat-template", FORGETFUL, "--slot-save-path", tmp_path)
    messages: list[dict[str, Any]] = []
    with running(*flags) as server:
        talk(server, 3, messages)
        saved = server.post("/slots/0?action=save", filename="harbour.kvs")
        assert saved["n_written"] == (tmp_path / "harbour.kvs").stat().st_size
        [wanted] = talk(server, 1, list(messages))
    with running(*flags, "--kv-page-tokens", 64) as server:
        assert "--kv-page-tokens" in refused(server, "harbour.kvs")
    with running(*flags) as server:
        restored = server.post("/slots/0?action=restore", filename="harbour.kvs")
        assert (restored["id_slot"], restored["filename"]) == (0, "harbour.kvs")
        assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
        assert {"restore_ms"} == restored["timings"].keys()
        [again] = talk(server, 1, list(messages))
        assert (again["cache_n"], again["text"]) == (wanted["cache_n"], wanted["text"])

        (tmp_path / "bad.kvs").write_bytes((tmp_path / "harbour.kvs").read_bytes()[:-1])
        held = server.get("/slots")
        assert "checksum" in refused(server, "bad.kvs")
        assert "cannot be read" in refused(server, "none.kvs")
        assert server.get("/slots") == held
        [once_more] = talk(server, 1, list(messages))
        assert once_more["text"] == wanted["text"]


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\\b", "a\nb", "a:b", "x" * 300, " x", "x."])
def test_names_cannot_leave_the_folder(path: Path, tmp_path: Path, name: str, plain: Running) -> None:
    for action in ("save", "restore"):
        assert plain.post(f"/slots/0?action={action}", 400, filename=name)["error"]["message"] == "Invalid filename"
    assert plain.post("/slots/0?action=save", 400, filename=7)["error"]["type"] == "invalid_request_error"


@pytest.fixture(scope="module")
def plain(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server that saves."""
    with running("-m", path, "-c", 512, "--slot-save-path", tmp_path_factory.mktemp("slots")) as server:
        yield server


def test_a_folder_that_is_not_there_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--slot-save-path .*none"), running(
        "-m", path, "--slot-save-path", tmp_path / "none"
    ):
        pass


def refused(server: Running, name: str) -> str:
    """Why a file is not restored."""
    error = server.post("/slots/0?action=restore", 400, filename=name)["error"]
    assert error["message"].startswith("Unable to save or restore slot")
    return str(error["message"])
