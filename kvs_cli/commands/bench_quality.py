"""``kvs bench needle``, ``perplexity`` and ``equivalence``: their flags.

Beside its own flags each takes those of the engine, which ``kvs run --help`` lists: they pass through to
``options.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}
# Only --help asks for help: -h is how -hf begins, and a flag that is not declared here must pass as it is.

EPILOG = (
    "Settings of the engine hold too, such as --model, --device, --ctx-size, --cache-type-k, --cache-type-v, "
    "--kv-page-tokens, --kv-stream-arena-mib, --ubatch-size: kvs run --help lists them. Without --model it is the demo "
    "model that comes with kvs."
)

Output = Annotated[Path | None, typer.Option("--output", metavar="DIR", help="Folder for the results; made if needed.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
TextFile = Annotated[
    Path | None,
    typer.Option("--text-file", metavar="FILE", help="The text; by default the benchmark text, which kvs generates."),
]


def register(app: typer.Typer) -> None:
    """Add the three commands to ``kvs bench``."""
    for command in (needle, perplexity, equivalence):
        app.command(context_settings=CONTEXT, epilog=EPILOG, help=help_of(command))(command)


def help_of(command: Callable[..., None]) -> str:
    """Its docstring, a line per paragraph, which typer breaks where the terminal ends."""
    return "\n\n".join(" ".join(part.split()) for part in (command.__doc__ or "").split("\n\n"))


def needle(
    ctx: typer.Context,
    lengths: Annotated[str, typer.Option(
        metavar="LIST", help="Tokens of the prompts: numbers and FIRST:LAST:STEP, with commas."
    )] = "1024,2048,4096,8192",
    depths: Annotated[str, typer.Option(
        metavar="LIST", help="Where the fact stands, in percent of the text; 100 is right before the question."
    )] = "0,25,50,75,100",
    repeat: Annotated[int, typer.Option(metavar="N", help="Prompts for each length and depth.")] = 1,
    facts: Annotated[int, typer.Option(
        metavar="N", help="Facts in a prompt, of which one is asked for; the others are to be kept apart from it."
    )] = 8,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the facts and their places.")] = 1,
    text_file: TextFile = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """Needle in a haystack: hide a five-digit number at every depth of texts of every length, and ask for it.

    The prompt ends in the middle of the answer, so that models that only continue text can be asked as well. The answer
    is taken greedily; the number has to be right to its last digit. Prints a table of shares; with --output also
    needle.csv (a row per prompt), needle.json, and the heat map needle.png.

    Example: kvs bench needle --lengths 4096:32768:4096 --depths 0,50,100 --kv-stream-arena-mib 16 --output needle
    """
    from kvs_cli.quality.haystack import MOST_FACTS
    from kvs_cli.quality.needle import NeedleGrid, run_needle
    from kvs_cli.quality.setup import Bench, between, numbers

    grid = NeedleGrid(
        numbers(lengths, "--lengths", least=64, most=1 << 27), numbers(depths, "--depths", least=0, most=100),
        between(repeat, 1, 10_000, "--repeat"), between(facts, 1, MOST_FACTS, "--facts"), seed,
    )
    run_needle(Bench.begin("needle", ctx.args, output=output, json=json), grid, text_file)


def perplexity(
    ctx: typer.Context,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of the text that are scored, at most.")] = 8192,
    stride: Annotated[int | None, typer.Option(
        metavar="N", help="Tokens from the start of a window to that of the next; by default half a window."
    )] = None,
    text_file: TextFile = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """Perplexity of a text, read in windows of --ctx-size tokens (by default 2048) through the streamed cache.

    A window begins --stride tokens after the one before. Every token is scored once: in the first window that has it,
    so that behind the first window each has at least window less stride tokens before it. Prints nats per token, bits
    per byte and perplexity with their standard errors, which take tokens as independent; with --output also
    perplexity.csv (a row per window) and perplexity.json. Bits per byte can be compared between tokenizers.

    Example: kvs bench perplexity -m model.gguf -c 8192 --tokens 100000 -ctk q8_0 -ctv q4_0 --kv-stream-arena-mib 512
    """
    from kvs_cli.quality.perplexity import run_perplexity
    from kvs_cli.quality.setup import Bench

    run_perplexity(Bench.begin("perplexity", ctx.args, output=output, json=json), tokens, stride, text_file)


def equivalence(
    ctx: typer.Context,
    prompt_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens read as a prompt.")] = 2048,
    decode_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens read one by one behind it.")] = 32,
    arenas_mib: Annotated[str | None, typer.Option(
        metavar="LIST", help="Arenas to compare, in MiB; by default three KV pools, from the smallest that works."
    )] = None,
    against: Annotated[str, typer.Option(
        metavar="LIST",
        help="Other engines to compare with: llama.cpp (the xllamacpp package), cpu (where kvs runs on a GPU); auto: "
             "those that are there; none.",
    )] = "auto",
    text_file: TextFile = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """Logits of every arena against the resident cache, bit by bit, and against other engines, by distance.

    The text is read as a prompt and then token by token, once with all of KV on the device and once per arena: every
    logit of every row has to have the same bits, or the command fails. Other engines sum in another order, so their
    logits are compared as distributions, behind the prompt and behind each token that is read one by one: KL
    divergence, share of rows with the same likeliest token, and where the two part first. Prints a table; with
    --output also equivalence.csv and equivalence.json.

    Example: kvs bench equivalence -m model.gguf --prompt-tokens 8192 --arenas-mib 16,32,64 -ctk q8_0 -ctv q4_0
    """
    from kvs_cli.quality.equivalence import Plan, run_equivalence
    from kvs_cli.quality.setup import Bench, numbers

    arenas = None if arenas_mib is None else numbers(arenas_mib, "--arenas-mib", least=1, most=1 << 24)
    plan = Plan.checked(prompt_tokens, decode_tokens, arenas, against)
    run_equivalence(Bench.begin("equivalence", ctx.args, output=output, json=json), plan, text_file)
