"""Programmatic launches: a kernel that starts before those in front of it are done reads nothing that they write."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvs_core.engine.budget import Drafting
from tests.engine.machines import Machine
from tests.engine.rounds import Left, Played, Round, play_rounds
from tests.engine.tiny import engine, kv_settings
from tests.support.tiny_gguf import write_tiny_qwen35


@pytest.mark.parametrize("gpu_layers", [None, 0])
def test_kernels_that_run_ahead_change_no_bit(tmp_path: Path, gpu_layers: int | None) -> None:
    """Of steps in tiles over the end of a page, usual steps and drafts, of a recurrent layer, one of attention and an
    MTP block; where every kernel finds memory as it was, up to its wait, it leaves what it leaves in order."""
    path = write_tiny_qwen35(
        tmp_path / "qwen35.gguf", seed=1, n_layer=2, interval=2, embd=32, heads=2, kv_heads=1, head_dim=64, ffn=32,
        ssm_state=32, ssm_k_heads=1, ssm_v_heads=2,
    )
    rounds = [
        Round("next", 2, 3, 1), Round("", 1, 17, 9), Round("resident", 2, 3, 2), Round("", 1, 2, 2, prefill=True),
        Round("next", 1, 2, 2),
    ]
    outcome, played = [], [Played(), Played()]
    for ahead, shown in zip((True, False), played, strict=True):
        machine = Machine(on_gpu=False, ahead=ahead)
        with engine(
            path, kv=kv_settings("f32", "f32"), pool=0.6, fixed=True, drafting=Drafting(nextn=True, resident=True),
            ubatch=32, device=machine.device, gpu_layers=gpu_layers,
        ) as built:
            token = play_rounds(built, 59, rounds, 3, drafting=True, played=shown)
            outcome.append(Left.by(built, token))
    assert played[0].widths == [17], "tiles at 60, 68 and 76: the first one writes to the page before the others"
    assert played[0].logits == played[1].logits
    outcome[0].check(outcome[1])
