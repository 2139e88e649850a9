"""Which layers' weights stay on the device, and which pass through the arena in every step. Pure.

As with llama-server's ``--gpu-layers`` N, the output layer counts as one of them. It always stays: the ring would need
as many bytes as it has. So does the MTP block. With one layer left over nothing passes: it would be the whole ring.
Experts pass together: which of them a step takes is known only when it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain

from kvs_core.device.base import Device
from kvs_core.engine.budget import NO_DRAFTING, BudgetDevice, Drafting, plan_budget
from kvs_core.engine.held import held_on_cuda, held_weights
from kvs_core.errors import BudgetError
from kvs_core.formats.gguf import GgufFile, TensorInfo
from kvs_core.models.recurrent import state_bytes
from kvs_core.models.spec import ModelSpec
from kvs_core.models.weights import layer_matrices
from kvs_core.paging.weight_ring import ALL_STAY, WeightRing, WeightSplit, spread
from kvs_core.settings.rooms import ALL_LAYERS, ContextSettings, KvSettings
from kvs_core.units import MIB

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

    def most_that_fit(
        self, needed_bytes: Callable[[WeightSplit, bool], int], free_bytes: int, target_bytes: int
    ) -> WeightSplit:
        """The most layers on the device that leave ``target_bytes`` of what is free, or, where none does, that fit.

        needed_bytes  of the device: weights that stay, state, arena; ``BudgetError`` for an arena that cannot be, with
                      True one that says what helps
        Nothing passes where nothing would help; then loading says what cannot be had. ``BudgetError`` where a larger
        arena might help: it has no room for the ring.
        """
        refused: WeightSplit | None = None
        for spared in (target_bytes, 0):
            for count in (ALL_LAYERS, *range(len(self._parts) - 1, 0, -1)):
                split = self.at(count)
                try:
                    needed = needed_bytes(split, False)
                except BudgetError:
                    refused = refused or split
                    continue
                if needed + spared <= free_bytes:
                    return split
        if refused is not None:
            needed_bytes(refused, True)
        return ALL_STAY


def plan_split(
    file: GgufFile, spec: ModelSpec, context: ContextSettings, kv: KvSettings, device: Device, *,
    gpu_layers: int | None, arena_bytes: int | None = None, pool_bytes: int | None = None,
    drafting: Drafting = NO_DRAFTING,
) -> WeightSplit:
    """The split that was asked for, or, with None, on a GPU with ``--fit on`` the most layers that fit beside an arena
    that is as large as it was told or as it must be, less ``--fit-target``.

    The other arguments are those of ``plan_budget``.
    """
    splits = Splits(file, spec, device.part_bytes)
    if gpu_layers is not None:
        return splits.at(gpu_layers)
    if device.is_host or not kv.fit:
        return ALL_STAY
    held = held_weights(file, spec, held_on_cuda, nextn=drafting.nextn, twice=True)
    weights = held.size_bytes + drafting.table_bytes(spec)
    least = replace(kv, arena_mib=None) if kv.arena_mib == "auto" else kv

    def needed_bytes(split: WeightSplit, advise: bool) -> int:
        budget = plan_budget(
            spec, context, least, free_bytes=0, arena_bytes=arena_bytes, pool_bytes=pool_bytes,
            device=BudgetDevice.of(device), drafting=drafting, ring_bytes=split.ring.size_bytes,
            advise=advise,
        )
        return weights - split.pass_bytes + state_bytes(spec) + budget.memory.arena_bytes

    return splits.most_that_fit(needed_bytes, device.free_bytes(), kv.fit_target_mib * MIB)
