"""kvs against other engines: what is asked of them, what is made of the answers, and two real servers."""

from __future__ import annotations

import csv
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvs_cli.bench.compare import Measured, table
from kvs_cli.bench.endpoints import Endpoint, EngineError, Timed, command_of, free_port, started
from kvs_core.demo import DEMO_MODEL
from kvs_core.errors import SettingsError
from tests.cli.conftest import Kvs, kvs  # noqa: F401

MAIN = "import sys; from kvs_cli.app import main; sys.exit(main())"
OTHER = f"{sys.executable} -c '{MAIN}' serve --device cpu -t 1 -m {{model}} --port {{port}} -c {{context}}"


class OpenAi(BaseHTTPRequestHandler):
    """A server with OpenAI's completions alone; ``server.lines`` are what it streams, ``server.bodies`` what it got."""

    server: Any

    def do_GET(self) -> None:
        known = self.path == "/v1/models"
        self._answer(200 if known else 404, json.dumps({"data": [{"id": "m"}]} if known else {"error": "no"}))

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.bodies[-1]["path"], self.server.bodies[-1]["key"] = self.path, self.headers["Authorization"]
        self._answer(self.server.status, "".join(f"{line}\n\n" for line in self.server.lines))

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        for line in text.splitlines(keepends=True):
            self.wfile.write(line.encode())
            self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def openai(*lines: str, status: int = 200) -> Iterator[tuple[Endpoint, list[dict[str, Any]]]]:
    """An endpoint of a server that answers so, and the requests that it has had."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), OpenAi)
    server.lines, server.status, server.bodies = lines, status, []
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield Endpoint(f"http://127.0.0.1:{server.server_port}/v1", "secret"), server.bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def chunk(text: str) -> str:
    """A piece of a streamed completion."""
    return "data: " + json.dumps({"choices": [{"text": text}]})


USAGE = 'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}'


def test_openai_is_asked_where_there_is_nothing_else() -> None:
    """A greedy, streamed completion of the model that the server names, with its key; counts are the usage's."""
    with openai(chunk("a"), chunk("b"), USAGE, "data: [DONE]") as (endpoint, bodies):
        assert endpoint.is_ready()
        timed = endpoint.time("text", 2)
    assert (timed.prompt_tokens, timed.decode_tokens) == (7, 2)
    assert timed.first_token_ms > 0
    assert timed.decode_tps > 0
    asked = bodies[0]
    assert (asked["path"], asked["key"]) == ("/v1/completions", "Bearer secret")
    assert (asked["model"], asked["max_tokens"], asked["temperature"], asked["prompt"]) == ("m", 2, 0, "text")


@pytest.mark.parametrize(("lines", "status", "error"), [
    ((chunk("a"), chunk("b")), 200, "does not count"),
    ((chunk("a"), chunk("b"), USAGE.replace('"completion_tokens": 2', '"completion_tokens": 3')), 200, "instead of 2"),
    ((chunk("a"), USAGE), 200, "came at once"),
    (('data: {"error": {"message": "too long"}}',), 200, "too long"),
    (("data: {",), 200, "JSONDecodeError"),
    (("no\nmore",), 500, "answers 500: 'no more'"),
])
def test_other_answers_are_one_line(lines: tuple[str, ...], status: int, error: str) -> None:
    """What cannot be timed, or is not what was asked for, is no measurement."""
    with openai(*lines, status=status) as (endpoint, _), pytest.raises(EngineError, match=error) as raised:
        endpoint.time("text", 2)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8080", "ftp://host", "http://", "http://host:port", "http://[::1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    """One line that names the flag."""
    with pytest.raises(SettingsError, match="--against"):
        Endpoint(url)


def test_commands_are_words_with_places_filled_in(tmp_path: Path) -> None:
    """As a shell splits them, but without one: a name with spaces stays one word."""
    model = tmp_path / "a model.gguf"
    assert command_of("srv -m {model} --port={port} -c {context} 'x y'", model=model, port=7, context=512) == [
        "srv", "-m", str(model), "--port=7", "-c", "512", "x y"]
    for template, named in (("srv", "{port}"), ("srv '{port}", "quotation"), ("", "{port}")):
        with pytest.raises(SettingsError, match=named):
            command_of(template, model=model, port=7, context=512)
    with pytest.raises(SettingsError, match="synthesize"):
        command_of("srv {model} {port}", model=None, port=7, context=512)


def test_a_server_that_does_not_start_is_one_line(tmp_path: Path) -> None:
    """A program that there is not, and one that ends."""
    nowhere, ends = [str(tmp_path / "nowhere")], [sys.executable, "-c", "exit(3)"]
    for command, error in ((nowhere, "No such file"), (ends, "code 3")):
        with pytest.raises(EngineError, match=error), started(command, free_port(), tmp_path / "log"):
            pass


def test_ratios_are_of_the_same_round() -> None:
    """kvs by the other, round by round, so that what slows a whole round down does not count."""
    ours = Measured("kvs", [Timed(100, 8, 50.0, rate) for rate in (20.0, 10.0, 30.0)])
    other = Measured("other", [Timed(100, 8, 100.0, rate) for rate in (10.0, 5.0, 60.0)])
    assert other.ratio(ours, "decode_tps") == 2.0
    assert other.ratio(ours, "prefill_tps") == 2.0
    assert ours.median("decode_tps") == 20.0
    lines = table([ours, other, Measured("broken", error="it broke")])
    assert lines[3] == "| other | 3 | 100 | 1000.0 | 100 | 10.00 | 2.000 | 2.000 |"
    assert "it broke" in lines[4]


def test_two_real_servers_are_asked_in_turn(kvs: Kvs, tmp_path: Path) -> None:  # noqa: F811
    """kvs and a server of another command read the same tokens in every round and are timed alike; an address where
    nobody answers is named with its error, and does not keep the others from being measured."""
    out = tmp_path / "out"
    ended = kvs("bench", "compare", "--device", "cpu", "-t", "1", "-m", DEMO_MODEL, "--against-command", OTHER,
                "--against", f"http://127.0.0.1:{free_port()}", "--prompt-tokens", "64", "--decode-tokens", "6",
                "--rounds", "2", "--output", out)
    assert ended.code == 1
    assert "does not answer" in ended.err.splitlines()[-1]
    with (out / "compare.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [row["engine"] for row in rows]
    assert names == ["kvs", Path(sys.executable).name] * 2
    assert [row["round"] for row in rows] == ["1", "1", "2", "2"]
    assert {row["decode_tokens"] for row in rows} == {"6"}
    assert rows[0]["prompt_tokens"] == rows[1]["prompt_tokens"]
    assert 60 <= int(rows[0]["prompt_tokens"]) <= 80
    facts = json.loads((out / "compare.json").read_text())
    assert [engine["error"] is None for engine in facts["engines"]] == [True, True, False]
    assert facts["engines"][1]["kvs_over_it_decode_tps"] > 0
    assert facts["machine"]["command"].startswith("kvs")
    assert ended.out == (out / "compare.md").read_text()


@pytest.mark.parametrize(("arguments", "error"), [
    ((), "nothing to compare with"),
    (("--against", "host:1"), "--against"),
    (("--against-command", "srv"), "{port}"),
    (("--against-offloaded", "-c", "512"), "--prompt-tokens"),
    (("--against-offloaded", "--port", "1"), "--port"),
    (("--against-offloaded", "--prompt-file", "nowhere"), "nowhere"),
    (("--against-offloaded", "-m", "nowhere.gguf"), "nowhere.gguf"),
    (("--against-offloaded", "--prompt-tokens", "32768"),
     "--prompt-tokens: that takes a context of 33024 tokens, the model was trained for 32768"),
    (("--against-offloaded", "-m", "synthetic:tiny:q4_k", "--spec-type", "draft-mtp"), "has no MTP block"),
])
def test_bad_flags_start_nothing(
    kvs: Kvs, tmp_path: Path, arguments: tuple[str, ...], error: str,  # noqa: F811
) -> None:
    """One line before any engine is started."""
    assert error in kvs("bench", "compare", "--output", tmp_path / "out", *arguments).error
    assert not (tmp_path / "out").exists()


def test_the_offloaded_cache_says_what_it_lacks(kvs: Kvs, tmp_path: Path) -> None:  # noqa: F811
    """transformers is optional, and its offloaded cache needs a GPU: one line says which is missing."""
    ended = kvs("bench", "compare", "--device", "cpu", "-t", "1", "-m", DEMO_MODEL, "--against-offloaded",
                "--prompt-tokens", "64", "--decode-tokens", "2", "--rounds", "1", "--output", tmp_path)
    assert ended.code == 1
    assert "pip install transformers" in ended.err or "needs a GPU" in ended.err
    assert len(list(csv.DictReader((tmp_path / "compare.csv").open()))) == 1
