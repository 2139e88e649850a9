"""The plan: what a model takes of a device, whether that is there, and how fast it will be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvs_cli.open_model import OpenModel, gpu_layers
from kvs_core.device.base import Device
from kvs_core.device.host.machine import available_ram_bytes
from kvs_core.engine.arena_size import arena_for
from kvs_core.engine.budget import BudgetDevice, Drafting, plan_budget
from kvs_core.engine.forecast import Point, Rounds, Setup, contexts, forecast
from kvs_core.engine.held import cache_limit_bytes, held_on_cuda, held_on_host, held_weights
from kvs_core.engine.levers import Bounds, less_kv
from kvs_core.engine.rates import Found, find_rates, forget_rates
from kvs_core.engine.spill import spilled_bytes
from kvs_core.engine.split import plan_split
from kvs_core.errors import BudgetError, CapabilityError, KvsError
from kvs_core.settings import ContextSettings, EngineSettings, KvSettings
from kvs_core.settings.serving import CacheSettings
from kvs_core.units import MIB, mib_ceil

_STEP_MIB = 1024   # of the arena, for "what would one more GiB give"
_KV_PAIRS = (("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0"))

SERVED = CacheSettings()
"""Of ``kvs serve``, by default: ``kvs plan`` takes no flags for it."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another arena or other KV types. ``end``: at the end of the context; None if that does not fit."""

    name: str
    kv: KvSettings
    end: Point | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is printed.

    free_bytes  of the device before anything is loaded
    ram_bytes   of host memory; on the host the same
    """

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
        """Of the device: weights, but for what spills, recurrent state, arena."""
        return _needed_bytes(self.setup)

    @property
    def cache_limit_bytes(self) -> int | None:
        """What float32 values of quantised matrices may take of the weights' memory on the host, which follows from
        what is free; None: elsewhere they are held as they are."""
        return cache_limit_bytes(self.free_bytes) if self.is_host else None

    @property
    def history_bytes(self) -> int:
        """Of host memory, when the context is full; of layers that slide what windows see, and no checkpoints."""
        return _history_bytes(self.setup)

    @property
    def served_history_bytes(self) -> int:
        """The same with all the checkpoints that ``kvs serve`` and ``--session`` keep by default."""
        cache = SERVED
        return self.setup.budget.served_history_bytes(self.setup.page_bytes, cache.checkpoints, cache.ram_mib * MIB)

    @property
    def host_needed_bytes(self) -> int:
        """Of host memory: the history, weights that pass or spill, and on the host all that the device holds."""
        return self.history_bytes + _host_weights_bytes(self.setup) + (self.needed_bytes if self.is_host else 0)


def make_plan(model: OpenModel, settings: EngineSettings, device: Device, *, measure: bool = False) -> Plan:
    """Measures what is not known of the device yet, with ``measure`` all. ``KvsError``, also for what does not fit."""
    free_bytes = device.free_bytes()
    ram_bytes = free_bytes if device.is_host else available_ram_bytes()
    setup = _setup(model, settings, settings.kv, device, free_bytes)
    _check_kernels(setup, model, device)
    lack = _lack(setup, device, free_bytes, ram_bytes)
    if lack is not None:
        raise _refusal(lack, model, settings, device, setup, free_bytes, ram_bytes)
    if measure:
        forget_rates(device)
    found = find_rates(device, settings.kv)
    rounds = Rounds.of(settings.speculative)
    context = setup.budget.context
    points = [
        forecast(setup, found.rates, tokens, rounds)
        for tokens in contexts(context.context_tokens, rounds.rows, setup.budget.geometry.page_tokens)
    ]
    return Plan(
        model, settings, device.name, device.is_host, free_bytes, ram_bytes, setup, found, rounds, points,
        list(_alternatives(model, settings, device, free_bytes, ram_bytes, setup, rounds, points[-1])),
    )


def _setup(
    model: OpenModel, settings: EngineSettings, kv: KvSettings, device: Device, free_bytes: int
) -> Setup:
    """``BudgetError`` for an arena that could not run this context."""
    drafting = Drafting.of(settings.speculative.types)
    drafting.check(model.spec)
    bounds = Bounds(ubatch_tokens=settings.speculative.verify_rows)
    split = plan_split(
        model.file, model.spec, settings.context, kv, device, drafting=drafting,
        gpu_layers=gpu_layers(settings.device, device, model.spec), bounds=bounds,
    )
    held = held_on_host(free_bytes, split.passing) if device.is_host else held_on_cuda
    weights = held_weights(
        model.file, model.spec, held, nextn=drafting.nextn, table=device.is_host, passing=split.passing,
        twice=not device.is_host,
    )
    loaded = weights.size_bytes + drafting.table_bytes(model.spec)
    budget = plan_budget(
        model.spec, settings.context, kv, free_bytes=max(0, free_bytes - loaded),
        device=BudgetDevice.of(device), drafting=drafting, ring_bytes=split.ring.size_bytes, bounds=bounds,
    )
    setup = Setup.of(model.spec, budget, kv, weights, drafting, split)
    other = setup.state_bytes + budget.memory.arena_bytes
    return replace(setup, spilled_bytes=spilled_bytes(
        device, weights_bytes=weights.size_bytes, other_bytes=other, free_bytes=free_bytes
    ))


def _check_kernels(setup: Setup, model: OpenModel, device: Device) -> None:
    """``CapabilityError`` for what the device has no code for."""
    for geometry in setup.budget.pages.each:
        device.capabilities.check(geometry)


def _needed_bytes(setup: Setup) -> int:
    return setup.weights.size_bytes - setup.spilled_bytes + setup.state_bytes + setup.budget.memory.arena_bytes


def _host_weights_bytes(setup: Setup) -> int:
    return setup.split.pass_bytes + setup.spilled_bytes


@dataclass(frozen=True, slots=True)
class _Lack:
    """What does not fit, and by how much.

    said         of each memory, with the parts
    arena_bytes  by which a smaller arena would make it fit; None: no arena would
    """

    said: str
    needed_bytes: int
    given_bytes: int
    arena_bytes: int | None


def _lack(setup: Setup, device: Device, free_bytes: int, ram_bytes: int) -> _Lack | None:
    """Of what the device holds, or of the history of a full context beside it (on the host) or in host memory."""
    needed, history = _needed_bytes(setup), _history_bytes(setup) + _host_weights_bytes(setup)
    moved = [name for name, size in (("pass", setup.split.pass_bytes), ("spill", setup.spilled_bytes)) if size]
    bare = " without checkpoints" if setup.budget.residency.drops_passed else ""
    takes = f"and the weights that {' or '.join(moved)} take" if moved else "takes"
    what = f"the history of a full context{bare} {takes}"
    cached = setup.weights.cached_bytes
    cache = f" ({mib_ceil(cached)} of them a cache of float32)" if cached else ""
    parts = (f"weights of {mib_ceil(setup.weights.size_bytes - setup.spilled_bytes)} MiB{cache}, recurrent state of "
             f"{mib_ceil(setup.state_bytes)} MiB and an arena of {mib_ceil(setup.budget.memory.arena_bytes)} MiB")
    lacks = []
    if needed > free_bytes:
        lacks.append(f"{parts} need {mib_ceil(needed)} MiB, {device.name} has {free_bytes // MIB} MiB free: "
                     f"{mib_ceil(needed - free_bytes)} MiB too many")
    left = ram_bytes - needed if device.is_host else ram_bytes
    if history > left and not (lacks and device.is_host):
        where = f"in {device.name} beside {parts}" if device.is_host else "in host memory"
        lacks.append(f"{what} {mib_ceil(history)} MiB, {left // MIB} MiB are left "
                     f"{where}: {mib_ceil(history - left)} MiB too many")
    if not lacks:
        return None
    sizes = (needed, free_bytes) if needed > free_bytes else (history, left)
    arena: int | None = needed + history - ram_bytes
    if not device.is_host:
        arena = needed - free_bytes if history <= left else None
    return _Lack("; and ".join(lacks), *sizes, arena)


def _refusal(
    lack: _Lack, model: OpenModel, settings: EngineSettings, device: Device, setup: Setup, free_bytes: int,
    ram_bytes: int,
) -> BudgetError:
    """What lacks, and what would be enough: settings are tried until it is."""

    def fits(context: ContextSettings, kv: KvSettings) -> bool:
        try:
            other = _setup(model, replace(settings, context=context), kv, device, free_bytes)
            _check_kernels(other, model, device)
        except KvsError:
            return False
        return _lack(other, device, free_bytes, ram_bytes) is None

    kv = settings.kv
    ways = less_kv(fits, settings.context, kv, setup.budget.context)
    if lack.arena_bytes is not None:
        kind, given_bytes = "arena", setup.budget.memory.arena_bytes
        if kv.pool_mib is not None:
            kind, given_bytes = "pool", kv.pool_mib * MIB
        mib = (given_bytes - lack.arena_bytes) // MIB
        if mib > 0:
            smaller = replace(kv, arena_mib=mib) if kind == "arena" else replace(kv, pool_mib=mib)
            if fits(settings.context, smaller):
                ways.append(f"use --kv-stream-{kind}-mib {mib}")
    if not ways and (isinstance(kv.arena_mib, int) or kv.pool_mib is not None):
        chosen = replace(kv, arena_mib=None, pool_mib=None)
        flag = "--kv-stream-arena-mib" if kv.pool_mib is None else "--kv-stream-pool-mib"
        more = [""] if fits(settings.context, chosen) else less_kv(fits, settings.context, chosen, setup.budget.context)
        ways = [f"leave out {flag}{' and ' if way else ''}{way}" for way in more[:1]]
    return BudgetError(
        f"does not fit: {lack.said}; {', or '.join(ways) or 'use a smaller model'}",
        needed_mib=mib_ceil(lack.needed_bytes), given_mib=lack.given_bytes // MIB,
    )


def _history_bytes(setup: Setup) -> int:
    return setup.budget.history_bytes(setup.page_bytes)


def _alternatives(
    model: OpenModel, settings: EngineSettings, device: Device, free_bytes: int, ram_bytes: int, setup: Setup,
    rounds: Rounds, end: Point,
) -> Iterator[Alternative]:
    """One more GiB, if the pool can use it and the device has it; and other KV types in the same arena."""
    arena_mib = setup.budget.memory.arena_bytes // MIB
    exact = replace(setup.kv, arena_mib=arena_mib, pool_mib=None)
    changes = []
    full_mib = mib_ceil(arena_for(setup.budget.memory, setup.budget.need.all_slots))
    if end.placement.streamed_pages and arena_mib < full_mib and _needed_bytes(setup) + _STEP_MIB * MIB <= free_bytes:
        more_mib = min(arena_mib + _STEP_MIB, full_mib)
        changes.append((f"arena of {more_mib} MiB", replace(exact, arena_mib=more_mib)))
    for type_k, type_v in _KV_PAIRS:
        if (type_k, type_v) != (setup.kv.type_k, setup.kv.type_v):
            changes.append((f"K {type_k}, V {type_v}", replace(exact, type_k=type_k, type_v=type_v)))
    for name, kv in changes:
        try:
            other = _setup(model, settings, kv, device, free_bytes)
            _check_kernels(other, model, device)
            fits = _lack(other, device, free_bytes, ram_bytes) is None
            found = forecast(other, find_rates(device, kv).rates, end.tokens, rounds) if fits else None
            yield Alternative(name, kv, found)
        except CapabilityError:
            continue   # a KV type for which there is no code is none to choose
        except KvsError:   # no room, for it or for a ring that was asked for
            yield Alternative(name, kv, None)
