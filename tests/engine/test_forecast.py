"""Forecasts: by hand, by their order, and against what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.host.device import HostDevice
from kvs_core.engine.budget import NO_DRAFTING, Drafting, plan_budget
from kvs_core.engine.engine import Engine
from kvs_core.engine.forecast import (
    IN_FILE,
    Rates,
    Rounds,
    Setup,
    contexts,
    forecast,
    place,
    side_by_side,
)
from kvs_core.engine.held import FLOATS, held_on_cuda, held_on_host, held_weights
from kvs_core.engine.rates import gpu_rates
from kvs_core.formats.gguf import GgufFile
from kvs_core.models.registry import read_spec
from kvs_core.models.synthetic import synthetic_model
from kvs_core.settings.drafters import ModelDraftSettings, SpeculativeSettings
from kvs_core.settings.rooms import ContextSettings, KvSettings, RopeSettings
from kvs_core.units import MIB
from tests.engine.tiny import kv_settings, run, text

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_check.json"
H200_MEMORY = 4.167e12   # copies within its memory, bytes read and written per second

ROUND = Rates(
    link_bytes_per_s=1e9, weight_bytes_per_s={"": 1e9, "Q8_0": 2e9}, row_costs={"": (1.0, 1.5), "Q8_0": (1.0, 1.0)},
    attention_bytes_per_s=1e8, attention_row=0.5, layer_s=1e-3, least_attention_s=1e-4, run_s=1e-5, copy_s=2e-5,
    round_s=3e-3, plan_s=1e-4, draft_s=5e-3,
)


def setup_of(
    name: str, context: int, arena_mib: int, *, drafting: Drafting = NO_DRAFTING, kv: Mapping[str, Any] | None = None
) -> Setup:
    """A synthetic model as a GPU would hold it."""
    file = synthetic_model(name)
    spec = read_spec(file)
    chosen = KvSettings("q8_0", "q4_0", arena_mib=arena_mib, **(kv or {}))
    budget = plan_budget(spec, ContextSettings(ctx_size=context), chosen, free_bytes=1 << 40, drafting=drafting)
    weights = held_weights(file, spec, held_on_cuda, nextn=drafting.nextn)
    return Setup.of(spec, budget, chosen, weights, drafting)


def test_a_resident_step_by_hand() -> None:
    """Weights by type and rows, a fixed part per layer, attention by bytes: the sum, and nothing over the link."""
    setup = setup_of("tiny:q8_0", 4096, 64)   # 8 layers, 2 of them attention; all matrices q8_0
    read = setup.weights.trunk["Q8_0"] + setup.weights.head["Q8_0"]
    assert read == setup.weights.size_bytes
    for tokens, rows in ((1000, 1), (3000, 2)):
        point = forecast(setup, ROUND, tokens, Rounds("", rows - 1, 1.0) if rows == 1 else Rounds("draft-x", 1, 2.0))
        kv_bytes = 2 * (34 + 18) * 2 * (tokens + rows)   # of a layer: 2 heads of 64 in q8_0 and q4_0
        attention = 2 * kv_bytes / 1e8 * (1.0 + 0.5 * (rows - 1))
        assert point.kernels_s == pytest.approx(read / 2e9 + 8e-3 + attention)
        assert (point.link_s, point.step_s) == (0.0, point.kernels_s)
    assert forecast(setup, ROUND, 0, Rounds()).kernels_s == pytest.approx(read / 2e9 + 8e-3 + 2e-4)


def test_a_streamed_round_by_hand() -> None:
    """Bytes over the link and each copy; a call per run among the kernels; the host's part per round and run."""
    setup = setup_of("tiny:f16", 32768, 6, kv={"ring_slots": 8, "run_pages": 4})
    tokens = 32000
    placed = place(setup, ROUND, tokens, 1)
    pages = 2 * 126
    assert placed.pages == pages == placed.resident_pages + placed.streamed_pages
    assert placed.ring_slots == 8
    assert placed.runs == sum(-(-cut // 4) for cut in placed.cuts)
    assert placed.streamed_bytes == placed.streamed_pages * setup.budget.geometry.page_bytes > 0
    point = forecast(setup, ROUND, tokens, Rounds())
    assert point.link_s == pytest.approx(placed.streamed_bytes / 1e9 + placed.runs * 2e-5)
    read = setup.weights.size_bytes
    attention = 2 * setup.budget.geometry.token_bytes * (tokens + 1) / 1e8
    assert point.kernels_s == pytest.approx(read / 1e9 + 8e-3 + attention + placed.runs * 1e-5)
    assert point.step_s == side_by_side(point.kernels_s, point.link_s)
    assert point.round_s == pytest.approx(point.step_s + 3e-3 + placed.runs * 1e-4)
    assert point.tokens_per_s == pytest.approx(1 / point.round_s)


def test_drafts_by_hand() -> None:
    """An MTP draft is one layer, the head and a look at its guess; a resident one the trunk on what is on the device."""
    both = Drafting(nextn=True, resident=True)
    setup = setup_of("tiny:f16:mtp", 32768, 6, drafting=both)
    weights, tokens = setup.weights, 32000
    layer_bytes = setup.budget.geometry.token_bytes * tokens
    mtp = forecast(setup, ROUND, tokens, Rounds("draft-mtp", 2, 2.5))
    read = sum(weights.nextn.values()) + sum(weights.head.values())
    assert mtp.placement.cuts[-1] == 0   # its layer is the last to give pages up
    assert mtp.drafts_s == pytest.approx(2 * (read / 1e9 + 1e-3 + layer_bytes / 1e8 + 5e-3))
    assert mtp.tokens_per_s == pytest.approx(2.5 / mtp.round_s)
    resident = forecast(setup, ROUND, tokens, Rounds("draft-resident", 2, None))
    read = sum(weights.trunk.values()) + sum(weights.head.values())
    cuts = resident.placement.cuts[:2]
    assert min(cuts) > 4
    there = sum(tokens - 256 * (cut - 4) for cut in cuts)   # the first group stays too
    attention = there * setup.budget.geometry.token_bytes / 1e8
    assert resident.drafts_s == pytest.approx(2 * (read / 1e9 + 8e-3 + attention + 5e-3))
    assert resident.tokens_per_s is None


@given(st.floats(0.0, 1e3), st.floats(0.0, 1e3))
def test_work_side_by_side(first: float, second: float) -> None:
    """At least the longer of the two, at most 4.5 % more, in any order, and exactly the longer one beside nothing."""
    both = side_by_side(first, second)
    assert max(first, second) * (1 - 1e-12) <= both <= 1.045 * max(first, second)
    assert both == side_by_side(second, first)
    assert side_by_side(first, 0.0) == first


ENDS = setup_of("small:q8_0", 65536, 400)


@settings(max_examples=30)
@given(st.integers(25, 400), st.integers(1, 64), st.integers(1, 65535))
def test_more_arena_is_not_slower_and_more_context_not_faster(arena: int, more: int, tokens: int) -> None:
    """But for the grain of groups, of which rings and cuts are made: 2 %."""
    small, large = setup_of("small:q8_0", 65536, arena), setup_of("small:q8_0", 65536, arena + more)
    rates = gpu_rates({"link": 50e9, "memory": 4e12})
    at = forecast(small, rates, tokens, Rounds())
    assert forecast(large, rates, tokens, Rounds()).round_s <= 1.02 * at.round_s
    assert forecast(small, rates, min(tokens + more * 256, 65535), Rounds()).round_s >= 0.98 * at.round_s


def test_pages_are_where_the_engine_has_them(tiny_qwen35: Path) -> None:
    """Streamed pages, ring and runs of a step are those of a real one, with an MTP block beside the trunk."""
    file = GgufFile.open(tiny_qwen35)
    spec, drafting = read_spec(file), Drafting(nextn=True)
    context, kv = ContextSettings(ctx_size=2048, ubatch=64), kv_settings(arena_mib=1, ring_slots=8, run_pages=4)
    budget = plan_budget(spec, context, kv, free_bytes=0, drafting=drafting)
    setup = Setup.of(spec, budget, kv, held_weights(file, spec, held_on_cuda, nextn=True), drafting)
    engine = Engine(file, HostDevice(1), context=context, kv=kv, rope=RopeSettings(), drafting=drafting)
    try:
        run(engine, text(spec.n_vocab, 1500), [1])
        before = engine.report()
        run_tokens = engine.committed
        with engine.step([1], engine.phase) as step:
            step.settle()
        after = engine.report()
        placed = place(setup, ROUND, run_tokens, 1)
        stats = after.stats
        assert placed.streamed_pages > 0
        assert (placed.pages, placed.resident_pages, placed.streamed_pages, placed.ring_slots) == (
            stats.active_pages, stats.resident_pages, stats.streamed_pages_per_step, stats.ring_slots)
        assert placed.runs >= after.h2d_calls - before.h2d_calls > 0
    finally:
        engine.close()


@pytest.mark.parametrize(("name", "nextn", "held"), [
    ("qwen3.5-27b:iq4_xs", False, 13_979_176_960), ("qwen3.5-27b:iq4_xs:mtp", True, 14_204_784_640)])
def test_weights_on_a_gpu(name: str, nextn: bool, held: int) -> None:
    """As many bytes as the CUDA device said it held of these models. The MTP block is none of them unless it drafts."""
    file = synthetic_model(name)
    spec = read_spec(file)
    assert held_weights(file, spec, held_on_cuda, nextn=nextn).size_bytes == held
    assert held_weights(file, spec, held_on_cuda, nextn=False).size_bytes == 13_979_176_960


def test_weights_on_the_host() -> None:
    """float32 while there is room, the rest in the file, where it takes no memory; as the host device holds them."""
    file = synthetic_model("tiny:q8_0:mtp")
    spec = read_spec(file)
    engine = Engine(file, HostDevice(1), context=ContextSettings(ctx_size=256), kv=KvSettings(), rope=RopeSettings())
    try:
        bare = engine.memory_report()["weights"]
    finally:
        engine.close()
    weights = held_weights(file, spec, held_on_host(1 << 40), nextn=False)
    assert set(weights.trunk) == set(weights.head) == {FLOATS}
    vectors = sum(4 * info.n_elements for info in file.tensors.values() if len(info.shape) == 1)
    assert weights.size_bytes <= bare <= weights.size_bytes + vectors + 4 * 4 * 4096 * spec.n_layer
    tight = held_weights(file, spec, held_on_host(weights.size_bytes), nextn=False)
    assert tight.trunk[FLOATS] + tight.trunk[IN_FILE] == weights.trunk[FLOATS]
    assert tight.size_bytes <= 0.6 * weights.size_bytes


def test_what_a_round_brings() -> None:
    """With synthetic acceptance its mean, without any nothing is known, and n-gram drafts are left out."""
    three = ModelDraftSettings(n_max=3)
    assert Rounds.of(SpeculativeSettings()) == Rounds("", 0, 1.0)
    assert Rounds.of(SpeculativeSettings(("ngram-mod",))) == Rounds("", 0, 1.0)
    assert Rounds.of(SpeculativeSettings(("draft-mtp",), draft=three)) == Rounds("draft-mtp", 3, None)
    length = Rounds.of(SpeculativeSettings(("draft-mtp",), draft=three, synth_len=2.5))
    assert length.tokens == pytest.approx(2.5)
    rates = Rounds.of(SpeculativeSettings(("draft-resident",), draft=three, synth_rates=(0.9, 0.5, 0.25)))
    assert (rates.kind, rates.rows, rates.tokens) == ("draft-resident", 4, pytest.approx(2.65))


def test_where_to_look() -> None:
    """The end of the context with room for a round, and halves of it down to a group of pages."""
    assert contexts(8192, 1, 256) == [1023, 2047, 4095, 8191]
    assert contexts(512, 4, 256) == [508]


def measured() -> dict[str, Any]:
    """The lines of the check of an H200, by name."""
    found = json.loads(MEASURED.read_text())
    return {"rates": found["rates"], **{line["what"]: line["detail"] for line in found["lines"]}}


def test_within_ten_percent_of_an_h200() -> None:
    """Steps of synthetic 27B models, resident and streamed in 2,240 MiB, of one row to eight, from 4 to 256 Ki, and a
    row drafted on resident pages: each within 10 % of what ``benchmarks/gpu_check.py`` measured."""
    facts = measured()
    rates = gpu_rates({"link": facts["rates"]["h2d"], "memory": H200_MEMORY})
    seen: dict[str, tuple[float, float]] = {}
    for mix in ("q4_k", "iq4_xs"):
        setup = setup_of(f"qwen3.5-27b:{mix}", 8192, 1024)
        seen[mix] = facts[f"{mix}, 1 row: weights / time / HBM"]["gpu_ms"], forecast(setup, rates, 4096, Rounds()).step_s
        for rows in (2, 4, 6, 8):
            point = forecast(setup, rates, 4096, Rounds("draft-mtp", rows - 1, None))
            seen[f"{mix} {rows}"] = facts[f"{mix}, {rows} rows / 1 row"]["gpu_ms"], point.step_s
    for size in (16, 64, 128, 256):
        setup, detail = setup_of("qwen3.5-27b:q4_k", size << 10, 2240), facts[f"{size} Ki: step / max(kernels, link)"]
        point = forecast(setup, rates, (size << 10) - 1024, Rounds())
        assert point.placement.streamed_bytes == pytest.approx(detail["both"]["streamed_bytes"], rel=0.03)
        seen[f"{size} Ki"] = detail["both"]["gpu_ms"], point.step_s
        seen[f"{size} Ki, kernels"] = detail["kernels"]["gpu_ms"], point.kernels_s
    setup = setup_of("qwen3.5-27b:q4_k:mtp", 262144, 2240, drafting=Drafting(nextn=True, resident=True))
    resident = forecast(setup, rates, 262144 - 4096, Rounds("draft-resident", 7, 5.0))
    detail = facts["256 Ki: round of 7 resident drafts / (7 drafts + 1.03 steps)"]
    seen["a resident draft"] = detail["draft_ms"], resident.drafts_s / 7
    off = {name: 1e3 * foretold / took - 1 for name, (took, foretold) in seen.items()}
    assert all(abs(part) < 0.1 for part in off.values()), off


def test_the_arena_of_a_setup_is_its_budget() -> None:
    """What is forecast is what was asked for, to the byte."""
    assert ENDS.budget.memory.arena_bytes == 400 * MIB
