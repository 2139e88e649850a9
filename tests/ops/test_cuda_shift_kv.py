"""Rows that move to another page have the bytes that the host's op gives them, whatever they are stored as."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvs_core.device.cuda.ops.embed import Rope
from kvs_core.device.cuda.ops.shift_kv import ShiftKv, instances, kernels_for
from kvs_core.device.host.ops import basic, kv_shift, kv_write
from kvs_core.device.operands import AttentionParams, RopeTable
from kvs_core.paging.geometry import KvType, PageGeometry, PageOrder, hadamard_block
from kvs_core.paging.shift import PageMove
from kvs_core.paging.spans import row_spans
from tests.ops.kv_rows import ROWS
from tests.reference import kv_fragments

TYPES = list(KvType)
TURN = -1234


@dataclass(frozen=True)
class Case:
    """A move between pages of a layer, and what the pages hold: uint8 [3, page_bytes], two sources and the target."""

    geometry: PageGeometry
    table: RopeTable
    move: PageMove
    pages: np.ndarray


def make(
    k_type: KvType = KvType.F16, v_type: KvType = KvType.F16, *, k_dim: int = 64, v_dim: int | None = None,
    kv_heads: int = 1, page_tokens: int = 32, n_rot: int | None = None, interleaved: bool = False,
    row: int = 3, rows: int = 9, source_row: int = 27, seed: int = 0, keys: np.ndarray | None = None,
) -> Case:
    """Pages whose rows are random, or have these keys."""
    dice = np.random.default_rng(seed)
    v_dim = v_dim or k_dim
    geometry = PageGeometry(
        page_tokens, kv_heads, k_dim, v_dim, k_type, v_type,
        hadamard_block(k_type, k_dim, is_key=True), hadamard_block(v_type, v_dim, is_key=False),
    )
    n_rot = n_rot or k_dim
    table = RopeTable(10000.0 ** -(np.arange(n_rot // 2) / (n_rot // 2)), interleaved, magnitude=1.1)
    pages = np.zeros((3, geometry.page_bytes), np.uint8)
    tokens = 3 * page_tokens
    k = dice.standard_normal((tokens, kv_heads, k_dim), np.float32) if keys is None else keys
    v = dice.standard_normal((tokens, kv_heads, v_dim), np.float32)
    kv_write.kv_write(k, v, pages, geometry, row_spans(0, tokens, page_tokens, range(3)))
    pages_taken = 1 + (source_row + rows > page_tokens)
    return Case(geometry, table, PageMove(0, row, rows, range(1, 1 + pages_taken), source_row), pages)


def check(lab: Any, case: Case, order: PageOrder = PageOrder.ROWS) -> None:
    """The target has the host's bytes, in rows that move and in others; the sources keep theirs."""
    geometry, move = case.geometry, case.move
    wanted = case.pages.copy()
    sources = list(wanted[: len(move.sources)])
    kv_shift.shift_rows(wanted[2], sources, geometry, case.table, move, positions=TURN)
    assert (wanted[2] != case.pages[2]).any()

    pages = case.pages
    if order is PageOrder.FRAGMENTS:
        pages = np.stack([kv_fragments.pack(page, geometry.kv_heads) for page in pages])
        geometry = PageGeometry(
            geometry.page_tokens, geometry.kv_heads, geometry.k_dim, geometry.v_dim, geometry.k_type, geometry.v_type,
            geometry.k_rotation, geometry.v_rotation, order,
        )
    held = [lab.array(page) for page in pages]   # each between guards
    angles = np.full((2, case.table.n_rot // 2, 2), np.nan, np.float32)
    angles[0] = basic.turn_by(TURN, case.table)
    params = AttentionParams(
        geometry.kv_heads, geometry.kv_heads, geometry.k_dim, geometry.v_dim, False, 1.0,
        Rope(case.table, None, lab.array(angles)), 1e-6,
    )
    ShiftKv(lab.context(1)).shift_rows(held[2], held[: len(move.sources)], params, geometry, move)
    found = np.stack([lab.host(page) for page in held])
    if order is PageOrder.FRAGMENTS:
        found = np.stack([kv_fragments.unpack(page, geometry.kv_heads) for page in found])
    wrong = np.argwhere(found != wanted)
    assert len(wrong) == 0, f"{len(wrong)} bytes differ, the first (page, byte) at {wrong[0]}: {geometry}"


def test_every_type_is_opened_and_stored_as_the_host_does(lab: Any) -> None:
    """Keys and values of every type, over the end of a page, heads beside each other."""
    size: dict[str, Any] = {}
    if lab.on_gpu:
        size = {"k_dim": 128, "kv_heads": 8, "page_tokens": 256, "row": 0, "rows": 256, "source_row": 101}
    for seed, (k_type, v_type) in enumerate(zip(TYPES, TYPES[4:] + TYPES[:4], strict=True)):
        check(lab, make(k_type, v_type, seed=seed, **{"kv_heads": 2, **size}))


SHAPES: dict[str, dict[str, Any]] = {
    "32 of odd blocks": {"k_dim": 32, "k_type": KvType.Q4_0, "v_type": KvType.Q8_0},
    "48, n_rot 12": {"k_dim": 48, "n_rot": 12},
    "64 interleaved": {"k_dim": 64, "interleaved": True, "k_type": KvType.Q8_0, "v_type": KvType.Q5_1},
    "80, n_rot 20": {"k_dim": 80, "n_rot": 20, "v_type": KvType.BF16},
    "80 whole": {"k_dim": 80, "k_type": KvType.F32},
    "96, n_rot 24": {"k_dim": 96, "n_rot": 24, "v_type": KvType.Q4_1},
    "96 whole, no rotation": {"k_dim": 96, "k_type": KvType.Q4_0, "v_type": KvType.IQ4_NL},
    "192 and 128": {"k_dim": 192, "v_dim": 128, "k_type": KvType.Q8_0, "v_type": KvType.Q8_0},
    "256, n_rot 64": {"k_dim": 256, "n_rot": 64, "k_type": KvType.Q5_0, "v_type": KvType.Q8_0},
    "512": {"k_dim": 512, "n_rot": 128, "k_type": KvType.IQ4_NL, "v_type": KvType.Q5_1},
    "512 plain, n_rot 24": {"k_dim": 512, "n_rot": 24, "k_type": KvType.F32, "v_type": KvType.F16},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_heads_of_any_size(lab: Any, shape: str) -> None:
    """Head dims, partial and whole rotary embeddings of both kinds."""
    check(lab, make(**SHAPES[shape]))


@pytest.mark.parametrize(
    ("row", "rows", "source_row"), [(0, 32, 0), (0, 32, 1), (31, 1, 31), (5, 27, 4), (0, 1, 31), (0, 5, 12), (2, 6, 29)]
)
def test_rows_of_any_place(lab: Any, row: int, rows: int, source_row: int) -> None:
    """Whole pages and parts, of one page and of two; the other rows keep their bytes."""
    check(lab, make(KvType.Q8_0, KvType.Q4_0, row=row, rows=rows, source_row=source_row))


@pytest.mark.parametrize(("rows", "source_row", "n_rot"), [(3, 254, 64), (18, 12, 256)])
def test_fragment_pages_hold_the_same_rows(lab: Any, rows: int, source_row: int, n_rot: int) -> None:
    """The order of the bytes does not show in the rows."""
    if lab.on_gpu:
        rows = 256 - 5
    case = make(
        KvType.Q8_0, KvType.Q4_0, k_dim=256, page_tokens=256, kv_heads=2, row=5, rows=rows, source_row=source_row,
        n_rot=n_rot,
    )
    check(lab, case, PageOrder.FRAGMENTS)


KINDS = [
    kind for kind in ROWS
    if kind not in ("about the zero of iq4_nl", "tiny", "subnormal", "huge", "too large for f16", "of many sizes")
]
"""What turned rows of those left out hold is subnormal, infinite or NaN in places."""


@pytest.mark.parametrize("kv_type", TYPES)
def test_rounding_is_the_hosts(lab: Any, kv_type: KvType) -> None:
    """For keys on the edges of formats, whose turned values are those of any size and of both signs of zero."""
    for kind in KINDS if lab.on_gpu else KINDS[::3]:
        keys = np.resize(ROWS[kind], (96, 1, 64))
        check(lab, make(kv_type, KvType.F32, keys=keys, row=0, rows=32, source_row=7))


def test_kernels_are_told() -> None:
    """A layer names the one it launches, and one that shares another's keys none; instances have every type."""
    case = make(KvType.Q8_0, KvType.Q4_0)
    rope = Rope(case.table, None)
    (kernel,) = kernels_for(AttentionParams(2, 1, 64, 64, False, 1.0, rope, 1e-6), case.geometry)
    assert dict(kernel.defines)["K_ROTATION"] == 64
    assert kernels_for(AttentionParams(2, 1, 64, 64, False, 1.0, rope, 1e-6, shares=True), case.geometry) == []
    for side in ("K_TYPE", "V_TYPE"):
        assert {dict(each.defines)[side] for each in instances(90)} == {f"KV_{kv_type.name}" for kv_type in KvType}
