"""Picks on the device against NumPy: exact ids for every order of size, ties and broken rows included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvs_core.device.base import StepSizes
from kvs_core.device.cuda.ops.sample import MAX_ROWS, MAX_TOP_K, SLICE, Sample, TopK
from kvs_core.memory.phases import Phase

# float32 sums of up to 262,144 exponentials by a tree, against float64.
LOG_TOTAL_TOLERANCE = 2e-5
# float32 running sums of up to 256 weights: a draw this near to a step of the distribution may fall on either side.
STEP_TOLERANCE = 1e-5


def _sample(lab: Any, rows: int, n_vocab: int) -> Sample:
    sizes = StepSizes(
        rows=rows, n_embd=64, widest_in=64, widest_out=64, n_vocab=n_vocab, heads=0, kv_heads=0, k_dim=0
    )
    context = lab.context(rows)
    sample = Sample(context)
    context.scratch = {spec.name: lab.empty(spec.shape, spec.dtype) for spec in sample.scratch(Phase.DECODE, sizes)}
    return sample


def _vocabs(lab: Any) -> list[tuple[int, int]]:
    """(rows, V): one slice, its edges, several slices."""
    small = [(2, 33), (1, SLICE), (2, SLICE + 1), (3, 4 * SLICE + 77)]
    return [*small, (8, 32003), (1, 248320), (4, 262144), (2, 300001)] if lab.on_gpu else small


def _logits(seed: int, rows: int, n_vocab: int) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, n_vocab)) * 3.0).astype(np.float32)


def _expected(logits: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest, NaN first, then lower ids first: np.lexsort's last key leads."""
    ids = np.broadcast_to(np.arange(logits.shape[1]), logits.shape)
    nan = np.isnan(logits)
    return np.lexsort((ids, -np.where(nan, 0.0, logits), ~nan), axis=-1)[:, :k]


def _check(lab: Any, logits: np.ndarray, k: int, top: TopK) -> None:
    expected = _expected(logits, k)
    assert np.array_equal(lab.host(top.ids), expected)
    values = np.take_along_axis(logits, expected, axis=1)
    assert np.array_equal(lab.host(top.values), values, equal_nan=True)


def test_argmax_is_numpys(lab: Any) -> None:
    """For any V, in every row; the answer of a row does not depend on the number of rows."""
    for rows, n_vocab in _vocabs(lab):
        logits = _logits(n_vocab, rows, n_vocab)
        got = lab.host(_sample(lab, rows, n_vocab).argmax(lab.array(logits)))
        assert np.array_equal(got, logits.argmax(axis=1)), (rows, n_vocab)


def test_equal_logits_go_to_the_lower_id(lab: Any) -> None:
    """Within a slice, across slices, where everything is equal, and between zeros of both signs."""
    n_vocab, k = SLICE + 700, 5
    logits = _logits(1, 4, n_vocab)
    logits[0, [SLICE - 1, SLICE + 3, 70, 71, SLICE + 600, 5000]] = 50.0
    logits[1] = -np.inf
    logits[2] = np.where(np.arange(n_vocab) % 2, np.float32(0.0), np.float32(-0.0))
    logits[3, [9, 2000, SLICE + 1]] = np.inf
    sample, device = _sample(lab, 4, n_vocab), lab.array(logits)
    assert lab.host(sample.argmax(device)).tolist() == [70, 0, 0, 9]
    top = sample.top_k(device, k)
    _check(lab, logits, k, top)
    totals = lab.host(top.log_totals)
    assert totals[1] == -np.inf
    assert np.isnan(totals[3])


def test_broken_rows_show_their_first_nan(lab: Any) -> None:
    """A NaN of either sign counts as largest, so that the logit at the id tells; other rows are not touched by it."""
    n_vocab = SLICE + 50
    logits = _logits(2, 2, n_vocab)
    logits[0, [SLICE + 7, 400]] = np.float32(np.nan), np.copysign(np.float32(np.nan), np.float32(-1.0))
    logits[0, 3] = np.inf
    sample, device = _sample(lab, 2, n_vocab), lab.array(logits)
    assert lab.host(sample.argmax(device)).tolist() == [400, logits[1].argmax()]
    top = sample.top_k(device, 4)
    _check(lab, logits, 4, top)
    assert np.isnan(lab.host(top.log_totals)[0])
    drawn = lab.host(sample.draw(device, 4, 1.0, lab.array(np.float32([0.9, 0.0]))))
    assert drawn.tolist() == [400, logits[1].argmax()]


def test_top_k_is_exact_and_sorted(lab: Any) -> None:
    """Any V and k, also where slices hold fewer than k; the total is that of the whole row."""
    for rows, n_vocab in _vocabs(lab):
        logits = _logits(n_vocab + 1, rows, n_vocab)
        sample, device = _sample(lab, rows, n_vocab), lab.array(logits)
        for k in (1, 40, MAX_TOP_K) if lab.on_gpu or n_vocab > SLICE else (33,):
            k = min(k, n_vocab)
            top = sample.top_k(device, k)
            _check(lab, logits, k, top)
            wide = logits.astype(np.float64)
            peak = wide.max(axis=1)
            error = np.abs(lab.host(top.log_totals) - peak - np.log(np.exp(wide - peak[:, None]).sum(axis=1)))
            assert error.max() < LOG_TOTAL_TOLERANCE, (rows, n_vocab, k, error.max())


@pytest.mark.parametrize("scale", [1e-3, 1e30])
def test_top_k_of_any_distribution(lab: Any, scale: float) -> None:
    """Few distinct values, values of one exponent, huge ones."""
    rng = np.random.default_rng(5)
    logits = np.stack([
        rng.integers(0, 4, SLICE + 200).astype(np.float32) * np.float32(scale),
        (1.0 + rng.random(SLICE + 200) * 1e-3).astype(np.float32) * np.float32(scale),
    ])
    _check(lab, logits, 100, _sample(lab, 2, SLICE + 200).top_k(lab.array(logits), 100))


def test_a_row_is_the_same_in_any_company(lab: Any) -> None:
    """Ids, values and totals of a row are the same bits alone and among MAX_ROWS."""
    n_vocab, k = (40000, 64) if lab.on_gpu else (600, 20)
    logits = _logits(6, MAX_ROWS, n_vocab)
    together = _sample(lab, MAX_ROWS, n_vocab).top_k(lab.array(logits), k)
    ids, values, totals = (lab.host(part) for part in (together.ids, together.values, together.log_totals))
    for row in (0, MAX_ROWS - 1):
        alone = _sample(lab, 1, n_vocab).top_k(lab.array(logits[row : row + 1]), k)
        assert np.array_equal(lab.host(alone.ids)[0], ids[row])
        assert np.array_equal(lab.host(alone.values)[0].view(np.uint32), values[row].view(np.uint32))
        assert lab.host(alone.log_totals)[0] == totals[row]


@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
def test_draws_follow_the_inverse_of_the_distribution(lab: Any, temperature: float) -> None:
    """u picks the candidate in whose share of the softmax over the top k it falls; 0 and 1 are its ends."""
    n_vocab, k = 3000, 50
    logits = _logits(7, MAX_ROWS, n_vocab)
    logits[:, 100:] = -np.inf   # some of the k have no probability
    logits[:, 40:100] = np.where(np.arange(MAX_ROWS)[:, None] % 2, -np.inf, logits[:, 40:100])
    sample, device = _sample(lab, MAX_ROWS, n_vocab), lab.array(logits)
    order = _expected(logits, k)
    shares = np.exp((np.take_along_axis(logits, order, axis=1) - logits.max(axis=1, keepdims=True)) / temperature,
                    dtype=np.float64)
    running = np.cumsum(shares, axis=1) / shares.sum(axis=1, keepdims=True)
    rng = np.random.default_rng(8)
    for draw in range(20):
        u = np.float32(rng.random(MAX_ROWS))
        if draw == 0:
            u[:4] = 0.0, 0.0, 1.0, 1.0
        got = lab.host(sample.draw(device, k, temperature, lab.array(u)))
        for row, (token, each) in enumerate(zip(got.tolist(), u.tolist(), strict=True)):
            place = order[row].tolist().index(token)
            assert shares[row, place] > 0.0
            below = running[row, place - 1] if place else 0.0
            assert below - STEP_TOLERANCE <= each <= running[row, place] + STEP_TOLERANCE, (row, each, place)
