"""``summary.md`` of a sweep: tables over the context, what failed, and what the numbers mean."""

from __future__ import annotations

from collections.abc import Sequence

from kvs_cli.bench.columns import COLUMNS, Row
from kvs_cli.bench.series import Series, Spread, contexts_of, series_of, subject, tokens_text, variant_name

_TABLES = (
    ("Decode, tokens/s", "decode_tps", 2),
    ("A round, ms (median)", "ms_per_step_p50", 2),
    ("A round over the larger of its floors", "step_over_floor", 3),
    ("Moved to the device per token, MiB", "h2d_mib_per_token", 1),
    ("Link use, % of the probed rate", "link_share_pct", 1),
    ("Prefill, tokens/s", "prefill_tps", 1),
)
_EXPLAINED = ("compute_floor_ms", "link_floor_ms", "step_over_floor", "filled_tokens", "synth_len", "prefill_tps",
              "device_peak_mib")


def summary(rows: Sequence[Row]) -> str:
    """Markdown. Medians over repeats, with the least and the most where they differ."""
    lines = series_of(rows)
    failed = [row for row in rows if row.get("error")]
    repeats = max((len(found) for line in lines for found in line.rows.values()), default=0)
    text = ["# Sweep", "", subject(rows) or "no point was measured", "",
            f"{len(rows) - len(failed)} points measured, {len(failed)} failed; {repeats} repeats."]
    for title, column, digits in _TABLES if lines else ():
        text += ["", f"## {title}", "", *_table(lines, column, digits)]
    best = [_best(lines, context) for context in contexts_of(lines)]
    if len(lines) > 1:
        text += ["", "## Fastest", "", *best]
    if failed:
        text += ["", "## Failed", ""]
        text += [f"- {tokens_text(int(str(row['context_capacity'])))}, {variant_name(row)}: {row['error']} "
                 f"({row['log']})" for row in failed]
    text += ["", "## What the numbers mean", "", *(f"- `{name}`: {COLUMNS[name]}" for name in _EXPLAINED), ""]
    return "\n".join(text)


def _table(lines: Sequence[Series], column: str, digits: int) -> list[str]:
    rows = ["| context | " + " | ".join(line.name for line in lines) + " |", "| ---: |" + " ---: |" * len(lines)]
    for context in contexts_of(lines):
        cells = [_cell(line.spread(context, column), digits) for line in lines]
        rows.append(f"| {tokens_text(context)} | " + " | ".join(cells) + " |")
    return rows


def _cell(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return ""
    text = f"{spread.median:.{digits}f}"
    if spread.least == spread.most:
        return text
    return f"{text} ({spread.least:.{digits}f} to {spread.most:.{digits}f})"


def _best(lines: Sequence[Series], context: int) -> str:
    rates = {line.name: spread.median for line in lines if (spread := line.spread(context, "decode_tps"))}
    name = max(rates, key=lambda name: rates[name])
    slowest = min(rates.values())
    return (f"- {tokens_text(context)}: {name}, {rates[name]:.2f} tokens/s, {rates[name] / slowest:.2f} times the "
            "slowest variant")
