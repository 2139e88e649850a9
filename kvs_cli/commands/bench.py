"""``kvs bench``: measurements. Its commands take the settings of ``kvs run`` beside their own flags."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvs_cli.bench.columns import Row
from kvs_cli.commands import bench_quality
from kvs_cli.logging import configure_logging
from kvs_cli.options import Parsed, parse
from kvs_core.errors import SettingsError
from kvs_core.settings import LoggingSettings, SyntheticModel
from kvs_core.settings.setting import Command, Group
from kvs_core.settings.table import BY_FLAG
from kvs_core.settings.typed import engine_settings, logging_settings

_ANY = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}   # -h begins -hf
_USED = (Group.GENERAL, Group.MODEL, Group.CONTEXT, Group.KV, Group.DEVICE, Group.ROPE, Group.SPECULATIVE,
         Group.LOGGING, Group.THREADS)
_OF_SWEEP = {
    "ctx_size": "--contexts", "n_predict": "--decode-tokens", "spec_type": "--spec-types",
    "spec_default": "--spec-types", "spec_synth_len": "--spec-synth-len", "spec_synth_rates": "--spec-synth-len",
}
_OF_COMPARE = {"ctx_size": "--prompt-tokens", "n_predict": "--decode-tokens"}

app = typer.Typer(name="bench", no_args_is_help=True, help="Measure: speed over contexts, other engines, quality.")


@app.command(context_settings=_ANY, epilog="All settings of kvs run for the model, its KV cache, the device and the "
             "drafters hold for every point: -m, -ctk, -ctv, -b, -ub, --kv-residency-mode, --device, ... "
             "Text is greedy.")
def sweep(
    ctx: typer.Context,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where CSV, JSONL, plots, summary and logs go.")],
    contexts: Annotated[str, typer.Option(metavar="LIST", help="Contexts in tokens: A,B,C or FIRST:LAST:STEP.")]
    = "8192",
    mtp_lengths: Annotated[str | None, typer.Option(
        metavar="LIST", help="Tokens that draft-mtp drafts, a variant each: 0,1,2,3; 0 is plain decoding.")] = None,
    spec_types: Annotated[str | None, typer.Option(
        metavar="LIST", help="More variants: none,draft-resident:5,ngram-mod+draft-mtp:3.")] = None,
    spec_synth_len: Annotated[str | None, typer.Option(
        metavar="X[,X...]", help="Pretend acceptance: tokens out of a verification of the longest draft, or one number "
        "for each variant that drafts. The text means nothing.")] = None,
    decode_tokens: Annotated[int, typer.Option(
        min=1, max=1 << 20, metavar="N", help="Tokens to generate and time at each point.")] = 256,
    arena_mib: Annotated[int | None, typer.Option(
        min=1, max=1 << 24, metavar="N", help="The arena of every point (--kv-stream-arena-mib).")] = None,
    auto_max_arena: Annotated[bool, typer.Option(
        "--auto-max-arena", help="Instead: the largest arena that works, found for each point.")] = False,
    prompt_file: Annotated[Path | None, typer.Option(
        metavar="FILE", help="Text that every point begins with; without it, a text that comes with kvs. A synthetic "
        "model reads none: its context is filled.")] = None,
    repeat: Annotated[int, typer.Option(min=1, max=1000, metavar="R", help="Times that every point is measured.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on in DIR: finished points are not run again.")] = False,
) -> None:
    """Decode and prefill speed over contexts and variants of speculation, each point in a fresh process.

    kvs bench sweep -m model.gguf --contexts 8192:65536:8192 --mtp-lengths 0,1,2,3 --arena-mib 512 --output sweep
    """
    from kvs_cli.bench.grid import parse_contexts, parse_variants, points, pretend
    from kvs_cli.bench.sweep import SweepSettings, run_sweep

    parsed = _settings(ctx.args, "run", _OF_SWEEP)
    arguments = list(ctx.args)
    if (arena_mib is not None) + auto_max_arena + bool({"arena_mib", "pool_mib"} & parsed.explicit) > 1:
        raise SettingsError("--arena-mib, --auto-max-arena and the arena's or pool's other flags and variables exclude "
                            "each other; give one")
    names = {"--ctx-size": "--contexts", "--spec-type": "--spec-types"}
    if "spec_draft_n_max" not in parsed.explicit and (mtp_lengths is None) != (spec_types is None):
        names["--spec-draft-n-max"] = "--mtp-lengths" if spec_types is None else "--spec-types"
    if arena_mib is not None:
        names["--kv-stream-arena-mib"] = "--arena-mib"
        arguments += ["--kv-stream-arena-mib", str(arena_mib)]
    if "spec_adaptive" not in parsed.explicit:
        arguments += ["--spec-adaptive", "off"]   # a variant is what its name says, whether it pays or not
    variants = parse_variants(mtp_lengths, spec_types, default_n_max=parsed.values["spec_draft_n_max"])
    if spec_synth_len is not None:
        variants = pretend(variants, spec_synth_len)
    engine = engine_settings(parsed.values)
    prompt = None
    if not isinstance(engine.model.source, SyntheticModel):
        prompt = _prompt(prompt_file)
    elif prompt_file is not None:
        raise SettingsError(f"--prompt-file {prompt_file}: a synthetic model's context is filled, not read; "
                            "leave it out")
    rows = run_sweep(SweepSettings(
        points(parse_contexts(contexts), variants, repeat), arguments, dict(os.environ), prompt, decode_tokens, output,
        resume=resume, auto_max_arena=auto_max_arena, flag_names=names,
    ))
    _end_of(rows)


@app.command(context_settings=_ANY, epilog="All settings of kvs serve for the model, its KV cache, the device and the "
             "drafters hold for kvs: -m, -ctk, -ctv, --kv-stream-arena-mib, --spec-type, --device, ...")
def compare(
    ctx: typer.Context,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where CSV, JSON, a table and logs go.")],
    against: Annotated[list[str] | None, typer.Option(
        metavar="URL", help="A server with llama-server's or OpenAI's API that is up, with the same model; it may be "
        "given several times. A key is taken from OPENAI_API_KEY.")] = None,
    against_command: Annotated[list[str] | None, typer.Option(
        metavar="COMMAND", help="A server to start: 'llama-server -m {model} --port {port} -c {context}'; it may be "
        "given several times.")] = None,
    against_offloaded: Annotated[bool, typer.Option(
        "--against-offloaded", help="HF transformers with its offloaded cache, where it can run the model; needs "
        "transformers, torch and accelerate.")] = False,
    prompt_tokens: Annotated[int, typer.Option(
        min=64, max=1 << 24, metavar="N", help="Tokens of the prompt, about; the contexts are as large as needed.")]
    = 2048,
    decode_tokens: Annotated[int, typer.Option(min=2, max=1 << 20, metavar="N", help="Tokens to generate.")] = 64,
    prompt_file: Annotated[Path | None, typer.Option(
        metavar="FILE", help="The text to read; without it, a text that comes with kvs.")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=1000, metavar="R", help="Times that every engine is asked.")] = 3,
) -> None:
    """Kvs and other engines on the same model, asked in turn: medians, and how many times as fast kvs is.

    kvs bench compare -m model.gguf --against-command 'llama-server -m {model} --port {port} -c {context}' --output out
    """
    from kvs_cli.bench.checks import check_engine
    from kvs_cli.bench.compare import CompareSettings, run_compare, table
    from kvs_cli.open_model import open_model
    from kvs_cli.render import Screen, write_text

    parsed = _settings(ctx.args, "serve", _OF_COMPARE)
    if not (against or against_command or against_offloaded):
        raise SettingsError("nothing to compare with; give --against, --against-command or --against-offloaded")
    settings = engine_settings(parsed.values)
    text = _prompt(prompt_file)
    model = open_model(settings.model, Screen(), settings.rope)
    asked = CompareSettings(
        ctx.args, None if model.file.synthetic and not model.file.path.exists() else model.file.path, model.tokenizer,
        text, prompt_tokens, decode_tokens, rounds, output, addresses=against or (), commands=against_command or (),
        offloaded=against_offloaded, api_key=os.environ.get("OPENAI_API_KEY", ""),
    )
    sized = replace(settings, context=replace(settings.context, ctx_size=asked.context_tokens))
    check_engine(model, sized, "--prompt-tokens")
    engines = run_compare(asked)
    others = engines[1:]
    failed = [engine for engine in engines if engine.error]
    if any(engine.rounds for engine in others):
        write_text("\n".join(table(engines)) + "\n")
    if all(engine.error for engine in others):
        done = max(len(engine.rounds) for engine in others)
        said = "; ".join(f"{engine.name}: {engine.error}" for engine in others)
        raise SettingsError(f"nothing is left to compare kvs with after {done} of {rounds} rounds: {said}")
    if failed:
        raise SettingsError(f"{len(failed)} of {len(engines)} engines failed, the first: {failed[0].name}: "
                            f"{failed[0].error}")


@app.command()
def plot(folder: Annotated[Path, typer.Argument(metavar="DIR", help="The output of a sweep.")]) -> None:
    """Draw the plots and write the summary of a sweep again, from its CSV."""
    from kvs_cli.bench.store import read_csv
    from kvs_cli.bench.sweep import write_report

    configure_logging(LoggingSettings())
    write_report(folder, read_csv(folder / "sweep.csv"))


def _settings(arguments: Sequence[str], command: Command, own: Mapping[str, str]) -> Parsed:
    """The settings of ``command`` among the arguments, which are for kvs as it is measured. SettingsError for a flag
    that would do nothing here, or that has another in its place (``own``)."""
    parsed = parse(arguments, os.environ, command)
    for argument in arguments:
        flag = argument.partition("=")[0]
        setting = BY_FLAG.get(flag.replace("_", "-") if flag.startswith("--") else flag)
        if setting is None:
            continue
        if setting.key in own:
            raise SettingsError(f"{flag}: this command has {own[setting.key]} for that")
        if setting.group not in _USED:
            raise SettingsError(f"{flag}: has no effect on a measurement, whose text is greedy; leave it out")
    if parsed.positionals:
        raise SettingsError(f"{parsed.positionals[0]}: is no flag; a prompt is given with --prompt-file")
    for notice in parsed.notices:
        print(notice, file=sys.stderr)
    configure_logging(logging_settings(parsed.values))
    return parsed


def _prompt(file: Path | None) -> str:
    from kvs_cli.prompt import read_text_file

    if file is not None:
        return read_text_file(file, "--prompt-file")
    from kvs_core.bench_text import benchmark_text

    return benchmark_text()


def _end_of(rows: Sequence[Row]) -> None:
    """``SettingsError`` if points failed, with the first one's reason: the files are whole, the sweep is not."""
    failed = [row for row in rows if row.get("error")]
    if failed:
        raise SettingsError(f"{len(failed)} of {len(rows)} points failed, the first: {failed[0]['error']}; "
                            f"{failed[0]['log']} says more, and --resume runs them again")


bench_quality.register(app)
