"""How much an arena may take that is chosen, not given. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvs_core.errors import BudgetError
from kvs_core.settings.rooms import KvSettings
from kvs_core.units import MIB, mib_ceil

_FREE_SHARE = 0.4   # of free memory that an arena chosen by kvs takes at most; the history needs as much again


@dataclass(frozen=True, slots=True)
class ArenaRoom:
    """Bytes that an arena which is chosen here may take. ``source``: how they came about, where they are a limit that
    holds even if less cannot be; else the arena is as large as it must be."""

    size_bytes: int
    source: str = ""

    @staticmethod
    def of(kv: KvSettings, free_bytes: int, *, spills: bool, is_host: bool) -> ArenaRoom | None:
        """Of a device with so much free; None: as much as it needs. ``spills``, ``is_host``: the device's."""
        if kv.arena_mib != "auto":
            return ArenaRoom(int(free_bytes * _FREE_SHARE)) if kv.fit else None
        left = max(0, free_bytes - kv.fit_target_mib * MIB)
        source = f"{free_bytes // MIB} MiB that are free, without --fit-target {kv.fit_target_mib}"
        if spills:   # weights give way to what it must be
            return ArenaRoom(left // MIB * MIB)
        if is_host:   # every page has its place in the history too
            return ArenaRoom(left // 2 // MIB * MIB, f"{source}, the history beside it in the same memory")
        return ArenaRoom(left // MIB * MIB, source)

    def check(self, least_bytes: int) -> None:
        """``BudgetError`` if the least arena is beyond the limit."""
        if self.source and mib_ceil(least_bytes) > self.size_bytes // MIB:
            needed_mib, given_mib = mib_ceil(least_bytes), self.size_bytes // MIB
            raise BudgetError(
                f"--kv-stream-arena-mib auto: the arena needs {needed_mib} MiB, {given_mib} MiB are left of "
                f"{self.source}; lower --fit-target, --ctx-size or --ubatch-size, or end other programs",
                needed_mib=needed_mib, given_mib=given_mib,
            )
