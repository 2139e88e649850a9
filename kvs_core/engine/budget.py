"""What a model and a context take of a device: from sizes to pages, workspaces and a ``MemoryPlan``. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul

from kvs_core.device.base import Device, StepSizes
from kvs_core.device.workspace import BufferSpec
from kvs_core.engine.arena_size import PoolNeed, arena_room, plan_memory
from kvs_core.engine.levers import UNBOUND, Bounds, advised
from kvs_core.engine.pages import Pages
from kvs_core.engine.windows import Windows, plan_windows, sliding_pages
from kvs_core.errors import BudgetError, CapabilityError, KvsError, SettingsError
from kvs_core.memory.phases import MemoryPlan, Phase
from kvs_core.models.model import forward_buffers, logit_buffers, step_sizes
from kvs_core.models.nextn import table_bytes
from kvs_core.models.recurrent import MAX_ROWS, state_bytes
from kvs_core.models.spec import LayerSpec, ModelSpec
from kvs_core.paging.geometry import GROUP_PAGES, SEGMENT_GROUPS, PageGeometry
from kvs_core.paging.residency import (
    ResidencyConfig,
    ResidencyMode,
    least_pool_slots,
    most_sliding_groups,
    most_sliding_pages,
)
from kvs_core.paging.spans import LEAST_SCRATCH_GROUPS
from kvs_core.settings.rooms import ContextPlan, ContextSettings, KvSettings
from kvs_core.streaming.handover import PhaseBuffers, attention_scratch
from kvs_core.units import MIB, align_up, ceil_div

DECODE_ROWS = MAX_ROWS
"""Rows of the decode workspace: one, or a verify of up to seven drafts."""

SCRATCH_GROUPS = 2 * LEAST_SCRATCH_GROUPS
"""Group partials of ``DECODE_ROWS`` rows in the decode workspace; narrower steps have room for more: fewer calls."""


DeviceScratch = Callable[[Phase, StepSizes], Sequence[BufferSpec]]
"""The buffers of its own that a device keeps in a phase's workspace."""


@dataclass(frozen=True, slots=True)
class BudgetDevice:
    """What a device adds to a budget; by default what the host device does: nothing."""

    scratch: DeviceScratch = lambda phase, sizes: ()
    page_layout: Callable[[PageGeometry], PageGeometry] = lambda geometry: geometry
    is_host: bool = True
    spills: bool = False

    @classmethod
    def of(cls, device: Device) -> BudgetDevice:
        """What ``device`` adds."""
        return cls(device.scratch, device.page_layout, device.is_host, device.spills)


@dataclass(frozen=True, slots=True)
class Drafting:
    """What a model drafts with, beside what needs no model.

    nextn     its MTP block
    resident  the trunk itself, on the pages that are on the device: the first group stays there too
    """

    nextn: bool = False
    resident: bool = False

    @classmethod
    def of(cls, types: Collection[str]) -> Drafting:
        """What drafters of these types (``--spec-type``) need."""
        return cls("draft-mtp" in types, "draft-resident" in types)

    def check(self, spec: ModelSpec) -> None:
        """``CapabilityError`` if the model lacks what this needs."""
        if self.nextn and not spec.nextn:
            raise CapabilityError(
                f"{spec.name} has no MTP block ({spec.arch}.nextn_predict_layers is 0); use a file with one, or "
                "--spec-type draft-resident or ngram-mod"
            )

    def kv_layers(self, spec: ModelSpec) -> tuple[LayerSpec, ...]:
        """The layers with keys and values, the MTP block's last."""
        return (*spec.kv_layers, *(spec.nextn if self.nextn else ()))

    def kv_reads(self, spec: ModelSpec) -> list[int]:
        """Of each attention of a step, in order, the number among ``kv_layers`` of the layer whose pages it reads."""
        layers = (*spec.layers, *(spec.nextn if self.nextn else ()))
        return [layer.kv_index for layer in layers if layer.kv_index is not None]

    def table_bytes(self, spec: ModelSpec) -> int:
        """Device bytes that it keeps beside the weights and the arena, loaded with the former."""
        return table_bytes(spec.n_embd) if self.nextn else 0

    @property
    def head_pages(self) -> int:
        """First pages of a layer that stay resident."""
        return GROUP_PAGES if self.resident else 0


NO_DRAFTING = Drafting()


def phase_buffers(
    spec: ModelSpec, geometry: PageGeometry, context: ContextPlan, device_scratch: DeviceScratch,
    nextn: bool = False,
) -> dict[Phase, PhaseBuffers]:
    """The workspace of each phase: activations, logits, attention scratch, the device's own."""
    heads = max(layer.heads for layer in spec.kv_layers)
    groups = ceil_div(geometry.pages_of(context.context_tokens), GROUP_PAGES)
    buffers = {}
    for phase, rows, logit_rows in (
        (Phase.PREFILL, context.ubatch_tokens, 1), (Phase.DECODE, DECODE_ROWS, DECODE_ROWS)
    ):
        held = min(SCRATCH_GROUPS, groups)
        scratch = attention_scratch(
            phase, rows=rows, heads=heads, v_dim=spec.v_dim,
            groups=held, segments=ceil_div(groups, SEGMENT_GROUPS),
        )
        specs: list[BufferSpec] = [*forward_buffers(spec, rows, nextn=nextn), *logit_buffers(spec, logit_rows)]
        specs += [buffer for _, buffer in scratch]
        specs += device_scratch(phase, step_sizes(spec, rows))
        group_rows = held * rows if phase is Phase.DECODE else 0
        buffers[phase] = PhaseBuffers(tuple(specs), tuple(name for name, _ in scratch), group_rows)
    return buffers


def pool_need(
    pages: Pages, layers: Sequence[LayerSpec], context: ContextPlan, mode: ResidencyMode, head_pages: int = 0,
    windows: Windows | None = None,
) -> PoolNeed:
    """What a context needs of the pool. With ``windows``, all that it can use is these and the largest ring.

    layers  those with KV
    """
    geometry = pages.shared
    rows = max(context.ubatch_tokens, DECODE_ROWS)
    tokens, page_tokens = context.context_tokens, geometry.page_tokens
    sliding = [before for before in sliding_pages(layers, geometry) if before is not None]
    whole = len(layers) - len(sliding)
    every = whole * geometry.pages_of(tokens)
    of_sliding, apart = sum(most_sliding_pages(tokens, page_tokens, rows, before) for before in sliding), 0
    if pages.sliding is not None:
        sliding, of_sliding, apart = [], 0, of_sliding
    every += of_sliding
    if mode is ResidencyMode.RESIDENT:
        return PoolNeed(every, every, apart)
    if windows is not None:
        least, most = (windows.resident_slots + ring for ring in (windows.least_ring, windows.ring_in(every)))
        return PoolNeed(min(least, every), min(most, every), apart)
    least = least_pool_slots(whole, tokens, page_tokens, rows, head_pages, sliding)
    return PoolNeed(min(least, every), every, apart)


@dataclass(frozen=True, slots=True)
class Budget:
    """What one model and one context take of a device, weights and recurrent state aside.

    residency  what the policy goes by, but for the link's rate
    """

    context: ContextPlan
    residency: ResidencyConfig
    pages: Pages
    need: PoolNeed
    buffers: Mapping[Phase, PhaseBuffers]
    memory: MemoryPlan

    @property
    def geometry(self) -> PageGeometry:
        """Of the pages that may stream."""
        return self.pages.shared

    @property
    def mode(self) -> ResidencyMode:
        """Which pages stay on the device."""
        return self.residency.mode

    def history_pages(self) -> Sequence[int]:
        """By layer, the pages that the history has room for, at most, at a full context to which no checkpoint belongs.
        """
        tokens, page_tokens = self.context.context_tokens, self.geometry.page_tokens
        rows = max(self.context.ubatch_tokens, DECODE_ROWS)
        pages = [self.geometry.pages_of(tokens)] * self.residency.layers
        for layer, before in enumerate(self.residency.sliding_pages):
            if before is not None and self.residency.drops_passed:
                pages[layer] = GROUP_PAGES * most_sliding_groups(tokens, page_tokens, rows, before)
        return pages

    def history_bytes(self, page_bytes: Sequence[int]) -> int:
        """Of host memory, for these pages.

        page_bytes  of a page of each layer
        """
        return sum(map(mul, self.history_pages(), page_bytes))

    def served_history_bytes(self, page_bytes: Sequence[int], checkpoints: int, most_bytes: int) -> int:
        """The same where a conversation has as many checkpoints as it may, which take so many bytes at most."""
        pages = align_up(self.geometry.pages_of(self.context.context_tokens), GROUP_PAGES)
        windows = self.history_bytes(page_bytes)
        kept = min(checkpoints * self.checkpoint_bytes(page_bytes), most_bytes)
        return min(windows + kept, max(windows, pages * sum(page_bytes)))

    def checkpoint_bytes(self, page_bytes: Sequence[int]) -> int:
        """What the history holds more, at most, for each checkpoint: what windows see there."""
        if not self.residency.drops_passed:
            return 0
        pages = [
            0 if before is None else align_up(before + 1 + GROUP_PAGES - 1, GROUP_PAGES)
            for before in self.residency.sliding_pages
        ]
        return sum(map(mul, pages, page_bytes))


def plan_budget(
    spec: ModelSpec, context: ContextSettings, kv: KvSettings, *,
    free_bytes: int, arena_bytes: int | None = None, pool_bytes: int | None = None,
    device: BudgetDevice = BudgetDevice(), drafting: Drafting = NO_DRAFTING, ring_bytes: int = 0,
    bounds: Bounds | None = UNBOUND,
) -> Budget:
    """The budget of a model, from its sizes alone. ``BudgetError`` or ``CapabilityError`` if it cannot be.

    free_bytes               of the device, for an arena that is chosen here, which recurrent state shares with it
    drafting                 what steps will be drafted with
    device                   what its kernels ask for; by default nothing
    arena_bytes, pool_bytes  exact sizes instead of ``kv.arena_mib`` and ``kv.pool_mib``; arenas in multiples of 256
    ring_bytes               of the arena, through which weights pass: a multiple of 256
    bounds                   of what is said to help where what was given is too small, which takes some trials; None:
                             nothing is
    """
    plan = context.plan(spec.n_ctx_train, spec.n_ctx_most)
    _check_plain(spec, plan.context_tokens)
    mode = ResidencyMode(kv.residency_mode)
    layers = drafting.kv_layers(spec)
    _check_auxiliary(kv, spec)
    pages = Pages.of(layers, kv).laid_out(device.page_layout)
    geometry = pages.shared
    windows = plan_windows(
        layers, len(spec.layers) + len(spec.nextn), kv, geometry, context_tokens=plan.context_tokens,
        step_rows=max(plan.ubatch_tokens, DECODE_ROWS), head_pages=drafting.head_pages,
        apart=pages.sliding is not None,
    )
    need = pool_need(pages, layers, plan, mode, drafting.head_pages, windows)
    buffers = phase_buffers(spec, geometry, plan, device.scratch, drafting.nextn)
    arena_bytes = kv.arena_mib * MIB if isinstance(kv.arena_mib, int) else arena_bytes
    pool_bytes = pool_bytes if kv.pool_mib is None else kv.pool_mib * MIB

    def fits(context: ContextSettings, kv: KvSettings) -> bool:
        try:
            plan_budget(
                spec, context, kv, free_bytes=free_bytes, arena_bytes=arena_bytes, pool_bytes=pool_bytes,
                device=device, drafting=drafting, ring_bytes=ring_bytes, bounds=None,
            )
        except KvsError:
            return False
        return True

    def plan_pool(need: PoolNeed) -> MemoryPlan:
        return plan_memory(
            pages, need, buffers, arena_bytes=arena_bytes, pool_bytes=pool_bytes,
            room=arena_room(kv, free_bytes - state_bytes(spec), is_host=device.is_host, spills=device.spills),
            ring_bytes=ring_bytes,
        )

    try:
        try:
            memory = plan_pool(need)
        except BudgetError:
            if windows is None:
                plan_pool(_with_ring(kv, need))   # what it names is enough for the ring that was asked for
            raise
    except BudgetError as error:
        if bounds is None or (arena_bytes is None and pool_bytes is None):
            raise
        raise advised(
            error, fits, context, kv, plan, bounds, ring_bytes=ring_bytes if pool_bytes is None else 0
        ) from None
    pool_slots = min(memory.slots(phase) for phase in Phase)
    if windows is None:
        _check_ring(kv, need, pool_slots)
    residency = ResidencyConfig(
        mode, len(layers), geometry.page_bytes,
        ring_slots=windows.ring_in(pool_slots - windows.resident_slots) if windows else kv.ring_slots,
        run_pages=kv.run_pages, head_pages=drafting.head_pages, favoured=_favoured(layers, spec),
        sliding_slots=need.sliding_slots,
        window_pages=windows.pages if windows else (),
        sliding_pages=sliding_pages(layers, geometry) if any(layer.window for layer in layers) else (),
        # A shift moves rows from before a window into it.
        drops_passed=any(layer.window for layer in layers) and not kv.swa_full and not context.shift,
    )
    return Budget(plan, residency, pages, need, buffers, memory)


def _favoured(layers: Sequence[LayerSpec], spec: ModelSpec) -> int:
    """The last layers whose pages are read several times in a round: those of the MTP block, or the one that others
    share."""
    last = spec.kv_layers[-1:]
    shared = any(layer.shares and layer.kv_index == last[0].kv_index for layer in spec.layers)
    return len(layers) - len(spec.kv_layers) + int(shared)


def _check_plain(spec: ModelSpec, context_tokens: int) -> None:
    """``CapabilityError`` for a context in which the model's attention is no longer plain."""
    if spec.n_ctx_plain is not None and context_tokens > spec.n_ctx_plain:
        raise CapabilityError(
            f"{spec.name} attends in dual chunks beyond {spec.n_ctx_plain} tokens, for which kvs has no code, and the "
            f"context is {context_tokens}; use --ctx-size {spec.n_ctx_plain} or less"
        )


def _check_auxiliary(kv: KvSettings, spec: ModelSpec) -> None:
    """``SettingsError`` if the count that was given is not the model's."""
    if kv.auxiliary_layers not in (None, len(spec.nextn)):
        raise SettingsError(
            f"--kv-stream-auxiliary-layers {kv.auxiliary_layers}: the MTP layers of {spec.name} are {len(spec.nextn)}; "
            "give that, or leave it out"
        )


def _with_ring(kv: KvSettings, need: PoolNeed) -> PoolNeed:
    """The same with the ring and the run that were asked for, if not all pages are resident."""
    slots = need.least_slots - 1 + max(1, kv.ring_slots, kv.run_pages)
    return replace(need, least_slots=min(slots, need.all_slots))


def _check_ring(kv: KvSettings, need: PoolNeed, pool_slots: int) -> None:
    """``SettingsError`` for a ring or a run that a pool of ``pool_slots`` slots, some of them resident, cannot have."""
    most = pool_slots - (need.least_slots - 1)
    if pool_slots >= need.all_slots:
        return   # nothing is streamed
    for flag, pages in (("--kv-stream-ring-slots", kv.ring_slots), ("--kv-stream-run-pages", kv.run_pages)):
        if pages > most:
            raise SettingsError(
                f"{flag} {pages}: the pool has {pool_slots} pages, of which {need.least_slots - 1} must stay resident; "
                f"use at most {most}, or 0 to have it chosen"
            )
