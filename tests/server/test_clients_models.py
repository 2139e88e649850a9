"""The official clients against the models that come first to hand: SmolLM2 and the demo model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest

from kvs_core.demo import DEMO_MODEL
from tests.server.running import running
from tests.server.test_chat import TOOL

KEY, CONTEXT = "sesame", 1024
ASKED: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
          "additionalProperties": False}  # fmt: skip


@dataclass(frozen=True)
class Clients:
    """One model, served, and both clients for it."""

    name: str
    url: str
    gpt: openai.OpenAI
    claude: anthropic.Anthropic

    def chat(self, **more: Any) -> Any:
        """A greedy chat through OpenAI's client."""
        asked: dict[str, Any] = {"model": self.name, "messages": ASKED, "max_tokens": 8, "temperature": 0}
        return self.gpt.chat.completions.create(**asked | more)


@pytest.fixture(scope="module", params=["smollm2", "demo"])
def model(request: pytest.FixtureRequest) -> Iterator[Clients]:
    """SmolLM2 has a template without tools."""
    path = DEMO_MODEL if request.param == "demo" else request.getfixturevalue("smollm2_path")
    with (
        running("-m", path, "-c", CONTEXT, "--api-key", KEY, "--alias", request.param) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as gpt,
        anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as claude,
    ):
        yield Clients(request.param, server.url, gpt, claude)


def test_chat_streaming_and_logprobs(model: Clients) -> None:
    """One answer, the same one streamed with its usage, and log-probabilities that belong to it."""
    reply = model.chat(logprobs=True, top_logprobs=3)
    [choice] = reply.choices
    text = choice.message.content
    assert reply.model == model.name
    if model.name == "smollm2":
        assert "Paris" in text
    chunks = list(model.chat(stream=True, stream_options={"include_usage": True}))
    said = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(said) == text
    assert len(list(filter(None, said))) > 1
    assert chunks[-1].usage.completion_tokens == reply.usage.completion_tokens
    tokens = choice.logprobs.content
    assert 0 < len(tokens) <= reply.usage.completion_tokens
    for token in tokens:
        tops = [each.logprob for each in token.top_logprobs]
        assert token.logprob == tops[0] == max(tops) <= 0   # greedy
        assert sum(map(math.exp, tops)) <= 1 + 1e-6
    if choice.finish_reason == "length":
        assert bytes(byte for token in tokens for byte in token.bytes).decode(errors="replace").startswith(text)


def test_tools(model: Clients) -> None:
    """A required call, whose arguments follow the tool's schema; its result sent back; none where none are wanted."""
    messages: Any = [{"role": "user", "content": "Look up the sea."}]
    reply = model.chat(messages=messages, tools=[TOOL], tool_choice="required", max_tokens=80)
    [choice] = reply.choices
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "look_up")
    arguments = json.loads(call.function.arguments)
    assert arguments["word"] in ("river", "sea")
    assert 1 <= arguments["page"] <= 9
    messages += [choice.message.model_dump(exclude_none=True),
                 {"role": "tool", "tool_call_id": call.id, "content": "The sea is salt water."}]
    answered = model.chat(messages=messages, tools=[TOOL], tool_choice="none", max_tokens=6).choices[0].message
    assert answered.content
    assert not answered.tool_calls


def test_schema(model: Clients) -> None:
    """JSON of the schema, streamed or not."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    text = model.chat(response_format=form, max_tokens=40).choices[0].message.content
    assert json.loads(text)["city"] in ("Paris", "Rome")
    chunks = model.chat(response_format=form, max_tokens=40, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_errors(model: Clients) -> None:
    """A wrong key, a body that is no JSON, a prompt that is too long, a route that is not there."""
    with pytest.raises(openai.AuthenticationError) as refused:
        model.gpt.with_options(api_key="wrong").models.list()
    assert refused.value.status_code == 401
    with pytest.raises(openai.BadRequestError, match="no JSON"):
        model.gpt.post("/chat/completions", cast_to=object, content=b'{"messages": [')
    with pytest.raises(openai.BadRequestError) as too_long:
        model.chat(messages=[{"role": "user", "content": "the sea " * 2 * CONTEXT}])
    assert isinstance(too_long.value.body, dict)
    assert too_long.value.body["type"] == "exceed_context_size_error"
    assert too_long.value.body["reason"] == "context_length_exceeded"
    assert too_long.value.body["n_prompt_tokens"] > too_long.value.body["n_ctx"] == CONTEXT
    with pytest.raises(openai.NotFoundError):
        model.gpt.with_options(base_url=f"{model.url}/v2").models.list()


def test_anthropic(model: Clients) -> None:
    """A message says what the other client's chat says, streamed or not; a wrong key and no messages are errors."""
    asked: dict[str, Any] = {"model": model.name, "messages": ASKED, "max_tokens": 8, "extra_body": {"temperature": 0}}
    reply = model.claude.messages.create(**asked)
    text = "".join(block.text for block in reply.content if block.type == "text")
    assert text == model.chat().choices[0].message.content
    with model.claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == text
    with pytest.raises(anthropic.AuthenticationError):
        model.claude.with_options(api_key="wrong").messages.create(**asked)
    with pytest.raises(anthropic.BadRequestError):
        model.claude.messages.create(**asked | {"messages": []})
