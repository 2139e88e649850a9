"""Plots and summaries of rows."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from kvs_cli.bench import sweep
from kvs_cli.bench.columns import COLUMNS, Row
from kvs_cli.bench.plots import draw
from kvs_cli.bench.series import series_of, value
from kvs_cli.bench.store import RowStore
from kvs_cli.bench.summary import summary
from tests.bench.rows import measured
from tests.cli.conftest import Kvs, kvs  # noqa: F401

ROWS = [measured(context, n_max, repeat=repeat, decode_tps=float(context * repeat), decode_kv_pool_mib=3.0,
                 key=f"{context}-{n_max}-{repeat}")
        for repeat in (1, 2) for context in (1024, 16384) for n_max in (0, 3)]


def test_repeats_are_one_line_with_a_spread() -> None:
    """A line per variant, named; the median and both ends over its repeats, and failed rows count for nothing."""
    lines = series_of([*ROWS, measured(2048, error="broke")])
    assert [line.name for line in lines] == ["plain", "mtp 3"]
    spread = lines[1].spread(1024, "decode_tps")
    assert spread is not None
    assert (spread.least, spread.median, spread.most) == (1024, 1536, 2048)
    assert lines[0].spread(2048, "decode_tps") is None


def test_what_differs_tells_lines_apart() -> None:
    """Two arenas in one folder are two lines, and their names say which."""
    lines = series_of([measured(arena_mib=4.0), measured(arena_mib=8.0)])
    assert [line.name for line in lines] == ["plain, arena 4 MiB", "plain, arena 8 MiB"]


def test_the_decode_limit_is_the_larger_floor() -> None:
    """Tokens of a round, by the larger of what kernels and link need."""
    row = measured(draft_accepted=32, rounds=32, compute_floor_ms=4.0, link_floor_ms=5.0)
    assert value(row, "decode_limit_tps") == pytest.approx(400.0)


def test_plots_are_drawn_alike(tmp_path: Path) -> None:
    """Both files, whole, and nothing else; the same bytes for the same rows."""
    drawn = []
    for _ in range(2):
        draw(tmp_path, ROWS)
        drawn.append({path.name: path.read_bytes() for path in tmp_path.iterdir()})
    assert drawn[0] == drawn[1]
    assert drawn[0].keys() == {"sweep.png", "sweep.svg"}
    assert drawn[0]["sweep.png"].startswith(b"\x89PNG")
    assert b"mtp 3" in drawn[0]["sweep.svg"]
    assert b"16 Ki" in drawn[0]["sweep.svg"]


def test_without_matplotlib_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is optional: everything else is written."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with caplog.at_level(logging.WARNING):
        draw(tmp_path, ROWS)
    assert "kvs-llm[bench]" in caplog.text
    assert caplog.text.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_summary_has_medians_failures_and_meanings() -> None:
    """A table per quantity with a row per context, what is fastest, and what failed."""
    text = summary([*ROWS, measured(65536, 3, error="too large", log="logs/y.log")])
    assert "| 16 Ki | 24576.00 (16384.00 to 32768.00) | 24576.00 (16384.00 to 32768.00) |" in text
    assert "8 points measured, 1 failed; 2 repeats." in text
    assert "- 64 Ki, mtp 3: too large (logs/y.log)" in text
    assert "`step_over_floor`" in text


def test_pretended_things_are_called_so() -> None:
    """Random weights and pretended acceptance stand in the summary's second line."""
    text = summary([measured(synthetic=True, synth_len=2.5)]).splitlines()[2]
    assert "random weights" in text
    assert "pretended acceptance" in text


def test_a_sweep_without_results_has_a_summary() -> None:
    """Where every point failed there is nothing but that to tell."""
    assert "0 points measured, 1 failed" in summary([measured(error="broke")])


def test_plots_come_again_from_the_csv(
    kvs: Kvs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,  # noqa: F811
) -> None:
    """``kvs bench plot`` needs nothing but the folder's CSV, whose rows are those that were measured."""
    drawn: list[Row] = []
    monkeypatch.setattr(sweep, "draw", lambda folder, rows: drawn.extend(rows))
    store = RowStore(tmp_path, resume=False)
    for row in ROWS:
        store.add(row)
    (tmp_path / "sweep.jsonl").unlink()
    assert kvs("bench", "plot", tmp_path).code == 0
    assert drawn == [{name: row.get(name) for name in COLUMNS} for row in ROWS]
    assert "8 points" in (tmp_path / "summary.md").read_text()
    assert "sweep.csv" in kvs("bench", "plot", tmp_path / "nowhere").error
