"""Partials of decode attention merge as float64 has it, and those that hold nothing leave no trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvs_core.paging.geometry import GROUP_PAGES, SEGMENT_GROUPS, KvType
from kvs_core.paging.spans import LEAST_SCRATCH_GROUPS
from tests.ops.decode_rig import Attention, Case, attend, geometry_of, plain_plan, put, same_bits, streamed_plan

SEGMENT_PAGES = GROUP_PAGES * SEGMENT_GROUPS


def folded(lab: Any, acc: np.ndarray, m: np.ndarray, l: np.ndarray) -> np.ndarray:
    """What ``finish`` makes of partials, for two rows: [2, 32].   acc [groups, 2, 32]; m, l [groups, 2]"""
    case = Case(geometry_of(), 2, rows=2, rep=1)
    groups = len(acc)
    plan = plain_plan(GROUP_PAGES * groups, groups=max(LEAST_SCRATCH_GROUPS, groups))
    attention = Attention(lab, case, plan, groups=groups)
    order = np.empty(groups, int)   # of the scratch rows
    order[[fold.scratch_row for fold in plan.last_folds]] = range(groups)
    values = np.concatenate([acc[order].ravel(), np.stack([m, l], axis=-1)[order].ravel()])
    put(lab, attention.scratch, values.reshape(attention.scratch.shape))
    return attention.finish(plan)


@pytest.mark.parametrize("groups", [1, SEGMENT_GROUPS, 17 * SEGMENT_GROUPS + 3, 40 * SEGMENT_GROUPS])
def test_folding(lab: Any, groups: int) -> None:
    """Partials of any number of groups merge as float64 has it: in one round of segments, two and three."""
    rng = np.random.default_rng(groups)
    acc = rng.standard_normal((groups, 2, 32)).astype(np.float32)
    m, l = rng.uniform(-9, 9, (groups, 2)).astype(np.float32), rng.uniform(1, 300, (groups, 2)).astype(np.float32)
    weights = np.exp2(m.astype(np.float64) - m.max(axis=0))
    expected = (acc * weights[..., None]).sum(axis=0) / (l * weights).sum(axis=0)[:, None]
    error = np.abs(folded(lab, acc, m, l) - expected).max() / np.abs(expected).max()
    assert error < 1e-5, f"relative error {error:.2e}"


@pytest.mark.parametrize("groups", [3, SEGMENT_GROUPS + 1])
def test_nothing_leaves_no_trace(lab: Any, groups: int) -> None:
    """Partials of groups of which a row sees nothing change no bit, the sign of a zero included."""
    acc = np.zeros((groups, 2, 32), np.float32)
    m, l = np.full((groups, 2), -1e20, np.float32), np.zeros((groups, 2), np.float32)
    acc[:2] = np.random.default_rng(0).standard_normal((2, 2, 32))
    acc[:2, :, ::4] = -0.0
    acc[0, :, ::8] = -1.3e-38   # halved by the second maximum: where denormal numbers are zero, a negative one
    m[0], m[1], l[:2] = 3, 4, 40
    same_bits(folded(lab, acc, m, l), folded(lab, acc[:2], m[:2], l[:2]))


@pytest.mark.parametrize("dim", [32, 64])
def test_early_folds_have_the_bits_of_late_ones(lab: Any, dim: int) -> None:
    """With less scratch than groups, segments fold as soon as they can; with enough, all at the end."""
    pages = 4 * SEGMENT_PAGES + 6 if lab.on_gpu else 2 * SEGMENT_PAGES + 6
    case = Case(geometry_of(KvType.F16, KvType.Q8_0, k_dim=dim), 32 * pages - 9, rows=2 if lab.on_gpu else 1)
    late = attend(lab, case)
    scarce = LEAST_SCRATCH_GROUPS
    early = plain_plan(pages, groups=scarce)
    assert any(call.folds for call in early.calls)
    same_bits(attend(lab, case, early, groups=scarce), late)
    cuts = [30, SEGMENT_PAGES - 2, SEGMENT_PAGES + 30, SEGMENT_PAGES + 52]
    streamed = streamed_plan(cuts, pages, scarce)
    assert sum(bool(call.folds) for call in streamed.calls) > 1
    same_bits(attend(lab, case, streamed, groups=scarce), late)
