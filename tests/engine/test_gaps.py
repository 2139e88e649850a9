"""The policy as an engine feeds it: what a step measures decides about steps of its own phase alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvs_core.memory.phases import Phase
from kvs_core.paging.residency import Observation, ResidencyConfig, ResidencyState, residency_step
from kvs_core.settings.rooms import ALL_LAYERS
from kvs_core.streaming import kv_step, placement
from tests.engine.tiny import engine, kv_settings


def test_a_phase_has_its_own_gap(tiny_qwen35: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring of decode is sized by what decode steps measure, however long attention rests in a prefill step."""
    clock, seen = Clock(), []

    def watch(config: ResidencyConfig, state: ResidencyState, observed: Observation) -> ResidencyState:
        seen.append(observed.gap_s)
        return residency_step(config, state, observed)

    monkeypatch.setattr(kv_step, "perf_counter", clock)
    monkeypatch.setattr(placement, "residency_step", watch)
    with engine(tiny_qwen35, kv=kv_settings(), pool=0.3) as built:
        clock.tick_s = 1.0
        for _ in range(3):
            with built.step(list(range(40)), Phase.PREFILL) as step:
                step.settle()
        assert seen[-1] >= 1.0
        clock.tick_s = 1e-3
        for _ in range(4):
            with built.step([1], Phase.DECODE) as step:
                step.settle()
        assert 0 < seen[-1] < 0.1
        with built.step([1], Phase.PREFILL) as step:
            step.settle()
        assert seen[-1] >= 1.0


def test_the_time_that_weights_take_on_the_link_is_no_gap(tiny_qwen35: Path) -> None:
    """A captured step without a streamed page tells the gap, less what the link had to do beside pages in it."""
    for gpu_layers in (ALL_LAYERS, 0):
        with engine(tiny_qwen35, kv=kv_settings(), gpu_layers=gpu_layers) as built:
            kv, other_s = built._kv, built.weights_report().home_bytes / built.link_bytes_per_s
            kv.observe_step(0.5 + other_s)
            assert kv._feedback.gaps[Phase.DECODE].steady_s == pytest.approx(0.5 / kv.layers, rel=1e-6)
            kv.observe_step(0.5 * other_s + 1e-12)
            assert kv._feedback.gaps[Phase.DECODE].steady_s == (0.0 if other_s else 1e-12 / kv.layers)


class Clock:
    """Goes on by ``tick_s`` whenever it is read."""

    tick_s = 0.0
    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s
