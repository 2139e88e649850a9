"""StepPlans: the plans of a cache's layers as the device knows them, kept until pages move, and what tells recordings
of captured work that they are out of date.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from kvs_core.device.base import Device
from kvs_core.device.ops import DRAFT_PLAN, PREFILL_PLAN, TILES_PLAN
from kvs_core.memory.phases import Phase
from kvs_core.paging.spans import Chunk, LayerPlan, plan_layer
from kvs_core.streaming.layer_kv import LoadedPlan


@dataclass(frozen=True, slots=True)
class Lie:
    """Where the pages of one layer are read: the slot of each, and what can be read at one time, in page order.

    slides  the chunks need not begin at page 0; slots before the first one mean nothing
    """

    slots: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    slides: bool = False


class Pages(Protocol):
    """Whoever knows where pages are."""

    def lie(self, layer: int) -> Lie: ...


class StepPlans:
    """Of ``layers`` attention layers; ``forget`` whenever a page moves."""

    def __init__(self, device: Device, pages: Pages, layers: int) -> None:
        self._device = device
        self._pages = pages
        self._layers = layers
        self._group_rows = 0
        self._plans: dict[tuple[int, int], LoadedPlan] = {}   # by layer and rows of a decode step
        self._signatures: dict[Hashable, Hashable] = {}      # of decode steps, by rows, and of drafts, by layers
        self._bound = 0                                      # changes with the layout
        self._generation = 0                                 # changes when captured work would move other bytes

    def bind(self, group_rows: int) -> None:
        """The layout is another, its scratch of that many rows of group partials."""
        self._group_rows = group_rows
        self._bound += 1
        self.rescheduled()

    def rescheduled(self) -> None:
        """Copies will bring other pages, or bring them elsewhere."""
        self._generation += 1
        self.forget()

    def forget(self) -> None:
        """Pages have moved, come or gone."""
        self._plans.clear()
        self._signatures.clear()

    def of_step(self, layer: int, rows: int, phase: Phase) -> LoadedPlan:
        """What a step's rows attend to."""
        key = (layer, rows if phase is Phase.DECODE else PREFILL_PLAN)
        if key not in self._plans:
            lie = self._pages.lie(layer)
            if phase is Phase.DECODE:
                groups = self._group_rows // rows
                plan = plan_layer(lie.slots, lie.chunks, scratch_groups=groups, partial=lie.slides)
            else:
                plan = LayerPlan(lie.slots, lie.chunks, partial=lie.slides)
            self._load(key, plan)
        return self._plans[key]

    def of_tiles(self, layer: int, scratch_groups: int) -> LoadedPlan:
        """What every tile of a decode step attends to, in calls for scratch of so many groups."""
        key = (layer, TILES_PLAN)
        if key not in self._plans:
            lie = self._pages.lie(layer)
            plan = plan_layer(lie.slots, lie.chunks, scratch_groups=scratch_groups, partial=lie.slides)
            self._load(key, plan)
        return self._plans[key]

    def of_draft(self, layer: int) -> LoadedPlan:
        """What one row of a draft attends to: what is resident, and nothing that would have to be waited for."""
        key = (layer, DRAFT_PLAN)
        if key not in self._plans:
            lie = self._pages.lie(layer)
            resident = [chunk for chunk in lie.chunks if chunk.run is None]
            self._load(key, plan_layer(lie.slots, resident, scratch_groups=self._group_rows, partial=True))
        return self._plans[key]

    def signature(self, rows: int) -> Hashable:
        """What captured work for a step of so many rows depends on."""
        if rows not in self._signatures:
            plans = [self.of_step(layer, rows, Phase.DECODE).plan for layer in range(self._layers)]
            self._signatures[rows] = (self._generation, tuple(plan.shape for plan in plans))
        return self._signatures[rows]

    def draft_signature(self, layers: range) -> Hashable:
        """What captured work for a draft row in these layers depends on."""
        key = (DRAFT_PLAN, layers)
        if key not in self._signatures:
            plans = [self.of_draft(layer).plan for layer in layers]
            self._signatures[key] = (self._bound, tuple(plan.shape for plan in plans))
        return self._signatures[key]

    def _load(self, key: tuple[int, int], plan: LayerPlan) -> None:
        layer, rows = key
        self._plans[key] = LoadedPlan(plan, self._device.ops.load_plan(layer, rows, plan))
