"""Sequences by turns on a device that captures its steps: what was captured copies from the memory of one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvs_core.engine.engine import Engine
from kvs_core.memory.phases import Phase
from tests.engine.machines import MACHINES, machine_of, write_models
from tests.engine.tiny import engine, kv_settings, text

TOKENS = 288


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("model", ["llama", "qwen35"])
def test_steps_that_were_captured_read_the_sequence_in_hand(name: str, model: str, tmp_path: Path) -> None:
    """Two of one length, so that nothing but the memory differs, and streamed: the first goes on as if it had not been
    away."""
    machine = machine_of(name)
    if model == "qwen35" and not machine.on_gpu:
        pytest.skip("for a GPU alone: the stand-in is slow")
    path = write_models(tmp_path, machine)[model]
    with engine(path, kv=kv_settings(), pool=0.0, fixed=True, device=machine.device) as built:
        prefill(built, seed=1)
        end = built.checkpoint()
        decode(built, 5)
        wanted = decode(built, 6)
        built.go_back(end)
        decode(built, 5)
        first = built.park()
        prefill(built, seed=2)
        decode(built, 5)
        assert decode(built, 6) != wanted
        assert built.report().stats.streamed_pages_per_step > 0
        second = built.park()
        built.unpark(first)
        assert decode(built, 6) == wanted
        assert second.history.tokens == built.committed == TOKENS + 2


def prefill(built: Engine, *, seed: int) -> None:
    """A prompt in ubatches of 64."""
    prompt = text(built.spec.n_vocab, TOKENS, seed)
    for at in range(0, TOKENS, 64):
        with built.step(prompt[at : at + 64], Phase.PREFILL) as step:
            step.settle()


def decode(built: Engine, token: int) -> bytes:
    """The logits behind a token."""
    with built.step([token], Phase.DECODE) as step:
        logits = step.logits().tobytes()
        step.settle()
    return logits
