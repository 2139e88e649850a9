"""Weights that pass through the arena on the whole CUDA engine: captured steps, and steps as they come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvs_core.memory.phases import Phase
from kvs_core.settings.rooms import ALL_LAYERS
from tests.engine.machines import MACHINES, Machine, Move, machine_of, play, write_models
from tests.engine.tiny import engine, kv_settings

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE

SCRIPT: Sequence[Move] = [
    (PREFILL, 64, 64), (PREFILL, 30, 30), (DECODE, 1, 1), (DECODE, 1, 1), (DECODE, 3, 2), (DECODE, 1, 1),
    (DECODE, 3, 0), (PREFILL, 20, 20), (DECODE, 1, 1), (DECODE, 3, 3),
]


@pytest.fixture(scope="module", params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Machine:
    """See ``MACHINES``."""
    return machine_of(request.param)


@pytest.fixture(scope="module")
def models(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """See ``write_models``."""
    return write_models(tmp_path_factory.mktemp("models"), machine)


@pytest.mark.parametrize("model", ["llama", "qwen35", "demo"])
def test_bits_do_not_depend_on_where_weights_are(machine: Machine, models: dict[str, Path], model: str) -> None:
    """Logits are those with all weights on the device, bit for bit, while pages stream too; a step is captured as often
    as with all of them there, and moves each part once; behind the load nothing is allocated."""
    if model not in models:
        pytest.skip("for a GPU alone: the stand-in is slow")
    kv = kv_settings("f32", "q5_1")
    with engine(models[model], kv=kv, pool=0.0, fixed=True, device=machine.device, gpu_layers=ALL_LAYERS) as built:
        expected = play(built, SCRIPT, rows=3)
        recorded, pages = built._captured.recorded, built.report().h2d_bytes
        assert built.weights_report().home_bytes == 0
    for gpu_layers in {"llama": (0,), "qwen35": (0, 3), "demo": (0, 1, 3, 5)}[model]:
        runtime = machine.runtime()
        with engine(
            models[model], kv=kv, pool=0.0, fixed=True, device=lambda: machine.device(runtime), gpu_layers=gpu_layers  # noqa: B023
        ) as built:
            ready = runtime.allocations
            assert play(built, SCRIPT, rows=3) == expected, gpu_layers
            found = built.weights_report()
            assert len(found.passing) == min(built.spec.n_layer, built.spec.n_layer + 1 - gpu_layers)
            assert (built._captured.recorded, built.report().h2d_bytes - found.h2d_bytes) == (recorded, pages)
            assert runtime.allocations == ready
        ahead = found.h2d_bytes - len(SCRIPT) * found.home_bytes
        assert 0 <= ahead <= found.ring_bytes
