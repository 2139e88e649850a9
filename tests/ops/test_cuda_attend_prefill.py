"""Prefill attention on CUDA: close to softmax in float64, and the same bits however pages are placed and split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvs_core.device.base import AttentionParams
from kvs_core.device.cuda.kernel import address
from kvs_core.device.cuda.ops.attend_prefill import AttendPrefill, instances, kernels_for
from kvs_core.device.host.ops import basic, kv_codec
from kvs_core.errors import CapabilityError
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import KvType, PageGeometry, PageOrder
from tests.ops import kv_pages

POISON = 0xFF   # NaN in every format that has one
TYPES = list(KvType)
# Keys, values and weights in float16 (2^-11), values about 1 and scores up to about 8, against float64.
CLOSE = 4e-3


@dataclass(frozen=True)
class Case:
    """T rows from ``position`` on of an attention layer, and random keys and values up to the last row."""

    geometry: PageGeometry
    rows: int
    position: int
    per_kv_head: int = 2
    gated: bool = False
    seed: int = 0

    @property
    def params(self) -> AttentionParams:
        """The layer; what concerns the writing of keys alone is left out."""
        g = self.geometry
        return AttentionParams(
            g.kv_heads * self.per_kv_head, g.kv_heads, g.k_dim, g.v_dim, self.gated, scale=1.0, rope=None, eps=0.0
        )

    @property
    def tokens(self) -> int:
        """Positions that have keys."""
        return self.position + self.rows

    def _normal(self, salt: int, *shape: int) -> np.ndarray:
        return np.random.default_rng((self.seed, salt)).standard_normal(shape).astype(np.float32)

    @cached_property
    def q(self) -> np.ndarray:
        """float16 [T, H, Dk], spread so that some keys stand out."""
        rows = self._normal(1, self.rows, self.params.heads, self.geometry.k_dim)
        return np.asarray(3 * rows / self.geometry.k_dim**0.5, np.float16)

    @cached_property
    def y(self) -> np.ndarray:
        """float32 [T, columns]: only the gates are read."""
        return self._normal(2, self.rows, self.params.columns)

    @cached_property
    def pages(self) -> np.ndarray:
        """uint8 [pages, page_bytes]; rows behind the last token are zero."""
        g = self.geometry
        count = g.pages_of(self.tokens)
        parts = []
        for salt, kv_type, dim in ((3, g.k_type, g.k_dim), (4, g.v_type, g.v_dim)):
            data = kv_codec.encode(kv_type, self._normal(salt, count * g.page_tokens, g.kv_heads, dim))
            data[self.tokens :] = 0
            by_head = data.reshape(count, g.page_tokens, g.kv_heads, -1).swapaxes(1, 2)
            parts.append(by_head.reshape(count, g.kv_heads, -1))
        pages = np.concatenate(parts, axis=2).reshape(count, g.page_bytes)
        if g.order is PageOrder.FRAGMENTS:
            pages = np.stack([kv_pages.pack(page, g.kv_heads) for page in pages])
        return pages

    def expected(self) -> np.ndarray:
        """Softmax attention in float64 over the numbers as stored, with V's rotation undone, and gated: [T, H * Dv]."""
        both = [kv_pages.dequantise(page, self.geometry) for page in self.pages]
        k, v = (np.concatenate([pair[i] for pair in both], axis=1).astype(np.float64) for i in (0, 1))   # [G, S, D]
        q = self.q.astype(np.float64).reshape(self.rows, self.geometry.kv_heads, self.per_kv_head, -1)
        scores = np.einsum("tgrd,gsd->tgrs", q, k)
        hidden = np.arange(k.shape[1]) > self.position + np.arange(self.rows)[:, None]
        scores = np.where(hidden[:, None, None], -np.inf, scores)
        weights = np.exp2(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out = np.einsum("tgrs,gsd->tgrd", weights, v).reshape(self.rows, self.params.heads, -1)
        if self.geometry.v_rotation:
            basic.hadamard(out, self.geometry.v_rotation)
        if self.gated:
            heads = self.y[:, : self.params.q_columns].reshape(self.rows, self.params.heads, 2, -1)
            out /= 1 + np.exp(-heads[:, :, 1].astype(np.float64))
        return np.asarray(out).reshape(self.rows, -1)


class Confined:
    """A launcher that says it has less shared memory than it has."""

    def __init__(self, launcher: Any, shared_bytes: int) -> None:
        self._launcher = launcher
        self.shared_bytes = shared_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launcher, name)


def attend(
    lab: Any, case: Case, *, slots: Sequence[int] | None = None, calls: Sequence[range] = (), shared_bytes: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The running partial and the output. Free slots are poisoned; without ``calls`` all pages come in one."""
    count = len(case.pages)
    slots = range(count) if slots is None else slots
    pool = np.full((max(slots) + 2, case.geometry.page_bytes), POISON, np.uint8)
    pool[list(slots)] = case.pages
    table = lab.array(np.array(slots, np.int32))
    context = lab.context(case.rows, position=case.position, phase=Phase.PREFILL)
    if shared_bytes:
        context = replace(context, launcher=Confined(context.launcher, shared_bytes))
    ops = AttendPrefill(context)
    plan: Any = SimpleNamespace(slots=address(table))
    q, y, pool = lab.array(case.q), lab.array(case.y), lab.array(pool)
    running = lab.empty((case.rows, case.params.heads, case.geometry.v_dim + 2), np.float32)
    for call in calls or [range(count)]:
        ops.attend_prefill(q, case.params, pool, case.geometry, plan, call, running, fresh=call.start == 0)
    out = lab.empty((case.rows, case.params.heads * case.geometry.v_dim), np.float32)
    ops.finish_prefill(y, case.params, case.geometry, running, out)
    return lab.host(running), lab.host(out)


def check(lab: Any, case: Case, **how: Any) -> None:
    """The output is close to the expected one."""
    _, out = attend(lab, case, **how)
    error = np.abs(out - case.expected())
    assert error.max() < CLOSE, f"largest error {error.max():.2e}, mean {error.mean():.2e}"
    assert error.mean() < CLOSE / 8, f"largest error {error.max():.2e}, mean {error.mean():.2e}"


def geometry_of(
    k_type: KvType = KvType.F16, v_type: KvType = KvType.F16, *, dim: int = 64, v_dim: int | None = None,
    page_tokens: int = 32, kv_heads: int = 1, v_rotation: int = 0,
) -> PageGeometry:
    """Small pages, but for what is given."""
    return PageGeometry(page_tokens, kv_heads, dim, v_dim or dim, k_type, v_type, v_rotation=v_rotation)


@pytest.mark.parametrize(("k_type", "v_type"), list(zip(TYPES, TYPES[4:] + TYPES[:4], strict=True)))
@pytest.mark.parametrize("dim", [64, 96])
def test_every_type_attends(lab: Any, k_type: KvType, v_type: KvType, dim: int) -> None:
    """Every type as K and as V, a row of blocks that two-byte alignment alone describes included."""
    check(lab, Case(geometry_of(k_type, v_type, dim=dim), rows=5, position=60))


@pytest.mark.parametrize("page_tokens", [32, 64])
@pytest.mark.parametrize(("k_dim", "v_dim"), [(32, 32), (80, 80), (128, 128), (192, 128), (80, 224), (256, 256)])
def test_every_shape_of_heads_attends(lab: Any, k_dim: int, v_dim: int, page_tokens: int) -> None:
    """Head dims that fill blocks of 32 or do not, and pages of one tile or more."""
    check(lab, Case(geometry_of(dim=k_dim, v_dim=v_dim, page_tokens=page_tokens), rows=9, position=70))


@pytest.mark.parametrize("shared_kib", [227, 99, 64])
@pytest.mark.parametrize(("k_type", "v_type"), [(KvType.Q8_0, KvType.Q8_0), (KvType.F32, KvType.F32)])
def test_every_tiling_attends(lab: Any, shared_kib: int, k_type: KvType, v_type: KvType) -> None:
    """GPUs with less shared memory get smaller tiles of the same attention."""
    geometry = geometry_of(k_type, v_type, dim=256, page_tokens=64)
    check(lab, Case(geometry, rows=20, position=50), shared_bytes=shared_kib << 10)


@pytest.mark.parametrize("shared_kib", [227, 99, 64])
def test_fragment_pages_attend(lab: Any, shared_kib: int) -> None:
    """Pages in the order of tensor cores."""
    geometry = kv_pages.fragments(2 if lab.on_gpu else 1)
    case = Case(geometry, rows=11, position=250, per_kv_head=6, gated=True)
    check(lab, case, slots=[2, 0], shared_bytes=shared_kib << 10)


@pytest.mark.parametrize(("rows", "position"), [(1, 0), (1, 31), (33, 0), (33, 31), (7, 63), (64, 40), (150, 3)])
@pytest.mark.parametrize("per_kv_head", [1, 3])
def test_every_row_sees_its_own_past(lab: Any, rows: int, position: int, per_kv_head: int) -> None:
    """Rows that begin, end and cross pages and blocks of queries, for one and for several query heads per head."""
    geometry = geometry_of(KvType.Q8_0, KvType.Q4_0, kv_heads=2)
    check(lab, Case(geometry, rows, position, per_kv_head, seed=rows))


def test_values_that_float16_lacks_are_held_in_its_range(lab: Any) -> None:
    """Too large numbers of float32 and bfloat16 pages become the largest of float16, and spoil no others."""
    for kv_type in (KvType.F32, KvType.BF16):
        case = Case(geometry_of(KvType.F16, kv_type, dim=32), rows=2, position=40)
        large = kv_codec.encode(kv_type, np.array([1e9, -1e9], np.float32))
        for page in case.pages:
            values = page[case.geometry.k_part_bytes :].reshape(32, -1)
            values[:, : len(large)] = large
        _, out = attend(lab, case)
        np.testing.assert_allclose(out[:, 0::32], 65504, rtol=1e-3)
        np.testing.assert_allclose(out[:, 1::32], -65504, rtol=1e-3)
        assert np.abs(out[:, 2:32]).max() < 4


@pytest.mark.parametrize("seed", range(6))
def test_placing_and_splitting_do_not_matter(lab: Any, seed: int) -> None:
    """Any slots and any split of the pages into calls give the same bits."""
    rng = np.random.default_rng(seed)
    types = (KvType.Q8_0, KvType.Q4_0) if seed % 2 else (KvType.BF16, KvType.Q5_1)
    geometry = geometry_of(*types, page_tokens=32 if seed < 4 else 64)
    case = Case(geometry, int(rng.integers(1, 80)), int(rng.integers(60, 200)), 3, seed=seed)
    whole = attend(lab, case)
    count = len(case.pages)
    slots = [int(slot) for slot in rng.permutation(count + 3)[:count]]
    cuts = sorted({0, count, *(int(cut) for cut in rng.integers(1, count, size=3))})
    calls = [range(*pair) for pair in pairwise(cuts)]
    for one, other in zip(whole, attend(lab, case, slots=slots, calls=calls), strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def test_splitting_fragment_pages_does_not_matter(lab: Any) -> None:
    """The same for pages in the order of tensor cores."""
    case = Case(kv_pages.fragments(1), rows=9, position=510, per_kv_head=2)
    whole = attend(lab, case)
    parts = attend(lab, case, slots=[3, 1, 0], calls=[range(1), range(1, 3)])
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("v_dim", "v_rotation"), [(64, 0), (80, 0), (64, 64), (192, 64), (256, 64), (256, 256), (32, 16)]
)
def test_the_finish_undoes_the_rotation_and_gates(lab: Any, v_dim: int, v_rotation: int, gated: bool) -> None:
    """Outputs leave the space that values are stored in; gates multiply them."""
    geometry = geometry_of(dim=v_dim if gated else 32, v_dim=v_dim, v_rotation=v_rotation)
    check(lab, Case(geometry, rows=3, position=20, gated=gated))


def test_a_long_context_stays_close(lab: Any) -> None:
    """Many tiles, blocks and heads at once."""
    if not lab.on_gpu:
        pytest.skip("too long for the stand-in")
    geometry = kv_pages.fragments(4)
    check(lab, Case(geometry, rows=300, position=7000, per_kv_head=6, gated=True))
    check(lab, Case(geometry_of(KvType.Q8_0, KvType.Q8_0, dim=128, page_tokens=256, kv_heads=8), 300, 3000, 4))


def test_too_little_shared_memory_is_refused(lab: Any) -> None:
    """A GPU that no tiling fits is told so, not given a failing launch."""
    with pytest.raises(CapabilityError, match="48 KiB"):
        kernels_for(geometry_of(KvType.F32, KvType.F32, dim=256), 48 << 10)


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100, 120])
def test_every_gpu_has_a_tiling_for_every_instance(arch: int) -> None:
    """Nothing that is compiled for a GPU needs more shared memory than it has."""
    assert len(list(instances(arch))) == 2 * (9 + 5 + 2)
