"""Flags of ``kvs serve`` that change how requests are taken: each does what its help says."""

from __future__ import annotations

import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from kvs_core.formats import chat
from kvs_core.formats.template_process import TemplateProcess
from tests.server.running import Running, running
from tests.server.test_chat import HELLO
from tests.server.test_hostile import LOOPS

ORIGIN = "https://page.example"


def test_cross_origin_flags(llama_path: Path) -> None:
    """Named origins are let in and others are not; preflight tells the methods, headers and credentials given."""
    with running("-m", llama_path, "-c", 256, "--cors-origins", f"{ORIGIN}, https://other.example",
                 "--cors-methods", "GET,POST", "--cors-headers", "X-One, X-Two", "--no-cors-credentials") as server:
        told = server.http.options("/v1/models", headers={"Origin": ORIGIN}).headers
        assert told["access-control-allow-origin"] == ORIGIN
        assert told["access-control-allow-methods"] == "GET, POST"
        assert told["access-control-allow-headers"] == "X-One, X-Two"
        assert told["access-control-allow-credentials"] == "false"
        assert server.http.get("/health", headers={"Origin": ORIGIN}).headers["access-control-allow-origin"] == ORIGIN
        stranger = server.http.get("/health", headers={"Origin": "https://stranger.example"})
        assert stranger.headers.get("access-control-allow-origin") != "https://stranger.example"
    with running("-m", llama_path, "-c", 256, "--no-cors-credentials") as server:
        assert server.http.get("/health", headers={"Origin": ORIGIN}).headers["access-control-allow-origin"] == "*"


def test_a_silent_client_is_let_go(llama_path: Path) -> None:
    """--timeout: a body that stops coming is answered by 408; one that goes on in time is read."""
    with running("-m", llama_path, "-c", 256, "--timeout", 1) as server:
        start = time.monotonic()
        assert talk(server, b'{"content": ', pause_s=0) == 408
        assert 0.9 < time.monotonic() - start < 8
        assert talk(server, b'{"content": ', b'"x"}', pause_s=0.2) == 200


def talk(server: Running, *parts: bytes, pause_s: float) -> int:
    """The status of a request for 16 bytes of JSON, sent in parts."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as link:
        link.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 16\r\n\r\n")
        for part in parts:
            link.sendall(part)
            time.sleep(pause_s)
        return int(link.recv(400).split()[1])


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_answer_at_once(llama_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """--threads-http: with two, a request is prepared beside one that takes long; with one, behind it."""
    monkeypatch.setattr(chat, "TemplateProcess", partial(TemplateProcess, 1.5))
    template = "{% if messages %}" + LOOPS + "{% endif %}"
    with (
        running("-m", llama_path, "-c", 256, "--threads-http", threads, "--chat-template", template) as server,
        httpx.Client(base_url=server.url, timeout=30, trust_env=False) as other,
    ):
        ended: list[float] = []

        def loop() -> None:
            other.post("/v1/chat/completions", json={"messages": HELLO})
            ended.append(time.monotonic())

        thread = threading.Thread(target=loop)
        thread.start()
        time.sleep(0.4)   # it is being rendered
        assert server.post("/tokenize", content="x")["tokens"]
        tokenized = time.monotonic()
        thread.join()
        assert (tokenized < ended[0] - 0.3) == (threads == 2)


def test_names_and_tags(llama_path: Path) -> None:
    """--alias: the first in the alphabet is the id, all are told; without one it is the path as given. --tags too."""
    with running("-m", llama_path, "-c", 256, "--alias", "zoo,bee", "-a", "ant", "--tags", "b,a") as server:
        [model] = server.get("/v1/models")["data"]
        assert (model["id"], model["aliases"], model["tags"]) == ("ant", ["ant", "bee", "zoo"], ["a", "b"])
        asked: dict[str, Any] = {"messages": HELLO, "max_tokens": 1, "model": "whatever"}
        assert server.post("/v1/chat/completions", **asked)["model"] == "ant"
        assert server.get("/props")["model_alias"] == "ant"
    with running("-m", llama_path, "-c", 256) as server:
        assert server.get("/v1/models")["data"][0]["id"] == str(llama_path)


def test_two_servers_share_a_port(llama_path: Path) -> None:
    """--reuse-port: a second server listens where the first one does, if both say so."""
    with running("-m", llama_path, "-c", 256, "--reuse-port") as first:
        port = urlsplit(first.url).port
        with running("-m", llama_path, "-c", 256, "--reuse-port", "--port", port) as second:
            assert second.url == first.url
            assert second.get("/health") == {"status": "ok"}
        assert first.get("/health") == {"status": "ok"}
