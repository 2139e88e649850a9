"""``kvs profile-layers``: its flags. Those of the engine pass through to ``options.py``, as for the quality benches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvs_cli.commands.bench_quality import CONTEXT, EPILOG, Json, Output, help_of


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("profile-layers", context_settings=CONTEXT, epilog=EPILOG, help=help_of(profile_layers))(profile_layers)


def profile_layers(
    ctx: typer.Context,
    text: Annotated[Path, typer.Option(
        "--text", metavar="FILE", help="The text; as much of it as the context holds is read."
    )],
    windows: Annotated[str, typer.Option(
        metavar="LIST", help="Windows in tokens: numbers and FIRST:LAST:STEP, with commas."
    )] = "1024,4096,16384",
    threshold: Annotated[float, typer.Option(
        metavar="PCT", help="A layer keeps the smallest window outside which less of its attention lies, in percent."
    )] = 1.0,
    yaml: Annotated[Path | None, typer.Option(
        "--yaml", metavar="FILE", help="Where to write the windows for kvs run --config; by default into --output."
    )] = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """How much of each layer's attention lies outside windows of the newest tokens, measured on a text.

    The text is read once, in any arena. For each attention layer and window the share is the mean over heads and over
    the positions that see more tokens than the window has; a window as long as the text is not kept. Prints a table of
    layers and windows; with --output also profile-layers.csv, .json, .yaml and the heat map .png. The YAML is window
    residency for kvs run --config: it says which pages stay on the device. That informs speed alone: the text is the
    same whatever it says, since the pages outside a window are streamed, not dropped. Layers with a window of the
    model's own stay as they are.

    Example: kvs profile-layers -m model.gguf --text book.txt -c 32768 -ctk q8_0 -ctv q4_0 --yaml windows.yaml
    """
    from kvs_cli.quality.profile import Asked, run_profile
    from kvs_cli.quality.setup import Bench

    asked = Asked.checked(text, windows, threshold, yaml)
    run_profile(Bench.begin(
        "profile-layers", ctx.args, output=output, json=json, command="kvs profile-layers", text_flag="--text"
    ), asked)
