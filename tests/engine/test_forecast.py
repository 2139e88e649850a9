"""Forecasts: by hand, by their order, and against what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.cuda.weights import part_bytes
from kvs_core.device.host.device import HostDevice
from kvs_core.engine.budget import NO_DRAFTING, Drafting, plan_budget
from kvs_core.engine.engine import Engine
from kvs_core.engine.forecast import (
    IN_FILE,
    Rates,
    Rounds,
    Setup,
    Weights,
    contexts,
    forecast,
    place,
    side_by_side,
)
from kvs_core.engine.held import FLOATS, held_on_cuda, held_on_host, held_weights
from kvs_core.engine.rates import gpu_rates
from kvs_core.engine.split import Splits
from kvs_core.formats.gguf import GgufFile
from kvs_core.models.registry import read_spec
from kvs_core.models.spec import ModelSpec
from kvs_core.models.synthetic import synthetic_model
from kvs_core.paging.geometry import GROUP_PAGES
from kvs_core.settings.drafters import ModelDraftSettings, SpeculativeSettings
from kvs_core.settings.rooms import ContextSettings, KvSettings, RopeSettings
from tests.engine.tiny import kv_settings, run, text
from tests.support.tiny_gguf import Gemma4, write_tiny_gemma4, write_tiny_qwen35moe

H200_MEMORY = 4.167e12   # copies within its memory, bytes read and written per second

ROUND = Rates(
    link_bytes_per_s=1e9, weight_bytes_per_s={"": 1e9, "Q8_0": 2e9}, row_costs={"": (1.0, 1.5), "Q8_0": (1.0, 1.0)},
    attention_bytes_per_s=1e8, attention_row=0.5, layer_s=1e-3, least_attention_s=1e-4, run_s=1e-5, run_rows_s=3e-5,
    copy_s=2e-5, round_s=3e-3, plan_s=1e-4, draft_s=5e-3,
)


@cache
def model_of(name: str, nextn: bool) -> tuple[ModelSpec, Weights]:
    """A synthetic model as a GPU would hold it."""
    file = synthetic_model(name)
    spec = read_spec(file)
    return spec, held_weights(file, spec, held_on_cuda, nextn=nextn)


def setup_of(
    name: str, context: int, arena_mib: int, *, drafting: Drafting = NO_DRAFTING, kv: Mapping[str, Any] | None = None
) -> Setup:
    """Of that model, with as many bytes as a GPU would hold."""
    spec, weights = model_of(name, drafting.nextn)
    chosen = KvSettings("q8_0", "q4_0", arena_mib=arena_mib, **(kv or {}))
    budget = plan_budget(spec, ContextSettings(ctx_size=context), chosen, free_bytes=1 << 40, drafting=drafting)
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
    two = forecast(setup, ROUND, tokens, Rounds("draft-mtp", 1, None))
    rest_s = 1.5 * read / 1e9 + 8e-3 + 1.5 * 2 * setup.budget.geometry.token_bytes * (tokens + 2) / 1e8
    assert two.kernels_s == pytest.approx(rest_s + two.placement.runs * 4e-5)
    assert point.host_s == pytest.approx(3e-3 + placed.runs * 1e-4)
    assert point.round_s == pytest.approx(point.step_s + point.host_s)
    assert point.tokens_per_s == pytest.approx(1 / point.round_s)


def test_weights_that_pass_by_hand() -> None:
    """The link brings them in every step, part by part, beside the pages, and once more for each draft of the model
    itself; the device does not hold them, kernels read them all the same."""
    name, tokens, drafting = "tiny:q8_0", 32000, Drafting(resident=True)
    plain, file = setup_of(name, 32768, 17, drafting=drafting), synthetic_model(name)
    split = Splits(file, read_spec(file), part_bytes).at(4)
    assert len(split.passing) == 5
    held = held_weights(file, read_spec(file), held_on_cuda, nextn=False, passing=split.passing)
    setup = replace(plain, split=split, weights=held)
    assert held.trunk == plain.weights.trunk
    assert plain.weights.size_bytes - held.size_bytes == split.pass_bytes   # all parts are whole tiles
    rounds = Rounds("draft-resident", 2, None)
    before, after = (forecast(each, ROUND, tokens, rounds) for each in (plain, setup))
    pass_s = split.pass_bytes / 1e9 + 10 * 2e-5
    runs = after.placement.runs
    assert after.link_s == pytest.approx(after.placement.streamed_bytes / 1e9 + runs * 2e-5 + pass_s)
    assert after.kernels_s == pytest.approx(before.kernels_s + (runs - before.placement.runs) * 4e-5)
    slow = replace(ROUND, link_bytes_per_s=1e6)
    drafts_s = forecast(setup, slow, tokens, rounds).drafts_s
    assert drafts_s == pytest.approx(2 * (split.pass_bytes / 1e6 + 10 * 2e-5 + 5e-3))


def test_drafts_by_hand() -> None:
    """An MTP draft is a layer, the head and a look at its guess; a resident one the trunk on what is on the device."""
    both = Drafting(nextn=True, resident=True)
    setup = setup_of("tiny:f16:mtp", 32768, 17, drafting=both)
    weights, tokens = setup.weights, 32000
    layer_bytes = setup.budget.geometry.token_bytes * tokens
    mtp = forecast(setup, ROUND, tokens, Rounds("draft-mtp", 2, 2.5))
    read = sum(weights.nextn.values()) + sum(weights.head.values())
    assert mtp.placement.cuts[-1] == 0   # its layer is the last to give pages up
    assert mtp.drafts_s == pytest.approx(2 * (read / 1e9 + 1e-3 + layer_bytes / 1e8 + 5e-3))
    assert mtp.tokens_per_s == pytest.approx(2.5 / mtp.round_s)
    for drafts in range(8):   # of a round, and of each drafted row
        rounds = Rounds("draft-mtp", drafts, None) if drafts else Rounds()
        point = forecast(setup, ROUND, 1000, rounds)
        assert point.placement.runs == 0
        assert point.host_s == pytest.approx(3e-3 + drafts * 5e-3)
        assert point.round_s == pytest.approx(point.step_s + point.drafts_s + 3e-3)
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
    """At least the longer of the two, at most 4 % more, in any order, and exactly the longer one beside nothing."""
    both = side_by_side(first, second)
    assert max(first, second) * (1 - 1e-12) <= both <= 1.04 * max(first, second)
    assert both == side_by_side(second, first)
    assert side_by_side(first, 0.0) == first


@settings(max_examples=30)
@given(st.integers(30, 400), st.integers(1, 64), st.integers(1, 65535))
def test_more_arena_is_not_slower_and_more_context_not_faster(arena: int, more: int, tokens: int) -> None:
    """But for the grain of groups, of which rings and cuts are made: 2 %."""
    small, large = setup_of("small:q8_0", 65536, arena), setup_of("small:q8_0", 65536, arena + more)
    rates = gpu_rates({"link": 50e9, "memory": 4e12, "round": 2e-4, "draft": 1e-4})
    at = forecast(small, rates, tokens, Rounds())
    assert forecast(large, rates, tokens, Rounds()).round_s <= 1.02 * at.round_s
    assert forecast(small, rates, min(tokens + more * 256, 65535), Rounds()).round_s >= 0.98 * at.round_s


@pytest.mark.parametrize("model", ["qwen35", "gemma4"])
def test_pages_are_where_the_engine_has_them(tiny_models: dict[str, Path], model: str) -> None:
    """Streamed pages, ring and copies of a step are a real one's, but for a group of pages, as often as they are read;
    with an MTP block, and with layers that share pages beside a pool of those that slide."""
    file = GgufFile.open(tiny_models[model])
    spec = read_spec(file)
    drafting = Drafting(nextn=bool(spec.nextn))
    context, kv = ContextSettings(ctx_size=2048, ubatch=64), kv_settings(arena_mib=1, ring_slots=8, run_pages=4)
    budget = plan_budget(spec, context, kv, free_bytes=0, drafting=drafting)
    setup = Setup.of(spec, budget, kv, held_weights(file, spec, held_on_cuda, nextn=drafting.nextn), drafting)
    engine = Engine(file, HostDevice(1), context=context, kv=kv, rope=RopeSettings(), drafting=drafting)
    try:
        run(engine, text(spec.n_vocab, 1500), [1])
        placed = place(setup, ROUND, engine.committed, 1)
        before = engine.report()
        with engine.step([1], engine.phase) as step:
            step.settle()
        after = engine.report()
        stats = after.stats
        assert (placed.pages, placed.ring_slots) == (stats.active_pages, stats.ring_slots)
        # The engine takes a group back only when there is room for the next page too.
        assert 0 < placed.streamed_pages <= stats.streamed_pages_per_step <= placed.streamed_pages + GROUP_PAGES
        assert abs(placed.runs - (after.h2d_calls - before.h2d_calls)) <= 2
    finally:
        engine.close()


def test_keys_that_make_values_too_are_held_twice() -> None:
    """On a GPU, in the layers without a matrix for values."""
    file = synthetic_model("gemma4-31b:q8_0")
    spec = read_spec(file)
    once, twice = (
        held_weights(file, spec, held_on_cuda, nextn=False, twice=twice).size_bytes for twice in (False, True)
    )
    assert twice - once == 10 * held_on_cuda(file.tensors["blk.5.attn_k.weight"])[1]


@pytest.mark.parametrize("name", ["qwen3-30b-a3b:q8_0", "gemma4-31b:q8_0", "gemma4-26b-a4b:q8_0"])
def test_what_passes_is_held_no_more(name: str) -> None:
    """Of experts too, and of keys that make values: all matrices of the layers, but for those that nobody computes."""
    file = synthetic_model(name)
    spec = read_spec(file)
    splits = Splits(file, spec, part_bytes)
    split = splits.at(1 + spec.n_layer // 2)
    assert len(split.passing) == spec.n_layer // 2
    held, rest = (
        held_weights(file, spec, held_on_cuda, nextn=False, twice=True, passing=passing).size_bytes
        for passing in ((), split.passing)
    )
    assert held - rest == split.pass_bytes
    layers = {
        info.name: 2 * held_bytes if twice else held_bytes
        for info in file.tensors.values() if info.name.startswith("blk.") and len(info.shape) > 1
        for held_bytes, twice in [(part_bytes([info]), info.name.replace("attn_k.", "attn_v.") not in file.tensors)]
    }
    assert splits.at(0).pass_bytes == sum(layers.values())


def test_keys_that_nobody_computes_are_not_held(tmp_path: Path) -> None:
    """A layer that reads those of another may carry some of its own."""
    file = GgufFile.open(write_tiny_gemma4(
        tmp_path / "gemma4.gguf", seed=2, pattern=[True, False, True, False], more=Gemma4(shared=2),
    ))
    spec = read_spec(file)
    carried = [replace(file.tensors[f"blk.1.attn_{name}.weight"], name=f"blk.3.attn_{name}.weight") for name in "kv"]
    fuller = replace(file, tensors={**file.tensors, **{info.name: info for info in carried}})
    split, other = (Splits(each, spec, part_bytes).at(0) for each in (file, fuller))
    assert split == other
    held, of_fuller = (held_weights(each, spec, held_on_cuda, nextn=False).size_bytes for each in (file, fuller))
    assert held == of_fuller


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
    weights = held_weights(file, spec, held_on_host(1 << 40), nextn=False, table=True)
    assert set(weights.trunk) == set(weights.head) == {FLOATS}
    small = sum(4 * info.n_elements for info in file.tensors.values() if len(info.shape) == 1 or "conv1d" in info.name)
    assert weights.size_bytes < bare <= weights.size_bytes + small
    tight = held_weights(file, spec, held_on_host(weights.size_bytes), nextn=False)
    assert tight.trunk[FLOATS] + tight.trunk[IN_FILE] == weights.trunk[FLOATS]
    assert tight.size_bytes <= 0.6 * weights.size_bytes


@pytest.mark.parametrize("limit", [None, 600_000, 100_000])
def test_experts_on_the_host(tmp_path: Path, limit: int | None) -> None:
    """They are held last, one by one while there is room, as the host device holds them; a row reads its share."""
    file = GgufFile.open(write_tiny_qwen35moe(tmp_path / "m.gguf", seed=1, weight_type="q8_0"))
    spec = read_spec(file)
    engine = Engine(
        file, HostDevice(1, memory_limit_bytes=limit), context=ContextSettings(ctx_size=256), kv=KvSettings(),
        rope=RopeSettings(), drafting=Drafting(nextn=True),
    )
    try:
        held = engine.memory_report()["weights"]
    finally:
        engine.close()
    free = 1 << 40 if limit is None else round(limit / 0.6)
    weights = held_weights(file, spec, held_on_host(free), nextn=True, table=True)
    bare = sum(4 * info.n_elements for info in file.tensors.values() if len(info.shape) == 1 or "conv1d" in info.name)
    assert abs(held - weights.size_bytes - bare) < 4 * 64 * 32   # of one expert's matrix
    experts, block = 4 * 3 * 5 * 4 * 64 * 32, 3 * 5 * 4 * 64 * 32
    assert (sum(weights.experts.values()), sum(weights.nextn_experts.values())) == (experts, block)
    assert weights.share == 2 / 5
    assert IN_FILE not in weights.experts if limit is None else weights.experts[IN_FILE] > 0


def test_a_row_reads_its_own_experts() -> None:
    """A step of a mixture by hand: beside all other matrices, the share of the experts once per row."""
    setup = setup_of("tiny:q8_0", 4096, 64)
    mixed = replace(setup, weights=replace(setup.weights, experts={"Q8_0": 10**9}, share=0.25))
    for rows in (1, 2):
        rounds = Rounds("", rows - 1, 1.0)
        before, after = forecast(setup, ROUND, 1000, rounds), forecast(mixed, ROUND, 1000, rounds)
        assert after.kernels_s - before.kernels_s == pytest.approx(rows * 0.25 * 10**9 / 2e9)
    drafting = Rounds("draft-resident", 2, 2.0)
    before, after = forecast(setup, ROUND, 1000, drafting), forecast(mixed, ROUND, 1000, drafting)
    assert after.round_s - before.round_s == pytest.approx((3 + 2) * 0.25 * 10**9 / 2e9)   # a step of 3 rows, 2 drafts


def test_what_a_round_brings() -> None:
    """With synthetic acceptance its mean, without any nothing is known, and n-gram drafts are left out."""
    three = ModelDraftSettings(n_max=3)
    assert Rounds.of(SpeculativeSettings()) == Rounds("", 0, 1.0)
    assert Rounds.of(SpeculativeSettings(("ngram-mod",))) == Rounds("", 0, 1.0)
    assert Rounds.of(SpeculativeSettings(("draft-mtp",), draft=three)) == Rounds("draft-mtp", 3, None)
    length = Rounds.of(SpeculativeSettings(("draft-mtp",), draft=three, synth_len=2.5))
    assert length.tokens == pytest.approx(2.5)
    rates = Rounds.of(SpeculativeSettings(("draft-resident",), draft=three, synth_rates=(0.9, 0.5, 0.25)))
    assert (rates.kind, rates.rows) == ("draft-resident", 4)
    assert rates.tokens == pytest.approx(2.65)


def test_where_to_look() -> None:
    """The end of the context with room for a round, and halves of it down to a group of pages."""
    assert contexts(8192, 1, 256) == [1023, 2047, 4095, 8191]
    assert contexts(512, 4, 256) == [508]


STEPS = (
    # Model, context, tokens, rows: milliseconds of a step on an H200 whose link moved 55 GB/s, arena 2,240 MiB, K q8_0,
    # V q4_0: benchmarks/results/gpu_check.json at commit d29211f.
    ("q4_k", 8192, 4096, 1, 4.661), ("q4_k", 8192, 4096, 2, 4.963), ("q4_k", 8192, 4096, 4, 5.236),
    ("q4_k", 8192, 4096, 6, 5.814), ("q4_k", 8192, 4096, 8, 6.072),
    ("iq4_xs", 8192, 4096, 1, 4.638), ("iq4_xs", 8192, 4096, 2, 4.962), ("iq4_xs", 8192, 4096, 4, 5.211),
    ("iq4_xs", 8192, 4096, 6, 6.278), ("iq4_xs", 8192, 4096, 8, 6.586),
    ("q4_k", 16384, 15360, 1, 4.570), ("q4_k", 65536, 64512, 1, 4.807), ("q4_k", 131072, 130048, 1, 22.625),
    ("q4_k", 262144, 261120, 1, 85.839),
)
ROUNDS = (
    # Context and drafts of the MTP block: milliseconds of a round by the host's clock; iq4_xs, on another such machine:
    # benchmarks/results/sweep_h200.
    (8192, 0, 4.77), (8192, 1, 5.91), (8192, 2, 6.51), (8192, 3, 7.04),
    (32768, 0, 4.83), (32768, 1, 5.73), (32768, 2, 6.42), (32768, 3, 7.12),
    (65536, 0, 4.93), (65536, 1, 6.06), (65536, 2, 7.00), (65536, 3, 7.69),
    (131072, 0, 23.47), (131072, 1, 27.90), (131072, 2, 28.36), (131072, 3, 28.82),
    (262144, 0, 86.76), (262144, 1, 95.29), (262144, 2, 95.88), (262144, 3, 96.56),
)
HOST_PART = {"round": 0.17e-3, "draft": 0.12e-3}   # of those rounds: beside their steps, and beside each draft's bytes
RESIDENT_DRAFT_MS = 4.90   # q4_k with an MTP block, 4 Ki before the end of 256 Ki


def test_within_ten_percent_of_an_h200() -> None:
    """Steps and rounds of synthetic 27B models, resident and streamed, of one row to eight, and a row drafted on
    resident pages: each within 10 % of what was measured."""
    rates = gpu_rates({"link": 55.0e9, "memory": H200_MEMORY} | HOST_PART)
    off: dict[object, float] = {}
    for mix, context, tokens, rows, took in STEPS:
        setup = setup_of(f"qwen3.5-27b:{mix}", context, 2240)
        kind = Rounds("draft-mtp", rows - 1, None) if rows > 1 else Rounds()
        off[mix, tokens, rows] = 1e3 * forecast(setup, rates, tokens, kind).step_s / took - 1
    for context, drafts, took in ROUNDS:
        setup, kind = setup_of("qwen3.5-27b:iq4_xs", context, 2240), Rounds()
        if drafts:
            setup = setup_of("qwen3.5-27b:iq4_xs:mtp", context, 2240, drafting=Drafting(nextn=True))
            kind = Rounds("draft-mtp", drafts, None)
        off[context, drafts] = 1e3 * forecast(setup, rates, context - 464, kind).round_s / took - 1
    setup = setup_of("qwen3.5-27b:q4_k:mtp", 262144, 2240, drafting=Drafting(nextn=True, resident=True))
    point = forecast(setup, rates, 262144 - 4096, Rounds("draft-resident", 7, 5.0))
    off["resident"] = 1e3 * point.drafts_s / 7 / RESIDENT_DRAFT_MS - 1
    assert all(abs(part) < 0.1 for part in off.values()), off
