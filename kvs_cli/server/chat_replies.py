"""``POST /v1/chat/completions``: OpenAI's chunks and object; and a chat's whole answer, for all chat routes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvs_cli.server.chat import Chat
from kvs_cli.server.errors import ApiError
from kvs_cli.server.generation import Event, Finished, Piece, Progress, Task
from kvs_cli.server.http import DONE, frame
from kvs_cli.server.replies import (
    Names,
    NativeFormat,
    Whole,
    finish_reason,
    probs_json,
    progress_json,
    usage_json,
    without_stop,
)
from kvs_core.formats.chat_output import ChatEvent, Thought
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.formats.tool_calls import CallArguments, CallStart, Text, random_id


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A chat's answer, taken apart."""

    reasoning: str
    content: str
    calls: tuple[Call, ...]

    @staticmethod
    def of(chat: Chat, text: str) -> Answer:
        """From the text behind the prompt."""
        parser = chat.parser(stream=False)
        reasoning, content = [], [chat.opening, chat.continued]
        calls: list[CallStart] = []
        arguments: dict[int, str] = {}
        for event in [*parser.push(text), *parser.flush()]:
            match event:
                case Thought(part):
                    reasoning.append(part)
                case Text(part):
                    content.append(part)
                case CallStart():
                    calls.append(event)
                case CallArguments(call, part):
                    arguments[call] = arguments.get(call, "") + part
        return Answer(
            "".join(reasoning), "".join(content),
            tuple(Call(each.id, each.name, arguments.get(each.call, "{}")) for each in calls),
        )


class ChatEvents:
    """The events of a chat's text as it streams."""

    def __init__(self, chat: Chat) -> None:
        self._parser = chat.parser(stream=True)
        self._opening = chat.opening

    @property
    def calls(self) -> int:
        """Tool calls so far."""
        return self._parser.calls

    def of(self, event: Piece | Finished) -> list[ChatEvent]:
        """What a piece, or the end, adds."""
        piece = event.last if isinstance(event, Finished) else event
        events: list[ChatEvent] = [Text(self._opening)] if self._opening else []
        self._opening = ""
        events += self._parser.push(piece.text)
        return events + self._parser.flush() if isinstance(event, Finished) else events


class ChatFormat:
    """One chat, one choice."""

    def __init__(self, chat: Chat, task: Task, names: Names, tokenizer: Tokenizer) -> None:
        self._chat = chat
        self._task = task
        self._names = names
        self._tokenizer = tokenizer
        self._events = ChatEvents(chat)
        self._id = f"chatcmpl-{random_id()}"
        self._created = int(time.time())
        self._begun = False
        self._usage: dict[str, Any] = {}

    def frames(self, index: int, event: Event) -> Iterable[bytes]:
        """See ``Format``."""
        if isinstance(event, Progress):
            if self._task.options.return_progress:
                yield frame(self._chunk(_ROLE) | {"prompt_progress": progress_json(event)})
                self._begun = True
            return
        if not isinstance(event, Piece | Finished):
            return
        if not self._begun:
            yield frame(self._chunk(_ROLE))
            self._begun = True
        yield from self._deltas(event)
        if isinstance(event, Finished):
            last = self._chunk({}, _reason(event, self._events.calls)) | {"timings": event.timings.as_json()}
            yield frame(last)
            self._usage = usage_json([event], self._task)

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """See ``Format``."""
        yield frame(error.body())

    def end(self) -> Iterable[bytes]:
        """See ``Format``."""
        if self._task.options.include_usage:
            yield frame(self._reply("chat.completion.chunk", []) | {"usage": self._usage})
        yield DONE

    def whole(self, outcomes: Sequence[Whole]) -> object:
        """See ``Format``."""
        [outcome] = outcomes
        answer = Answer.of(self._chat, outcome.piece.text)
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}, "id": call.id}
                for call in answer.calls
            ]
        choice: dict[str, Any] = {
            "finish_reason": _reason(outcome.end, len(answer.calls)), "index": 0, "message": message,
        }  # fmt: skip
        if outcome.piece.probs:
            probs = without_stop(outcome.piece.probs, outcome.end, self._tokenizer)
            choice["logprobs"] = {"content": probs_json(probs, self._tokenizer, self._task)}
        reply = self._reply("chat.completion", [choice])
        reply |= {"usage": usage_json([outcome.end], self._task), "timings": outcome.end.timings.as_json()}
        if self._task.options.verbose:
            reply["__verbose"] = NativeFormat([self._task], self._names, self._tokenizer).whole(outcomes)
        return reply

    def _deltas(self, event: Piece | Finished) -> Iterable[bytes]:
        piece = event.last if isinstance(event, Finished) else event
        deltas = [_delta(each) for each in self._events.of(event)]
        probs = probs_json(piece.probs, self._tokenizer, self._task)
        if probs and not deltas:
            deltas = [{}]
        for at, delta in enumerate(deltas):
            chunk = self._chunk(delta)
            if probs and at == 0:
                chunk["choices"][0]["logprobs"] = {"content": probs}
            if self._task.options.timings_per_token:
                chunk["timings"] = piece.timings.as_json()
            yield frame(chunk)

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return self._reply("chat.completion.chunk", [{"finish_reason": reason, "index": 0, "delta": delta}])

    def _reply(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "choices": choices, "created": self._created, "id": self._id, "model": self._names.model,
            "system_fingerprint": self._names.build, "object": kind,
        }  # fmt: skip


_ROLE: dict[str, Any] = {"role": "assistant", "content": None}


def _reason(end: Finished, calls: int) -> str:
    reason = finish_reason(end)
    return "tool_calls" if calls and reason == "stop" else reason


def _delta(event: ChatEvent) -> dict[str, Any]:
    match event:
        case Thought(text):
            return {"reasoning_content": text}
        case Text(text):
            return {"content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
