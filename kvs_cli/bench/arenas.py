"""``--auto-max-arena``: the largest arena, to the MiB, with which a point can run. Each try is a process of its own.

    an arena that kvs chooses ─ works; tells the memory that is left, and the arena that would hold every page
    the smaller of both       ─ tried first, then less by 1, 2, 4, ... MiB until one works
    between the last two      ─ halved until they are neighbours
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvs_cli.bench.processes import RunJob


@dataclass(frozen=True, slots=True)
class FoundArena:
    """``arena_mib``, or why nothing works."""

    arena_mib: int = 0
    error: str = ""


def find_arena(run: RunJob, arguments: Sequence[str], log: Path) -> FoundArena:
    """Probe for a point with these ``arguments``, which name no arena."""

    def probe(*arena: str) -> dict[str, object]:
        return run({"kind": "probe", "arguments": [*arguments, *arena]}, log)

    first = probe()
    if "error" in first:
        return FoundArena(error=str(first["error"]))
    sizes = {name: int(str(first[name])) for name in ("arena_mib", "full_mib", "free_mib")}
    most = min(sizes["full_mib"], sizes["arena_mib"] + sizes["free_mib"])
    return FoundArena(largest(
        sizes["arena_mib"], most, lambda mib: "error" not in probe("--kv-stream-arena-mib", str(mib))
    ))


def largest(works_mib: int, most_mib: int, works: Callable[[int], bool]) -> int:
    """The largest size in [works_mib, most_mib] that works, if what works is what is small enough.

    ``works_mib`` is known to work and is not tried. At most about 2 log2(most - result) + 2 tries: an estimate of the
    most is wrong by little.
    """
    fails, at, step = most_mib + 1, most_mib, 1
    while at > works_mib:
        if works(at):
            works_mib = at
            break
        fails = at
        at -= step
        step *= 2
    while fails - works_mib > 1:
        middle = (works_mib + fails) // 2
        if works(middle):
            works_mib = middle
        else:
            fails = middle
    return works_mib
