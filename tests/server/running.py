"""Servers in this process, on a free port, for as long as a block lasts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from kvs_cli.commands.serve import Server
from kvs_cli.options import parse
from kvs_core.settings.typed import serve_settings

WAIT_S = 30.0


@dataclass(frozen=True)
class Running:
    """A server that is up, and a client for it."""

    url: str
    http: httpx.Client

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        """The JSON reply to a JSON request, which has to have this status."""
        reply = self.http.post(path, json=body)
        assert reply.status_code == status, reply.text
        assert reply.headers["content-type"] == "application/json; charset=utf-8"
        return reply.json()

    def get(self, path: str) -> Any:
        """The JSON reply."""
        return self.http.get(path).raise_for_status().json()

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The JSON events of a stream, without its ``[DONE]``."""
        with self.http.stream("POST", path, json={"stream": True} | body) as reply:
            assert reply.status_code == 200, reply.read()
            assert reply.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def idle(self) -> bool:
        """Whether the slot is free within two seconds."""
        end = time.monotonic() + 2
        while time.monotonic() < end:
            if not self.get("/slots")[0]["is_processing"]:
                return True
            time.sleep(0.01)
        return False


@contextmanager
def running(*argv: object, wait: bool = True, headers: dict[str, str] | None = None) -> Iterator[Running]:
    """``kvs serve`` with these flags. ``wait``: until the model is loaded."""
    parsed = parse([str(argument) for argument in ("--port", 0, "--device", "cpu", *argv)], {}, "serve")
    server = Server(serve_settings(parsed.values, parsed.explicit, parsed.positionals))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        end = time.monotonic() + WAIT_S
        while wait and not server.ready:
            assert thread.is_alive(), "the server has ended"
            assert time.monotonic() < end, "the server does not get ready"
            time.sleep(0.005)
        with httpx.Client(base_url=server.urls[0], timeout=WAIT_S, headers=headers, trust_env=False) as http:
            yield Running(server.urls[0], http)
    finally:
        server.stop()
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the server does not end"
