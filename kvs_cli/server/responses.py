"""``POST /v1/responses``: the Responses API's request in the shape of a chat, and a chat's events as that API's."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
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

_TEXT_PARTS = ("input_text", "output_text", "text")


def to_openai(body: Fields) -> Fields:
    """The request as ``read_chat`` takes it. ApiError for another shape."""
    if "previous_response_id" in body:
        raise bad_request("previous_response_id: replies are not kept; send the whole conversation as 'input'")
    if "input" not in body:
        raise missing("input")
    request = dict(body)
    messages: list[dict[str, Any]] = []
    if "instructions" in body:
        messages.append({"role": "system", "content": body.text("instructions")})
    given = request.pop("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for index, item in enumerate(given):
            _add(item, messages, f"input[{index}]")
    else:
        refuse("input", given, "a string or an array of items")
    request["messages"] = messages
    if "max_output_tokens" in body:
        request["max_tokens"] = body.whole("max_output_tokens", -1, least=0)
    if "tools" in body:
        request["tools"] = [_tool(tool) for tool in body.array("tools")
                            if isinstance(tool, dict) and tool.get("type") == "function"]
    form = body.object("text").object("format") if "text" in body else Fields({})
    if form.text("type") == "json_schema":
        request["response_format"] = {"type": "json_schema", "json_schema": {"schema": dict(form.object("schema"))}}
    elif form.text("type") == "json_object":
        request["response_format"] = {"type": "json_object"}
    return Fields(request)


class ResponsesFormat:
    """One response. Its items come in the order of the text: reasoning, message, function calls."""

    def __init__(self, chat: Chat, task: Task, names: Names) -> None:
        self._chat = chat
        self._task = task
        self._names = names
        self._events = ChatEvents(chat)
        self._id = f"resp_{random_id()}"
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._open = False   # the last item
        self._sent = 0

    def frames(self, index: int, event: Event) -> Iterable[bytes]:
        """See ``Format``."""
        if isinstance(event, Started):
            for name in ("response.created", "response.in_progress"):
                yield self._frame(name, {"response": self._response([], "in_progress")})
        elif isinstance(event, Piece | Finished):
            for each in self._events.of(event):
                yield from self._delta(each)
            if isinstance(event, Finished):
                yield from self._close()
                response = self._completed(self._items, event)
                yield self._frame("response.completed", {"response": response, "timings": event.timings.as_json()})

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """See ``Format``."""
        yield frame(error.body(), "error")

    def end(self) -> Iterable[bytes]:
        """See ``Format``."""
        return ()

    def whole(self, outcomes: Sequence[Whole]) -> object:
        """See ``Format``."""
        [outcome] = outcomes
        answer = Answer.of(self._chat, outcome.piece.text)
        items: list[dict[str, Any]] = []
        if answer.reasoning:
            items.append(_reasoning(answer.reasoning, "completed"))
        if answer.content or not (answer.reasoning or answer.calls):
            items.append(_message(answer.content, "completed"))
        items += [_call(call.id, call.name, call.arguments, "completed") for call in answer.calls]
        return self._completed(items, outcome.end)

    def _delta(self, event: ChatEvent) -> Iterable[bytes]:
        match event:
            case Thought(text):
                item = yield from self._item("reasoning", _reasoning("", "in_progress"))
                item["content"][0]["text"] += text
                yield self._frame("response.reasoning_text.delta", {"delta": text})
            case Text(text):
                item = yield from self._item("message", _message("", "in_progress"))
                item["content"][0]["text"] += text
                yield self._frame("response.output_text.delta", {"delta": text})
            case CallStart(_, call_id, name):
                yield from self._close()
                yield from self._item("function_call", _call(call_id, name, "", "in_progress"))
            case CallArguments(_, text):
                item = self._items[-1]
                item["arguments"] += text
                yield self._frame("response.function_call_arguments.delta", {"delta": text})

    def _item(self, kind: str, item: dict[str, Any]) -> Any:
        """The open item if it is of this kind, else ``item``, opened."""
        if self._open and self._items[-1]["type"] == kind:
            return self._items[-1]
        yield from self._close()
        self._items.append(item)
        self._open = True
        shown = item | {"content": []} if kind == "message" else item
        yield self._frame("response.output_item.added", {"item": shown})
        if kind == "message":
            yield self._frame("response.content_part.added", {"part": item["content"][0]})
        return item

    def _close(self) -> Iterable[bytes]:
        if not self._open:
            return
        self._open = False
        item = self._items[-1]
        item["status"] = "completed"
        if item["type"] == "message":
            part = item["content"][0]
            yield self._frame("response.output_text.done", {"text": part["text"]})
            yield self._frame("response.content_part.done", {"part": part})
        elif item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._frame("response.function_call_arguments.done", done)
        yield self._frame("response.output_item.done", {"item": item})

    def _frame(self, event: str, value: dict[str, Any]) -> bytes:
        """An event, numbered; one of an item says of which."""
        numbered = {"type": event, "sequence_number": self._sent} | value
        self._sent += 1
        if "response" not in value:
            numbered["output_index"] = len(self._items) - 1
            if "item" not in value:
                numbered |= {"item_id": self._items[-1]["id"], "content_index": 0}
        return frame(numbered, event)

    def _completed(self, items: list[dict[str, Any]], end: Finished) -> dict[str, Any]:
        prompt, written = len(self._task.prompt), end.timings.predicted_n
        return self._response(items, "completed") | {
            "completed_at": int(time.time()),
            "usage": {
                "input_tokens": prompt, "output_tokens": written, "total_tokens": prompt + written,
                "input_tokens_details": {"cached_tokens": end.timings.cache_n},
            },
        }  # fmt: skip

    def _response(self, items: list[dict[str, Any]], status: str) -> dict[str, Any]:
        return {
            "created_at": self._created, "id": self._id, "model": self._names.model, "object": "response",
            "output": items, "status": status,
        }  # fmt: skip


def _reasoning(text: str, status: str) -> dict[str, Any]:
    return {
        "id": f"rs_{random_id()}", "type": "reasoning", "summary": [], "encrypted_content": "", "status": status,
        "content": [{"type": "reasoning_text", "text": text}],
    }  # fmt: skip


def _message(text: str, status: str) -> dict[str, Any]:
    return {
        "id": f"msg_{random_id()}", "type": "message", "role": "assistant", "status": status,
        "content": [{"type": "output_text", "annotations": [], "logprobs": [], "text": text}],
    }  # fmt: skip


def _call(call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "id": f"fc_{call_id}", "type": "function_call", "call_id": f"call_{call_id}", "name": name,
        "arguments": arguments, "status": status,
    }  # fmt: skip


def _add(item: object, messages: list[dict[str, Any]], where: str) -> None:
    """One item of ``input`` as a message, or as part of the message before it."""
    if not isinstance(item, dict):
        refuse(where, item, "an object")
    match item:
        case {"type": "function_call", "name": str(name), "arguments": arguments}:
            function = {"name": name, "arguments": arguments}
            call = {"id": item.get("call_id", ""), "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case {"type": "function_call_output", "output": output}:
            messages.append({"role": "tool", "tool_call_id": item.get("call_id", ""), "content": _text(output, where)})
        case {"type": "reasoning"}:
            parts = item.get("content")
            text = _text(parts if isinstance(parts, list) else [], where)
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        case {"role": "assistant", "content": content}:
            message = _assistant(messages)
            message["content"] += _text(content, where)
        case {"role": str(role), "content": content}:
            messages.append({"role": role, "content": _text(content, where)})
        case _:
            raise bad_request(f"{where} is no item of a known type")


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The last message if it is the assistant's, else a new one: reasoning, text and calls of a turn belong together.
    """
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where}: expected a string or an array of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind not in (*_TEXT_PARTS, "reasoning_text", "refusal"):
            raise bad_request(f"{where} holds a part that is no text; only text can be read")
        texts.append(str(part.get("text", part.get("refusal", ""))))
    return "\n".join(texts)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}
