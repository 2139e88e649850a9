"""What a GPU may do earlier or later than in order changes no bit: programmatic launches, copies and captured work.

``KVS_TEST_LONG=1`` lets the streams run out of order too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvs_core.device.cuda.device import CudaDevice
from kvs_core.engine.budget import Drafting
from tests.engine.machines import Machine
from tests.engine.out_of_order import OutOfOrder
from tests.engine.rounds import Left, Played, Round, play_rounds
from tests.engine.tiny import engine, kv_settings
from tests.engine.written import LONG
from tests.support.tiny_gguf import ROUTED, Gemma4, write_tiny_gemma4, write_tiny_qwen35

IN_ORDER, AHEAD = Machine(on_gpu=False), Machine(on_gpu=False, ahead=True)
BOTH, ONE = Drafting(nextn=True, resident=True), Drafting(resident=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recurrent layer, one of attention and an MTP block."""
    return write_tiny_qwen35(
        tmp_path_factory.mktemp("models") / "qwen35.gguf", seed=1, n_layer=2, interval=2, embd=32, heads=2, kv_heads=1,
        head_dim=64, ffn=32, ssm_state=32, ssm_k_heads=1, ssm_v_heads=2,
    )


def played_on(
    device: Callable[[], CudaDevice], path: Path, prompt: int, rounds: Sequence[Round], gpu_layers: int | None,
    drafting: Drafting = BOTH,
) -> tuple[Played, Left]:
    """What the rounds show, and what they leave."""
    played = Played()
    with engine(
        path, kv=kv_settings("f32", "f32"), pool=0.6, fixed=True, drafting=drafting, ubatch=32, device=device,
        gpu_layers=gpu_layers,
    ) as built:
        token = play_rounds(built, prompt, rounds, 3, drafting=True, played=played)
        return played, Left.by(built, token)


def test_kernels_that_run_ahead_change_no_bit(path: Path) -> None:
    """Of steps in tiles over the end of a page, usual steps and drafts: where every kernel finds memory as it was, up
    to its wait, it leaves what it leaves in order."""
    rounds = [
        Round("next", 2, 3, 1), Round("", 1, 17, 9), Round("resident", 2, 3, 2), Round("", 1, 2, 2, prefill=True),
        Round("next", 1, 2, 2),
    ]
    expected, expected_left = played_on(IN_ORDER.device, path, 59, rounds, None)
    for gpu_layers in (None, 0):
        played, left = played_on(AHEAD.device, path, 59, rounds, gpu_layers)
        assert played.widths == [17], "tiles at 60, 68 and 76: the first one writes to the page before the others"
        assert played.logits == expected.logits
        left.check(expected_left)


def test_experts_that_run_ahead_change_no_bit(tmp_path: Path) -> None:
    """The same of experts beside a dense part."""
    path = write_tiny_gemma4(
        tmp_path / "gemma4.gguf", seed=1, weight_type="q8_0", pattern=(False, False), embd=32, heads=2, kv_heads=(1, 1),
        head_dims=(32, 64), ffn=32, more=Gemma4(experts=ROUTED),
    )
    rounds = [Round("resident", 1, 2, 1), Round("", 1, 9, 9)]
    expected, expected_left = played_on(IN_ORDER.device, path, 9, rounds, None, ONE)
    played, left = played_on(AHEAD.device, path, 9, rounds, None, ONE)
    assert played.logits == expected.logits
    left.check(expected_left)


@pytest.mark.skipif(not LONG, reason="with KVS_TEST_LONG=1 alone")
@pytest.mark.parametrize(("prompt", "seed"), [(40, 1), (200, 2), (300, 3)])
def test_streams_out_of_order_change_no_bit(path: Path, prompt: int, seed: int) -> None:
    """The same while copies and captured work wait for fences alone, and weights and pages stream."""
    rounds = [
        Round("next", 2, 3, 1), Round("", 1, 17, 9), Round("resident", 2, 3, 2), Round("resident", 1, 3, 0),
        Round("", 1, 2, 2, prefill=True), Round("resident", 1, 2, 2, left_open=True), Round("next", 1, 2, 2),
    ]

    def late() -> CudaDevice:
        runtime: Any = OutOfOrder(seed)
        return CudaDevice(runtime)

    expected, expected_left = played_on(IN_ORDER.device, path, prompt, rounds, None)
    for gpu_layers in (None, 0):
        played, left = played_on(late, path, prompt, rounds, gpu_layers)
        assert played.logits == expected.logits
        left.check(expected_left)
