"""Replies of the completion routes that return text as it is: llama-server's own and OpenAI's legacy one.

A format turns the events of its requests into the frames of a stream, or their pieces into one object.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvs_cli.server.errors import ApiError
from kvs_cli.server.generation import Event, Finished, Piece, Progress, Task, joined
from kvs_cli.server.http import DONE, frame
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.formats.tool_calls import random_id
from kvs_core.sampling.logprobs import TokenLogprob, TokenProbs


@dataclass(frozen=True, slots=True)
class Whole:
    """All of one request's text: its pieces as one, and how it ended."""

    piece: Piece
    end: Finished

    @staticmethod
    def of(pieces: Sequence[Piece], end: Finished) -> Whole:
        """From its parts."""
        return Whole(joined([*pieces, end.last]), end)


class Format(Protocol):
    """One API's way of replying to one or more tasks."""

    def frames(self, index: int, event: Event) -> Iterable[bytes]:
        """Frames of a stream for an event of task ``index``."""

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """Frames of a stream that an error ends."""

    def end(self) -> Iterable[bytes]:
        """Frames behind all tasks."""

    def whole(self, outcomes: Sequence[Whole]) -> object:
        """The reply of a request that is no stream."""


@dataclass(frozen=True, slots=True)
class Names:
    """What replies say of the server."""

    model: str
    build: str


class NativeFormat:
    """``POST /completion``."""

    def __init__(self, tasks: Sequence[Task], names: Names, tokenizer: Tokenizer) -> None:
        self._tasks = tasks
        self._names = names
        self._tokenizer = tokenizer
        self._counts = [0] * len(tasks)

    def frames(self, index: int, event: Event) -> Iterable[bytes]:
        """See ``Format``."""
        task = self._tasks[index]
        if isinstance(event, Progress) and task.options.return_progress:
            part = self._part(index, "", [0], event.total)
            yield frame(part | {"prompt_progress": progress_json(event)})
        elif isinstance(event, Piece):
            yield frame(self._piece(index, event))
        elif isinstance(event, Finished):
            if event.last.text or event.last.probs:
                yield frame(self._piece(index, event.last))
            last = Piece("", (), (), event.last.prompt_tokens, event.timings)
            yield frame(self._object(index, Whole(last, event), streamed=True))

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """See ``Format``."""
        yield frame(error.body())

    def end(self) -> Iterable[bytes]:
        """See ``Format``."""
        return ()

    def whole(self, outcomes: Sequence[Whole]) -> object:
        """See ``Format``."""
        objects = [self._object(index, outcome, streamed=False) for index, outcome in enumerate(outcomes)]
        return objects[0] if len(objects) == 1 else objects

    def _part(self, index: int, text: str, tokens: Sequence[int], prompt_tokens: int) -> dict[str, Any]:
        return {
            "index": index, "content": text, "tokens": list(tokens), "stop": False, "id_slot": -1,
            "tokens_predicted": self._counts[index], "tokens_evaluated": prompt_tokens,
        }  # fmt: skip

    def _piece(self, index: int, piece: Piece) -> dict[str, Any]:
        task = self._tasks[index]
        self._counts[index] += len(piece.tokens)
        part = self._part(index, piece.text, piece.tokens, piece.prompt_tokens)
        if task.options.timings_per_token:
            part["timings"] = piece.timings.as_json()
        if piece.probs:
            part["completion_probabilities"] = probs_json(piece.probs, self._tokenizer, task)
        return part

    def _object(self, index: int, outcome: Whole, *, streamed: bool) -> dict[str, Any]:
        task, end, piece = self._tasks[index], outcome.end, outcome.piece
        reply: dict[str, Any] = {
            "index": index,
            "content": piece.text,
            "tokens": list(piece.tokens) if task.options.return_tokens and not streamed else [],
            "id_slot": 0,
            "stop": True,
            "model": self._names.model,
            "tokens_predicted": end.timings.predicted_n,
            "tokens_evaluated": len(task.prompt),
            "generation_settings": task.settings,
            "prompt": self._tokenizer.decode(task.prompt, special=True),
            "has_new_line": end.has_new_line,
            "truncated": end.truncated,
            "stop_type": end.stop,
            "stopping_word": end.stop_word,
            "tokens_cached": end.held,
            "timings": end.timings.as_json(),
        }
        if piece.probs:
            probs = without_stop(piece.probs, end, self._tokenizer)
            reply["completion_probabilities"] = probs_json(probs, self._tokenizer, task)
        if task.options.response_fields:
            return _chosen(reply, task.options.response_fields)
        return reply


class TextFormat:
    """``POST /v1/completions``, OpenAI's legacy route."""

    def __init__(self, tasks: Sequence[Task], names: Names, tokenizer: Tokenizer) -> None:
        self._tasks = tasks
        self._names = names
        self._tokenizer = tokenizer
        self._id = f"chatcmpl-{random_id()}"
        self._created = int(time.time())

    def frames(self, index: int, event: Event) -> Iterable[bytes]:
        """See ``Format``."""
        if isinstance(event, Piece):
            yield frame(self._piece(index, event))
        elif isinstance(event, Finished):
            if event.last.text or event.last.probs:
                yield frame(self._piece(index, event.last))
            reply = self._reply([self._choice(index, "", None, finish_reason(event))])
            yield frame(reply | {"usage": usage_json([event], self._tasks[index]), "timings": event.timings.as_json()})

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """See ``Format``."""
        yield frame(error.body())

    def end(self) -> Iterable[bytes]:
        """See ``Format``."""
        yield DONE

    def whole(self, outcomes: Sequence[Whole]) -> object:
        """See ``Format``."""
        choices = []
        for index, (task, outcome) in enumerate(zip(self._tasks, outcomes, strict=True)):
            probs = without_stop(outcome.piece.probs, outcome.end, self._tokenizer)
            content = {"content": probs_json(probs, self._tokenizer, task)} if outcome.piece.probs else None
            choices.append(self._choice(index, outcome.piece.text, content, finish_reason(outcome.end)))
        usage = usage_json([outcome.end for outcome in outcomes], *self._tasks)
        reply = self._reply(choices) | {"usage": usage, "timings": outcomes[-1].end.timings.as_json()}
        if self._tasks[0].options.verbose:
            reply["__verbose"] = NativeFormat(self._tasks, self._names, self._tokenizer).whole(outcomes)
        return reply

    def _piece(self, index: int, piece: Piece) -> dict[str, Any]:
        task = self._tasks[index]
        content = {"content": probs_json(piece.probs, self._tokenizer, task)} if piece.probs else None
        reply = self._reply([self._choice(index, piece.text, content, None)])
        return reply | {"timings": piece.timings.as_json()} if task.options.timings_per_token else reply

    def _choice(self, index: int, text: str, logprobs: object, reason: str | None) -> dict[str, Any]:
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}

    def _reply(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "choices": choices, "created": self._created, "model": self._names.model,
            "system_fingerprint": self._names.build, "object": "text_completion", "id": self._id,
        }  # fmt: skip


def progress_json(event: Progress) -> dict[str, Any]:
    """``prompt_progress``."""
    return {"total": event.total, "cache": event.cached, "processed": event.processed, "time_ms": int(event.time_ms)}


def finish_reason(end: Finished) -> str:
    """OpenAI's word for how a text ended."""
    return "stop" if end.stop in ("eos", "word") else "length"


def usage_json(ends: Sequence[Finished], *tasks: Task) -> dict[str, Any]:
    """``usage`` of one or more requests together."""
    prompt = sum(len(task.prompt) for task in tasks)
    written = sum(end.timings.predicted_n for end in ends)
    return {
        "completion_tokens": written,
        "prompt_tokens": prompt,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(end.timings.cache_n for end in ends)},
    }


def without_stop(probs: Sequence[TokenProbs], end: Finished, tokenizer: Tokenizer) -> Sequence[TokenProbs]:
    """``probs`` without those of the stop string's tokens, which are no part of the text."""
    if end.stop != "word":
        return probs
    return probs[: max(0, len(probs) - len(tokenizer.encode(end.stop_word, add_special=False, parse_special=False)))]


def probs_json(probs: Iterable[TokenProbs], tokenizer: Tokenizer, task: Task) -> list[dict[str, Any]]:
    """``completion_probabilities``: logarithms, or after the sampler chain probabilities, see ``Generation``."""
    after = task.options.post_sampling_probs
    name, top_name = ("prob", "top_probs") if after else ("logprob", "top_logprobs")

    def entry(token: TokenProbs | TokenLogprob) -> dict[str, Any]:
        data = tokenizer.token_bytes(token.id, special=True)
        return {"id": token.id, "token": data.decode(errors="replace"), "bytes": list(data), name: token.logprob}

    return [entry(each) | {top_name: [entry(top) for top in each.top]} for each in probs]


def _chosen(reply: dict[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """The fields named by paths such as ``generation_settings/n_predict``, under those very names."""
    chosen: dict[str, Any] = {}
    for path in wanted:
        value: Any = reply
        for key in path.split("/"):
            if not isinstance(value, dict) or key not in value:
                break
            value = value[key]
        else:
            chosen[path] = value
    return chosen
