"""Engines behind HTTP: one that runs somewhere, or a command that is started here. Timed from outside, all alike.

A request streams a greedy continuation of exactly so many tokens; what counts is when the first and the last piece
arrive. llama-server's own API is used where there is one (kvs has it too), OpenAI's completions elsewhere.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvs_core.errors import SettingsError
from kvs_core.settings.kinds import shown

_ASK_S = 5              # for what a server knows at once
_ANSWER_S = 3600        # between two pieces: the first comes behind the whole prompt
_READY_S = 1800         # to load a model
_END_S = 30
_ENDING_S = 1
_MOST_BYTES = 1 << 20   # of a line, or of an answer that is not streamed


class EngineError(Exception):
    """An engine cannot be asked, or answers something else: one line."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One continuation. Rates by the clock of the one who asks; the first token is free in ``decode_tps``."""

    prompt_tokens: int
    decode_tokens: int
    first_token_ms: float
    decode_tps: float

    @property
    def prefill_tps(self) -> float:
        """Prompt tokens by the time to the first token."""
        return 1e3 * self.prompt_tokens / self.first_token_ms


class Endpoint:
    """A server at an address.

    api_key  a bearer token that it wants, or empty
    ended    says how the server's process has ended; empty: it has not, or there is none that is known
    """

    def __init__(self, url: str, api_key: str = "", *, ended: Callable[[], str] = str) -> None:
        """SettingsError for what is no http or https address."""
        wrong = SettingsError(f"--against {shown(url)}: give an address such as http://127.0.0.1:8080")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise wrong from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise wrong
        self._https, self._host, self._port = parts.scheme == "https", parts.hostname, port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._native: bool | None = None
        self._ended = ended

    def is_ready(self) -> bool:
        """Whether it answers, with a model loaded."""
        try:
            return self._get("/health")[0] == 200 or self._get("/v1/models")[0] == 200
        except (OSError, HTTPException):
            return False

    def time(self, prompt: str, decode_tokens: int) -> Timed:
        """Continue ``prompt``. Raises EngineError; also if another number of tokens came back."""
        try:
            if self._native is None:
                self._native = self._get("/props")[0] in (200, 401, 403)
            return self._time(prompt, decode_tokens)
        except (OSError, HTTPException, ValueError, EngineError) as error:
            said = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"[:300]
            if ended := self._ended():
                raise EngineError(ended) from None
            raise EngineError(said if self.is_ready() else f"it does not answer any more: {said}") from None

    def _time(self, prompt: str, decode_tokens: int) -> Timed:
        body: dict[str, Any] = {"prompt": prompt, "temperature": 0, "stream": True, "ignore_eos": True,
                                "cache_prompt": False}
        if self._native:
            path = "/completion"
            body["n_predict"] = decode_tokens
        else:
            path = "/v1/completions"
            body |= {"model": self._model(), "max_tokens": decode_tokens, "stream_options": {"include_usage": True}}
        start = time.perf_counter()
        first = last = 0.0
        counts: dict[str, Any] = {}
        with self._open("POST", path, json.dumps(body), _ANSWER_S) as response:
            if response.status != 200:
                raise EngineError(f"{path} answers {response.status}: {_told(response.read(_MOST_BYTES))}")
            for event in _events(response):
                now = time.perf_counter()
                if "error" in event:
                    raise EngineError(f"{path}: {shown(json.dumps(event['error']))}")
                if _piece(event):
                    first, last = first or now, now
                counts |= event.get("timings") or {}
                counts |= event.get("usage") or {}
        made = counts.get("predicted_n", counts.get("completion_tokens"))
        read = counts.get("prompt_n", counts.get("prompt_tokens"))
        if not isinstance(made, int) or not isinstance(read, int):
            raise EngineError("the answer does not count its tokens: it has neither timings nor usage")
        if made != decode_tokens:
            raise EngineError(f"{made} tokens were generated instead of {decode_tokens}")
        if not last > first:
            raise EngineError("all of the answer came at once: it cannot be timed")
        return Timed(read, made, 1e3 * (first - start), (made - 1) / (last - first))

    def _model(self) -> str:
        status, text = self._get("/v1/models")
        found = json.loads(text) if status == 200 else {}
        try:
            return str(found["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise EngineError(f"/v1/models answers {status} and names no model") from None

    def _get(self, path: str) -> tuple[int, bytes]:
        with self._open("GET", path, None, _ASK_S) as response:
            return response.status, response.read(_MOST_BYTES)

    @contextmanager
    def _open(self, method: str, path: str, body: str | None, timeout_s: float) -> Iterator[HTTPResponse]:
        kind = HTTPSConnection if self._https else HTTPConnection
        connection = kind(self._host, self._port, timeout=timeout_s)
        try:
            connection.request(method, self._prefix + path, body and body.encode(), self._headers)
            yield connection.getresponse()
        finally:
            connection.close()


@contextmanager
def started(command: Sequence[str], port: int, log: Path) -> Iterator[Endpoint]:
    """A server that this command runs on that port, ready; ended with the block, with all that it has started.

    Raises EngineError if it ends or does not get ready.
    """
    with log.open("ab") as lines:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=lines, stderr=lines,
                                       start_new_session=True)
        except OSError as error:
            raise EngineError(f"{command[0]}: {error.strerror or error}") from None

    def ended() -> str:
        with suppress(subprocess.TimeoutExpired):   # its connections close a little before it ends
            return f"{command[0]} ended with code {process.wait(_ENDING_S)}; {log} says why"
        return ""

    endpoint = Endpoint(f"http://127.0.0.1:{port}", ended=ended)
    try:
        end = time.monotonic() + _READY_S
        while not endpoint.is_ready():
            if process.poll() is not None:
                raise EngineError(ended())
            if time.monotonic() > end:
                raise EngineError(f"{command[0]} is not ready after {_READY_S} s; {log} may say why")
            time.sleep(0.1)
        yield endpoint
    finally:
        _end(process)


def command_of(template: str, *, model: Path | None, port: int, context: int) -> list[str]:
    """The words of a command line; ``{model}``, ``{port}`` and ``{context}`` in it are filled in. SettingsError."""
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise SettingsError(f"--against-command {shown(template)}: {error}") from None
    if not words or "{port}" not in template:
        raise SettingsError(f"--against-command {shown(template)}: has no {{port}}, so nobody knows where the server "
                            "listens; add --port {port}, or give the address with --against")
    if model is None and "{model}" in template:
        raise SettingsError("--against-command: {model} needs a model in a file, and this one has none; kvs synthesize "
                            "writes a synthetic one")
    for name, value in (("{model}", str(model)), ("{port}", str(port)), ("{context}", str(context))):
        words = [word.replace(name, value) for word in words]
    return words


def free_port() -> int:
    """A port of 127.0.0.1 that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Politely, then not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    while line := response.readline(_MOST_BYTES):
        name, _, data = line.partition(b":")
        if name.strip() not in (b"data", b"error") or data.strip() == b"[DONE]":
            continue
        event = json.loads(data)
        if isinstance(event, dict):
            yield {"error": event} if name.strip() == b"error" else event


def _piece(event: dict[str, Any]) -> bool:
    """Whether tokens came with it."""
    choices = event.get("choices")
    if isinstance(choices, list):
        return any(choice.get("text") for choice in choices if isinstance(choice, dict))
    return bool(event.get("content") or event.get("tokens"))


def _told(data: bytes) -> str:
    return shown(" ".join(data.decode("utf-8", "replace").split()))
