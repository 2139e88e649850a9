"""``kvs plan``: before the weights are loaded, whether a model fits and how fast it will be over its context.

    file, device ─ what is free ─ budget ─ rates of the device (measured once) ─ forecast over the context
                                                                              ─ with another arena or other KV types
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvs_cli.ending import OutputError, writing
from kvs_cli.open_model import OpenModel, open_model, plan_context
from kvs_cli.render import Screen, print_json, print_sections
from kvs_core.device.base import Device
from kvs_core.device.choose import open_device
from kvs_core.device.host.machine import available_ram_bytes
from kvs_core.engine.budget import BudgetDevice, Drafting, arena_for, plan_budget
from kvs_core.engine.forecast import Point, Rounds, Setup, contexts, forecast
from kvs_core.engine.held import held_on_cuda, held_on_host, held_weights
from kvs_core.engine.rates import Found, find_rates
from kvs_core.errors import BudgetError, CapabilityError, SettingsError
from kvs_core.memory.phases import Phase
from kvs_core.models.recurrent import state_bytes
from kvs_core.settings import EngineSettings, KvSettings, PlanSettings
from kvs_core.speculative.drafter import verify_width
from kvs_core.units import MIB, mib_ceil

LOGGER = logging.getLogger(__name__)

_STEP_MIB = 1024   # of the arena, for "what would one more GiB give"
_KV_PAIRS = (("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0"))
_WIDTH = 120       # of tables in files and pipes
_PLOT_SUFFIXES = (".png", ".svg", ".pdf")

Section = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another arena or other KV types. ``end``: at the end of the context; None if that does not fit."""

    name: str
    kv: KvSettings
    end: Point | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is printed. ``free_bytes``: of the device before anything is loaded."""

    model: OpenModel
    settings: EngineSettings
    device_name: str
    is_host: bool
    free_bytes: int
    ram_bytes: int
    setup: Setup
    found: Found
    rounds: Rounds
    points: Sequence[Point]
    alternatives: Sequence[Alternative]

    @property
    def needed_bytes(self) -> int:
        """Of the device."""
        return _needed_bytes(self.model, self.setup)


def execute(settings: PlanSettings) -> int:
    """Print it; the exit code. Raises ``KvsError``, also for what does not fit."""
    if settings.plot is not None:
        _check_plot(settings.plot)
    screen = Screen.of(settings.logging)
    model = open_model(settings.engine.model, screen, settings.engine.rope)
    context = plan_context(model, settings.engine)
    settings.engine.device.check_gpu_layers(model.spec.n_layer)
    speculative = settings.engine.speculative
    verify_width(speculative, ubatch_tokens=context.ubatch_tokens, context_tokens=context.context_tokens)
    with closing(open_device(settings.engine.device)) as device:
        plan = _plan(model, settings.engine, device)
    facts = _facts(plan)
    if settings.plot is not None:
        _draw(plan, settings.plot)
    if settings.json:
        print_json(facts)
    else:
        print_sections(_sections(plan, facts))
        _print_tables(plan)
    return 0


def _plan(model: OpenModel, settings: EngineSettings, device: Device) -> Plan:
    free_bytes = device.free_bytes()
    setup = _setup(model, settings, settings.kv, device, free_bytes)
    device.capabilities.check(setup.budget.geometry)
    _check_fits(model, setup, device, free_bytes)
    found = find_rates(device, settings.kv)
    rounds = Rounds.of(settings.speculative)
    context = setup.budget.context
    points = [
        forecast(setup, found.rates, tokens, rounds)
        for tokens in contexts(context.context_tokens, rounds.rows, setup.budget.geometry.page_tokens)
    ]
    return Plan(
        model, settings, device.name, device.is_host, free_bytes, available_ram_bytes(), setup, found, rounds, points,
        list(_alternatives(model, settings, device, free_bytes, setup, rounds, points[-1])),
    )


def _setup(
    model: OpenModel, settings: EngineSettings, kv: KvSettings, device: Device, free_bytes: int
) -> Setup:
    """``BudgetError`` for an arena that could not run this context."""
    drafting = Drafting.of(settings.speculative.types)
    drafting.check(model.spec)
    held = held_on_host(free_bytes) if device.is_host else held_on_cuda
    weights = held_weights(model.file, model.spec, held, nextn=drafting.nextn, table=device.is_host)
    budget = plan_budget(
        model.spec, settings.context, kv, free_bytes=max(0, free_bytes - weights.size_bytes),
        device=BudgetDevice.of(device), drafting=drafting,
    )
    return Setup.of(model.spec, budget, kv, weights, drafting)


def _needed_bytes(model: OpenModel, setup: Setup) -> int:
    return setup.weights.size_bytes + state_bytes(model.spec) + setup.budget.memory.arena_bytes


def _check_fits(model: OpenModel, setup: Setup, device: Device, free_bytes: int) -> None:
    """``BudgetError`` if the device has too little memory; a warning if the host cannot hold the whole history."""
    needed, history = _needed_bytes(model, setup), _history_bytes(setup)
    if needed > free_bytes:
        raise BudgetError(
            f"does not fit: weights of {mib_ceil(setup.weights.size_bytes)} MiB, recurrent state of "
            f"{mib_ceil(state_bytes(model.spec))} MiB and an arena of {mib_ceil(setup.budget.memory.arena_bytes)} MiB "
            f"need {mib_ceil(needed)} MiB, {device.name} has {free_bytes // MIB} MiB free; use a smaller arena, "
            "context or model",
            needed_mib=mib_ceil(needed), given_mib=free_bytes // MIB,
        )
    ram = available_ram_bytes() - (needed if device.is_host else 0)
    if history > ram:
        LOGGER.warning(
            "the history of a full context takes %d MiB of host memory, and %d MiB are available: it will not fill; "
            "use a smaller --ctx-size or KV type", mib_ceil(history), max(0, ram) // MIB,
        )


def _history_bytes(setup: Setup) -> int:
    budget = setup.budget
    return budget.geometry.pages_of(budget.context.context_tokens) * setup.kv_layers * budget.geometry.page_bytes


def _alternatives(
    model: OpenModel, settings: EngineSettings, device: Device, free_bytes: int, setup: Setup, rounds: Rounds,
    end: Point,
) -> Iterator[Alternative]:
    """One more GiB, if something is streamed and the device has it; and other KV types in the same arena."""
    arena_mib = setup.budget.memory.arena_bytes // MIB
    exact = replace(setup.kv, arena_mib=arena_mib, pool_mib=None)
    changes = []
    full_mib = mib_ceil(arena_for(setup.budget.memory, setup.budget.need.all_slots))
    if end.placement.streamed_pages and _needed_bytes(model, setup) + _STEP_MIB * MIB <= free_bytes:
        more_mib = min(arena_mib + _STEP_MIB, full_mib)
        changes.append((f"arena of {more_mib} MiB", replace(exact, arena_mib=more_mib)))
    for type_k, type_v in _KV_PAIRS:
        if (type_k, type_v) != (setup.kv.type_k, setup.kv.type_v):
            changes.append((f"K {type_k}, V {type_v}", replace(exact, type_k=type_k, type_v=type_v)))
    for name, kv in changes:
        try:
            other = _setup(model, settings, kv, device, free_bytes)
            device.capabilities.check(other.budget.geometry)
            yield Alternative(name, kv, forecast(other, find_rates(device, kv).rates, end.tokens, rounds))
        except BudgetError:
            yield Alternative(name, kv, None)
        except CapabilityError:
            continue   # a KV type for which there is no code is none to choose


def _facts(plan: Plan) -> Section:
    """What ``--json`` prints. Sizes in bytes unless the name says otherwise; times in milliseconds."""
    setup, budget, rounds = plan.setup, plan.setup.budget, plan.rounds
    memory, kv, rates = budget.memory, setup.kv, plan.found.rates
    return {
        "synthetic": plan.model.file.synthetic,
        "model": {"path": str(plan.model.file.path), "name": plan.model.spec.name},
        "device": {
            "name": plan.device_name,
            "free_bytes": plan.free_bytes,
            "host_free_bytes": plan.ram_bytes,
            "rates_were_kept": plan.found.kept,
            "link_bytes_per_s": rates.link_bytes_per_s,
            "attention_bytes_per_s": rates.attention_bytes_per_s,
            "weight_bytes_per_s": {
                name: rates.weight_bytes_per_s.get(name, rates.weight_bytes_per_s[""])
                for name in {**setup.weights.trunk, **setup.weights.head, **setup.weights.nextn}
            },
        },
        "memory": {
            "fits": True,
            "needed_bytes": plan.needed_bytes,
            "weights_bytes": setup.weights.size_bytes,
            "state_bytes": state_bytes(plan.model.spec),
            "arena_bytes": memory.arena_bytes,
            "arena_is_chosen": kv.arena_mib in (None, "auto") and kv.pool_mib is None,
            "least_arena_mib": mib_ceil(arena_for(memory, budget.need.least_slots)),
            "full_arena_mib": mib_ceil(arena_for(memory, budget.need.all_slots)),
            "workspace_bytes": {phase.value: budget.buffers[phase].size_bytes for phase in Phase},
            "pool_pages": memory.slots(Phase.DECODE),
            "history_bytes": _history_bytes(setup),
        },
        "kv": {
            "type_k": kv.type_k, "type_v": kv.type_v, "layers": setup.kv_layers, "mode": budget.mode.value,
            "page_tokens": budget.geometry.page_tokens, "page_bytes": budget.geometry.page_bytes,
        },
        "context_tokens": budget.context.context_tokens,
        "speculation": {
            "type": rounds.kind or None, "drafts": rounds.drafts, "tokens_per_round": rounds.tokens,
            "synthetic": plan.settings.speculative.is_synthetic,
        },
        "points": [_point(point) for point in plan.points],
        "alternatives": [
            {
                "name": other.name, "type_k": other.kv.type_k, "type_v": other.kv.type_v,
                "arena_mib": other.kv.arena_mib, "fits": other.end is not None,
                "end": None if other.end is None else _point(other.end),
            }
            for other in plan.alternatives
        ],
    }


def _point(point: Point) -> Section:
    placed = point.placement
    return {
        "tokens": point.tokens,
        "resident_pages": placed.resident_pages,
        "streamed_pages": placed.streamed_pages,
        "ring_slots": placed.ring_slots,
        "streamed_bytes": placed.streamed_bytes,
        "kernels_ms": 1e3 * point.kernels_s,
        "link_ms": 1e3 * point.link_s,
        "step_ms": 1e3 * point.step_s,
        "drafts_ms": 1e3 * point.drafts_s,
        "round_ms": 1e3 * point.round_s,
        "rounds_per_s": 1.0 / point.round_s,
        "tokens_per_s": point.tokens_per_s,
    }


def _sections(plan: Plan, facts: Mapping[str, Any]) -> dict[str, dict[str, str]]:
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
            **({"accuracy": "on the CPU a forecast is rough: within a factor of two"} if plan.is_host else {}),
        },
        "Memory": {
            "it fits": f"{_mib(memory['needed_bytes'])} of {_mib(plan.free_bytes)}",
            "weights": _mib(memory["weights_bytes"]),
            "recurrent state": _mib(memory["state_bytes"]) if memory["state_bytes"] else "none",
            "arena": f"{_mib(memory['arena_bytes'])}{chosen}; least {memory['least_arena_mib']} MiB, all pages "
                     f"resident from {memory['full_arena_mib']} MiB",
            "of it workspace": f"prefill {_mib(workspace['prefill'])}, decode {_mib(workspace['decode'])}",
            "history": f"{_mib(memory['history_bytes'])} of host memory at the full context",
        },
        **_speculation(plan),
    }


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


def _print_tables(plan: Plan) -> None:
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
    span = f"{1 / point.round_s:.1f} to {point.rows / point.round_s:.1f}"
    return (
        name, f"{placed.resident_pages:,} of {placed.pages:,}", f"{placed.streamed_bytes / MIB:,.1f}",
        f"{1e3 * point.kernels_s:.2f}", f"{1e3 * point.link_s:.2f}", f"{1e3 * point.round_s:.2f}",
        span if speed is None else f"{speed:.1f}",
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.1f} MiB"


def _check_plot(path: Path) -> None:
    """Before anything is done: ``SettingsError`` for a file that cannot be, ``CapabilityError`` if nothing can draw."""
    if path.suffix.lower() not in _PLOT_SUFFIXES:
        raise SettingsError(f"--plot {path}: give a name that ends in {', '.join(_PLOT_SUFFIXES)}")
    if not path.parent.is_dir():
        raise SettingsError(f"--plot {path}: there is no folder {path.parent}; make it first")
    if find_spec("matplotlib") is None:
        raise CapabilityError("--plot needs matplotlib, which is not installed; pip install 'kvs-llm[bench]'")


def _draw(plan: Plan, path: Path) -> None:
    """Times of a round over the context, and the tokens/s that they make."""
    figure = import_module("matplotlib.figure").Figure(figsize=(8, 7), layout="constrained")
    times, speeds = figure.subplots(2, 1, sharex=True)
    tokens = [point.tokens for point in plan.points]
    lines = {
        "round": [1e3 * point.round_s for point in plan.points],
        "kernels of its step": [1e3 * point.kernels_s for point in plan.points],
        "link of its step": [1e3 * point.link_s for point in plan.points],
    }
    for name, values in lines.items():
        times.plot(tokens, values, marker="o", label=name)
    times.set_ylabel("ms")
    yields = {"": None} if plan.rounds.tokens is not None else {"no draft accepted": 1, "all drafts accepted": None}
    for name, brought in yields.items():
        rate = [(brought or plan.rounds.tokens or point.rows) / point.round_s for point in plan.points]
        speeds.plot(tokens, rate, marker="o", label=name or None)
    speeds.set_ylabel("tokens/s")
    speeds.set_ylim(bottom=0)
    speeds.set_xlabel("tokens in the context")
    arena = mib_ceil(plan.setup.budget.memory.arena_bytes)
    times.set_title(
        f"{plan.model.spec.name} on {plan.device_name}: K {plan.setup.kv.type_k}, V {plan.setup.kv.type_v}, "
        f"arena {arena} MiB (foretold)", fontsize="medium",
    )
    for axes in (times, speeds):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise OutputError(f"--plot {path}: {error.strerror}") from error
