"""The picture of ``kvs bench needle``. Needs matplotlib, so it is imported where it is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan, nan
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_MOST_NUMBERS = 400   # cells with their share written in them; more are too small for it


def draw_heat_map(summary: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: prompt lengths to the right, depths downwards, the colour is the share of facts that were found."""
    cells = summary["cells"]
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth_pct"] for cell in cells})
    share = {(cell["depth_pct"], cell["length"]): 100 * cell["found"] / cell["prompts"] for cell in cells}
    table = [[share.get((depth, length), nan) for length in lengths] for depth in depths]   # nan stays white

    figure = Figure(figsize=(max(5.5, 2.5 + 0.75 * len(lengths)), max(3.2, 1.7 + 0.42 * len(depths))), dpi=150,
                    layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(table, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45 if len(lengths) > 8 else 0)
    axes.set_yticks(range(len(depths)), [f"{depth} %" for depth in depths])
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("depth of the fact")
    if len(cells) <= _MOST_NUMBERS:
        for y, row in enumerate(table):
            for x, value in enumerate(row):
                colour = "black" if value > 55 else "white"
                if isnan(value):
                    continue
                axes.text(x, y, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=8)
    note = " (synthetic: random weights)" if summary["synthetic"] else ""
    axes.set_title(
        f"{Path(summary['model']).name}{note}: {summary['found']} of {summary['prompts']} found\n"
        f"arena {summary['arena_mib']:.1f} MiB, K {summary['type_k']}, V {summary['type_v']}, "
        f"up to {100 * summary['most_streamed_share']:.0f} % of the pages streamed",
        fontsize=9,
    )
    figure.colorbar(image, ax=axes, label="found, %")
    figure.savefig(path)
