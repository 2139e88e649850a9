"""Deferred commit: whatever is kept, dropped or broken off, every layer has seen exactly the committed rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.operands import GdnShape, GdnState
from kvs_core.errors import DeviceError
from kvs_core.memory.phases import Phase
from kvs_core.models.recurrent import RecurrentState, state_bytes
from kvs_core.models.rope import RopeSpec
from kvs_core.models.spec import LayerKind, LayerSpec, ModelSpec
from tests.support.examples import examples

SHAPE = GdnShape(k_heads=1, v_heads=1, d_k=1, d_v=1, conv_taps=2)
LAYERS = (0, 2, 3)
MAX_ROWS = 8
SLOTS = SHAPE.ring_rows(MAX_ROWS)


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

    def clear(self, buffer: np.ndarray) -> None:
        buffer.fill(0)

    def gdn_apply(self, _shape: GdnShape, state: GdnState, *, position: int, pending: int) -> None:
        self._count_down()
        for row in range(position - pending, position):
            state.state[...] = fold(state.state.item(), state.ring_x[row % SLOTS, 0])

    def gdn_decode(
        self, y: Any, _weights: Any, shape: GdnShape, state: GdnState, out: Any, *, position: int, pending: int
    ) -> None:
        self.gdn_apply(shape, state, position=position, pending=pending)
        value = state.state.item()
        for row in range(len(y)):
            value = fold(value, y[row, 0])
            state.ring_x[(position + row) % SLOTS] = y[row, 0]
            out[row] = value
        rejectable = np.arange(position, position + MAX_ROWS) % SLOTS
        state.ring_x[rejectable[len(y) :]] = np.nan

    def gdn_prefill(
        self, y: Any, _weights: Any, _shape: GdnShape, state: GdnState, out: Any, *, position: int
    ) -> None:
        self._count_down()
        for row in range(len(y)):
            state.state[...] = fold(state.state.item(), y[row, 0])
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
        spec = ModelSpec("fake", "fake", 8, 8, 8, 64, 64, None, 0, 1e-5, 1.0, rope, layers)
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
        self.state.begin(phase, rows, len(self.committed))
        expected = [folded(self.committed + tokens[: row + 1]) for row in range(rows)]
        for index in LAYERS[:layers]:
            out = np.zeros((rows, 1))
            nothing: Any = None
            y = np.repeat(np.array(tokens, float)[:, None], SHAPE.columns, axis=1)
            self.state.run_layer(index, y, nothing, out)
            assert out[:, 0].tolist() == expected, f"layer {index}"
        return tokens

    def commit(self, tokens: list[int], keep: int, pending: int | None = None) -> None:
        self.state.settle(keep)
        self.committed += tokens[:keep]
        assert self.state.pending == (keep if pending is None else pending)

    def check_flushed(self) -> None:
        self.state.flush()
        assert self.state.pending == 0
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


@settings(max_examples=examples(200), deadline=None)
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
                rig.commit(rig.run(Phase.PREFILL, rows), rows, pending=0)
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
    for use in (lambda: rig.state.begin(Phase.DECODE, 1, 0), rig.state.flush, lambda: rig.state.settle(5)):
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
        rig.state.begin(Phase.DECODE, 1, len(rig.committed))


@pytest.mark.parametrize(("layers", "pending"), [(0, 2), (1, 0), (2, 0), (3, 0)])
def test_layers_agree_on_what_is_pending_after_a_drop(layers: int, pending: int) -> None:
    """A step that stopped between layers leaves the same rows to apply in all of them: none, or all it found."""
    rig = Rig()
    rig.commit(rig.run(Phase.DECODE, 4), 2)
    rig.run(Phase.DECODE, 3, layers=layers)
    rig.state.drop()
    assert rig.state.pending == pending
    rig.commit(rig.run(Phase.DECODE, 2), 1)
    rig.check_flushed()


def test_a_drop_that_fails_breaks_the_state() -> None:
    """It hides no earlier error with its own; the next step says that the state is lost."""
    rig = Rig()
    rig.commit(rig.run(Phase.DECODE, 3), 2)
    rig.run(Phase.DECODE, 1, layers=1)
    rig.ops.fail_in = 1
    rig.state.drop()
    with pytest.raises(DeviceError, match="start the session again"):
        rig.state.begin(Phase.DECODE, 1, 2)


def test_a_launched_step_counts_as_run() -> None:
    """A step whose layers ran from a recording, without a call for each, settles like any other."""
    rig = Rig()
    rig.commit(rig.run(Phase.DECODE, 4), 3)
    rig.state.begin(Phase.DECODE, 2, 3)
    tokens = np.array([[50.0], [51.0]]).repeat(SHAPE.columns, axis=1)
    for state in rig.state._states.values():
        rig.ops.gdn_decode(tokens, None, SHAPE, state, np.zeros((2, 1)), position=3, pending=rig.state.pending)
    rig.state.launched(ran=True)
    rig.commit([50, 51], 1)
    rig.check_flushed()


def test_a_recording_that_fails_changes_nothing() -> None:
    """What was recorded did not run: the step is dropped, and the rows before it are still pending in all layers."""
    rig = Rig()
    rig.commit(rig.run(Phase.DECODE, 3), 2)
    rig.ops.fail_in = 0
    with pytest.raises(MemoryError):
        rig.run(Phase.DECODE, 2)
    rig.state.launched(ran=False)
    rig.state.drop()
    assert rig.state.pending == 2
    rig.commit(rig.run(Phase.DECODE, 2), 1)
    rig.check_flushed()


def test_refused_moves_change_nothing() -> None:
    """Moves outside the machine are refused as bugs, and the step in progress goes on as if they had not been made."""
    rig = Rig()
    for illegal in (
        lambda: rig.state.settle(0),
        lambda: rig.state.begin(Phase.DECODE, MAX_ROWS + 1, 0),
        lambda: rig.state.begin(Phase.DECODE, 0, 0),
        lambda: rig.state.begin(Phase.PREFILL, 0, 0),
        lambda: rig.state.begin(Phase.DECODE, 1, 1),
    ):
        with pytest.raises(AssertionError):
            illegal()
    rig.commit(rig.run(Phase.DECODE, 4), 3)
    with pytest.raises(AssertionError, match="flush first"):
        rig.state.begin(Phase.PREFILL, 4, 3)
    tokens = rig.run(Phase.DECODE, 2)
    for illegal in (
        lambda: rig.state.begin(Phase.DECODE, 1, len(rig.committed)),
        lambda: rig.state.settle(3),
        lambda: rig.state.settle(-1),
        rig.state.flush,
        lambda: rig.state.run_layer(0, np.zeros((2, 1)), weights=None, out=None),  # type: ignore[arg-type]
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
    """The size known from the spec is the size that is allocated: per layer a state and rings."""
    rig = Rig()
    # float32 numbers per layer: state 1; a slot of the rings has x 3, k 1, decay 1, d 1
    assert state_bytes(rig.spec, MAX_ROWS) == len(LAYERS) * 4 * (1 + SLOTS * 6)
    assert state_bytes(rig.spec, MAX_ROWS) == sum(buffer.nbytes for buffer in rig.allocated)
