"""A chat model's text taken apart as it comes: thoughts, the answer's text, tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvs_core.formats.reasoning import Part, ReasoningSplitter, ReasoningTags
from kvs_core.formats.tool_calls import CALL_START, CallArguments, CallParser, CallStart, Text, ToolNotation, random_id


class Thought(NamedTuple):
    """Text of the thoughts before the answer."""

    text: str


ChatEvent = Thought | Text | CallStart | CallArguments


class ChatParser:
    """Legal moves: ``push`` any number of times, then ``flush``.

    Either half may be switched off: without ``tags`` thoughts stay in the text, without ``tools`` calls do.
    """

    def __init__(
        self, *, tags: ReasoningTags | None, is_open: bool = False, notation: ToolNotation = ToolNotation.JSON,
        tools: Sequence[Mapping[str, Any]] = (), new_id: Callable[[], str] = random_id,
    ) -> None:
        """``is_open``: the prompt has opened the thoughts."""
        self._calls = CallParser(notation, tools, new_id=new_id) if tools else None
        ends = (CALL_START,) if tools else ()
        self._splitter = ReasoningSplitter(tags, is_open=is_open, also_ends=ends) if tags is not None else None

    @property
    def calls(self) -> int:
        """Tool calls so far."""
        return self._calls.calls if self._calls is not None else 0

    def push(self, text: str) -> list[ChatEvent]:
        """What is certain now. Texts are never empty."""
        if not text:
            return []
        parts = self._splitter.push(text) if self._splitter is not None else [Part(False, text)]
        return self._parse(parts)

    def flush(self) -> list[ChatEvent]:
        """What was held back, once no more comes."""
        events = self._parse(self._splitter.flush()) if self._splitter is not None else []
        if self._calls is not None:
            events += self._calls.flush()
        return events

    def _parse(self, parts: Sequence[Part]) -> list[ChatEvent]:
        events: list[ChatEvent] = []
        for part in parts:
            if part.is_reasoning:
                events.append(Thought(part.text))
            elif self._calls is not None:
                events += self._calls.push(part.text)
            else:
                events.append(Text(part.text))
        return events
