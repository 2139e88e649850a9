"""``sweep.png`` and ``sweep.svg``: decode and prefill rates, KV pool and link use over the context, with limits.

Solid lines are measured, with bars from the least to the most of several repeats; dashed ones are limits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvs_cli.bench.columns import Row
from kvs_cli.bench.series import Series, contexts_of, series_of, subject, tokens_text
from kvs_core.errors import SettingsError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOGGER = logging.getLogger(__name__)

_LOG_RATIO = 8   # between the longest and the shortest context: from there on the axis is logarithmic
_MOST_TICKS = 12
_HEADROOM = 3.0  # times the highest measured value: a limit further up leaves the picture, or nothing could be read


def draw(folder: Path, rows: Sequence[Row]) -> None:
    """Write both, or say what is missing for that. Raises SettingsError."""
    lines = series_of(rows)
    if not lines:
        LOGGER.info("no plots: no point was measured")
        return
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        LOGGER.warning("no plots: matplotlib is not installed; pip install 'kvs-llm[bench]', then kvs bench plot %s",
                       folder)
        return
    figure = Figure(figsize=(12, 9), layout="constrained")
    FigureCanvasAgg(figure)
    (decode, prefill), (pool, link) = figure.subplots(2, 2)
    figure.suptitle(subject(rows), fontsize=11)
    _panel(decode, lines, "decode", "tokens/s", "decode_tps", "decode_limit_tps")
    _panel(prefill, lines, "prefill", "tokens/s", "prefill_tps", "prefill_link_tps")
    _panel(pool, lines, "KV pool", "MiB", "decode_kv_pool_mib",
           shared=(("arena_mib", "arena", "--"), ("kv_mib", "all pages of the context", ":")))
    _panel(link, lines, "link use while decoding", "GB/s", "h2d_gbps",
           shared=(("link_gbps", "probed rate of the link", "--"),))
    handles, names = decode.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(5, len(names)), fontsize=9)
    # Equal data give equal files.
    with matplotlib.rc_context({"svg.hashsalt": "kvs", "svg.fonttype": "none"}):
        for name, facts in (("sweep.png", {"Software": None}), ("sweep.svg", {"Date": None})):
            _save(figure, folder / name, facts)


def _save(figure: Any, path: Path, facts: dict[str, None]) -> None:
    beside = path.with_name(f".{path.name}.new")
    try:
        figure.savefig(beside, format=path.suffix[1:], dpi=120, metadata=facts)
        beside.replace(path)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}; give a folder that can be written") from None


def _panel(
    axes: Axes, lines: Sequence[Series], title: str, unit: str, column: str, limit: str = "",
    shared: Sequence[tuple[str, str, str]] = (),
) -> None:
    """One column over the context. limit: a column with a limit of each line; shared: limits of all lines alike, each a
    column, a name and a style."""
    contexts = contexts_of(lines)
    highest = max((spread.most for line in lines for context in contexts if (spread := line.spread(context, column))),
                  default=0.0)
    within = [0.0]   # limits that are in the picture
    for number, line in enumerate(lines):
        colour = f"C{number % 10}"
        found = [(context, spread) for context in contexts if (spread := line.spread(context, column))]
        middle = [spread.median for _, spread in found]
        below = [spread.median - spread.least for _, spread in found]
        above = [spread.most - spread.median for _, spread in found]
        axes.errorbar([context for context, _ in found], middle, yerr=[below, above] if any(below + above) else None,
                      color=colour, marker="o", markersize=4, capsize=3, label=line.name)
        limits = [(context, spread.median) for context in contexts if (spread := line.spread(context, limit))]
        axes.plot(*_xy(limits), "--", color=colour, linewidth=1, alpha=0.7)
        within += [most for _, most in limits if most <= _HEADROOM * highest]
    drawn = []
    for name, text, style in shared:
        limits = [(context, max(most)) for context in contexts if (most := _most(lines, context, name))]
        least = min((most for _, most in limits), default=0.0)
        beyond = f": {least:.3g} {unit}, above this" if least > _HEADROOM * highest else ""
        drawn += axes.plot(*_xy(limits), style, color="0.35", linewidth=1.2, label=text + beyond)
        within += [most for _, most in limits if most <= _HEADROOM * highest]
    if drawn:
        axes.legend(handles=drawn, fontsize=8)
    axes.set_title(f"{title} (dashed: limit)" if limit and any(within) else title, fontsize=10)
    axes.set_ylabel(unit)
    axes.set_xlabel("context, tokens")
    if len(contexts) > 1 and contexts[-1] >= _LOG_RATIO * contexts[0]:
        axes.set_xscale("log", base=2)
    shown = contexts[:: 1 + (len(contexts) - 1) // _MOST_TICKS]
    axes.set_xticks(shown, [tokens_text(context) for context in shown], rotation=30 if len(shown) > 6 else 0)
    axes.minorticks_off()
    axes.set_ylim(0, 1.08 * max(highest, *within) or 1)
    axes.grid(visible=True, alpha=0.3)


def _most(lines: Sequence[Series], context: int, column: str) -> list[float]:
    return [spread.most for line in lines if (spread := line.spread(context, column))]


def _xy(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
