"""Partition: how the shared pool is divided into the ring and resident pages, and which copies then pass through it."""

from __future__ import annotations

from collections.abc import Sequence

from kvs_core.paging.residency import ResidencyConfig, ResidencyState
from kvs_core.streaming.plans import StepPlans
from kvs_core.streaming.pools import Pools
from kvs_core.streaming.residents import Residents
from kvs_core.streaming.streamer import Streamer


class Partition:
    """Carries out what the policy decides of cuts and ring.

    changes  since the start
    """

    def __init__(
        self, reads: Sequence[int], pools: Pools, residents: Residents, streamer: Streamer, plans: StepPlans
    ) -> None:
        """``reads``: the layer whose pages each attention of a step reads, in order."""
        self.changes = 0
        self._reads = tuple(reads)
        self._pools = pools
        self._residents = residents
        self._streamer = streamer
        self._plans = plans
        self._carried_out: tuple[tuple[int, ...], int] | None = None   # cuts and ring slots

    def change(self, config: ResidencyConfig, state: ResidencyState, pool_slots: int) -> None:
        """Make ring and schedule what ``state`` says, for a pool of so many slots. Nothing to do if they are.

        Each move is complete in itself: an error in between leaves a table that is true, and the next call plans anew.
        """
        table = self._pools.shared
        if self._carried_out == (state.cuts, state.ring_slots) and pool_slots == table.pool_slots:
            return
        self._carried_out = None
        self._plans.rescheduled()
        streamed = [config.streamed(cut) for cut in state.cuts]
        self._residents.evict(lambda page: page.page in streamed[page.layer])
        if state.ring_slots <= table.ring_slots:
            self._replan(streamed, state.ring_slots, config.run_pages_in(state.ring_slots))
            table.resize(ring_slots=state.ring_slots, pool_slots=table.pool_slots)
            self._residents.move_away(ring_slots=state.ring_slots, pool_slots=pool_slots)
            table.resize(ring_slots=state.ring_slots, pool_slots=pool_slots)
        else:
            self._residents.move_away(ring_slots=state.ring_slots, pool_slots=pool_slots)
            table.resize(ring_slots=state.ring_slots, pool_slots=pool_slots)
            self._replan(streamed, state.ring_slots, config.run_pages_in(state.ring_slots))
        self._carried_out = (state.cuts, state.ring_slots)
        self.changes += 1

    def forget(self) -> None:
        """The history will be another: what was copied ahead is of no use, and where copies come from changes."""
        self._streamer.empty()
        self._carried_out = None

    def _replan(self, streamed: Sequence[range], ring_slots: int, run_pages: int) -> None:
        self._streamer.replan([streamed[layer] for layer in self._reads], ring_slots=ring_slots, run_pages=run_pages)
