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

from kvs_cli.bench import compare
from kvs_cli.bench.compare import CompareSettings, Measured, run_compare, table
from kvs_cli.bench.endpoints import Endpoint, EngineError, Timed, command_of, free_port, started
from kvs_cli.open_model import open_model
from kvs_cli.render import Screen
from kvs_core.bench_text import benchmark_text
from kvs_core.demo import DEMO_MODEL
from kvs_core.errors import SettingsError
from kvs_core.settings import ModelSettings
from tests.cli.conftest import Kvs, kvs  # noqa: F401

MAIN = "import sys; from kvs_cli.app import main; sys.exit(main())"
OTHER = f"{sys.executable} -c '{MAIN}' serve --device cpu -t 1 -m {{model}} --port {{port}} -c {{context}}"


DYING = """#!{python}
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

left = int(sys.argv[2])

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path in ("/health", "/props") else 404)
        self.end_headers()

    def do_POST(self):
        global left
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        left -= 1
        if left < 0:
            os._exit(7)
        last = {{"timings": {{"predicted_n": asked["n_predict"], "prompt_n": 64}}}}
        for event in ({{"content": "a"}}, {{"content": "b"}}, last):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
            self.wfile.flush()

HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""
"""A server with llama-server's API that dies at a request: the one behind so many."""


def compared(folder: Path, *, rounds: int, commands: tuple[str, ...]) -> CompareSettings:
    """kvs, which cannot start, and servers of these commands."""
    return CompareSettings(
        ["--no-such-flag"], None, open_model(ModelSettings(None), Screen()).tokenizer, benchmark_text(), 64, 5, rounds,
        folder / "out", commands=commands,
    )


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
    assert "1 of 3 engines failed, the first: 127.0.0.1:" in ended.err.splitlines()[-1]
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


def test_who_dies_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    """Engines of one name have names of their own, in the table, the CSV and the logs. One dies in its first round with
    its reason, the other is asked in all rounds, and kvs, which does not start here, keeps nobody from it."""
    program = tmp_path / "kvs"
    program.write_text(DYING.format(python=sys.executable))
    program.chmod(0o755)
    template = f"{program} {{port}} "
    engines = run_compare(compared(tmp_path, rounds=3, commands=(f"{template} 2", f"{template} 99", f"{template} 99")))
    assert [engine.name for engine in engines] == ["kvs", "kvs-2", "kvs-3", "kvs-4"]
    assert [len(engine.rounds) for engine in engines] == [0, 1, 3, 3]
    assert "ended with code 7" in engines[1].error
    assert engines[1].error.endswith("kvs-2.log says why")
    assert engines[2].error == engines[3].error == ""
    with (tmp_path / "out" / "compare.csv").open(newline="") as file:
        names = [row["engine"] for row in csv.DictReader(file)]
    assert names == ["kvs-2", "kvs-3", "kvs-4", "kvs-3", "kvs-4", "kvs-3", "kvs-4"]
    assert "| kvs-4 | 3 | " in (tmp_path / "out" / "compare.md").read_text()
    assert (tmp_path / "out" / "logs" / "kvs-4.log").exists()


def test_kvs_is_not_measured_alone(
    kvs: Kvs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,  # noqa: F811
) -> None:
    """Where nobody else is there, or is left, one line ends the comparison: kvs is asked no more."""
    asked: list[int] = []

    @contextmanager
    def ours(*_: object) -> Iterator[compare.Ask]:
        def ask(prompt: str, decode_tokens: int) -> Timed:
            asked.append(decode_tokens)
            return Timed(64, decode_tokens, 1.0, 1.0)

        yield ask

    monkeypatch.setattr(compare, "_server", ours)
    nowhere = f"http://127.0.0.1:{free_port()}"
    command = ("bench", "compare", "--device", "cpu", "--prompt-tokens", "64", "--decode-tokens", "5", "--rounds", "4",
               "--output", tmp_path / "out")
    said = kvs(*command, "--against", nowhere, "--against", nowhere).error
    name = nowhere.removeprefix("http://")
    silent = f"{nowhere} does not answer /health or /v1/models"
    assert said == f"nothing is left to compare kvs with after 0 of 4 rounds: {name}: {silent}; {name}-2: {silent}"
    assert 5 not in asked
    warm_alone = USAGE.replace('"completion_tokens": 2', '"completion_tokens": 4')   # right for the warm-up's four
    with openai(chunk("a"), chunk("b"), warm_alone) as (there, _):
        ended = kvs(*command, "--against", f"http://127.0.0.1:{there._port}")
    assert ended.error.startswith("nothing is left to compare kvs with after 0 of 4 rounds: 127.0.0.1:")
    assert asked.count(5) == 1


@pytest.mark.parametrize(("arguments", "error"), [
    ((), "nothing to compare with"),
    (("--against", "host:1"), "--against"),
    (("--against-command", "srv"), "{port}"),
    (("--against-offloaded", "-c", "512"), "--prompt-tokens"),
    (("--against-offloaded", "--port", "1"), "--port"),
    (("--against-offloaded", "--prompt-file", "nowhere"), "nowhere"),
    (("--against-offloaded", "-m", "nowhere.gguf"), "nowhere.gguf"),
    (("--against-offloaded", "--prompt-tokens", "32768"),
     "--prompt-tokens: that takes a context of 33024 tokens, the model has 32768 at most"),
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
    assert "nothing is left to compare kvs with after 0 of 1 rounds: transformers, offloaded: " in ended.error
    assert "pip install transformers" in ended.error or "needs a GPU" in ended.error
    assert list(csv.DictReader((tmp_path / "compare.csv").open())) == []
