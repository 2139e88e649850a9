"""Bytes moved to the device by layer: all of them are counted, and a layer that sees but a window moves none."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvs_core.memory.phases import Phase
from tests.engine.machines import MACHINES, Machine, machine_of, play, write_models
from tests.engine.tiny import engine, kv_settings, run, text


@pytest.mark.parametrize("model", ["gemma3", "gemma4", "llama", "qwen35"])
def test_layers_with_a_window_move_nothing(tiny_models: dict[str, Path], model: str) -> None:
    """Where pages are streamed, those of every layer that sees everything are, and no others."""
    with engine(tiny_models[model], kv=kv_settings(), pool=0.0, fixed=True) as built:
        run(built, text(256, 300), text(256, 40, 1))
        report, layers = built.report(), built.spec.kv_layers
    assert report.layer_numbers == [layer.index for layer in layers]
    moved = dict(zip(layers, report.stats.moved_bytes, strict=True))
    assert sum(moved.values()) == report.h2d_bytes > 0
    assert not any(moved[layer] for layer in layers if layer.window)
    assert all(moved[layer] > 0 for layer in layers if not layer.window)


@pytest.mark.parametrize("name", MACHINES)
def test_captured_steps_count_what_they_move(name: str, tmp_path: Path) -> None:
    """At every launch, not when they are captured."""
    machine: Machine = machine_of(name)
    model = write_models(tmp_path, machine)["gemma3"]
    with engine(model, kv=kv_settings(), pool=0.0, fixed=True, device=machine.device) as built:
        play(built, [(Phase.PREFILL, 64, 64)] * 5)
        for _ in range(3):
            play(built, [(Phase.DECODE, 1, 1)])
            report = built.report()
            assert sum(report.stats.moved_bytes) == report.h2d_bytes > 0
            assert report.stats.moved_bytes[0] == 0
        before = report
        play(built, [(Phase.DECODE, 1, 1)])
        step = [now - then for now, then in
                zip(built.report().stats.moved_bytes, before.stats.moved_bytes, strict=True)]
        assert sum(step) == before.stats.streamed_pages_per_step * built.geometry.page_bytes
