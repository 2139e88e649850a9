"""LayerKv: all that a model sees of KV. ``write`` stores a step's rows, ``attend`` reads everything up to them.

Where quantised K or V is stored rotated, it is rotated here: q and k by the same orthonormal matrix leave every score
as it was, and the output is rotated back after the final reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvs_core.device.base import Buffer, Device
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import PageGeometry
from kvs_core.paging.spans import AttendCall, RowSpan, SpanPlan
from kvs_core.streaming.streamer import Streamer


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """The attention workspace of a phase, flat float32 buffers that are cut to shape per call.

    decode   groups, segments: partials [rows, T, H, Dv + 2]
    prefill  running: one partial [T, H, Dv + 2]
    """

    groups: Buffer | None = None
    segments: Buffer | None = None
    running: Buffer | None = None


class OpenStep(Protocol):
    """What ``LayerKv`` asks of the step it belongs to."""

    first_position: int
    rows: int
    phase: Phase
    pool: Buffer
    scratch: AttentionScratch

    def row_spans(self, layer: int) -> Sequence[RowSpan]: ...

    def span_plan(self, layer: int) -> SpanPlan: ...

    def decode_calls(self, layer: int) -> Sequence[AttendCall]: ...

    def begin_attention(self, layer: int) -> None: ...

    def end_attention(self) -> None: ...


class LayerKv:
    """One attention layer's KV during one step. Used once: write, then attend."""

    def __init__(self, device: Device, geometry: PageGeometry, streamer: Streamer, step: OpenStep, layer: int) -> None:
        self._device = device
        self._geometry = geometry
        self._streamer = streamer
        self._step = step
        self._layer = layer

    def write(self, k: Buffer, v: Buffer) -> None:
        """Store the step's rows.   k [T, G, Dk], v [T, G, Dv], after norm and RoPE; both may be overwritten"""
        ops, geometry, step = self._device.ops, self._geometry, self._step
        if geometry.k_rotation:
            ops.hadamard(k, geometry.k_rotation)
        if geometry.v_rotation:
            ops.hadamard(v, geometry.v_rotation)
        ops.kv_write(k, v, step.pool, geometry, step.row_spans(self._layer))

    def attend(self, q: Buffer, out: Buffer) -> None:
        """Causal attention of the step's rows.   q [T, H, Dk] scaled, may be overwritten; out [T, H, Dv]"""
        ops, geometry = self._device.ops, self._geometry
        if geometry.k_rotation:
            ops.hadamard(q, geometry.k_rotation)
        self._step.begin_attention(self._layer)
        if self._step.phase is Phase.DECODE:
            self._attend_decode(q, out)
        else:
            self._attend_prefill(q, out)
        if geometry.v_rotation:
            ops.hadamard(out, geometry.v_rotation)
        self._step.end_attention()

    def _attend_decode(self, q: Buffer, out: Buffer) -> None:
        ops, step = self._device.ops, self._step
        heads = q.shape[1]
        scratch = _cut(step.scratch.groups, step.rows, heads, self._geometry.v_dim + 2)
        segments = _cut(step.scratch.segments, step.rows, heads, self._geometry.v_dim + 2)
        for call in step.decode_calls(self._layer):
            if call.run is not None and call.first:
                self._streamer.acquire(call.run)
            ops.attend_decode(
                q, step.pool, self._geometry, call.parts, scratch, first_position=step.first_position
            )
            ops.fold(scratch, segments, call.folds)
            if call.run is not None and call.last:
                self._streamer.release(call.run)
        ops.finish_decode(segments, step.span_plan(self._layer).segments, out)

    def _attend_prefill(self, q: Buffer, out: Buffer) -> None:
        # Page order, streamed pages first: one running partial is enough, where many rows would need many.
        ops, step = self._device.ops, self._step
        running = _cut(step.scratch.running, step.rows, q.shape[1], self._geometry.v_dim + 2)[0]
        for number, chunk in enumerate(step.span_plan(self._layer).chunks):
            if chunk.run is not None:
                self._streamer.acquire(chunk.run)
            ops.attend_prefill(
                q, step.pool, self._geometry, chunk.pages, running,
                fresh=number == 0, first_position=step.first_position,
            )
            if chunk.run is not None:
                self._streamer.release(chunk.run)
        ops.finish_prefill(running, out)


def _cut(flat: Buffer | None, rows: int, heads: int, width: int) -> Buffer:
    """A flat buffer as [n, rows, heads, width], as many as it holds."""
    assert flat is not None, "this phase has no such scratch"
    size = rows * heads * width
    count = len(flat) // size
    return flat[: count * size].reshape(count, rows, heads, width)
