"""Engine: builds the rooms for one model on one device, owns the phase, and runs steps.

    file -> spec -> budget (pages, memory plan) -> model -> arena -> KvStream, RecurrentState, Handover

    with engine.step(tokens, phase) as step:
        logits = step.logits()          [n, V] on the host
        step.settle(keep)               commit the first ``keep`` rows of KV and recurrent state

    with engine.open(1 + drafts) as step:
        step.draft_next(token), step.best(1) ...      drafts, of the MTP block or of the trunk itself
        step.run(tokens)                              then the rows that count

Leaving the block without ``settle`` drops the step's rows. One sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvs_core.device.base import Device
from kvs_core.engine.budget import NO_DRAFTING, Drafting
from kvs_core.engine.captured import CapturedSteps
from kvs_core.engine.checkpoints import Checkpoint, Checkpoints, ParkedSequence
from kvs_core.engine.levers import UNBOUND, Bounds
from kvs_core.engine.loading import load_within_budget
from kvs_core.engine.reports import KvReport, WeightsReport
from kvs_core.engine.step import Kept, Step, StepParts
from kvs_core.engine.tiles import TileRoom
from kvs_core.formats.gguf import GgufFile
from kvs_core.memory.arena import Arena
from kvs_core.memory.phases import WEIGHTS_RING, Phase
from kvs_core.models.recurrent import MAX_ROWS, RecurrentState, StateSnapshot
from kvs_core.models.spec import ModelSpec
from kvs_core.settings.rooms import ContextSettings, KvSettings, RopeSettings
from kvs_core.streaming.handover import Handover
from kvs_core.streaming.kv_stream import KvStream
from kvs_core.streaming.places import LayerPlaces
from kvs_core.streaming.weight_stream import WeightStream
from kvs_core.units import Progress


class Engine:
    """One model, one device, one sequence."""

    def __init__(
        self,
        file: GgufFile,
        device: Device,
        *,
        context: ContextSettings,
        kv: KvSettings,
        rope: RopeSettings,
        progress: Progress | None = None,
        kernel_progress: Progress | None = None,
        drafting: Drafting = NO_DRAFTING,
        arena_bytes: int | None = None,
        pool_bytes: int | None = None,
        gpu_layers: int | None = None,
        bounds: Bounds = UNBOUND,
    ) -> None:
        """Load the model and reserve all memory. Raises ``KvsError`` of the kind that fits; nothing runs before.

        drafting                 what steps will be drafted with: the MTP block is loaded, or pages are kept, for it
        progress                 hears of the weights, in bytes
        kernel_progress          hears of kernels that are compiled
        arena_bytes, pool_bytes  exact sizes instead of ``kv.arena_mib`` and ``kv.pool_mib``; arenas in multiples of 256
        gpu_layers               whose weights stay on the device, see ``engine.split``; None: as many as fit
        bounds                   of what is said to help where memory is too small
        """
        self._device = device
        self._drafting = drafting
        self._shifts = context.shift
        loaded = load_within_budget(
            file, device, context=context, kv=kv, rope=rope, drafting=drafting, arena_bytes=arena_bytes,
            pool_bytes=pool_bytes, gpu_layers=gpu_layers, progress=progress, kernel_progress=kernel_progress,
            bounds=bounds,
        )
        self._model, self.split, budget = loaded.model, loaded.split, loaded.budget
        spec, reads = self.spec, drafting.kv_reads(self.spec)
        self.context, self.shapes, self.need = budget.context, budget.pages, budget.need
        self.geometry = budget.geometry
        self.memory = budget.memory
        self._mode = budget.mode
        device.allocate_arena(self.memory.arena_bytes)
        pages = self.geometry.pages_of(self.context.context_tokens)
        device.reserve_steps(len(reads), pages, self.context.ubatch_tokens)
        config = replace(budget.residency, link_bytes_per_s=device.link_bytes_per_s())
        self._kv = KvStream(
            device, self.geometry, config, self.context.context_tokens, sliding=budget.pages.sliding, reads=reads,
            other_bytes=sum(part.home.nbytes for part in self._model.parts),
        )
        self._state = RecurrentState(spec, device)
        self._kept = Kept()
        self._tiles = TileRoom(device, spec, self._kv, self.context, nextn=drafting.nextn)
        arena = Arena(self.memory.arena_bytes)
        self._handover = Handover(device, arena, self.memory, self._kv, budget.buffers)
        self._weights: WeightStream | None = None
        if self._model.parts:
            self._weights = WeightStream(device, self._model.parts, arena.lease(WEIGHTS_RING))
            self._model.pass_weights_through(self._weights)
        self._captured = CapturedSteps(device, self._weights)

    def warm_up(self) -> None:
        """On a device that captures steps: record one, run it twice and drop its row, so that the first token finds
        everything in place and the policy knows how long a step takes. Before anything else."""
        if not self._device.captures:
            return
        for _ in range(2):
            with self.step([0], Phase.DECODE) as step:
                step.logits()
                step.observe()
        self.enter(Phase.PREFILL)

    @property
    def spec(self) -> ModelSpec:
        """The model's sizes."""
        return self._model.spec

    @property
    def device_name(self) -> str:
        """The device in use."""
        return self._device.name

    @property
    def committed(self) -> int:
        """Tokens whose rows count."""
        return self._kv.cache.committed

    @property
    def phase(self) -> Phase:
        """The layout in use."""
        return self._handover.layout.phase

    @property
    def logit_rows(self) -> int:
        """Rows whose logits one call of ``Step.logits`` holds on the device; more are computed in turns."""
        return int(self._handover.layout.workspace["logits"].shape[0])

    def enter(self, phase: Phase) -> None:
        """Change the arena's layout to ``phase`` if it is another. After an error: see ``Handover.change``."""
        if self.phase is not phase:
            self._captured.forget()
            self._handover.change(phase)

    @property
    def can_rewind(self) -> bool:
        """Whether ``rewind`` reaches what ``nearest`` says. Recurrent layers know only where they are, and the start.
        """
        return not self.spec.recurrent_layers

    @property
    def drops_passed(self) -> bool:
        """Whether ``nearest`` is ever less than it was asked for: where layers slide, and their history goes."""
        return self._kv.drops_passed

    def nearest(self, tokens: int) -> int:
        """The last position up to ``tokens``, of the committed ones, for which keys and values are all there."""
        return self._kv.nearest(tokens)

    def keep(self, positions: Sequence[int]) -> None:
        """Have ``nearest`` find these positions, as far as it does now, while the text goes on; others may be lost.
        Between steps, or where ``reclaim_with`` asks for memory."""
        self._kv.keep(positions)

    def rewind(self, tokens: int) -> None:
        """Forget the rows from ``tokens`` on: as many as ``nearest`` allows if ``can_rewind``, else all. Between steps.
        """
        if tokens == self.committed and tokens > 0:
            return
        assert self.can_rewind or tokens == 0, f"a recurrent state cannot go back to {tokens}"
        self._kv.truncate(tokens)
        self._state.reset()
        self._state.restore(tokens)
        if self._model.nextn is not None:
            self._device.ops.clear(self._model.nextn.hidden[:1])   # nothing stands before the first row
        self._kept.rows = 0

    def shift(self, keep: int, discard: int) -> None:
        """Drop the rows of the tokens [keep, keep + discard), and move those behind them down. Blocks; between steps.

        Keys are turned to their new positions, on the device if it has memory of its own.
        If it fails, ``rewind(0)`` has to come first.
        """
        tokens = self.committed
        assert self.can_rewind, "a recurrent state cannot forget what it has read"
        assert not self.drops_passed, "rows may come into a window that has passed them: the history has to be whole"
        assert 0 <= keep <= keep + discard <= tokens, (keep, discard, tokens)
        self._kv.drain()
        self._captured.forget()
        self.rewind(0)
        own = [params for params in self._model.attention if not params.shares]   # in the order of the cache's layers
        self._kv.shift(own, keep=keep, discard=discard, tokens=tokens)
        self._be_at(Checkpoint(StateSnapshot(tokens - discard, {}), None))

    def checkpoint(self) -> Checkpoint:
        """What is needed, beside the history, to come back to the committed tokens. Blocks; between steps."""
        hidden = None
        if self._model.nextn is not None:
            hidden = self._device.download(self._model.nextn.hidden[self._kept.rows])
        return Checkpoint(self._state.snapshot(), hidden)

    def go_back(self, checkpoint: Checkpoint) -> None:
        """Be behind the tokens of a checkpoint of this sequence again. Blocks; between steps."""
        self._kv.truncate(checkpoint.position)
        self._be_at(checkpoint)

    def _be_at(self, checkpoint: Checkpoint) -> None:
        self._state.take_back(checkpoint.state)
        if self._model.nextn is not None and checkpoint.hidden is not None:
            self._device.upload(self._model.nextn.hidden[0], checkpoint.hidden)
        self._kept.rows = 0

    def pages_of(self, layer: int) -> Iterator[tuple[int, np.ndarray]]:
        """Number and bytes of the pages of a layer that the history holds of what is committed; sends home what is not
        there yet. Blocks."""
        self._kv.drain()
        return self._kv.history_pages(layer)

    def pages(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """The same of all layers: layer, page and bytes."""
        for layer in range(self._kv.layers):
            for page, data in self.pages_of(layer):
                yield layer, page, data

    def needed_pages(self, layer: int, tokens: int) -> range:
        """The pages of a layer that ``take_up`` has to be given. Where a context shift may follow, all of them."""
        return range(self.geometry.pages_of(tokens)) if self._shifts else self._kv.needed_pages(layer, tokens)

    def park(self) -> ParkedSequence:
        """Give the sequence away, all that is needed to go on with it, and be empty. Blocks; between steps.

        If it fails, the sequence is as it was, or it is lost and ``rewind(0)`` has to come first.
        """
        end = self.checkpoint()
        history = self._kv.park()
        self._captured.forget()
        self.rewind(0)
        return ParkedSequence(history, end)

    def unpark(self, parked: ParkedSequence) -> None:
        """Go on with a sequence that was given away, from an empty one, at its end and with the same bits. Blocks.

        ``parked`` is used up. If it fails, that is not so, and ``rewind(0)`` has to come first.
        """
        assert self.committed == 0, self.committed
        self._be_at(parked.end)
        self._captured.forget()
        self._kv.take_back(parked.history)

    def parked_bytes(self, kept: Sequence[int] | None = None) -> int:
        """Host memory that ``park`` would give away now, or after ``keep(kept)``: the history, and the checkpoint at
        its end."""
        hidden = 0 if self._model.nextn is None else int(self._model.nextn.hidden[0].nbytes)
        return self._kv.parked_bytes(kept) + self._state.snapshot_bytes + hidden

    def make_checkpoints(self, most: int, most_bytes: int) -> Checkpoints:
        """Where a session on this engine may keep its own: at most so many, and so many bytes of host memory."""
        return Checkpoints(most, most_bytes, self.kept_bytes if self.drops_passed else None)

    def kept_bytes(self, positions: Sequence[int]) -> int:
        """Host memory that ``keep`` keeps for these positions, once windows have passed them."""
        return self._kv.kept_bytes(positions)

    def reclaim_with(self, reclaim: Callable[[], bool]) -> None:
        """Called, before a step runs, where the history finds no memory: gives some back, or says False."""
        self._kv.reclaim_with(reclaim)

    def take_up(
        self, pages: Iterable[tuple[int, int, bytes | memoryview]], checkpoint: Checkpoint, tokens: int
    ) -> None:
        """Begin behind ``tokens`` tokens whose pages and state come from elsewhere. Of an empty sequence."""
        assert self.committed == 0, self.committed
        self._kv.forget_slid()
        for layer, page, data in pages:
            self._kv.room_for(layer, page)[:] = np.frombuffer(data, np.uint8)
        self._kv.restore(tokens)
        self.go_back(checkpoint)

    @property
    def page_bytes(self) -> list[int]:
        """Bytes of a page of each layer with keys and values."""
        return self.shapes.page_bytes(self._drafting.kv_layers(self.spec))

    @property
    def kv_layers(self) -> int:
        """Layers with keys and values, the MTP block's included."""
        return self._kv.layers

    def step(self, tokens: Sequence[int], phase: Phase) -> Step:
        """Run the rows ``tokens`` behind the committed ones. Enters ``phase`` first."""
        self.enter(phase)
        if phase is Phase.PREFILL:
            self._state.flush()
        else:
            self._kv.end_loan()
        step = Step(self._parts(), len(tokens), phase)
        step.run(tokens)
        return step

    def open(self, rows: int) -> Step:
        """A decode step of up to ``rows`` rows behind the committed ones, in which nothing has run yet.

        More than 8, but no more than ``widest`` allows, run in tiles; then nothing is drafted within the step.
        """
        self.enter(Phase.DECODE)
        if rows <= MAX_ROWS:
            self._kv.end_loan()
            return Step(self._parts(), rows, Phase.DECODE)
        self._state.flush()
        return Step(self._parts(), rows, Phase.DECODE, self._tiles.lend(rows, self._handover.layout))

    def widest(self, rows: int) -> int:
        """Rows, ``rows`` at most, that ``open`` can have now."""
        if rows <= MAX_ROWS:
            return rows
        self.enter(Phase.DECODE)
        return self._tiles.widest(rows)

    @property
    def drafting(self) -> Drafting:
        """What the engine can draft with."""
        return self._drafting

    def _parts(self) -> StepParts:
        return StepParts(
            self._device, self._model, self._kv, self._state, self._captured, self._handover.layout.workspace,
            self._kept,
        )

    def report(self) -> KvReport:
        """Counters for summaries."""
        counters = self._device.counters()
        return KvReport(
            mode=self._mode.value,
            arena_bytes=self.memory.arena_bytes,
            page_tokens=self.geometry.page_tokens,
            page_bytes=self.geometry.page_bytes,
            stats=self._kv.stats(),
            layer_numbers=self.kv_layer_numbers,
            h2d_bytes=counters.copy_bytes,
            h2d_calls=counters.copy_calls,
            d2h_bytes=counters.publish_bytes,
            stall_ms=None if counters.stall_ns is None else counters.stall_ns / 1e6,
        )

    def weights_report(self) -> WeightsReport:
        """The same for weights."""
        stream = self._weights
        return WeightsReport(
            layers=self.spec.n_layer,
            passing=self.split.passing,
            resident_bytes=self._device.memory_report()["weights"],
            home_bytes=0 if stream is None else stream.pass_bytes,
            ring_bytes=self.split.ring.size_bytes,
            h2d_bytes=0 if stream is None else stream.moved.size_bytes,
        )

    def places(self) -> list[LayerPlaces]:
        """Where every page is, by layer with keys and values; between steps, in the thread that runs them."""
        return self._kv.places()

    @property
    def link_bytes_per_s(self) -> float:
        """Rate of large copies to the device, as measured at start."""
        return self._device.link_bytes_per_s()

    @property
    def kv_layer_numbers(self) -> list[int]:
        """The model's numbers of the layers with keys and values, the MTP block's last."""
        return [layer.index for layer in self._drafting.kv_layers(self.spec)]

    def memory_report(self) -> dict[str, int]:
        """Bytes by purpose: weights, state, arena, history."""
        return self._device.memory_report() | {"history": self._kv.stats().history_bytes}

    def close(self) -> None:
        """Stop copies and give memory back. Idempotent."""
        try:
            self._device.close()
        finally:
            self._kv.close()
