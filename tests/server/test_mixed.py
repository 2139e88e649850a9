"""Three hundred requests of every kind, from several clients at once, a third of whom leave at random points."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.conftest import THINKING
from tests.server.processes import Spawned, spawned
from tests.server.scrapes import scrape
from tests.server.test_chat import TOOL
from tests.support.tiny_gguf import write_tiny_qwen35

REQUESTS, CLIENTS, SEED = 300, 3, 11
GROWTH_BYTES = 6 << 20
"""What the process may keep of 300 requests, 20 KiB each: it kept 1 to 3 MiB, and nothing more after a thousand."""

KEY = {"Authorization": "Bearer sesame"}
FIXED: dict[str, Any] = {"prompt": "The river in the north", "n_predict": 12, "temperature": 0}
SCHEMA = {"type": "object", "properties": {"sea": {"enum": [1, 2]}}, "required": ["sea"], "additionalProperties": False}
SAID: Any = [{"role": "user", "content": "hello"}]
PLAIN: dict[str, Any] = {"temperature": 0, "reasoning_effort": "none"}


@dataclass(frozen=True)
class Kind:
    """One kind of request and the status of its answer. ``same``: the answer's text is the one of a quiet server."""

    method: str
    path: str
    body: dict[str, Any] | None = None
    raw: bytes | None = None
    status: int = 200
    same: bool = False
    headers: dict[str, str] = field(default_factory=lambda: KEY)

    @property
    def content(self) -> bytes:
        """The body as it is sent."""
        return self.raw if self.raw is not None else b"" if self.body is None else json.dumps(self.body).encode()


def post(path: str, status: int = 200, **body: Any) -> Kind:
    """A JSON request; where it succeeds, its text is always the same."""
    return Kind("POST", path, body, status=status, same=status == 200)


def raw(body: bytes, status: int = 400) -> Kind:
    """A body that is no request."""
    return Kind("POST", "/completion", raw=body, status=status)


ENGINE = (
    post("/completion", **FIXED),
    post("/completion", **FIXED, cache_prompt=False),
    post("/completion", **FIXED, stream=True),
    post("/completion", **FIXED | {"prompt": "The children of the village know"}, n_probs=3, stream=True),
    post("/completion", **FIXED | {"prompt": ["The sea", "The mountain is high"], "n_predict": 4}),
    post("/completion", **FIXED, grammar='root ::= [a-z ]{4,9} "."'),
    post("/completion", **FIXED | {"prompt": [7] * 90, "n_predict": 2}, t_max_predict_ms=500),
    post("/v1/completions", **FIXED | {"prompt": "def read(page, layer):", "n_predict": 8}),
    post("/v1/completions", **FIXED | {"prompt": "One, two", "n_predict": 8}, stream=True),
    post("/v1/chat/completions", messages=SAID, max_tokens=8, **PLAIN),
    post("/v1/chat/completions", messages=SAID, max_tokens=8, **PLAIN, stream=True),
    post("/v1/chat/completions", messages=SAID, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2),
    post("/v1/chat/completions", messages=SAID, max_tokens=40, **PLAIN,
         response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
    post("/v1/chat/completions", messages=SAID, max_tokens=90, **PLAIN, tools=[TOOL], tool_choice="required"),
    post("/v1/chat/completions", messages=SAID, max_tokens=90, **PLAIN, tools=[TOOL], tool_choice="required",
         stream=True),
    post("/v1/messages", messages=SAID, max_tokens=6, temperature=0),
    post("/v1/messages", messages=SAID, max_tokens=6, temperature=0, stream=True),
    post("/v1/responses", input="hello", max_output_tokens=6, **PLAIN),
)  # fmt: skip
LONG = post("/completion", **FIXED | {"n_predict": 400, "ignore_eos": True}, stream=True)   # for those who leave
QUICK = (
    post("/tokenize", content="the sea, the river"),
    post("/detokenize", tokens=[72, 105]),
    post("/apply-template", messages=SAID),
    post("/v1/messages/count_tokens", messages=SAID),
    Kind("POST", "/slots/0?action=erase"),
    *(Kind("GET", path) for path in ("/health", "/v1/models", "/props", "/slots", "/metrics", "/lora-adapters")),
)
WRONG = (
    Kind("GET", "/v1/models", status=401, headers={"Authorization": "Bearer wrong"}),
    Kind("POST", "/completion", FIXED, status=401, headers={"X-Api-Key": "sesam"}),
    Kind("POST", "/v1/chat/completions", {"messages": SAID}, status=401, headers={}),
    *(raw(body) for body in (b"", b"{", b"[1]", b'{"prompt": 1e99}', b"\xff\xfe", b"[" * 50_000, b'{"prompt": "x", ',
                             b'{"prompt": "x", "n": 7}', b'{"prompt": "x", "temperature": "hot"}', b"\0" * 500,
                             b'{"prompt": [99999]}', b'{"prompt": "x", "grammar": "root ::= ("}')),
    post("/completion", 400, prompt=[5] * 3000),
    post("/v1/chat/completions", 400, messages=[{"role": "user", "content": "the sea " * 3000}]),
    post("/v1/chat/completions", 400, messages=[{"role": "nobody"}]),
    post("/v1/chat/completions", 400, tools=[TOOL], messages=SAID, grammar="root ::= [a-c]"),
    post("/v1/messages", 400, max_tokens=3),
    post("/slots/0?action=save", 501, filename="x"),
    post("/v1/embeddings", 501, input="x"),
    post("/infill", 501, input_prefix="x", input_suffix="y"),
    *(Kind(method, path, status=404) for method, path in (
        ("GET", "/nope"), ("GET", "/completion"), ("DELETE", "/v1/models"), ("POST", "/../etc/passwd"))),
)  # fmt: skip
HUGE = raw(b"x" * 1000, 413)   # and says that a gigabyte comes


POOLED = 4
"""Threads of pools, made when so many are first needed at once. One left behind by each request would be hundreds."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spawned]:
    """Recurrent layers and an arena that holds a part of the pages, in a process whose memory can be looked at."""
    folder = tmp_path_factory.mktemp("mixed")
    path = write_tiny_qwen35(folder / "qwen35.gguf", seed=1)
    with spawned(
        folder, "-m", path, "-c", 1024, "-ub", 128, "--chat-template", THINKING, "--api-key", "sesame", "--metrics",
        "--cache-ram", 4, "--threads-http", 2, "--no-webui", headers=KEY,
    ) as server:
        yield server


def test_three_hundred_mixed_requests(server: Spawned) -> None:
    """Every answer is right, where it is a text the one of a quiet server; afterwards memory, files and threads are
    what they were, and every fixed request has its known text."""
    known = {kind.path + kind.content.decode(): answer(server, kind) for kind in (*ENGINE, *QUICK) if kind.same}
    files = server.open_files
    play(server, known, random.Random(SEED + 1), 120)   # until pools and caches have their size
    held_bytes, threads = server.resident_bytes, server.threads
    left = play(server, known, random.Random(SEED), REQUESTS)
    assert left == REQUESTS // 3
    assert server.idle()
    assert server.resident_bytes - held_bytes < GROWTH_BYTES
    assert server.threads <= threads + POOLED
    end = time.monotonic() + 10   # connections that nobody uses are kept for 5 s
    while server.open_files > files:
        assert time.monotonic() < end, f"{server.open_files} files are open, {files} were"
        time.sleep(0.05)
    for kind in ENGINE:
        assert answer(server, kind) == known[kind.path + kind.content.decode()]
    seen = scrape(server.http)
    assert seen["llamacpp:requests_processing"] == seen["kvs:queue_length"] == 0
    assert "internal error" not in server.log
    assert "Traceback" not in server.log


def play(server: Spawned, known: dict[str, str], dice: random.Random, count: int) -> int:
    """Requests from several clients, each with its own part of them; how many left. Raises what a client saw wrong."""
    kinds = [*ENGINE, *QUICK, *WRONG, HUGE]   # each is answered at least once
    more = dice.choices([*ENGINE * 3, *QUICK, *WRONG], k=count - count // 3 - len(kinds))
    asked = [(kind, False) for kind in kinds + more]
    asked += [(kind, True) for kind in dice.choices([*ENGINE, *QUICK, *WRONG, *[LONG] * 30], k=count // 3)]
    dice.shuffle(asked)
    seeds = [dice.random() for _ in asked]
    failures: list[BaseException] = []
    left: Counter[bool] = Counter()

    def client(number: int) -> None:
        with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as http:
            for at in range(number, count, CLIENTS):
                kind, leaves = asked[at]
                try:
                    if leaves:
                        leave(server, kind, random.Random(seeds[at]))
                    else:
                        check(http, server, kind, known)
                    left[leaves] += 1
                except Exception as error:
                    failures.append(error)
                    return

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    if failures:
        raise failures[0]
    assert left.total() == count
    return left[True]


def check(http: httpx.Client, server: Spawned, kind: Kind, known: dict[str, str]) -> None:
    """Ask and compare: the status, the text where it is known, an error of one line where it is one."""
    if kind is HUGE:
        assert huge(server) == 413
        return
    reply = http.request(kind.method, kind.path, content=kind.content, headers=kind.headers)
    assert reply.status_code == kind.status, (kind, reply.text)
    if kind.same:
        assert text_of(reply) == known[kind.path + kind.content.decode()], kind
    elif kind.status >= 400:
        error = reply.json()["error"]
        assert error["code"] == kind.status
        assert "\n" not in error["message"]
        assert "internal" not in error["message"]
    elif kind.path != "/metrics":
        json.loads(reply.text)


def answer(server: Spawned, kind: Kind) -> str:
    """The text of a kind's answer, which has to succeed."""
    reply = server.http.request(kind.method, kind.path, content=kind.content)
    assert reply.status_code == kind.status, (kind, reply.text)
    return text_of(reply)


def text_of(reply: httpx.Response) -> str:
    """What of a reply depends on the model alone: without ids, times, and what was cached."""
    if reply.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
        assert lines
        return json.dumps(lasting([json.loads(line) for line in lines if line != "[DONE]"]))
    return json.dumps(lasting(reply.json()))


VOLATILE = ("id", "created", "created_at", "completed_at", "timings", "usage", "generation_settings", "call_id",
            "item_id", "tokens_cached", "response", "message_id", "logprob", "bytes", "id_slot")


def lasting(value: Any) -> Any:
    """``value`` without what differs from one request to the next."""
    if isinstance(value, dict):
        return {name: lasting(each) for name, each in value.items()
                if name not in VOLATILE or (name == "id" and isinstance(each, int))}
    return [lasting(each) for each in value] if isinstance(value, list) else value


def leave(server: Spawned, kind: Kind, dice: random.Random) -> None:
    """Send a request or a part of it, perhaps read a part of the answer, and close or reset the connection."""
    sent = wire(server, kind, len(kind.content))
    cut = dice.choice([dice.randrange(1, len(sent)), len(sent), len(sent)])
    with connection(server) as link:
        link.sendall(sent[:cut])
        if cut == len(sent) and dice.random() < 0.5:
            link.recv(dice.randrange(1, 400))
        else:
            time.sleep(dice.random() * 0.03)
        if dice.random() < 0.5:   # a reset instead of an orderly end
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def huge(server: Spawned) -> int:
    """The status for a request that says it is a gigabyte, of which a little is sent."""
    with connection(server) as link:
        link.sendall(wire(server, HUGE, 10**9))
        return int(link.recv(400).split()[1])


def wire(server: Spawned, kind: Kind, size_bytes: int) -> bytes:
    """The request's bytes, with a length that may be another than the body's."""
    headers = {"Host": urlsplit(server.url).netloc, "Content-Length": str(size_bytes), **kind.headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{kind.method} {kind.path} HTTP/1.1\r\n{head}\r\n".encode() + kind.content


def connection(server: Spawned) -> socket.socket:
    """A new one."""
    address = urlsplit(server.url)
    assert address.hostname is not None
    assert address.port is not None
    return socket.create_connection((address.hostname, address.port), timeout=30)
