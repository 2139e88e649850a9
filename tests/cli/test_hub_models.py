"""``-hf`` from the command line: fetched with a bar, kept in the cache, one clear line where there is no network."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from kvs_cli.open_model import open_model
from kvs_cli.render import Screen
from kvs_core.settings import HubModel, ModelSettings
from tests.cli.conftest import GREEDY, Kvs
from tests.formats.test_hub import FakeHub, cache, hub
from tests.server.running import running

__all__ = ["cache", "hub"]

REPO, FILE = "user/tiny", "tiny-Q4_K_M.gguf"


@pytest.fixture
def filled(hub: FakeHub, tiny_llama: Path) -> FakeHub:
    """A hub with one model of two files."""
    hub.repos[REPO] = {FILE: tiny_llama.read_bytes(), "tiny-Q8_0.gguf": b"GGUF", "README.md": b"x"}
    return hub


def test_a_model_is_fetched_once(filled: FakeHub, kvs: Kvs, cache: Path, tiny_llama: Path) -> None:
    """The first run tells of the bytes and leaves the file where other programs look for it; the next asks nobody."""
    command = ("-p", "x", "-n", "3", *GREEDY)
    first = kvs("run", "-hf", REPO, *command)
    assert first.out == kvs("run", "-m", tiny_llama, *command).out
    size_mib = tiny_llama.stat().st_size / (1 << 20)
    assert re.search(rf"fetching the model: {size_mib:.1f} MiB in [0-9.]+ s, ", first.err)
    [kept] = cache.glob(f"models--user--tiny/snapshots/*/{FILE}")
    assert kept.read_bytes() == tiny_llama.read_bytes()
    assert not list(cache.glob("models--user--tiny/snapshots/*/tiny-Q8_0.gguf"))
    filled.requests.clear()
    for offline in ((), ("--offline",)):
        again = kvs("run", "-hf", f"{REPO}:Q4_K_M", *command, *offline)
        assert again.out == first.out
        assert "fetching the model" not in again.err
    assert not filled.requests


def test_a_terminal_shows_a_bar(filled: FakeHub, tiny_llama: Path) -> None:
    """With what is there and all there is, and nothing of it stays."""
    terminal = io.StringIO()
    screen = Screen(Console(file=terminal, force_terminal=True, width=100))
    assert open_model(ModelSettings(HubModel(REPO, None, None)), screen).spec.arch == "llama"
    whole = f"{tiny_llama.stat().st_size / (1 << 20):.1f} MiB"
    assert f"{whole} of {whole}" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")


@pytest.mark.parametrize("command", ["run", "serve"])
def test_no_network_is_one_line(kvs: Kvs, cache: Path, command: str) -> None:
    """It names the address, or with --offline the cache, and what to do."""
    rest = ("-p", "x") if command == "run" else ("--port", "0")
    error = kvs(command, "-hf", REPO, *rest).error
    assert error.startswith(f"-hf {REPO}: cannot be fetched from http://127.0.0.1:9: ")
    assert "--offline" in error
    error = kvs(command, "-hf", REPO, "--offline", *rest).error
    assert error == f"-hf {REPO}: is not in the cache {cache}; run once without --offline to fetch it"


def test_a_server_is_named_after_its_repository(filled: FakeHub) -> None:
    """Its model's id is what -hf said."""
    with running("-hf", REPO, "-c", 256) as server:
        assert server.get("/v1/models")["data"][0]["id"] == REPO
