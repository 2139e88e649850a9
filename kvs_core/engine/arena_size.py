"""How large the arena is: as asked for, or as a context needs and free memory allows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvs_core.engine.pages import Pages
from kvs_core.errors import BudgetError
from kvs_core.memory.arena import RegionRequest
from kvs_core.memory.phases import WEIGHTS_RING, MemoryPlan, Phase, PhaseRequest, required_bytes
from kvs_core.settings.rooms import KvSettings
from kvs_core.streaming.handover import SLIDING_POOL, PhaseBuffers
from kvs_core.units import MIB, mib_ceil

_FREE_SHARE = 0.4   # of free memory that an arena chosen by kvs takes at most; the history needs as much again


@dataclass(frozen=True, slots=True)
class PoolNeed:
    """Slots of the KV pool: the fewest that run any context of this size, and those that hold all of it.

    sliding_slots  of the pool of layers that slide, where they have one; always as many
    """

    least_slots: int
    all_slots: int
    sliding_slots: int = 0


@dataclass(frozen=True, slots=True)
class ArenaRoom:
    """Bytes that an arena which is chosen here may take. ``source``: how they came about, where they are a limit that
    holds even if less cannot be; else the arena is as large as it must be."""

    size_bytes: int
    source: str = ""

    def check(self, least_bytes: int) -> None:
        """``BudgetError`` if the least arena is beyond the limit."""
        if self.source and mib_ceil(least_bytes) > self.size_bytes // MIB:
            needed_mib, given_mib = mib_ceil(least_bytes), self.size_bytes // MIB
            raise BudgetError(
                f"--kv-stream-arena-mib auto: the arena needs {needed_mib} MiB, {given_mib} MiB are left of "
                f"{self.source}; lower --fit-target, --ctx-size or --ubatch-size, or end other programs",
                needed_mib=needed_mib, given_mib=given_mib,
            )


def arena_room(kv: KvSettings, free_bytes: int, *, is_host: bool, spills: bool) -> ArenaRoom | None:
    """What an arena may take of ``free_bytes`` if it is chosen; None: as much as it needs.

    is_host, spills  see ``Device``
    """
    if kv.arena_mib != "auto":
        return ArenaRoom(int(free_bytes * _FREE_SHARE)) if kv.fit else None
    left = max(0, free_bytes - kv.fit_target_mib * MIB)
    source = f"{free_bytes // MIB} MiB that are free, without --fit-target {kv.fit_target_mib}"
    if spills:   # weights give way to what it must be
        return ArenaRoom(left // MIB * MIB)
    if is_host:   # every page has its place in the history too
        return ArenaRoom(left // 2 // MIB * MIB, f"{source}, the history beside it in the same memory")
    return ArenaRoom(left // MIB * MIB, source)


def plan_memory(
    pages: Pages, need: PoolNeed, buffers: Mapping[Phase, PhaseBuffers], *,
    arena_bytes: int | None, pool_bytes: int | None, room: ArenaRoom | None, ring_bytes: int = 0,
) -> MemoryPlan:
    """The arena or the pool as asked for; else an arena for the whole context, cut to a fair part of free memory.

    room        that an arena which is chosen here may take; None: as much as it needs
    ring_bytes  of the arena, through which weights pass

    ``BudgetError`` if that is too small.
    """
    prefill, decode = (
        PhaseRequest.of_bytes(phase, buffers[phase].size_bytes) for phase in (Phase.PREFILL, Phase.DECODE)
    )
    geometry = pages.shared
    persistent: tuple[RegionRequest, ...] = ()
    if ring_bytes:
        persistent = (RegionRequest(WEIGHTS_RING, ring_bytes, persistent=True),)
    if pages.sliding is not None:
        size = need.sliding_slots * pages.sliding.page_bytes
        persistent += (RegionRequest(SLIDING_POOL, size, persistent=True),)
    if pool_bytes is not None:
        return MemoryPlan.pool_only(
            pool_bytes=pool_bytes, slot_bytes=geometry.page_bytes, min_slots=need.least_slots,
            prefill=prefill, decode=decode, persistent=persistent,
        )
    if arena_bytes is None:
        least, every = (
            max(
                required_bytes(request, slot_bytes=geometry.page_bytes, slots=slots, persistent=persistent)
                for request in (prefill, decode)
            )
            for slots in (need.least_slots, need.all_slots)
        )
        if room is not None:
            room.check(least)
        fair = every if room is None else min(every, room.size_bytes)
        arena_bytes = mib_ceil(max(least, fair)) * MIB
    return MemoryPlan(arena_bytes, geometry.page_bytes, need.least_slots, prefill, decode, persistent)


def arena_for(memory: MemoryPlan, slots: int) -> int:
    """The least arena, in bytes, whose pool has that many slots in both phases."""
    return max(
        required_bytes(
            memory.request(phase), slot_bytes=memory.slot_bytes, slots=slots, persistent=memory.persistent
        )
        for phase in Phase
    )
