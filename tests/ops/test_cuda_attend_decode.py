"""Decode attention on the device: close to softmax in float64; the same bits however pages lie and steps are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvs_core.device.cuda.ops.attend_decode import instances, kernels_for, variant_for
from kvs_core.device.cuda.tables import STEP_POSITION, STEP_WORDS
from kvs_core.paging.geometry import GROUP_PAGES, SEGMENT_GROUPS, KvType
from tests.ops import kv_pages
from tests.ops.decode_rig import (
    LOG2_E,
    Attention,
    Case,
    attend,
    geometry_of,
    plain_plan,
    put,
    roomy,
    same_bits,
    streamed_plan,
)
from tests.ops.paged import Context, Slots

SEGMENT_PAGES = GROUP_PAGES * SEGMENT_GROUPS
# Keys, values and weights are rounded to float16, of values about 1.
CLOSE = 3e-3
TYPES = list(KvType)


def check_close(lab: Any, case: Case) -> np.ndarray:
    """The result, after a look at its errors."""
    got, expected = attend(lab, case), case.expected()
    error = np.abs(got - expected).max()
    assert error < CLOSE, f"error {error:.2e} of values up to {np.abs(expected).max():.2e}"
    return got


FRAGMENTS = kv_pages.fragments(1)


@pytest.mark.parametrize("shift", range(len(TYPES)))
def test_every_type(lab: Any, shift: int) -> None:
    """Every type of K, and of V: every pair on a GPU, each once on the stand-in."""
    for number, k_type in enumerate(TYPES):
        if lab.on_gpu or number == shift:
            v_type = TYPES[(number + (shift if lab.on_gpu else 5)) % len(TYPES)]
            check_close(lab, Case(geometry_of(k_type, v_type), 70, rows=3))


SHAPES = [   # Dk, Dv, G, R, T, page tokens
    (64, 64, 2, 3, 5, 64), (80, 80, 1, 1, 2, 32), (96, 96, 1, 4, 8, 96), (128, 64, 1, 8, 2, 32), (32, 256, 1, 2, 1, 64),
    (512, 512, 1, 2, 3, 32), (512, 512, 1, 8, 8, 64),
    (256, 128, 1, 1, 3, 128), (16, 48, 1, 16, 8, 32), (128, 128, 1, 5, 8, 64), (128, 128, 1, 7, 8, 64),
]
MORE_SHAPES = [
    (64, 64, 8, 4, 8, 256), (128, 128, 8, 4, 1, 256), (128, 128, 8, 4, 8, 256), (256, 256, 2, 8, 8, 256),
    (512, 512, 2, 8, 8, 256), (512, 512, 4, 8, 1, 256),
    (80, 80, 32, 1, 8, 256), (96, 96, 32, 1, 3, 64), (64, 64, 3, 3, 7, 256), (256, 256, 1, 16, 8, 128),
]


@pytest.mark.parametrize("shape", SHAPES + MORE_SHAPES, ids=str)
def test_every_shape(lab: Any, shape: tuple[int, ...]) -> None:
    """Heads of K and V of many sizes, few and many query heads, pages of many lengths, one pass and several."""
    if shape in MORE_SHAPES and not lab.on_gpu:
        pytest.skip("slow without a GPU")
    k_dim, v_dim, kv_heads, rep, rows, page_tokens = shape
    v_type = KvType.Q8_0 if v_dim % 64 == 0 else KvType.BF16
    geometry = geometry_of(KvType.F16, v_type, k_dim=k_dim, v_dim=v_dim, kv_heads=kv_heads, page_tokens=page_tokens)
    check_close(lab, Case(geometry, 3 * page_tokens - 7, rows, rep, gated=k_dim == v_dim))


@pytest.mark.parametrize(("rows", "rep"), [(1, 6), (3, 6), (8, 6), (2, 16), (8, 16)])
def test_fragments(lab: Any, rows: int, rep: int) -> None:
    """FRAGMENTS pages, up to two passes of columns and six tiles in one; records come out."""
    tokens = (9000 if rows == 1 else 1500) if lab.on_gpu else 300
    check_close(lab, Case(kv_pages.fragments(4 if lab.on_gpu else 1), tokens, rows, rep, gated=True))


@pytest.mark.parametrize("length", ["one token", "a page", "a segment", "a segment and more", "many segments"])
def test_every_length(lab: Any, length: str) -> None:
    """From one token to 17 segments and more, which finish takes in two rounds."""
    segment = 32 * SEGMENT_PAGES
    tokens = {
        "one token": 1, "a page": 32, "a segment": segment, "a segment and more": segment + 1,
        "many segments": 40 * segment + 100 if lab.on_gpu else 2 * segment + 40,
    }[length]
    check_close(lab, Case(geometry_of(KvType.Q8_0, KvType.Q4_0), tokens))


@pytest.mark.parametrize("tokens", [63, 64, 65, 128, 129, 193])
def test_every_end_of_a_page(lab: Any, tokens: int) -> None:
    """Pages of several tiles, of which the last one ends anywhere."""
    check_close(lab, Case(geometry_of(page_tokens=128), tokens))


ROW_CASES = [   # all rows of a page, rows that begin one, and rows that begin a group
    Case(FRAGMENTS, 262, rows=8, rep=6, gated=True), Case(FRAGMENTS, 259, rows=7, rep=3),
    Case(geometry_of(KvType.Q8_0, KvType.Q5_1, k_dim=64, page_tokens=64), 133, rows=8, rep=3),
    Case(geometry_of(KvType.F16, KvType.BF16, k_dim=32, v_dim=96), 130, rows=6, rep=1),
    Case(geometry_of(KvType.F32, KvType.F32, k_dim=32, v_dim=32), 80, rows=8, rep=9),
]


@pytest.mark.parametrize("case", ROW_CASES, ids=range(len(ROW_CASES)))
def test_rows_do_not_see_each_other(lab: Any, case: Case) -> None:
    """T rows at once have the bits of every smaller number of rows, before the later rows were written."""
    together = attend(lab, case)
    widths = range(1, case.rows) if lab.on_gpu else (1, 2)
    for width in widths:
        for first in range(0, case.rows - width + 1, width if lab.on_gpu else 3):
            same_bits(attend(lab, case.part(first, width)), together[first : first + width])


def test_placing_and_splitting_do_not_matter(lab: Any) -> None:
    """Runs that cut groups anywhere give the bits of one call, in slots that hold poison before and after."""
    case = Case(geometry_of(KvType.Q8_0, KvType.Q8_0, k_dim=64), 32 * 21 - 3, rows=2, rep=3)
    whole = attend(lab, case)
    for cuts in ([3, 4, 5, 11, 16], [1, 2, 3, 4, 9, 20], [20]):
        same_bits(attend(lab, case, streamed_plan(cuts, 21, roomy(21))), whole)


def test_splitting_does_not_matter_to_fragments(lab: Any) -> None:
    """The same for FRAGMENTS pages."""
    case = Case(FRAGMENTS, 256 * 4 + 30, rows=2, rep=6)
    whole = attend(lab, case)
    same_bits(attend(lab, case, streamed_plan([1, 3, 4], 5, roomy(5))), whole)


@pytest.mark.parametrize("case", [ROW_CASES[0], ROW_CASES[2]], ids=["fragments", "rows"])
def test_gpus_do_not_matter(lab: Any, case: Case) -> None:
    """Without bulk copies and with other numbers of multiprocessors: the same bits."""
    whole = attend(lab, case)
    params, geometry = case.params, case.geometry
    old, new = (variant_for(params, geometry, case.rows, arch, 227 << 10) for arch in (80, 90))
    assert dict(old.kernel.defines)["RING"] == 0 < int(dict(new.kernel.defines)["RING"])
    same_bits(attend(lab, case, arch=80), whole)
    same_bits(attend(lab, case, sm_count=1), whole)
    same_bits(attend(lab, case, sm_count=7), whole)


def test_captured_launches_outlive_a_plan(lab: Any) -> None:
    """The launches of a short context, done again after it has grown by groups and a segment, attend to all of it."""
    geometry = geometry_of(KvType.Q8_0, KvType.Q4_0, k_dim=64)
    long = Case(geometry, 32 * (SEGMENT_PAGES + 3) - 5, rows=2)
    short = Case(geometry, 100, rows=2)
    pages = long.pages()
    groups = roomy(len(pages))
    plan, short_plan = plain_plan(len(pages)), plain_plan(geometry.pages_of(short.tokens))
    fresh = attend(lab, long)
    attention = Attention(lab, long, short_plan, groups=groups, most_pages=len(pages))
    step = np.zeros(STEP_WORDS, np.int32)
    step[STEP_POSITION] = short.position
    put(lab, attention.step, step)
    pool, loaded = lab.array(Slots(pages, plan, spare=1).pool), attention.loaded(short_plan)
    attention.ops.attend_decode(attention.q, long.params, pool, geometry, loaded, 0, attention.scratch)
    attention.finish(short_plan)
    step[STEP_POSITION] = long.position
    put(lab, attention.step, step)
    attention.load(plan)
    attention.launcher.replay()
    same_bits(attention.result(), fresh)


def test_large_scores(lab: Any) -> None:
    """Scores far apart neither overflow nor vanish: the largest takes all."""
    case = Case(geometry_of(KvType.F32, KvType.F32), 100, rows=2, sharpness=30)
    error = np.abs(attend(lab, case) - case.expected()).max()
    assert error < 0.02, f"error {error:.2e}"


class Low(Case):
    """Keys that all score about -80,000."""

    @property
    def context(self) -> Context:
        context = super().context
        context.k[...] = 300 + context.k / 10
        return context

    @property
    def q(self) -> np.ndarray:
        return np.full((self.rows, self.heads, self.geometry.k_dim), -6 * LOG2_E, np.float16)


def test_scores_far_below_zero(lab: Any) -> None:
    """Keys that all score far below zero still weigh, against their own maximum."""
    check_close(lab, Low(geometry_of(KvType.F16, KvType.F32), 40))


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100, 120])
def test_every_gpu_has_a_variant(arch: int) -> None:
    """The instances to compile, and a model's for every number of rows, fit the GPU's shared memory."""
    shared = {75: 64, 80: 163, 90: 227, 100: 227}.get(arch, 99) << 10

    class Gpu:
        pass

    gpu: Any = Gpu()
    gpu.arch, gpu.shared_bytes = arch, shared
    assert len(set(instances(arch))) > 30
    for geometry, rep in ((kv_pages.fragments(4), 6), (geometry_of(k_dim=128, kv_heads=8, page_tokens=256), 4)):
        params = Case(geometry, 1, rep=rep).params
        assert len(set(kernels_for(params, geometry, gpu))) == 24
        for rows in range(1, 9):
            variant = variant_for(params, geometry, rows, arch, shared)
            assert variant.shared_bytes <= shared
            assert variant.unit_blocks % geometry.kv_heads == 0
