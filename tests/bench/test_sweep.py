"""The loop over all points, its files, and one sweep with real processes."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvs_cli.bench import sweep
from kvs_cli.bench.columns import COLUMNS
from kvs_cli.bench.grid import parse_variants, points
from kvs_cli.bench.store import read_csv
from kvs_cli.bench.sweep import SweepSettings, run_sweep
from kvs_core.errors import SettingsError
from tests.bench.rows import FakeWorkers
from tests.cli.conftest import Kvs, kvs  # noqa: F401

KVS = (sys.executable, "-c", "import sys; from kvs_cli.app import main; sys.exit(main())")
WAIT_S = 300


def settings(output: Path, contexts: Sequence[int] = (1024, 2048, 4096), arguments: Sequence[str] = (),
             repeats: int = 1) -> SweepSettings:
    """Of ``contexts`` x plain and MTP of two."""
    variants = parse_variants("0,2", None, default_n_max=3)
    return SweepSettings(points(contexts, variants, repeats), arguments, {}, "some text", 8, output)


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than all else where nothing is measured."""
    monkeypatch.setattr(sweep, "draw", lambda folder, rows: None)


@pytest.mark.usefixtures("no_plots")
def test_a_failed_point_is_a_row(tmp_path: Path) -> None:
    """The sweep goes on behind it; its row has all parameters, the error and the log, and the summary names it."""
    rows = run_sweep(settings(tmp_path), run=FakeWorkers(fail_contexts=[2048]))
    assert [bool(row["error"]) for row in rows] == [False, False, True, True, False, False]
    failed = read_csv(tmp_path / "sweep.csv")[2]
    assert failed["error"] == "it broke, as asked for"
    assert (failed["context_capacity"], failed["spec_type"], failed["cache_type_k"]) == (2048, "none", "f16")
    assert failed["decode_tps"] is None
    assert (tmp_path / str(failed["log"])).read_text() == "point\n"
    assert "it broke, as asked for" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "prompt.txt").read_text() == "some text"


@pytest.mark.usefixtures("no_plots")
def test_a_wrong_line_does_not_touch_a_sweep(tmp_path: Path) -> None:
    """What cannot be run on top of one leaves its files as they are."""
    run_sweep(settings(tmp_path, (1024,)), run=FakeWorkers())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    wrong = replace(settings(tmp_path, (1024, 65536)), resume=True)
    workers = FakeWorkers()
    with pytest.raises(SettingsError, match="has 32768 at most"):
        run_sweep(wrong, run=workers)
    assert workers.jobs == []
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_an_interrupted_sweep_is_valid_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was finished is on the disk with its plots; with resume only the rest is run, and then nothing."""
    with pytest.raises(KeyboardInterrupt):
        run_sweep(settings(tmp_path), run=FakeWorkers(interrupt_at=3))
    assert len(read_csv(tmp_path / "sweep.csv")) == 3
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "sweep.svg").read_text().rstrip().endswith("</svg>")
    monkeypatch.setattr(sweep, "draw", lambda folder, rows: None)
    rest = FakeWorkers()
    rows = run_sweep(replace(settings(tmp_path), resume=True), run=rest)
    assert len(rest.jobs) == 3
    assert len({row["key"] for row in rows}) == 6
    run_sweep(replace(settings(tmp_path), resume=True), run=FakeWorkers(interrupt_at=0))


@pytest.mark.usefixtures("no_plots")
def test_a_point_is_another_if_anything_is(tmp_path: Path) -> None:
    """Another setting, variable, prompt or count of tokens is measured though the context is the same."""
    first = settings(tmp_path, (1024,))
    run_sweep(first, run=FakeWorkers())
    for changed in (
        replace(first, arguments=["-ctk", "q8_0"]), replace(first, environ={"LLAMA_ARG_UBATCH": "64"}),
        replace(first, prompt="other text"), replace(first, decode_tokens=9), replace(first, auto_max_arena=True),
        settings(tmp_path, (1024,), repeats=2),
    ):
        workers = FakeWorkers()
        run_sweep(replace(changed, resume=True), run=workers)
        assert workers.kinds.count("point") == 2, changed


@pytest.mark.usefixtures("no_plots")
def test_the_largest_arena_is_probed_once_per_point(tmp_path: Path) -> None:
    """Its row says that it was found, and how large it is; repeats use what the first one found."""
    workers = FakeWorkers(most_arena_mib=129)
    rows = run_sweep(replace(settings(tmp_path, (1024,), repeats=2), auto_max_arena=True), run=workers)
    assert [(row["arena_auto"], row["arena_mib"]) for row in rows] == [(True, 129)] * 4
    assert workers.kinds == [*["probe"] * 3, "point"] * 2 + ["point"] * 2
    assert [job["arguments"][-1] for job in workers.jobs if job["kind"] == "point"] == ["129"] * 4


@pytest.mark.parametrize(("arguments", "error"), [
    (("--ctx-size", "1024"), "--contexts"),
    (("--spec-type", "draft-mtp"), "--spec-types"),
    (("--temp", "1"), "--temp: has no effect"),
    (("--contxts", "1024"), "did you mean"),
    (("prompt.txt",), "--prompt-file"),
    (("--arena-mib", "4", "--auto-max-arena"), "exclude each other"),
    (("--kv-stream-pool-mib", "4", "--arena-mib", "4"), "exclude each other"),
    (("--contexts", "7"), "--contexts 7"),
    (("--decode-tokens", "0"), "decode-tokens"),
    (("--prompt-file", "nowhere.txt"), "nowhere.txt"),
    (("-m", "synthetic:tiny:q4_k", "--prompt-file", "x"), "--prompt-file"),
    (("-ctk", "q7_0"), "-ctk"),
    (("--mtp-lengths", "9"), "--mtp-lengths 9"),
    (("-m", "nowhere.gguf"), "nowhere.gguf"),
    (("-m", __file__), "GGUF"),
    (("--contexts", "1024,65536"), "--contexts: that takes a context of 65536 tokens, the model has 32768 at most"),
    (("--contexts", "256,1024"), "--contexts: a context of 256 tokens leaves 0"),
    (("-m", "synthetic:tiny:q4_k", "--mtp-lengths", "0,2"), "or --spec-types draft-resident"),
    (("--mtp-lengths", "7", "-ub", "4"), "--mtp-lengths drafts 7 tokens: verifying them takes 8 rows"),
    (("--gpu-layers", "few"), "--gpu-layers"),
])
def test_bad_flags_are_one_line_and_run_nothing(
    kvs: Kvs, tmp_path: Path, arguments: tuple[str, ...], error: str,  # noqa: F811
) -> None:
    """Said before anything is measured or written, also of a model or a context that no point could have."""
    assert error in kvs("bench", "sweep", "--output", tmp_path / "out", *arguments).error
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_plots")
def test_failed_points_are_the_exit_code(
    kvs: Kvs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,  # noqa: F811
) -> None:
    """Of how many how many, the first reason and its log, when everything is written; --resume runs those alone."""
    command = ("bench", "sweep", "--contexts", "1024,2048,4096", "--decode-tokens", "8", "--output", tmp_path)
    monkeypatch.setattr(sweep, "run_sweep", partial(run_sweep, run=FakeWorkers(fail_contexts=[2048, 4096])))
    assert kvs(*command).error == (
        f"2 of 3 points failed, the first: it broke, as asked for; {read_csv(tmp_path / 'sweep.csv')[1]['log']} says "
        "more, and --resume runs them again")
    assert "1 points measured, 2 failed" in (tmp_path / "summary.md").read_text()
    workers = FakeWorkers()
    monkeypatch.setattr(sweep, "run_sweep", partial(run_sweep, run=workers))
    assert kvs(*command, "--resume").code == 0
    assert len(workers.jobs) == 2
    assert [row["error"] for row in read_csv(tmp_path / "sweep.csv")] == [None] * 3


def test_a_real_sweep_is_interrupted_and_finished(tmp_path: Path) -> None:
    """Three contexts, one of them too long for the arena, times two variants, each point in a process of its own:
    Ctrl-C in the middle leaves valid files and no process, --resume runs the rest, and the CSV is complete; that points
    failed is the exit code and the last line."""
    out = tmp_path / "sweep"
    command = [*KVS, "bench", "sweep", "--device", "cpu", "-t", "1", "--contexts", "512,1536,8192",
               "--mtp-lengths", "0,2", "--decode-tokens", "12", "--arena-mib", "1", "-ctk", "q8_0", "-ctv", "q4_0",
               "--kv-page-tokens", "32", "-ub", "32", "-b", "32", "--output", str(out)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)   # a background job ignores it, and hands that on
    try:
        first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    end = time.monotonic() + WAIT_S
    while not (out / "sweep.csv").exists() or len(read_csv(out / "sweep.csv")) < 2:
        assert first.poll() is None, first.communicate()[1]
        assert time.monotonic() < end, "no point gets finished"
        time.sleep(0.2)
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=WAIT_S)
    assert first.returncode == 130, said
    finished = len(read_csv(out / "sweep.csv"))
    assert 2 <= finished < 6
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=WAIT_S)
    assert again.returncode == 1, again.stderr
    assert "error: 2 of 6 points failed, the first: arena too small: " in again.stderr.splitlines()[-1]
    assert f"{finished} of 6 points are finished already" in again.stderr
    assert not _workers(), "a worker is left"
    with (out / "sweep.csv").open(newline="") as file:
        assert next(csv.reader(file)) == list(COLUMNS)
    rows = read_csv(out / "sweep.csv")
    assert [(row["context_capacity"], row["draft_n_max"]) for row in rows] == [
        (context, n_max) for context in (512, 1536, 8192) for n_max in (0, 2)]
    for row in rows[:4]:
        assert row["error"] is None
        assert int(str(row["prompt_tokens"])) == int(str(row["context_capacity"])) - 12 - 22 * 8
        assert (row["decode_tokens"], row["filled_tokens"], row["synthetic"]) == (12, 0, False)
        assert float(str(row["decode_tps"])) > 0
        assert row["arena_mib"] == 1
        assert (tmp_path / "sweep" / str(row["log"])).stat().st_size > 0
    assert all("arena too small: decode needs 2 MiB, --arena-mib is 1;" in str(row["error"]) for row in rows[4:])
    streamed = rows[3]
    assert float(str(streamed["streamed_mib_per_pass"])) > 0
    assert float(str(streamed["step_over_floor"])) == pytest.approx(
        float(str(streamed["ms_per_step_p50"]))
        / max(float(str(streamed["compute_floor_ms"])), float(str(streamed["link_floor_ms"]))), rel=1e-4)
    assert float(str(streamed["mean_verify_width"])) > 1
    machine = json.loads((out / "machine.json").read_text())
    assert machine["device"] == "cpu"
    assert machine["command"].startswith("kvs bench sweep --device cpu")
    assert machine["command"].endswith("--resume")


def _workers() -> list[int]:
    """Processes that this one, or its children, started as workers of a bench."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else []
            environ = (entry / "environ").read_bytes() if b"kvs_cli.bench.worker" in words else b""
        except OSError:
            continue
        if f"PYTEST_CURRENT_TEST={os.environ['PYTEST_CURRENT_TEST']}".encode() in environ:
            found.append(int(entry.name))
    return found
