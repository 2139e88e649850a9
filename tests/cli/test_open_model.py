"""Which model a command opens, and how: overrides, the cache, a look at the weights, and settings it cannot honour."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvs_core.engine.engine import Engine
from kvs_core.errors import DeviceError
from kvs_core.settings import HubModel
from kvs_core.streaming.kv_stream import KvStream
from tests.cli.conftest import GREEDY, Kvs
from tests.support.broken_gguf import rewrite
from tests.support.tiny_gguf import write_tiny_llama


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("-l", "99999+1"), "token 99999"),
        (("--override-kv", "llama.block_count=int:9"), "blk.4."),
        (("--override-kv", "llama.block_count=str:x"), "give the type it has there"),
        (("--override-kv", "nonsense"), "write key=type:value"),
        (("--rope-freq-scale", "1e300"), "--rope-freq-scale 1e+300: give"),
        (("--rope-scale", "1e-7"), "--rope-scale 1e-07: give"),
        (("--kv-residency-mode", "resident", "--kv-stream-arena-mib", "2", "-c", "16384"), "arena too small"),
        (("--kv-stream-pool-mib", "1"), "KV pool too small"),
        (("--chat-template-file", "/nowhere", "--chat"), "--chat-template-file /nowhere: No such file"),
    ],
    ids=lambda part: part[0] if isinstance(part, tuple) else "",
)
def test_settings_that_a_model_cannot_honour(
    kvs: Kvs, tiny_llama: Path, flags: tuple[str, ...], words: str
) -> None:
    """Each is one line that names the setting or what it leads to, with nothing on stdout."""
    assert words in kvs("run", "-m", tiny_llama, "-p", "x", "-n", "1", *flags).error


def test_override_kv_is_what_the_model_says(kvs: Kvs, tiny_llama: Path) -> None:
    """An overridden key counts wherever the file's own would, sampling defaults too."""
    command = ("run", "-m", tiny_llama, "-p", "x", "-n", "4", "--json")
    overrides = ("--override-kv", "general.name=str:other,llama.context_length=int:512",
                 "--override-kv", "general.sampling.temp=float:0")
    done = kvs(*command, "-c", "4096", *overrides)
    assert done.json["model"]["name"] == "other"
    assert "--ctx-size 4096: the model was trained for 512 tokens" in done.err
    assert done.json["token_ids"] == kvs(*command, *GREEDY).json["token_ids"]


@pytest.mark.parametrize("command", ["run", "info", "plan"])
def test_a_context_that_is_rounded_up_is_said_once(kvs: Kvs, tiny_llama: Path, command: str) -> None:
    """As a log line; one that is not has none, and what the model cannot have is told otherwise."""
    model = ("-m", tiny_llama, "-p", "x", "-n", "1") if command == "run" else (tiny_llama,)
    shorter = ("--override-kv", "llama.context_length=int:500")

    def said(*flags: str) -> list[str]:
        lines = kvs(command, *model, *flags).err.splitlines()
        return [line for line in lines if line.startswith(("context:", "--ctx-size", "warning: --ctx-size"))]

    assert said("-c", "300") == ["context: 512 tokens; --ctx-size 300 is rounded up to a multiple of 256"]
    assert said("-c", "300", *shorter) == [
        "context: 500 tokens; --ctx-size 300 is rounded up to the longest context of the model"]
    assert said("-c", "300", "--verbosity", "2") == []
    assert said("-c", "512") == said() == said(*shorter) == []
    assert "the context is 500" in said("-c", "501", *shorter)[0]


def test_check_tensors(kvs: Kvs, tiny_llama: Path, tmp_path: Path) -> None:
    """A weight that is no number is found before anything runs, with its tensor; sound weights pass."""
    def spoil(name: str, data: Any) -> Any:
        if name == "blk.1.ffn_up.weight":
            data = data.copy()
            data[3, 5] = float("nan")
        return data

    broken = tmp_path / "nan.gguf"
    rewrite(tiny_llama, broken, change=spoil)
    error = kvs("run", "-m", broken, "-p", "x", "--check-tensors").error
    assert f"{broken}: 1 of 8192 weights in tensor blk.1.ffn_up.weight are NaN or infinite" in error
    assert "checking weights: " in kvs("run", "-m", tiny_llama, "-p", "x", "-n", "1", "--check-tensors").err
    assert "logits as NaN" in kvs("run", "-m", broken, "-p", "x", "-n", "1").error


def test_models_from_the_cache(
    kvs: Kvs, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository or an address that is in the cache runs offline; one that is not says so; the cache is listed."""
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path))
    for place in ("models--user--tiny/snapshots/abc", "urls/example.org/dir"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "tiny-Q8_0.gguf").write_bytes(tiny_llama.read_bytes())
    rest = ("-p", "x", "-n", "3", "--offline", *GREEDY)
    expected = kvs("run", "-m", tiny_llama, *rest).out
    for source in (("-hf", "user/tiny:q8_0"), ("-hf", "user/tiny", "-hff", "tiny-Q8_0.gguf", "-hft", "secret"),
                   ("-mu", "https://example.org/dir/tiny-Q8_0.gguf")):
        done = kvs("run", *source, *rest)
        assert done.out == expected
        assert "secret" not in done.err
    assert "is not in the cache" in kvs("run", "-hf", "user/other", *rest).error
    assert "are each a model" in kvs("run", "-hf", "user/tiny", "-m", tiny_llama, *rest).error
    assert "give that with --hf-repo" in kvs("run", "-hff", "x.gguf", *rest).error
    assert kvs("run", "--cache-list").out.splitlines() == [
        "example.org/dir  tiny-Q8_0.gguf  1 MiB", "user/tiny  tiny-Q8_0.gguf  1 MiB", f"2 models in {tmp_path}"]
    assert "secret" not in repr(HubModel("user/tiny", None, "secret"))


def test_the_model_sets_sampling_defaults(kvs: Kvs, tmp_path: Path) -> None:
    """``general.sampling.*`` of the file holds unless a flag says otherwise."""
    path = write_tiny_llama(tmp_path / "plain.gguf", seed=3)
    command = ("run", "-m", path, "-p", "x", "-n", "12", "--seed", "3")
    greedy = kvs(*command, *GREEDY).out
    from_model = ("--override-kv", "general.sampling.temp=float:0")
    assert kvs(*command, *from_model).out == greedy
    assert kvs(*command, *from_model, "--temp", "1.5").out != greedy


def test_an_engine_that_does_not_warm_up_is_closed(
    kvs: Kvs, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not its device alone: the history has a thread and memory of its own."""
    closed = []
    monkeypatch.setattr(Engine, "warm_up", Mock(side_effect=DeviceError("no first step; mend it")))
    monkeypatch.setattr(KvStream, "close", lambda kv: closed.append(kv))
    assert kvs("run", "-m", tiny_llama, "-p", "x").error == "no first step; mend it"
    assert len(closed) == 1
