"""Matrices give the same numbers whether they are held or stay in the file, and however many threads multiply."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.host import machine, weights
from kvs_core.device.host.ops import basic
from kvs_core.device.host.weights import Floats, HeldMatrix, HostMatrix, HostWeight, HostWeights, MappedMatrix
from kvs_core.device.host.workers import Team
from kvs_core.errors import DeviceError
from kvs_core.formats.gguf import TensorInfo
from kvs_core.formats.quants import dequantize_rows
from kvs_core.memory.phases import Phase
from tests.device.tensors import F32, tensor

Quant = gguf.GGMLQuantizationType
QUANTS = (Quant.F32, Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q5_1)


def _random(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, cols)).astype(np.float32)


def _prepared(info: TensorInfo, limit_bytes: int) -> HostMatrix:
    loaded = HostWeights(limit_bytes)
    loaded.prepare([info])
    return loaded.matrix(info)


@contextmanager
def _before_each_read(act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` whenever a thread asks for the values of a piece, held or mapped."""

    def reading(read: Callable[[HostMatrix, int, int], Floats]) -> Callable[[HostMatrix, int, int], Floats]:
        def acting(matrix: HostMatrix, first: int, rows: int) -> Floats:
            act()
            return read(matrix, first, rows)

        return acting

    with (
        patch.object(HeldMatrix, "read", reading(HeldMatrix.read)),   # type: ignore[arg-type]
        patch.object(MappedMatrix, "read", reading(MappedMatrix.read)),   # type: ignore[arg-type]
    ):
        yield


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(QUANTS), st.integers(1, 90), st.integers(1, 5), st.integers(1, 8), st.integers(1, 40),
    st.sampled_from(Phase), st.integers(0, 2**32 - 1),
)
def test_held_and_piecewise_products_are_equal_bit_for_bit(
    quant: Quant, n_out: int, blocks: int, rows: int, piece_rows: int, phase: Phase, seed: int
) -> None:
    """How much RAM there is never shows in the numbers: not in a product, in either phase, nor in an embedding."""
    n_in = 32 * blocks
    info = tensor("w", _random(n_out, n_in, seed), quant)
    x = _random(rows, n_in, seed + 1)
    tokens = np.random.default_rng(seed).integers(0, n_out, rows).astype(np.int32)
    results = []
    with patch.dict(weights.PIECE_BYTES, {phase: (4 * piece_rows * n_in, 4 * piece_rows * n_in)}):
        for limit in (1 << 30, 0):
            matrix = _prepared(info, limit)
            assert isinstance(matrix, MappedMatrix) == (limit == 0 and quant is not F32)
            out, embedded = np.empty((rows, n_out), np.float32), np.empty((rows, n_in), np.float32)
            basic.matmul(x, HostWeight([matrix]), out, phase=phase)
            basic.embed(matrix, tokens, embedded)
            results.append(out.tobytes() + embedded.tobytes())
            values = dequantize_rows(info, 0, n_out)
            assert np.array_equal(embedded, values[tokens])
            np.testing.assert_allclose(out, x.astype(np.float64) @ values.T, rtol=1e-4, atol=1e-4)
    assert results[0] == results[1]


@pytest.mark.parametrize("limit", [1 << 30, 0])
def test_a_matrix_of_several_full_pieces_gives_a_row_the_same_bits_beside_others(limit: int) -> None:
    """Row-invariance at the real piece size, held or not."""
    matrix = _prepared(tensor("w", _random(2600, 1024), Quant.Q8_0), limit)
    assert len(matrix.pieces(Phase.DECODE)) > 2
    x = _random(5, 1024, 1)
    together = np.empty((5, 2600), np.float32)
    basic.matmul(x, HostWeight([matrix]), together, phase=Phase.DECODE)
    for row in range(5):
        alone = np.empty((1, 2600), np.float32)
        basic.matmul(x[row : row + 1].copy(), HostWeight([matrix]), alone, phase=Phase.DECODE)
        assert alone.tobytes() == together[row].tobytes()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(QUANTS), st.integers(1, 90), st.integers(1, 5), st.integers(1, 8), st.integers(1, 12),
    st.sampled_from(Phase), st.booleans(), st.integers(0, 2**32 - 1),
)
def test_the_bits_are_the_same_for_every_number_of_threads(
    quant: Quant, n_out: int, blocks: int, rows: int, piece_rows: int, phase: Phase, held: bool, seed: int
) -> None:
    """``--threads`` never changes a text: in neither phase, with matrices in memory or in the file."""
    n_in = 32 * blocks
    x = _random(rows, n_in, seed + 1)
    piece_bytes = 4 * piece_rows * n_in
    results = []
    with (
        patch.dict(weights.PIECE_BYTES, {phase: (piece_bytes, piece_bytes)}),
        _before_each_read(lambda: time.sleep(1e-5)),
    ):
        matrix = _prepared(tensor("w", _random(n_out, n_in, seed), quant), (1 << 30) * held)
        for threads in (1, 2, 3):
            team = Team(threads)
            out = np.full((rows, n_out), np.nan, np.float32)
            basic.matmul(x, HostWeight([matrix]), out, phase=phase, team=team)
            results.append(out.tobytes())
            team.close()
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("phase", Phase)
def test_large_products_are_shared_and_threads_do_not_disturb_each_other(phase: Phase, held: bool) -> None:
    """At the real piece size: two threads are at pieces at the same time, and the bits are those of one thread."""
    matrix = _prepared(tensor("w", _random(2048, 1024), Quant.Q4_1), (1 << 30) * held)
    assert len(matrix.pieces(phase)) % 2 == 0
    x = _random(4, 1024, 1)
    alone, shared = np.empty((4, 2048), np.float32), np.empty((4, 2048), np.float32)
    basic.matmul(x, HostWeight([matrix]), alone, phase=phase)
    team, meeting = Team(2), threading.Barrier(2)
    with _before_each_read(lambda: meeting.wait(10)):
        basic.matmul(x, HostWeight([matrix]), shared, phase=phase, team=team)
    team.close()
    assert alone.tobytes() == shared.tobytes()


def test_matrices_are_held_in_order_while_they_fit_and_progress_counts_to_the_end() -> None:
    """The limit is kept to the byte; float32 tensors are used where they are; a tensor given twice is held once."""
    infos = [
        tensor("a", _random(64, 32), Quant.F16),
        tensor("big", _random(512, 32), Quant.F16),
        tensor("plain", _random(64, 32)),
        tensor("b", _random(64, 32, 1), Quant.Q8_0),
        tensor("c", _random(1, 32), Quant.F16),
    ]
    loaded = HostWeights(2 * 64 * 32 * 4)
    seen: list[tuple[int, int]] = []
    loaded.prepare([*infos, infos[0]], lambda done, total: seen.append((done, total)))
    kinds = {info.name: type(loaded.matrix(info)) for info in infos}
    assert kinds == {"a": HeldMatrix, "big": MappedMatrix, "plain": HeldMatrix, "b": HeldMatrix, "c": MappedMatrix}
    assert loaded.held_bytes == 2 * 64 * 32 * 4
    total = infos[0].n_bytes + infos[3].n_bytes
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    plain = loaded.matrix(infos[2])
    assert np.shares_memory(plain.read(0, 1), infos[2].data)


def test_a_matrix_that_was_not_prepared_stays_in_the_file() -> None:
    """A token table that is only looked up takes no RAM."""
    info = tensor("token_embd.weight", _random(100, 64), Quant.Q4_0)
    loaded = HostWeights(1 << 30)
    matrix = loaded.matrix(info)
    assert isinstance(matrix, MappedMatrix)
    assert loaded.held_bytes == 0
    assert loaded.matrix(info) is matrix


def test_a_row_longer_than_a_piece_is_a_piece() -> None:
    """However wide a matrix is, it can be multiplied."""
    with patch.dict(weights.PIECE_BYTES, dict.fromkeys(Phase, (128, 128))):
        info = tensor("w", _random(3, 96), Quant.F16)
        matrix = _prepared(info, 0)
        assert len(matrix.pieces(Phase.DECODE)) == 3
        out = np.empty((1, 3), np.float32)
        x = _random(1, 96, 1)
        basic.matmul(x, HostWeight([matrix]), out, phase=Phase.DECODE)
        np.testing.assert_allclose(out, x @ dequantize_rows(info, 0, 3).T, rtol=1e-4)


def test_a_tensor_that_cannot_be_read_fails_the_load() -> None:
    """An error on a loading thread reaches the caller as it is."""
    info = tensor("w", _random(4, 32), Quant.F16)
    damaged = TensorInfo(info.name, info.shape, Quant.I8, info.n_elements, info.n_bytes, info.data)
    with pytest.raises(Exception, match="tensor w has type I8"):
        HostWeights(1 << 30).prepare([damaged])


def test_the_default_limit_is_a_share_of_the_available_ram() -> None:
    """On a machine with little to give the matrices stay in the file, without being told."""
    info = tensor("w", _random(64, 32), Quant.F16)
    for available, kind in ((20_000, HeldMatrix), (10_000, MappedMatrix)):
        with patch.object(weights, "available_ram_bytes", lambda given=available: given):
            loaded = HostWeights(None)
            with patch.object(weights, "aligned_bytes", lambda size, _: np.empty(size, np.uint8)):
                loaded.prepare([info])
            assert type(loaded.matrix(info)) is kind


def test_memory_is_page_aligned_and_refused_when_there_is_too_little() -> None:
    """The error says what it was for and both numbers."""
    memory = weights.aligned_bytes(1000, "a test")
    assert memory.nbytes == 1000
    assert memory.ctypes.data % 4096 == 0
    needed = machine.available_ram_bytes() + (64 << 30)
    with pytest.raises(DeviceError, match=r"^\d+ MiB of RAM for a test cannot be had: \d+ of \d+ MiB are free; lower"):
        weights.aligned_bytes(needed, "a test")
