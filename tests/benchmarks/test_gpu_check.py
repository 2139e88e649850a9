"""What the check of a GPU runs and asks for, on its own path of the kernels and on that of older GPUs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.gpu.rates import Rates
from benchmarks.gpu_check import Line, Report


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Pretend a GPU and every part; the list tells what was run, and on which path."""
    runs: list[tuple[str, str]] = []

    def part(name: str) -> Any:
        def run(rates: Rates, report: Report) -> None:
            runs.append((name, os.environ["KVS_CUDA_PATH"]))
            if name == "resident":
                report(Line("q4_k, 1 row: weights / time / HBM", 0.55, 0.66))
                report(Line("iq4_xs, 1 row: weights / time / HBM", 0.55, 0.63))
            if name == "streamed":
                report(Line("64 Ki: step / max(kernels, link)", 1.04, 1.03, True))
        return run

    runtime = SimpleNamespace(
        getDeviceProperties=lambda index: {"name": b"a GPU"}, driverGetVersion=lambda: 13000
    )
    monkeypatch.setitem(
        sys.modules, "cupy", SimpleNamespace(__version__="13", cuda=SimpleNamespace(runtime=runtime))
    )
    monkeypatch.setattr(gpu_check, "probe", lambda: Rates(*[1e12] * len(Rates.__dataclass_fields__)))
    monkeypatch.setattr(gpu_check, "PARTS", {name: part(name) for name in gpu_check.PARTS})
    monkeypatch.setenv("KVS_CUDA_PATH", "")
    return runs


def check(monkeypatch: pytest.MonkeyPatch, output: Path, *arguments: str) -> dict[str, Any]:
    """What ``gpu_check.py`` writes."""
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--output", str(output), *arguments])
    gpu_check.main()
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def test_the_own_path_has_all_parts(
    ran: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And the marks that stand beside the lines."""
    result = check(monkeypatch, tmp_path / "own.json")
    assert ran == [(name, "") for name in ("resident", "streamed", "weights", "prefill", "speculation")]
    assert result["path"] == "own"
    assert [(line["bar"], line["verdict"]) for line in result["lines"]] == [
        (0.66, "short"), (0.63, "short"), (1.03, "short")
    ]


def test_a_path_has_parts_and_marks_of_its_own(
    ran: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is set before a part begins, and stands in the result; parts that are named are run."""
    result = check(monkeypatch, tmp_path / "old.json", "--path", "sm_80")
    assert ran == [("resident", "sm_80"), ("streamed", "sm_80"), ("prefill", "sm_80")]
    assert result["path"] == "sm_80"
    assert [(line["bar"], line["verdict"]) for line in result["lines"]] == [(0.5, "ok"), (None, ""), (1.05, "ok")]
    ran.clear()
    check(monkeypatch, tmp_path / "one.json", "--path", "sm_80", "--parts", "prefill")
    assert ran == [("prefill", "sm_80")]


def test_a_path_that_is_none_is_one_line(
    ran: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong use, before anything is run."""
    with pytest.raises(SystemExit) as caught:
        check(monkeypatch, tmp_path / "none.json", "--path", "sm_70")
    assert caught.value.code == 2
    assert "KVS_CUDA_PATH=sm_70 is no path of the kernels; set it to sm_80" in capsys.readouterr().err
    assert not ran
