"""Slots that are lent are nobody's but the borrower's, and steps in tiles beside them are right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvs_core.device.base import StepInputs
from kvs_core.device.operands import AttentionRows
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import GROUP_PAGES, SEGMENT_GROUPS, PageGeometry
from kvs_core.paging.residency import ResidencyMode
from kvs_core.paging.spans import LEAST_SCRATCH_GROUPS
from kvs_core.streaming.layer_kv import AttentionScratch
from kvs_core.units import ceil_div
from tests.streaming.rig import DECODE_ROWS, HEADS, LAYERS, PAGE, PLAIN, PREFILL_ROWS, ROTATED, Pools, Rig
from tests.streaming.traced import TracedDevice
from tests.support.examples import examples

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
CONTEXT = 24 * PAGE


class LendingDevice(TracedDevice):
    """Between ``lend`` and ``take_back`` nobody may touch those places, but for the borrower, on the compute stream."""

    def __init__(self, geometry: PageGeometry, seed: int) -> None:
        super().__init__(geometry, seed)
        self._lent: set[int] = set()

    def lend(self, rig: LendingRig, first_slot: int) -> None:
        """The borrower uses all slots of the pool from that one on."""
        pool = rig.handover.layout.pool
        self.take_back()
        self.touch(pool, range(first_slot, len(pool)))
        start = int(pool.ctypes.data)
        self._lent = {start + slot * rig.geometry.page_bytes for slot in range(first_slot, len(pool))}

    def use(self) -> None:
        """The borrower writes to all that it has."""
        lent, self._lent = self._lent, set()
        super().access("compute", writes=sorted(lent))
        self._lent = lent

    def take_back(self) -> None:
        """The borrower is done, as far as the host knows."""
        self._lent = set()

    def access(
        self, stream: str, *, reads: Sequence[int] = (), writes: Sequence[int] = (), read_rows: int = 0,
        first_row: int = 0,
    ) -> None:
        """See ``TracedDevice``."""
        assert self._lent.isdisjoint([*reads, *writes]), f"{stream} uses a slot that is lent"
        super().access(stream, reads=reads, writes=writes, read_rows=read_rows, first_row=first_row)


class LendingRig(Rig):
    """A rig whose decode steps of more than 8 rows run in tiles, beside slots that are lent."""

    device: LendingDevice

    @property
    def lent(self) -> int:
        """Slots."""
        return int(self.handover.layout.pool.shape[0]) - self.kv.stats().pool_pages

    def wide(self, slots: int, rows: int, keep: int, *, leave_after: int = 2 * LAYERS, seed: int = 0) -> bool:
        """A step in tiles while so many slots, or more, are lent; False if there is no room for it."""
        self.enter(DECODE)
        if not self.kv.can_lend(slots, rows):
            return False
        if not self.kv.can_lend(self.lent, rows):
            self.end_loan()
        before = self.kv.stats().pool_pages
        first = self.kv.lend(slots)
        assert first == len(self.handover.layout.pool) - slots
        assert self.kv.stats().pool_pages == min(before, first)
        self.device.lend(self, self.kv.stats().pool_pages)
        self.step(DECODE, rows, keep, leave_after=leave_after, seed=seed)
        return True

    def narrow(self, phase: Phase, rows: int, keep: int) -> None:
        """A step as usual: nothing is lent in it."""
        self.enter(phase)
        if phase is DECODE:
            self.end_loan()
        assert self.lent == 0
        self.step(phase, rows, keep)

    def end_loan(self) -> None:
        """All slots are the pool's again."""
        self.device.take_back()
        self.kv.end_loan()
        assert self.lent == 0

    def enter(self, phase: Phase) -> None:
        if self.handover.layout.phase is not phase:
            self.device.take_back()   # the arena changes hands
            super().enter(phase)

    def _run(
        self, phase: Phase, inputs: list[tuple[np.ndarray, np.ndarray, np.ndarray]], outputs: np.ndarray, keep: int,
        leave_after: int,
    ) -> bool:
        rows = outputs.shape[1]
        if phase is PREFILL or rows <= DECODE_ROWS:
            return super()._run(phase, inputs, outputs, keep, leave_after)
        spans = [slice(first, min(first + DECODE_ROWS, rows)) for first in range(0, rows, DECODE_ROWS)]
        groups = ceil_div(ceil_div(self.context, PAGE), GROUP_PAGES)
        partial = DECODE_ROWS * HEADS * (self.geometry.v_dim + 2)
        most = min(groups, LEAST_SCRATCH_GROUPS)
        scratch = [
            AttentionScratch(
                most * DECODE_ROWS, np.empty(most * partial, np.float32),
                np.empty(ceil_div(groups, SEGMENT_GROUPS) * partial, np.float32),
            )
            for _ in spans
        ]
        with self.kv.begin(rows, phase) as step:
            first_position = step.first_position
            step.run_tiles(rows, scratch, most)
            self.device.begin_tiles([
                StepInputs(np.zeros(span.stop - span.start, np.int32), first_position + span.start, 0, phase)
                for span in spans
            ])
            for layer, (k, v, q) in enumerate(inputs):
                if leave_after <= 2 * layer:
                    return True
                self.device.use()
                y = np.concatenate([part.reshape(rows, -1) for part in (q, k, v)], axis=1)
                out = outputs[layer].reshape(rows, -1)
                tiles = [
                    AttentionRows(y[span], np.empty((DECODE_ROWS, *q.shape[1:]), np.float32), out[span])
                    for span in spans
                ]
                step.layer(layer).attend_tiles(tiles, self.params[layer], self.device.use_tile)
            if leave_after < 2 * LAYERS:
                return True
            self.device.use()
            step.settle(keep)
        return False


@contextmanager
def lending(
    geometry: PageGeometry = ROTATED, context: int = CONTEXT, pools: Pools | None = None, *, seed: int = 0,
    ring_slots: int = 0, run_pages: int = 0, mode: ResidencyMode = ResidencyMode.ADAPTIVE,
) -> Iterator[LendingRig]:
    """A rig on a device that traces."""
    device = LendingDevice(geometry, seed)
    rig = LendingRig(
        geometry, context, pools or Pools.between(context, 0.3, 0.6), device, ring_slots=ring_slots,
        run_pages=run_pages, mode=mode,
    )
    device.committed_tokens = lambda: rig.kv.cache.committed
    try:
        yield rig
    finally:
        rig.close()


Move = tuple[str, int, int, int]
MOVES = st.one_of(
    st.tuples(st.just("wide"), st.integers(9, 65), st.integers(0, 65), st.integers(1, 24)),
    st.tuples(st.just("wide"), st.integers(9, 65), st.integers(0, 65), st.integers(1, 24)),
    st.tuples(st.just("leave"), st.integers(9, 65), st.integers(0, 2 * LAYERS - 1), st.integers(1, 24)),
    st.tuples(st.just("decode"), st.integers(1, DECODE_ROWS), st.integers(0, DECODE_ROWS), st.just(0)),
    st.tuples(st.just("prefill"), st.integers(1, PREFILL_ROWS), st.integers(0, PREFILL_ROWS), st.just(0)),
    st.tuples(st.just("truncate"), st.integers(0, CONTEXT), st.just(0), st.just(0)),
    st.tuples(st.just("publish"), st.just(0), st.just(0), st.just(0)),
)


def carry_out(rig: LendingRig, move: Move) -> None:
    name, first, second, slots = move
    rows = min(first, rig.context - rig.committed)
    if name == "truncate":
        rig.truncate(min(first, rig.committed))
    elif name == "publish":
        rig.kv.publish_dirty()
    elif rows > 0 and name in ("decode", "prefill"):
        rig.narrow(Phase(name), rows, min(rows, second))
    elif rows > DECODE_ROWS and name == "wide":
        rig.wide(slots, rows, min(rows, second))
    elif rows > DECODE_ROWS:
        rig.wide(slots, rows, 0, leave_after=second)


@settings(max_examples=examples(25))
@given(
    geometry=st.sampled_from([ROTATED, PLAIN]), prefill=st.floats(0, 1), decode=st.floats(0, 1),
    ring_slots=st.sampled_from([0, 0, 1, 2, 5]), run_pages=st.sampled_from([0, 0, 1, 3]),
    tokens=st.integers(0, CONTEXT - 80), seed=st.integers(0, 999), moves=st.lists(MOVES, max_size=10),
)
@example(   # a wider loan that leaves too little where the context has grown
    geometry=ROTATED, prefill=0.0, decode=0.3, ring_slots=0, run_pages=0, tokens=CONTEXT - 160, seed=0,
    moves=[("wide", 65, 20, 9), *[("wide", 9, 9, 1)] * 8],
)
def test_nobody_touches_what_is_lent(
    geometry: PageGeometry, prefill: float, decode: float, ring_slots: int, run_pages: int, tokens: int, seed: int,
    moves: list[Move],
) -> None:
    """No copy, no kernel and no other move uses a slot while it is lent; before and behind a loan, borrower and pool
    are ordered by fences. All outputs are those of plain attention, and all rows come home."""
    pools = Pools.between(CONTEXT, prefill, decode)
    with lending(geometry, CONTEXT, pools, seed=seed, ring_slots=ring_slots, run_pages=run_pages) as rig:
        rig.prefill(tokens)
        for move in moves:
            carry_out(rig, move)
        rig.publish_all()
        rig.check_history()
        if rig.handover.layout.phase is DECODE:
            rig.end_loan()
        rig.check_frontiers()


def test_what_is_lent_is_what_was_asked_for() -> None:
    """The last slots; a smaller loan within a larger one moves nothing, a larger one grows it."""
    with lending() as rig:
        rig.prefill(CONTEXT - 200)
        rig.narrow(DECODE, 1, 1)
        slots = rig.kv.stats().pool_pages
        assert rig.wide(4, 33, 0)
        assert (rig.lent, rig.kv.stats().streamed_pages_per_step > 0) == (4, True)
        changes = rig.kv.stats().repartitions
        assert rig.wide(2, 9, 0)
        assert (rig.lent, rig.kv.stats().repartitions) == (4, changes)
        assert rig.wide(7, 65, 0)
        assert rig.lent == 7
        assert rig.kv.stats().resident_pages + rig.kv.stats().ring_slots <= slots - 7
        rig.narrow(DECODE, 1, 1)
        assert rig.kv.stats().pool_pages == slots
        rig.end_loan()   # nothing to do
        assert rig.kv.stats().pool_pages == slots


def test_the_ring_is_made_for_usual_steps() -> None:
    """How long attention pauses within a step in tiles says nothing of them."""
    with lending() as rig:
        rig.prefill(CONTEXT - 200)
        rig.narrow(DECODE, 1, 1)
        gap = rig.kv._feedback.gaps[DECODE]
        assert gap.last_s > 0
        assert rig.wide(4, 33, 33)
        assert rig.kv._feedback.gaps[DECODE] == gap


def test_a_phase_change_ends_a_loan() -> None:
    """Whichever phase has the larger pool."""
    for prefill, decode in ((0.1, 0.6), (0.6, 0.3)):
        with lending(pools=Pools.between(CONTEXT, prefill, decode)) as rig:
            rig.prefill(CONTEXT - 200)
            assert rig.wide(4, 20, 11)
            rig.narrow(PREFILL, 30, 30)
            rig.narrow(DECODE, 3, 2)
            assert rig.kv.stats().pool_pages == len(rig.handover.layout.pool)


def test_what_can_be_lent() -> None:
    """Half of the pool; less where its pages must stay, where rows or the context leave no room; and nothing changes by
    asking."""
    pools = Pools(30, 30)
    with lending(pools=pools) as rig:
        rig.prefill(300)
        rig.narrow(DECODE, 1, 1)
        before = rig.kv.stats()
        assert [rig.kv.can_lend(slots, 9) for slots in (0, 1, 15, 16, 30)] == [True, True, True, False, False]
        assert rig.kv.stats() == before
        rig.prefill(700)
        assert [rig.kv.can_lend(1, rows) for rows in (9, CONTEXT - 700, CONTEXT - 699)] == [True, True, False]
    least = Pools.between(CONTEXT, 0.0, 0.0)
    with lending(pools=least) as rig:
        rig.prefill(20 * PAGE - 2)   # the last group ends with the page that is written
        most = [max(slots for slots in range(16) if rig.kv.can_lend(slots, rows)) for rows in (9, 34, 65)]
        assert most == [2, 2, 0]
        rig.enter(DECODE)
        for slots, rows in zip(most, (9, 34, 65), strict=True):
            assert rig.wide(slots, rows, 0), "what can be lent is enough"
    with lending(pools=Pools.all_of(CONTEXT), mode=ResidencyMode.RESIDENT) as rig:
        rig.prefill(CONTEXT - 64)
        assert rig.kv.can_lend(2, 32)
        assert not rig.kv.can_lend(3, 32)
        assert not rig.kv.can_lend(1, 64)


def test_tiles_fold_their_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """More groups than a tile's scratch holds: each tile folds what it has, into its own segments."""
    context = 140 * PAGE
    with lending(PLAIN, context, Pools(40, 40), ring_slots=7, run_pages=7) as rig:
        with monkeypatch.context() as patch:
            patch.setattr(Rig, "_check", lambda *parts: None)   # the prompt's outputs are others' matter
            rig.prefill(context - 80)
        for rows, keep in ((65, 3), (20, 20)):
            assert rig.wide(5, rows, keep)
            assert any(call.folds for call in rig.kv.plans.of_tiles(0, LEAST_SCRATCH_GROUPS).plan.calls)


def test_a_lent_slot_that_is_touched_is_seen() -> None:
    """By these tests."""
    with lending() as rig:
        rig.prefill(300)
        assert rig.wide(4, 20, 0)
        with pytest.raises(AssertionError, match="compute uses a slot that is lent"):
            rig.device.touch(rig.handover.layout.pool, [len(rig.handover.layout.pool) - 4])
