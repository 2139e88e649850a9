"""Messages and tools of a chat request, checked and brought into the form that a template expects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from kvs_core.errors import SettingsError

Message = dict[str, Any]


def checked_messages(messages: object) -> list[Message]:
    """Copies of ``messages`` whose content is a list of texts. Raises SettingsError, naming a message by its index."""
    if not isinstance(messages, list | tuple) or not messages:
        raise SettingsError("messages must be a list of at least one message")
    return [_checked_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def checked_tools(tools: object) -> list[dict[str, Any]]:
    """Copies of function declarations. Raises SettingsError, naming the tool by its index."""
    if not isinstance(tools, list | tuple):
        raise SettingsError("tools must be a list of function declarations")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise SettingsError(f'tools[{index}] must be {{"type": "function", "function": {{"name": ...}}}}')
    return [dict(tool) for tool in tools]


def merge_system(messages: list[Message]) -> list[Message]:
    """System messages put in front of the next message's text, or made the user's where none follows."""
    merged: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting += ["\n".join(message["content"])]
            continue
        if waiting:
            first, *rest = message["content"] or [""]
            message = message | {"content": ["\n".join([*waiting, first]), *rest]}
            waiting = []
        merged.append(message)
    if waiting:
        merged.append({"role": "user", "content": waiting})
    return merged


def with_arguments(messages: list[Message], *, objects: bool) -> list[Message]:
    """Tool calls whose arguments are objects, or are the JSON text of objects."""
    return [
        message if "tool_calls" not in message
        else message | {"tool_calls": [_with_arguments(call, objects) for call in message["tool_calls"]]}
        for message in messages
    ]  # fmt: skip


def with_content(messages: list[Message], *, parts: bool) -> list[Message]:
    """Content as a list of text parts, or as one text, a line for each."""
    return [
        message | {"content": [{"type": "text", "text": text} for text in message["content"]]} if parts
        else message | {"content": "\n".join(message["content"])}
        for message in messages
    ]  # fmt: skip


def _checked_message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise SettingsError(f'{where} must be an object with a "role"')
    checked = {**message, "content": _texts(message.get("content"), where)}
    calls = message.get("tool_calls")
    if calls is None:
        checked.pop("tool_calls", None)
        if message.get("content") is None and message["role"] != "assistant":
            raise SettingsError(f'{where} has no "content"')
        return checked
    if not isinstance(calls, list):
        raise SettingsError(f"{where}.tool_calls must be a list")
    checked["tool_calls"] = [_checked_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return checked


def _texts(content: object, where: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise SettingsError(f"{where}.content must be a text or a list of text parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            named = f"is of type {kind!r:.40}" if kind not in (None, "text") else "is no part"
            raise SettingsError(f"{where}.content[{index}] {named}; only text parts can be read")
        texts.append(part["text"])
    return texts


def _checked_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise SettingsError(f'{where} must be {{"type": "function", "function": {{"name": ..., "arguments": ...}}}}')
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            _bad_arguments(where, str(error))
    if not isinstance(arguments, Mapping):
        _bad_arguments(where, f"got {type(arguments).__name__}")
    return {"type": "function", **call, "function": {**function, "arguments": dict(arguments)}}


def _bad_arguments(where: str, why: str) -> NoReturn:
    raise SettingsError(f"{where}.function.arguments must be a JSON object: {why}")


def _with_arguments(call: dict[str, Any], objects: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    return call | {"function": function | {"arguments": arguments if objects else _json(arguments)}}


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingsError(f"a tool call's arguments must be JSON values: {error}") from None
