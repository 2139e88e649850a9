"""Tool calls in a model's text, as they come, in the two notations that most formats share:

    XML   <tool_call>\\n<function=NAME>\\n<parameter=P>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>
    JSON  <tool_call>\\n{"name": NAME, "arguments": {...}}\\n</tool_call>

What is no call after all is text like any other.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from kvs_core.formats.reasoning import held_back

CALL_START = "<tool_call>"
CALL_END = "</tool_call>"

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_FUNCTION_END = re.compile(r"</function>")
_ALPHABET = string.ascii_letters + string.digits


class ToolNotation(Enum):
    """How a model writes its calls."""

    XML = "xml"
    JSON = "json"


class Text(NamedTuple):
    """Text of the answer."""

    text: str


class CallStart(NamedTuple):
    """A call begins; ``call`` counts the calls of an answer from 0."""

    call: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """The next part of a call's arguments, which join to the JSON text of an object."""

    call: int
    text: str


Event = Text | CallStart | CallArguments


def tool_notation(template: str) -> ToolNotation:
    """The notation that a chat template teaches; JSON, the commoner one, if it teaches none."""
    return ToolNotation.XML if "<function=" in template else ToolNotation.JSON


def random_id() -> str:
    """32 letters and digits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(32))


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a system message says of the tools where a template has no place for them."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call functions to help with the user's request. These are the functions, one JSON object per line:\n"
        f"{lines}\n"
        f"To call one, write its name and its arguments as a JSON object between {CALL_START} and {CALL_END}:\n"
        f'{CALL_START}\n{{"name": "the function", "arguments": {{"argument": "value"}}}}\n{CALL_END}'
    )


class CallParser:
    """Finds calls in the text of an answer that arrives in pieces. White space around calls is dropped."""

    def __init__(
        self, notation: ToolNotation, tools: Sequence[Mapping[str, Any]], *, new_id: Callable[[], str] = random_id
    ) -> None:
        """``tools`` as in a request: the types of the parameters decide how a VALUE in XML is read."""
        self._notation = notation
        self._schemas = {
            tool["function"]["name"]: _properties(tool["function"].get("parameters")) for tool in tools
        }
        self._new_id = new_id
        self._held = ""
        self._inside = False   # a call
        self._strip = False    # white space behind a call
        self._name: str | None = None
        self._arguments = 0
        self._closed = False   # by </function>
        self.calls = 0

    def push(self, text: str) -> list[Event]:
        """What is certain now."""
        self._held += text
        events: list[Event] = []
        while self._in_call(events) if self._inside else self._in_text(events):
            pass
        return events

    def flush(self) -> list[Event]:
        """What was held back, once no more comes. A call that was cut off keeps what it has."""
        events: list[Event] = []
        text, self._held = self._held, ""
        if not self._inside:
            return [Text(text)] if text and not (self._strip and text.isspace()) else []
        if self._name is not None:
            self._end_xml(events)
        elif self._notation is ToolNotation.XML or not self._json_call(
            text[: len(text) - held_back(text, (CALL_END,))], events
        ):
            events.append(Text(CALL_START + text))
        self._inside = False
        return events

    def _in_text(self, events: list[Event]) -> bool:
        if self._strip:
            self._held = self._held.lstrip()
            self._strip = not self._held
        at = self._held.find(CALL_START)
        if at >= 0:
            self._emit_text(self._held[:at].rstrip(), events)
            self._held = self._held[at + len(CALL_START) :]
            self._inside, self._name, self._arguments, self._closed = True, None, 0, False
            return True
        sure = self._held[: len(self._held) - held_back(self._held, (CALL_START,))].rstrip()
        self._emit_text(sure, events)
        self._held = self._held[len(sure) :]
        return False

    def _in_call(self, events: list[Event]) -> bool:
        return self._in_xml(events) if self._notation is ToolNotation.XML else self._in_json(events)

    def _in_json(self, events: list[Event]) -> bool:
        at = self._held.find(CALL_END)
        if at < 0:
            return False
        raw, self._held = self._held[:at], self._held[at + len(CALL_END) :]
        if not self._json_call(raw, events):
            events.append(Text(CALL_START + raw + CALL_END))
        self._inside, self._strip = False, True
        return True

    def _json_call(self, raw: str, events: list[Event]) -> bool:
        """Read a whole call; False if it is none."""
        try:
            call = json.loads(raw)
        except (ValueError, RecursionError):
            return False
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return False
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):   # some models write the JSON text of the object
            text = arguments
        else:
            text = json.dumps(arguments, ensure_ascii=False)
        self._begin(call["name"], events)
        events.append(CallArguments(self.calls - 1, text))
        return True

    def _in_xml(self, events: list[Event]) -> bool:
        if self._name is None:
            found = _FUNCTION.match(self._held)
            if found is None:
                return self._give_up(events, ("<function=",), ">")
            if found.end() == len(self._held):
                return False   # nothing behind it yet
            self._name = found[1].strip()
            self._begin(self._name, events)
            self._held = self._held[found.end() :]
            return True
        self._held = self._held.lstrip()
        if not self._closed:
            found = _PARAMETER.match(self._held)
            if found is not None:
                self._argument(found[1].strip(), found[2], events)
                self._held = self._held[found.end() :]
                return True
            found = _FUNCTION_END.match(self._held)
            if found is not None:
                self._closed = True
                self._held = self._held[found.end() :]
                return True
        if self._held.startswith(CALL_END):
            self._end_xml(events)
            self._held = self._held[len(CALL_END) :]
            return True
        tags = (CALL_END,) if self._closed else ("<parameter=", "</function>", CALL_END)
        return self._give_up(events, tags, None)

    def _give_up(self, events: list[Event], tags: tuple[str, ...], closing: str | None) -> bool:
        """Wait, as long as what is held can still become one of ``tags``; else the call ends here."""
        text = self._held.lstrip()
        for tag in tags:
            if tag.startswith(text[: len(tag)]) and not (closing and len(text) > len(tag) and "\n" in text):
                return False
        if self._name is not None:
            self._end_xml(events)
        else:
            self._inside = False
            events.append(Text(CALL_START))
        return True

    def _argument(self, name: str, raw: str, events: list[Event]) -> None:
        assert self._name is not None
        schema = self._schemas.get(self._name, {}).get(name)
        value = json.dumps(_value(schema, raw), ensure_ascii=False)
        before = "{" if self._arguments == 0 else ", "
        self._arguments += 1
        events.append(CallArguments(self.calls - 1, f"{before}{json.dumps(name, ensure_ascii=False)}: {value}"))

    def _end_xml(self, events: list[Event]) -> None:
        events.append(CallArguments(self.calls - 1, "}" if self._arguments else "{}"))
        self._inside, self._strip, self._name = False, True, None

    def _begin(self, name: str, events: list[Event]) -> None:
        events.append(CallStart(self.calls, self._new_id(), name))
        self.calls += 1

    @staticmethod
    def _emit_text(text: str, events: list[Event]) -> None:
        if text:
            events.append(Text(text))


def _properties(parameters: object) -> Mapping[str, Any]:
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _value(schema: object, raw: str) -> object:
    """A parameter's value: text where the schema says string, else JSON if it is that."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return raw
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return raw
