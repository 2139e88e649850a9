"""Log lines and errors begin on lines of their own where text and log lead to one place, and nowhere else adds this
anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvs_cli import app
from kvs_cli.render import write_text
from tests.cli.conftest import GREEDY
from tests.cli.test_run import COMMAND

LOGGED = (b"DEBUG ", b"INFO ", b"WARNING ")


def run(model: Path, stdout: int, stderr: int, *flags: str) -> subprocess.CompletedProcess[bytes]:
    """A text of three contexts: each shift is a log line in the middle of it."""
    line = [*COMMAND, "-m", str(model), "-p", "hello", "-c", "256", "-n", "500", "--ignore-eos", "--context-shift",
            "--log-verbosity", "4", "--log-prefix", *GREEDY, *flags]
    return subprocess.run(line, stdout=stdout, stderr=stderr, cwd=Path(__file__).parents[2], timeout=60, check=False)


def split(written: bytes) -> tuple[list[bytes], bytes]:
    """Log lines, and the text between them without its line ends."""
    lines = written.replace(b"\r", b"").split(b"\n")
    return [line for line in lines if line.startswith(LOGGED)], b"".join(
        line for line in lines if not line.startswith(LOGGED))


def shifts(written: bytes) -> list[bytes]:
    """Lines that tell of a shift, without colours."""
    return [line for line in re.sub(rb"\x1b\[[0-9;]*m", b"", written).split(b"\n") if b"context shift: " in line]


def test_a_pipe_for_both(tiny_llama: Path) -> None:
    """Every log line is whole; what is left is the text. Apart from each other both are as they were."""
    apart = run(tiny_llama, subprocess.PIPE, subprocess.PIPE)
    logged, text = split(run(tiny_llama, subprocess.PIPE, subprocess.STDOUT).stdout)
    assert apart.returncode == 0
    assert text == apart.stdout.replace(b"\n", b"")
    assert len(logged) == len(apart.stderr.splitlines())
    assert sum(b"context shift: " in line for line in logged) >= 3
    assert b"\n\n" not in apart.stderr


def test_a_pipe_for_both_with_colours(tiny_llama: Path) -> None:
    """The other form of lines."""
    told = shifts(run(tiny_llama, subprocess.PIPE, subprocess.STDOUT, "--log-colors", "on").stdout)
    assert len(told) >= 3
    assert all(line.startswith(LOGGED) for line in told)


def test_an_error_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no log line, and has a line of its own too; where text ended a line, nothing is added."""
    with (tmp_path / "out").open("w+", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr(sys, "stderr", file)
        for text in ("half a line", "a line\n", "", "another", " half"):
            write_text(text)
            if text != "another":
                app._say("error: no more")
        file.seek(0)
        assert file.read() == (
            "half a line\nerror: no more\na line\nerror: no more\nerror: no more\nanother half\nerror: no more\n"
        )


def test_a_terminal(tiny_llama: Path) -> None:
    """The same there."""
    if sys.platform == "win32":
        pytest.skip("the system has no pseudo terminals")
    import pty

    ours, theirs = pty.openpty()
    written = b""
    try:
        with subprocess.Popen([sys.executable, "-c", "import os,sys\nwhile d := os.read(0, 9999): os.write(1, d)"],
                              stdin=ours, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as reader:
            done = run(tiny_llama, theirs, theirs, "--log-colors", "off")
            os.close(theirs)
            assert reader.stdout is not None
            written = reader.stdout.read()
    finally:
        os.close(ours)
    assert done.returncode == 0
    told = shifts(written)
    assert len(told) >= 3
    assert all(line.startswith(LOGGED) for line in told)
