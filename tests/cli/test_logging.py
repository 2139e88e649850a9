"""Log lines go to stderr and to the file, in the form asked for."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from kvs_cli.logging import configure_logging
from kvs_core.errors import SettingsError
from kvs_core.settings import LoggingSettings

LOGGER = logging.getLogger("kvs_core.test")


def speak() -> None:
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        LOGGER.log(level, "at %s", logging.getLevelName(level))


@pytest.mark.parametrize(
    ("verbosity", "lines"), [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (99, 4)],
)
def test_verbosity(verbosity: int, lines: int, capsys: pytest.CaptureFixture[str]) -> None:
    """0 says nothing, then errors, warnings, info, and from 4 on everything; stdout stays untouched."""
    configure_logging(LoggingSettings(verbosity=verbosity, colors="off"))
    speak()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == lines


def test_file_and_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file gets the same lines, appended; prefix and time stand in front."""
    file = tmp_path / "kvs.log"
    file.write_text("before\n")
    configure_logging(LoggingSettings(file=file, prefix=True, timestamps=True, colors="off"))
    LOGGER.warning("careful")
    assert capsys.readouterr().err.endswith("WARNING kvs_core.test: careful\n")
    first, second = file.read_text().splitlines()
    assert first == "before"
    assert second[:4].isdigit()
    assert second.endswith("WARNING kvs_core.test: careful")


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """One object per line with time, level, logger and message; an exception is part of it."""
    configure_logging(LoggingSettings(jsonl=True, colors="on"))
    try:
        raise ValueError("broken\nin two")
    except ValueError:
        LOGGER.exception("it is %s", "ü")
    entry = json.loads(capsys.readouterr().err)
    assert (entry["level"], entry["logger"], entry["message"]) == ("error", "kvs_core.test", "it is ü")
    assert "broken\nin two" in entry["exception"]
    assert entry["time"].endswith("+00:00")


def test_colours(capsys: pytest.CaptureFixture[str]) -> None:
    """``on`` colours a pipe as well; ``auto`` does not."""
    configure_logging(LoggingSettings(colors="on", prefix=True))
    LOGGER.error("red")
    assert "\x1b[" in capsys.readouterr().err
    configure_logging(LoggingSettings(colors="auto", prefix=True))
    LOGGER.error("plain")
    assert capsys.readouterr().err == "ERROR kvs_core.test: plain\n"


def test_disabled_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--log-disable silences stderr and writes no file."""
    configure_logging(LoggingSettings(disabled=True, file=tmp_path / "kvs.log", verbosity=5))
    speak()
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "kvs.log").exists()


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    """Is an error that names the flag and the reason."""
    with pytest.raises(SettingsError, match=r"--log-file .*: Is a directory"):
        configure_logging(LoggingSettings(file=tmp_path))
