"""Sliding-window attention on the device: close to softmax in float64 over the window, and not a bit from before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvs_core.device.cuda.cuda_ops import CudaOps
from kvs_core.device.operands import Activation, RopeTable
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import GROUP_PAGES, SEGMENT_GROUPS, KvType, PageGeometry
from tests.ops import kv_pages, prefill_rig
from tests.ops.decode_rig import Case, Recorder, attend, geometry_of, plain_plan, roomy, same_bits, streamed_plan

# Keys, values and weights are rounded to float16, of values about 1.
CLOSE = 3e-3
SEGMENT_PAGES = GROUP_PAGES * SEGMENT_GROUPS
FRAGMENTS = kv_pages.fragments(1)
SMALL = geometry_of(KvType.Q8_0, KvType.F16, k_dim=32)
TILED = geometry_of(KvType.F16, KvType.Q5_1, k_dim=32, page_tokens=128)   # two tiles a page
PREFILL = prefill_rig.geometry_of(KvType.Q8_0, KvType.F16, dim=32, kv_heads=2)


def check_decode(lab: Any, case: Case) -> np.ndarray:
    """Close to the oracle; the same bits where all that no row sees is poison, and where a plan leaves it out."""
    got, spoilt = attend(lab, case), case.pages(spoilt=True)
    error = np.abs(got - case.expected()).max()
    assert error < CLOSE, f"error {error:.2e}"
    same_bits(attend(lab, case, pages=spoilt), got)
    for first in range(GROUP_PAGES, case.first_seen // case.geometry.page_tokens + 1, GROUP_PAGES):
        same_bits(attend(lab, case, plain_plan(len(spoilt), first=first), pages=spoilt), got)
    return got


@pytest.mark.parametrize("window", [1, 5, 31, 32, 33, 7 * 32, 1000])
def test_every_window(lab: Any, window: int) -> None:
    """Windows within a page, of one, of several, and longer than the context."""
    check_decode(lab, Case(SMALL, 32 * 10 + 3, rows=3, window=window))


@pytest.mark.parametrize("rows", range(1, 9))
def test_every_number_of_rows(lab: Any, rows: int) -> None:
    """1 to 8 rows, whose windows begin in two groups."""
    check_decode(lab, Case(SMALL, 32 * 10 + 3, rows, rep=3, window=32 * 6 - 1 + rows // 2))


@pytest.mark.parametrize("window", [1, 60, 64, 100, 128, 129, 300])
def test_pages_of_several_tiles(lab: Any, window: int) -> None:
    """Windows that begin in any tile of a page."""
    check_decode(lab, Case(TILED, 128 * 4 + 70, rows=4, window=window))


@pytest.mark.parametrize(("window", "rows"), [(5, 8), (255, 3), (257, 1), (512, 8), (5000, 2)])
def test_fragments(lab: Any, window: int, rows: int) -> None:
    """FRAGMENTS pages."""
    check_decode(lab, Case(FRAGMENTS, 256 * 5 + 4, rows, rep=6, gated=True, window=window))


def test_a_window_of_the_whole_context_is_none(lab: Any) -> None:
    """From a window as long as the context on, the bits are those without one."""
    for case in (Case(SMALL, 200), Case(FRAGMENTS, 300)):
        whole = attend(lab, case)
        for window in (case.tokens, (1 << 31) - 1):
            same_bits(attend(lab, replace(case, window=window)), whole)


ROW_CASES = [   # rows whose windows begin in a page and the next one, and in a group and the next one
    Case(SMALL, 32 * 9 + 4, rows=8, rep=3, window=32 * 5), Case(TILED, 128 * 2 + 3, rows=8, window=126),
    Case(FRAGMENTS, 256 * 6 + 4, rows=8, rep=6, window=512), Case(FRAGMENTS, 259, rows=7, rep=3, window=2),
]


@pytest.mark.parametrize("case", ROW_CASES, ids=range(len(ROW_CASES)))
def test_rows_do_not_see_each_other(lab: Any, case: Case) -> None:
    """T rows at once have the bits of every smaller number of rows, each time with all before their windows poison."""
    together = attend(lab, case)
    for width in range(1, case.rows) if lab.on_gpu else (1, 3):
        for first in range(0, case.rows - width + 1, 1 if width == 1 else 2):
            part = case.part(first, width)
            same_bits(attend(lab, part, pages=part.pages(spoilt=True)), together[first : first + width])


@pytest.mark.parametrize("geometry", [SMALL, FRAGMENTS], ids=["rows", "fragments"])
def test_tiles_of_a_wide_step_have_windows_of_their_own(lab: Any, geometry: PageGeometry) -> None:
    """Tiles of 8 rows share a plan that begins where the first row's window does and ends with the last row: each has
    the bits of a step of its own."""
    page = geometry.page_tokens
    step = Case(geometry, page * 6 + 9, rows=19, window=page * 2 - 5)   # the second tile's begin in group 1
    pages, expected = step.pages(spoilt=True), step.expected()
    for first in range(0, step.rows, 8):
        tile = step.part(first, min(8, step.rows - first))
        own = attend(lab, tile, pages=tile.pages(spoilt=True))
        assert np.abs(own - expected[first : first + tile.rows]).max() < CLOSE
        same_bits(attend(lab, tile, plain_plan(len(pages)), pages=pages), own)


def test_placing_and_splitting_do_not_matter(lab: Any) -> None:
    """Runs that cut groups anywhere give the bits of one call, from the first page on or from the first group seen."""
    case = Case(SMALL, 32 * 21 - 3, rows=2, rep=3, window=32 * 11)
    whole, spoilt = attend(lab, case), case.pages(spoilt=True)
    for cuts in ([3, 4, 5, 11, 16], [1, 2, 3, 4, 9, 20], [20]):
        same_bits(attend(lab, case, streamed_plan(cuts, 21, roomy(21)), pages=spoilt), whole)
    for cuts in ([9, 11, 16], [20]):
        same_bits(attend(lab, case, streamed_plan(cuts, 21, roomy(21), first=8), pages=spoilt), whole)


def test_plans_begin_in_any_segment(lab: Any) -> None:
    """Over three segments, of which plans leave out none to all but the last, or begin within one."""
    tokens = 32 * (2 * SEGMENT_PAGES + 9) - 5
    pages = 2 * SEGMENT_PAGES + 9
    for window in (40, 32 * SEGMENT_PAGES + 9):
        case = Case(SMALL, tokens, rows=2, window=window)
        whole, spoilt = attend(lab, case), case.pages(spoilt=True)
        assert np.abs(whole - case.expected()).max() < CLOSE
        last = case.first_seen // 32 // GROUP_PAGES * GROUP_PAGES
        for first in (8, SEGMENT_PAGES, last):
            plan = plain_plan(pages, first=first)
            assert plan.segments == 3 - first // SEGMENT_PAGES
            same_bits(attend(lab, case, plan, pages=spoilt), whole)


@pytest.mark.parametrize("case", [ROW_CASES[0], ROW_CASES[1], ROW_CASES[2]], ids=["rows", "tiles", "fragments"])
def test_gpus_do_not_matter(lab: Any, case: Case) -> None:
    """Without bulk copies and with other numbers of multiprocessors: the same bits."""
    whole, spoilt = attend(lab, case), case.pages(spoilt=True)
    for gpu in ({"arch": 80}, {"sm_count": 1}, {"sm_count": 7}):
        same_bits(attend(lab, case, pages=spoilt, **gpu), whole)


def check_prefill(lab: Any, case: prefill_rig.Case, **how: Any) -> None:
    """Close to the oracle; the same bits by page, with poison before all windows, and with groups left out."""
    running, out = prefill_rig.attend(lab, case, **how)
    error = np.abs(out - case.expected()).max()
    assert error < prefill_rig.CLOSE, f"error {error:.2e}"
    pages = len(case.pages)
    first = case.first_seen // case.geometry.page_tokens // GROUP_PAGES * GROUP_PAGES
    each = [range(page, page + 1) for page in range(first, pages)]
    for calls in ([range(pages)], [range(first, pages)], each):
        for one, other in zip(
            prefill_rig.attend(lab, case, spoilt=case.first_seen, calls=calls, **how), (running, out), strict=True
        ):
            same_bits(one, other)


@pytest.mark.parametrize("window", [1, 5, 31, 32, 33, 7 * 32, 1000])
@pytest.mark.parametrize("per_kv_head", [1, 3])
def test_prefill_of_every_window(lab: Any, window: int, per_kv_head: int) -> None:
    """Fewer rows than the window has keys and more, in one block of queries and several."""
    for rows, position in ((7, 300), (150, 200), (90, 0)):
        check_prefill(lab, prefill_rig.Case(PREFILL, rows, position, per_kv_head, window=window))


@pytest.mark.parametrize("window", [0, 1, 33, 200])
@pytest.mark.parametrize("geometry", [PREFILL, FRAGMENTS], ids=["rows", "fragments"])
def test_sums_of_prefill(lab: Any, geometry: PageGeometry, window: int) -> None:
    """ln of the sum of the weights of each row and head, as float64 has it, for any window."""
    case = prefill_rig.Case(geometry, rows=20, position=270, per_kv_head=3, window=window)
    running, _ = prefill_rig.attend(lab, case)
    ops = CudaOps(lab.context(case.rows, phase=Phase.PREFILL), lab.launcher, lab.array)
    np.testing.assert_allclose(ops.log_sums(ops.prefill_sums(running)), case.log_sums(), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("shared_kib", [227, 64])
def test_prefill_in_every_tiling(lab: Any, shared_kib: int) -> None:
    """Wide heads, whose queries two warps share, and GPUs with less shared memory."""
    geometry = prefill_rig.geometry_of(KvType.Q8_0, KvType.Q4_1, dim=256, page_tokens=64)
    case = prefill_rig.Case(geometry, rows=40, position=330, window=70)
    check_prefill(lab, case, shared_bytes=shared_kib << 10)


@pytest.mark.parametrize("shared_kib", [227, 64])
@pytest.mark.parametrize("window", [3, 300])
def test_prefill_of_fragments(lab: Any, window: int, shared_kib: int) -> None:
    """Pages in the order of tensor cores."""
    case = prefill_rig.Case(FRAGMENTS, rows=30, position=256 * 4 + 250, per_kv_head=6, gated=True, window=window)
    check_prefill(lab, case, shared_bytes=shared_kib << 10)


def test_all_windows_of_a_model_are_compiled_ahead(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What layers with a window and without launch is among the kernels that a model with both is prepared with."""
    spy = Recorder(lab.launcher)
    monkeypatch.setattr(lab, "launcher", spy)
    cases = [Case(SMALL, 70, window=window) for window in (0, 40)]
    ops = CudaOps(lab.context(1), lab.launcher.real, lab.array)
    rope = ops.load_rope(RopeTable(np.ones(8), interleaved=False))
    attention = [replace(case.params, rope=rope) for case in cases]
    ready = set(ops.kernels([], [], [], [SMALL] * len(cases), attention, [], Activation.SILU))
    for case in cases:
        attend(lab, case)
        prefill_rig.attend(lab, prefill_rig.Case(SMALL, rows=5, position=60, window=case.window))
    launched = {args[0] for args, _ in spy.launched}
    assert launched <= ready
    for name in ("attend_decode_rows", "attend_prefill"):
        assert {dict(kernel.defines)["WINDOW"] for kernel in launched if kernel.name == name} == {0, 40}
