"""Deferred commit: whatever is kept, dropped or broken off, every layer has seen exactly the committed rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.base import GdnShape, GdnState
from kvs_core.errors import DeviceError
from kvs_core.memory.phases import Phase
from kvs_core.models.recurrent import RecurrentState, state_bytes
from kvs_core.models.rope import RopeSpec
from kvs_core.models.spec import LayerKind, LayerSpec, ModelSpec

SHAPE = GdnShape(k_heads=1, v_heads=1, d_k=1, d_v=1, conv_taps=2)
LAYERS = (0, 2, 3)
MAX_ROWS = 8


def fold(value: float, row: float) -> float:
    """A recurrence that remembers every row and their order, in exact small integers."""
    return (value * 31 + row) % 65521


def folded(rows: list[int]) -> float:
    value = 0.0
    for row in rows:
        value = fold(value, row)
    return value


class FakeOps:
    """The recurrent ops on one number: ``fold`` in place of the delta rule. ``fail_in`` raises at that call."""

    def __init__(self) -> None:
        self.fail_in: int | None = None

    def _count_down(self) -> None:
        if self.fail_in is not None:
            self.fail_in -= 1
            if self.fail_in < 0:
                self.fail_in = None
                raise MemoryError

    def gdn_apply(self, _shape: GdnShape, state: GdnState, *, bank: int, pending: int) -> None:
        self._count_down()
        for row in range(pending):
            state.state[...] = fold(state.state.item(), state.bank_x[bank, row, 0])

    def gdn_decode(
        self, qkv: Any, _z: Any, _alpha: Any, _beta: Any, _weights: Any, shape: GdnShape, state: GdnState, out: Any,
        *, bank: int, pending: int,
    ) -> None:
        self.gdn_apply(shape, state, bank=bank, pending=pending)
        value = state.state.item()
        state.bank_x[1 - bank] = np.nan
        for row in range(len(qkv)):
            value = fold(value, qkv[row, 0])
            state.bank_x[1 - bank, row] = qkv[row]
            out[row] = value

    def gdn_prefill(
        self, qkv: Any, _z: Any, _alpha: Any, _beta: Any, _weights: Any, _shape: GdnShape, state: GdnState, out: Any
    ) -> None:
        self._count_down()
        for row in range(len(qkv)):
            state.state[...] = fold(state.state.item(), qkv[row, 0])
            out[row] = state.state


class Rig:
    """A RecurrentState over FakeOps beside the list of rows that count."""

    def __init__(self) -> None:
        self.ops = FakeOps()
        self.allocated: list[np.ndarray] = []
        device: Any = SimpleNamespace(ops=self.ops, allocate=self.allocate)
        layers = tuple(
            LayerSpec(index, LayerKind.RECURRENT, gdn=SHAPE)
            if index in LAYERS
            else LayerSpec(index, LayerKind.FULL, 1, 1, 8, 8, kv_index=0)
            for index in range(4)
        )
        rope = RopeSpec(8, False, 1e4, "none", 1.0, 64, 1.0)
        spec = ModelSpec("fake", "fake", 8, 8, 8, 64, 0, 1e-5, 1.0, rope, layers)
        self.spec = spec
        self.state = RecurrentState(spec, device, MAX_ROWS)
        self.committed: list[int] = []
        self._next_row = 1

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        self.allocated.append(np.zeros(shape, dtype))
        return self.allocated[-1]

    def run(self, phase: Phase, rows: int, layers: int = len(LAYERS)) -> list[int]:
        """Begin a step of new rows and run its first ``layers`` layers, checking what each computes."""
        tokens = list(range(self._next_row, self._next_row + rows))
        self._next_row += rows
        self.state.begin(phase, rows)
        expected = [folded(self.committed + tokens[: row + 1]) for row in range(rows)]
        for index in LAYERS[:layers]:
            out = np.zeros((rows, 1))
            nothing: Any = None
            qkv = np.repeat(np.array(tokens, float)[:, None], SHAPE.conv_channels, axis=1)
            self.state.run_layer(index, qkv, nothing, nothing, nothing, nothing, out)
            assert out[:, 0].tolist() == expected, f"layer {index}"
        return tokens

    def commit(self, tokens: list[int], keep: int) -> None:
        self.state.settle(keep)
        self.committed += tokens[:keep]

    def check_flushed(self) -> None:
        self.state.flush()
        values = [state.state.item() for state in self.state._states.values()]
        assert values == [folded(self.committed)] * len(LAYERS)


@st.composite
def moves(draw: st.DrawFn) -> tuple[Any, ...]:
    kind = draw(st.sampled_from(["step", "abandon", "prefill", "abandon prefill", "flush", "reset"]))
    rows = draw(st.integers(1, MAX_ROWS))
    if kind == "step":
        return kind, rows, draw(st.integers(0, rows))
    if kind == "abandon":
        return kind, rows, draw(st.integers(0, len(LAYERS)))
    return kind, rows, 0


@settings(max_examples=200, deadline=None)
@given(st.lists(moves(), max_size=12))
def test_all_layers_see_exactly_the_committed_rows(sequence: list[tuple[Any, ...]]) -> None:
    """After any legal moves, a step computes with, and a flush stores, the committed rows alone, in every layer."""
    rig = Rig()
    for kind, rows, choice in sequence:
        match kind:
            case "step":
                rig.commit(rig.run(Phase.DECODE, rows), choice)
            case "abandon":
                rig.run(Phase.DECODE, rows, layers=choice)
                rig.state.drop()
            case "prefill":
                rig.state.flush()
                rig.commit(rig.run(Phase.PREFILL, rows), rows)
            case "abandon prefill":
                rig.state.flush()
                rig.run(Phase.PREFILL, rows, layers=0)
                rig.state.drop()
            case "flush":
                rig.check_flushed()
            case "reset":
                rig.state.reset()
                rig.committed = []
    rig.check_flushed()


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_prefill_dropped_between_layers_breaks_the_state(layers: int) -> None:
    """Layers at different positions are never used again; a reset makes the state whole."""
    rig = Rig()
    rig.run(Phase.PREFILL, 5, layers=layers)
    rig.state.drop()
    for use in (lambda: rig.state.begin(Phase.DECODE, 1), rig.state.flush, lambda: rig.state.settle(5)):
        with pytest.raises(DeviceError, match="start the session again"):
            use()
    rig.state.drop()
    rig.state.reset()
    rig.commit(rig.run(Phase.DECODE, 2), 2)
    rig.check_flushed()


@pytest.mark.parametrize("where", ["decode", "prefill", "flush"])
def test_an_operation_that_fails_breaks_the_state(where: str) -> None:
    """A layer that may be half written is not used again, even if the failed step is dropped."""
    rig = Rig()
    if where != "prefill":
        rig.commit(rig.run(Phase.DECODE, 3), 2)
    rig.ops.fail_in = 1
    use = rig.state.flush if where == "flush" else lambda: rig.run(Phase[where.upper()], 2)
    with pytest.raises(MemoryError):
        use()
    rig.state.drop()
    with pytest.raises(DeviceError):
        rig.state.begin(Phase.DECODE, 1)


def test_refused_moves_change_nothing() -> None:
    """Moves outside the machine are refused as bugs, and the step in progress goes on as if they had not been made."""
    rig = Rig()
    for illegal in (
        lambda: rig.state.settle(0),
        lambda: rig.state.begin(Phase.DECODE, MAX_ROWS + 1),
        lambda: rig.state.begin(Phase.DECODE, 0),
    ):
        with pytest.raises(AssertionError):
            illegal()
    rig.commit(rig.run(Phase.DECODE, 4), 3)
    with pytest.raises(AssertionError, match="flush first"):
        rig.state.begin(Phase.PREFILL, 4)
    tokens = rig.run(Phase.DECODE, 2)
    for illegal in (
        lambda: rig.state.begin(Phase.DECODE, 1),
        lambda: rig.state.settle(3),
        lambda: rig.state.settle(-1),
        rig.state.flush,
        lambda: rig.state.run_layer(0, *[np.zeros((2, 1))] * 4, weights=None, out=None),  # type: ignore[arg-type]
    ):
        with pytest.raises(AssertionError):
            illegal()
    rig.commit(tokens, 1)
    rig.check_flushed()


def test_a_step_settles_only_when_every_layer_ran() -> None:
    """Settling in the middle of the layers is a bug; dropping there is not."""
    rig = Rig()
    rig.run(Phase.DECODE, 2, layers=2)
    with pytest.raises(AssertionError, match="before layers"):
        rig.state.settle(1)
    rig.state.drop()
    rig.check_flushed()


def test_bytes_are_those_of_the_buffers() -> None:
    """The size known from the spec is the size that is allocated: per layer a state, a conv row and two banks."""
    rig = Rig()
    # float32 numbers per layer: state 1, conv 3; a bank row has x 3, k 1, decay 1, d 1
    assert state_bytes(rig.spec, MAX_ROWS) == len(LAYERS) * 4 * (1 + 3 + 2 * MAX_ROWS * 6)
    assert state_bytes(rig.spec, MAX_ROWS) == sum(buffer.nbytes for buffer in rig.allocated)
