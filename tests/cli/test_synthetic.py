"""Synthetic models on the command line: they run, are written, and always say what they are."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvs_core.formats.gguf import GgufFile
from tests.cli.conftest import GREEDY, Kvs

MODEL = "synthetic:tiny:q8_0"
RUN = ("-p", "hello wörld", "-n", "12", "--ignore-eos", *GREEDY)


def test_a_synthetic_model_runs_and_says_so(kvs: Kvs) -> None:
    """Text and JSON, twice the same; before the run, behind it and in the JSON it is called synthetic."""
    first, again = kvs("run", "-m", MODEL, *RUN), kvs("run", "-m", MODEL, *RUN)
    assert (first.code, first.out) == (0, again.out)
    lines = first.err.splitlines()
    assert lines[0] == f"synthetic model {MODEL}: its weights are random, its text means nothing"
    assert next(line for line in lines if line.startswith("stop: ")) == "stop: length; all of it of a synthetic model"
    result = kvs("run", "-m", MODEL, *RUN, "--json").json
    assert result["synthetic"] is True
    assert (result["model"]["name"], result["model"]["path"]) == ("synthetic tiny q8_0", MODEL)
    assert result["text"] == first.out
    assert len(set(result["token_ids"])) > 4


def test_info_says_so(kvs: Kvs, tiny_llama: Path) -> None:
    """As a table and as JSON; of a real model the JSON says that it is not."""
    told = kvs("info", "synthetic:qwen3.5-27b:iq4_xs").out
    assert "synthetic qwen3.5-27b iq4_xs" in told
    assert "random: a synthetic model" in told
    facts = kvs("info", "synthetic:qwen3.5-27b:iq4_xs", "--json").json
    assert facts["synthetic"] is True
    assert facts["model"]["n_params"] == 26_895_998_464
    assert 14.6e9 < facts["model"]["file_bytes"] < 14.7e9
    assert kvs("info", tiny_llama, "--json").json["synthetic"] is False


def test_a_written_model_is_the_same(kvs: Kvs, tmp_path: Path) -> None:
    """With or without the prefix; the file gives the text of the model, and says what it is, whatever its name."""
    path = tmp_path / "model.gguf"
    done = kvs("synthesize", "tiny:q8_0", path)
    assert (done.code, done.out) == (0, "")
    assert f"{path}: synthetic tiny q8_0, 5.5" in done.err
    expected = kvs("run", "-m", MODEL, *RUN)
    renamed = ("--override-kv", "general.name=str:real")
    run = kvs("run", "-m", path, *RUN, *renamed)
    assert run.out == expected.out
    assert f"synthetic model {path}: " in run.err
    assert kvs("run", "-m", path, *RUN, *renamed, "--json").json["synthetic"] is True
    assert "cannot be overridden" in kvs("run", "-m", path, *RUN, "--override-kv", "kvs.synthetic=bool:false").error
    other = tmp_path / "other.gguf"
    assert kvs("synthesize", MODEL, other).code == 0
    assert other.read_bytes() == path.read_bytes()


def disk_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_cannot_be_written_is_one_line(kvs: Kvs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is there, a folder that is not, a disk that is full, a name that is unknown; nothing is left."""
    there = tmp_path / "there.gguf"
    there.write_bytes(b"mine")
    assert "is there already" in kvs("synthesize", "tiny:q8_0", there).error
    assert there.read_bytes() == b"mine"
    assert "there is no folder" in kvs("synthesize", "tiny:q8_0", tmp_path / "no" / "x.gguf").error
    assert "expected a path" in kvs("synthesize", "tiny:q8_0", "").error
    new = tmp_path / "new.gguf"
    assert "is no synthetic model: give SHAPE:MIX" in kvs("synthesize", "tiny:q9", new).error
    assert "is no synthetic model: give SHAPE:MIX" in kvs("run", "-m", "synthetic:tiny", "-p", "x").error
    with monkeypatch.context() as patch:
        patch.setattr("kvs_core.formats.synthetic_blocks.DrawnBytes.__getitem__", disk_full)
        assert f"{new}: cannot be written: No space left on device" in kvs("synthesize", "tiny:q8_0", new).error
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5 << 20))
    assert "takes 6 MiB, and 5 MiB of the disk are free" in kvs("synthesize", "tiny:q8_0", new).error
    assert not new.exists()


def test_weights_can_be_scanned(kvs: Kvs) -> None:
    """``--check-tensors`` reads weights that are made as they are read."""
    assert "checking weights: " in kvs("run", "-m", MODEL, *RUN, "--check-tensors").err


def test_the_header_is_all_that_is_read(tmp_path: Path, kvs: Kvs) -> None:
    """A written file has the tensors of the model in its order."""
    path = tmp_path / "m.gguf"
    kvs("synthesize", "tiny:q4_k_m:mtp", path)
    assert "blk.8.nextn.eh_proj.weight" in GgufFile.open(path).tensors
