"""The command line as a function, and tiny models for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvs_cli import app
from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.tokenizer import Tokenizer
from tests.support.tiny_gguf import (
    Gemma4,
    write_tiny_gemma3,
    write_tiny_gemma4,
    write_tiny_llama,
    write_tiny_qwen35,
)

GREEDY = ("--temp", "0")


def tokenizer_of(path: Path) -> Tokenizer:
    """The tokenizer of a model file."""
    return Tokenizer.from_metadata(GgufFile.open(path).metadata, source="test")


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code and what it wrote. ``as_json``: it was asked for JSON."""

    code: int
    out: str
    err: str
    as_json: bool = False

    @property
    def error(self) -> str:
        """The error of a command that failed as commands may fail: one line, the last one, and nothing on stdout but
        the object that has it, where JSON was asked for."""
        assert self.code == 1, self.err
        lines = self.err.splitlines()
        assert [line.startswith("error: ") for line in lines] == [False] * (len(lines) - 1) + [True], self.err
        error = lines[-1].removeprefix("error: ")
        assert (json.loads(self.out)["error"] == error) if self.as_json else (self.out == "")
        return error

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1
        value: dict[str, Any] = json.loads(self.out)
        return value


Kvs = Callable[..., Ended]


@pytest.fixture
def kvs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Kvs:
    """``kvs("run", "-m", path, ...)`` in this process, with no settings from the environment."""
    for name in ("LLAMA_ARG_MODEL", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def call(*argv: object) -> Ended:
        capsys.readouterr()
        code = app.main([str(argument) for argument in argv])
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err, "--json" in argv)

    return call


@pytest.fixture(scope="session")
def tiny_qwen35(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 recurrent and 2 attention layers, one MTP block; no BOS."""
    return write_tiny_qwen35(tmp_path_factory.mktemp("tiny") / "qwen35.gguf", seed=1)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 attention layers; a BOS in front of every text."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf", seed=2, pre="llama-bpe")


@pytest.fixture(scope="session")
def tiny_gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """5 attention layers, three of which see 80 tokens; the last two have no keys and values of their own."""
    return write_tiny_gemma4(tmp_path_factory.mktemp("tiny") / "gemma4.gguf", seed=1, more=Gemma4(shared=2))


@pytest.fixture(scope="session")
def tiny_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 attention layers, two of which see 80 tokens; a BOS in front of every text, no space."""
    return write_tiny_gemma3(tmp_path_factory.mktemp("tiny") / "gemma3.gguf", seed=1)
