"""The official clients of OpenAI and Anthropic against this server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.server.running import Running, running
from tests.server.test_chat import HELLO, TOOL

SCHEMA = {"type": "object", "properties": {"sea": {"enum": [1, 2]}}, "required": ["sea"],
          "additionalProperties": False}  # fmt: skip


@pytest.fixture(scope="module")
def keyed(llama_path: Path) -> Iterator[Running]:
    """A server that wants a key."""
    with running("-m", llama_path, "-c", 1024, "--api-key", "sesame,other", "--alias", "tiny") as server:
        yield server


@pytest.fixture
def gpt(keyed: Running) -> Iterator[openai.OpenAI]:
    """OpenAI's client."""
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="sesame", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(keyed: Running) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client."""
    with anthropic.Anthropic(base_url=keyed.url, api_key="sesame", max_retries=0) as client:
        yield client


def test_openai_chat(gpt: openai.OpenAI) -> None:
    """A chat, the same one streamed, and its log-probabilities."""
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 6, "temperature": 0}
    reply = gpt.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    text = reply.choices[0].message.content
    assert text
    assert reply.choices[0].logprobs is not None
    assert len(reply.choices[0].logprobs.content or []) == 6
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 6
    chunks = list(gpt.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert [model.id for model in gpt.models.list()] == ["tiny"]


def test_openai_tools_and_schema(gpt: openai.OpenAI) -> None:
    """A required call through the client's accumulating stream, and a JSON schema."""
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 300, "seed": 4}
    with gpt.chat.completions.stream(**asked, tools=[TOOL], tool_choice="required") as stream:
        for _ in stream:
            pass
        [call] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert call.function.name == "look_up"
    assert set(json.loads(call.function.arguments)) == {"word", "page"}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    reply = gpt.chat.completions.create(**asked, response_format=form)
    assert json.loads(reply.choices[0].message.content or "")["sea"] in (1, 2)


def test_openai_legacy_completions(gpt: openai.OpenAI) -> None:
    """The text, and the same one streamed."""
    text = gpt.completions.create(model="tiny", prompt="The river", max_tokens=5, temperature=0).choices[0].text
    chunks = gpt.completions.create(model="tiny", prompt="The river", max_tokens=5, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text


def test_openai_responses(gpt: openai.OpenAI) -> None:
    """A response, the same one through the client's accumulating stream, and one with a required call."""
    asked: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 6, "temperature": 0}
    reply = gpt.responses.create(**asked)
    assert reply.output_text
    assert reply.usage is not None
    assert reply.usage.output_tokens == 6
    with gpt.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == reply.output_text
    tool: Any = {"type": "function", **TOOL["function"]}
    asked["max_output_tokens"] = 300
    [call] = gpt.responses.create(**asked, tools=[tool], tool_choice="required").output
    assert call.type == "function_call"
    turn: list[Any] = [{"role": "user", "content": "hello"}, call.model_dump(),
                       {"type": "function_call_output", "call_id": call.call_id, "output": "salt"}]
    assert gpt.responses.create(**(asked | {"input": turn, "max_output_tokens": 3})).status == "completed"


def test_openai_errors(keyed: Running, gpt: openai.OpenAI) -> None:
    """Each kind of error is the client's class for it."""
    with pytest.raises(openai.AuthenticationError, match="Invalid API Key"):
        openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError, match="temperature"):
        gpt.chat.completions.create(model="tiny", messages=HELLO, extra_body={"temperature": "hot"})
    with pytest.raises(openai.BadRequestError, match="exceeds the available context size") as caught:
        gpt.completions.create(model="tiny", prompt=[5] * 2000)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["reason"] == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        gpt.with_options(base_url=f"{keyed.url}/v2").models.list()
    with pytest.raises(openai.InternalServerError, match="embeddings"):
        gpt.embeddings.create(model="tiny", input="x")


def test_anthropic_messages(claude: anthropic.Anthropic) -> None:
    """A message, the same one streamed, a stop sequence, the count of its tokens."""
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 12,
                             "extra_body": {"temperature": 0}, "system": "You are a river."}
    reply = claude.messages.create(**asked)
    [block] = reply.content
    assert block.type == "text"
    assert reply.stop_reason == "max_tokens"
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == block.text
        usage = stream.get_final_message().usage
    assert usage.output_tokens == 12
    counted = claude.messages.count_tokens(model="tiny", messages=HELLO, system="You are a river.")
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    stopped = claude.messages.create(**asked, stop_sequences=[block.text[3:6]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("end_turn", block.text[3:6])


def test_anthropic_tools(claude: anthropic.Anthropic) -> None:
    """A required use of a tool, its result sent back, both streamed and not."""
    tool: Any = {"name": "look_up", "input_schema": TOOL["function"]["parameters"]}
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 300, "tools": [tool],
                             "extra_body": {"temperature": 0}}
    reply = claude.messages.create(**asked, tool_choice={"type": "any"})
    [use] = reply.content
    assert use.type == "tool_use"
    assert reply.stop_reason == "tool_use"
    with claude.messages.stream(**asked, tool_choice={"type": "any"}) as stream:
        [streamed] = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert streamed.input == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "salt"}
    turn = [*HELLO, {"role": "assistant", "content": [use.model_dump()]}, {"role": "user", "content": [result]}]
    assert claude.messages.create(**(asked | {"messages": turn, "max_tokens": 2})).role == "assistant"


def test_anthropic_errors(claude: anthropic.Anthropic) -> None:
    """A request without messages, and one of another shape, are the client's to change."""
    with pytest.raises(anthropic.BadRequestError):
        claude.post("/v1/messages", body={"model": "tiny", "max_tokens": 3}, cast_to=object)
    with pytest.raises(anthropic.BadRequestError, match="text alone"):
        claude.messages.create(model="tiny", max_tokens=3, messages=[
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://x.example/"}}]}])
