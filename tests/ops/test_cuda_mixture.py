"""Experts beside a dense part on the GPU are the host's; a row's bits do not depend on the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvs_core.device.cuda.matrices import RECORD_TYPES, ROW_TYPES
from kvs_core.device.cuda.ops import experts as family
from kvs_core.device.cuda.ops.experts import Experts, instances, kernels_for
from kvs_core.device.cuda.ops.matmul import MAX_ROWS
from kvs_core.device.host.ops.experts import add_mixture
from kvs_core.device.host.workers import Team
from kvs_core.device.operands import Activation, MixtureWeights
from kvs_core.memory.phases import Phase
from tests.ops.test_cuda_experts import DECODE, EPS, PREFILL, Bench, Quant, drawn, launched_by, on_host, rows_of


class MixtureBench(Bench):
    """A ``Bench`` whose experts have a dense part of ``dense`` values beside them.

    scaled  experts have factors on what they give
    """

    def __init__(
        self, lab: Any, *, dense: int, dense_type: Quant = Quant.Q8_0, scaled: bool = True, seed: int = 0, **others: Any
    ) -> None:
        super().__init__(lab, seed=seed, activation=Activation.GELU, **others)
        n, sizes = self.n, self.sizes
        assert sizes.experts is not None
        self.sizes = replace(
            sizes, widest_in=max(n, dense), widest_out=max(n, 2 * dense), experts=replace(sizes.experts, n_beside=dense)
        )
        gate, up, down = (
            drawn(f"blk.0.ffn_{name}.weight", dense_type, a, b, seed + 10 + add)
            for add, (name, a, b) in enumerate((("gate", n, dense), ("up", n, dense), ("down", dense, n)))
        )
        rng = np.random.default_rng(seed + 20)
        norms = {
            name: rng.normal(mean, 0.2 * mean, n).astype(np.float32)
            for name, mean in (
                ("norm", 1.0), ("dense_norm", 0.7), ("experts_norm", 1.3), ("sum_norm", 1.6),
                ("router_scale", 0.8 * n**0.5), ("post_norm", 0.5),
            )
        }
        scales = rng.normal(1.0, 0.5, len(self.host.down)).astype(np.float32) if scaled else None
        self.mixed = MixtureWeights(
            gate_up=self.store.load([gate, up]), down=self.store.load([down]), experts=self.weights,
            expert_scales=None if scales is None else lab.array(scales),
            **{name: lab.array(values) for name, values in norms.items()},
        )
        self.mixed_on_host = MixtureWeights(
            gate_up=on_host(gate, up), down=on_host(down), experts=self.host, expert_scales=scales, **norms
        )

    def add(self, ops: Experts, rows: Any, phase: Phase) -> None:
        ops.add_mixture(rows, self.mixed, eps=EPS, phase=phase)

    def add_on_host(self, x: np.ndarray, phase: Phase, team: Team) -> None:
        add_mixture(x, self.mixed_on_host, eps=EPS, phase=phase, team=team)


@pytest.mark.parametrize("quant", [*RECORD_TYPES, *ROW_TYPES], ids=lambda quant: quant.name)
def test_mixtures_of_any_type(lab: Any, quant: Quant) -> None:
    """As on the host, in decode and in prefill, with tails where the type has them."""
    if not lab.on_gpu and quant not in (Quant.Q4_K, Quant.Q5_0, Quant.Q6_K, Quant.F16):
        pytest.skip("for a GPU alone: the stand-in is slow")
    wide = quant in (Quant.Q2_K, Quant.Q3_K, Quant.Q4_K, Quant.Q5_K, Quant.Q6_K, Quant.IQ4_XS)
    n, ffn = (256, 256) if wide else (288, 32)
    if lab.on_gpu:
        n, ffn = 2816, 768 if wide else 704
    bench = MixtureBench(
        lab, count=3, used=2, n=n, ffn=ffn, dense=2 * ffn, types=(quant,) * 3, dense_type=quant, rows=64
    )
    bench.check(rows_of(8 if lab.on_gpu else 2, n), DECODE)
    bench.check(rows_of(64 if lab.on_gpu else 9, n), PREFILL)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"joined": True, "scaled": False},
        {"types": (Quant.Q4_0, Quant.Q8_0, Quant.F16), "dense_type": Quant.F32, "router": Quant.Q8_0},
        {"count": 130, "used": 8},
        {"count": 1, "used": 1},
    ],
    ids=str,
)
def test_mixtures_of_any_form(lab: Any, case: dict[str, Any], phase: Phase) -> None:
    """Gates and ups in one tensor and of two types; without factors; one expert, and many."""
    bench = MixtureBench(lab, **{"count": 6, "used": 3, "n": 64, "ffn": 32, "dense": 96, "seed": 3, "rows": 20, **case})
    bench.check(rows_of(5 if phase is DECODE else 20, 64), phase)


def test_rows_wider_than_a_block_takes_at_once(lab: Any) -> None:
    """More columns than a block's threads take in one turn, and no multiple of that."""
    bench = MixtureBench(lab, count=3, used=2, n=2336, ffn=32, dense=32)
    bench.check(rows_of(2, 2336), DECODE)


def test_a_prefill_goes_through_in_parts(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than the scratch has room for are those that it is given some at a time, bit for bit."""
    bench = MixtureBench(lab, count=4, used=2, n=64, ffn=32, dense=64, rows=40)
    x = rows_of(40, 64)
    bench.check(x, PREFILL)
    monkeypatch.setattr(family, "PREFILL_ROWS", 16)
    parts = [bench.run(x[first : first + 16], PREFILL) for first in range(0, 40, 16)]
    assert bench.run(x, PREFILL).tobytes() == np.concatenate(parts).tobytes()


@pytest.mark.parametrize("types", [(Quant.Q8_0,) * 3, (Quant.F16, Quant.F16, Quant.Q4_0)], ids=str)
def test_a_row_s_bits_do_not_depend_on_the_others(lab: Any, types: tuple[Quant, Quant, Quant]) -> None:
    """Of a decode step of 1 to 8 rows each has the bits that it has alone, though they share experts."""
    bench = MixtureBench(lab, count=4, used=2, n=544, ffn=64, dense=96, types=types, dense_type=types[0])
    x = rows_of(MAX_ROWS, 544)
    whole = bench.run(x, DECODE)
    assert np.isfinite(whole).all()
    for part in (slice(0, 1), slice(3, 4), slice(7, 8), slice(2, 7), slice(0, 3)):
        assert bench.run(x[part], DECODE).tobytes() == whole[part].tobytes()


@pytest.mark.parametrize("case", [{"joined": True}, {"types": (Quant.F16, Quant.Q4_0, Quant.Q8_0)}], ids=str)
def test_what_is_launched_was_made_ready(lab: Any, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's kernels are those that its steps launch, no more but for the end of the other kind of mixture, which
    comes with them; and all are among the family's."""
    bench = MixtureBench(lab, count=3, used=2, n=64, ffn=32, dense=32, **case)
    launched = launched_by(lab, bench, monkeypatch)
    ready = [kernel for kernel in kernels_for(bench.store.stacks, Activation.GELU) if "experts" in kernel.source]
    assert launched == set(ready) - {family._COMBINE}
    assert set(ready) <= set(instances(90))
