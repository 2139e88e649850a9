"""Chat, over plain HTTP: templates, thoughts, tools, forms of the reply, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.running import Running

HELLO: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a page up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "enum": ["river", "sea"]}, "page": {"type": "integer",
                           "minimum": 1, "maximum": 9}},
            "required": ["word", "page"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
ROUTE = "/v1/chat/completions"


def deltas(events: list[dict[str, Any]], key: str) -> str:
    """One field of all deltas, joined."""
    found = [event["choices"][0]["delta"].get(key) for event in events if event["choices"]]
    return "".join(each for each in found if each)


def test_the_prompt_is_the_templates(llama: Running, qwen: Running) -> None:
    """/apply-template shows it; a system message, thinking on by default, off by either switch."""
    text = llama.post("/apply-template", messages=HELLO)["prompt"]
    assert text.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
    assert qwen.post("/apply-template", messages=HELLO)["prompt"].endswith("<|im_start|>assistant\n<think>\n")
    for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        assert qwen.post("/apply-template", messages=HELLO, **off)["prompt"].endswith("<|im_start|>assistant\n")
    qwen.post("/apply-template", 400, messages=HELLO, chat_template_kwargs={"enable_thinking": "false"})
    counted = llama.post(f"{ROUTE}/input_tokens", messages=HELLO)
    assert counted["input_tokens"] == len(llama.post("/tokenize", content=text, add_special=True)["tokens"])


def test_thoughts_have_their_own_field(qwen: Running) -> None:
    """In replies and streams alike; thoughts that never end leave the content empty; ``none`` leaves all as it is."""
    grammar = 'root ::= "I wonder.\\n</think>\\n\\nIt is blue."'
    asked: dict[str, Any] = {"messages": HELLO, "max_tokens": 60, "temperature": 0}
    plain = qwen.post("/completion", prompt=qwen.post("/apply-template", messages=HELLO)["prompt"], grammar=grammar)
    assert plain["content"] == "I wonder.\n</think>\n\nIt is blue."
    cut = qwen.post(ROUTE, **asked, logit_bias=[["</think>", False]])["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == ("", "length")
    assert cut["message"]["reasoning_content"]
    whole = qwen.post(ROUTE, **asked, logit_bias=[["</think>", 100]])["choices"][0]["message"]
    assert "reasoning_content" not in whole   # it ended at once
    assert whole["content"].startswith("</think>")
    raw = qwen.post(ROUTE, **asked, reasoning_format="none")["choices"][0]["message"]
    assert raw["content"].startswith("<think>\n")
    assert "reasoning_content" not in raw
    events = qwen.stream(ROUTE, **asked, logit_bias=[["</think>", False]])
    assert deltas(events, "reasoning_content") == cut["message"]["reasoning_content"]
    assert deltas(events, "content") == ""


@pytest.mark.parametrize("budget", [0, 3])
def test_a_budget_ends_the_thoughts(qwen: Running, budget: int) -> None:
    """After so many tokens the end tag follows, then the answer; its tokens are no thoughts."""
    asked: dict[str, Any] = {"messages": HELLO, "max_tokens": 20, "temperature": 0, "logit_bias": [["a", 100]]}
    message = qwen.post(ROUTE, **asked, reasoning_budget_tokens=budget)["choices"][0]["message"]
    assert message.get("reasoning_content", "") == "a" * budget
    assert set(message["content"]) == {"a"}
    told = qwen.post(ROUTE, **asked, reasoning_budget_tokens=budget, reasoning_budget_message=" So:")
    assert told["choices"][0]["message"]["reasoning_content"] == ("a" * budget + " So:").strip()


def test_json_comes_behind_the_thoughts(qwen: Running, llama: Running) -> None:
    """A schema binds the answer and not the thoughts; behind these white space may come before it. Where properties
    are listed there are no others."""
    schema = {"type": "object", "properties": {"sea": {"enum": [1, 2]}}, "required": ["sea"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked: dict[str, Any] = {"messages": HELLO, "max_tokens": 200, "seed": 1, "response_format": form}
    for server, more in ((llama, {}), (qwen, {"reasoning_budget_tokens": 5})):
        choice = server.post(ROUTE, **asked, **more)["choices"][0]
        assert json.loads(choice["message"]["content"]) in ({"sea": 1}, {"sea": 2})
        assert choice["finish_reason"] == "stop"
        raw = server.post(ROUTE, **asked, **more, reasoning_format="none", logit_bias=[["\n", 100], [",", 100]])
        answer = raw["choices"][0]["message"]["content"].split("</think>")[-1]
        assert answer.startswith("\n\n\n\n{" if more else "{")
        assert json.loads(answer) in ({"sea": 1}, {"sea": 2})


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_a_required_call_is_made(name: str, request: pytest.FixtureRequest) -> None:
    """With tool_choice required the text is a call of a declared function with arguments by its schema, in the JSON
    notation where the template knows no tools and in XML where it does; streamed, the fragments join to the same."""
    server: Running = request.getfixturevalue(name)
    asked: dict[str, Any] = {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "max_tokens": 300,
             "seed": 4, "reasoning_budget_tokens": 2, "parallel_tool_calls": False}  # fmt: skip
    choice = server.post(ROUTE, **asked)["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == ""
    assert (call["type"], call["function"]["name"], len(call["id"])) == ("function", "look_up", 32)
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["page"] in range(1, 10)
    assert isinstance(arguments["word"], str)
    events = server.stream(ROUTE, **asked)
    parts = [part for event in events if event["choices"]
             for part in event["choices"][0]["delta"].get("tool_calls", [])]
    assert parts[0]["function"]["name"] == "look_up"
    assert {part["index"] for part in parts} == {0}
    assert json.loads("".join(part["function"]["arguments"] for part in parts)) == arguments
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_earlier_calls_reach_the_prompt(llama: Running, qwen: Running) -> None:
    """Calls and their results are in the prompt, with a template for tools or without; ``none`` shows tools all the
    same."""
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "sea"}'}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "salt"}]  # fmt: skip
    for server in (llama, qwen):
        text = server.post("/apply-template", messages=messages, tools=[TOOL], tool_choice="none")["prompt"]
        assert "look_up" in text
        assert '{"word": "sea"}' in text
        assert "salt" in text
        assert "Looks a page up." in text


def test_a_trailing_assistant_message_is_continued(llama: Running) -> None:
    """The prompt ends with its text, the reply begins with it, a stream has only what is new."""
    messages = [*HELLO, {"role": "assistant", "content": "The river"}]
    assert llama.post("/apply-template", messages=messages)["prompt"].endswith("\n\nThe river")
    asked: dict[str, Any] = {"messages": messages, "max_tokens": 5, "temperature": 0}
    content = llama.post(ROUTE, **asked)["choices"][0]["message"]["content"]
    assert content.startswith("The river")
    assert deltas(llama.stream(ROUTE, **asked), "content") == content.removeprefix("The river")
    llama.post(ROUTE, 400, messages=[*messages, messages[-1]])


def test_logprobs_and_usage(llama: Running) -> None:
    """``logprobs`` with ``top_logprobs``; usage in a stream only when asked for; the cache shows in the usage."""
    asked: dict[str, Any] = {"messages": HELLO, "max_tokens": 3, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    llama.post(ROUTE, **asked)
    reply = llama.post(ROUTE, **asked)
    content = reply["choices"][0]["logprobs"]["content"]
    assert [len(each["top_logprobs"]) for each in content] == [2, 2, 2]
    usage = reply["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    events = llama.stream(ROUTE, **asked, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3
    assert sum(len(event["choices"][0].get("logprobs", {}).get("content", [])) for event in events[:-1]) == 3
    assert not any("usage" in event for event in llama.stream(ROUTE, **asked))
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}


@pytest.mark.parametrize("body", [
    {},
    {"messages": "hello"},
    {"messages": []},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": HELLO, "tools": [{"type": "function"}]},
    {"messages": HELLO, "tools": [TOOL], "grammar": 'root ::= "x"'},
    {"messages": HELLO, "tool_choice": "perhaps"},
    {"messages": HELLO, "response_format": {"type": "poem"}},
    {"messages": HELLO, "top_logprobs": 3},
    {"messages": HELLO, "n": 2},
    {"messages": HELLO, "temperature": "hot"},
    {"messages": HELLO, "stream": "yes"},
    {"messages": HELLO, "continue_final_message": True},
])  # fmt: skip
def test_what_is_refused(llama: Running, body: dict[str, Any]) -> None:
    """One line that says what is wrong, with status 400."""
    error = llama.post(ROUTE, 400, **body)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert "\n" not in error["message"]
