"""Bytes in and out: bodies with a limit, JSON replies, event streams, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvs_cli.server.errors import ApiError, ClientGone
from kvs_cli.server.fields import Fields, read_fields
from kvs_core.units import MIB

T = TypeVar("T")

MAX_BODY_BYTES = 64 * MIB


class JsonReply(Response):
    """A JSON value as llama-server sends it: UTF-8, not ASCII."""

    def __init__(self, value: object, status: int = 200) -> None:
        super().__init__(dumped(value), status, media_type=None)
        self.headers["content-type"] = "application/json; charset=utf-8"


def dumped(value: object) -> bytes:
    """JSON text in UTF-8."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def frame(value: object, event: str | None = None) -> bytes:
    """One event of a stream."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + dumped(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
_PING = b":\n\n"


async def read_body(request: Request, timeout_s: float) -> Fields:
    """The JSON object of a request. ApiError if it is too large, too slow, or none. ClientGone if it breaks off.

    One that says that it is too large is refused before any of it is read.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    parts: list[bytes] = []
    size = 0
    while True:
        try:
            message = await asyncio.wait_for(request.receive(), timeout_s)
        except TimeoutError:
            raise ApiError("invalid_request_error", f"no data for {timeout_s:g} s", code=408) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise _too_large()
        if not message.get("more_body", False):
            return read_fields(b"".join(parts))


def _too_large() -> ApiError:
    return ApiError(
        "invalid_request_error", f"the request is larger than {MAX_BODY_BYTES // MIB} MiB; send less", code=413
    )


class Client:
    """Whoever waits for a reply, once the request is read. ``close`` it."""

    def __init__(self, receive: Receive) -> None:
        self._gone = asyncio.ensure_future(_disconnect(receive))

    async def or_gone(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """The outcome of ``work``; it is cancelled, and ClientGone raised, when the client leaves before.

        TimeoutError after ``timeout_s``.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            task.cancel()
        if self._gone.done():
            raise ClientGone
        raise TimeoutError

    def close(self) -> None:
        """Listen no more."""
        self._gone.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Frames as they come. ``frames`` is closed however the stream ends: by its end, an error, or a client who left.

    A stream that is silent for ``ping_s`` sends a comment; one that nobody reads for ``timeout_s`` ends.
    """

    media_type = "text/event-stream"

    def __init__(self, client: Client, frames: AsyncGenerator[bytes, None], *, ping_s: float, timeout_s: float) -> None:
        super().__init__(headers={"X-Accel-Buffering": "no", "Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._client = client
        self._frames = frames
        self._ping_s = ping_s if ping_s > 0 else None
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            following = asyncio.ensure_future(anext(self._frames, None))
            try:
                while True:
                    try:
                        data = await self._client.or_gone(_shielded(following), self._ping_s)
                    except TimeoutError:
                        await self._send(send, _PING)
                        continue
                    if data is None:
                        break
                    await self._send(send, data)
                    following = asyncio.ensure_future(anext(self._frames, None))
            finally:
                following.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await following
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._frames.aclose()
            self._client.close()

    async def _send(self, send: Send, data: bytes) -> None:
        message = {"type": "http.response.body", "body": data, "more_body": True}
        try:
            await asyncio.wait_for(self._client.or_gone(_sent(send, message)), self._timeout_s)
        except TimeoutError:
            raise ClientGone from None


async def _shielded(task: asyncio.Future[T]) -> T:
    return await asyncio.shield(task)


async def _sent(send: Send, message: dict[str, Any]) -> None:
    await send(message)
