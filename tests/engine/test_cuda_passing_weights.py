"""Weights that pass through the arena on the whole CUDA engine: captured steps, and steps as they come."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvs_core.engine.budget import BudgetDevice, Drafting, plan_budget
from kvs_core.engine.engine import Engine
from kvs_core.engine.held import held_on_cuda, held_weights
from kvs_core.engine.split import plan_split
from kvs_core.errors import BudgetError, DeviceError
from kvs_core.formats.gguf import GgufFile
from kvs_core.memory.phases import Phase
from kvs_core.models.recurrent import state_bytes
from kvs_core.models.registry import read_spec
from kvs_core.paging.weight_ring import ALL_STAY, WeightSplit
from kvs_core.settings.rooms import ALL_LAYERS, ContextSettings, RopeSettings
from kvs_core.units import MIB
from tests.engine.machines import MACHINES, Machine, Move, machine_of, play, write_models
from tests.engine.rounds import Played, Round, play_rounds
from tests.engine.tiny import engine, kv_settings
from tests.support.tiny_gguf import (
    Experts,
    write_tiny_llama,
    write_tiny_qwen3moe,
    write_tiny_qwen35,
    write_tiny_qwen35moe,
)

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE

SCRIPT: Sequence[Move] = [
    (PREFILL, 64, 64), (PREFILL, 30, 30), (DECODE, 1, 1), (DECODE, 1, 1), (DECODE, 3, 2), (DECODE, 1, 1),
    (DECODE, 3, 0), (PREFILL, 20, 20), (DECODE, 1, 1), (DECODE, 3, 3),
]


SPLITS = {
    "llama": (0,), "qwen35": (0, 3), "gemma4": (0, 1, 3), "qwen3moe": (0,), "qwen35moe": (0, 1, 3), "demo": (0, 1, 3, 5)
}
"""Layers that stay, by model."""


@pytest.fixture(scope="module", params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Machine:
    """See ``MACHINES``."""
    return machine_of(request.param)


@pytest.fixture(scope="module")
def models(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """See ``write_models``; and mixtures of experts, of two layers or four."""
    folder = tmp_path_factory.mktemp("models")
    small: dict[str, Any] = {"embd": 32, "heads": 2, "kv_heads": 1, "head_dim": 64, "ffn": 32, "weight_type": "q8_0"}
    hybrid: dict[str, Any] = {"n_layer": 4, "interval": 2, "mtp": False, "ssm_state": 32, "ssm_k_heads": 1}
    return {
        **write_models(folder, machine),
        "qwen3moe": write_tiny_qwen3moe(folder / "qwen3moe.gguf", seed=2, n_layer=2, **small),
        "qwen35moe": write_tiny_qwen35moe(folder / "qwen35moe.gguf", seed=2, ssm_v_heads=2, **hybrid, **small),
    }


@pytest.mark.parametrize("model", list(SPLITS))
def test_bits_do_not_depend_on_where_weights_are(machine: Machine, models: dict[str, Path], model: str) -> None:
    """Logits are those with all weights on the device, bit for bit, while pages stream too; each step moves each part
    once; behind the load nothing is allocated."""
    if model not in models:
        pytest.skip("for a GPU alone: the stand-in is slow")
    kv = kv_settings("f32", "q5_1")
    with engine(models[model], kv=kv, pool=0.0, fixed=True, device=machine.device, gpu_layers=ALL_LAYERS) as built:
        expected = play(built, SCRIPT, rows=3)
        assert built.weights_report().home_bytes == 0
    for gpu_layers in SPLITS[model]:
        runtime = machine.runtime()
        with engine(
            models[model], kv=kv, pool=0.0, fixed=True, device=partial(machine.device, runtime), gpu_layers=gpu_layers
        ) as built:
            ready = runtime.allocations
            assert play(built, SCRIPT, rows=3) == expected, gpu_layers
            found = built.weights_report()
            assert len(found.passing) == min(built.spec.n_layer, built.spec.n_layer + 1 - gpu_layers)
            assert runtime.allocations == ready
        ahead = found.h2d_bytes - len(SCRIPT) * found.home_bytes
        assert 0 <= ahead <= found.ring_bytes


def test_a_width_is_recorded_once(machine: Machine, models: dict[str, Path]) -> None:
    """As with all weights on the device: where parts lie does not change from step to step."""
    kv = kv_settings("f32", "q5_1", residency_mode="resident")
    with engine(models["llama"], kv=kv, device=machine.device, gpu_layers=0) as built:
        play(built, [(PREFILL, 9, 9), *[(DECODE, width, width) for width in (1, 3, 1, 1, 3)]])
        assert built._captured.recorded == 2
        assert built.report().h2d_bytes == built.weights_report().h2d_bytes > 6 * built.weights_report().home_bytes


def test_rounds_do_not_depend_on_where_weights_are(machine: Machine, tmp_path: Path) -> None:
    """The same for drafts of both kinds, which are captured work of their own, for rejections, and for steps in tiles,
    which run as they come; all of them by turns with captured steps."""
    path = write_tiny_qwen35(
        tmp_path / "qwen35.gguf", seed=1, n_layer=2, interval=2, embd=32, heads=2, kv_heads=1, head_dim=64, ffn=32,
        ssm_state=32, ssm_k_heads=1, ssm_v_heads=2,
    )
    rounds = [
        Round("next", 2, 3, 1), Round("", 1, 17, 9), Round("resident", 2, 3, 2), Round("resident", 1, 3, 0),
        Round("", 1, 2, 2, prefill=True), Round("resident", 1, 2, 2, left_open=True), Round("next", 1, 2, 2),
    ]
    outcome = []
    for gpu_layers in (ALL_LAYERS, 0):
        played = Played()
        with engine(
            path, kv=kv_settings("f32", "f32"), pool=0.6, fixed=True, drafting=Drafting(nextn=True, resident=True),
            ubatch=32, device=machine.device, gpu_layers=gpu_layers,
        ) as built:
            play_rounds(built, 40, rounds, 3, drafting=True, played=played)
            passing = built.weights_report().passing
        outcome.append((played.logits, played.widths))
    assert passing == (0, 1)
    assert outcome[0] == outcome[1]
    assert outcome[0][1] == [17]


CONTEXT = ContextSettings(ctx_size=512, ubatch=64)


def chosen(
    path: Path, machine: Machine, free_bytes: int, gpu_layers: int | None = None, **kv: object
) -> tuple[WeightSplit, int]:
    """What is chosen, or asked for, on a GPU with so much memory, and what that takes."""
    runtime = machine.runtime()
    runtime.free_bytes = partial(int, free_bytes)
    file = GgufFile.open(path)
    spec, told = read_spec(file), kv_settings(**kv)
    device = machine.device(runtime)
    try:
        split = plan_split(file, spec, CONTEXT, told, device, gpu_layers=gpu_layers)
        budget = plan_budget(
            spec, CONTEXT, told, free_bytes=0, device=BudgetDevice.of(device), ring_bytes=split.ring.size_bytes
        )
        weights = held_weights(file, spec, held_on_cuda, nextn=False, passing=split.passing)
    finally:
        device.close()
    return split, weights.size_bytes + state_bytes(spec) + budget.memory.arena_bytes


def test_auto_keeps_the_most_layers_that_fit(machine: Machine, tmp_path: Path) -> None:
    """All if they fit beside the arena and what --fit-target leaves free; else as few as possible pass. Where
    even that does not leave so much, nothing is left free. All stay where nothing helps, and with --fit off."""
    path = write_tiny_llama(
        tmp_path / "llama.gguf", seed=2, n_layer=12, embd=256, heads=4, kv_heads=1, head_dim=64, ffn=2048,
        weight_type="q8_0",
    )
    target: dict[str, object] = {"arena_mib": 24, "fit_target_mib": 3}
    split, whole = chosen(path, machine, 1 << 40, **target)
    assert split == ALL_STAY
    asked = {count: chosen(path, machine, 1 << 40, count, **target) for count in range(14)}
    needs = {len(split.passing): needed for split, needed in asked.values()}   # by layers that pass
    assert set(needs) == {0, *range(2, 13)}, "with one layer left over the ring would be as large"
    assert list(needs.values()) == sorted(needs.values())
    for spared in (3 * MIB, 0):
        for passing, needed in needs.items():
            if spared or needed < needs[12] + 3 * MIB:
                split, _ = chosen(path, machine, needed + spared, **target)
                assert len(split.passing) == passing
    assert chosen(path, machine, needs[12] - 1, **target)[0] == ALL_STAY
    assert chosen(path, machine, whole, **target)[0] != ALL_STAY
    assert chosen(path, machine, whole, **(target | {"fit_target_mib": 0}))[0] == ALL_STAY
    assert chosen(path, machine, whole, **target, fit=False)[0] == ALL_STAY
    with pytest.raises(BudgetError) as caught:
        chosen(path, machine, whole, arena_mib=1)
    least = target | {"arena_mib": caught.value.needed_mib}   # without a ring
    split, needed = chosen(path, machine, 1 << 40, **least)
    assert split == ALL_STAY
    words = rf"--kv-stream-arena-mib is {caught.value.needed_mib}; raise it.*; 2 of the \d+ MiB are for weights"
    with pytest.raises(BudgetError, match=words):
        chosen(path, machine, needed - 1, **least)


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_auto_runs(machine: Machine, tmp_path: Path, arch: str) -> None:
    """An engine on a GPU with too little memory for all layers, of experts too, has the logits of one with enough."""
    path = tmp_path / f"{arch}.gguf"
    same: dict[str, Any] = {"n_layer": 5, "embd": 256, "heads": 4, "kv_heads": 1, "head_dim": 64, "weight_type": "q8_0"}
    if arch == "llama":
        write_tiny_llama(path, seed=2, ffn=1024, **same)
    else:
        write_tiny_qwen3moe(path, seed=2, experts=Experts(count=8, used=2, ffn=128), **same)
    kv = kv_settings("f32", "q5_1", arena_mib=8, fit_target_mib=0)
    weights = held_weights(GgufFile.open(path), read_spec(GgufFile.open(path)), held_on_cuda, nextn=False).size_bytes
    outcome = []
    for short in (False, True):
        runtime = machine.runtime()
        if short:
            runtime.free_bytes = partial(int, weights + 8 * MIB - 1)
        with engine(path, kv=kv, device=partial(machine.device, runtime)) as built:
            outcome.append(play(built, [(PREFILL, 9, 9), (DECODE, 1, 1), (DECODE, 1, 1)]))
            assert bool(built.weights_report().passing) == short
    assert outcome[0] == outcome[1]


def test_a_gpu_without_pinned_memory_for_weights(
    machine: Machine, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is one line, before there is an arena."""
    def refuse(size_bytes: int) -> np.ndarray:
        raise DeviceError(f"{size_bytes} bytes are too many; use fewer")

    device = machine.device()
    monkeypatch.setattr(device, "allocate_pinned", refuse)
    with pytest.raises(DeviceError, match=r"no pinned host memory for \d+\.\d MiB more of weights .* raise --gpu-lay"):
        Engine(
            GgufFile.open(models["llama"]), device, context=CONTEXT, kv=kv_settings(), rope=RopeSettings(), gpu_layers=0
        )
    assert device.memory_report()["arena"] == 0
    device.close()
