"""How much arena an engine needs, asks for and gets: from sizes to a ``MemoryPlan``. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvs_core.device.workspace import BufferSpec
from kvs_core.errors import CapabilityError
from kvs_core.memory.phases import MemoryPlan, Phase, PhaseRequest, required_bytes
from kvs_core.models.model import Model
from kvs_core.models.spec import LayerSpec
from kvs_core.paging.geometry import (
    GROUP_PAGES,
    SEGMENT_GROUPS,
    KvType,
    PageGeometry,
    hadamard_block,
)
from kvs_core.paging.residency import ResidencyMode, least_pool_slots
from kvs_core.paging.spans import SCRATCH_GROUPS
from kvs_core.settings.rooms import ContextPlan, KvSettings
from kvs_core.streaming.handover import PhaseBuffers, attention_scratch
from kvs_core.units import MIB, ceil_div, mib_ceil

DECODE_ROWS = 8
"""Rows of the decode workspace: one, or a verify of up to seven drafts."""

_FREE_SHARE = 0.4   # of free memory that an arena chosen by kvs takes at most; the history needs as much again


def page_geometry(layers: tuple[LayerSpec, ...], kv: KvSettings) -> PageGeometry:
    """The pages of a model's attention layers. ``CapabilityError`` if they differ or the types do not fit."""
    shapes = {(layer.kv_heads, layer.k_dim, layer.v_dim) for layer in layers}
    if len(shapes) != 1:
        raise CapabilityError(f"attention layers of {len(shapes)} different KV shapes do not share one pool of pages")
    heads, k_dim, v_dim = shapes.pop()
    k_type, v_type = KvType.parse(kv.type_k), KvType.parse(kv.type_v)
    return PageGeometry(
        page_tokens=kv.page_tokens,
        kv_heads=heads,
        k_dim=k_dim,
        v_dim=v_dim,
        k_type=k_type,
        v_type=v_type,
        k_rotation=hadamard_block(k_type, k_dim, is_key=True) if kv.rotation else 0,
        v_rotation=hadamard_block(v_type, v_dim, is_key=False) if kv.rotation else 0,
    )


def phase_buffers(model: Model, geometry: PageGeometry, context: ContextPlan) -> dict[Phase, PhaseBuffers]:
    """The workspace of each phase: activations, logits, attention scratch."""
    layers = model.spec.kv_layers
    heads = max(layer.heads for layer in layers)
    groups = ceil_div(geometry.pages_of(context.context_tokens), GROUP_PAGES)
    buffers = {}
    for phase, rows, logit_rows in (
        (Phase.PREFILL, context.ubatch_tokens, 1), (Phase.DECODE, DECODE_ROWS, DECODE_ROWS)
    ):
        scratch = attention_scratch(
            phase, rows=rows, heads=heads, v_dim=geometry.v_dim,
            groups=min(SCRATCH_GROUPS, groups), segments=ceil_div(groups, SEGMENT_GROUPS),
        )
        specs: list[BufferSpec] = [*model.workspace(rows), *model.logit_workspace(logit_rows)]
        specs += [spec for _, spec in scratch]
        buffers[phase] = PhaseBuffers(tuple(specs), tuple(name for name, _ in scratch))
    return buffers


@dataclass(frozen=True, slots=True)
class PoolNeed:
    """Slots of the KV pool: the fewest that run any context of this size, and those that hold all of it."""

    least_slots: int
    all_slots: int


def pool_need(geometry: PageGeometry, layers: int, context: ContextPlan, mode: ResidencyMode) -> PoolNeed:
    """What a context needs of the pool."""
    every = layers * geometry.pages_of(context.context_tokens)
    if mode is ResidencyMode.RESIDENT:
        return PoolNeed(every, every)
    rows = max(context.ubatch_tokens, DECODE_ROWS)
    least = least_pool_slots(layers, context.context_tokens, geometry.page_tokens, rows)
    return PoolNeed(min(least, every), every)


def plan_memory(
    geometry: PageGeometry, need: PoolNeed, buffers: dict[Phase, PhaseBuffers], *,
    arena_bytes: int | None, pool_bytes: int | None, free_bytes: int,
) -> MemoryPlan:
    """The arena or the pool as asked for; else an arena for the whole context, if it is a fair part of free memory.

    ``BudgetError`` if that is too small.
    """
    prefill, decode = (
        PhaseRequest.of_bytes(phase, buffers[phase].size_bytes) for phase in (Phase.PREFILL, Phase.DECODE)
    )
    if pool_bytes is not None:
        return MemoryPlan.pool_only(
            pool_bytes=pool_bytes, slot_bytes=geometry.page_bytes, min_slots=need.least_slots,
            prefill=prefill, decode=decode,
        )
    if arena_bytes is None:
        least, every = (
            max(required_bytes(request, slot_bytes=geometry.page_bytes, slots=slots) for request in (prefill, decode))
            for slots in (need.least_slots, need.all_slots)
        )
        arena_bytes = mib_ceil(max(least, min(every, int(free_bytes * _FREE_SHARE)))) * MIB
    return MemoryPlan(arena_bytes, geometry.page_bytes, need.least_slots, prefill, decode)
