"""Step and plan tables in device memory, and how their contents get there without waiting for the device.

What the host writes lies in pinned memory until the copy that it feeds is done; each table has its own such memory, so
a step can be prepared while the last one still runs. A decode step's copy is part of its captured graph: it always
reads the same pinned words.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from kvs_core.device.base import Fence, StepInputs
from kvs_core.device.cuda.kernel import address
from kvs_core.device.cuda.plan import DevicePlan
from kvs_core.device.cuda.runtime import Runtime
from kvs_core.device.cuda.streams import CudaStream
from kvs_core.device.cuda.tables import (
    STEP_KEPT,
    STEP_PENDING,
    STEP_POSITION,
    STEP_ROWS,
    STEP_STORE,
    STEP_TOKENS,
    STEP_WORDS,
    PlanLayout,
)
from kvs_core.device.operands import Buffer
from kvs_core.device.ops import DRAFT_PLAN, PREFILL_PLAN, TILES_PLAN
from kvs_core.paging.spans import LayerPlan

_AHEAD = 4   # prefill steps whose inputs may wait in pinned memory
_TILES = 9   # of a decode step: 65 rows


class _Staged:
    """Pinned words that a copy may still be reading."""

    def __init__(self, runtime: Runtime, words: int) -> None:
        self.words = runtime.allocate_pinned(4 * words, "the inputs of steps").view(np.int32)
        self.words[:] = 0
        self._fence: Fence | None = None

    def ready(self) -> np.ndarray:
        """The words, to be written."""
        if self._fence is not None:
            self._fence.wait()
            self._fence = None
        return self.words

    def sent(self, fence: Fence) -> None:
        """The copy that reads them ends before ``fence``."""
        self._fence = fence


class StepTable:
    """int32 [STEP_WORDS], the same for each tile of a wide decode step, and the tokens of a prefill step.

    memory     of the step
    tiles      of each tile; ``tile_rows``: their rows, of the step in progress
    """

    def __init__(self, runtime: Runtime, compute: CudaStream) -> None:
        self._runtime = runtime
        self._compute = compute
        tables = runtime.allocate(4 * STEP_WORDS * (1 + _TILES), "step tables")
        self.memory: Buffer
        self.memory, *self.tiles = (
            runtime.view(tables, 4 * STEP_WORDS * number, (STEP_WORDS,), np.dtype(np.int32))
            for number in range(1 + _TILES)
        )
        self.tile_rows: tuple[int, ...] = ()
        self.tokens: Buffer = None
        self._decode = _Staged(runtime, STEP_WORDS)
        self._tiled = _Staged(runtime, STEP_WORDS * _TILES)
        self._prefill: deque[_Staged] = deque()

    def reserve(self, max_rows: int) -> None:
        """Room for the tokens of a prefill step."""
        memory = self._runtime.allocate(4 * max_rows, "the tokens of a step")
        self.tokens = self._runtime.view(memory, 0, (max_rows,), np.dtype(np.int32))
        self._prefill.extend(_Staged(self._runtime, STEP_WORDS + max_rows) for _ in range(_AHEAD))

    def write(self, inputs: StepInputs) -> None:
        """Put a decode step's inputs where its copy will read them."""
        _fill_decode(self._decode.ready(), inputs)

    def enqueue(self) -> None:
        """Copy what ``write`` wrote; may be captured."""
        self._runtime.enqueue_copy(
            address(self.memory), address(self._decode.words), 4 * STEP_WORDS, self._compute.raw
        )

    def launched(self) -> None:
        """A launch that contains the copy has been enqueued."""
        self._decode.sent(self._compute.record())

    def enqueue_tiles(self, tiles: Sequence[StepInputs]) -> None:
        """Write and copy the inputs of every tile of a decode step."""
        words = self._tiled.ready()
        for number, inputs in enumerate(tiles):
            _fill_decode(words[STEP_WORDS * number : STEP_WORDS * (number + 1)], inputs)
        self._runtime.enqueue_copy(
            address(self.tiles[0]), address(words), 4 * STEP_WORDS * len(tiles), self._compute.raw
        )
        self._tiled.sent(self._compute.record())
        self.tile_rows = tuple(len(inputs.tokens) for inputs in tiles)

    def enqueue_prefill(self, inputs: StepInputs) -> None:
        """Write and copy a prefill step's inputs."""
        staged = self._prefill[0]
        self._prefill.rotate(-1)
        words = staged.ready()
        rows = len(inputs.tokens)
        _fill(words, inputs)
        words[STEP_WORDS : STEP_WORDS + rows] = inputs.tokens
        start = address(words)
        self._runtime.enqueue_copy(address(self.memory), start, 4 * STEP_WORDS, self._compute.raw)
        self._runtime.enqueue_copy(address(self.tokens), start + 4 * STEP_WORDS, 4 * rows, self._compute.raw)
        staged.sent(self._compute.record())


def _fill(words: np.ndarray, inputs: StepInputs) -> None:
    words[STEP_POSITION] = inputs.first_position
    words[STEP_ROWS] = len(inputs.tokens)
    words[STEP_PENDING] = inputs.pending
    words[STEP_STORE] = inputs.store
    words[STEP_KEPT] = inputs.kept


def _fill_decode(words: np.ndarray, inputs: StepInputs) -> None:
    _fill(words, inputs)
    words[STEP_TOKENS : STEP_TOKENS + len(inputs.tokens)] = inputs.tokens


class PlanTables:
    """A table for every layer and width of decode step, one for its drafts, one for the steps that run in tiles, and a
    few for its prefill steps."""

    def __init__(self, runtime: Runtime, compute: CudaStream, layers: int, pages: int, max_rows: int) -> None:
        self._runtime = runtime
        self._compute = compute
        self._decode = PlanLayout(pages, calls=pages)   # a call reads at least a page
        self._prefill = PlanLayout(pages, calls=0)
        self._max_rows = max_rows
        self._memory = runtime.allocate(4 * self._words(layers), "plan tables")
        self._staged = [
            [_Staged(runtime, layout.words) for layout in self._layouts()] for _ in range(layers)
        ]
        self._turn = [0] * layers

    @property
    def size_bytes(self) -> int:
        """On the device."""
        return int(self._memory.nbytes)

    def load(self, layer: int, rows: int, plan: LayerPlan) -> DevicePlan:
        """Enqueue the table's new contents. ``rows``: see ``Ops.load_plan``."""
        if rows != PREFILL_PLAN:
            own = {DRAFT_PLAN: self._max_rows, TILES_PLAN: self._max_rows + 1}
            index, layout = own.get(rows, rows - 1), self._decode
        else:
            index, layout = self._max_rows + 2 + self._turn[layer], self._prefill
            self._turn[layer] = (self._turn[layer] + 1) % _AHEAD
        staged = self._staged[layer][index]
        words = staged.ready()
        layout.fill(plan, words)
        at = address(self._memory) + 4 * (self._words(layer) + self._before(index))
        self._runtime.enqueue_copy(at, address(words), 4 * layout.words, self._compute.raw)
        staged.sent(self._compute.record())
        return DevicePlan.at(at, layout, plan)

    def _layouts(self) -> list[PlanLayout]:
        return [self._decode] * (self._max_rows + 2) + [self._prefill] * _AHEAD

    def _words(self, layers: int) -> int:
        return layers * self._before(self._max_rows + 2 + _AHEAD)

    def _before(self, index: int) -> int:
        """Words of a layer's tables before that one; all begin at 16 bytes."""
        return sum(layout.words for layout in self._layouts()[:index])

