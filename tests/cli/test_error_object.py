"""``--json`` where an error or Ctrl-C ends a command before its object is there: one that tells so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvs_cli.saved_text import SavedText
from kvs_core.engine.engine import Engine
from kvs_core.engine.session import Session
from kvs_core.errors import SessionFileError
from tests.cli.conftest import Kvs

MODEL = ("-p", "x", "-n", "1", "-m")


@pytest.mark.parametrize(
    ("argv", "error", "is_open"),
    [
        ((*MODEL, "nowhere.gguf"), "nowhere.gguf: does not exist", False),
        ((*MODEL, "LLAMA", "-c", "256", "-p", "word " * 300), "the prompt has ", True),
        ((*MODEL, "LLAMA", "--rope-scale", "2", "--rope-freq-scale", "3"), "--rope-scale and --rope-freq-scale", False),
        ((*MODEL, "LLAMA", "--log-file", "/nowhere/log"), "--log-file /nowhere/log", False),
        ((*MODEL, "LLAMA", "--kv-stream-pool-mib", "1"), "KV pool too small", True),
        (("-m", "LLAMA"), "no prompt: give", False),
        (("-m", "LLAMA", "-p", "x", "--session", "/nowhere/file"), "--session /nowhere/file", False),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_an_error_before_the_text_is_an_object_too(
    kvs: Kvs, tiny_llama: Path, argv: tuple[str, ...], error: str, is_open: bool
) -> None:
    """With ``--json``: one, of an empty text, with the error and with the model once it is open. The line on stderr and
    the exit code are the same as without."""
    given = [str(tiny_llama) if part == "LLAMA" else part for part in argv]
    ended = kvs("run", *given, "--json")
    assert (ended.code, ended.out.count("\n")) == (1, 1)
    told = json.loads(ended.out)
    line = kvs("run", *given).error
    assert line.startswith(error)
    assert ended.err.splitlines()[-1] == f"error: {line}"
    assert told["error"] == line
    whole = kvs("run", *MODEL, tiny_llama, "--json").json
    assert told.keys() <= {*whole, "error"}
    assert (told["text"], told["token_ids"], told["generated_tokens"], told["stop_reason"]) == ("", [], 0, "error")
    assert told.get("model") == (whole["model"] if is_open else None)


def test_an_error_behind_the_text_stands_in_its_object(
    kvs: Kvs, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the session file cannot be written in the end: the text and why it ended are told all the same."""
    def refuse(*_: object, **__: object) -> None:
        raise SessionFileError("talk.kvs: disk full")

    whole = kvs("run", *MODEL, tiny_llama, "--temp", 0, "--json").json
    monkeypatch.setattr(SavedText, "save", refuse)
    ended = kvs("run", *MODEL, tiny_llama, "--temp", 0, "--session", tmp_path / "talk.kvs", "--json")
    assert (ended.code, ended.out.count("\n")) == (1, 1)
    told = json.loads(ended.out)
    assert told.keys() == {*whole, "error"}
    assert (told["text"], told["token_ids"], told["stop_reason"]) == (whole["text"], whole["token_ids"], "length")
    assert told["error"] == "talk.kvs: disk full"
    assert ended.err.splitlines()[-1] == "error: talk.kvs: disk full"


@pytest.mark.parametrize("flags", [("--nonsense",), ("-np", "4"), ("--config", "nowhere.yaml"), ("a", "b")])
def test_a_command_line_that_is_refused_has_no_object(kvs: Kvs, flags: tuple[str, ...]) -> None:
    """As help says: what is to be printed is not known then."""
    ended = kvs("run", "--json", *flags)
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)


@pytest.mark.parametrize("as_json", [True, False])
def test_an_interrupt_before_the_text_is_told(
    kvs: Kvs, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    """Ctrl-C while the prompt is read: the line that tells it within a text, and the object of an empty one."""
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    whole = kvs("run", *MODEL, tiny_llama, "--json").json
    monkeypatch.setattr(Session, "prefill", interrupted)
    ended = kvs("run", *MODEL, tiny_llama, *(["--json"] if as_json else []))
    assert ended.code == 130
    assert ended.err.rstrip().endswith("stop: interrupted")
    assert ended.err.count("stop: ") == 1
    if not as_json:
        assert ended.out == ""
        return
    assert ended.out.count("\n") == 1
    told = json.loads(ended.out)
    assert (told["text"], told["token_ids"], told["stop_reason"]) == ("", [], "interrupted")
    assert told["model"] == whole["model"]
    assert "error" not in told


@pytest.mark.parametrize(("kind", "steps", "tokens"), [("step", 0, 0), ("open", 2, 3)])
@pytest.mark.parametrize("error", [MemoryError(), OSError(5, "Input/output error")])
def test_errors_of_the_system_are_objects_too(
    kvs: Kvs, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: str, steps: int, tokens: int
) -> None:
    """What is no error of kvs's own, while the prompt is read and within the text."""
    opened, left = getattr(Engine, kind), iter(range(steps))

    def failing(engine: Engine, *given: Any) -> Any:
        if next(left, None) is None:
            raise error
        return opened(engine, *given)

    monkeypatch.setattr(Engine, kind, failing)
    ended = kvs("run", "-p", "x", "-n", "9", "--ignore-eos", "-m", tiny_llama, "--json")
    assert (ended.code, ended.out.count("\n")) == (1, 1)
    told = json.loads(ended.out)
    assert (told["generated_tokens"], told["stop_reason"]) == (tokens, "error")
    assert ended.err.splitlines()[-1] == f"error: {told['error']}"
    assert told["error"].startswith(("out of memory; ", "the system says: [Errno 5]"))


@pytest.mark.parametrize("command", ["info", "plan"])
def test_errors_of_info_and_plan_are_objects_too(kvs: Kvs, tiny_llama: Path, command: str) -> None:
    """With ``--json``, of the error alone."""
    for flags in ((tiny_llama, "--kv-stream-pool-mib", 1), ("nowhere.gguf",), (tiny_llama, "-m", tiny_llama)):
        ended = kvs(command, *flags, "--json")
        line = kvs(command, *flags).error
        assert (ended.code, json.loads(ended.out)) == (1, {"error": line})
        assert ended.err.splitlines()[-1] == f"error: {line}"
