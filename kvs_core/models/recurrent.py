"""The state of a model's recurrent layers, and which rows of the last step still have to be applied to it.

A step computes its rows on a copy of the state and saves what they would change; the next step, which knows how many
of them were kept, applies those first. So rows can be taken back without a snapshot (deferred commit). Two banks hold
saved rows in turn: a layer reads its pending rows from one and saves its own in the other.

    idle        begin ─> stepping, or prefilling if nothing is pending
                flush ─> idle, nothing pending
    stepping    run_layer, each layer once
                settle(keep), all layers run ─> idle, rows [0, keep) pending, the banks exchanged
                drop ─> idle: the layers that ran have applied what was pending and keep nothing of this step; the
                        others keep what was pending
    prefilling  run_layer, each layer once, stores its state at once
                settle(all rows), all layers run ─> idle
                drop ─> idle if no layer ran, else broken: the layers stand at different positions
    broken      also after an operation failed within a layer: begin, flush and settle raise DeviceError
    any         reset ─> idle at position 0; drop is free in idle and broken
"""

from __future__ import annotations

from enum import Enum
from math import prod

import numpy as np

from kvs_core.device.base import Buffer, Device, GdnShape, GdnState, GdnWeights
from kvs_core.errors import DeviceError
from kvs_core.memory.phases import Phase
from kvs_core.models.spec import ModelSpec


class _Mode(Enum):
    IDLE = "idle"
    STEPPING = "stepping"
    PREFILLING = "prefilling"
    BROKEN = "broken"


MAX_ROWS = 8
"""The widest decode or verify step."""

_DTYPE = np.float32


def state_bytes(spec: ModelSpec, max_rows: int = MAX_ROWS) -> int:
    """Device bytes of the states and banks of a model, the same for every position."""
    shapes = [layer.gdn for layer in spec.recurrent_layers if layer.gdn is not None]
    numbers = sum(prod(shape) for gdn in shapes for shape in _shapes(gdn, max_rows).values())
    return numbers * np.dtype(_DTYPE).itemsize


class RecurrentState:
    """All recurrent layers of one sequence. A model without such layers has an empty one."""

    def __init__(self, spec: ModelSpec, device: Device, max_rows: int = MAX_ROWS) -> None:
        """Allocate zeroed states and row banks beside the arena: ``state_bytes(spec, max_rows)``."""
        self._ops = device.ops
        self._max_rows = max_rows
        self._shapes = {layer.index: layer.gdn for layer in spec.layers if layer.gdn is not None}
        self._states = {index: _allocate(shape, device, max_rows) for index, shape in self._shapes.items()}
        self._mode = _Mode.IDLE
        self._rows = 0                                        # of the step in progress
        self._waiting: set[int] = set()                       # layers that have not run in it
        self._bank = 0                                        # where pending rows lie
        self._pending = dict.fromkeys(self._shapes, 0)        # rows of that bank to apply, per layer

    def begin(self, phase: Phase, rows: int) -> None:
        """Start a step of ``rows`` rows. ``Model.forward`` does; its caller settles or drops."""
        self._check_whole()
        assert self._mode is _Mode.IDLE, f"begin while {self._mode.value}"
        if phase is Phase.DECODE:
            assert 0 < rows <= self._max_rows, f"a step of {rows} rows in banks of {self._max_rows}"
        else:
            assert not any(self._pending.values()), "prefill with pending rows: flush first"
        self._mode = _Mode.STEPPING if phase is Phase.DECODE else _Mode.PREFILLING
        self._rows = rows
        self._waiting = set(self._shapes)

    def run_layer(
        self, index: int, qkv: Buffer, z: Buffer, alpha: Buffer, beta: Buffer, weights: GdnWeights, out: Buffer
    ) -> None:
        """Mix the step's rows in layer ``index``: ``Ops.gdn_decode`` or ``Ops.gdn_prefill`` with this layer's state."""
        mode, shape, state = self._mode, self._shapes[index], self._states[index]
        assert mode in (_Mode.STEPPING, _Mode.PREFILLING), f"a layer runs while {mode.value}"
        assert index in self._waiting, f"layer {index} runs twice in a step"
        self._mode = _Mode.BROKEN  # and so it stays if the operation fails
        if mode is _Mode.STEPPING:
            self._ops.gdn_decode(
                qkv, z, alpha, beta, weights, shape, state, out, bank=self._bank, pending=self._pending[index]
            )
            self._pending[index] = 0
        else:
            self._ops.gdn_prefill(qkv, z, alpha, beta, weights, shape, state, out)
        self._waiting.discard(index)
        self._mode = mode

    def settle(self, keep: int) -> None:
        """End the step: its rows [0, keep) count, the others never were. A prefill keeps all of its rows."""
        self._check_whole()
        assert self._mode in (_Mode.STEPPING, _Mode.PREFILLING), f"settle while {self._mode.value}"
        assert not self._waiting, f"settle before layers {sorted(self._waiting)} ran"
        if self._mode is _Mode.STEPPING:
            assert 0 <= keep <= self._rows, f"{keep} of {self._rows} rows kept"
            self._bank = 1 - self._bank
            self._pending = dict.fromkeys(self._shapes, keep)
        else:
            assert keep == self._rows, f"{keep} of {self._rows} rows of a prefill kept"
        self._mode = _Mode.IDLE

    def drop(self) -> None:
        """Abandon the step in progress, if there is one, wherever it stopped."""
        if self._mode is _Mode.PREFILLING and len(self._waiting) < len(self._shapes):
            self._mode = _Mode.BROKEN
        if self._mode is not _Mode.BROKEN:
            self._mode = _Mode.IDLE

    def flush(self) -> None:
        """Apply all pending rows now: before a prefill, a save or a hand-over."""
        self._check_whole()
        assert self._mode is _Mode.IDLE, f"flush while {self._mode.value}"
        for index, pending in self._pending.items():
            if pending:
                self._mode = _Mode.BROKEN  # and so it stays if the operation fails
                self._ops.gdn_apply(self._shapes[index], self._states[index], bank=self._bank, pending=pending)
                self._pending[index] = 0
                self._mode = _Mode.IDLE

    def reset(self) -> None:
        """Back to position 0, from any mode."""
        for index, state in self._states.items():
            state.state.fill(0)
            state.conv.fill(0)
            self._pending[index] = 0
        self._mode = _Mode.IDLE

    def _check_whole(self) -> None:
        if self._mode is _Mode.BROKEN:
            raise DeviceError(
                "the recurrent state is lost: a step failed half way through the layers; start the session again"
            )


def _shapes(gdn: GdnShape, max_rows: int) -> dict[str, tuple[int, ...]]:
    """The arrays of a layer's ``GdnState``."""
    heads, channels = gdn.v_heads, gdn.conv_channels
    return {
        "state": (heads, gdn.d_k, gdn.d_v),
        "conv": (gdn.conv_taps - 1, channels),
        "bank_x": (2, max_rows, channels),
        "bank_k": (2, max_rows, gdn.k_heads, gdn.d_k),
        "bank_decay": (2, max_rows, heads),
        "bank_d": (2, max_rows, heads, gdn.d_v),
    }


def _allocate(gdn: GdnShape, device: Device, max_rows: int) -> GdnState:
    return GdnState(**{name: device.allocate(shape, _DTYPE) for name, shape in _shapes(gdn, max_rows).items()})
