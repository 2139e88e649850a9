"""A model comes to a device. What cannot be is refused before its weights are read.

    file -> spec -> split (which weights stay) -> budget, checked -> kernels and weights -> budget of what they left
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kvs_core.device.base import Device
from kvs_core.engine.budget import Budget, BudgetDevice, Drafting, plan_budget
from kvs_core.engine.levers import Bounds
from kvs_core.engine.spill import check_spill
from kvs_core.engine.split import plan_split
from kvs_core.errors import CapabilityError
from kvs_core.formats.gguf import GgufFile
from kvs_core.models.model import Model
from kvs_core.models.registry import load_model, read_spec
from kvs_core.models.spec import ModelSpec
from kvs_core.paging.weight_ring import WeightSplit
from kvs_core.settings.rooms import ContextSettings, KvSettings, RopeSettings
from kvs_core.units import Progress


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A model on its device, whose kernels are ready, and what its context may take beside it.

    split  which layers' weights are there, and which will pass through the arena
    """

    model: Model
    split: WeightSplit
    budget: Budget


def load_within_budget(
    file: GgufFile, device: Device, *, context: ContextSettings, kv: KvSettings, rope: RopeSettings,
    drafting: Drafting, arena_bytes: int | None, pool_bytes: int | None, gpu_layers: int | None,
    progress: Progress | None, kernel_progress: Progress | None, bounds: Bounds,
) -> Loaded:
    """Load the model; the arguments are those of ``Engine``. Raises ``KvsError`` of the kind that fits.

    Memory for the context is planned here, and nothing of it is allocated.
    """
    spec = read_spec(file, rope)
    drafting.check(spec)
    if context.shift:
        _check_can_forget(spec)
    split = plan_split(
        file, spec, context, kv, device, gpu_layers=gpu_layers, arena_bytes=arena_bytes, pool_bytes=pool_bytes,
        drafting=drafting, bounds=bounds,
    )
    plan = partial(
        plan_budget, spec, context, kv, arena_bytes=arena_bytes, pool_bytes=pool_bytes,
        device=BudgetDevice.of(device), drafting=drafting, ring_bytes=split.ring.size_bytes, bounds=bounds,
    )
    first = plan(free_bytes=device.free_bytes())
    for geometry in first.pages.each:   # before the weights
        device.capabilities.check(geometry)
    check_spill(file, spec, device, split, drafting, lambda free_bytes: plan(free_bytes=free_bytes))
    load = partial(
        load_model, file, context_tokens=first.context.context_tokens, rope=rope, nextn=drafting.nextn,
        passing=split.passing,
    )
    layers = drafting.kv_layers(spec)
    geometries = [first.pages.geometry(layers[layer]) for layer in drafting.kv_reads(spec)]
    outline = device.outline()
    if outline is not None:
        seen = load(outline)
        outline.begin_ops(geometries, seen.attention, seen.recurrent, spec.activation)
    model = load(device, progress=progress)
    device.prepare_ops(geometries, model.attention, model.recurrent, spec.activation, kernel_progress)
    # An arena chosen here comes from what the weights left.
    return Loaded(model, split, plan(free_bytes=device.free_bytes()))


def _check_can_forget(spec: ModelSpec) -> None:
    if spec.recurrent_layers:
        raise CapabilityError(
            f"--context-shift: {spec.name} has {len(spec.recurrent_layers)} recurrent layers, whose state cannot "
            "forget single tokens; leave it out and use a larger --ctx-size"
        )
