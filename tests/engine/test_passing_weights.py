"""Weights that pass through the arena: the same bits as with all of them on the device, whatever else is going on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.engine.budget import Drafting
from kvs_core.engine.split import ALL_LAYERS
from tests.engine.rounds import WIDE_ROUNDS, Played, Round, play_rounds
from tests.engine.test_exact import DECODE, PROMPT, hostile
from tests.engine.tiny import engine, kv_settings, run, text

DENSE = ["gemma3", "llama", "qwen2", "qwen3", "qwen35"]


@pytest.fixture(scope="module")
def expected(tiny_models: dict[str, Path]) -> dict[str, bytes]:
    """Logits of runs that hold everything."""
    logits = {}
    for name in DENSE:
        with engine(tiny_models[name], kv=kv_settings(residency_mode="resident")) as built:
            vocab = built.spec.n_vocab
            logits[name] = run(built, text(vocab, PROMPT), text(vocab, DECODE, 1)).tobytes()
            assert built.weights_report().passing == ()
            assert built.report().h2d_bytes == built.weights_report().h2d_bytes == 0
    return logits


@settings(max_examples=20)
@given(
    model=st.sampled_from(DENSE),
    gpu_layers=st.sampled_from([0, 1, 2, 3, ALL_LAYERS]),
    pool=st.sampled_from([None, 0.0, 0.1]),
    fixed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_bits_do_not_depend_on_where_weights_are(
    tiny_models: dict[str, Path], expected: dict[str, bytes], model: str, gpu_layers: int, pool: float | None,
    fixed: bool, seed: int,
) -> None:
    """Logits of prefill and decode are those with all weights on the device, bit for bit, for any number of layers that
    pass, beside resident pages and streamed ones, with copies that are late and NaN wherever nobody may read; and what
    passes, passes once in each step."""
    with engine(
        tiny_models[model], kv=kv_settings(), pool=pool, fixed=fixed, debug=hostile(seed), gpu_layers=gpu_layers
    ) as built:
        vocab, layers = built.spec.n_vocab, built.spec.n_layer
        logits = run(built, text(vocab, PROMPT), text(vocab, DECODE, 1))
        found = built.weights_report()
        assert (built.report().h2d_bytes > 0) == (pool is not None) or model == "gemma3"
    assert logits.tobytes() == expected[model]
    passing = min(layers, max(0, layers + 1 - gpu_layers))
    assert len(found.passing) == (passing if passing > 1 else 0)
    steps = -(-PROMPT // 64) + DECODE
    ahead = found.h2d_bytes - steps * found.home_bytes
    assert 0 <= ahead <= found.ring_bytes, "beside the passes, what is ahead of the next one"


@settings(max_examples=12)
@given(
    model=st.sampled_from(["llama", "qwen35"]),
    prompt=st.integers(1, 120),
    rounds=WIDE_ROUNDS,
    gpu_layers=st.integers(0, 1),
    pool=st.sampled_from([0.6, 1.0]),
    seed=st.integers(0, 1000),
)
def test_rounds_do_not_depend_on_where_weights_are(
    wide_models: dict[str, Path], model: str, prompt: int, rounds: list[Round], gpu_layers: int, pool: float, seed: int
) -> None:
    """The same for rounds of drafts by the MTP block and by the model itself, steps in tiles, rejections, steps that
    are left before they run, checkpoints, and prompts in between."""
    drafting = Drafting(nextn=model == "qwen35", resident=True)
    if model == "llama":
        rounds = [replace(each, kind="resident" if each.kind else "") for each in rounds]
    outcome = []
    for layers, debug in ((ALL_LAYERS, None), (gpu_layers, hostile(seed))):
        played = Played()
        with engine(
            wide_models[model], kv=kv_settings("f32", "f32"), pool=pool, fixed=True, debug=debug, drafting=drafting,
            gpu_layers=layers,
        ) as built:
            play_rounds(built, prompt, rounds, seed, drafting=True, played=played)
            assert bool(built.weights_report().passing) == (layers is not ALL_LAYERS)
        outcome.append((played.logits, played.widths))
    assert outcome[0] == outcome[1]
