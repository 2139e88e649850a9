"""Weights beyond the memory of a GPU, in CUDA's unified memory: the same bits, one warning, and what is refused."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvs_core.engine import spill
from kvs_core.engine.held import held_on_cuda, held_weights
from kvs_core.errors import BudgetError
from kvs_core.formats.gguf import GgufFile
from kvs_core.memory.phases import Phase
from kvs_core.models.registry import read_spec
from kvs_core.settings.rooms import ALL_LAYERS
from kvs_core.units import MIB, mib_ceil
from tests.engine.machines import Machine, Move, machine_of, play
from tests.engine.tiny import engine, kv_settings
from tests.support.tiny_gguf import write_tiny_llama

SCRIPT: list[Move] = [(Phase.PREFILL, 9, 9), (Phase.DECODE, 1, 1), (Phase.DECODE, 1, 1)]


@pytest.fixture(scope="module")
def machine() -> Machine:
    """The stand-in: free memory is what a test says."""
    return machine_of("cuda_on_cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of weights that are large beside its arena."""
    return write_tiny_llama(
        tmp_path_factory.mktemp("spill") / "llama.gguf", seed=2, n_layer=12, embd=256, heads=4, kv_heads=1, head_dim=64,
        ffn=1024, weight_type="q8_0",
    )


@pytest.fixture(scope="module")
def weights_bytes(model: Path) -> int:
    """That the GPU holds of it."""
    file = GgufFile.open(model)
    return held_weights(file, read_spec(file), held_on_cuda, nextn=False).size_bytes


@pytest.fixture
def unified(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is set."""
    monkeypatch.setenv("GGML_CUDA_ENABLE_UNIFIED_MEMORY", "1")


def played(
    machine: Machine, model: Path, free_bytes: int, gpu_layers: int | None, **kv: Any
) -> tuple[list[bytes], tuple[int, ...], int]:
    """Logits, layers that pass, and bytes of the arena, on a GPU with so much memory."""
    runtime = machine.runtime()
    runtime.free_bytes = partial(int, free_bytes)
    told = kv_settings("f32", "q5_1", **{"fit_target_mib": 0, **kv})
    with engine(model, kv=told, device=partial(machine.device, runtime), gpu_layers=gpu_layers) as built:
        return play(built, SCRIPT), built.weights_report().passing, built.memory.arena_bytes


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said."""
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.usefixtures("unified")
def test_weights_beyond_the_gpu_are_warned_of_once(
    machine: Machine, model: Path, weights_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With the numbers, where all layers were asked for and the last byte does not fit; the text is the same, and with
    that byte nothing is said."""
    enough = weights_bytes + 8 * MIB
    expected, _, _ = played(machine, model, enough, ALL_LAYERS, arena_mib=8)
    assert warnings(caplog) == []
    logits, passing, _ = played(machine, model, enough - 1, ALL_LAYERS, arena_mib=8)
    assert (logits, passing) == (expected, ())
    (line,) = warnings(caplog)
    assert line.startswith(
        f"weights of {mib_ceil(weights_bytes)} MiB, with state and arena of 8 MiB, exceed the {(enough - 1) // MIB} "
        "MiB that are free on cuda on cpu by 1 MiB: "
    )


@pytest.mark.usefixtures("unified")
def test_auto_goes_by_what_the_gpu_has(
    machine: Machine, model: Path, weights_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights that pass come faster than those that spill: as without the variable, layers that do not fit pass."""
    _, passing, _ = played(machine, model, weights_bytes + 8 * MIB - 1, None, arena_mib=8)
    assert passing
    assert warnings(caplog) == []


@pytest.mark.usefixtures("unified")
@pytest.mark.parametrize("arena", [None, "auto"])
def test_an_arena_takes_no_more_than_it_must_from_weights(
    machine: Machine, model: Path, weights_bytes: int, caplog: pytest.LogCaptureFixture, arena: str | None
) -> None:
    """That are larger than the GPU: the least one, of the size that is refused with one MiB less. Beside weights that
    fit, it has what they leave."""
    _, _, arena_bytes = played(machine, model, weights_bytes - MIB, ALL_LAYERS, arena_mib=arena)
    (line,) = warnings(caplog)
    assert f"by {mib_ceil(arena_bytes + MIB)} MiB" in line
    with pytest.raises(BudgetError) as caught:
        played(machine, model, 1 << 30, ALL_LAYERS, arena_mib=arena_bytes // MIB - 1)
    assert caught.value.needed_mib == arena_bytes // MIB
    caplog.clear()
    _, _, wide = played(machine, model, weights_bytes + arena_bytes + 4 * MIB, ALL_LAYERS, arena_mib="auto")
    assert arena_bytes < wide <= arena_bytes + 4 * MIB
    assert warnings(caplog) == []


@pytest.mark.usefixtures("unified")
def test_weights_that_ram_cannot_hold_either_are_refused(
    machine: Machine, model: Path, weights_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they are loaded; with a byte more of RAM they are not."""
    free, spilled = weights_bytes + 2 * MIB, 6 * MIB
    monkeypatch.setattr(spill, "available_ram_bytes", lambda: spilled - 1)
    words = "on cuda on cpu by 6 MiB, and 5 MiB of RAM are free; take a smaller --model, or end other programs"
    with pytest.raises(BudgetError, match=re.escape(words)) as caught:
        played(machine, model, free, ALL_LAYERS, arena_mib=8)
    assert (caught.value.needed_mib, caught.value.given_mib) == (6, 5)
    monkeypatch.setattr(spill, "available_ram_bytes", lambda: spilled)
    assert played(machine, model, free, ALL_LAYERS, arena_mib=8)[1] == ()


def test_without_the_variable_nothing_is_said(
    machine: Machine, model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's own error says what does not fit."""
    monkeypatch.delenv("GGML_CUDA_ENABLE_UNIFIED_MEMORY", raising=False)
    assert played(machine, model, MIB, ALL_LAYERS, arena_mib=8)[1] == ()
    assert warnings(caplog) == []
