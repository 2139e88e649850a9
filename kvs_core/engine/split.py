"""Which layers' weights stay on the device, and which pass through the arena in every step. Pure.

As with llama-server's ``--gpu-layers`` N, the output layer counts as one of them. It always stays: the ring would need
as many bytes as it has. So does the MTP block. With one layer left over nothing passes: it would be the whole ring.
Experts pass together: which of them a step takes is known only when it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

from kvs_core.device.base import Device
from kvs_core.engine.budget import NO_DRAFTING, BudgetDevice, Drafting, plan_budget
from kvs_core.engine.held import held_on_cuda, held_weights
from kvs_core.engine.levers import UNBOUND, Bounds, advised, way_out
from kvs_core.errors import BudgetError, KvsError, SettingsError
from kvs_core.formats.gguf import GgufFile, TensorInfo
from kvs_core.models.recurrent import state_bytes
from kvs_core.models.spec import ModelSpec
from kvs_core.models.weights import layer_matrices
from kvs_core.paging.weight_ring import ALL_STAY, WeightRing, WeightSplit, spread
from kvs_core.settings.rooms import ALL_LAYERS, ContextSettings, KvSettings
from kvs_core.units import MIB, mib_ceil

_LEAST_PASSING = 2

PartBytes = Callable[[Iterable[TensorInfo]], int]
"""``Device.part_bytes``."""


class Splits:
    """The splits of one model on one device, whose ``part_bytes`` says what parts take."""

    def __init__(self, file: GgufFile, spec: ModelSpec, part_bytes: PartBytes) -> None:
        self._parts = [tuple(map(part_bytes, parts)) for parts in layer_matrices(file, spec.layers).values()]

    def at(self, gpu_layers: int) -> WeightSplit:
        """With so many layers on the device."""
        layers = len(self._parts)
        count = min(layers, max(0, layers + 1 - gpu_layers))
        if count < _LEAST_PASSING:
            return ALL_STAY
        passing = spread(count, layers)
        return WeightSplit(passing, WeightRing(tuple(chain.from_iterable(self._parts[layer] for layer in passing))))

    def all(self) -> Iterable[WeightSplit]:
        """Each that there is, the one with the most layers on the device first."""
        return map(self.at, (ALL_LAYERS, *range(len(self._parts) - 1, 0, -1)))


@dataclass(frozen=True, slots=True)
class _Refused:
    """An arena or a pool without room for a ring. device_bytes: that all takes at the least where it has room."""

    error: BudgetError
    device_bytes: int


class _Chooser:
    """Of the splits those that fit what is free, by context and KV settings.

    arena_bytes  of the arena that these and a ring of so many bytes take; ``BudgetError`` if the one that was given is
                 too small
    other_bytes  all weights and the state
    """

    def __init__(
        self, splits: Iterable[WeightSplit], arena_bytes: Callable[[ContextSettings, KvSettings, int], int],
        other_bytes: int, free_bytes: int,
    ) -> None:
        self._splits = tuple(splits)
        self._arena_bytes = arena_bytes
        self._other_bytes = other_bytes
        self._free_bytes = free_bytes
        self._least: dict[int, WeightSplit] = {}   # by the ring's bytes, the one with the fewest weights that stay
        for split in self._splits:
            known = self._least.setdefault(split.ring.size_bytes, split)
            if known.pass_bytes < split.pass_bytes:
                self._least[split.ring.size_bytes] = split

    def most_that_fit(self, context: ContextSettings, kv: KvSettings, target_bytes: int) -> WeightSplit | None:
        """The most layers on the device that leave ``target_bytes`` of what is free, or, where none does, that fit."""
        # Whether there is room for the ring that was asked for is said of the split that is taken.
        plain = kv if kv.residency_mode == "window" else replace(kv, ring_slots=0, run_pages=0)

        @cache
        def arena_bytes(ring_bytes: int) -> int | None:
            try:
                return self._arena_bytes(context, plain, ring_bytes)
            except BudgetError:
                return None

        for spared in (target_bytes, 0):
            for split in self._splits:
                arena = arena_bytes(split.ring.size_bytes)
                if arena is not None and self._needed_bytes(split, arena) + spared <= self._free_bytes:
                    return split
        return None

    def fits(self, context: ContextSettings, kv: KvSettings) -> bool:
        """Whether a split does, with the ring that was asked for."""
        try:
            split = self.most_that_fit(context, kv, 0)
            return split is not None and self._arena_bytes(context, kv, split.ring.size_bytes) > 0
        except KvsError:
            return False

    def refused(
        self, context: ContextSettings, kv: KvSettings, raised: Callable[[int], KvSettings]
    ) -> Mapping[WeightSplit, _Refused]:
        """Those for whose ring the arena or the pool is too small.

        raised  the settings with one of so many MiB
        """
        found = {}
        for ring_bytes, split in self._least.items():
            try:
                self._arena_bytes(context, kv, ring_bytes)
            except BudgetError as error:
                arena_bytes = self._arena_bytes(context, raised(error.needed_mib), ring_bytes)
                found[split] = _Refused(error, self._needed_bytes(split, arena_bytes))
            except SettingsError:
                continue   # there is room, if not for the KV ring that was asked for
        return found

    def _needed_bytes(self, split: WeightSplit, arena_bytes: int) -> int:
        return self._other_bytes - split.pass_bytes + arena_bytes


def plan_split(
    file: GgufFile, spec: ModelSpec, context: ContextSettings, kv: KvSettings, device: Device, *,
    gpu_layers: int | None, arena_bytes: int | None = None, pool_bytes: int | None = None,
    drafting: Drafting = NO_DRAFTING, bounds: Bounds = UNBOUND,
) -> WeightSplit:
    """The split that was asked for, or, with None, on a GPU with ``--fit on`` the most layers that fit beside an arena
    that is as large as it was told or as it must be, less ``--fit-target``.

    All stay where nothing would help; then loading says what cannot be had. ``BudgetError`` where the arena or the pool
    that was given has no room for the ring of any split that fits, with what helps.
    The other arguments are those of ``plan_budget``.
    """
    splits = Splits(file, spec, device.part_bytes)
    if gpu_layers is not None:
        return splits.at(gpu_layers)
    if device.is_host or not kv.fit:
        return ALL_STAY
    held = held_weights(file, spec, held_on_cuda, nextn=drafting.nextn, twice=True)
    weights, free_bytes = held.size_bytes + drafting.table_bytes(spec), device.free_bytes()
    least = replace(kv, arena_mib=None) if kv.arena_mib == "auto" else kv

    def arena_of(context: ContextSettings, kv: KvSettings, ring_bytes: int) -> int:
        return plan_budget(
            spec, context, kv, free_bytes=0, arena_bytes=arena_bytes, pool_bytes=pool_bytes,
            device=BudgetDevice.of(device), drafting=drafting, ring_bytes=ring_bytes, bounds=None,
        ).memory.arena_bytes

    chooser = _Chooser(splits.all(), arena_of, weights + state_bytes(spec), free_bytes)
    found = chooser.most_that_fit(context, least, kv.fit_target_mib * MIB)
    if found is not None:
        return found
    plan = context.plan(spec.n_ctx_train, spec.n_ctx_most)
    is_pool = kv.pool_mib is not None or pool_bytes is not None

    def raised(mib: int) -> KvSettings:
        return replace(least, arena_mib=None, pool_mib=mib) if is_pool else replace(least, arena_mib=mib)

    refused = chooser.refused(context, least, raised)
    can_be = [split for split, need in refused.items() if need.device_bytes <= free_bytes]
    if device.spills and not can_be:
        can_be = [ALL_STAY] if ALL_STAY in refused else []
    if can_be:
        # Raised so far, the arena may have room for another split, of more layers, if not for the KV ring there.
        can_be.sort(key=lambda split: refused[split].error.needed_mib)
        enough = (split for split in can_be if chooser.fits(context, raised(refused[split].error.needed_mib)))
        split = next(enough, can_be[-1])
        raise advised(
            refused[split].error, chooser.fits, context, least, plan, bounds,
            ring_bytes=0 if is_pool else split.ring.size_bytes,
        )
    if refused and not device.spills:
        needed_mib = mib_ceil(min(need.device_bytes for need in refused.values()))
        raise BudgetError(
            "does not fit: the weights of the fewest layers that have to stay, recurrent state and the least arena "
            f"need {needed_mib} MiB, {free_bytes // MIB} MiB are free; take a smaller --model or end other programs"
            f"{way_out(chooser.fits, context, least, plan, bounds)}",
            needed_mib=needed_mib, given_mib=free_bytes // MIB,
        )
    return ALL_STAY
