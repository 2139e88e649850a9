"""Clients that go away, queues that are full, and the state they leave behind: none."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import httpx
import pytest

from kvs_cli.server import jobs
from kvs_cli.server.errors import ApiError
from kvs_cli.server.jobs import Cancelled, Job, JobQueue
from kvs_core.device.host.device import HostDevice
from kvs_core.engine.session import Session
from kvs_core.errors import DeviceError, DeviceMemoryError
from tests.server.running import Running, running
from tests.server.scrapes import scrape

FIXED: dict[str, Any] = {"prompt": "The river in the north", "n_predict": 12, "temperature": 0}
OWN = FIXED | {"prompt": "~ no other conversation begins with this"}
MALFORMED = (b"{", b"[1]", b'{"prompt": 1e99}', b"\xff\xfe", b"[" * 100_000, b'{"prompt": "x", "n": 7}')
LONG: dict[str, Any] = {"prompt": "The children of the village", "n_predict": 900, "ignore_eos": True}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_a_client_that_leaves_frees_the_slot(name: str, stream: bool, request: pytest.FixtureRequest) -> None:
    """Within a step, streaming or not; the next fixed request has its known text."""
    server: Running = request.getfixturevalue(name)
    known = server.post("/completion", **FIXED)["content"]
    leave(server, stream, after_s=0.3)
    start = time.monotonic()
    assert server.idle()
    assert time.monotonic() - start < 1
    assert 0 < server.get("/slots")[0]["next_token"][0]["n_decoded"] < 900
    assert server.post("/completion", **FIXED)["content"] == known


def test_a_queued_client_that_leaves_is_dropped(llama: Running) -> None:
    """Requests behind the one that runs wait in order; one whose client leaves never runs."""
    with llama.http.stream("POST", "/completion", json=LONG | {"stream": True}) as reply:
        lines = reply.iter_lines()   # dropping it would close the connection
        next(lines)
        with pytest.raises(httpx.ReadTimeout):
            llama.http.post("/completion", json=LONG, timeout=0.2)
        assert llama.http.get("/slots", params={"fail_on_no_slot": 1}).status_code == 503
        assert llama.get("/health") == {"status": "ok"}   # what needs no engine is answered all the while
        assert scrape(llama.http)["llamacpp:requests_deferred"] == 0
    assert llama.idle()
    before = llama.get("/slots")[0]["id_task"]
    llama.post("/completion", **FIXED)
    assert llama.get("/slots")[0]["id_task"] == before + 2   # the number of the dropped one lies between


def test_many_requests_of_all_kinds_leave_the_text_as_it_is(llama: Running) -> None:
    """Sixty requests, a third of them leaving at random points, some malformed: the fixed text stays."""
    known = llama.post("/completion", **FIXED)["content"]
    dice = random.Random(7)
    for number in range(60):
        kind = dice.randrange(6)
        if kind < 2:
            leave(llama, stream=bool(kind), after_s=dice.random() * 0.03)
        elif kind == 2:
            body = dice.choice(MALFORMED)
            assert llama.http.post("/completion", content=body).status_code == 400
        else:
            llama.post("/completion", **(FIXED | {"prompt": f"Number {number}", "n_predict": 3}))
    assert llama.idle()
    assert llama.post("/completion", **FIXED)["content"] == known


def test_a_failing_device_fails_its_request_alone(qwen: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request gets a 500 with the device's words; the next one begins anew and has its known text."""
    known = qwen.post("/completion", **OWN)
    steps = itertools.count()
    run = Session.prefill

    def fails(session: Session, *given: Any, **named: Any) -> Any:
        if next(steps) == 0:
            run(session, *given, **named)
            raise DeviceError("the device is on fire")
        return run(session, *given, **named)

    monkeypatch.setattr(Session, "prefill", fails)
    error = qwen.post("/completion", 500, **OWN)["error"]
    assert error == {"code": 500, "message": "the device is on fire", "type": "server_error"}
    again = qwen.post("/completion", **OWN)
    assert again["content"] == known["content"]
    assert again["timings"]["cache_n"] == 0


@pytest.mark.parametrize("error", [DeviceMemoryError("no such memory"), MemoryError()])
def test_memory_that_ends_fails_its_request_alone(
    llama_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """The request gets a 500 with the numbers and what to do, the log a line, and the next request its text."""
    with running("-m", llama_path, "-c", 1024) as server:
        with monkeypatch.context() as patch:
            patch.setattr(HostDevice, "allocate_pinned", Mock(side_effect=error))
            refused = server.post("/completion", 500, **FIXED)["error"]
            assert server.http.get("/health").json() == {"status": "ok"}
        assert refused["message"].startswith("no host memory for ")
        assert "MiB of RAM are free); lower --ctx-size" in refused["message"]
        lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(lines) == 1
        assert lines[0].endswith(refused["message"])
        known = server.post("/completion", **FIXED)["content"]
        server.post("/completion", **OWN)
        assert server.post("/completion", **FIXED)["content"] == known


def leave(server: Running, stream: bool, after_s: float) -> None:
    """Ask for a long text and close the connection after a while."""
    address = urlsplit(server.url)
    request = httpx.Request("POST", f"{server.url}/completion", json=LONG | {"stream": stream})
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(f"POST /completion HTTP/1.1\r\n{head}\r\n".encode() + request.content)
        time.sleep(after_s)


def test_a_cancelled_request_leaves_one_line(llama_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What it read, what it wrote, and who ended it; one for those that waited. While it reads, and while it writes."""
    caplog.set_level(logging.INFO)
    told = [7 + at * 31 % 190 for at in range(900)]
    with running("-m", llama_path, "-c", 1024, "-ub", 32) as server:
        body = {"prompt": told, "n_predict": 100, "ignore_eos": True, "stream": True, "return_progress": True}
        with server.http.stream("POST", "/completion", json=body) as reply:
            lines = reply.iter_lines()   # dropping it would close the connection
            for _ in range(4):
                next(lines)
            with pytest.raises(httpx.ReadTimeout):   # two that wait, of one request
                server.http.post("/completion", json={"prompt": ["a", "b"]}, timeout=0.1)
        assert server.idle()
        slot = server.get("/slots")[0]
        read = slot["n_prompt_tokens_processed"]
        assert 0 < read < 900
        assert read % 32 == 0
        assert cancelled(caplog) == [
            "request 1, 2: waited; 0 prompt tokens read; 0 tokens; cancelled by the client",
            f"request 0: 900 prompt tokens, 0 of them cached and {read} read; 0 tokens; cancelled by the client",
        ]
        caplog.clear()
        body |= {"prompt": told[:read], "n_predict": 800}
        with server.http.stream("POST", "/completion", json=body) as reply:
            lines = reply.iter_lines()
            events = (json.loads(line.removeprefix("data: ")) for line in lines if line)
            assert any(event["tokens_predicted"] >= 5 for event in events)
        assert server.idle()
        wrote = server.get("/slots")[0]["next_token"][0]["n_decoded"]
        assert 5 <= wrote < 800
        assert cancelled(caplog) == [
            f"request 3: {read} prompt tokens, {read - 1} of them cached and 1 read; {wrote} tokens; "
            "cancelled by the client"
        ]


def test_parts_of_a_request_that_failed_are_told_of(
    llama_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client did not leave; requests that end well have no such line."""
    caplog.set_level(logging.INFO)
    with running("-m", llama_path, "-c", 1024) as server:
        assert len(server.post("/completion", prompt=[[5], [6]], n_predict=1)) == 2
        assert len(server.stream("/completion", prompt="x", n_predict=1)) == 2
        assert cancelled(caplog) == []
        with monkeypatch.context() as patch:
            patch.setattr(Session, "keep_common", fail_once(Session.keep_common))
            server.post("/completion", 500, prompt=[[5], [6], [7]], n_predict=900, ignore_eos=True)
        assert server.idle()
    lines = cancelled(caplog)   # the second one may run by now
    assert 1 <= len(lines) <= 2
    assert all(line.endswith("; cancelled with the rest of its request") for line in lines)


def fail_once(work: Any) -> Any:
    """As ``work``, but the first call finds a device on fire."""
    calls = itertools.count()

    def fails(*given: Any) -> Any:
        if next(calls) == 0:
            raise DeviceError("the device is on fire")
        return work(*given)

    return fails


def cancelled(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines about requests that did not come to their end."""
    return [each for each in caplog.messages if "cancelled" in each]


def test_erase_forgets(llama: Running) -> None:
    """After it nothing is cached, but for the BOS of other conversations; other slots and actions are refused."""
    held = llama.post("/completion", **OWN)["tokens_cached"]
    assert llama.post("/slots/0?action=erase") == {"id_slot": 0, "n_erased": held}
    assert llama.post("/completion", **OWN)["timings"]["cache_n"] <= 1
    for path in ("/slots/1?action=erase", "/slots/x?action=erase", "/slots/0?action=dance", "/slots/0"):
        assert llama.post(path, 400)["error"]["type"] == "invalid_request_error"
    assert llama.post("/slots/0?action=save", 501)["error"]["type"] == "not_supported_error"


def test_jobs_take_turns() -> None:
    """In order, up to a limit; a cancelled one is told at its next check, a dropped one never runs; after ``close``
    everything that waits learns that it is cancelled, and nothing more is taken."""

    async def play() -> None:
        queue = JobQueue(max_waiting=3)
        go, order = threading.Event(), []

        def work(name: str) -> Any:
            def run(job: Job[str]) -> None:
                go.wait(10)
                order.append(name)
                try:
                    job.check()
                except Cancelled as cancelled:
                    order.append(f"{name} {cancelled}")
                    raise
                job.emit(name)
            return run

        thread = threading.Thread(target=queue.run, daemon=True)
        thread.start()
        first = Job[str](work("first"))
        queue.submit(first)
        while queue.waiting:   # until it runs
            await asyncio.sleep(0)
        rest = [Job[str](work(name)) for name in ("second", "third", "fourth")]
        for job in rest:
            queue.submit(job)
        with pytest.raises(ApiError) as refused:
            queue.submit(Job[str](work("fifth")))
        assert refused.value.code == 503
        assert queue.cancel(rest[0], "dropped")
        assert not queue.cancel(rest[0], "dropped")
        go.set()
        assert [await first.next(), await rest[1].next()] == ["first", "third"]
        assert order[:2] == ["first", "third"]
        await rest[2].next()
        go.clear()
        waiting = [Job[str](work(name)) for name in ("running", "queued")]
        for job in waiting:
            queue.submit(job)
        while queue.waiting > 1:
            await asyncio.sleep(0)
        assert not queue.cancel(waiting[0], "stopped")
        queue.close()
        go.set()
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()
        assert order[-4:] == ["running", "running stopped", "queued", "queued cancelled: the server ends"]
        with pytest.raises(ApiError):
            queue.submit(first)

    assert jobs.MAX_WAITING > 1
    asyncio.run(play())
