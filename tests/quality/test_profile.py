"""``kvs profile-layers`` prints and writes what was measured, and settings that ``kvs run`` takes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from kvs_core.engine.profile import profile_layers
from tests.cli.conftest import Kvs, tokenizer_of
from tests.engine.sliding import slide
from tests.engine.tiny import engine, kv_settings
from tests.quality.conftest import SMALL_PAGES

COMMON = ("profile-layers", "--windows", "40,100,5000", *SMALL_PAGES)


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_table_and_files_are_what_was_measured(
    kvs: Kvs, tiny_llama: Path, tiny_qwen35: Path, story: Path, tmp_path: Path, arch: str
) -> None:
    """Of the text's first tokens behind a BOS, where there is one, by layer, in per cent, in all forms: as many as the
    context holds, which rounds --ctx-size 300 up to 512."""
    path = tiny_llama if arch == "llama" else tiny_qwen35
    folder = tmp_path / "a" / "out"
    ended = kvs(*COMMON, "-m", path, "--text", story, "-c", "300", "--threshold", "60", "--output", folder)
    assert ended.code == 0, ended.err
    with engine(path, kv=kv_settings("q8_0", "q8_0"), context=300) as built:
        tokens = tokenizer_of(path).encode(story.read_text(encoding="utf-8"), parse_special=False)[:512]
        assert built.context.context_tokens == 512
        profile = profile_layers(built, tokens, (40, 100, 5000))
        longest = built.spec.n_ctx_most
    shares = {layer.layer: [100 * share for share in layer.outside] for layer in profile.layers}
    keeps = {number: "40" if row[0] < 60 else "100" if row[1] < 60 else "all" for number, row in shares.items()}

    result = json.loads((folder / "profile-layers.json").read_text())
    assert result["tokens"] == 512
    assert {layer["layer"]: layer["outside_pct"] for layer in result["layers"]} == shares
    assert {layer["layer"]: layer["keeps"] for layer in result["layers"]} == keeps
    with open(folder / "profile-layers.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    read = [[float(row[f"outside_{window}_pct"]) for window in (40, 100, 5000)] for row in rows]
    assert read == list(shares.values())
    lines = ended.out.splitlines()
    assert lines[0].split() == ["layer", "40", "100", "5,000", "keeps"]
    for line, (number, row) in zip(lines[1:], shares.items(), strict=False):
        assert line.split() == [str(number), *(part for share in row for part in (f"{share:.2f}", "%")), keeps[number]]
    assert "reading the text: 512 tokens in " in ended.err
    assert "--windows 5000: 512 tokens are read, so nothing can lie outside" in ended.err

    text = (folder / "profile-layers.yaml").read_text()
    assert text.startswith("# Which KV stays on the device, for speed alone: the text is the same whatever this says.")
    assert ("kv-window-tokens" in text) == (arch == "qwen35")
    assert arch == "llama" or f"kv-window-tokens: {longest} " in text


def test_a_window_as_long_as_the_text_is_not_kept(kvs: Kvs, tiny_llama: Path, story: Path, tmp_path: Path) -> None:
    """Nothing can lie outside of it, so it was not measured: layers with more than the threshold outside all others
    keep all, in the table, JSON, CSV and YAML; with one token more of text it is measured, and kept."""
    common = ("profile-layers", *SMALL_PAGES, "-m", tiny_llama, "--text", story, "-c", "512")
    ended = kvs(*common, "--windows", "40,512,5000", "--output", tmp_path)
    assert "--windows 512,5000: 512 tokens are read, so nothing can lie outside: 0 % says nothing" in ended.err
    layers = json.loads((tmp_path / "profile-layers.json").read_text())["layers"]
    assert [layer["keeps"] for layer in layers] == ["all"] * 4
    assert all(first > 1 and not any(rest) for first, *rest in (layer["outside_pct"] for layer in layers))
    assert 'kv-window-layers: "0-3=all"' in (tmp_path / "profile-layers.yaml").read_text()
    assert [line.split()[-1] for line in ended.out.splitlines()[1:5]] == ["all"] * 4
    assert ended.out.splitlines()[-1].endswith(": --kv-window-layers 0-3=all")
    kept = kvs(*common, "--windows", "40,511,5000", "--json").json
    assert kept["kv_window_layers"] == "0-3=511"


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_its_settings_run(
    kvs: Kvs, tiny_llama: Path, tiny_qwen35: Path, story: Path, tmp_path: Path, arch: str
) -> None:
    """``kvs run --config`` takes the YAML: window residency, with the text that there is without; and with drafts of
    the MTP block, for which it says enough."""
    path = tiny_llama if arch == "llama" else tiny_qwen35
    windows = tmp_path / "windows.yaml"
    assert kvs(*COMMON, "-m", path, "--text", story, "--threshold", "60", "--yaml", windows).code == 0
    run = ("run", "-m", path, story, "-n", "12", "--temp", "0", "-c", "1024", *SMALL_PAGES)
    plain = kvs(*run)
    config = kvs(*run, "--config", windows)
    assert (config.code, config.out) == (0, plain.out), config.err
    assert "KV: window, " in config.err
    assert "no effect" not in config.err
    if arch == "qwen35":
        drafted = kvs(*run, "--config", windows, "--spec-type", "draft-mtp")
        assert (drafted.code, drafted.out) == (0, plain.out), drafted.err


def test_the_arena_changes_no_digit(kvs: Kvs, tiny_llama: Path, story: Path) -> None:
    """Streamed and resident: the same object, but for the arena."""
    common = (*COMMON, "-m", tiny_llama, "--text", story, "-c", "512", "-ctk", "f32", "-ctv", "f32", "--json")
    resident = kvs(*common, "--kv-residency-mode", "resident").json
    streamed = kvs(*common, "--kv-stream-pool-mib", "1").json
    assert resident.pop("h2d_mib") == 0
    assert streamed.pop("h2d_mib") > 0
    assert resident.pop("arena_mib") > streamed.pop("arena_mib")
    assert resident == streamed


def test_sliding_layers_are_listed_and_left_alone(
    kvs: Kvs, tiny_llama: Path, story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their own window; the YAML does not name them, and runs."""
    slide(monkeypatch, {1: 64, 2: 64})
    ended = kvs(*COMMON, "-m", tiny_llama, "--text", story, "--output", tmp_path, "--windows", "40")
    assert ended.code == 0, ended.err
    assert [line.split()[1:] for line in ended.out.splitlines()[2:4]] == [["-", "its", "own", "64"]] * 2
    assert 'kv-window-layers: "0=all,3=all"' in (tmp_path / "profile-layers.yaml").read_text()
    result = json.loads((tmp_path / "profile-layers.json").read_text())
    assert result["layers"][1] == {"layer": 1, "own_window": 64, "outside_pct": None, "keeps": None}
    run = ("run", "-m", tiny_llama, story, "-n", "8", "--temp", "0", "-c", "1024", *SMALL_PAGES)
    assert kvs(*run, "--config", tmp_path / "profile-layers.yaml").out == kvs(*run).out
    slide(monkeypatch, dict.fromkeys(range(4), 64))
    said = kvs(*COMMON, "-m", tiny_llama, "--text", story).error
    assert "every layer has a window of the model's own, and none of it is streamed" in said


def test_the_heat_map_is_drawn(
    kvs: Kvs, tiny_llama: Path, story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A PNG where matplotlib is there, sliding layers or not; else a line says what to install."""
    pytest.importorskip("matplotlib")
    common = (*COMMON, "-m", tiny_llama, "--text", story, "-c", "256", "--output")
    slide(monkeypatch, {1: 64})
    assert "heat map: " in kvs(*common, tmp_path / "with").err
    assert (tmp_path / "with" / "profile-layers.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(__import__("sys").modules, "kvs_cli.quality.heat_map", None)
    ended = kvs(*common, tmp_path / "without")
    assert ended.code == 0
    assert "no heat map: matplotlib is missing; pip install 'kvs-llm[bench]'" in ended.err
    assert sorted(path.suffix for path in (tmp_path / "without").iterdir()) == [".csv", ".json", ".yaml"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--windows", "0,10"), "--windows 0: give numbers from 1"),
        (("--windows", "many"), "--windows 'many': give numbers such as 1,"),
        (("--windows", "1024", "-c", "1000"), "--windows: 1025 tokens are needed, the context holds 1024; raise --"),
        (("--windows", "9000"), "--windows: 9001 tokens of text are needed, "),
        (("--windows", "9000"), "; give a longer --text or lower --windows"),
        (("--windows", "40000"), "the context holds 32768; the model was trained for no more: lower --windows"),
        (("--threshold", "0"), "--threshold is 0; give a percentage above 0, up to 100"),
        (("--threshold", "nan"), "--threshold is nan"),
        (("--threshold", "101"), "--threshold is 101"),
        (("--yaml", "/nowhere/w.yaml"), "--yaml /nowhere/w.yaml: there is no folder /nowhere; make it first"),
        (("--yaml", "/tmp"), "--yaml /tmp: no file can be written there"),
        (("--output", "/dev/null/x"), "--output /dev/null/x: cannot be written"),
        (("--temp", "0.5"), "--temp: has no effect on kvs profile-layers; leave it out"),
        (("--context-shift",), "--context-shift: has no effect on kvs profile-layers; leave it out"),
        (("--version",), "--version: not a flag of kvs profile-layers; kvs run --version takes it"),
        (("story.txt",), "kvs profile-layers takes flags alone; give the model with --model, a text with --text"),
        (("--no-such-flag", "1"), "invalid argument: --no-such-flag"),
    ],
)
def test_bad_flags_are_one_line(kvs: Kvs, story: Path, arguments: tuple[str, ...], error: str) -> None:
    """With the numbers and what to do, before any weight is read."""
    assert error in kvs("profile-layers", "--text", story, "--device", "cpu", *arguments).error


def test_a_text_is_needed(kvs: Kvs, tmp_path: Path) -> None:
    """One that is named, is there, and is not empty; nothing is left behind."""
    assert "Missing option '--text'; kvs profile-layers --help" in kvs("profile-layers").error
    assert "--text nowhere.txt: No such file" in kvs("profile-layers", "--text", "nowhere.txt").error
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    said = kvs("profile-layers", "--text", empty, "--output", tmp_path / "out").error
    assert f"--windows: 1025 tokens of text are needed, {empty} has 0; give a longer --text or lower --windows" in said
    assert list(tmp_path.iterdir()) == [empty]
