"""A model file that is wrong, in whatever way, ends a command with one line: no traceback and nothing on stdout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvs_cli import app
from kvs_core.formats.gguf import GgufFile
from tests.cli.conftest import Kvs
from tests.support.broken_gguf import BREAKAGES, break_gguf
from tests.support.examples import examples

COMMANDS = {"run": ("run", "-p", "hello", "-n", "2", "-c", "256", "-m"), "info": ("info",)}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("arch", ["tiny_llama", "tiny_qwen35"])
@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_model_is_one_line(
    kvs: Kvs, request: pytest.FixtureRequest, tmp_path: Path, name: str, arch: str, command: str
) -> None:
    """Every known way to be wrong is refused with the file's name, before any device is opened."""
    path = break_gguf(name, request.getfixturevalue(arch), tmp_path / "broken.gguf")
    done = kvs(*COMMANDS[command], path)
    assert done.error.startswith(f"{path}: ")
    assert "device:" not in done.err


@pytest.mark.parametrize("name", ["empty file", "cut in the tensors", "absurd tensor count", "missing layer tensor"])
def test_a_broken_model_is_one_line_for_a_process(tiny_llama: Path, tmp_path: Path, name: str) -> None:
    """The same with a process of its own, where nothing of the test stands between an error and the terminal."""
    path = break_gguf(name, tiny_llama, tmp_path / "broken.gguf")
    program = "import sys; from kvs_cli.app import main; sys.exit(main())"
    line = [sys.executable, "-c", program, *COMMANDS["run"], str(path)]
    done = subprocess.run(line, capture_output=True, cwd=Path(__file__).parents[2], timeout=30)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(f"error: {path}: ".encode())
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("name", "words"), [("nowhere.gguf", "does not exist"), (".", "irectory")], ids=["missing", "directory"]
)
def test_no_file_at_all(kvs: Kvs, tmp_path: Path, name: str, words: str) -> None:
    """A path without a file is named."""
    for command in COMMANDS.values():
        error = kvs(*command, tmp_path / name).error
        assert str(tmp_path / name) in error
        assert words in error


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that is written again and again."""
    return tmp_path_factory.mktemp("damaged") / "damaged.gguf"


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    damage=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4),
    arch=st.sampled_from(["tiny_llama", "tiny_qwen35"]),
    command=st.sampled_from(sorted(COMMANDS)),
)
def test_any_damage_to_the_header_ends_in_an_exit_code(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], scratch: Path,
    damage: list[tuple[float, int]], arch: str, command: str,
) -> None:
    """Whatever bytes of the header change, the command runs or says in one line why not."""
    source: Path = request.getfixturevalue(arch)
    data = bytearray(source.read_bytes())
    header_bytes = len(data) - sum(info.n_bytes for info in GgufFile.open(source).tensors.values())
    for place, value in damage:
        data[int(place * header_bytes)] = value
    scratch.unlink(missing_ok=True)  # the old one may still be mapped
    scratch.write_bytes(data)
    code = app.main([*COMMANDS[command], str(scratch)])
    err = capsys.readouterr().err
    assert code in (0, 1)
    assert err.count("error: ") == code
    if code:
        assert err.splitlines()[-1].startswith("error: ")
