"""``GET /metrics``: kvs's own names beside llama-server's, and numbers that agree with what requests did."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvs_core.engine.engine import Engine
from kvs_core.engine.session import Session
from tests.server.running import Running, running
from tests.server.scrapes import scrape

KVS = {
    "pool_pages", "resident_pages", "ring_slots", "active_pages", "streamed_pages_per_step", "history_bytes",
    "arena_bytes", "h2d_bytes_total", "h2d_calls_total", "d2h_bytes_total", "stall_seconds_total",
    "repartitions_total", "link_bytes_per_second", "link_share", "cached_tokens_total", "queue_length",
    "parked_conversations", "parked_bytes",
}  # fmt: skip
ECHO = "the sea the river the sea the river the sea the river the sea the river the sea the river"


@pytest.fixture(scope="module")
def drafting(llama_path: Path) -> Iterator[Running]:
    """Drafts by two types, and a pool for 256 tokens."""
    with running(
        "-m", llama_path, "-c", 1024, "--metrics", "--kv-page-tokens", 32, "--kv-stream-pool-mib", 1, "-ub", 32,
        "-ctk", "f32", "-ctv", "f32",
        "--kv-stream-ring-slots", 4, "--spec-type", "ngram-simple,ngram-map-k", "--spec-ngram-simple-size-n", 3,
        "--spec-ngram-simple-size-m", 4, "--spec-ngram-map-k-size-n", 2, "--spec-ngram-map-k-size-m", 3,
    ) as server:
        yield server


def test_every_number_of_the_cache_is_there(drafting: Running) -> None:
    """Pages by place, bytes and calls both ways, the link, hits, the queue; counters never fall."""
    before = scrape(drafting.http)
    assert {f"kvs:{name}" for name in KVS} <= before.keys()
    reply = drafting.post("/completion", prompt=[7] * 300, n_predict=8, ignore_eos=True, cache_prompt=False)
    hit = drafting.post("/completion", prompt=[7] * 300, n_predict=8, ignore_eos=True)["timings"]["cache_n"]
    after = scrape(drafting.http)
    assert reply["tokens_evaluated"] == 300
    assert after["kvs:cached_tokens_total"] - before["kvs:cached_tokens_total"] == hit > 0
    assert after["kvs:active_pages"] >= 4 * (300 // 32)
    assert after["kvs:resident_pages"] + after["kvs:ring_slots"] <= after["kvs:pool_pages"]
    assert after["kvs:streamed_pages_per_step"] > 0
    for name in ("h2d_bytes_total", "h2d_calls_total", "d2h_bytes_total"):
        assert after[f"kvs:{name}"] > before[f"kvs:{name}"]
    assert all(after[name] >= before[name] for name in before if name.endswith("_total"))


def test_the_links_share_is_of_the_time_between_scrapes(drafting: Running) -> None:
    """Bytes copied since the last scrape, over what the link could have moved in that time; zero when idle."""
    first_s, first = time.perf_counter(), scrape(drafting.http)
    drafting.post("/completion", prompt=[9] * 300, n_predict=40, ignore_eos=True, cache_prompt=False)
    second = scrape(drafting.http)
    took_s = time.perf_counter() - first_s
    moved = second["kvs:h2d_bytes_total"] - first["kvs:h2d_bytes_total"]
    assert second["kvs:link_share"] >= moved / (second["kvs:link_bytes_per_second"] * took_s) > 0
    assert second["kvs:link_share"] < 1
    assert scrape(drafting.http)["kvs:link_share"] == 0


def test_drafts_are_counted_by_type(drafting: Running) -> None:
    """What a reply's timings count is what the types gained together; their shares are ratios of the counters."""
    before = scrape(drafting.http)
    reply = drafting.post("/completion", prompt=ECHO, n_predict=60, temperature=0, ignore_eos=True)["timings"]
    assert reply["draft_n"] > 0
    after = scrape(drafting.http)

    def gained(name: str) -> float:
        return sum(after[each] - before.get(each, 0) for each in after if each.startswith(f"kvs:{name}:"))

    assert gained("draft_tokens_total") == reply["draft_n"]
    assert gained("draft_accepted_tokens_total") == reply["draft_n_accepted"]
    assert gained("drafts_total") > 0
    assert after["llamacpp:spec_decode_num_draft_tokens_total"] == sum(
        after[each] for each in after if each.startswith("kvs:draft_tokens_total:"))
    for drafter in ("ngram-simple", "ngram-map-k"):
        tokens = after[f"kvs:draft_tokens_total:{drafter}"]
        share = after[f"kvs:draft_accepted_tokens_total:{drafter}"] / tokens if tokens else 0
        assert after[f"kvs:draft_acceptance:{drafter}"] == share


def test_the_queue_is_told_while_it_waits(drafting: Running) -> None:
    """One request runs, one waits: metrics answer meanwhile and say so, and no more once the second has left."""
    long = {"prompt": "The sea", "n_predict": 900, "ignore_eos": True, "stream": True, "temperature": 3, "top_k": 0}
    with drafting.http.stream("POST", "/completion", json=long) as first:
        lines = first.iter_lines()   # dropping it would close the connection
        next(lines)
        address = urlsplit(drafting.url)
        body = b'{"prompt": "x", "n_predict": 1}'
        with socket.create_connection((address.hostname, address.port)) as second:
            second.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            assert becomes(drafting, 1)
            assert scrape(drafting.http)["llamacpp:requests_processing"] == 1
        assert becomes(drafting, 0)
    assert drafting.idle()


def becomes(server: Running, waiting: int) -> bool:
    """Whether that many requests wait, within two seconds, by either name."""
    end = time.monotonic() + 2
    while time.monotonic() < end:
        seen = scrape(server.http)
        assert seen["kvs:queue_length"] == seen["llamacpp:requests_deferred"]
        if seen["kvs:queue_length"] == waiting:
            return True
    return False


def test_no_reply_looks_into_the_engine_while_it_runs(llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine and session are the engine thread's alone, whatever is asked in the meantime: steps change what they
    hold. What a scrape tells comes from snapshots, which the scrape itself has kept fresh."""
    threads: set[str] = set()
    for kind in (Engine, Session):
        look = kind.__getattribute__

        def noted(self: Any, name: str, look: Any = look) -> Any:
            threads.add(threading.current_thread().name)
            return look(self, name)

        monkeypatch.setattr(kind, "__getattribute__", noted)
    with running("-m", llama_path, "-c", 1024, "--metrics", "--kv-page-tokens", 32) as server:
        published = scrape(server.http)["kvs:d2h_bytes_total"]
        long = {"prompt": "The sea", "n_predict": 900, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/completion", json=long) as reply:
            lines = reply.iter_lines()   # dropping it would close the connection
            next(lines)
            for path in ("/health", "/v1/models", "/props", "/slots", "/kvs/live"):
                server.get(path)
            server.post("/tokenize", content="The sea")
            end = time.monotonic() + 20
            while (now := scrape(server.http))["kvs:d2h_bytes_total"] == published:
                assert time.monotonic() < end, "the counters stand still"
                time.sleep(0.01)
            assert now["llamacpp:requests_processing"] == 1
    assert threads == {"engine"}
