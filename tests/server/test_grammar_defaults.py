"""``kvs serve --grammar`` and ``--json-schema``: the rule of requests that bring none of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Kvs, kvs
from tests.server.conftest import THINKING
from tests.server.running import Running, running
from tests.server.test_chat import HELLO, TOOL
from tests.support.tiny_gguf import write_tiny_qwen35

__all__ = ["kvs"]

SEA = {"type": "object", "properties": {"sea": {"enum": [1, 2]}}, "required": ["sea"], "additionalProperties": False}
LETTERS = 'root ::= [a-c]{3}'


@pytest.fixture(scope="module")
def ruled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose texts are a schema's JSON, with a template that knows thoughts and tools."""
    folder = tmp_path_factory.mktemp("ruled")
    path = write_tiny_qwen35(folder / "qwen35.gguf", seed=1)
    (folder / "sea.json").write_text(json.dumps(SEA))
    with running("-m", path, "-c", 512, "--chat-template", THINKING, "-jf", folder / "sea.json") as server:
        yield server


def text(server: Running, **body: Any) -> str:
    """A sampled completion."""
    reply: str = server.post("/completion", prompt="The river", n_predict=200, seed=4, **body)["content"]
    return reply


def test_it_holds_where_a_request_says_nothing(ruled: Running) -> None:
    """Of completions and chats, streamed or not."""
    seas = ({"sea": 1}, {"sea": 2})
    assert json.loads(text(ruled)) in seas
    assert json.loads(text(ruled, grammar=None)) in seas
    chat: dict[str, Any] = {"messages": HELLO, "max_tokens": 200, "seed": 4, "reasoning_effort": "none"}
    reply = ruled.post("/v1/chat/completions", **chat)
    assert json.loads(reply["choices"][0]["message"]["content"]) in seas
    deltas = [event["choices"][0]["delta"].get("content") for event in ruled.stream("/v1/chat/completions", **chat)]
    assert "".join(filter(None, deltas)) == reply["choices"][0]["message"]["content"]


def test_a_request_has_its_own(ruled: Running) -> None:
    """Another grammar, another schema, none, or tools, whose calls have a form of their own."""
    assert set(text(ruled, grammar=LETTERS)) <= set("abc")
    assert json.loads(text(ruled, json_schema={"const": "x"})) == "x"
    assert not text(ruled, grammar="", ignore_eos=True).lstrip().startswith('{"sea"')
    chat: dict[str, Any] = {"messages": HELLO, "max_tokens": 300, "seed": 4, "reasoning_effort": "none"}
    form = {"type": "json_schema", "json_schema": {"schema": {"const": "x"}}}
    reply = ruled.post("/v1/chat/completions", **chat, response_format=form)
    assert json.loads(reply["choices"][0]["message"]["content"]) == "x"
    reply = ruled.post("/v1/chat/completions", **chat, tools=[TOOL], tool_choice="required")
    [call] = reply["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "look_up"
    reply = ruled.post("/v1/chat/completions", **chat, tools=[TOOL], tool_choice="none")
    assert json.loads(reply["choices"][0]["message"]["content"]) in ({"sea": 1}, {"sea": 2})
    rules: tuple[dict[str, Any], ...] = ({"tools": [TOOL]}, {"json_schema": {}})
    for rule in rules:
        error = ruled.post("/v1/chat/completions", 400, **chat, **rule, grammar=LETTERS)["error"]
        assert "cannot be combined" in error["message"]


@pytest.mark.parametrize(("flags", "words"), [
    (("--grammar", "root ::= nothing"), "--grammar: failed to parse grammar: rule nothing is not defined"),
    (("-jf", "none.json"), "--json-schema-file none.json: No such file"),
])  # fmt: skip
def test_what_is_no_rule_keeps_it_from_serving(
    kvs: Kvs, llama_path: Path, flags: tuple[str, ...], words: str
) -> None:
    """The error comes at the start, before the weights are read, not with every request."""
    ended = kvs("serve", "-m", llama_path, "--port", 0, "--device", "cpu", *flags)
    assert words in ended.error
    assert "loading weights" not in ended.err
