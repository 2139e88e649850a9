"""Decode steps of more rows than one op takes, for long drafts: tiles of 8 rows inside each layer.

A layer's history crosses the link once for all of them. The first tile has the buffers of any decode step; those of the
others, and rings for the rows that recurrent layers may have to apply later, lie in slots of the KV pool that are lent:

    pool   | ring | resident pages ..... | rings of layer 0, 1, ... | tile 1 | tile 2 | ...
                          oldest pages gave way   lent until the next step that is no wider than usual
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvs_core.device.base import Device
from kvs_core.device.operands import Buffer
from kvs_core.device.workspace import BufferSpec, Workspace, workspace_bytes
from kvs_core.memory.arena import ALIGNMENT
from kvs_core.memory.phases import Phase
from kvs_core.models.model import forward_buffers
from kvs_core.models.recurrent import MAX_ROWS, lent_rings
from kvs_core.models.spec import ModelSpec
from kvs_core.paging.geometry import GROUP_PAGES, SEGMENT_GROUPS
from kvs_core.paging.spans import LEAST_SCRATCH_GROUPS
from kvs_core.settings.rooms import ContextPlan
from kvs_core.streaming.handover import Layout, attention_scratch, scratch_name
from kvs_core.streaming.kv_stream import KvStream
from kvs_core.streaming.layer_kv import AttentionScratch
from kvs_core.units import align_up, ceil_div


@dataclass(frozen=True, slots=True)
class TileBuffers:
    """Where a step in tiles computes.

    workspaces, scratch  one for each tile
    groups               group partials of a tile that every scratch holds
    rings                per recurrent layer, see ``RecurrentState.begin_tiles``
    """

    workspaces: tuple[Workspace, ...]
    scratch: tuple[AttentionScratch, ...]
    groups: int
    rings: Mapping[int, Mapping[str, Buffer]]


class TileRoom:
    """Finds room for steps in tiles in the KV pool of one engine."""

    def __init__(
        self, device: Device, spec: ModelSpec, kv: KvStream, context: ContextPlan, *, nextn: bool
    ) -> None:
        """``nextn``: the MTP block runs too."""
        self._device = device
        self._spec = spec
        self._kv = kv
        groups = ceil_div(kv.geometry.pages_of(context.context_tokens), GROUP_PAGES)
        self._groups = min(LEAST_SCRATCH_GROUPS, groups)
        scratch = attention_scratch(
            Phase.DECODE, rows=MAX_ROWS, heads=max(layer.heads for layer in spec.kv_layers), v_dim=spec.v_dim,
            groups=self._groups, segments=ceil_div(groups, SEGMENT_GROUPS),
        )
        self._tile_specs = (*forward_buffers(spec, MAX_ROWS, nextn=nextn), *(buffer for _, buffer in scratch))
        self._most_rows = context.ubatch_tokens

    def widest(self, rows: int) -> int:
        """Rows, ``rows`` at most, that a decode step can have now."""
        rows = min(rows, max(MAX_ROWS, self._most_rows), self._kv.cache.capacity_tokens - self._kv.cache.committed)
        while rows > MAX_ROWS and not self._kv.can_lend(self._slots(rows), rows):
            rows = (ceil_div(rows, MAX_ROWS) - 1) * MAX_ROWS
        return rows

    def lend(self, rows: int, layout: Layout) -> TileBuffers:
        """Room for a step of so many rows, no more than ``widest`` allows, in the decode layout. Between steps."""
        if not self._kv.can_lend(self._kv.lent_slots, rows):
            self._kv.end_loan()   # of a wider step, which leaves too little for this one
        first_slot = self._kv.lend(self._slots(rows))
        offset = align_up(layout.pool_offset + first_slot * self._kv.geometry.page_bytes, ALIGNMENT)
        ring_specs = list(self._ring_specs(rows))
        places = Workspace(self._device, offset, workspace_bytes(ring_specs), ring_specs)
        rings = {
            layer.index: {name: places[_ring_name(layer.index, name)] for name in lent_rings(layer.gdn, rows)}
            for layer in self._spec.recurrent_layers if layer.gdn is not None
        }
        offset += workspace_bytes(ring_specs)
        size = workspace_bytes(self._tile_specs)
        others = [
            Workspace(self._device, offset + number * size, size, self._tile_specs)
            for number in range(ceil_div(rows, MAX_ROWS) - 1)
        ]
        scratch = [
            AttentionScratch(
                self._groups * MAX_ROWS, workspace[scratch_name("groups")], workspace[scratch_name("segments")]
            )
            for workspace in others
        ]
        return TileBuffers((layout.workspace, *others), (layout.scratch, *scratch), self._groups, rings)

    def _slots(self, rows: int) -> int:
        size = workspace_bytes(list(self._ring_specs(rows)))
        size += (ceil_div(rows, MAX_ROWS) - 1) * workspace_bytes(self._tile_specs)
        return ceil_div(size + ALIGNMENT, self._kv.geometry.page_bytes)

    def _ring_specs(self, rows: int) -> Iterator[BufferSpec]:
        for layer in self._spec.recurrent_layers:
            if layer.gdn is not None:
                for name, shape in lent_rings(layer.gdn, rows).items():
                    yield BufferSpec(_ring_name(layer.index, name), shape, np.float32)


def _ring_name(layer: int, name: str) -> str:
    return f"{name} of layer {layer}"


def tiles_of(tokens: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """First row and tokens of each tile."""
    for first in range(0, len(tokens), MAX_ROWS):
        yield first, tokens[first : first + MAX_ROWS]
