"""Attention over pages: close to softmax in float64, and the same bits however pages are placed, split and streamed."""

import threading
import warnings
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.device.host.ops import attention, kv_codec
from kvs_core.paging.geometry import GROUP_PAGES, SEGMENT_GROUPS, KvType
from kvs_core.paging.schedule import Run
from kvs_core.paging.spans import LEAST_SCRATCH_GROUPS, Chunk, LayerPlan, plan_layer
from tests.ops.paged import POISON, Context, decode, geometry_of, prefill

SEGMENT_TOKENS = 32 * GROUP_PAGES * SEGMENT_GROUPS
SEEDS = st.integers(0, 2**32 - 1)
# float32 sums of some hundred products against float64, for values about 1.
CLOSE = {"rtol": 0, "atol": 1e-5}
PAIRS = [(k_type, v_type) for k_type in KvType for v_type in KvType]


def _same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def _cut(draw: st.DrawFn, start: int, end: int) -> list[range]:
    """[start, end) in some pieces."""
    if start == end:
        return []
    cuts = draw(st.sets(st.integers(start + 1, end - 1), max_size=8)) if end - start > 1 else set()
    bounds = [start, *sorted(cuts), end]
    return [range(*pair) for pair in pairwise(bounds)]


@st.composite
def layer_plans(draw: st.DrawFn, pages: int) -> LayerPlan:
    """Any plan of so many pages: older groups streamed in any runs through a ring, or none; the rest in any slots."""
    groups = -(-pages // GROUP_PAGES)
    first = draw(st.sampled_from([0, GROUP_PAGES])) if groups > 2 else 0   # the first group may stay resident
    cut = max(first, draw(st.integers(0, groups - 1)) * GROUP_PAGES)
    runs = _cut(draw, first, cut)
    ring = max(map(len, runs), default=0) + draw(st.integers(0, 3))
    slots = list(draw(st.permutations(range(ring, ring + pages + 3))))[:pages]
    chunks = [Chunk(part) for part in _cut(draw, 0, first)]
    for part in runs:
        run = Run(0, part.start, len(part), draw(st.integers(0, ring - len(part))))
        slots[part.start : part.stop] = run.slots
        chunks.append(Chunk(part, run))
    chunks += [Chunk(part) for part in _cut(draw, cut, pages)]
    scratch_groups = draw(st.sampled_from([1, 2, 3])) * LEAST_SCRATCH_GROUPS
    return plan_layer(slots, chunks, scratch_groups=scratch_groups)


@pytest.mark.parametrize(("k_type", "v_type"), PAIRS)
def test_every_pair_of_types_attends(k_type: KvType, v_type: KvType) -> None:
    """Decode and prefill give the softmax attention of the stored numbers, for a context that ends within a page."""
    context = Context(geometry_of(k_type=k_type, v_type=v_type), tokens=150)
    q = context.q(5)
    expected = context.expected(q)
    np.testing.assert_allclose(decode(context.geometry, context.pages(), q, 145), expected, **CLOSE)
    np.testing.assert_allclose(prefill(context.geometry, context.pages(), q, 145), expected, **CLOSE)


@pytest.mark.parametrize("rep", [1, 3, 5, 6, 8])
@pytest.mark.parametrize(("k_dim", "v_dim"), [(32, 32), (64, 64), (128, 128), (256, 256), (128, 64), (32, 96)])
def test_every_shape_of_heads_attends(k_dim: int, v_dim: int, rep: int) -> None:
    """The same for head sizes, K and V apart too, and any number of query heads; row by row the same bits."""
    context = Context(geometry_of(k_dim=k_dim, v_dim=v_dim, page_tokens=64), tokens=200, rep=rep)
    q = context.q(3)
    rows = decode(context.geometry, context.pages(), q, 197)
    np.testing.assert_allclose(rows, context.expected(q), **CLOSE)
    np.testing.assert_allclose(prefill(context.geometry, context.pages(), q, 197), context.expected(q), **CLOSE)
    for row in range(3):
        _same_bits(decode(context.geometry, context.pages(198 + row), q[row : row + 1], 197 + row), rows[row : row + 1])


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 128, SEGMENT_TOKENS, SEGMENT_TOKENS + 1, 3 * SEGMENT_TOKENS - 5])
def test_every_length_attends(tokens: int) -> None:
    """From one token to three segments."""
    context = Context(geometry_of(kv_heads=1, k_dim=32), tokens)
    q = context.q(1)
    np.testing.assert_allclose(decode(context.geometry, context.pages(), q, tokens - 1), context.expected(q), **CLOSE)


@given(
    st.one_of(st.integers(0, 300), st.integers(SEGMENT_TOKENS - 10, SEGMENT_TOKENS + 10)),
    st.sampled_from([2, 3, 4, 5, 6, 7, 8, 65]), st.sampled_from([1, 3, 6]), st.sampled_from(PAIRS), SEEDS,
)
def test_rows_do_not_see_each_other(before: int, rows: int, rep: int, pair: tuple[KvType, KvType], seed: int) -> None:
    """T rows at once have the bits of T steps of one row, each before the later rows were written."""
    geometry = geometry_of(kv_heads=1, k_dim=32, k_type=pair[0], v_type=pair[1])
    context = Context(geometry, before + rows, rep, seed)
    q = context.q(rows)
    together = decode(geometry, context.pages(), q, before)
    for row in range(rows):
        alone = decode(geometry, context.pages(before + row + 1), q[row : row + 1], before + row)
        _same_bits(alone, together[row : row + 1])


@given(st.data(), st.integers(1, 460), st.integers(1, 3), SEEDS)
def test_placing_and_splitting_do_not_matter(data: st.DataObject, tokens: int, rows: int, seed: int) -> None:
    """Any slots, chunks, runs and ring give the same bits; slots that hold nothing are poisoned all the while."""
    rows = min(rows, tokens)
    context = Context(geometry_of(k_dim=32, k_type=KvType.Q4_0, v_type=KvType.F16), tokens, seed=seed)
    pages, q, first = context.pages(), context.q(rows), tokens - rows
    plan = data.draw(layer_plans(len(pages)))
    _same_bits(decode(context.geometry, pages, q, first, plan, spare=2), decode(context.geometry, pages, q, first))


@given(st.data(), st.sampled_from([SEGMENT_TOKENS - 31, SEGMENT_TOKENS + 1, 2 * SEGMENT_TOKENS + 100]))
def test_placing_and_splitting_do_not_matter_in_segments(data: st.DataObject, tokens: int) -> None:
    """The same over two and three segments."""
    context = Context(geometry_of(kv_heads=1, k_dim=32), tokens, rep=1)
    pages, q = context.pages(), context.q(2)
    plan = data.draw(layer_plans(len(pages)))
    _same_bits(
        decode(context.geometry, pages, q, tokens - 2, plan), decode(context.geometry, pages, q, tokens - 2)
    )


@pytest.mark.parametrize("tile_bytes", [1, 100_000])
def test_tiles_do_not_matter(monkeypatch: pytest.MonkeyPatch, tile_bytes: int) -> None:
    """How many pages are dequantised at a time leaves decode's bits alone."""
    context = Context(geometry_of(), tokens=700)
    whole = decode(context.geometry, context.pages(), context.q(2), 698)
    monkeypatch.setattr(attention, "_TILE_BYTES", tile_bytes)
    _same_bits(decode(context.geometry, context.pages(), context.q(2), 698), whole)


@pytest.mark.parametrize("shift", [1, 3, 5, 15])
@pytest.mark.parametrize(("k_dim", "rep"), [(32, 1), (64, 3), (128, 6), (256, 8)])
def test_addresses_do_not_matter(monkeypatch: pytest.MonkeyPatch, k_dim: int, rep: int, shift: int) -> None:
    """Working memory at any float's address, and pages at any byte's, give the same bits."""
    context = Context(geometry_of(k_dim=k_dim), 150, rep)
    pages, q = context.pages(), context.q(2)
    aligned = [decode(context.geometry, pages, q, 148), prefill(context.geometry, pages, q, 148)]

    class Shifted(attention._Memory):
        def bytes(self, name: str, *shape: int) -> np.ndarray:
            return super().bytes(name, int(np.prod(shape)) + 4 * shift)[4 * shift :].reshape(shape)

    monkeypatch.setattr(attention, "_memory", Shifted())
    moved = np.empty(pages.nbytes + shift, np.uint8)[shift:].reshape(pages.shape)
    moved[...] = pages
    _same_bits(decode(context.geometry, moved, q, 148), aligned[0])
    _same_bits(prefill(context.geometry, moved, q, 148), aligned[1])


@pytest.mark.parametrize("kv_type", [KvType.F32, KvType.F16, KvType.Q8_0, KvType.Q4_1])
def test_hidden_rows_are_not_there(kv_type: KvType) -> None:
    """Bytes behind the last row, NaN or stale, or later rows with infinite values change no bit and warn of nothing."""
    context = Context(geometry_of(k_type=kv_type, v_type=kv_type), tokens=101)
    q, clean = context.q(4), context.pages()
    together = decode(context.geometry, clean, q, 97)
    many = prefill(context.geometry, clean, q, 97)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for behind in (POISON, 0x7B):
            dirty = context.pages(behind=behind)
            _same_bits(decode(context.geometry, dirty, q, 97), together)
            _same_bits(prefill(context.geometry, dirty, q, 97), many)
        context.v[99], context.v[100], context.k[100] = np.inf, np.nan, -np.inf
        spoiled = decode(context.geometry, context.pages(), q, 97)
    _same_bits(spoiled[:2], together[:2])
    assert not np.isfinite(spoiled[2:]).any()


@given(st.data(), st.integers(1, 200), st.integers(1, 60), SEEDS)
def test_prefill_does_not_see_the_calls(data: st.DataObject, tokens: int, rows: int, seed: int) -> None:
    """Prefill over any slots and any split of the pages into calls: the same bits, close to softmax."""
    rows = min(rows, tokens)
    context = Context(geometry_of(k_dim=32), tokens, seed=seed)
    pages, q = context.pages(), context.q(rows)
    slots = data.draw(st.permutations(range(len(pages) + 2)))
    calls = _cut(data.draw, 0, len(pages))
    at_once = prefill(context.geometry, pages, q, tokens - rows)
    _same_bits(prefill(context.geometry, pages, q, tokens - rows, calls, slots[: len(pages)]), at_once)
    np.testing.assert_allclose(at_once, context.expected(q), **CLOSE)


@pytest.mark.parametrize(("tokens", "rows"), [(512, 512), (900, 512), (700, 33)])
def test_prefill_of_many_rows(tokens: int, rows: int) -> None:
    """A ubatch of several tiles of rows, at the start and later."""
    context = Context(geometry_of(page_tokens=256, k_dim=32, v_type=KvType.Q5_1), tokens, rep=4)
    pages, q = context.pages(), context.q(rows)
    many = prefill(context.geometry, pages, q, tokens - rows)
    np.testing.assert_allclose(many, context.expected(q), **CLOSE)
    calls = [range(page, page + 1) for page in range(len(pages))]
    _same_bits(prefill(context.geometry, pages, q, tokens - rows, calls), many)


@pytest.mark.parametrize("k_type", KvType)
def test_round_q(k_type: KvType) -> None:
    """With ``round_q`` queries are rounded to q8_0 first, where keys are stored in blocks; else nothing changes."""
    context = Context(geometry_of(k_type=k_type), tokens=90)
    q = context.q(2)
    rounded = q.copy()
    if k_type.quantised:
        kv_codec.decode(KvType.Q8_0, kv_codec.encode(KvType.Q8_0, q), rounded)
        assert not np.array_equal(rounded, q)
    for attend in (decode, prefill):
        got = attend(context.geometry, context.pages(), q, 88, round_q=True)
        _same_bits(got, attend(context.geometry, context.pages(), rounded, 88))


def test_large_scores() -> None:
    """Scores far apart neither overflow nor vanish: the largest takes all."""
    context = Context(geometry_of(k_type=KvType.F32, v_type=KvType.F32), tokens=200)
    q = 1e4 * context.q(2)
    expected = context.expected(q)
    np.testing.assert_allclose(decode(context.geometry, context.pages(), q, 198), expected, **CLOSE)
    np.testing.assert_allclose(prefill(context.geometry, context.pages(), q, 198), expected, **CLOSE)


def test_contexts_do_not_share_working_memory() -> None:
    """Attention of other shapes before, and in another thread meanwhile, changes nothing."""
    contexts = [Context(geometry_of(k_dim=32), 100), Context(geometry_of(k_dim=128, kv_heads=3), 700, rep=6)]
    inputs = [(each.geometry, each.pages(), each.q(2), each.tokens - 2) for each in contexts]
    expected = [decode(*each) for each in inputs]
    failures: list[BaseException] = []

    def attend(index: int) -> None:
        try:
            for _ in range(20):
                _same_bits(decode(*inputs[index]), expected[index])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=attend, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for index in (1, 0, 1):
        _same_bits(decode(*inputs[index]), expected[index])
