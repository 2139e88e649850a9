"""The commands of kvs, and how they end.

Exit codes: 0 done, 1 any error (one line on stderr; never a usage code of its own), 130 interrupted by Ctrl-C.
Each command reads its own arguments through ``options.parse``: its flags are llama-server's, which no general command
line library can read. A command's work is imported when it runs, so help and errors need none of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from typer.core import TyperCommand

from kvs_cli.commands import bench, profile
from kvs_cli.completion import SHELLS, completion_script
from kvs_cli.ending import (
    FAILED,
    INTERRUPTED,
    OutputError,
    ReaderLeft,
    drop,
    error_text,
    open_missing_streams,
    printable,
    writing,
)
from kvs_cli.error_object import NO_TEXT, error_object
from kvs_cli.help import print_help
from kvs_cli.logging import configure_logging
from kvs_cli.options import Parsed, parse
from kvs_cli.own_line import begin_line
from kvs_core.errors import KvsError, SettingsError
from kvs_core.settings import LoggingSettings
from kvs_core.settings.setting import Command
from kvs_core.settings.typed import info_settings, logging_settings, plan_settings, run_settings, serve_settings
from kvs_core.units import MIB, counted

COMMANDS: tuple[Command, ...] = ("run", "info", "plan", "serve")

# Click's class of usage errors. Typer carries its own copy of click since 0.26, so it is reached through typer.
_UsageError = cast("type[Exception]", typer.BadParameter.__bases__[0])


class _RawCommand(TyperCommand):
    """A command that takes its arguments as they are."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


app = typer.Typer(name="kvs", add_completion=False, pretty_exceptions_enable=False,
                  context_settings={"help_option_names": ["-h", "--help"]},
                  help="Run GGUF language models whose KV cache is larger than the memory you give it, exactly.")
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def _kvs(
    ctx: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    completion_bash: Annotated[bool, typer.Option("--completion-bash", help="Same as kvs completion bash.")] = False,
) -> None:
    if show_version:
        _print(f"kvs {_version()}\n")
    elif completion_bash:
        _print(completion_script("bash", COMMANDS))
    elif ctx.invoked_subcommand is None:
        _print(ctx.get_help())
    else:
        return
    raise typer.Exit(0)


@app.command(cls=_RawCommand, help="Continue a prompt. kvs run --help shows its settings.")
def run(ctx: typer.Context) -> None:
    parsed = _read("run", ctx.args)
    with error_object(due=parsed.values["json"], facts=NO_TEXT) as told:
        _begin(parsed)
        settings = run_settings(parsed.values, parsed.explicit, parsed.positionals)
        from kvs_cli.commands.run import execute

        raise typer.Exit(execute(settings, told))


@app.command(cls=_RawCommand, help="Show a model and its memory plan. kvs info --help shows its settings.")
def info(ctx: typer.Context) -> None:
    parsed = _read("info", ctx.args)
    with error_object(due=parsed.values["json"]):
        _begin(parsed)
        settings = info_settings(parsed.values, parsed.positionals)
        from kvs_cli.commands.info import execute

        raise typer.Exit(execute(settings))


@app.command(cls=_RawCommand, help="Foretell memory and speed of a model, before it is loaded. kvs plan --help shows "
                                   "its settings.")
def plan(ctx: typer.Context) -> None:
    parsed = _read("plan", ctx.args)
    with error_object(due=parsed.values["json"]):
        _begin(parsed)
        settings = plan_settings(parsed.values, parsed.positionals)
        from kvs_cli.commands.plan import execute

        raise typer.Exit(execute(settings))


@app.command(cls=_RawCommand, help="Serve a model over HTTP. kvs serve --help shows its settings.")
def serve(ctx: typer.Context) -> None:
    parsed = _read("serve", ctx.args)
    _begin(parsed)
    settings = serve_settings(parsed.values, parsed.explicit, parsed.positionals)
    from kvs_cli.commands.serve import execute

    raise typer.Exit(execute(settings))


profile.register(app)


@app.command(help="Write a model with the shapes of a real one and random weights, for measuring other programs: "
                  "SHAPE:MIX[:mtp] as --model synthetic: takes it, such as qwen3.5-27b:iq4_xs.")
def synthesize(
    name: Annotated[str, typer.Argument(metavar="SHAPE:MIX[:mtp]", help="Which; a wrong one lists what there is.")],
    out: Annotated[str, typer.Argument(metavar="OUT.gguf", help="A file that does not exist yet.")],
) -> None:
    from kvs_cli.commands.synthesize import execute

    configure_logging(LoggingSettings())
    execute(name, out)


@app.command(help="Look whether this machine has what kvs needs, and say what to do where it has not.\n\n"
                  "GPUs, driver, CuPy, NVRTC, who holds GPU memory, the PCIe link, pinned memory, RAM, BLAS, "
                  "containers, WSL, caches, variables: a line for each, with a verdict (ok, warning, problem). Begin "
                  "here when a GPU is not used, or is slow.\n\n"
                  "Rates are measured, which takes some seconds, up to 1 GiB of each GPU, and a quarter of the free "
                  "RAM, 2 GiB at most; no model is needed. Exit code 0: kvs can run here, be it on the CPU; 1: it "
                  "cannot.")
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object with all facts; null where not known.")]
    = False,
) -> None:
    try:
        from kvs_cli.commands.doctor import execute
    except ImportError as error:   # a package that is missing or broken is what this command is asked about
        raise KvsError(
            f"kvs cannot be loaded: {printable(str(error))}; pip install kvs-llm again, in this environment"
        ) from error
    configure_logging(LoggingSettings())
    raise typer.Exit(execute(_version(), json=json))


@app.command(help="Print a completion script for a shell: bash, zsh or fish.")
def completion(shell: Annotated[str, typer.Argument(help="bash, zsh or fish")] = "bash") -> None:
    if shell not in SHELLS:
        raise SettingsError(f"no completion for {shell!r}; use one of {', '.join(SHELLS)}")
    _print(completion_script(shell, COMMANDS))


def _read(command: Command, argv: Sequence[str]) -> Parsed:
    """Read the settings, and do what ends the command early."""
    parsed = parse(argv, os.environ, command)
    if _act(parsed, command):
        raise typer.Exit(0)
    return parsed


def _begin(parsed: Parsed) -> None:
    """Print notices and set up logging."""
    for notice in parsed.notices:
        _say(notice)
    configure_logging(logging_settings(parsed.values))


def _act(parsed: Parsed, command: Command) -> bool:
    """Do what was asked for instead of the command's work, such as ``--help``; False if nothing was."""
    values = parsed.values
    if values["help"] or values["help_all"]:
        with writing():
            print_help(command, everything=values["help_all"], console=Console())
    elif values["version"]:
        _print(f"kvs {_version()}\n")
    elif values["completion_bash"]:
        _print(completion_script("bash", COMMANDS))
    elif values["list_devices"]:
        _print(_device_list())
    elif values["cache_list"]:
        _print(_cache_list())
    else:
        return False
    return True


def _device_list() -> str:
    from kvs_core.device.host.machine import available_cores, available_ram_bytes

    return f"cpu: NumPy on the host ({counted(available_cores(), 'core')}, {available_ram_bytes() // MIB} MiB free)\n"


def _cache_list() -> str:
    from kvs_core.formats.hub import cache_dir, cached_models

    models = cached_models()
    lines = [f"{model.source}  {model.file}  {model.n_bytes / MIB:.0f} MiB" for model in models]
    return "".join(f"{printable(line)}\n" for line in (*lines, f"{counted(len(models), 'model')} in {cache_dir()}"))


def _version() -> str:
    try:
        return version("kvs-llm")
    except PackageNotFoundError:
        return "from a source tree"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's) and return the exit code."""
    open_missing_streams()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows ? instead of failing
    try:
        code = app(args=list(sys.argv[1:] if argv is None else argv), prog_name="kvs", standalone_mode=False)
        with writing():
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.Exit as leave:
        return leave.exit_code
    except OutputError as error:
        drop(sys.stdout)
        return FAILED if isinstance(error, ReaderLeft) else _fail(str(error))
    except KvsError as error:
        return _fail(error_text(error))
    except _UsageError as error:
        said = cast("Any", error).format_message().rstrip(".")
        where = cast("Any", error).ctx
        command = "kvs" if where is None else where.command_path
        said += " " if said.endswith("?") else "; " if said else ""
        return _fail(f"{said}{command} --help lists what there is") if said else 0   # help has been printed instead
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # the reader has left in the middle of the help that typer prints
        drop(sys.stdout)
        return FAILED
    except OSError as error:
        drop(sys.stdout)
        return _fail(error_text(error))
    except MemoryError as error:
        return _fail(error_text(error))


def _print(text: str) -> None:
    with writing():
        sys.stdout.write(text)


def _say(line: str) -> None:
    """One line on stderr; if that cannot be written there is nobody to tell."""
    try:
        begin_line()
        print(printable(line), file=sys.stderr, flush=True)
    except OSError:
        drop(sys.stderr)


def _fail(message: str) -> int:
    _say(f"error: {message}")
    return FAILED
