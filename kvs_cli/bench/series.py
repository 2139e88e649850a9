"""A sweep's rows as lines over the context: one per variant, repeats together. What plots and summary share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kvs_cli.bench.columns import Row
from kvs_cli.bench.grid import Variant

_TOLD_APART = ("model", "device", "cache_type_k", "cache_type_v", "arena", "p_min", "ubatch_size", "decode_tokens")


@dataclass(frozen=True, slots=True)
class Spread:
    """A value over repeats."""

    least: float
    median: float
    most: float


@dataclass(frozen=True, slots=True)
class Series:
    """One line. ``rows``: those of each context, ascending."""

    name: str
    rows: dict[int, list[Row]]

    def spread(self, context: int, column: str) -> Spread | None:
        """Of a column at a context; None where no row has it."""
        values = [number for row in self.rows.get(context, ()) if (number := value(row, column)) is not None]
        return Spread(min(values), median(values), max(values)) if values else None


def value(row: Row, column: str) -> float | None:
    """A number of a row, or the limits that follow from several: ``decode_limit_tps``, tokens of a round by the larger
    of its floors."""
    if column != "decode_limit_tps":
        cell = row.get(column)
        return float(cell) if isinstance(cell, int | float) and not isinstance(cell, bool) else None
    accepted, rounds, *floors = (
        value(row, name) for name in ("draft_accepted", "rounds", "compute_floor_ms", "link_floor_ms")
    )
    most = max((floor for floor in floors if floor is not None), default=0.0)
    return 1e3 * (1.0 + accepted / rounds) / most if accepted is not None and rounds and most else None


def series_of(rows: Sequence[Row]) -> list[Series]:
    """Lines of the rows without error, in the order in which their variants come up."""
    good = [dict(row, arena=_arena(row)) for row in rows if not row.get("error")]
    differing = [name for name in _TOLD_APART if len({row.get(name) for row in good}) > 1]
    found: dict[str, dict[int, list[Row]]] = {}
    for row in good:
        name = ", ".join([variant_name(row), *(f"{told.replace('_', ' ')} {row[told]}" for told in differing)])
        found.setdefault(name, {}).setdefault(int(str(row["context_capacity"])), []).append(row)
    return [Series(name, dict(sorted(by_context.items()))) for name, by_context in found.items()]


def variant_name(row: Row) -> str:
    """``plain``, ``mtp 3``: how the row's text was drafted."""
    types = tuple(part for part in str(row["spec_type"]).split(",") if part != "none")
    return Variant(types, int(str(row["draft_n_max"] or 0))).name


def contexts_of(lines: Sequence[Series]) -> list[int]:
    """All contexts, ascending."""
    return sorted({context for line in lines for context in line.rows})


def tokens_text(tokens: int) -> str:
    """``64 Ki``, or the number."""
    return f"{tokens >> 10} Ki" if tokens % 1024 == 0 else f"{tokens:,}"


def _arena(row: Row) -> str:
    arena = value(row, "arena_mib")
    return "auto" if row.get("arena_auto") or arena is None else f"{arena:g} MiB"


def subject(rows: Sequence[Row]) -> str:
    """What was measured, on one line, with what was pretended."""
    good = [dict(row, arena=_arena(row)) for row in rows if not row.get("error")]
    parts = []
    for name in ("model", "device", "arena"):
        told = {str(row[name]) for row in good}
        if len(told) == 1:
            parts.append(f"arena {told.pop()}" if name == "arena" else told.pop())
    kinds = {(row["cache_type_k"], row["cache_type_v"]) for row in good}
    if len(kinds) == 1:
        parts.append("K {}, V {}".format(*kinds.pop()))
    if any(row["synthetic"] for row in good):
        parts.append("random weights")
    if any(row["synth_len"] for row in good):
        parts.append("pretended acceptance")
    return ", ".join(parts)
