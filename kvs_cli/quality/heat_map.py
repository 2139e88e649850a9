"""Pictures of the quality benches. They need matplotlib, so this is imported where it is wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_MOST_NUMBERS = 400   # cells with their number written in them; more are too small for it


@dataclass(frozen=True, slots=True)
class _Axis:
    """What the cells along an axis are called."""

    label: str
    names: Sequence[str]


def draw_heat_map(summary: Mapping[str, Any], path: Path) -> None:
    """``kvs bench needle`` as a PNG: prompt lengths to the right, depths downwards, the colour is the share of facts
    that were found."""
    cells = summary["cells"]
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth_pct"] for cell in cells})
    share = {(cell["depth_pct"], cell["length"]): 100 * cell["found"] / cell["prompts"] for cell in cells}
    _draw(
        [[share.get((depth, length), nan) for length in lengths] for depth in depths],
        _Axis("tokens of the prompt", [f"{length:,}" for length in lengths]),
        _Axis("depth of the fact", [f"{depth} %" for depth in depths]),
        title=f"{_model(summary)}: {summary['found']} of {summary['prompts']} found\n"
              f"arena {summary['arena_mib']:.1f} MiB, K {summary['type_k']}, V {summary['type_v']}, "
              f"up to {100 * summary['most_streamed_share']:.0f} % of the pages streamed",
        colours="found, %", most=100.0, digits=0, path=path,
    )


def draw_layers(summary: Mapping[str, Any], path: Path) -> None:
    """``kvs profile-layers`` as a PNG: windows to the right, layers downwards, the colour is the share of attention
    outside. Layers with a window of their own stay white."""
    layers = summary["layers"]
    table = [layer["outside_pct"] or [nan] * len(summary["windows"]) for layer in layers]
    _draw(
        table,
        _Axis("window, tokens", [f"{window:,}" for window in summary["windows"]]),
        _Axis("layer", [str(layer["layer"]) for layer in layers]),
        title=f"{_model(summary)}: attention outside the newest tokens\n"
              f"{summary['tokens']:,} tokens, K {summary['type_k']}, V {summary['type_v']}",
        colours="attention outside, %", most=max([share for row in table for share in row if share > 0], default=1.0),
        digits=1, path=path,
    )


def _model(summary: Mapping[str, Any]) -> str:
    return Path(summary["model"]).name + (" (synthetic: random weights)" if summary["synthetic"] else "")


def _draw(
    table: Sequence[Sequence[float]], x: _Axis, y: _Axis, *, title: str, colours: str, most: float, digits: int,
    path: Path,
) -> None:
    """Write a PNG. nan stays white, ``most`` has the brightest colour."""
    figure = Figure(figsize=(max(5.5, 2.5 + 0.75 * len(x.names)), max(3.2, 1.7 + 0.42 * len(y.names))), dpi=150,
                    layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(table, cmap="cividis", vmin=0, vmax=most, aspect="auto")
    axes.set_xticks(range(len(x.names)), x.names, rotation=45 if len(x.names) > 8 else 0)
    axes.set_yticks(range(len(y.names)), y.names)
    axes.set_xlabel(x.label)
    axes.set_ylabel(y.label)
    if len(x.names) * len(y.names) <= _MOST_NUMBERS:
        for down, row in enumerate(table):
            for right, value in enumerate(row):
                if isnan(value):
                    continue
                colour = "black" if value > 0.55 * most else "white"
                axes.text(right, down, f"{value:.{digits}f}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_title(title, fontsize=9)
    figure.colorbar(image, ax=axes, label=colours)
    figure.savefig(path)
