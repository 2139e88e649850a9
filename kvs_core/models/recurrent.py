"""The state of a model's recurrent layers, and which rows of the last step still have to be applied to it.

A step computes its rows on a copy of the state and saves what they would change; the next step, which knows how many
of them were kept, applies those first. So rows can be taken back without a snapshot (deferred commit). Saved rows lie
in rings by position: a row that was taken back is overwritten by the next one at its position.

    idle        begin ─> stepping, or prefilling if nothing is pending
                flush ─> idle, nothing pending
    stepping    run_layer, each layer once; or launched
                settle(keep), all layers run ─> idle, rows [0, keep) pending
                drop ─> idle, nothing kept of this step; if some layers ran, and so have applied what was pending, the
                        others do that now: what is pending is one number for all layers
    tiled       as stepping, but of many rows, whose rings are lent; nothing is pending before or behind it:
                settle(keep) applies the rows that count ─> idle; drop ─> idle, nothing has changed
    prefilling  run_layer, each layer once, stores its state at once
                settle(all rows), all layers run ─> idle
                drop ─> idle if no layer ran, else broken: the layers stand at different positions
    broken      also after an operation failed within a layer: begin, flush and settle raise DeviceError
    any         reset ─> idle at position 0; drop is free in idle and broken
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from math import prod

import numpy as np

from kvs_core.device.base import Device
from kvs_core.device.operands import Buffer, GdnShape, GdnState, GdnWeights
from kvs_core.device.ops import Ops
from kvs_core.errors import DeviceError
from kvs_core.memory.phases import Phase
from kvs_core.models.spec import ModelSpec


class _Mode(Enum):
    IDLE = "idle"
    STEPPING = "stepping"
    TILED = "tiled"
    PREFILLING = "prefilling"
    BROKEN = "broken"


MAX_ROWS = 8
"""The widest decode or verify step."""

_DTYPE = np.float32


def state_bytes(spec: ModelSpec, max_rows: int = MAX_ROWS) -> int:
    """Device bytes of the states and rings of a model, the same for every position."""
    shapes = [layer.gdn for layer in spec.recurrent_layers if layer.gdn is not None]
    numbers = sum(prod(shape) for gdn in shapes for shape in _shapes(gdn, max_rows).values())
    return numbers * np.dtype(_DTYPE).itemsize


@dataclass(frozen=True, slots=True, eq=False)
class StateSnapshot:
    """Recurrent layers at a position, on the host: per layer the state, and the inputs of its convolution.

    The bits that a run to that position leaves; what the rings hold beside is never read.
    """

    position: int
    layers: Mapping[int, tuple[np.ndarray, np.ndarray]]

    @property
    def size_bytes(self) -> int:
        """Host memory."""
        return sum(array.nbytes for pair in self.layers.values() for array in pair)


class DraftStates:
    """Recurrent layers in one row of a draft: what is pending, drafted rows before it included, is applied on the fly.

    Drafted rows lie in the rings where the step's own rows will; pending ones before them are left alone.
    """

    def __init__(
        self, ops: Ops, shapes: Mapping[int, GdnShape], states: Mapping[int, GdnState], position: int, pending: int
    ) -> None:
        self._ops = ops
        self._shapes = shapes
        self._states = states
        self.position = position
        self.pending = pending

    def run_layer(self, index: int, y: Buffer, weights: GdnWeights, out: Buffer) -> None:
        """See ``LayerStates``."""
        self._ops.gdn_decode(
            y, weights, self._shapes[index], self._states[index], out,
            position=self.position, pending=self.pending, store=False,
        )


class RecurrentState:
    """All recurrent layers of one sequence. A model without such layers has an empty one."""

    def __init__(self, spec: ModelSpec, device: Device, max_rows: int = MAX_ROWS) -> None:
        """Allocate zeroed states and rings beside the arena: ``state_bytes(spec, max_rows)``."""
        self._device = device
        self._ops = device.ops
        self._max_rows = max_rows
        self._shapes = {layer.index: layer.gdn for layer in spec.layers if layer.gdn is not None}
        self._states = {index: _allocate(shape, device, max_rows) for index, shape in self._shapes.items()}
        self._mode = _Mode.IDLE
        self._rows = 0                                        # of the step in progress
        self._waiting: set[int] = set()                       # layers that have not run in it
        self._position = 0                                    # rows that count
        self._pending = 0                                     # the last of them, not applied yet
        self._lent: dict[int, GdnState] = {}                  # of a step in tiles

    @property
    def pending(self) -> int:
        """Rows before the next step's first that its layers have not applied yet: ``StepInputs.pending``."""
        return self._pending

    def begin(self, phase: Phase, rows: int, position: int) -> None:
        """Start a step of ``rows`` rows from ``position``. ``Model.forward`` does; its caller settles or drops."""
        self._check_whole()
        assert self._mode is _Mode.IDLE, f"begin while {self._mode.value}"
        assert position == self._position, f"a step at position {position} on a state at {self._position}"
        if phase is Phase.DECODE:
            assert 0 < rows <= self._max_rows, f"a step of {rows} rows on rings for {self._max_rows}"
        else:
            assert rows > 0, f"a prefill of {rows} rows"
            assert self._pending == 0, "prefill with pending rows: flush first"
        self._mode = _Mode.STEPPING if phase is Phase.DECODE else _Mode.PREFILLING
        self._rows = rows
        self._waiting = set(self._shapes)

    def begin_tiles(self, rows: int, position: int, rings: Mapping[int, Mapping[str, Buffer]]) -> None:
        """Start a decode step of many rows, which run in tiles (``tile``); nothing may be pending.

        rings  per recurrent layer the arrays of ``lent_rings``, lent until ``settle`` or ``drop``
        """
        self._check_whole()
        assert self._mode is _Mode.IDLE, f"begin while {self._mode.value}"
        assert position == self._position, f"a step at position {position} on a state at {self._position}"
        assert self._pending == 0, "a step in tiles with pending rows: flush first"
        self._lent = {
            index: GdnState(state=state.state, **rings[index]) for index, state in self._states.items()
        }
        for index, lent in self._lent.items():
            self._copy_inputs(index, self._states[index].ring_x, lent.ring_x, position)
        self._mode, self._rows = _Mode.TILED, rows

    def tile(self, first_row: int) -> DraftStates:
        """The states as a tile of the step in progress sees them."""
        assert self._mode is _Mode.TILED, f"a tile while {self._mode.value}"
        return DraftStates(self._ops, self._shapes, self._lent, self._position + first_row, first_row)

    def run_layer(self, index: int, y: Buffer, weights: GdnWeights, out: Buffer) -> None:
        """Mix the step's rows in layer ``index``: ``Ops.gdn_decode`` or ``Ops.gdn_prefill`` with this layer's state."""
        mode, shape, state, position = self._mode, self._shapes[index], self._states[index], self._position
        assert mode in (_Mode.STEPPING, _Mode.PREFILLING), f"a layer runs while {mode.value}"
        assert index in self._waiting, f"layer {index} runs twice in a step"
        self._mode = _Mode.BROKEN  # and so it stays if the operation fails
        if mode is _Mode.STEPPING:
            self._ops.gdn_decode(y, weights, shape, state, out, position=position, pending=self._pending)
        else:
            self._ops.gdn_prefill(y, weights, shape, state, out, position=position)
        self._waiting.discard(index)
        self._mode = mode

    def draft(self, number: int) -> DraftStates:
        """The states as row ``number`` of a draft sees them, within a step that has begun: nothing is stored."""
        assert self._mode is _Mode.STEPPING, f"a draft while {self._mode.value}"
        return DraftStates(self._ops, self._shapes, self._states, self._position + number, self._pending + number)

    def launched(self, ran: bool) -> None:
        """The step in progress was recorded, or launched from a recording: its layers all ``ran``, or none did."""
        assert self._mode in (_Mode.STEPPING, _Mode.BROKEN), f"a launch while {self._mode.value}"
        self._mode = _Mode.STEPPING
        self._waiting = set() if ran else set(self._shapes)

    def settle(self, keep: int) -> None:
        """End the step: its rows [0, keep) count, the others never were. A prefill keeps all of its rows."""
        self._check_whole()
        if self._mode is _Mode.TILED:
            self._settle_tiles(keep)
            return
        assert self._mode in (_Mode.STEPPING, _Mode.PREFILLING), f"settle while {self._mode.value}"
        assert not self._waiting, f"settle before layers {sorted(self._waiting)} ran"
        if self._mode is _Mode.STEPPING:
            assert 0 <= keep <= self._rows, f"{keep} of {self._rows} rows kept"
            self._pending = keep
        else:
            assert keep == self._rows, f"{keep} of {self._rows} rows of a prefill kept"
        self._position += keep
        self._mode = _Mode.IDLE

    def drop(self) -> None:
        """Abandon the step in progress, if there is one, wherever it stopped. Raises nothing: a failure breaks."""
        untouched = len(self._waiting) == len(self._shapes)
        if self._mode is _Mode.PREFILLING:
            self._mode = _Mode.IDLE if untouched else _Mode.BROKEN
        elif self._mode is _Mode.STEPPING:
            self._mode = _Mode.IDLE
            if not untouched:
                with suppress(Exception):
                    self._apply_pending(self._waiting)
        elif self._mode is _Mode.TILED:
            self._mode, self._lent = _Mode.IDLE, {}

    def flush(self) -> None:
        """Apply all pending rows now: before a prefill, a save or a hand-over."""
        self._check_whole()
        assert self._mode is _Mode.IDLE, f"flush while {self._mode.value}"
        self._apply_pending(self._shapes)

    @property
    def snapshot_bytes(self) -> int:
        """Host memory that ``snapshot`` takes."""
        return sum(int(state.state.nbytes) + int(state.ring_x.nbytes) for state in self._states.values())

    def snapshot(self) -> StateSnapshot:
        """A copy on the host. Flushes first; blocks."""
        self.flush()
        layers = {
            index: (self._device.download(state.state), self._device.download(state.ring_x))
            for index, state in self._states.items()
        }
        return StateSnapshot(self._position, layers)

    def take_back(self, snapshot: StateSnapshot) -> None:
        """Be as when the snapshot was made, from any mode. Blocks."""
        self._mode = _Mode.BROKEN   # and so it stays if the operation fails
        for index, (state, ring_x) in snapshot.layers.items():
            self._device.upload(self._states[index].state, state)
            self._device.upload(self._states[index].ring_x, ring_x)
        self._position, self._pending = snapshot.position, 0
        self._mode = _Mode.IDLE

    def restore(self, position: int) -> None:
        """Go on at ``position`` with the state as it is: rows came into the KV history from elsewhere."""
        assert self._mode is _Mode.IDLE, f"restore while {self._mode.value}"
        assert self._pending == 0, "restore with pending rows: flush first"
        self._position = position

    def reset(self) -> None:
        """Back to position 0, from any mode."""
        self._mode = _Mode.BROKEN   # and so it stays if the operation fails
        for state in self._states.values():
            self._ops.clear(state.state)
            self._ops.clear(state.ring_x)  # the convolution of the first rows reads zeros before them
        self._position = self._pending = 0
        self._mode = _Mode.IDLE

    def _settle_tiles(self, keep: int) -> None:
        assert 0 <= keep <= self._rows, f"{keep} of {self._rows} rows kept"
        self._mode = _Mode.BROKEN  # and so it stays if an operation fails
        position = self._position + keep
        if keep > 0:
            for index, lent in self._lent.items():
                self._ops.gdn_apply(self._shapes[index], lent, position=position, pending=keep)
                self._copy_inputs(index, lent.ring_x, self._states[index].ring_x, position)
        self._position, self._lent = position, {}
        self._mode = _Mode.IDLE

    def _copy_inputs(self, index: int, source: Buffer, target: Buffer, position: int) -> None:
        """What the convolution of the row at ``position`` reads of those before it, from ring to ring."""
        for before in range(position - self._shapes[index].conv_taps + 1, position):
            row, place = source[before % len(source)], target[before % len(target)]
            self._device.enqueue_copy(place.view(np.uint8), row.view(np.uint8), self._device.compute)

    def _apply_pending(self, layers: Iterable[int]) -> None:
        """Apply what is pending in ``layers``; the others have."""
        if self._pending:
            self._mode = _Mode.BROKEN  # and so it stays if the operation fails
            for index in layers:
                self._ops.gdn_apply(
                    self._shapes[index], self._states[index], position=self._position, pending=self._pending
                )
            self._pending = 0
            self._mode = _Mode.IDLE

    def _check_whole(self) -> None:
        if self._mode is _Mode.BROKEN:
            raise DeviceError(
                "the recurrent state is lost: a step failed half way through the layers; start the session again"
            )


def _shapes(gdn: GdnShape, max_rows: int) -> dict[str, tuple[int, ...]]:
    """The arrays of a layer's ``GdnState``."""
    return _arrays(gdn, gdn.ring_rows(max_rows))


def _arrays(gdn: GdnShape, slots: int) -> dict[str, tuple[int, ...]]:
    return {
        "state": (gdn.v_heads, gdn.d_k, gdn.d_v),
        "ring_x": (slots, gdn.conv_channels),
        "ring_k": (slots, gdn.k_heads, gdn.d_k),
        "ring_decay": (slots, gdn.v_heads),
        "ring_d": (slots, gdn.v_heads, gdn.d_v),
    }


def lent_rings(gdn: GdnShape, rows: int) -> dict[str, tuple[int, ...]]:
    """Shapes, in float32, of the rings that a layer needs for a step in tiles of that many rows."""
    slots = 1 << (rows + gdn.conv_taps - 2).bit_length()
    return {name: shape for name, shape in _arrays(gdn, slots).items() if name != "state"}


def _allocate(gdn: GdnShape, device: Device, max_rows: int) -> GdnState:
    return GdnState(**{name: device.allocate(shape, _DTYPE) for name, shape in _shapes(gdn, max_rows).items()})
