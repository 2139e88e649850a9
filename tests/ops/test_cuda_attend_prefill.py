"""Prefill attention on CUDA: close to softmax in float64, and the same bits however pages are placed and split."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvs_core.device.cuda.ops.attend_prefill import instances, kernels_for
from kvs_core.device.host.ops import kv_codec
from kvs_core.errors import CapabilityError
from kvs_core.paging.geometry import KvType
from tests.ops import kv_pages
from tests.ops.prefill_rig import Case, attend, check, geometry_of

TYPES = list(KvType)


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


@pytest.mark.parametrize("shared_kib", [227, 163, 99])
@pytest.mark.parametrize(("k_type", "v_type"), [(KvType.Q8_0, KvType.Q4_0), (KvType.F16, KvType.F16)])
def test_heads_of_512_attend(lab: Any, shared_kib: int, k_type: KvType, v_type: KvType) -> None:
    """Two warps share the sums of a query tile, and its scores where the tile of keys has halves."""
    geometry = geometry_of(k_type, v_type, dim=512, page_tokens=64)
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
    assert len(list(instances(arch))) == 2 * (9 + 5 + 4 + (0 if arch == 75 else 2))
