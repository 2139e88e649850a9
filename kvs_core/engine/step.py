"""Step: rows behind the committed ones, computed and then kept or dropped.

    open ─> drafting   draft_next / draft_resident, each a row behind the last; ``best`` tells what it guesses
         ─> ran        run(tokens): the rows that count; logits, best
         ─> settled    settle(keep): the first ``keep`` rows are committed
    Leaving the block before that drops everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from kvs_core.device.base import Device, StepInputs
from kvs_core.device.operands import Buffer
from kvs_core.device.workspace import Workspace
from kvs_core.engine.captured import CapturedSteps
from kvs_core.engine.tiles import TileBuffers, tiles_of
from kvs_core.memory.phases import Phase
from kvs_core.models.blocks import Batch
from kvs_core.models.blocks import Step as Tile
from kvs_core.models.model import Model
from kvs_core.models.nextn import DRAFT_ROW
from kvs_core.models.recurrent import MAX_ROWS, RecurrentState
from kvs_core.sampling.candidates import Candidates
from kvs_core.sampling.logprobs import check_logits
from kvs_core.streaming.kv_step import KvStep
from kvs_core.streaming.kv_stream import KvStream


@dataclass(slots=True)
class Kept:
    """Rows of the last decode step that were kept; 0 after a prefill, or where the last step left nothing."""

    rows: int = 0


@dataclass(frozen=True, slots=True)
class StepParts:
    """What an engine lends a step."""

    device: Device
    model: Model
    kv: KvStream
    state: RecurrentState
    captured: CapturedSteps
    workspace: Workspace
    kept: Kept


class Step:
    """See the top of the file. ``rows``: of the last thing that ran."""

    def __init__(self, parts: StepParts, rows: int, phase: Phase, room: TileBuffers | None = None) -> None:
        """Open a step of up to ``rows`` rows. ``room``: it will run in tiles."""
        self._parts = parts
        self._phase = phase
        self._room = room
        self._tiles: list[Tile] = []
        self._kv: KvStep = parts.kv.begin(rows, phase)
        self._settled = False
        self._ran = False
        self._has_logits = False   # of all rows, in the workspace
        self._drafted = 0
        self._last_kind = ""
        self.rows = 0
        try:
            if room is None:
                parts.state.begin(phase, rows, self._kv.first_position)
            else:
                parts.state.begin_tiles(rows, self._kv.first_position, room.rings)
        except BaseException:
            self._drop()
            raise

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._settled:
            self._drop()

    def run(self, tokens: Sequence[int]) -> None:
        """Compute the rows ``tokens``. Once."""
        assert not self._ran, "a step runs once"
        parts = self._parts
        if self._room is not None:
            self._run_tiles(tokens, self._room)
            return
        try:
            self._kv.run(len(tokens))
            batch = self._batch(tokens, 0)
            inputs = StepInputs(
                batch.tokens, batch.first_position, parts.state.pending, self._phase, kept=parts.kept.rows
            )

            def forward() -> None:
                self._kv.fill_ring()
                parts.model.forward(batch, self._kv, parts.state, parts.workspace)

            def record() -> None:
                forward()
                parts.model.logits(parts.workspace.rows("x", batch.rows), parts.workspace)

            launched = self._captures and self._kv.can_capture and self._launch_step(inputs, record)
            if launched:
                parts.kept.rows = 0   # unless rows are kept: the table's first row is what stood before them
            else:
                parts.device.begin_step(inputs)
                if self._phase is Phase.DECODE:
                    parts.kept.rows = 0   # as above, wherever it breaks off
                with np.errstate(all="ignore"):
                    forward()
                parts.kept.rows = 0
        except BaseException:
            self._drop()
            raise
        self._ran, self.rows, self._has_logits = True, len(tokens), launched

    def draft_next(self, token: int) -> None:
        """One row of the MTP block behind the drafted ones, on ``token``; its logits say what may follow."""
        parts = self._parts
        kept = parts.kept.rows if self._drafted == 0 else DRAFT_ROW
        layer = len(parts.kv.reads) - 1
        batch = self._batch([token], self._drafted)
        self._draft(
            "next", batch, StepInputs(batch.tokens, batch.first_position, 0, self._phase, store=False, kept=kept),
            lambda: parts.model.draft_next(batch, self._kv, parts.workspace), range(layer, layer + 1),
        )

    def draft_resident(self, token: int) -> None:
        """One row of the trunk behind the drafted ones, attending only to what is on the device."""
        parts = self._parts
        states = parts.state.draft(self._drafted)
        batch = self._batch([token], self._drafted)

        def forward() -> None:
            parts.model.forward(batch, self._kv, states, parts.workspace, draft=True)
            parts.model.logits(parts.workspace.rows("x", 1), parts.workspace)

        self._draft(
            "resident", batch,
            StepInputs(batch.tokens, batch.first_position, states.pending, self._phase, store=False), forward,
            range(parts.model.spec.n_reads),
        )

    def logits(self, first_row: int | None = None) -> np.ndarray:
        """Logits float32 [n, V] of rows [first_row, T), on the host; by default of the last row alone."""
        parts = self._parts
        first_row = self.rows - 1 if first_row is None else first_row
        if self._has_logits:
            return parts.device.download(parts.workspace["logits"][first_row : self.rows])
        return np.concatenate([parts.device.download(logits) for logits in self._logits_from(first_row)])

    def best(self, k: int, first_row: int | None = None) -> list[Candidates] | None:
        """Of each row from ``first_row`` on (default: the last alone) the k largest logits, sorted.

        None if the device cannot find so many: see ``logits``.
        """
        parts = self._parts
        first_row = self.rows - 1 if first_row is None else first_row
        found = []
        for logits in self._logits_from(first_row):
            top = parts.device.ops.top_logits(logits, k)
            if top is None:
                return None
            ids, values = (parts.device.download(part) for part in top)
            for row in values:
                check_logits(row[:1])
            found += [Candidates(*row, is_sorted=True) for row in zip(ids, values, strict=True)]
        return found

    def settle(self, keep: int | None = None) -> None:
        """Commit the first ``keep`` rows (default: all), drop the rest."""
        assert self._ran, "a step that has not run"
        parts = self._parts
        keep = self.rows if keep is None else keep
        try:
            if self._tiles:
                parts.model.keep_tiles(self._tiles, keep)
            parts.state.settle(keep)
        except BaseException:
            self._drop()
            raise
        self._settled = True
        if not self._tiles:
            parts.kept.rows = keep if self._phase is Phase.DECODE else 0
        self._kv.settle(keep)
        if self._has_logits:
            self.observe()

    def observe(self) -> None:
        """Tell the policy how long the step took, if that is known by now."""
        self._kv.observe(self._parts.captured.elapsed_s())

    def _run_tiles(self, tokens: Sequence[int], room: TileBuffers) -> None:
        parts = self._parts
        try:
            batches = [(first, self._batch(some, first)) for first, some in tiles_of(tokens)]
            self._kv.run_tiles(len(tokens), room.scratch[: len(batches)], room.groups)
            self._tiles = [
                parts.model.tile(batch, self._kv, parts.state.tile(first), workspace)
                for (first, batch), workspace in zip(batches, room.workspaces, strict=False)
            ]
            parts.device.begin_tiles([
                StepInputs(batch.tokens, batch.first_position, first, self._phase, store=False, kept=parts.kept.rows)
                for first, batch in batches
            ])
            parts.kept.rows = 0   # the table's first row is what stands before the step, then before the next
            self._kv.fill_ring()
            with np.errstate(all="ignore"):
                parts.model.forward_tiles(self._tiles, parts.device.use_tile)
        except BaseException:
            self._drop()
            raise
        self._ran, self.rows = True, len(tokens)

    def _logits_from(self, first_row: int) -> Iterator[Buffer]:
        """Logits [n, V] of rows from ``first_row`` on, as many at a time as there is room for; good until the next."""
        parts = self._parts
        if self._has_logits:
            yield parts.workspace["logits"][first_row : self.rows]
            return
        for x in self._residuals(first_row):
            with np.errstate(all="ignore"):
                yield parts.model.logits(x, parts.workspace)

    def _residuals(self, first_row: int) -> Iterator[Buffer]:
        if self._tiles:
            for number, tile in enumerate(self._tiles):
                x = tile.x[max(0, first_row - number * MAX_ROWS) :]
                if len(x):
                    yield x
            return
        x, most = self._parts.workspace["x"], int(self._parts.workspace["logits"].shape[0])
        for row in range(first_row, self.rows, most):
            yield x[row : min(row + most, self.rows)]

    @property
    def _captures(self) -> bool:
        return self._phase is Phase.DECODE and self._parts.device.captures

    def _batch(self, tokens: Sequence[int], offset: int) -> Batch:
        batch = Batch(np.asarray(tokens, np.int32), self._kv.first_position + offset, self._phase)
        assert 0 <= batch.tokens.min() <= batch.tokens.max() < self._parts.model.spec.n_vocab, "a token outside V"
        return batch

    def _draft(
        self, kind: str, batch: Batch, inputs: StepInputs, forward: Callable[[], Buffer | None], layers: range
    ) -> None:
        assert not self._ran, "drafts come before the step runs"
        assert self._room is None, "a step in tiles has no drafts of its own"
        assert self._drafted == 0 or self._last_kind == kind, "two kinds of drafts in one step"
        assert self._drafted < self._kv.reserved, f"{self._drafted + 1} drafts in a step of {self._kv.reserved} rows"
        self._kv.draft()
        try:
            if not (self._captures and self._launch(kind, inputs, lambda: _do(forward), layers)):
                self._parts.device.begin_step(inputs)
                with np.errstate(all="ignore"):
                    forward()
        except BaseException:
            self._drop()
            raise
        self._drafted += 1
        self._last_kind = kind
        self.rows, self._has_logits = 1, True

    def _launch_step(self, inputs: StepInputs, record: Callable[[], None]) -> bool:
        """Whether it was launched, recorded first if need be; if not, nothing has run."""
        launched = False
        try:
            launched = self._launch("step", inputs, record, None)
        finally:
            self._parts.state.launched(ran=launched)
        return launched

    def _launch(self, kind: str, inputs: StepInputs, record: Callable[[], None], layers: range | None) -> bool:
        return self._parts.captured.launch((kind, len(inputs.tokens)), inputs, self._kv, record, layers)

    def _drop(self) -> None:
        self._settled = True
        self._parts.state.drop()
        self._kv.__exit__(None, None, None)


def _do(work: Callable[[], object]) -> None:
    """``work``, whatever it returns."""
    work()
