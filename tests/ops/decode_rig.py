"""Decode attention as a layer runs it, for tests of its kernels: cases, plans, and a layer's buffers on a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from kvs_core.device.cuda.kernel import address
from kvs_core.device.cuda.ops.attend_decode import AttendDecode
from kvs_core.device.cuda.plan import DevicePlan
from kvs_core.device.cuda.tables import PlanLayout
from kvs_core.device.operands import AttentionParams
from kvs_core.paging.geometry import GROUP_PAGES, SEGMENT_GROUPS, KvType, PageGeometry, PageOrder, hadamard_block
from kvs_core.paging.schedule import Run
from kvs_core.paging.spans import LEAST_SCRATCH_GROUPS, Chunk, LayerPlan, plan_layer
from kvs_core.units import align_up, ceil_div
from tests.ops import kv_pages
from tests.ops.paged import Context, Slots, spoil
from tests.reference import kv_fragments

LOG2_E = math.log2(math.e)


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
    """The last ``rows`` of ``tokens`` positions of random keys and values, attended to, and a gate for each.

    whole      some rows of that case, as a step of their own
    sharpness  factor on the queries
    window     keys that a row sees at most; 0: all up to its own
    """

    geometry: PageGeometry
    tokens: int
    rows: int = 1
    rep: int = 2
    gated: bool = False
    sharpness: float = 1.0
    window: int = 0
    whole: Case | None = None

    def part(self, first: int, rows: int) -> Case:
        """Rows [first, first + rows), before later ones were written."""
        return replace(self, tokens=self.position + first + rows, rows=rows, whole=self)

    @property
    def position(self) -> int:
        """Of row 0."""
        return self.tokens - self.rows

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.rep * self.geometry.kv_heads

    @property
    def params(self) -> AttentionParams:
        """The layer."""
        geometry = self.geometry
        return AttentionParams(
            self.heads, geometry.kv_heads, geometry.k_dim, geometry.v_dim, self.gated, scale=1.0, rope=None, eps=0.0,
            window=self.window,
        )

    @property
    def context(self) -> Context:
        """All keys and values."""
        return Context(self.geometry, (self.whole or self).tokens, self.rep)

    @property
    def q(self) -> np.ndarray:
        """float16 [T, H, Dk], scaled by log2(e)."""
        if self.whole is not None:
            return self._of_whole(self.whole.q)
        return (self.context.q(self.rows) * (self.sharpness * LOG2_E)).astype(np.float16)

    @property
    def y(self) -> np.ndarray:
        """float32 [T, columns + 4]: what rows were projected to, in a wider buffer."""
        if self.whole is not None:
            return self._of_whole(self.whole.y)
        rng = np.random.default_rng(self.tokens)
        return rng.standard_normal((self.rows, self.params.columns + 4)).astype(np.float32)

    def _of_whole(self, rows: np.ndarray) -> np.ndarray:
        assert self.whole is not None
        first = self.position - self.whole.position
        return rows[first : first + self.rows]

    @property
    def first_seen(self) -> int:
        """The first token that a row sees."""
        return max(0, self.position + 1 - self.window) if self.window else 0

    def pages(self, *, spoilt: bool = False) -> np.ndarray:
        """uint8 [pages, page_bytes], zeros behind the last row; ``spoilt``: poison before all that the rows see."""
        pages = self.context.pages(self.tokens)
        if spoilt:
            pages = spoil(pages, self.geometry, self.first_seen)
        if self.geometry.order is PageOrder.FRAGMENTS:
            return np.stack([kv_fragments.pack(page, self.geometry.kv_heads) for page in pages])
        return pages

    def expected(self) -> np.ndarray:
        """float64 [T, H * Dv]"""
        out = self.context.expected(self.q.astype(np.float64) / LOG2_E, self.window)
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
        """See ``Launcher.launch``."""
        self.launched.append((args, kwargs))
        self.real.launch(*args, **kwargs)

    def replay(self) -> None:
        """Everything again, with the same arguments."""
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
        self.segments = lab.empty((ceil_div(most_pages, GROUP_PAGES * SEGMENT_GROUPS), *width), np.float32)
        self.out = lab.empty((rows, heads * geometry.v_dim), np.float32)
        self.y, self.q = lab.array(case.y), lab.array(query_buffer(case))
        self.layout = PlanLayout(most_pages, len(plan.calls))
        self.table = lab.empty(self.layout.words, np.int32)
        self.load(plan)

    def load(self, plan: LayerPlan) -> None:
        """Put a plan into the table."""
        words = np.full(self.layout.words, -1, np.int32)
        self.layout.fill(plan, words)
        put(self.lab, self.table, words)

    def loaded(self, plan: LayerPlan) -> DevicePlan:
        """What stands for it in the ops."""
        return DevicePlan.at(address(self.table), self.layout, plan)

    def run(self, plan: LayerPlan, slots: Slots) -> np.ndarray:
        """float32 [T, H * Dv]"""
        lab, ops, params, geometry = self.lab, self.ops, self.case.params, self.case.geometry
        loaded = self.loaded(plan)
        pools = []
        for number, call in enumerate(plan.calls):
            for run in call.runs if call.first else ():
                slots.arrive(run)
            pools.append(lab.array(slots.pool))
            ops.attend_decode(self.q, params, pools[-1], geometry, loaded, number, self.scratch)
            if call.folds:
                ops.fold(params, loaded, number, self.scratch, self.segments)
            for run in call.runs if call.last else ():
                slots.leave(run)
        result = self.finish(plan)
        assert all(pool.flags.c_contiguous for pool in pools)   # they live until the launches are done
        return result

    def finish(self, plan: LayerPlan) -> np.ndarray:
        """float32 [T, H * Dv] of what the partials hold."""
        case = self.case
        self.ops.finish_decode(
            self.y, case.params, case.geometry, self.loaded(plan), self.scratch, self.segments, self.out
        )
        return self.result()

    def result(self) -> np.ndarray:
        """float32 [T, H * Dv] of what is in ``out``, whatever its form."""
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


def plain_plan(pages: int, *, groups: int = 0, first: int = 0) -> LayerPlan:
    """All pages from ``first`` on resident, in slots of another order; a scratch row per group."""
    slots = np.random.default_rng(pages).permutation(pages + 2)[:pages].tolist()
    chunks = [Chunk(range(first, pages))]
    return plan_layer(slots, chunks, scratch_groups=groups or roomy(pages), partial=first > 0)


def streamed_plan(cuts: Sequence[int], pages: int, groups: int, *, first: int = 0) -> LayerPlan:
    """Pages from ``first`` on in runs that end at ``cuts``, all through the same ring; those behind the last cut are
    resident."""
    runs = [range(*pair) for pair in pairwise([first, *cuts])]
    ring = max(map(len, runs))
    slots = [ring + pages] * first
    chunks = []
    for each in runs:
        run = Run(0, each.start, len(each), ring - len(each))
        slots += list(run.slots)
        chunks.append(Chunk(each, run))
    resident = range(cuts[-1], pages)
    chunks.append(Chunk(resident))
    slots += list(range(ring + len(resident), ring, -1))
    return plan_layer(slots, chunks, scratch_groups=groups, partial=first > 0)


def roomy(pages: int) -> int:
    """Scratch rows that let every group wait for the end."""
    return max(LEAST_SCRATCH_GROUPS, ceil_div(pages, GROUP_PAGES))


def attend(
    lab: Any, case: Case, plan: LayerPlan | None = None, *, groups: int = 0, pages: np.ndarray | None = None, **gpu: int
) -> np.ndarray:
    """float32 [T, H * Dv]; ``pages``: others than the case's."""
    pages = case.pages() if pages is None else pages
    plan = plan or plain_plan(len(pages))
    attention = Attention(lab, case, plan, groups=groups or roomy(len(pages)), **gpu)
    return attention.run(plan, Slots(pages, plan, spare=1))


def same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    """Finite numbers, and the same ones."""
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def put(lab: Any, buffer: Any, values: np.ndarray) -> None:
    """Overwrite a buffer where it lies."""
    buffer[...] = lab.array(values)
    lab.host(buffer)
