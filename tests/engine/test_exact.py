"""The product's promises on the whole engine, compared as bits: exact, row-invariant, no trace of dropped rows."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.host.device import HostDebug
from kvs_core.engine.engine import Engine
from kvs_core.formats.gguf import GgufFile
from kvs_core.memory.phases import Phase
from kvs_core.models.registry import ARCHS, read_spec
from kvs_core.paging.geometry import GROUP_PAGES
from kvs_core.paging.slabs import slab_of
from kvs_core.settings.rooms import LayerWindow
from tests.engine.tiny import engine, kv_settings, run, text
from tests.support.examples import examples

PROMPT = 300
DECODE = 40


def hostile(seed: int) -> HostDebug:
    """Copies of random slowness, and NaN wherever nobody may read."""
    dice = random.Random(seed)
    return HostDebug(copy_delay=lambda: dice.choice((0.0, 0.0, 0.0002, 0.001)), poison=True)


class Reference(dict[tuple[str, int], bytes]):
    """Logits as bytes, by model and ubatch, of runs that hold every page; each is made when it is first asked for.
    Prints short."""

    def __init__(self, models: dict[str, Path]) -> None:
        self._models = models

    def __missing__(self, key: tuple[str, int]) -> bytes:
        name, ubatch = key
        with engine(self._models[name], kv=kv_settings(residency_mode="resident"), ubatch=ubatch) as built:
            vocab = built.spec.n_vocab
            self[key] = run(built, text(vocab, PROMPT), text(vocab, DECODE, 1)).tobytes()
            assert built.report().h2d_bytes == 0
        return self[key]

    def __repr__(self) -> str:
        return f"logits of {list(self)}"


@pytest.fixture(scope="module")
def resident(tiny_models: dict[str, Path]) -> Reference:
    """What is right."""
    return Reference(tiny_models)


@settings(max_examples=examples(24))
@given(
    model=st.sampled_from(sorted(ARCHS)),
    ubatch=st.sampled_from([48, 64]),
    pool=st.floats(0.0, 0.25),
    fixed=st.booleans(),
    ring=st.integers(0, 12),
    run_pages=st.integers(0, 9),
    seed=st.integers(0, 1000),
)
def test_bits_do_not_depend_on_residency(
    tiny_models: dict[str, Path], resident: Reference,
    model: str, ubatch: int, pool: float, fixed: bool, ring: int, run_pages: int, seed: int,
) -> None:
    """Logits are those of a fully resident run, bit for bit, for any arena, ring, run length and copy timing."""
    kv = kv_settings(ring_slots=ring, run_pages=run_pages)
    with engine(
        tiny_models[model], kv=kv, pool=pool, fixed=fixed, ubatch=ubatch, debug=hostile(seed), lower=True
    ) as built:
        vocab = built.spec.n_vocab
        logits = run(built, text(vocab, PROMPT), text(vocab, DECODE, 1))
        # What windows need in prefill is room enough for all in decode.
        assert built.report().h2d_bytes > 0 or (model in ("gemma3", "gemma4") and not fixed)
    assert logits.tobytes() == resident[model, ubatch]


@settings(max_examples=examples(14))
@given(
    model=st.sampled_from(sorted(ARCHS)),
    ubatch=st.sampled_from([48, 64]),
    windows=st.lists(st.sampled_from([None, 0, 1, 33, 100, 250, 500]), min_size=4, max_size=4),
    tiles=st.sampled_from([None, 2, 3, 4]),
    run_pages=st.integers(1, 9),
    pool=st.sampled_from([0.0, 0.5, 1.0]),
    fixed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_bits_do_not_depend_on_windows(
    tiny_models: dict[str, Path], resident: Reference, model: str, ubatch: int, windows: list[int | None],
    tiles: int | None, run_pages: int, pool: float, fixed: bool, seed: int,
) -> None:
    """In window mode too, for any windows of single layers; a layer's newest tokens are resident, what is older is
    not, and a layer whose window covers the context, or which sees but a window of its own, moves nothing."""
    path = tiny_models[model]
    kv_layers = read_spec(GgufFile.open(path)).kv_layers
    layers = [layer.index for layer in kv_layers]
    told = dict(zip(layers, windows, strict=False))
    kv = kv_settings(
        residency_mode="window", window_tokens=64, ring_tiles=tiles, run_pages=run_pages,
        window_layers=tuple(LayerWindow(index, index, tokens) for index, tokens in told.items()),
    )
    with engine(path, kv=kv, pool=pool, fixed=fixed, ubatch=ubatch, debug=hostile(seed)) as built:
        vocab = built.spec.n_vocab
        logits = run(built, text(vocab, PROMPT), text(vocab, DECODE, 1))
        for layer, places in zip(kv_layers, built._kv.places(), strict=True):
            window = None if layer.window else told.get(layer.index, 64)
            kept = 32 * (places.pages - len(places.streamed)) - (32 * places.pages - PROMPT - DECODE)
            if window is None or window >= PROMPT + DECODE:
                assert not places.streamed
            else:
                # Whole groups of pages leave, so that part of a group may stay longer; a step's own page is never away.
                assert window <= kept <= max(window, 1) + (GROUP_PAGES + 1) * 32
        assert (built.report().h2d_bytes > 0) == any(places.streamed for places in built._kv.places())
    assert logits.tobytes() == resident[model, ubatch]


@pytest.mark.parametrize(("type_k", "type_v"), [("f32", "f32"), ("f16", "q5_1"), ("bf16", "iq4_nl"), ("q4_0", "q4_1")])
def test_bits_do_not_depend_on_residency_for_other_types(tiny_llama: Path, type_k: str, type_v: str) -> None:
    """The same for other K and V types."""
    outcome = []
    for pool in (None, 0.0, 0.1):
        with engine(tiny_llama, kv=kv_settings(type_k, type_v), pool=pool, fixed=True, debug=hostile(3)) as built:
            vocab = built.spec.n_vocab
            outcome.append(run(built, text(vocab, 200), text(vocab, 12, 1)).tobytes())
    assert outcome[0] == outcome[1] == outcome[2]


def test_bits_do_not_depend_on_residency_over_slabs(tiny_models: dict[str, Path]) -> None:
    """The same for a context whose streamed pages come from two slabs of the history."""
    prompt, tokens = text(256, 700), text(256, 12, 1)
    for path in tiny_models.values():
        outcome = []
        for pool in (None, 0.0):
            with engine(path, kv=kv_settings(), pool=pool, fixed=True, context=768, debug=hostile(3)) as built:
                outcome.append(run(built, prompt, tokens).tobytes())
                if pool is not None:
                    last = built._kv.streamer.schedule.by_layer[-1][-1]
                    assert slab_of(last.first_page).index == 1
        assert outcome[0] == outcome[1]


def logits_of_rows(built: Engine, prompt: list[int], rows: list[list[int]]) -> np.ndarray:
    """Logits of decode steps of several rows each."""
    logits = []
    with built.step(prompt, Phase.PREFILL) as step:
        step.settle()
    for tokens in rows:
        with built.step(tokens, Phase.DECODE) as step:
            logits.append(step.logits(0))
            step.settle()
    return np.concatenate(logits)


@settings(max_examples=examples(16))
@given(
    model=st.sampled_from(sorted(ARCHS)),
    prompt=st.integers(1, 64),
    widths=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    pool=st.sampled_from([None, 0.0]),
)
def test_rows_do_not_depend_on_their_number(
    tiny_models: dict[str, Path], model: str, prompt: int, widths: list[int], pool: float | None
) -> None:
    """n rows in one step have the logits of n steps of one row, bit for bit."""
    outcome = []
    for wide in (True, False):
        with engine(tiny_models[model], kv=kv_settings(), pool=pool) as built:
            tokens = text(built.spec.n_vocab, sum(widths), 2)
            cuts = np.cumsum([0, *widths]) if wide else np.arange(len(tokens) + 1)
            rows = [tokens[a:b] for a, b in pairwise(cuts)]
            outcome.append(logits_of_rows(built, text(built.spec.n_vocab, prompt), rows))
    assert outcome[0].tobytes() == outcome[1].tobytes()


@settings(max_examples=examples(16))
@given(
    model=st.sampled_from(sorted(ARCHS)),
    steps=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=12),
    pool=st.sampled_from([None, 0.0]),
)
def test_dropped_rows_leave_no_trace(
    tiny_models: dict[str, Path], model: str, steps: list[tuple[int, int]], pool: float | None
) -> None:
    """After steps of which only the first rows were kept, logits are those of a run of the kept rows alone."""
    outcome = []
    for with_drops in (True, False):
        with engine(tiny_models[model], kv=kv_settings(), pool=pool, debug=hostile(5)) as built:
            vocab = built.spec.n_vocab
            with built.step(text(vocab, 60), Phase.PREFILL) as step:
                step.settle()
            for number, (width, keep) in enumerate(steps):
                tokens = text(vocab, width, number + 10)
                keep = min(keep, width)
                if with_drops:
                    with built.step(tokens, Phase.DECODE) as step:
                        step.settle(keep)
                    with built.step(tokens, Phase.DECODE):
                        pass   # left without settling: all rows dropped
                elif keep:
                    with built.step(tokens[:keep], Phase.DECODE) as step:
                        step.settle()
            with built.step([7], Phase.DECODE) as step:
                outcome.append(step.logits().tobytes())
                step.settle()
    assert outcome[0] == outcome[1]
