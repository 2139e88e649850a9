"""A mixture of experts on the GPU is the host's; a row's bits do not depend on the others, nor on what those chose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from kvs_core.device.base import ExpertSizes, StepSizes
from kvs_core.device.cuda.matrices import RECORD_TYPES, ROW_TYPES
from kvs_core.device.cuda.ops import experts as family
from kvs_core.device.cuda.ops.experts import Experts, instances, kernels_for
from kvs_core.device.cuda.ops.matmul import MAX_ROWS, DecodeMatmul
from kvs_core.device.cuda.ops.prefill_matmul import PrefillMatmul
from kvs_core.device.host.ops.experts import add_experts, choose
from kvs_core.device.host.weights import HeldMatrix, HostWeight
from kvs_core.device.host.workers import Team
from kvs_core.device.operands import Activation, ExpertWeights
from kvs_core.errors import CapabilityError
from kvs_core.formats.gguf import TensorInfo, split_experts
from kvs_core.formats.quants import dequantize_rows, row_bytes
from kvs_core.formats.synthetic_blocks import DrawnBytes
from kvs_core.memory.phases import Phase
from tests.device.tensors import tensor
from tests.ops.record_weights import store_in
from tests.ops.test_cuda_matmul_rows import random_rows

Quant = GGMLQuantizationType
DECODE, PREFILL = Phase.DECODE, Phase.PREFILL
EPS = 1e-5

# Of the largest number that experts add. Rows are 16-bit fixed point; what all rows take has float16 ones in a prefill.
TOLERANCE, HALF_TOLERANCE = 2e-4, 2e-3


def drawn(name: str, quant: Quant, n_in: int, n_out: int, seed: int, count: int = 0) -> TensorInfo:
    """A matrix, or one for each of ``count`` experts, of outputs near 1."""
    rows = max(count, 1) * n_out
    if quant in RECORD_TYPES:
        size = rows * row_bytes(quant, n_in)
        data = DrawnBytes(quant, n_in**-0.5, seed, size)[:]
        info = TensorInfo(name, (n_in, rows), quant, n_in * rows, size, data)
    elif quant in (Quant.Q2_K, Quant.Q3_K):
        data = random_rows(quant, rows, n_in, seed, scale=0.01).reshape(-1)
        info = TensorInfo(name, (n_in, rows), quant, n_in * rows, data.nbytes, data)
    else:
        values = np.random.default_rng(seed).normal(size=(rows, n_in)) / n_in**0.5
        info = tensor(name, values.astype(np.float32), quant)
    return replace(info, shape=(n_in, n_out, count)) if count else info


def on_host(*infos: TensorInfo) -> HostWeight:
    """Dequantised."""
    return HostWeight([HeldMatrix(info.name, dequantize_rows(info, 0, info.shape[1])) for info in infos])


class Bench:
    """The feed-forward part of a block, in a lab and on the host.

    joined  gates and ups lie in one tensor
    types   of gates, ups and downs; router: of that
    """

    def __init__(
        self, lab: Any, *, count: int, used: int, n: int, ffn: int, shared: int = 0, joined: bool = False,
        activation: Activation = Activation.SILU, types: tuple[Quant, Quant, Quant] = (Quant.Q8_0,) * 3,
        router: Quant = Quant.F32, seed: int = 0, rows: int = MAX_ROWS,
    ) -> None:
        self.lab, self.n = lab, n
        gate, up, down = types
        if joined:
            tensors = [drawn("blk.0.ffn_gate_up_exps.weight", gate, n, 2 * ffn, seed, count)]
        else:
            tensors = [
                drawn(f"blk.0.ffn_{name}_exps.weight", quant, n, ffn, seed + add, count)
                for name, quant, add in (("gate", gate, 0), ("up", up, 1))
            ]
        downs = drawn("blk.0.ffn_down_exps.weight", down, ffn, n, seed + 2, count)
        chooser = drawn("blk.0.ffn_gate_inp.weight", router, n, count, seed + 3)
        parts = [
            drawn(f"blk.0.ffn_{name}_shexp.weight", Quant.Q8_0, a, b, seed + 4 + add)
            for add, (name, a, b) in enumerate((("gate", n, shared), ("up", n, shared), ("down", shared, n)))
        ] if shared else []
        rng = np.random.default_rng(seed)
        self.norm = rng.normal(1.0, 0.1, n).astype(np.float32)
        gate_row = rng.normal(size=n).astype(np.float32) / np.float32(n**0.5)
        self.store = store_in(lab)
        self.weights = ExpertWeights(
            router=self.store.load([chooser]), used=used, gate_up=self.store.load_experts(tensors),
            down=self.store.load_experts([downs]), shared_gate=lab.array(gate_row) if shared else None,
            shared_gate_up=self.store.load(parts[:2]) if shared else None,
            shared_down=self.store.load(parts[2:]) if shared else None, activation=activation,
        )
        self.host = ExpertWeights(
            router=on_host(chooser), used=used,
            gate_up=[on_host(*each) for each in zip(*map(split_experts, tensors), strict=True)],
            down=[on_host(each) for each in split_experts(downs)], shared_gate=gate_row if shared else None,
            shared_gate_up=on_host(*parts[:2]) if shared else None, shared_down=on_host(*parts[2:]) if shared else None,
            activation=activation,
        )
        self.sizes = StepSizes(
            rows=rows, n_embd=n, widest_in=max(n, shared), widest_out=max(n, 2 * shared), n_vocab=32, heads=0,
            kv_heads=0, k_dim=0, experts=ExpertSizes(count, used, ffn, shared),
        )

    def run(self, x: np.ndarray, phase: Phase) -> np.ndarray:
        """Rows with what the experts add, on the device; beside rows that are none of theirs."""
        context = self.lab.context(len(x), phase=phase)
        matmul = DecodeMatmul(context)
        prefill = PrefillMatmul(context, self.lab.launcher, matmul.dequant)
        ops = Experts(context, matmul, prefill)
        specs = [spec for part in (matmul, prefill, ops) for spec in part.scratch(phase, self.sizes)]
        context.scratch = {spec.name: self.lab.empty(spec.shape, spec.dtype) for spec in specs}
        rows = self.lab.array(x)
        self.add(ops, rows, phase)
        return self.lab.host(rows)

    def add(self, ops: Experts, rows: Any, phase: Phase) -> None:
        """What is on trial."""
        ops.add(rows, self.lab.array(self.norm), self.weights, eps=EPS, phase=phase)

    def add_on_host(self, x: np.ndarray, phase: Phase, team: Team) -> None:
        """Its reference."""
        add_experts(x, self.norm, self.host, eps=EPS, phase=phase, team=team)

    def check(self, x: np.ndarray, phase: Phase) -> None:
        """Near to the host."""
        expected, team = x.copy(), Team(1)
        try:
            self.add_on_host(expected, phase, team)
        finally:
            team.close()
        most = np.abs(expected - x).max()
        half = phase is PREFILL and self.sizes.experts.n_beside > 0
        assert most > 0.05
        off = np.abs(self.run(x, phase) - expected).max() / most
        assert off < (HALF_TOLERANCE if half else TOLERANCE), f"{off:.2e}"


def rows_of(rows: int, n: int, seed: int = 9) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, n)).astype(np.float32)


@pytest.mark.parametrize("quant", [*RECORD_TYPES, *ROW_TYPES], ids=lambda quant: quant.name)
def test_experts_of_any_type(lab: Any, quant: Quant) -> None:
    """As on the host, in decode and in prefill, with tails where the type has them."""
    if not lab.on_gpu and quant not in (Quant.Q4_K, Quant.Q5_K, Quant.Q6_K, Quant.IQ4_XS, Quant.Q2_K):
        pytest.skip("for a GPU alone: other types are met below")
    wide = quant in (Quant.Q2_K, Quant.Q3_K, Quant.Q4_K, Quant.Q5_K, Quant.Q6_K, Quant.IQ4_XS)
    n, ffn = (256, 256) if wide else (288, 32)
    if lab.on_gpu:
        n, ffn = 2048, 768
    bench = Bench(lab, count=3, used=2, n=n, ffn=ffn, types=(quant,) * 3, rows=64)
    bench.check(rows_of(8 if lab.on_gpu else 2, n), DECODE)
    bench.check(rows_of(64 if lab.on_gpu else 9, n), PREFILL)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"joined": True},
        {"types": (Quant.Q4_0, Quant.Q8_0, Quant.F16)},
        {"types": (Quant.F16, Quant.F32, Quant.Q5_1), "router": Quant.Q8_0},
        {"types": (Quant.F32, Quant.F32, Quant.IQ4_NL), "shared": 64},
        {"joined": True, "types": (Quant.BF16, Quant.BF16, Quant.BF16), "shared": 32, "router": Quant.F16},
    ],
    ids=str,
)
def test_experts_of_any_form(lab: Any, case: dict[str, Any], activation: Activation, phase: Phase) -> None:
    """Gates and ups side by side, one behind the other, of two types; with a shared expert; with other routers."""
    if not lab.on_gpu and activation is Activation.GELU and case.get("types"):
        pytest.skip("for a GPU alone: the stand-in is slow")
    bench = Bench(lab, count=6, used=3, n=64, ffn=32, seed=3, rows=20, activation=activation, **case)
    bench.check(rows_of(5 if phase is DECODE else 20, 64), phase)


@pytest.mark.parametrize(("count", "used"), [(1, 1), (4, 4), (130, 8), (300, 2)])
def test_experts_of_any_number(lab: Any, count: int, used: int) -> None:
    """One expert, all of them, more than the router's small kernel takes; most have no row."""
    bench = Bench(lab, count=count, used=used, n=64, ffn=32, rows=11)
    bench.check(rows_of(2, 64), DECODE)
    bench.check(rows_of(11, 64), PREFILL)


def test_a_prefill_goes_through_in_parts(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than the scratch has room for are those that it is given some at a time, bit for bit."""
    bench = Bench(lab, count=4, used=2, n=64, ffn=32, shared=32, rows=40)
    x = rows_of(40, 64)
    bench.check(x, PREFILL)
    monkeypatch.setattr(family, "PREFILL_ROWS", 16)
    parts = [bench.run(x[first : first + 16], PREFILL) for first in range(0, 40, 16)]
    assert bench.run(x, PREFILL).tobytes() == np.concatenate(parts).tobytes()


@pytest.mark.parametrize(
    ("types", "shared"), [((Quant.Q8_0,) * 3, 64), ((Quant.F16, Quant.F16, Quant.Q4_0), 0)], ids=str
)
def test_a_row_s_bits_do_not_depend_on_the_others(lab: Any, types: tuple[Quant, Quant, Quant], shared: int) -> None:
    """Of a decode step of 8 rows each has the bits that it has alone, though they share experts."""
    bench = Bench(lab, count=4, used=2, n=544, ffn=64, types=types, shared=shared)
    x = rows_of(MAX_ROWS, 544)
    whole = bench.run(x, DECODE)
    assert np.isfinite(whole).all()
    for part in (slice(0, 1), slice(3, 4), slice(7, 8), slice(2, 7)):
        assert bench.run(x[part], DECODE).tobytes() == whole[part].tobytes()


def chosen_from(
    lab: Any, logits: np.ndarray, used: int, logit_scale: float = 1.0, gains: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """What ``choose_experts`` leaves of logits [T, experts]: ids [T, used] and shares [T, used + 1]."""
    rows, count = logits.shape
    ids, shares = lab.empty((rows, used), np.int32), lab.empty((rows, used + 1), np.float32)
    lab.launcher.launch(
        family._CHOOSE, (rows, 1, 1), 256,
        (
            lab.array(logits), count, used, logit_scale, 0 if gains is None else lab.array(gains),
            lab.array(np.zeros((rows, 4), np.float32)), lab.array(np.ones((rows, 1), np.float32)), EPS, 4, 0, ids,
            shares, lab.empty(rows, np.float32),
        ),
        shared_bytes=family._choice_bytes(count),
    )
    return lab.host(ids), lab.host(shares)


@pytest.mark.parametrize(("used", "logit_scale", "gains"), [(1, 1.0, False), (3, 0.25, True), (7, 1.0, False)])
def test_the_choice_is_the_host_s(lab: Any, used: int, logit_scale: float, gains: bool) -> None:
    """Of equal logits the lower number, negative and infinite ones in order, a NaN last; by number, shares sum to 1,
    before each is multiplied with its expert's factor."""
    logits = np.random.default_rng(1).integers(-3, 3, (6, 7)).astype(np.float32)
    logits[1] = 0
    logits[2] = [-1e4, 1e4, 0, 9999, -0.0, 1e-30, -1e-30]
    logits[3, :2] = np.nan
    logits[4, 3] = -np.inf
    factors = np.float32([2, 0.5, -1, 3, 0.25, 1, 0])
    ids, shares = chosen_from(lab, logits, used, logit_scale, factors if gains else None)
    chosen, weights = choose(np.where(np.isnan(logits), -np.inf, logits) * np.float32(logit_scale), used)
    if gains:
        weights *= factors[chosen]
    order = np.argsort(chosen, axis=1)
    rows = [0, 1, 2, 4, 5] if used == 7 else list(range(6))   # a NaN that is chosen leaves no sum
    assert ids.tolist() == np.take_along_axis(chosen, order, 1).tolist()
    np.testing.assert_allclose(
        shares[rows, :used], np.take_along_axis(weights, order, 1)[rows], rtol=2e-6, atol=1e-30
    )


@pytest.mark.parametrize("count", [1, 3, 6, 8, 257])
def test_nobody_writes_where_keys_are_read_by_four(lab: Any, count: int) -> None:
    """Between the last key and the next multiple of 16 bytes; ranks are behind it."""
    if lab.on_gpu:
        pytest.skip("shared memory is gone after a launch")
    chosen_from(lab, np.arange(count, dtype=np.float32)[None], 1)
    words = np.frombuffer(lab.launcher.left_shared(family._CHOOSE, family._choice_bytes(count)), np.uint32)
    fours = -(-count // 4) * 4
    assert (np.diff(words[:count].astype(np.int64)) > 0).all()   # keys, in the order of logits
    assert (words[count:fours] == 0xFFFFFFFF).all()
    assert words[fours : fours + count].tolist() == list(range(count))[::-1]   # ranks


@pytest.mark.parametrize(("count", "slots"), [(1, 40), (9, 3), (5, 333), (70, 64)])
def test_groups_hold_each_slot_once(lab: Any, count: int, slots: int) -> None:
    """An expert's slots in order, eight to a group, and no group is left as it was."""
    ids = np.random.default_rng(slots).integers(0, count, slots).astype(np.int32)
    n_groups = family._groups(slots, count)
    order, groups = lab.empty(slots, np.int32), lab.empty((n_groups, 4), np.int32)
    lab.launcher.launch(family._GROUP_SLOTS, (count, 1, 1), 32, (lab.array(ids), slots, order, groups))
    assert lab.host(order).tolist() == np.argsort(ids, kind="stable").tolist()
    found = [row for row in lab.host(groups).tolist() if row[2] > 0]
    assert lab.host(groups)[:, 2].min() >= 0
    expected = []
    for expert in range(count):
        first, mine = int((ids < expert).sum()), int((ids == expert).sum())
        expected += [[expert, first + at, min(8, mine - at), 0] for at in range(0, mine, 8)]
    assert found == expected


def test_sizes_without_a_kernel_are_refused(lab: Any) -> None:
    """Experts whose rows do not fill tiles of records, before anything is loaded."""
    store = store_in(lab)
    with pytest.raises(CapabilityError, match="experts of 24 rows of 64 Q8_0 have no kernel on a GPU, which takes"):
        store.load_experts([drawn("blk.0.ffn_down_exps.weight", Quant.Q8_0, 64, 24, 0, 2)])
    assert store.held_bytes == 0


def launched_by(lab: Any, bench: Any, monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """The kernels of experts that ``bench.run`` launches, of two rows of 64 in each phase."""
    launched, launch = set(), lab.launcher.launch

    def note(kernel: Any, *args: Any, **options: Any) -> None:
        launched.add(kernel)
        launch(kernel, *args, **options)

    monkeypatch.setattr(lab.launcher, "launch", note)
    for phase in Phase:
        bench.run(rows_of(2, 64), phase)
    return {kernel for kernel in launched if "experts" in kernel.source}


@pytest.mark.parametrize(
    "case", [{"joined": True}, {"types": (Quant.F16, Quant.Q4_0, Quant.Q8_0)}, {"shared": 32}], ids=str
)
def test_what_is_launched_was_made_ready(lab: Any, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's kernels are those that its steps launch, no more but for the end of the other kind of mixture, which
    comes with them; and all are among the family's."""
    bench = Bench(lab, count=3, used=2, n=64, ffn=32, **case)
    launched = launched_by(lab, bench, monkeypatch)
    ready = [kernel for kernel in kernels_for(bench.store.stacks, Activation.SILU) if "experts" in kernel.source]
    assert launched == set(ready) - {family._MIX}
    assert set(ready) <= set(instances(90))
