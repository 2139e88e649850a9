"""Weights beyond a GPU's memory, where they may be (``Device.spills``): how many, and what is said of it or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvs_core.device.base import Device
from kvs_core.device.host.machine import available_ram_bytes
from kvs_core.engine.budget import Budget, Drafting
from kvs_core.engine.held import held_on_cuda, held_weights
from kvs_core.errors import BudgetError
from kvs_core.formats.gguf import GgufFile
from kvs_core.models.recurrent import state_bytes
from kvs_core.models.spec import ModelSpec
from kvs_core.paging.weight_ring import WeightSplit
from kvs_core.units import MIB, mib_ceil

LOGGER = logging.getLogger(__name__)


def spilled_bytes(device: Device, *, weights_bytes: int, other_bytes: int, free_bytes: int) -> int:
    """Of weights that stay, those for which ``free_bytes`` of the device have no room beside state and arena."""
    return min(weights_bytes, max(0, weights_bytes + other_bytes - free_bytes)) if device.spills else 0


def check_spill(
    file: GgufFile, spec: ModelSpec, device: Device, split: WeightSplit, drafting: Drafting,
    plan: Callable[[int], Budget],
) -> None:
    """Before weights are loaded: one warning if some will not be on the device, ``BudgetError`` if RAM has no room for
    them either.

    plan  the budget with so many bytes free
    """
    if not device.spills:
        return
    weights = held_weights(file, spec, held_on_cuda, nextn=drafting.nextn, twice=True, passing=split.passing)
    held, free = weights.size_bytes + drafting.table_bytes(spec), device.free_bytes()
    other = state_bytes(spec) + plan(max(0, free - held)).memory.arena_bytes
    spilled, ram = spilled_bytes(device, weights_bytes=held, other_bytes=other, free_bytes=free), available_ram_bytes()
    if not spilled:
        return
    beyond = (
        f"weights of {mib_ceil(held)} MiB, with state and arena of {mib_ceil(other)} MiB, exceed the {free // MIB} MiB "
        f"that are free on {device.name} by {mib_ceil(held + other - free)} MiB"
    )
    if spilled + split.pass_bytes > ram:
        raise BudgetError(
            f"{beyond}, and {ram // MIB} MiB of RAM are free; take a smaller --model, or end other programs",
            needed_mib=mib_ceil(spilled + split.pass_bytes), given_mib=ram // MIB,
        )
    LOGGER.warning(
        "%s: CUDA's unified memory keeps that in RAM and moves it as it is read, slowly; with --gpu-layers auto "
        "weights pass through the arena, ahead of their use", beyond,
    )
