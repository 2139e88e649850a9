"""``kvs profile-layers``: attention outside windows, by layer, as a table, files and settings for window residency.

    text ─ tokens, as many as the context holds ─ one prefill, watched ─ Profile ─ table, CSV, JSON, PNG, YAML
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvs_cli.ending import printable, writing
from kvs_cli.quality.setup import Bench, numbers
from kvs_core.engine.profile import Profile, profile_layers
from kvs_core.errors import CapabilityError, SettingsError
from kvs_core.settings.rooms import LayerWindow
from kvs_core.units import MIB

LOGGER = logging.getLogger(__name__)

_MOST_WINDOW = 1 << 27
_WIDTH = 120   # of the table in files and pipes


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command's own flags say.

    windows        tokens, ascending
    threshold_pct  of a layer's attention, in percent
    yaml           where to write the settings; None: into the folder of the results
    """

    text: Path
    windows: tuple[int, ...]
    threshold_pct: float
    yaml: Path | None

    @staticmethod
    def checked(text: Path, windows: str, threshold_pct: float, yaml: Path | None) -> Asked:
        """Raises ``SettingsError`` for what cannot be."""
        if not 0 < threshold_pct <= 100:
            raise SettingsError(f"--threshold is {threshold_pct:g}; give a percentage above 0, up to 100")
        if yaml is not None and not yaml.parent.is_dir():
            raise SettingsError(f"--yaml {yaml}: there is no folder {yaml.parent}; make it first")
        if yaml is not None and (yaml.is_dir() or not os.access(yaml if yaml.exists() else yaml.parent, os.W_OK)):
            raise SettingsError(f"--yaml {yaml}: no file can be written there; give another name")
        return Asked(text, numbers(windows, "--windows", least=1, most=_MOST_WINDOW), threshold_pct, yaml)


def run_profile(bench: Bench, asked: Asked) -> None:
    """Measure, write what is found and say so on stdout. Raises ``KvsError``."""
    spec = bench.model.spec
    if all(layer.window for layer in spec.kv_layers):
        raise CapabilityError(
            f"{bench.model.file.path}: every layer has a window of the model's own, and none of it is streamed; leave "
            "--kv-residency-mode as it is"
        )
    # One row at least sees more than the smallest window.
    needed, flag, start = asked.windows[0] + 1, "--windows", bench.start_tokens
    bench.context_of(needed, flag)
    most = bench.context.context_tokens
    tokens = [*start, *bench.tokens_of(asked.text, max(1, needed - len(start)), most - len(start), flag)]
    _note_unseen(asked.windows, len(tokens))
    context_tokens = bench.settings.context.ctx_size or len(tokens)
    with bench.engine(context_tokens) as engine:
        bench.make_output()
        with bench.screen.stage("reading the text", "tokens") as progress:
            profile = profile_layers(engine, tokens, asked.windows, progress)
        report = engine.report()
        summary = {
            **bench.facts(),
            "text": str(asked.text),
            "device": engine.device_name,
            "arena_mib": report.arena_bytes / MIB,
            "h2d_mib": report.h2d_bytes / MIB,
            "tokens": profile.tokens,
            "windows": list(profile.windows),
            "threshold_pct": asked.threshold_pct,
            "layers": _layers(profile, asked.threshold_pct / 100),
            "kv_window_layers": _windows_text(profile.window_layers(asked.threshold_pct / 100)),
        }
    said = _write_files(bench, asked, summary)
    bench.write(summary, [_csv_row(layer, profile.windows) for layer in summary["layers"]])
    for line in said:
        LOGGER.info("%s", line)
    if not bench.json:
        _print_table(summary)


def _note_unseen(windows: Sequence[int], tokens: int) -> None:
    unseen = [window for window in windows if window >= tokens]
    if unseen:
        LOGGER.warning(
            "--windows %s: %d tokens are read, so nothing can lie outside: 0 %% says nothing there, and no layer keeps "
            "that; give a longer --text, or a larger --ctx-size", ",".join(map(str, unseen)), tokens,
        )


def _layers(profile: Profile, threshold: float) -> list[dict[str, Any]]:
    """Of each layer what was measured and what it may keep: null where the model has a window of its own."""
    return [
        {
            "layer": layer.layer,
            "own_window": layer.window or None,
            "outside_pct": [100 * share for share in layer.outside] if layer.measured else None,
            "keeps": _kept(profile.least_window(layer, threshold)) if layer.measured else None,
        }
        for layer in profile.layers
    ]


def _csv_row(layer: dict[str, Any], windows: Sequence[int]) -> dict[str, Any]:
    shares = layer["outside_pct"] or [None] * len(windows)
    return {
        "layer": layer["layer"], "own_window": layer["own_window"],
        **{f"outside_{window}_pct": share for window, share in zip(windows, shares, strict=True)},
        "keeps": layer["keeps"],
    }


def _kept(tokens: int | None) -> str:
    return "all" if tokens is None else str(tokens)


def _windows_text(windows: Sequence[LayerWindow]) -> str:
    """As ``--kv-window-layers`` takes them."""
    return ",".join(
        f"{each.first}{'' if each.first == each.last else f'-{each.last}'}={_kept(each.tokens)}" for each in windows
    )


def yaml_text(bench: Bench, summary: dict[str, Any]) -> str:
    """Settings for ``kvs run --config``."""
    lines = [
        "# Which KV stays on the device, for speed alone: the text is the same whatever this says.",
        f"# By kvs profile-layers, over {summary['tokens']} tokens of {printable(summary['text'])}: of each layer the "
        f"smallest window outside which less than {summary['threshold_pct']:g} % of its attention lies, else all.",
        "kv-residency-mode: window",
        f'kv-window-layers: "{summary["kv_window_layers"]}"',
    ]
    if bench.model.spec.nextn:
        lines.append(f"kv-window-tokens: {bench.model.spec.n_ctx_most}   # the MTP block, where it drafts, keeps all")
    return "\n".join(lines) + "\n"


def _write_files(bench: Bench, asked: Asked, summary: dict[str, Any]) -> list[str]:
    """The YAML and the heat map; what to say of them. Raises ``SettingsError``."""
    said = []
    if bench.output is not None:
        said.append(_draw(summary, bench.output / f"{bench.name}.png"))
    path, flag = asked.yaml, "--yaml"
    if path is None and bench.output is not None:
        path, flag = bench.output / f"{bench.name}.yaml", "--output"
    if path is not None:
        try:
            path.write_text(yaml_text(bench, summary), encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"{flag} {path}: cannot be written: {error.strerror or error}; give another") from None
        said.append(f"windows: {path}; kvs run --config takes it")
    return said


def _draw(summary: dict[str, Any], path: Path) -> str:
    try:
        from kvs_cli.quality.heat_map import draw_layers
    except ImportError:
        return "no heat map: matplotlib is missing; pip install 'kvs-llm[bench]' brings it"
    draw_layers(summary, path)
    return f"heat map: {path}"


def _print_table(summary: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("layer", *(f"{window:,}" for window in summary["windows"]), "keeps"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in summary["layers"]:
        if layer["outside_pct"] is None:
            cells = ["-"] * len(summary["windows"]) + [f"its own {layer['own_window']:,}"]
        else:
            cells = [f"{share:.2f} %" for share in layer["outside_pct"]] + [layer["keeps"]]
        table.add_row(str(layer["layer"]), *cells)
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH
    note = " (a synthetic model: it means nothing)" if summary["synthetic"] else ""
    with writing():
        console.print(table)
        console.print(
            f"attention outside the newest tokens{note}: the mean over heads and positions that see more, over "
            f"{summary['tokens']:,} tokens of {printable(summary['text'])}\n"
            f"arena {summary['arena_mib']:.1f} MiB, K {summary['type_k']}, V {summary['type_v']}; "
            f"{summary['h2d_mib']:.1f} MiB streamed to the device\n"
            f"below {summary['threshold_pct']:g} %: --kv-window-layers {summary['kv_window_layers']}",
            soft_wrap=True,
        )
