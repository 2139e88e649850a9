"""The command tree: help teaches, and every end has its exit code and goes to the right stream."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from rich.text import Text

from kvs_cli import app
from kvs_cli.completion import SHELLS, completion_script
from kvs_cli.help import print_help
from kvs_cli.options import parse
from kvs_core.errors import SettingsError
from kvs_core.settings.setting import Command
from kvs_core.settings.table import BY_FLAG, TABLE


def help_text(command: Command, *, everything: bool = False, width: int = 120) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_help(command, everything=everything, console=console)
    return console.export_text()


@pytest.mark.parametrize(
    "line",
    ["", "--help", "-h", "--version", "--completion-bash", "run --help", "run --usage", "run --help-all",
     "run --version", "run --list-devices", "run --completion-bash", "info -h", "info --help-all", "completion",
     "completion zsh", "bench", "bench --help", "plan --help", "doctor --help"],
)
def test_answers_end_with_0(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What only asks for a text gets it on stdout, and nothing is said on stderr."""
    assert app.main(line.split()) == 0
    captured = capsys.readouterr()
    assert captured.out
    assert captured.err == ""


@pytest.mark.parametrize(
    "line",
    ["rum", "--bad", "run --bad", "run", "run -m M", "run -c", "run -np 4", "run a b", "info --bad",
     "completion tcsh", "completion bash zsh", "doctor --bad", "doctor x"],
)
def test_errors_end_with_1(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every error is one line on stderr that starts with ``error:``, with nothing on stdout; never exit code 2."""
    assert app.main(line.split()) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def commands_of(command: Any, *names: str) -> Iterator[tuple[str, Any]]:
    """A command and all below it, each with its words."""
    yield " ".join(names), command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands_of(below, *names, name)


def test_help_is_printed_as_it_is_written() -> None:
    """Nothing in it is taken for markup or for the name of an emoji, as ``0:100:10`` would be."""
    seen = 0
    for names, command in commands_of(typer.main.get_command(app.app)):
        for text in (command.help, *(getattr(each, "help", None) for each in command.params)):
            if text:
                assert Text.from_markup(text).plain == text, names
                seen += 1
    assert seen > 60


def test_an_unknown_flag_is_named_as_llama_server_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    """``error: invalid argument: X`` with the nearest flag."""
    assert app.main(["run", "--modle", "x"]) == 1
    assert capsys.readouterr().err == "error: invalid argument: --modle; did you mean --model?\n"


def test_notices_go_to_stderr_before_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """What does nothing is said even if the run then cannot start."""
    assert app.main(["run", "--port", "1"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "--port: no effect on kvs run",
        "error: no prompt: give PROMPT_FILE, -p TEXT, -f FILE, or - to read it from stdin; for a chat use kvs serve "
        "and its page"]


PROGRAM = "import sys; from kvs_cli.app import main; sys.exit(main())"


def in_a_shell(redirections: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """``kvs *argv`` in a process of its own, with streams as a shell makes them."""
    line = ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-c", PROGRAM, *argv]
    return subprocess.run(line, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=30)


@pytest.mark.parametrize(
    ("redirections", "line", "code"),
    [(">&-", "--version", 0), (">&-", "run --help", 0), ("2>&-", "--version", 0), ("2>&-", "run --port 1", 1),
     (">&- 2>&- <&-", "run", 1), ("<&-", "run - -m nowhere.gguf", 1), ("2>/dev/full", "run", 1)],
)
def test_closed_streams_are_as_good_as_empty_ones(redirections: str, line: str, code: int) -> None:
    """A stream that the shell has closed, or that takes nothing, changes no exit code and makes no traceback."""
    done = in_a_shell(redirections, *line.split())
    assert done.returncode == code
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("line", ["--version", "--help", "run --help", "run --list-devices", "completion zsh"])
def test_output_that_cannot_be_written_is_one_line(line: str) -> None:
    """On a full disk every command that prints says so and fails; nothing is said of a reader that has left."""
    if not Path("/dev/full").exists():
        pytest.skip("the system has no /dev/full")
    done = in_a_shell(">/dev/full", *line.split())
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_error_of_the_system_is_not_taken_for_one_of_the_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the system refuses is said as it is."""
    def refuse() -> None:
        raise PermissionError(13, "Permission denied", "/somewhere")

    monkeypatch.setattr("kvs_core.formats.hub.cached_models", refuse)
    assert app.main(["run", "--cache-list"]) == 1
    assert capsys.readouterr().err == (
        "error: the system says: [Errno 13] Permission denied: '/somewhere'; check what it names, and try again\n")


def test_names_of_files_stay_on_their_line(capsys: pytest.CaptureFixture[str]) -> None:
    """An error is one line and acts on no terminal, whatever the name of a file."""
    assert app.main(["info", "no\nsuch\x1b[2Jfile"]) == 1
    assert capsys.readouterr().err == "error: no\ufffdsuch\ufffd[2Jfile: does not exist\n"


@pytest.mark.parametrize("command", app.COMMANDS)
def test_help_names_every_setting(command: Command) -> None:
    """The full help has every flag of the table; the short one has what works here, and says that there is more."""
    short, full = help_text(command), help_text(command, everything=True)
    words = set(full.replace(",", " ").split())
    for setting in TABLE:
        assert words.issuperset((*setting.flags, *setting.off))
    usable_flags = {setting.flag for setting in TABLE if setting.usable(command)}
    assert set(short.replace(",", " ").split()) >= usable_flags
    assert "--help-all" in short
    assert "--lora" not in short


def rows_of(text: str) -> dict[str, str]:
    """The rows of a help of two columns, on a console so wide that each has one line: flags and what stands beside."""
    rows = (re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in text.splitlines() if line.startswith(" "))
    return dict(row for row in rows if len(row) == 2)


def test_help_shows_defaults_as_they_are_typed() -> None:
    """Lists with their own separators, which give the default when they are read; an empty default is not shown."""
    rows = rows_of(help_text("serve", width=2000))
    for usage in ("--samplers A;B;...", "--cors-methods A,B,..."):
        shown = re.search(r"default (\S+?)(;\s|\])", rows[usage])
        assert shown is not None, rows[usage]
        flag = usage.split()[0]
        setting = BY_FLAG[flag]
        assert parse([flag, shown[1]], {}, "serve").values[setting.key] == setting.default
    assert "--cors-origins A,B,..." in rows
    assert rows["--api-prefix TEXT"] == "Prefix of every route. [LLAMA_ARG_API_PREFIX]"
    assert "--slot-save-path FOLDER" in rows


def test_help_says_once_what_is_refused() -> None:
    """Types of drafters that are refused for one reason have it together."""
    rows = rows_of(help_text("run", width=2000))
    row = next(text for usage, text in rows.items() if usage.startswith("--spec-type "))
    assert row.count("separate draft models are not loaded") == 1
    assert "draft-simple, draft-eagle3, draft-dflash, draft-dspark: separate draft models" in row


@pytest.mark.parametrize("command", app.COMMANDS)
def test_help_lists_no_spelling_as_refused_that_is_taken(command: Command) -> None:
    """Of a pair that is refused one way, the other way stands with what is taken; and all else is refused."""
    taken, refused = help_text(command, everything=True, width=4000).split("Refused, with what to use instead")
    taken = taken.split("Taken, without effect here")[1]
    flags = [flag for usage in rows_of(refused) for flag in usage.split(", ")]
    assert {"-cnv", "--agent", "-nkvo", "--lora"} <= {*flags}
    for flag in flags:
        with pytest.raises(SettingsError):
            parse([flag, *["1"] * BY_FLAG[flag].kind.arity], {}, command)
    others = {flag for usage in rows_of(taken) for flag in usage.split(", ")}
    for flag in ("-no-cnv", "--no-agent", "-kvo"):
        assert flag in others
        parse([flag], {}, command)


def test_help_of_run_has_three_examples() -> None:
    """Three command lines to start from, each on a line of its own."""
    assert sum(line.strip().startswith(("kvs run", "git diff")) for line in help_text("run").splitlines()) == 3


@pytest.mark.parametrize("width", [20, 40, 71, 80, 200])
def test_help_fits_the_console(width: int) -> None:
    """No line is wider than the console, and no word of a flag is lost on a narrow one."""
    text = help_text("run", width=width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "--kv-stream-arena" in text


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_scripts_are_valid(shell: str) -> None:
    """Every script names the flags; where the shell is installed, it accepts its script."""
    script = completion_script(shell, app.COMMANDS)
    assert "cache-type-k" in script
    assert "draft-model" not in script
    if shell == "fish":   # files are offered where a folder is wanted
        assert " -l slot-save-path -r " in script
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, check=True, timeout=20)


def test_bash_completes_flags_and_words() -> None:
    """Flags after a dash, words after a flag that takes some; refused words are not offered."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    script = completion_script("bash", app.COMMANDS) + """
COMP_WORDS=(kvs run --kv-page); COMP_CWORD=2; _kvs; echo "${COMPREPLY[@]}"
COMP_WORDS=(kvs run -fa o); COMP_CWORD=3; _kvs; echo "${COMPREPLY[@]}"
COMP_WORDS=(kvs r); COMP_CWORD=1; _kvs; echo "${COMPREPLY[@]}"
COMP_WORDS=(kvs d); COMP_CWORD=1; _kvs; echo "${COMPREPLY[@]}"
"""
    done = subprocess.run(["bash"], input=script, text=True, check=True, capture_output=True, timeout=20)
    assert done.stdout.splitlines() == ["--kv-page-tokens", "on", "run", "doctor"]


@pytest.mark.parametrize(
    ("line", "command"), [("bench sweep", "kvs bench sweep"), ("bench no-such-thing", "kvs bench")]
)
def test_a_usage_error_names_the_help_of_what_was_typed(
    line: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(line.split()) == 1
    assert capsys.readouterr().err.strip().endswith(f"; {command} --help lists what there is")


def test_a_command_that_is_mistyped_has_one_sentence_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["rum"]) == 1
    assert capsys.readouterr().err.endswith("Did you mean 'run'? kvs --help lists what there is\n")
