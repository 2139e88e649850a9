"""``kvs bench needle`` finds what is there, says where it does not, and writes it down."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvs_core.engine.session import Session
from tests.cli.conftest import Kvs
from tests.quality.conftest import SMALL_PAGES

SHORT = ("--lengths", "640,1024", "--depths", "0,50,100", "--facts", "4", *SMALL_PAGES)

STREAMED = ("--kv-stream-pool-mib", "1", "-ctk", "f32", "-ctv", "f32")   # the later of two flags counts


def test_the_demo_model_finds_every_needle_streamed(kvs: Kvs, tmp_path: Path) -> None:
    """With a pool of 1 MiB and most pages streamed: CSV and JSON say so, prompt by prompt."""
    folder = tmp_path / "deep" / "needle"
    ended = kvs("bench", "needle", *SHORT, *STREAMED, "--output", folder)
    assert ended.code == 0, ended.err
    assert "found 6 of 6 (100.0 %)" in ended.out
    assert ended.out.count("100 %") == 7   # six cells and the name of the last row
    with open(folder / "needle.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["length"], row["depth_pct"]) for row in rows] == [
        (length, depth) for length in ("640", "1024") for depth in ("0", "50", "100")
    ]
    for row in rows:
        assert row["prompt_tokens"] == row["length"]
        assert row["answer"].strip().startswith(row["expected"])
    result = json.loads((folder / "needle.json").read_text())
    assert (result["found"], result["prompts"], len(result["cells"])) == (6, 6, 6)
    assert result["most_streamed_share"] > 0.5
    assert [row["answer"] for row in result["rows"]] == [row["answer"] for row in rows]


def test_a_model_that_knows_nothing_finds_nothing(kvs: Kvs, tiny_qwen35: Path, story: Path) -> None:
    """Random weights: no needle is found by the way the question is put."""
    result = kvs("bench", "needle", "-m", tiny_qwen35, "--lengths", "512", "--depths", "0:100:50", "--repeat", "2",
                 "--facts", "2", *SMALL_PAGES, *STREAMED, "--text-file", story, "--json").json
    assert (result["found"], result["prompts"]) == (0, 6)
    assert result["h2d_mib"] > 0
    assert len({row["expected"] for row in result["rows"]}) == 6


def test_the_context_is_that_of_a_run(kvs: Kvs, tiny_qwen35: Path, story: Path) -> None:
    """--ctx-size is rounded up to a multiple of 256: a prompt of 500 tokens and its answer have room in 300."""
    common = ("bench", "needle", "-m", tiny_qwen35, "--depths", "0", "--facts", "1", *SMALL_PAGES, "--text-file", story)
    assert kvs(*common, "--lengths", "500", "-c", "300", "--json").json["prompts"] == 1
    assert "tokens are needed, the context holds 512; raise" in kvs(*common, "--lengths", "512", "-c", "300").error


def test_the_heat_map_is_drawn(kvs: Kvs, tiny_llama: Path, story: Path, tmp_path: Path) -> None:
    """A PNG where matplotlib is there."""
    pytest.importorskip("matplotlib")
    ended = kvs("bench", "needle", "-m", tiny_llama, "--lengths", "400,500", "--depths", "0,100", "--facts", "1",
                *SMALL_PAGES, "--text-file", story, "--output", tmp_path)
    assert ended.code == 0, ended.err
    assert (tmp_path / "needle.png").read_bytes().startswith(b"\x89PNG")
    assert "heat map:" in ended.err


def test_without_matplotlib_the_rest_is_written(
    kvs: Kvs, tiny_llama: Path, story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says what to install."""
    monkeypatch.setitem(__import__("sys").modules, "kvs_cli.quality.heat_map", None)
    ended = kvs("bench", "needle", "-m", tiny_llama, "--lengths", "400", "--depths", "0", "--facts", "1",
                *SMALL_PAGES, "--text-file", story, "--output", tmp_path)
    assert ended.code == 0
    assert "no heat map: matplotlib is missing" in ended.err
    assert sorted(path.name for path in tmp_path.glob("needle*")) == ["needle.csv", "needle.json"]


def test_after_ctrl_c_what_was_found_is_written(
    kvs: Kvs, tiny_llama: Path, story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 130; the cells that were asked are in the files, the others are not."""
    prefill, calls = Session.prefill, []

    def interrupted(session: Session, *arguments: Any, **others: Any) -> np.ndarray:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return prefill(session, *arguments, **others)

    monkeypatch.setattr(Session, "prefill", interrupted)
    ended = kvs("bench", "needle", "-m", tiny_llama, "--lengths", "400,500", "--depths", "0,100", "--facts", "1",
                *SMALL_PAGES, "--text-file", story, "--output", tmp_path)
    assert ended.code == 130
    result = json.loads((tmp_path / "needle.json").read_text())
    assert result["interrupted"]
    assert [(cell["length"], cell["depth_pct"]) for cell in result["cells"]] == [(400, 0), (400, 100)]
    assert [line.split()[-1] for line in ended.out.splitlines()[1:3]] == ["-", "-"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--lengths", "100"), "--lengths 100: 8 facts and a question take"),
        (("--lengths", "40000"), "--lengths: 400"),
        (("--lengths", "2048", "-c", "1000"), "the context holds 1024; raise --ctx-size or lower --lengths"),
        (("--lengths", "1024:512:1"), "--lengths 1024:512:1: give numbers from 64"),
        (("--lengths", "many"), "--lengths 'many': give numbers such as 64,"),
        (("--lengths", "64:100000000:1"), "at most 1000 numbers are taken"),
        (("--depths", "0,101"), "--depths 101: give numbers from 0 to 100"),
        (("--repeat", "0"), "--repeat is 0; give a number from 1"),
        (("--facts", "1000"), "--facts is 1000; give a number from 1 to"),
        (("--temp", "0.5"), "--temp: has no effect on kvs bench needle; leave it out"),
        (("-n", "5"), "-n: has no effect on kvs bench needle"),
        (("--version",), "--version: not a flag of kvs bench needle"),
        (("story.txt",), "kvs bench needle takes flags alone"),
        (("--text-file", "/nowhere.txt"), "--text-file /nowhere.txt: No such file"),
        (("--output", "/dev/null/x"), "--output /dev/null/x: cannot be written"),
        (("--no-such-flag", "1"), "invalid argument: --no-such-flag"),
    ],
)
def test_bad_flags_are_one_line(kvs: Kvs, arguments: tuple[str, ...], error: str) -> None:
    """Before any weight is read."""
    assert error in kvs("bench", "needle", *arguments).error


@pytest.mark.parametrize(("name", "sizes", "too_long"), [
    ("needle", ("--lengths", "512"), ("--lengths", "32768")),
    ("perplexity", ("--tokens", "100"), ("-c", "32769")),
    ("equivalence", ("--prompt-tokens", "512", "--against", "none"), ("--prompt-tokens", "32768"))])
def test_what_is_wrong_leaves_no_folder(
    kvs: Kvs, tmp_path: Path, name: str, sizes: tuple[str, ...], too_long: tuple[str, ...]
) -> None:
    """A model, a context or an arena with which nothing can be measured."""
    for arguments, error in (
        (("-m", "nowhere.gguf"), "nowhere.gguf"),
        (("-m", __file__), "GGUF"),
        (too_long, "tokens are needed, the context holds 32768"),
        (("-c", "8192", "--kv-page-tokens", "32", "-ub", "32", "--kv-stream-arena-mib", "1"), "arena too small"),
    ):
        said = kvs("bench", name, *sizes, "--device", "cpu", "--output", tmp_path / "a" / "b", *arguments).error
        assert error in said
        assert list(tmp_path.iterdir()) == []


def test_help_teaches(kvs: Kvs) -> None:
    """Every command says what it does, shows an example and where the other settings are."""
    for name in ("needle", "perplexity", "equivalence"):
        ended = kvs("bench", name, "--help")
        assert ended.code == 0
        assert f"kvs bench {name}" in ended.out
        assert "kvs run --help lists them" in " ".join(ended.out.split())
