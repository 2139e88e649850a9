"""``POST /v1/messages``: Anthropic's request in OpenAI's shape, and a chat's events as Anthropic's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvs_cli.server.chat import Chat
from kvs_cli.server.chat_replies import Answer, ChatEvents
from kvs_cli.server.errors import ApiError, bad_request
from kvs_cli.server.fields import Fields, missing, refuse
from kvs_cli.server.generation import Event, Finished, Piece, Started, Task
from kvs_cli.server.http import frame
from kvs_cli.server.replies import Names, Whole
from kvs_core.formats.chat_output import ChatEvent, Thought
from kvs_core.formats.tool_calls import CallArguments, CallStart, Text, random_id

_PASSED = ("temperature", "top_p", "top_k", "chat_template_kwargs", "stream")
_BILLING = re.compile(r"(x-anthropic-billing-header.*?cch=)[^;]*;")   # changes with each request, and so breaks reuse


def to_openai(body: Fields) -> Fields:
    """The request as ``read_chat`` takes it; fields of neither are dropped. ApiError for another shape."""
    if "messages" not in body:
        raise missing("messages")
    messages: list[dict[str, Any]] = []
    if "system" in body:
        messages.append({"role": "system", "content": _BILLING.sub(r"\1fffff;", _text(body["system"], "system"))})
    for index, message in enumerate(body.array("messages")):
        if not isinstance(message, dict):
            refuse(f"messages[{index}]", message, "an object")
        messages += _messages(message, f"messages[{index}]")
    request: dict[str, Any] = {name: body[name] for name in _PASSED if name in body}
    request |= {"messages": messages, "max_tokens": body.whole("max_tokens", 4096, least=0)}
    if "stop_sequences" in body:
        request["stop"] = body.array("stop_sequences")
    if "tools" in body:
        request["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.array("tools"))]
    if "tool_choice" in body:
        kind = body.object("tool_choice").text("type", "auto")
        request["tool_choice"] = "required" if kind in ("any", "tool") else kind
    thinking = body.object("thinking")
    if thinking.text("type") == "enabled":
        request["reasoning_budget_tokens"] = thinking.whole("budget_tokens", 10000, least=0)
    elif thinking.text("type") == "disabled":
        request["chat_template_kwargs"] = {"enable_thinking": False} | dict(body.object("chat_template_kwargs"))
    return Fields(request)


class AnthropicFormat:
    """One message. Blocks come in the order of the text: thinking, text, tool uses."""

    def __init__(self, chat: Chat, task: Task, names: Names) -> None:
        self._chat = chat
        self._task = task
        self._names = names
        self._events = ChatEvents(chat)
        self._id = f"msg_{random_id()}"
        self._block = -1
        self._kind = ""   # of the block that is open

    def frames(self, index: int, event: Event) -> Iterable[bytes]:
        """See ``Format``."""
        if isinstance(event, Started):
            message = self._message([], None, None) | {"usage": self._usage(event.cached, 0)}
            yield _frame("message_start", {"message": message})
        elif isinstance(event, Piece | Finished):
            for each in self._events.of(event):
                yield from self._delta(each)
            if isinstance(event, Finished):
                yield from self._close()
                delta = {"stop_reason": _reason(event, self._events.calls), "stop_sequence": event.stop_word or None}
                usage = {"output_tokens": event.timings.predicted_n}
                yield _frame("message_delta", {"delta": delta, "usage": usage})
                yield _frame("message_stop", {})

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """See ``Format``."""
        yield frame({"type": "error"} | error.body(), "error")

    def end(self) -> Iterable[bytes]:
        """See ``Format``."""
        return ()

    def whole(self, outcomes: Sequence[Whole]) -> object:
        """See ``Format``."""
        [outcome] = outcomes
        answer = Answer.of(self._chat, outcome.piece.text)
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.content or not (answer.reasoning or answer.calls):
            content.append({"type": "text", "text": answer.content})
        for call in answer.calls:
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.arguments)})
        end = outcome.end
        reply = self._message(content, _reason(end, len(answer.calls)), end.stop_word or None)
        return reply | {"usage": self._usage(end.timings.cache_n, end.timings.predicted_n)}

    def _delta(self, event: ChatEvent) -> Iterable[bytes]:
        match event:
            case Thought(text):
                yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                yield self._change({"type": "thinking_delta", "thinking": text})
            case Text(text):
                yield from self._open("text", {"type": "text", "text": ""})
                yield self._change({"type": "text_delta", "text": text})
            case CallStart(_, call_id, name):
                yield from self._close()
                yield from self._open("tool_use", {"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case CallArguments(_, text):
                yield self._change({"type": "input_json_delta", "partial_json": text})

    def _open(self, kind: str, block: dict[str, Any]) -> Iterable[bytes]:
        if self._kind == kind:
            return
        yield from self._close()
        self._block += 1
        self._kind = kind
        yield _frame("content_block_start", {"index": self._block, "content_block": block})

    def _change(self, delta: dict[str, Any]) -> bytes:
        return _frame("content_block_delta", {"index": self._block, "delta": delta})

    def _close(self) -> Iterable[bytes]:
        if not self._kind:
            return
        if self._kind == "thinking":
            yield self._change({"type": "signature_delta", "signature": ""})
        self._kind = ""
        yield _frame("content_block_stop", {"index": self._block})

    def _message(self, content: list[dict[str, Any]], reason: str | None, stop: str | None) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "content": content, "model": self._names.model,
            "stop_reason": reason, "stop_sequence": stop,
        }  # fmt: skip

    def _usage(self, cached: int, written: int) -> dict[str, int]:
        return {
            "cache_read_input_tokens": cached, "input_tokens": len(self._task.prompt) - cached,
            "output_tokens": written,
        }  # fmt: skip


def _frame(event: str, value: dict[str, Any]) -> bytes:
    return frame({"type": event} | value, event)


def _reason(end: Finished, calls: int) -> str:
    if end.stop not in ("eos", "word"):
        return "max_tokens"
    return "tool_use" if calls else "end_turn"


def _messages(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """One message, in which tool results may stand between texts, as one or more."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{where}.role must be user or assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise bad_request(f"{where}.content must be a string or an array of blocks")
    made: list[dict[str, Any]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        at = f"{where}.content[{index}]"
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(text)}:
                thoughts.append(text)
            case {"type": "redacted_thinking"}:
                continue
            case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": dict(arguments)}:
                function = {"name": name, "arguments": arguments}
                calls.append({"id": call_id, "type": "function", "function": function})
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                answer = _text(block.get("content") or "", at)
                made.append({"role": "tool", "tool_call_id": call_id, "content": answer})
            case {"type": "image"} | {"type": "document"}:
                raise bad_request(f"{at}: this model reads text alone")
            case _:
                raise bad_request(f"{at} is no block of a known type")
    if texts or thoughts or calls or not made:
        said: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
        if thoughts:
            said["reasoning_content"] = "\n".join(thoughts)
        if calls:
            said["tool_calls"] = calls
        made.append(said)
    return made


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or an array of text blocks")
    texts = [block.get("text") if isinstance(block, Mapping) else None for block in content]
    if not all(isinstance(text, str) for text in texts):
        raise bad_request(f"{where} holds a block that is no text; only text can be read")
    return "\n".join(str(text) for text in texts)


def _tool(tool: object, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise bad_request(f"{where} must be an object with a name")
    return {
        "type": "function",
        "function": {
            "name": tool["name"], "description": tool.get("description") or "",
            "parameters": tool.get("input_schema") or {"type": "object"},
        },
    }  # fmt: skip


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {"arguments": text}
    return value if isinstance(value, dict) else {"arguments": value}
