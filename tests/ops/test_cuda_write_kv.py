"""Projected rows become the queries, keys and values that the host makes of them, in their pages' bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kvs_core.device.cuda.kernel import address
from kvs_core.device.cuda.ops.embed import Rope
from kvs_core.device.cuda.ops.write_kv import LOG2_E, WriteKv
from kvs_core.device.cuda.plan import DevicePlan
from kvs_core.device.cuda.tables import PlanLayout
from kvs_core.device.host.ops import basic, kv_codec
from kvs_core.device.operands import AttentionParams, RopeTable
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import KvType, PageGeometry, PageOrder, hadamard_block
from kvs_core.paging.spans import Chunk, LayerPlan
from kvs_core.units import align_up
from tests.ops import kv_pages
from tests.ops.kv_rows import ROWS
from tests.reference import kv_fragments

POISON = 0xFF
TYPES = list(KvType)
PHASES = pytest.mark.parametrize("phase", Phase)
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """An attention layer and a step of T rows from ``position`` on."""

    geometry: PageGeometry
    heads: int
    table: RopeTable
    position: int
    y: np.ndarray
    gated: bool = False
    q_norm: np.ndarray | None = None
    k_norm: np.ndarray | None = None
    v_norm: bool = False
    shares: bool = False

    @property
    def params(self) -> AttentionParams:
        """The layer, all but what lies on a device."""
        return AttentionParams(
            self.heads, self.geometry.kv_heads, self.geometry.k_dim, self.geometry.v_dim, self.gated,
            scale=self.geometry.k_dim**-0.5, rope=None, eps=EPS, v_norm=self.v_norm, shares=self.shares,
        )

    def rows(self, some: slice) -> Case:
        """The step of some of the rows."""
        return replace(self, y=self.y[some], position=self.position + some.start)

    @property
    def pages(self) -> int:
        """Pages up to the last row."""
        return self.geometry.pages_of(self.position + len(self.y))

    @property
    def slots(self) -> list[int]:
        """A slot of its own for every page, the last one first."""
        return list(range(self.pages, 0, -1))


def make(
    k_type: KvType = KvType.F16, v_type: KvType = KvType.F16, *, k_dim: int = 64, v_dim: int | None = None,
    heads: int = 2, kv_heads: int = 1, rows: int = 2, position: int = 31, n_rot: int | None = None,
    interleaved: bool = False, gated: bool = False, normed: bool = False, page_tokens: int = 32, seed: int = 0,
    order: PageOrder = PageOrder.ROWS,
) -> Case:
    """A case of random rows."""
    rng = np.random.default_rng(seed)
    v_dim = v_dim or k_dim
    geometry = PageGeometry(
        page_tokens, kv_heads, k_dim, v_dim, k_type, v_type,
        hadamard_block(k_type, k_dim, is_key=True), hadamard_block(v_type, v_dim, is_key=False), order,
    )
    n_rot = n_rot or k_dim
    table = RopeTable(10000.0 ** -(np.arange(n_rot // 2) / (n_rot // 2)), interleaved, magnitude=1.1)
    columns = heads * k_dim * (1 + gated) + kv_heads * (k_dim + v_dim)
    norms = [rng.uniform(0.5, 2, k_dim).astype(np.float32) if normed else None for _ in range(2)]
    y = rng.standard_normal((rows, columns)).astype(np.float32)
    return Case(geometry, heads, table, position, y, gated, *norms)


def angles(case: Case) -> np.ndarray:
    """cos and sin of the step's rows: float32 [T, n_rot / 2, 2]."""
    turns = np.multiply.outer(case.position + np.arange(len(case.y), dtype=np.float64), case.table.inv_freq)
    return (case.table.magnitude * np.stack([np.cos(turns), np.sin(turns)], axis=-1)).astype(np.float32)


def expected(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries times log2(e), keys and values [T, heads, D] as the host has them before they are stored."""
    geometry, rows, heads = case.geometry, len(case.y), case.heads
    at = case.params.q_columns
    k_end = at + geometry.kv_heads * geometry.k_dim
    q = case.y[:, :at].reshape(rows, heads, -1)[..., : geometry.k_dim].copy()
    k = case.y[:, at:k_end].reshape(rows, -1, geometry.k_dim).copy()
    v = case.y[:, k_end:].reshape(rows, -1, geometry.v_dim).copy()
    for x, norm in ((q, case.q_norm), (k, case.k_norm)):
        if norm is not None:
            basic.rms_norm(x, norm, x, eps=EPS)
        basic.rope(x, case.position, case.table)
    if case.v_norm:
        basic.rms_norm(v, np.float32(1.0), v, eps=EPS)
    basic.scale(q, geometry.k_dim**-0.5)
    for x, block in ((q, geometry.k_rotation), (k, geometry.k_rotation), (v, geometry.v_rotation)):
        if block:
            basic.hadamard(x, block)
    return q * np.float32(LOG2_E), k, v


def expected_pages(case: Case, before: np.ndarray) -> np.ndarray:
    """The pages in page order, in ROWS order, once the rows are stored in those of ``before``."""
    geometry = case.geometry
    _, k, v = expected(case)
    pages = before.copy()
    for t, (k_row, v_row) in enumerate(
        zip(kv_codec.encode(geometry.k_type, k), kv_codec.encode(geometry.v_type, v), strict=True)
    ):
        page, token = divmod(case.position + t, geometry.page_tokens)
        for head in range(geometry.kv_heads):
            for at, data in (
                (geometry.k_offset(head, token), k_row[head]), (geometry.v_offset(head, token), v_row[head]),
            ):
                pages[page, at : at + len(data)] = data
    return pages


@dataclass(frozen=True)
class Result:
    """q as it lies there, f16; every page in page order, in ROWS order; whether other slots are as before."""

    q: np.ndarray
    pages: np.ndarray
    others_kept: bool


def run(lab: Any, case: Case, phase: Phase) -> Result:
    """What the device makes of a case, in a pool that was all 0xFF."""
    geometry, slots, rows = case.geometry, case.slots, len(case.y)
    context = lab.context(rows, position=case.position, phase=phase)
    plan = LayerPlan(tuple(slots), (Chunk(range(case.pages)),))
    layout = PlanLayout(case.pages, 1)
    words = np.zeros(layout.words, np.int32)
    layout.fill(plan, words)
    table = lab.array(words)
    rope = Rope(case.table, None, lab.array(angles(case)))
    q_norm, k_norm = (None if norm is None else lab.array(norm) for norm in (case.q_norm, case.k_norm))
    pool = lab.array(np.full((max(slots) + 2, geometry.page_bytes), POISON, np.uint8))
    q = lab.empty((align_up(rows, 8), case.heads, geometry.k_dim), np.float32)
    y = lab.array(case.y)
    WriteKv(context).write_kv(
        y, replace(case.params, rope=rope, q_norm=q_norm, k_norm=k_norm), q, pool, geometry,
        DevicePlan.at(address(table), layout, plan), phase=phase,
    )
    after = lab.host(pool)
    others = np.delete(after, slots, axis=0)
    pages = after[slots]
    if geometry.order is PageOrder.FRAGMENTS:
        pages = np.stack([kv_fragments.unpack(page, geometry.kv_heads) for page in pages])
    return Result(lab.host(q).reshape(-1).view(np.float16), pages, bool((others == POISON).all()))


def untouched(case: Case) -> np.ndarray:
    """Pages in ROWS order of a pool that is all 0xFF."""
    pages = np.full((case.pages, case.geometry.page_bytes), POISON, np.uint8)
    if case.geometry.order is PageOrder.FRAGMENTS:
        pages = np.stack([kv_fragments.unpack(page, case.geometry.kv_heads) for page in pages])
    return pages


def queries(case: Case, q: np.ndarray, phase: Phase) -> np.ndarray:
    """The queries in a q buffer as [T, H, Dk] float32; spare columns must be zero."""
    geometry, rows, heads = case.geometry, len(case.y), case.heads
    if phase is Phase.PREFILL:
        return q[: rows * heads * geometry.k_dim].reshape(rows, heads, -1).astype(np.float32)
    rep = heads // geometry.kv_heads
    columns = align_up(rows * rep, 8)
    kept = q[: geometry.kv_heads * columns * geometry.k_dim].reshape(geometry.kv_heads, columns, -1)
    assert (kept[:, rows * rep :].view(np.uint16) == 0).all(), "spare columns are not zero"
    found = kept[:, : rows * rep].reshape(geometry.kv_heads, rows, rep, -1).swapaxes(0, 1).reshape(rows, heads, -1)
    if geometry.order is PageOrder.FRAGMENTS:
        placed = np.empty_like(found)
        placed[..., kv_pages.query_order()] = found
        found = placed
    return found.astype(np.float32)


def check(lab: Any, case: Case, phase: Phase) -> None:
    """Queries to f16's rounding; pages byte for byte, if the host's and the device's float32 values are the same."""
    result = run(lab, case, phase)
    wanted = expected(case)[0]
    found = queries(case, result.q, phase)
    error = np.abs(found - wanted).max() / np.abs(wanted).max()
    assert error < 6e-4, f"queries are off by {error:.2e} of the largest"
    assert result.others_kept, "a slot of no page was written"
    if case.k_norm is None:
        pages = expected_pages(case, untouched(case))
        wrong = np.argwhere(result.pages != pages)
        assert len(wrong) == 0, f"{len(wrong)} bytes differ, the first (page, byte) at {wrong[0]}: {case.geometry}"


@PHASES
def test_pages_have_the_hosts_bytes_whatever_their_types(lab: Any, phase: Phase) -> None:
    """Keys and values of every type, rotated where the host rotates, across a page's end."""
    size: dict[str, Any] = {}
    if lab.on_gpu:
        size = {"k_dim": 128, "heads": 12, "kv_heads": 4, "rows": 8 if phase is Phase.DECODE else 300}
    for seed, (k_type, v_type) in enumerate(zip(TYPES, TYPES[4:] + TYPES[:4], strict=True)):
        check(lab, make(k_type, v_type, seed=seed, **size), phase)


SHAPES: dict[str, dict[str, Any]] = {
    "48, n_rot 12": {"k_dim": 48, "n_rot": 12},
    "64 interleaved": {"k_dim": 64, "interleaved": True, "k_type": KvType.Q8_0, "v_type": KvType.Q5_1},
    "80, n_rot 20": {"k_dim": 80, "n_rot": 20, "v_type": KvType.BF16},
    "80 whole": {"k_dim": 80, "k_type": KvType.F32},
    "96, n_rot 24, gated": {"k_dim": 96, "n_rot": 24, "gated": True, "v_type": KvType.Q4_1},
    "96 whole, no rotation": {"k_dim": 96, "k_type": KvType.Q4_0, "v_type": KvType.IQ4_NL},
    "128, groups of 3": {"k_dim": 128, "heads": 6, "kv_heads": 2, "rows": 3, "k_type": KvType.Q5_0},
    "192 and 128": {"k_dim": 192, "v_dim": 128, "k_type": KvType.Q8_0, "v_type": KvType.Q8_0},
    "256, n_rot 64, gated": {"k_dim": 256, "n_rot": 64, "gated": True, "k_type": KvType.Q4_0, "v_type": KvType.Q8_0},
    "512": {"k_dim": 512, "n_rot": 128, "k_type": KvType.IQ4_NL, "v_type": KvType.Q5_1},
    "512 plain, n_rot 24": {"k_dim": 512, "n_rot": 24, "k_type": KvType.F32, "v_type": KvType.F16},
    "one row on a page of 96": {"rows": 1, "position": 200, "page_tokens": 96, "heads": 5, "kv_heads": 5},
}


@PHASES
@pytest.mark.parametrize("shape", SHAPES)
def test_heads_of_any_size(lab: Any, phase: Phase, shape: str) -> None:
    """Head dims, partial and whole rotary embeddings of both kinds, gates, groups, page sizes."""
    check(lab, make(**SHAPES[shape]), phase)


@PHASES
def test_fragment_pages_hold_the_same_blocks(lab: Any, phase: Phase) -> None:
    """q8_0 keys and q4_0 values in fragment order are the host's blocks, and no other byte of a page changes."""
    for rows, position in ((1, 77), (3, 254), (8, 1021)) if lab.on_gpu else ((1, 77), (3, 254)):
        case = make(
            KvType.Q8_0, KvType.Q4_0, k_dim=256, n_rot=64, gated=True, page_tokens=256, rows=rows, position=position,
            heads=6, kv_heads=2, order=PageOrder.FRAGMENTS,
        )
        check(lab, case, phase)


@PHASES
def test_norms_come_before_the_rotary_embedding(lab: Any, phase: Phase) -> None:
    """With norms of queries and keys: float32 keys to 2e-6 of the largest, queries to f16's rounding."""
    for head_dim, n_rot in ((64, 64), (80, 40), (256, 64)):
        case = make(KvType.F32, KvType.F32, k_dim=head_dim, n_rot=n_rot, gated=head_dim == 256, normed=True)
        check(lab, case, phase)
        found, _ = zip(*(kv_pages.dequantise(page, case.geometry) for page in run(lab, case, phase).pages), strict=True)
        keys = np.concatenate(found, axis=1)[:, case.position : case.position + len(case.y)].swapaxes(0, 1)
        wanted = expected(case)[1]
        error = np.abs(keys - wanted).max() / np.abs(wanted).max()
        assert error < 2e-6, f"keys are off by {error:.2e} of the largest"


@PHASES
@pytest.mark.parametrize("head_dim", [64, 512])
def test_values_are_normed(lab: Any, phase: Phase, head_dim: int) -> None:
    """Without weights: float32 values to 2e-6 of the largest, and queries and keys as without it."""
    case = make(KvType.F32, KvType.F32, k_dim=head_dim, rows=3, heads=3)
    plain, normed = run(lab, case, phase), run(lab, replace(case, v_norm=True), phase)
    np.testing.assert_array_equal(plain.q, normed.q)
    pages = [list(zip(*(kv_pages.dequantise(page, case.geometry) for page in each.pages), strict=True))
             for each in (plain, normed)]
    np.testing.assert_array_equal(pages[0][0], pages[1][0])
    values = np.concatenate(pages[1][1], axis=1)[:, case.position : case.position + len(case.y)].swapaxes(0, 1)
    wanted = expected(replace(case, v_norm=True))[2]
    assert np.abs(values - wanted).max() / np.abs(wanted).max() < 2e-6


@PHASES
@pytest.mark.parametrize("order", PageOrder)
def test_a_layer_that_shares_stores_nothing(lab: Any, phase: Phase, order: PageOrder) -> None:
    """From queries alone: the same queries, and no byte of a page changes."""
    shape: dict[str, Any] = {"k_dim": 256, "page_tokens": 256, "heads": 6, "kv_heads": 2, "order": order}
    case = make(KvType.Q8_0, KvType.Q4_0, rows=3, **shape)
    alone = replace(case, y=np.ascontiguousarray(case.y[:, : case.params.q_columns]), shares=True)
    found, whole = run(lab, alone, phase), run(lab, case, phase)
    np.testing.assert_array_equal(queries(alone, found.q, phase), queries(case, whole.q, phase))
    np.testing.assert_array_equal(found.pages, untouched(case))
    assert found.others_kept


def test_a_rows_bits_do_not_depend_on_the_others(lab: Any) -> None:
    """A decode step of several rows leaves what steps of one row each leave."""
    shape: dict[str, Any] = {"normed": True, "rows": 8 if lab.on_gpu else 3, "heads": 6, "kv_heads": 2, "position": 250}
    for case in (
        make(KvType.Q5_1, KvType.IQ4_NL, k_dim=64, **shape),
        make(KvType.Q8_0, KvType.Q4_0, k_dim=256, n_rot=64, page_tokens=256, order=PageOrder.FRAGMENTS, **shape),
    ):
        whole = run(lab, case, Phase.DECODE)
        together = queries(case, whole.q, Phase.DECODE)
        for t in range(len(case.y)):
            one = case.rows(slice(t, t + 1))
            alone = run(lab, one, Phase.DECODE)
            np.testing.assert_array_equal(queries(one, alone.q, Phase.DECODE)[0], together[t])
            written = alone.pages != untouched(one)
            assert written.any()
            np.testing.assert_array_equal(alone.pages[written], whole.pages[: one.pages][written])


KINDS = [
    kind for kind in ROWS
    if kind not in ("about the zero of iq4_nl", "tiny", "subnormal")   # a GPU may flush subnormals
]


@pytest.mark.parametrize("kv_type", [kv_type for kv_type in KvType if kv_type is not KvType.F32])
def test_rounding_is_the_hosts(lab: Any, kv_type: KvType) -> None:
    """Values on the edges of a format's rounding, as keys and as values: at position 0 nothing turns them."""
    blocks = 64 if lab.on_gpu else 1
    for kind in KINDS:
        if kv_type is KvType.IQ4_NL and kind == "huge":   # d is NaN, and there is more than one NaN
            continue
        rows = ROWS[kind][: 6 * blocks].reshape(1, -1)
        case = make(kv_type, kv_type, k_dim=64, kv_heads=blocks, heads=blocks, rows=1, position=0)
        plain = replace(case.geometry, k_rotation=0, v_rotation=0)
        table = RopeTable(case.table.inv_freq, interleaved=False)
        check_pages(lab, replace(case, geometry=plain, table=table, y=np.ascontiguousarray(rows)), kind)


def check_pages(lab: Any, case: Case, kind: str) -> None:
    """Pages alone: the queries may be beyond f16."""
    found = run(lab, case, Phase.DECODE).pages
    wrong = np.argwhere(found != expected_pages(case, untouched(case)))
    assert len(wrong) == 0, f"{len(wrong)} bytes of {kind} differ, the first (page, byte) at {wrong[0]}"


@pytest.mark.parametrize("kv_type", TYPES)
def test_no_value_is_too_odd(lab: Any, kv_type: KvType) -> None:
    """Infinite, NaN and too large values spoil no block but their own."""
    case = make(kv_type, kv_type, k_dim=64, rows=5, position=0)
    case = replace(case, geometry=replace(case.geometry, k_rotation=0, v_rotation=0))
    clean = run(lab, case, Phase.DECODE).pages
    y = case.y.copy()
    first_value = y.shape[1] - 64
    for t, odd in enumerate((np.inf, -np.inf, np.nan, 3e38)):
        y[t, first_value + 3 + t] = odd
    y[0, first_value : first_value + 32] = np.inf
    found = run(lab, replace(case, y=y), Phase.DECODE).pages
    spoilt = np.argwhere(found != clean)[:, 1]
    row = case.geometry.v_row_bytes
    at = case.geometry.v_offset(0)
    assert len(spoilt) > 0
    assert set((spoilt - at) // row) <= {0, 1, 2, 3}
    assert ((spoilt - at) % row < row // 2).all()


def test_a_cleared_page_is_zero_and_its_neighbours_stay(lab: Any) -> None:
    """``zero_page`` clears one slot whole."""
    for case in (make(KvType.Q5_0, KvType.Q4_1, k_dim=96), make(KvType.Q8_0, KvType.Q4_0, k_dim=256, page_tokens=64)):
        pool = lab.array(np.full((3, case.geometry.page_bytes), POISON, np.uint8))
        WriteKv(lab.context(1)).zero_page(pool, case.geometry, 1)
        after = lab.host(pool)
        assert (after[1] == 0).all()
        assert (after[[0, 2]] == POISON).all()
