"""KvStep: one open step of a ``KvStream``, from ``begin`` to ``settle``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from time import perf_counter
from types import TracebackType
from typing import Protocol

from kvs_core.device.base import Device
from kvs_core.device.operands import Buffer
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import PageGeometry
from kvs_core.streaming.layer_kv import AttentionScratch, LayerKv, LoadedPlan, PrefillWatch
from kvs_core.streaming.plans import StepPlans
from kvs_core.streaming.streamer import Streamer


class StepOwner(Protocol):
    """What a step asks of the ``KvStream`` it belongs to."""

    geometries: tuple[PageGeometry, ...]
    layers: int
    reads: tuple[int, ...]
    streamer: Streamer
    plans: StepPlans
    watch: PrefillWatch | None

    def pool_of(self, layer: int) -> Buffer: ...

    def wait_layer(self, layer: int) -> None: ...

    def settle(self, keep: int) -> None: ...

    def abandon(self) -> None: ...

    def observe_step(self, step_s: float | None) -> None: ...

    def step_closed(self, longest_gap_s: float) -> None: ...


class KvStep:
    """One open step of ``reserved`` rows. ``layer(i)`` lends the KV that its attention number i reads: that of layer i,
    unless layers share.

    begin ─> drafting: any number of single rows, each behind the last, in any layers
          ─> running: rows 0 .. T - 1 in every layer, in order, each once; they replace what was drafted
    """

    def __init__(
        self, kv: StepOwner, device: Device, first_position: int, rows: int, phase: Phase, scratch: AttentionScratch
    ) -> None:
        self.first_position = first_position
        self.reserved = self.rows = rows
        self._drafting = False
        self.phase = phase
        self.scratch = scratch
        self.tile_scratch: Sequence[AttentionScratch] = ()
        self._tile_groups = 0
        self._kv = kv
        self._device = device
        self._open = True
        self._longest_gap_s = 0.0
        self._last_attention_s: float | None = None

    def __enter__(self) -> KvStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self._close()
            self._kv.abandon()

    def draft(self) -> None:
        """What follows is one row of a draft: it attends to what is resident."""
        self.rows = 1
        self._drafting = True

    def run(self, rows: int) -> None:
        """What follows is the step itself, of that many of the reserved rows."""
        assert 0 < rows <= self.reserved, f"{rows} of {self.reserved} rows"
        self.rows = rows
        self._drafting = False

    def run_tiles(self, rows: int, scratch: Sequence[AttentionScratch], groups: int) -> None:
        """What follows is the step itself in tiles, each with a scratch of its own that holds ``groups`` groups."""
        self.run(rows)
        self.tile_scratch, self._tile_groups = scratch, groups

    def fill_ring(self) -> None:
        """At the beginning of the step's work, and captured with it: the copies that wait for that are enqueued."""
        self._kv.streamer.pump()

    def layer(self, read: int) -> LayerKv:
        """The KV of one attention, for this step."""
        assert self._open, "the step is over"
        kv, layer = self._kv, self._kv.reads[read]
        return LayerKv(self._device, kv.geometries[layer], kv.pool_of(layer), kv.streamer, self, read, kv.watch)

    def settle(self, keep: int) -> None:
        """Commit the first ``keep`` rows, drop the rest, and close the step."""
        assert self._open, "the step is over"
        assert 0 <= keep <= self.rows, f"{keep} of {self.rows} rows"
        self._close()
        self._kv.settle(keep)

    # For LayerKv.

    def plan(self, read: int) -> LoadedPlan:
        """What an attention reads, in pages that the compute stream has been told to wait for."""
        self._kv.wait_layer(self._kv.reads[read])
        if self.tile_scratch:
            return self._kv.plans.of_tiles(read, self._tile_groups)
        plans = self._kv.plans
        return plans.of_draft(read) if self._drafting else plans.of_step(read, self.rows, self.phase)

    def signature(self, layers: range | None = None) -> Hashable:
        """What captured work for this step depends on beside its width: equal signatures move and read the same bytes.

        layers  those that a draft runs; without, the step itself. Makes their plans known to the device.
        """
        plans = self._kv.plans
        return plans.signature(self.rows) if layers is None else plans.draft_signature(layers)

    @property
    def can_capture(self) -> bool:
        """Whether the step itself can be captured: see ``Streamer``."""
        return self._kv.streamer.can_capture

    def before_launch(self) -> None:
        """Let the compute stream wait for all that a captured step relies on."""
        for layer in range(self._kv.layers):
            self._kv.wait_layer(layer)
        self._kv.streamer.settle_fences()

    @property
    def moved(self) -> Counter[int]:
        """Bytes copied to the device so far, by layer."""
        return self._kv.streamer.moved.copy()

    def launched(self, moved: Counter[int]) -> None:
        """A captured step was launched that moves these bytes."""
        self._kv.streamer.note_launch(moved)

    def after_capture(self, before: Counter[int]) -> Counter[int]:
        """The step has been captured instead of run, or its capture has failed. What was ``moved`` before it stands
        again; returned is what each launch moves."""
        streamer = self._kv.streamer
        moved, streamer.moved = streamer.moved - before, before
        streamer.forget_fences()
        # The host's clock says nothing of it.
        self._longest_gap_s = 0.0
        self._last_attention_s = None
        return moved

    def not_captured(self) -> None:
        """Behind ``after_capture``: it has failed somewhere, and the step will run as it comes. Copies begin anew."""
        self._kv.streamer.empty()
        self._kv.streamer.pump(between_steps=True)

    def observe(self, step_s: float | None) -> None:
        """The step, captured, took that long on the device; None: not known in time."""
        self._kv.observe_step(step_s)

    def begin_attention(self) -> None:
        """Attention of a layer begins."""
        now = perf_counter()
        if self._last_attention_s is not None:
            self._longest_gap_s = max(self._longest_gap_s, now - self._last_attention_s)

    def end_attention(self) -> None:
        """Attention of a layer is enqueued."""
        self._last_attention_s = perf_counter()

    def _close(self) -> None:
        self._open = False
        # Tiles take long between two attention layers; the ring is made for the steps that are most.
        if self.tile_scratch:
            self._kv.streamer.take_starved()
        self._kv.step_closed(0.0 if self.tile_scratch else self._longest_gap_s)
