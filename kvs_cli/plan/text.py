"""A plan for people: sections, and two tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from kvs_cli.ending import writing
from kvs_cli.plan.plan import SERVED, Plan
from kvs_core.device.host.weights import HELD_SHARE
from kvs_core.engine.forecast import Point
from kvs_core.paging.residency import ResidencyMode
from kvs_core.units import MIB, ceil_div

_WIDTH = 120   # of tables in files and pipes


def sections(plan: Plan, facts: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    memory, device = facts["memory"], facts["device"]
    rates = plan.found.rates
    chosen = " (chosen)" if memory["arena_is_chosen"] else ""
    workspace = memory["workspace_bytes"]
    return {
        "Plan": {
            "model": f"{plan.model.spec.name}" + (" (random weights: a synthetic model)" if facts["synthetic"] else ""),
            "device": f"{plan.device_name}, {_mib(plan.free_bytes)} free; rates "
                      f"{'kept from before' if plan.found.kept else 'measured now'}",
            "link": f"{rates.link_bytes_per_s / 1e9:.1f} GB/s",
            "weights read at": ", ".join(
                f"{speed / 1e9:,.0f} GB/s ({name})" for name, speed in device["weight_bytes_per_s"].items()
            ),
            "attention": f"{rates.attention_bytes_per_s / 1e9:,.1f} GB/s of K {facts['kv']['type_k']} and V "
                         f"{facts['kv']['type_v']}",
            "host": f"{1e3 * rates.round_s:.2f} ms per round, {1e3 * rates.draft_s:.2f} ms per row drafted, while the "
                    "device waits",
            **({"accuracy": "on the CPU a forecast is rough: within a factor of two"} if plan.is_host else {}),
        },
        "Memory": {
            "it fits": _fits(plan),
            "weights": _mib(memory["weights_bytes"]),
            **_float32_cache(memory),
            **_streamed_weights(plan, memory),
            **_spilled_weights(memory),
            "recurrent state": _mib(memory["state_bytes"]) if memory["state_bytes"] else "none",
            "arena": f"{_mib(memory['arena_bytes'])}{chosen}; least {memory['least_arena_mib']} MiB, "
                     f"{full_arena(facts['kv']['mode'])} from {memory['full_arena_mib']} MiB",
            "of it workspace": f"prefill {_mib(workspace['prefill'])}, decode {_mib(workspace['decode'])}",
            "history": f"{_mib(memory['history_bytes'])} of host memory at the full context{_served(plan, memory)}",
        },
        **_speculation(plan),
    }


def full_arena(mode: str) -> str:
    """What the arena has beyond which a larger one gives nothing: in window mode the user fixed what is resident."""
    return "the largest ring" if mode == ResidencyMode.WINDOW.value else "all pages resident"


def _float32_cache(memory: Mapping[str, Any]) -> dict[str, str]:
    """What the CPU holds is up to how much RAM is free, so memory and speed change with that."""
    cached, left = memory["float32_cache_bytes"], memory["float32_uncached_bytes"]
    if not cached and not left:
        return {}
    share = round(100 * HELD_SHARE)
    rest = f"; {_mib(left)} more are made anew at every use" if left else ""
    return {"of it float32": (
        f"{_mib(cached)} made of quantised matrices and kept, at most {share} % of what is free now, "
        f"{_mib(memory['float32_cache_limit_bytes'])}{rest}"
    )}


def _streamed_weights(plan: Plan, memory: Mapping[str, Any]) -> dict[str, str]:
    layers = memory["streamed_layers"]
    if not layers:
        return {}
    return {"weights that stream": (
        f"{_mib(memory['streamed_weights_bytes'])} of {len(layers)} of {plan.model.spec.n_layer} layers, in host "
        f"memory; all of it passes in every step, through {_mib(memory['weights_ring_bytes'])} of the arena"
    )}


def _spilled_weights(memory: Mapping[str, Any]) -> dict[str, str]:
    size = memory["spilled_weights_bytes"]
    if not size:
        return {}
    return {"weights that spill": (
        f"{_mib(size)} of them, beyond the GPU's memory, in host memory; counted as if they came at the link's rate, "
        "which is more than they do"
    )}


def _served(plan: Plan, memory: Mapping[str, Any]) -> str:
    if not plan.setup.budget.residency.drops_passed:
        return ""
    return (f", with what sliding windows see and no checkpoints; with the {SERVED.checkpoints}, of {SERVED.ram_mib} "
            f"MiB at most, that kvs serve and --session keep by default up to {mib_up(memory['served_history_bytes'])}")


def _fits(plan: Plan) -> str:
    if plan.is_host:
        return f"{_mib(plan.host_needed_bytes)} of {_mib(plan.ram_bytes)}, the history among them"
    return (f"{_mib(plan.needed_bytes)} of {_mib(plan.free_bytes)}, and the history's {_mib(plan.history_bytes)} of "
            f"{_mib(plan.ram_bytes)} of host memory")


def _speculation(plan: Plan) -> dict[str, dict[str, str]]:
    rounds, types = plan.rounds, plan.settings.speculative.types
    if not types:
        return {}
    lines = {"types": ", ".join(types)}
    if any(not name.startswith("draft-") for name in types):
        lines["n-gram drafts"] = "not foretold: what they find is up to the text"
    if rounds.kind:
        lines["a round"] = f"{rounds.drafts} rows of {rounds.kind}, then a step of {rounds.rows} rows"
        lines["it brings"] = (
            "unknown: how much is accepted is up to the text; --spec-synth-len supposes a number"
            if rounds.tokens is None else f"{rounds.tokens:.2f} tokens, as supposed"
        )
    return {"Speculation": lines}


def print_tables(plan: Plan) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH
    table = _table("Over the context", "context")
    for point in plan.points:
        table.add_row(*_cells(f"{point.tokens:,}", point))
    others = _table(f"At {plan.points[-1].tokens:,} tokens instead", "with")
    for other in plan.alternatives:
        if other.end is None:
            others.add_row(other.name, "does not fit", *[""] * 5)
        else:
            others.add_row(*_cells(other.name, other.end))
    with writing():
        for each in (table, others):
            console.print()
            console.print(each)


def _table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in (first, "resident pages", "streamed MiB", "kernels ms", "link ms", "round ms", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _cells(name: str, point: Point) -> tuple[str, ...]:
    """Where nobody knows what a round brings, tokens/s are those of none and of all drafts accepted."""
    placed, speed = point.placement, point.tokens_per_s
    span = f"{digits3(1 / point.round_s)} to {digits3(point.rows / point.round_s)}"
    return (
        name, f"{placed.resident_pages:,} of {placed.pages:,}", f"{placed.streamed_bytes / MIB:,.1f}",
        f"{1e3 * point.kernels_s:.2f}", f"{1e3 * point.link_s:.2f}", f"{1e3 * point.round_s:.2f}",
        span if speed is None else digits3(speed),
    )


def digits3(value: float) -> str:
    """A number above 0 with three significant digits, and no exponent: ``0.0123``, ``12.3``, ``12,300``."""
    rounded = f"{value:.2e}"
    return f"{float(rounded):,.{max(0, 2 - int(rounded.partition('e')[2]))}f}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.1f} MiB"


def mib_up(size_bytes: int) -> str:
    """A bound: rounded upwards."""
    return f"{ceil_div(10 * size_bytes, MIB) / 10:,.1f} MiB"
