"""A mixture of experts against a float64 formula, row by row, and the promises on bits and on what is read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.host.ops.experts import add_experts, choose
from kvs_core.device.host.weights import Floats, HeldMatrix, HostWeight
from kvs_core.device.host.workers import Team
from kvs_core.device.operands import ExpertWeights
from kvs_core.memory.phases import Phase
from tests.support.examples import examples

EPS = 1e-6
SEEDS = st.integers(0, 2**32 - 1)


class Counted(HeldMatrix):
    """A matrix that counts how often it is read."""

    reads = 0

    def read(self, first: int, rows: int) -> Floats:
        self.reads += 1
        return super().read(first, rows)


class Part:
    """Random weights of one block: of ``count`` experts of width F over rows of E values."""

    def __init__(self, seed: int, count: int, used: int, embd: int, ffn: int, shared: int) -> None:
        rng = np.random.default_rng(seed)

        def draw(*shape: int) -> Floats:
            return rng.normal(size=shape).astype(np.float32) / np.float32(shape[-1] ** 0.5)

        self.norm = rng.normal(1.0, 0.1, embd).astype(np.float32)
        self.router = 2 * draw(count, embd)
        self.gate_up = [draw(2 * ffn, embd) for _ in range(count)]
        self.down = [draw(embd, ffn) for _ in range(count)]
        self.shared = (draw(2 * shared, embd), draw(embd, shared)) if shared else None
        self.shared_gate = draw(embd)
        self.matrices = [Counted(f"e{number}", values) for number, values in enumerate(self.gate_up)]
        self.weights = ExpertWeights(
            router=HostWeight([HeldMatrix("router", self.router)]),
            used=used,
            gate_up=[HostWeight([matrix]) for matrix in self.matrices],
            down=[HostWeight([HeldMatrix("down", values)]) for values in self.down],
            shared_gate=self.shared_gate if self.shared else None,
            shared_gate_up=HostWeight([HeldMatrix("gate up", self.shared[0])]) if self.shared else None,
            shared_down=HostWeight([HeldMatrix("down", self.shared[1])]) if self.shared else None,
        )

    def run(self, x: Floats, phase: Phase, threads: int = 1) -> Floats:
        """``x`` with what the part adds."""
        out = x.copy()
        team = Team(threads)
        try:
            add_experts(out, self.norm, self.weights, eps=EPS, phase=phase, team=team)
        finally:
            team.close()
        return out

    def expected(self, x: Floats) -> np.ndarray:
        """The same in float64: for each row all experts in turn."""
        out = x.astype(np.float64)
        for row in out:
            y = row / np.sqrt(np.mean(row**2) + EPS) * self.norm
            odds = np.exp(self.router.astype(np.float64) @ y)
            least = np.sort(odds)[-self.weights.used]
            share = np.where(odds >= least, odds, 0.0)
            share /= share.sum()
            parts = [(f, *pair) for f, pair in zip(share, zip(self.gate_up, self.down, strict=True), strict=True)]
            if self.shared:
                parts.append((1 / (1 + np.exp(-(self.shared_gate @ y))), *self.shared))
            for factor, gate_up, down in parts:
                gate, up = np.split(gate_up.astype(np.float64) @ y, 2)
                row += factor * (down @ (gate / (1 + np.exp(-gate)) * up))
        return out


def rows_of(seed: int, rows: int, embd: int) -> Floats:
    return np.random.default_rng(seed).normal(size=(rows, embd)).astype(np.float32)


@settings(max_examples=examples(60), deadline=None)
@given(
    count=st.integers(1, 9), used=st.integers(1, 9), rows=st.integers(1, 20), ffn=st.integers(1, 40),
    shared=st.sampled_from([0, 0, 7, 40]), phase=st.sampled_from(Phase), seed=SEEDS,
)
def test_experts(count: int, used: int, rows: int, ffn: int, shared: int, phase: Phase, seed: int) -> None:
    """The experts that each row chose, times their shares, and the shared one times its gate."""
    part = Part(seed, count, min(used, count), 24, ffn, shared)
    x = rows_of(seed + 1, rows, 24)
    np.testing.assert_allclose(part.run(x, phase), part.expected(x), rtol=1e-4, atol=1e-4)


@settings(max_examples=examples(40), deadline=None)
@given(rows=st.integers(2, 8), shared=st.sampled_from([0, 96]), threads=st.sampled_from([1, 3]), seed=SEEDS)
def test_a_decode_row_does_not_see_its_neighbours(rows: int, shared: int, threads: int, seed: int) -> None:
    """Its bits are those that it has alone, whichever experts the others chose."""
    part = Part(seed, 6, 3, 128, 96, shared)
    x = rows_of(seed + 1, rows, 128)
    together = part.run(x, Phase.DECODE, threads)
    for row in range(rows):
        assert part.run(x[row : row + 1], Phase.DECODE).tobytes() == together[row].tobytes()


@pytest.mark.parametrize("phase", Phase)
def test_what_nobody_chose_is_not_read(phase: Phase) -> None:
    """An expert costs nothing in a step without rows for it, and is read once in a prefill step with many."""
    part = Part(0, 40, 2, 32, 16, 0)
    x = np.repeat(rows_of(1, 1, 32), 5, axis=0)
    part.run(x, phase)
    assert sorted(matrix.reads for matrix in part.matrices) == [0] * 38 + [1] * 2


def test_of_equal_logits_the_lower_number_wins() -> None:
    """So that a choice is settled; and weights of those chosen sum to 1 however large the logits are."""
    chosen, weights = choose(np.float32([[1, 3, 3, 3], [0, 0, 0, 0], [-1e4, 1e4, 0, 9999]]), 2)
    assert chosen.tolist() == [[1, 2], [0, 1], [1, 3]]
    larger = 1 / (1 + np.exp(-1))
    np.testing.assert_allclose(weights, [[0.5, 0.5], [0.5, 0.5], [larger, 1 - larger]], rtol=1e-6)
    assert choose(np.ones((1, 256), np.float32), 8)[0].tolist() == [list(range(8))]
