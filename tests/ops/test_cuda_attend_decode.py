"""Decode attention on the device: close to softmax in float64; the same bits however pages lie and steps are cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvs_core.device.base import AttentionParams
from kvs_core.device.cuda.kernel import address
from kvs_core.device.cuda.ops.attend_decode import AttendDecode, instances, kernels_for, variant_for
from kvs_core.device.cuda.plan import DevicePlan
from kvs_core.device.cuda.tables import STEP_POSITION, STEP_WORDS, PlanLayout
from kvs_core.paging.geometry import GROUP_PAGES, SEGMENT_GROUPS, KvType, PageGeometry, PageOrder, hadamard_block
from kvs_core.paging.schedule import Run
from kvs_core.paging.spans import LEAST_SCRATCH_GROUPS, Chunk, LayerPlan, plan_layer, segments_of
from kvs_core.units import align_up, ceil_div
from tests.ops import kv_pages
from tests.ops.paged import Context, Slots

LOG2_E = math.log2(math.e)
SEGMENT_PAGES = GROUP_PAGES * SEGMENT_GROUPS
# Keys, values and weights are rounded to float16, of values about 1.
CLOSE = 3e-3
TYPES = list(KvType)


def geometry_of(
    k_type: KvType = KvType.F16, v_type: KvType = KvType.F16, *, k_dim: int = 32, v_dim: int | None = None,
    kv_heads: int = 1, page_tokens: int = 32,
) -> PageGeometry:
    """Small ROWS pages, V rotated where it would be."""
    v_dim = v_dim or k_dim
    rotations = hadamard_block(k_type, k_dim, is_key=True), hadamard_block(v_type, v_dim, is_key=False)
    return PageGeometry(page_tokens, kv_heads, k_dim, v_dim, k_type, v_type, *rotations)


@dataclass(frozen=True)
class Case:
    """The last ``rows`` positions of a context of random keys and values, attended to, and a gate for each."""

    geometry: PageGeometry
    tokens: int
    rows: int = 1
    rep: int = 2
    gated: bool = False
    seed: int = 0

    @property
    def position(self) -> int:
        return self.tokens - self.rows

    @property
    def heads(self) -> int:
        return self.rep * self.geometry.kv_heads

    @property
    def params(self) -> AttentionParams:
        geometry = self.geometry
        return AttentionParams(
            self.heads, geometry.kv_heads, geometry.k_dim, geometry.v_dim, self.gated, scale=1.0, rope=None, eps=0.0
        )

    @property
    def context(self) -> Context:
        """A context of the same number of positions in all steps of the same tokens before them."""
        return Context(self.geometry, self.tokens, self.rep, self.seed)

    @property
    def q(self) -> np.ndarray:
        """float16 [T, H, Dk], scaled by log2(e)."""
        return (self.context.q(self.rows) * LOG2_E).astype(np.float16)

    @property
    def y(self) -> np.ndarray:
        """float32 [T, columns + 4]: what rows were projected to, in a wider buffer."""
        rng = np.random.default_rng((self.seed, 9))
        return rng.standard_normal((self.tokens, self.params.columns + 4)).astype(np.float32)[self.position :]

    def pages(self) -> np.ndarray:
        """uint8 [pages, page_bytes], zeros behind the last row."""
        pages = self.context.pages()
        if self.geometry.order is PageOrder.FRAGMENTS:
            return np.stack([kv_pages.pack(page, self.geometry.kv_heads) for page in pages])
        return pages

    def expected(self) -> np.ndarray:
        """float64 [T, H * Dv]"""
        out = self.context.expected(self.q.astype(np.float64) / LOG2_E)
        block = self.geometry.v_rotation
        if block:
            out = (out.reshape(*out.shape[:2], -1, block) @ hadamard(block)).reshape(out.shape)
        if self.gated:
            dim = self.geometry.k_dim
            gate = self.y[:, : self.params.q_columns].reshape(self.rows, self.heads, 2 * dim)[..., dim:]
            out = out / (1 + np.exp(-gate.astype(np.float64)))
        return out.reshape(self.rows, -1)


def hadamard(block: int) -> np.ndarray:
    """The orthonormal matrix in Sylvester's order."""
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / math.sqrt(2)
    return matrix


def query_buffer(case: Case) -> np.ndarray:
    """q as ``write_kv`` leaves it: float16 [G, T * R rounded up to 8, Dk], zeros beyond."""
    geometry, columns = case.geometry, case.rows * case.rep
    out = np.zeros((geometry.kv_heads, align_up(columns, 8), geometry.k_dim), np.float16)
    by_head = case.q.reshape(case.rows, geometry.kv_heads, case.rep, -1).swapaxes(0, 1)
    out[:, :columns] = by_head.reshape(geometry.kv_heads, columns, -1)
    if geometry.order is PageOrder.FRAGMENTS:
        out = np.ascontiguousarray(out[..., kv_pages.query_order()])
    return out


@dataclass
class Recorder:
    """A launcher that may play an older or smaller GPU, and keeps what it launched."""

    real: Any
    arch: int = 0
    sm_count: int = 0
    shared_bytes: int = 0
    launched: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arch = self.arch or self.real.arch
        self.sm_count = self.sm_count or self.real.sm_count
        self.shared_bytes = self.shared_bytes or self.real.shared_bytes

    def launch(self, *args: Any, **kwargs: Any) -> None:
        self.launched.append((args, kwargs))
        self.real.launch(*args, **kwargs)

    def replay(self) -> None:
        for args, kwargs in self.launched:
            self.real.launch(*args, **kwargs)


class Attention:
    """A layer's decode attention on a device, in scratch that holds NaN before."""

    def __init__(self, lab: Any, case: Case, plan: LayerPlan, *, groups: int, most_pages: int = 0, **gpu: int) -> None:
        self.lab, self.case = lab, case
        geometry, rows, heads = case.geometry, case.rows, case.heads
        self.launcher = Recorder(lab.launcher, **gpu)
        context = lab.context(rows, position=case.position)
        context.launcher = self.launcher
        self.step = context.step
        self.forms = context.forms
        self.ops = AttendDecode(context)
        width = (rows, heads, geometry.v_dim + 2)
        most_pages = max(most_pages, plan.pages)
        self.scratch = lab.empty((groups, *width), np.float32)
        self.segments = lab.empty((segments_of(most_pages), *width), np.float32)
        self.out = lab.empty((rows, heads * geometry.v_dim), np.float32)
        self.y, self.q = lab.array(case.y), lab.array(query_buffer(case))
        self.layout = PlanLayout(most_pages, len(plan.calls))
        self.table = lab.array(self._words(plan))

    def _words(self, plan: LayerPlan) -> np.ndarray:
        words = np.full(self.layout.words, -1, np.int32)
        self.layout.fill(plan, words)
        return words

    def run(self, plan: LayerPlan, slots: Slots) -> np.ndarray:
        """float32 [T, H * Dv]"""
        lab, ops, params, geometry = self.lab, self.ops, self.case.params, self.case.geometry
        loaded = DevicePlan.at(address(self.table), self.layout, plan)
        pools = []
        for number, call in enumerate(plan.calls):
            slots.arrive(call.run)
            pools.append(lab.array(slots.pool))
            ops.attend_decode(self.q, params, pools[-1], geometry, loaded, number, self.scratch)
            if call.folds:
                ops.fold(params, loaded, number, self.scratch, self.segments)
            if call.last:
                slots.leave(call.run)
        ops.finish_decode(self.y, params, geometry, loaded, self.scratch, self.segments, self.out)
        result = self.result()
        assert all(pool.flags.c_contiguous for pool in pools)   # they live until the launches are done
        return result

    def result(self) -> np.ndarray:
        out = self.lab.host(self.out)
        form = self.forms.get(address(self.out))
        return out if form is None else opened_records(out, self.case.rows, self.case.heads)


def opened_records(out: np.ndarray, rows: int, blocks: int) -> np.ndarray:
    """float32 [T, 256 * blocks] of activation records (``cuda_src/common/quant256.cuh``)."""
    records = out.reshape(-1).view(np.uint8)[: blocks * 2 * rows * 320].reshape(blocks, 2, rows, 320)
    o = np.arange(256) % 64
    places = np.arange(256) // 64 * 64 + 16 * (o % 16 // 4) + 8 * (o // 32) + 4 * (o // 16 % 2) + o % 4
    numbers = records[..., :256].view(np.int8)[..., places].astype(np.float32)
    factors = np.ascontiguousarray(records[..., 288:292]).view(np.float32)
    return (numbers * factors).sum(axis=1).swapaxes(0, 1).reshape(rows, -1)


def plain_plan(pages: int, *, groups: int = 0) -> LayerPlan:
    """All pages resident, in slots of another order; a scratch row per group."""
    slots = np.random.default_rng(pages).permutation(pages + 2)[:pages].tolist()
    return plan_layer(slots, [Chunk(range(pages))], scratch_groups=groups or roomy(pages))


def streamed_plan(cuts: Sequence[int], pages: int, groups: int) -> LayerPlan:
    """Pages in runs that end at ``cuts``, all through the same ring; those behind the last cut are resident."""
    runs = [range(*pair) for pair in pairwise([0, *cuts])]
    ring = max(map(len, runs))
    slots: list[int] = []
    chunks = []
    for each in runs:
        run = Run(0, each.start, len(each), ring - len(each))
        slots += list(run.slots)
        chunks.append(Chunk(each, run))
    resident = range(cuts[-1], pages)
    chunks.append(Chunk(resident))
    slots += list(range(ring + len(resident), ring, -1))
    return plan_layer(slots, chunks, scratch_groups=groups)


def roomy(pages: int) -> int:
    """Scratch rows that let every group wait for the end."""
    return max(LEAST_SCRATCH_GROUPS, ceil_div(pages, GROUP_PAGES))


def attend(lab: Any, case: Case, plan: LayerPlan | None = None, *, groups: int = 0, **gpu: int) -> np.ndarray:
    """float32 [T, H * Dv]"""
    pages = case.pages()
    plan = plan or plain_plan(len(pages))
    attention = Attention(lab, case, plan, groups=groups or roomy(len(pages)), **gpu)
    return attention.run(plan, Slots(pages, plan, spare=1))


def check_close(lab: Any, case: Case) -> np.ndarray:
    """The result, after a look at its errors."""
    got, expected = attend(lab, case), case.expected()
    error = np.abs(got - expected).max()
    assert error < CLOSE, f"error {error:.2e} of values up to {np.abs(expected).max():.2e}"
    return got


def same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


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
    (256, 128, 1, 1, 3, 128), (16, 48, 1, 16, 8, 32),
]
MORE_SHAPES = [
    (64, 64, 8, 4, 8, 256), (128, 128, 8, 4, 1, 256), (128, 128, 8, 4, 8, 256), (256, 256, 2, 8, 8, 256),
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


def folded(lab: Any, acc: np.ndarray, m: np.ndarray, l: np.ndarray) -> np.ndarray:
    """What ``finish`` makes of partials of groups, for two rows.   acc [groups, 2, 32]; m, l [groups, 2]; result [2, 32]"""
    case = Case(geometry_of(), 2, rows=2, rep=1)
    groups = len(acc)
    plan = plain_plan(GROUP_PAGES * groups, groups=max(LEAST_SCRATCH_GROUPS, groups))
    attention = Attention(lab, case, plan, groups=groups)
    order = np.empty(groups, int)   # of the scratch rows
    order[[fold.scratch_row for fold in plan.last_folds]] = range(groups)
    values = np.concatenate([acc[order].ravel(), np.stack([m, l], axis=-1)[order].ravel()])
    put(lab, attention.scratch, values.reshape(attention.scratch.shape))
    loaded = DevicePlan.at(address(attention.table), attention.layout, plan)
    attention.ops.finish_decode(
        attention.y, case.params, case.geometry, loaded, attention.scratch, attention.segments, attention.out
    )
    return attention.result()


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


@pytest.mark.parametrize("groups", [2, SEGMENT_GROUPS + 1])
def test_nothing_leaves_no_trace(lab: Any, groups: int) -> None:
    """Partials of groups of which a row sees nothing change no bit, the sign of a zero included."""
    acc = np.zeros((groups, 2, 32), np.float32)
    m, l = np.full((groups, 2), -1e20, np.float32), np.zeros((groups, 2), np.float32)
    acc[0] = np.random.default_rng(0).standard_normal((2, 32))
    acc[0, :, ::4] = -0.0
    m[0], l[0] = 3.5, 40.0
    same_bits(folded(lab, acc, m, l), folded(lab, acc[:1], m[:1], l[:1]))


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
            alone = Case(case.geometry, case.position + first + width, width, case.rep, case.gated, case.seed)
            same_bits(attend(lab, Part(alone, case)), together[first : first + width])


class Part:
    """Some rows of a case as one of their own: its keys, values, queries and gates up to there."""

    def __init__(self, part: Case, whole: Case) -> None:
        self._part, self._whole = part, whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    @property
    def _first(self) -> int:
        return self._part.position - self._whole.position

    @property
    def q(self) -> np.ndarray:
        return self._whole.q[self._first : self._first + self._part.rows]

    @property
    def y(self) -> np.ndarray:
        return self._whole.y[self._first : self._first + self._part.rows]

    def pages(self) -> np.ndarray:
        case, geometry = self._part, self._part.geometry
        pages = self._whole.context.pages(case.tokens)
        if geometry.order is PageOrder.FRAGMENTS:
            return np.stack([kv_pages.pack(page, geometry.kv_heads) for page in pages])
        return pages


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
    pool = Slots(pages, plan, spare=1).pool
    step = np.zeros(STEP_WORDS, np.int32)
    step[STEP_POSITION] = short.position
    put(lab, attention.step, step)
    loaded = DevicePlan.at(address(attention.table), attention.layout, short_plan)
    buffer = lab.array(pool)
    attention.ops.attend_decode(attention.q, long.params, buffer, geometry, loaded, 0, attention.scratch)
    attention.ops.finish_decode(
        attention.y, long.params, geometry, loaded, attention.scratch, attention.segments, attention.out
    )
    step[STEP_POSITION] = long.position
    put(lab, attention.step, step)
    put(lab, attention.table, attention._words(plan))
    attention.launcher.replay()
    same_bits(attention.result(), fresh)


def put(lab: Any, buffer: Any, values: np.ndarray) -> None:
    """Overwrite a buffer where it lies."""
    buffer[...] = lab.array(values)
    lab.host(buffer)


def test_large_scores(lab: Any) -> None:
    """Scores far apart neither overflow nor vanish: the largest takes all."""
    case = Case(geometry_of(KvType.F32, KvType.F32), 100, rows=2)
    large = replace(case, seed=3)
    context = large.context
    q = (40 * context.q(2)).astype(np.float16)

    class Large(Part):
        @property
        def q(self) -> np.ndarray:
            return q

    got = attend(lab, Large(large, large))
    expected = context.expected(q.astype(np.float64) / LOG2_E).reshape(2, -1)
    assert np.abs(got - expected).max() < 0.02, np.abs(got - expected).max()


def test_scores_below_everything(lab: Any) -> None:
    """Keys that all score far below zero still weigh: the scale is their own maximum's."""
    geometry = geometry_of(KvType.F32, KvType.F32)
    case = Case(geometry, 40)
    context = case.context
    context.k[...] = 300
    q = np.full((1, 2, 32), -6, np.float16)

    class Low(Part):
        @property
        def q(self) -> np.ndarray:
            return q

        def pages(self) -> np.ndarray:
            return context.pages()

    got = attend(lab, Low(case, case))
    expected = context.expected(q.astype(np.float64) / LOG2_E).reshape(1, -1)
    assert np.abs(got - expected).max() < CLOSE, np.abs(got - expected).max()


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
