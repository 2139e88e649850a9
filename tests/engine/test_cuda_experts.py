"""Mixtures of experts on the whole CUDA engine: near to the host, and as bits whatever is resident or beside a row.

On the CPU stand-in in small, and on a GPU.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvs_core.engine.budget import Drafting
from kvs_core.memory.phases import Phase
from tests.engine.machines import MACHINES, Machine, machine_of, play
from tests.engine.rounds import Left, Played, Round, play_rounds
from tests.engine.test_cuda_engine import LARGEST, MEAN, decode, prefill
from tests.engine.tiny import engine, kv_settings, text
from tests.support.compare import log_probs
from tests.support.tiny_gguf import Experts, Gemma4, write_tiny_gemma4, write_tiny_qwen3moe, write_tiny_qwen35moe

ARCHS = ["qwen3moe", "qwen35moe", "gemma4"]


@pytest.fixture(scope="module", params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Machine:
    """See ``MACHINES``."""
    return machine_of(request.param)


@pytest.fixture(scope="module")
def models(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Records and more experts than a group has rows; float32 rows, a shared expert, joined gates, and an MTP block;
    a dense part beside experts, in layers of two shapes."""
    folder = tmp_path_factory.mktemp("experts")
    small: dict[str, Any] = {"embd": 32, "heads": 2, "kv_heads": 1, "head_dim": 64}
    sizes: dict[str, Any] = machine.choose(small, {})
    ssm = {"ssm_state": 32, "ssm_k_heads": 1, "ssm_v_heads": 2, "interval": 2}
    return {
        "qwen3moe": write_tiny_qwen3moe(
            folder / "qwen3moe.gguf", seed=4, n_layer=2, weight_type="q8_0", experts=Experts(count=12, used=3), **sizes
        ),
        "qwen35moe": write_tiny_qwen35moe(
            folder / "qwen35moe.gguf", seed=1, n_layer=2, experts=Experts(count=5, used=2, shared=32, joined=True),
            **ssm, **sizes,
        ),
        "gemma4": write_tiny_gemma4(
            folder / "gemma4.gguf", seed=5, weight_type="q8_0", window=40, pattern=(False, True, False),
            more=Gemma4(values=False, experts=Experts(count=12, used=5, joined=True), spread=2.0),
            **machine.choose(
                {"embd": 32, "heads": 2, "kv_heads": (1, 1), "head_dims": (32, 64), "ffn": 64},
                {"head_dims": (256, 512)},
            ),
        ),
    }


@pytest.mark.parametrize("model", ARCHS)
def test_experts_have_the_hosts_log_probabilities(machine: Machine, models: dict[str, Path], model: str) -> None:
    """In prefill and in decode, of one row and of several."""
    tokens, outcome = text(256, 300, 3), []
    for device in (machine.device, None):
        with engine(models[model], kv=kv_settings("f32", "f32"), device=device) as built:
            logits, at = [], 0
            for phase, rows, _ in prefill(machine.choose(45, 256)) + decode(1, 5, 8):
                with built.step(tokens[at : at + rows], phase) as step:
                    logits.append(step.logits(max(0, rows - 8)))
                    step.settle()
                at += rows
            outcome.append(np.concatenate(logits))
    distance = np.abs(log_probs(outcome[0]) - log_probs(outcome[1]))
    print(f"{model}: largest {distance.max():.4f}, mean {distance.mean():.5f}")
    assert distance.max() <= LARGEST
    assert distance.mean() <= MEAN


@pytest.mark.parametrize("model", ARCHS)
def test_bits_of_experts_do_not_depend_on_residency(machine: Machine, models: dict[str, Path], model: str) -> None:
    """Logits from the least pool are those of a resident run, bit for bit, and nothing is allocated behind ready; with
    two pools in window mode too."""
    outcome, ubatch = [], machine.choose(32, 64)
    windows = kv_settings(residency_mode="window", window_tokens=64, run_pages=3)
    told = [(kv_settings(), None), (kv_settings(), 0.0)] + ([(windows, 0.0)] if model == "gemma4" else [])
    for kv, pool in told:
        runtime = machine.runtime()
        with engine(
            models[model], kv=kv, pool=pool, fixed=True, ubatch=ubatch, device=partial(machine.device, runtime)
        ) as built:
            ready = runtime.allocations
            script = prefill(machine.choose(200, 400), ubatch) + decode(1, 3) + prefill(9) + decode(3, 8)
            outcome.append(play(built, script, rows=8))
            assert (built.report().h2d_bytes > 0) == (pool is not None)
            assert runtime.allocations == ready
    assert all(logits == outcome[0] for logits in outcome[1:])


@pytest.mark.parametrize("model", ARCHS)
def test_rows_of_experts_do_not_depend_on_their_number(machine: Machine, models: dict[str, Path], model: str) -> None:
    """n rows in one step have the logits of n steps of one row, bit for bit, though they choose the same experts."""
    with engine(models[model], kv=kv_settings(), device=machine.device) as built:
        play(built, prefill(machine.choose(20, 330)))
        for width in machine.choose((8, 3), (*range(1, 9), *range(8, 0, -1))):
            tokens = text(built.spec.n_vocab, width, width)
            with built.step(tokens, Phase.DECODE) as step:
                together = step.logits(0)
            alone = []
            for token in tokens:
                with built.step([token], Phase.DECODE) as step:
                    alone.append(step.logits())
                    step.settle()
            assert together.tobytes() == np.concatenate(alone).tobytes(), width


@pytest.mark.parametrize(
    ("model", "drafting"), [("qwen35moe", Drafting(nextn=True)), ("gemma4", Drafting(resident=True))]
)
def test_wide_steps_of_experts_leave_what_single_rows_leave(
    machine: Machine, models: dict[str, Path], model: str, drafting: Drafting
) -> None:
    """Steps in tiles, and drafts of the MTP block with its own experts or of the model itself: the kept rows alone, one
    at a time, leave the same."""
    rounds = [Round("", 1, machine.choose(9, 65), 8), Round("next" if drafting.nextn else "resident", 1, 2, 1)]
    outcome, played = [], [Played(), Played()]
    for shown, wide in zip(played, (True, False), strict=True):
        with engine(
            models[model], kv=kv_settings("f32", "f32"), drafting=drafting,
            ubatch=machine.choose(16, 72), device=machine.device,
        ) as built:
            outcome.append(
                Left.by(built, play_rounds(built, machine.choose(9, 40), rounds, 7, drafting=wide, played=shown))
            )
    outcome[0].check(outcome[1])
    assert played[0].logits == played[1].logits
    assert machine.choose(9, 65) in played[0].widths
