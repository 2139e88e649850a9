"""Wide steps on captured engines: the promises of ``test_tiles`` on the CPU stand-in in small, and on a GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvs_core.engine.budget import Drafting
from tests.engine.machines import MACHINES, Machine, machine_of
from tests.engine.rounds import Left, Played, Round, play_rounds
from tests.engine.test_tiles import EVERY, of_model
from tests.engine.tiny import engine, kv_settings
from tests.support.tiny_gguf import write_tiny_gemma3, write_tiny_llama, write_tiny_qwen35

SMALL: dict[str, Any] = {"embd": 32, "heads": 2, "kv_heads": 1, "head_dim": 64, "ffn": 32}


@pytest.fixture(scope="module", params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Machine:
    """See ``MACHINES``."""
    return machine_of(request.param)


@pytest.fixture(scope="module")
def models(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A recurrent layer, one of attention and an MTP block; more of them on a GPU, and models of attention alone."""
    folder = tmp_path_factory.mktemp("tiles")
    layers, heads = machine.choose((2, 1), (4, 2))
    others: dict[str, Any] = SMALL | {"kv_heads": heads}
    return {
        "qwen35": write_tiny_qwen35(
            folder / "qwen35.gguf", seed=1, n_layer=layers, interval=2, ssm_state=32, ssm_k_heads=1, ssm_v_heads=2,
            **others,
        ),
        "llama": write_tiny_llama(folder / "llama.gguf", seed=2, n_layer=2, **others),
        "gemma3": write_tiny_gemma3(
            folder / "gemma3.gguf", seed=2, n_layer=3, window=14, pattern=[True, False, False], **others
        ),
    }


def test_wide_steps_leave_what_single_rows_leave(machine: Machine, models: dict[str, Path]) -> None:
    """Streamed, and mixed with usual steps and drafts: logits of kept rows, keys and values, states and drafts are
    those of the kept rows alone, one at a time, all resident. Nothing is allocated on the device."""
    small = [Round("", 1, 17, 9), Round("next", 1, 2, 1), Round("", 1, 9, 0)]
    cases = machine.choose(
        [("qwen35", Drafting(nextn=True), 131, small)],
        [(model, *of_model(model, EVERY * 2, prompt)) for model in models for prompt in range(455, 475, 3)],
    )
    for model, drafting, prompt, rounds in cases:
        outcome, played = [], [Played(), Played()]
        for shown, pool in zip(played, (machine.choose(0.3, 0.5), None), strict=True):
            runtime = machine.runtime()
            with engine(
                models[model], kv=kv_settings("f32", "f32"), pool=pool, fixed=True, drafting=drafting,
                ubatch=machine.choose(32, 72), context=machine.choose(512, 1024),
                device=partial(machine.device, runtime),
            ) as built:
                before = runtime.allocations
                drafts = pool is not None
                outcome.append(
                    Left.by(built, play_rounds(built, prompt, rounds, prompt, drafting=drafts, played=shown))
                )
                assert runtime.allocations == before
                came = built.report().h2d_bytes > 0
                # Going back brings pages again that a sliding window had passed.
                assert came == drafts or (came and model == "gemma3")
        outcome[0].check(outcome[1])
        assert played[0].logits == played[1].logits
        assert machine.choose(17, 65) in played[0].widths
