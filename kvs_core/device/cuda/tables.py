"""What a step's kernels read from device memory, so that captured work can be replayed: layouts shared with
``cuda_src/common/tables.cuh``.

    step table   int32 [STEP_WORDS]      positions, pending rows, tokens of a decode step
    plan table   int32, one per layer and width of decode step: a header, slots, calls, parts, folds

        header   PLAN_HEADER words: pages, segments, first of the last folds, number of the last folds
        slots    [pages]                  slot of each page
        calls    [calls][4]               first part, parts, first fold, folds
        parts    [parts][4]               scratch row, fresh, first page, pages
        folds    [folds][4]               scratch row, segment, fresh, 0

A table has its places by capacity, not by content: what a captured launch points to stays where it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvs_core.paging.geometry import GROUP_PAGES
from kvs_core.paging.spans import LayerPlan
from kvs_core.units import align_up, ceil_div

STEP_POSITION = 0
"""Word of the step table: position of row 0."""
STEP_ROWS = 1
"""Word: rows of the step."""
STEP_PENDING = 2
"""Word: rows that recurrent layers have not applied yet."""
STEP_STORE = 3
"""Word: 1 if recurrent layers store their state, 0 in a draft."""
STEP_KEPT = 4
"""Word: rows of the last step that were kept."""
STEP_TOKENS = 8
"""First word of a decode step's tokens; a prefill's lie in a buffer of their own."""
STEP_WORDS = 16

PLAN_HEADER = 4


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """Places in a plan table for up to ``pages`` pages in up to ``calls`` calls. In words (int32) from its start."""

    pages: int
    calls: int

    @property
    def groups(self) -> int:
        """Groups of so many pages."""
        return ceil_div(self.pages, GROUP_PAGES)

    @property
    def slots_at(self) -> int:
        """Slots."""
        return PLAN_HEADER

    @property
    def calls_at(self) -> int:
        """Calls; 16-byte aligned, like all that follows."""
        return PLAN_HEADER + align_up(self.pages, 4)

    @property
    def parts_at(self) -> int:
        """Parts: every call may cut a group at each of its ends."""
        return self.calls_at + 4 * self.calls

    @property
    def folds_at(self) -> int:
        """Folds."""
        return self.parts_at + 4 * (self.groups + 2 * self.calls)

    @property
    def words(self) -> int:
        """Of the whole table."""
        return self.folds_at + 4 * self.groups

    def fill(self, plan: LayerPlan, out: np.ndarray) -> None:
        """Write ``plan`` into int32 [words]. Words that no count reaches keep what they held."""
        assert plan.pages <= self.pages, (plan.pages, self.pages)
        assert len(plan.calls) <= self.calls, (len(plan.calls), self.calls)
        out[self.slots_at : self.slots_at + plan.pages] = plan.slots
        calls: list[int] = []
        parts: list[int] = []
        folds: list[int] = []
        for call in plan.calls:
            calls += (len(parts) // 4, len(call.parts), len(folds) // 4, len(call.folds))
            for part in call.parts:
                parts += (part.scratch_row, part.fresh, part.pages.start, len(part.pages))
            for fold in call.folds:
                folds += (fold.scratch_row, fold.segment, fold.fresh, 0)
        out[:PLAN_HEADER] = plan.pages, plan.segments, len(folds) // 4, len(plan.last_folds)
        for fold in plan.last_folds:
            folds += (fold.scratch_row, fold.segment, fold.fresh, 0)
        for at, words in ((self.calls_at, calls), (self.parts_at, parts), (self.folds_at, folds)):
            out[at : at + len(words)] = words
