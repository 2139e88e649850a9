"""Weights that pass through the arena: the same bits as with all of them on the device, whatever else is going on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.demo import DEMO_MODEL
from kvs_core.device.host.device import HostDebug, HostDevice
from kvs_core.engine.budget import Drafting
from kvs_core.engine.engine import Engine
from kvs_core.errors import BudgetError, DeviceError
from kvs_core.formats.gguf import GgufFile
from kvs_core.memory.phases import WEIGHTS_RING, Phase
from kvs_core.models.registry import read_spec
from kvs_core.settings.rooms import ALL_LAYERS, ContextSettings, RopeSettings
from tests.engine.rounds import WIDE_ROUNDS, Played, Round, play_rounds
from tests.engine.test_exact import DECODE, PROMPT, hostile
from tests.engine.tiny import engine, kv_settings, run, text
from tests.engine.written import FOR_LONG
from tests.support.examples import examples
from tests.support.tiny_gguf import (
    Experts,
    Gemma4,
    write_tiny_gemma4,
    write_tiny_llama,
    write_tiny_qwen3moe,
    write_tiny_qwen35moe,
)

MODELS = ["gemma3", "gemma4", "llama", "qwen2", "qwen3", "qwen35", "qwen35moe", "qwen3moe"]


@pytest.fixture(scope="module")
def expected(tiny_models: dict[str, Path]) -> dict[str, bytes]:
    """Logits of runs that hold everything."""
    logits = {}
    for name in MODELS:
        with engine(tiny_models[name], kv=kv_settings(residency_mode="resident")) as built:
            vocab = built.spec.n_vocab
            logits[name] = run(built, text(vocab, PROMPT), text(vocab, DECODE, 1)).tobytes()
            assert built.weights_report().passing == ()
            assert built.report().h2d_bytes == built.weights_report().h2d_bytes == 0
    return logits


@settings(max_examples=examples(24))
@given(
    model=st.sampled_from(MODELS),
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
        pages = built.report().h2d_bytes - found.h2d_bytes
        assert pages == sum(built.report().stats.moved_bytes)
        assert (pages > 0) == (pool is not None) or model in ("gemma3", "gemma4")
    assert logits.tobytes() == expected[model]
    passing = min(layers, max(0, layers + 1 - gpu_layers))
    assert len(found.passing) == (passing if passing > 1 else 0)
    steps = -(-PROMPT // 64) + DECODE
    ahead = found.h2d_bytes - steps * found.home_bytes
    assert 0 <= ahead <= found.ring_bytes, "beside the passes, what is ahead of the next one"


@settings(max_examples=examples(12))
@given(
    model=st.sampled_from(["gemma4", "llama", "qwen35", "qwen35moe"]),
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
    drafting = Drafting(nextn=model.startswith("qwen35"), resident=True)
    if not drafting.nextn:
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


def test_pages_of_a_sequence_that_was_parked_and_of_a_phase_before_stay(tiny_qwen35: Path) -> None:
    """A sequence that was set aside goes on with its bits; the ring of weights is where it was in both phases."""
    outcome = []
    for gpu_layers in (ALL_LAYERS, 0):
        with engine(
            tiny_qwen35, kv=kv_settings(), pool=0.0, debug=hostile(2), gpu_layers=gpu_layers
        ) as built:
            vocab = built.spec.n_vocab
            logits = run(built, text(vocab, 90), text(vocab, 5, 1)).tobytes()
            parked = built.park()
            other = run(built, text(vocab, 70, 2), text(vocab, 3, 3)).tobytes()
            built.rewind(0)
            built.unpark(parked)
            rest = run_on(built, text(vocab, 5, 4))
            outcome.append((logits, other, rest))
    assert outcome[0] == outcome[1]


def run_on(built: Engine, tokens: list[int]) -> list[bytes]:
    """Logits of decode steps."""
    logits = []
    for token in tokens:
        with built.step([token], Phase.DECODE) as step:
            logits.append(step.logits().tobytes())
            step.settle()
    return logits


@pytest.mark.parametrize("gpu_layers", [0, 3])
def test_the_demo_model_has_its_bits(gpu_layers: int) -> None:
    """Float16 matrices and a head of its own, as they come with kvs."""
    outcome = []
    for layers in (ALL_LAYERS, gpu_layers):
        with engine(DEMO_MODEL, kv=kv_settings("q8_0", "q4_0"), pool=0.0, gpu_layers=layers) as built:
            vocab = built.spec.n_vocab
            outcome.append(run(built, text(vocab, 100), text(vocab, 6, 1)).tobytes())
    assert outcome[0] == outcome[1]


@FOR_LONG
def test_smollm2_has_its_bits(smollm2_path: Path) -> None:
    """A tied head stays; of 30 layers every other one passes, and all of them, while pages stream and while none do."""
    outcome, passing = [], []
    for layers, pool in ((ALL_LAYERS, None), (16, 0.0), (0, None)):
        with engine(smollm2_path, kv=kv_settings(), pool=pool, ubatch=32, gpu_layers=layers) as built:
            outcome.append(run(built, text(built.spec.n_vocab, 40), text(built.spec.n_vocab, 2, 1)).tobytes())
            passing.append(built.weights_report().passing)
    assert outcome[0] == outcome[1] == outcome[2]
    assert passing == [(), tuple(range(1, 30, 2)), tuple(range(30))]


def test_where_weights_are_is_counted(tmp_path: Path) -> None:
    """What passes is in the arena's ring and in host memory, and not among the weights of the device."""
    path = write_tiny_llama(tmp_path / "llama.gguf", seed=2, n_layer=8, weight_type="q8_0")
    file = GgufFile.open(path)
    bytes_of = {
        layer: sum(
            info.n_bytes for name, info in file.tensors.items()
            if name.startswith(f"blk.{layer}.") and len(info.shape) == 2 and "conv1d" not in name
        )
        for layer in range(8)
    }   # eight equal ones
    with engine(path, kv=kv_settings(), gpu_layers=ALL_LAYERS) as built:
        everything, plain_arena = built.memory_report(), built.memory.arena_bytes
    with engine(path, kv=kv_settings(), gpu_layers=5) as built:
        found, held = built.weights_report(), built.memory_report()
        arena = built.memory.plan(Phase.DECODE)
        assert built.memory.plan(Phase.PREFILL).region(WEIGHTS_RING) == arena.region(WEIGHTS_RING)
        for phase in Phase:
            built.enter(phase)
            assert built._handover.layout.pool_offset >= found.ring_bytes
    assert found.passing == (1, 3, 5, 7)
    assert 0 <= found.home_bytes - 4 * bytes_of[0] < 4 * 7 * 256   # seven matrices, each from a multiple of 256 on
    assert found.home_bytes == 4 * found.ring_bytes
    assert arena.region(WEIGHTS_RING).size_bytes == found.ring_bytes
    assert built.memory.arena_bytes >= plain_arena
    elements = sum(
        info.n_elements for name, info in file.tensors.items() if name.startswith("blk.1.") and len(info.shape) == 2
    )
    assert everything["weights"] - held["weights"] == 4 * 4 * elements   # float32 of four layers
    assert found.resident_bytes == held["weights"]


def test_an_arena_without_room_for_the_ring_is_refused(tiny_llama: Path) -> None:
    """With the MiB that would do, and do; one less would not."""
    file, context = GgufFile.open(tiny_llama), ContextSettings(ctx_size=512, ubatch=64)

    def load(arena_mib: int) -> None:
        kv = kv_settings("f16", "f16", arena_mib=arena_mib)
        Engine(file, HostDevice(1), context=context, kv=kv, rope=RopeSettings(), gpu_layers=0).close()

    with pytest.raises(BudgetError, match=r"--kv-stream-arena-mib is 1; raise it, or lower --ubatch-size to 32; "
                                          r"1 of the \d+ MiB are for weights") as caught:
        load(1)
    assert caught.value.needed_mib is not None
    load(caught.value.needed_mib)
    with pytest.raises(BudgetError):
        load(caught.value.needed_mib - 1)


def test_pinned_memory_that_is_missing_is_one_line(tiny_llama: Path) -> None:
    """Said while loading, with what is held; the device allocates nothing else then."""
    file, context = GgufFile.open(tiny_llama), ContextSettings(ctx_size=512, ubatch=64)
    device = HostDevice(1, debug=HostDebug(fail_alloc_at=3))
    with pytest.raises(DeviceError, match=r"no pinned host memory for 0\.\d MiB more of weights that do not stay on "
                                          r"the device \(\d MiB held\); raise --gpu-layers, or end other programs"):
        Engine(file, device, context=context, kv=kv_settings(), rope=RopeSettings(), gpu_layers=0)
    assert device.memory_report()["arena"] == 0
    device.close()


def write_mixture(name: str, path: Path) -> tuple[Path, list[int]]:
    """A model whose layers have matrices in all places there are, and elements of each layer's matrices."""
    match name:
        case "gemma4":   # a dense part beside, embeddings per layer, layers that share, keys that make values
            write_tiny_gemma4(
                path, seed=2, weight_type="q8_0", pattern=[True, False, True, False, True],
                more=Gemma4(shared=1, per_layer=32, values=False, experts=Experts(joined=True)),
            )
            dense, experts, behind = 3 * 64 * 96, 64 * 6 + 3 * 6 * 64 * 32, 2 * 64 * 32
            # Queries and what comes out of four heads, keys and values of four; keys of one head of 128, twice.
            sliding, full = 64 * 64 * (4 + 4 + 2 * 4), 64 * 128 * (4 + 4 + 2 * 1)
            mixers = [sliding, full, sliding, full, 64 * 64 * (4 + 4)]
            return path, [mixer + dense + experts + behind for mixer in mixers]
        case "qwen3moe":
            write_tiny_qwen3moe(path, seed=2, weight_type="q8_0", experts=Experts(joined=True))
        case "qwen35moe":
            write_tiny_qwen35moe(path, seed=2, weight_type="q8_0", n_layer=5)
    file = GgufFile.open(path)
    return path, [
        sum(
            info.n_elements for name, info in file.tensors.items()
            if name.startswith(f"blk.{layer}.") and len(info.shape) > 1 and "conv1d" not in name
        )
        for layer in range(read_spec(file).n_layer)
    ]


@pytest.mark.parametrize("model", ["gemma4", "qwen35moe", "qwen3moe"])
def test_layers_of_experts_pass_whole(tmp_path: Path, model: str) -> None:
    """All that a layer multiplies with passes, all experts of it; logits have the bits of a model that stays."""
    path, elements = write_mixture(model, tmp_path / "model.gguf")
    layers, outcome, stayed = len(elements), [], 0
    for gpu_layers in (ALL_LAYERS, 0, 1, layers // 2 + 1):
        with engine(path, kv=kv_settings(), pool=0.0, debug=hostile(1), gpu_layers=gpu_layers) as built:
            outcome.append(run(built, text(built.spec.n_vocab, 70), text(built.spec.n_vocab, 3, 1)).tobytes())
            found, held = built.weights_report(), built.memory_report()["weights"]
        assert outcome[-1] == outcome[0]
        if gpu_layers is ALL_LAYERS:
            assert found.passing == ()
            stayed = held
            continue
        passing = range(layers) if gpu_layers < 2 else found.passing
        assert len(found.passing) == (layers if gpu_layers < 2 else layers - layers // 2)
        q8_0_bytes = sum(elements[layer] for layer in passing) // 32 * 34
        assert 0 <= found.home_bytes - q8_0_bytes < len(passing) * 14 * 256   # each tensor from a multiple of 256 on
        twice = sum(64 * 128 for layer in passing if model == "gemma4" and layer in (1, 3))   # held once as float32
        assert stayed - held == 4 * (sum(elements[layer] for layer in passing) - twice)


def test_a_copy_that_fails_is_an_error_and_no_wrong_bit(tiny_llama: Path) -> None:
    """Whichever it is, of weights or of pages: what was computed before has its bits, and then there is an error."""
    outcome: list[list[bytes]] = []
    for fail in (None, *range(0, 60, 3)):
        logits: list[bytes] = []
        said = "as asked for"
        with engine(
            tiny_llama, kv=kv_settings(), pool=0.0, debug=HostDebug(poison=True, fail_copy_at=fail), gpu_layers=1
        ) as built:
            tokens = text(built.spec.n_vocab, 150)
            try:
                for first in range(0, 150, 50):
                    with built.step(tokens[first : first + 50], Phase.PREFILL) as step:
                        logits.append(step.logits().tobytes())
                        step.settle()
                logits += run_on(built, tokens[:4])
            except DeviceError as error:
                said = str(error)
        assert "as asked for" in said
        outcome.append(logits)
    whole = outcome[0]
    assert len(whole) == 7
    assert {len(logits) for logits in outcome[1:]} >= {0, 1, 2}
    for logits in outcome[1:]:
        assert logits == whole[: len(logits)]
