"""Bodies and event streams, without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import Request

from kvs_cli.server import http
from kvs_cli.server.errors import ApiError, ClientGone
from kvs_cli.server.fields import read_fields
from kvs_cli.server.http import Client, EventStream, dumped, read_body


class Wire:
    """An ASGI connection: messages in, messages out."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for message in messages:
            self.incoming.put_nowait(message)
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        return await self.incoming.get()

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def request(self) -> Request:
        return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, self.receive)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts, up to a size and a time; one that breaks off is nobody's."""
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 20)

    async def play() -> None:
        fields = await read_body(Wire(part(b'{"a":', True), part(b" 1}")).request(), 1)
        assert dict(fields) == {"a": 1}
        with pytest.raises(ApiError) as error:
            await read_body(Wire(part(b"x" * 15, True), part(b"x" * 6, True)).request(), 1)
        assert error.value.code == 413
        with pytest.raises(ApiError) as error:
            await read_body(Wire(part(b"{", True)).request(), 0.01)
        assert error.value.code == 408
        with pytest.raises(ClientGone):
            await read_body(Wire(part(b"{", True), {"type": "http.disconnect"}).request(), 1)

    asyncio.run(play())


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b"NaN", b'{"a": NaN}', b'{"a": 1' + b"0" * 5000 + b"}",
                                  b"\xff", b"[" * 100_000, b'{"a":' * 100_000])
def test_what_is_no_request(body: bytes) -> None:
    """One line, 400."""
    with pytest.raises(ApiError) as error:
        read_fields(body)
    assert error.value.code == 400
    assert "\n" not in error.value.message


def test_halves_of_characters_become_whole_ones() -> None:
    """What JSON can spell and UTF-8 cannot is replaced, everywhere; what it spells in two halves stays."""
    fields = read_fields(b'{"a": ["\\ud800", {"\\udfff": "\\ud83d\\ude42"}]}')
    assert dict(fields) == {"a": ["\ufffd", {"\ufffd": "🙂"}]}
    assert json.loads(dumped(dict(fields))) == dict(fields)


def test_a_silent_stream_pings() -> None:
    """A comment now and then while nothing else is sent, and everything else in order."""
    async def frames() -> AsyncGenerator[bytes, None]:
        yield b"one"
        await asyncio.sleep(0.05)
        yield b"two"

    async def play() -> Wire:
        wire = Wire()
        await EventStream(Client(wire.receive), frames(), ping_s=0.01, timeout_s=1)({}, wire.receive, wire.send)
        return wire

    wire = asyncio.run(play())
    assert wire.body.startswith(b"one:\n\n:\n\n")
    assert wire.body.endswith(b"two")
    assert wire.body.strip(b"onetw:\n") == b""
    assert wire.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.mark.parametrize("leaves", [True, False])
def test_a_stream_that_nobody_reads_ends(leaves: bool) -> None:
    """When the client leaves, or takes nothing for too long; its frames are closed either way."""
    closed = []

    async def frames() -> AsyncGenerator[bytes, None]:
        try:
            yield b"one"
            await asyncio.sleep(60)
            yield b"two"
        finally:
            closed.append(True)

    async def play() -> None:
        wire = Wire()

        async def send(message: Any) -> None:
            await wire.send(message)
            if len(wire.sent) == 2:   # the first frame
                if leaves:
                    wire.incoming.put_nowait({"type": "http.disconnect"})
                else:
                    await asyncio.sleep(60)

        stream = EventStream(Client(wire.receive), frames(), ping_s=-1, timeout_s=0.05)
        with pytest.raises(ClientGone):
            await stream({}, wire.receive, send)

    asyncio.run(play())
    assert closed == [True]
