"""LayerKv: all that a model sees of KV. ``attend`` stores a step's rows and reads everything up to them.

Where quantised K or V is stored rotated, the ops rotate: queries and keys by the same orthonormal matrix leave every
score as it was, and the output is rotated back after the final reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvs_core.device.base import Device, Turn
from kvs_core.device.operands import AttentionParams, AttentionRows, Buffer
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import PageGeometry
from kvs_core.paging.spans import LayerPlan
from kvs_core.streaming.streamer import Streamer


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """The attention workspace of a phase, flat float32 buffers that are cut to shape per call.

    decode   groups, segments: partials [rows, T, H, Dv + 2]
    prefill  running: one partial [T, H, Dv + 2]
    group_rows  partials of one row that ``groups`` holds
    """

    group_rows: int = 0
    groups: Buffer | None = None
    segments: Buffer | None = None
    running: Buffer | None = None


@dataclass(frozen=True, slots=True)
class LoadedPlan:
    """A layer's plan, and what stands for it in the device's ops."""

    plan: LayerPlan
    loaded: Any


class PrefillWatch(Protocol):
    """Looks on while a prefill step attends, layer by layer: begin, attended for each piece of the pages, end."""

    def begin(self, layer: int, positions: range) -> None:
        """The step's rows, at these positions, begin with an attention layer."""
        ...

    def attended(
        self, q: Buffer, params: AttentionParams, pool: Buffer, geometry: PageGeometry, plan: Any, pages: range
    ) -> None:
        """They have attended to these pages, which are still there. The arguments are those of the op."""
        ...

    def end(self, running: Buffer) -> None:
        """They have attended to all.   running [T, H, Dv + 2], for reading"""
        ...


class OpenStep(Protocol):
    """What ``LayerKv`` asks of the step it belongs to."""

    first_position: int
    rows: int
    phase: Phase
    scratch: AttentionScratch
    tile_scratch: Sequence[AttentionScratch]

    def plan(self, layer: int) -> LoadedPlan: ...

    def begin_attention(self) -> None: ...

    def end_attention(self) -> None: ...


class LayerKv:
    """One attention's KV during one step. Used once."""

    def __init__(
        self, device: Device, geometry: PageGeometry, pool: Buffer, streamer: Streamer, step: OpenStep, layer: int,
        watch: PrefillWatch | None = None,
    ) -> None:
        """``layer``: the number of the attention in its step, a layer's own unless layers share."""
        self._ops = device.ops
        self._geometry = geometry
        self._pool = pool
        self._streamer = streamer
        self._step = step
        self._layer = layer
        self._watch = watch

    def attend(self, rows: AttentionRows, params: AttentionParams) -> None:
        """Store the step's rows, then attend causally."""
        step = self._step
        planned = step.plan(self._layer)
        self._write(rows, params, planned)
        step.begin_attention()
        if step.phase is Phase.DECODE:
            self._attend_decode([rows], [step.scratch], params, planned, _one_tile)
        else:
            self._attend_prefill(rows, params, planned)
        step.end_attention()

    def attend_tiles(self, tiles: Sequence[AttentionRows], params: AttentionParams, turn: Turn) -> None:
        """The same for a decode step in tiles, whose pages are read once for all of them."""
        step = self._step
        planned = step.plan(self._layer)
        for number, rows in enumerate(tiles):
            turn(number)
            self._write(rows, params, planned)
        step.begin_attention()
        self._attend_decode(tiles, step.tile_scratch, params, planned, turn)
        step.end_attention()

    def _write(self, rows: AttentionRows, params: AttentionParams, planned: LoadedPlan) -> None:
        step = self._step
        self._ops.write_kv(rows.y, params, rows.q, self._pool, self._geometry, planned.loaded, phase=step.phase)

    def _attend_decode(
        self, tiles: Sequence[AttentionRows], scratch: Sequence[AttentionScratch], params: AttentionParams,
        planned: LoadedPlan, turn: Turn,
    ) -> None:
        ops, geometry = self._ops, self._geometry
        width = geometry.v_dim + 2
        groups = [cut(own.groups, len(rows.out), params.heads, width) for own, rows in zip(scratch, tiles, strict=True)]
        segments = [
            cut(own.segments, len(rows.out), params.heads, width) for own, rows in zip(scratch, tiles, strict=True)
        ]
        for number, call in enumerate(planned.plan.calls):
            for run in call.runs if call.first else ():
                self._streamer.acquire(run)
            for tile, rows in enumerate(tiles):
                turn(tile)
                ops.attend_decode(rows.q, params, self._pool, geometry, planned.loaded, number, groups[tile])
            for run in call.runs if call.last else ():
                self._streamer.release(run)
            if call.folds:
                for tile in range(len(tiles)):
                    turn(tile)
                    ops.fold(params, planned.loaded, number, groups[tile], segments[tile])
        for tile, rows in enumerate(tiles):
            turn(tile)
            ops.finish_decode(rows.y, params, geometry, planned.loaded, groups[tile], segments[tile], rows.out)

    def _attend_prefill(self, rows: AttentionRows, params: AttentionParams, planned: LoadedPlan) -> None:
        # Page order, streamed pages first: one running partial is enough, where many rows would need many.
        ops, step, geometry = self._ops, self._step, self._geometry
        running = cut(step.scratch.running, step.rows, params.heads, geometry.v_dim + 2)[0]
        watch = self._watch
        if watch is not None:
            watch.begin(self._layer, range(step.first_position, step.first_position + step.rows))
        for number, chunk in enumerate(planned.plan.chunks):
            if chunk.run is not None:
                self._streamer.acquire(chunk.run)
            ops.attend_prefill(
                rows.q, params, self._pool, geometry, planned.loaded, chunk.pages, running, fresh=number == 0
            )
            if watch is not None:
                watch.attended(rows.q, params, self._pool, geometry, planned.loaded, chunk.pages)
            if chunk.run is not None:
                self._streamer.release(chunk.run)
        if watch is not None:
            watch.end(running)
        ops.finish_prefill(rows.y, params, geometry, running, rows.out)


def _one_tile(number: int) -> None:
    """A step that is no more than one tile has been begun."""


def cut(flat: Buffer | None, rows: int, heads: int, width: int) -> Buffer:
    """A flat buffer as [n, rows, heads, width], as many as it holds."""
    assert flat is not None, "this phase has no such scratch"
    size = rows * heads * width
    count = len(flat) // size
    return flat[: count * size].reshape(count, rows, heads, width)
