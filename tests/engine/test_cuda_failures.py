"""What fails in the CUDA engine fails in one line, and what it was about to do has not happened."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvs_core.device import pageable
from kvs_core.device.cuda.graphs import Launches
from kvs_core.device.shortage import pinning_advice_here
from kvs_core.engine import captured
from kvs_core.engine.budget import NO_DRAFTING, Drafting
from kvs_core.engine.engine import Engine
from kvs_core.engine.step import Step
from kvs_core.errors import DeviceError, DeviceMemoryError, KvsError
from kvs_core.formats.gguf import GgufFile
from kvs_core.memory.phases import Phase
from kvs_core.paging import slabs
from kvs_core.settings.rooms import ContextSettings, RopeSettings
from tests.engine.machines import MACHINES, Machine, machine_of, play, write_models
from tests.engine.tiny import engine, kv_settings, text
from tests.engine.written import FOR_LONG
from tests.support.tiny_gguf import write_tiny_qwen35

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE


@pytest.fixture(scope="module", params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Machine:
    """See ``MACHINES``."""
    return machine_of(request.param)


@pytest.fixture(scope="module")
def models(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """See ``write_models``."""
    return write_models(tmp_path_factory.mktemp("models"), machine)


@contextmanager
def one_line(*words: str) -> Iterator[None]:
    """An error for the user, with these words."""
    with pytest.raises(KvsError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def failing(do: Callable[..., Any], after: int) -> Callable[..., Any]:
    """The same, until call ``after`` fails."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise DeviceError("a broken part; mend it")
        return do(*args, **kwargs)

    return call


FAULTS = [
    ("embed", 0), ("project", 1), ("gdn_decode", 0), ("add_projected", 0), ("write_kv", 0), ("attend_decode", 0),
    ("attend_decode", 1), ("finish_decode", 0), ("project_gated", 1), ("add_projected", 4), ("gdn_decode", 1),
    ("project", 4),
]
"""Ops of a step, in some order, and how many of their calls go well first."""


def test_a_clock_that_fails_costs_no_step(
    machine: Machine, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device cannot tell how long a step took, its rows are settled all the same."""
    with engine(models["qwen35"], kv=kv_settings(), device=machine.device) as built:
        play(built, [(PREFILL, 20, 20)])
        with monkeypatch.context() as patch:
            patch.setattr(Step, "observe", failing(Step.observe, 0))
            with one_line("a broken part"):
                play(built, [(DECODE, 2, 2)])
        assert built.committed == 22
        play(built, [(DECODE, 1, 1)])
        built.rewind(0)


def test_a_capture_that_fails_half_way_has_not_happened(machine: Machine, models: dict[str, Path]) -> None:
    """Whatever op fails while a step is captured, the session stands where it stood: the step that follows has the
    bits of a run without failures, the recurrent state and copies on their way included."""
    script = [(DECODE, width, keep) for width, keep in ((1, 1), (8, 3), (2, 2), (8, 8))] * machine.choose(1, 3)
    kv = kv_settings("q8_0", "q4_0", ring_slots=3, run_pages=2)
    with engine(models["qwen35"], kv=kv, pool=0.1, fixed=True, device=machine.device) as built:
        play(built, [(PREFILL, 64, 64)] * 5)
        expected = play(built, script)
    with engine(models["qwen35"], kv=kv, pool=0.1, fixed=True, device=machine.device) as built:
        play(built, [(PREFILL, 64, 64)] * 5)
        vocab, got = built.spec.n_vocab, []
        for number, (_, width, keep) in enumerate(script):
            for op, after in FAULTS:
                built._captured.forget()
                committed, copied, recorded = built.committed, built.report().h2d_bytes, built._captured.recorded
                with pytest.MonkeyPatch.context() as patch:
                    ops = built._device.ops
                    patch.setattr(ops, op, failing(getattr(ops, op), after))
                    with one_line("a broken part"):
                        built.step(text(vocab, width, 77), DECODE)
                assert (built.committed, built._captured.recorded) == (committed, recorded), op
                in_ring = built.report().stats.ring_slots * built.geometry.page_bytes
                assert built.report().h2d_bytes - copied <= in_ring, "what was captured is no copy"
            with built.step(text(vocab, width, number), DECODE) as step:
                got.append(step.logits().tobytes())
                step.settle(keep)
        assert built.report().h2d_bytes > 0
    assert got == expected


@pytest.mark.parametrize("nextn", [pytest.param(False, marks=FOR_LONG), True])
def test_without_memory_for_recordings_the_text_is_the_same(
    machine: Machine, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    tmp_path: Path, nextn: bool,
) -> None:
    """At the end of a capture or half way, of a step or of a draft: what it was for runs as it comes. From the warm-up
    on, until there is memory again; it is said once."""
    monkeypatch.setattr(captured, "PAUSE_STEPS", 1)
    path, kv = models["qwen35"], kv_settings(ring_slots=3, run_pages=2)
    if nextn:
        path = write_tiny_qwen35(tmp_path / "mtp.gguf", seed=1, weight_type="q8_0", n_layer=2, interval=2, mtp=True)
    outcome = []
    for fails in (False, True):
        with engine(
            path, kv=kv, pool=0.1, fixed=True, lower=True, drafting=Drafting(nextn=nextn), device=machine.device
        ) as built:
            with pytest.MonkeyPatch.context() as patch:
                if fails:
                    patch.setattr(built._device._runtime, "end_capture", no_memory, raising=False)
                built.warm_up()
                logits = play(built, [(PREFILL, 64, 64)] * 4)
                for number, (width, keep) in enumerate(((1, 1), (3, 2), (2, 2), (8, 8), (1, 1), (2, 1), (3, 3))):
                    if fails and number == 3:
                        patch.undo()
                        patch.setattr(built._device.ops, "finish_decode", no_memory_once(built._device))
                    with built.open(width) as step:
                        if nextn:
                            step.draft_next(number)
                            logits.append(step.logits().tobytes())
                        step.run(text(built.spec.n_vocab, width, number))
                        logits.append(step.logits(0).tobytes())
                        step.settle(keep)
                assert built.report().h2d_bytes > 0
                assert built._captured.recorded >= 1
            outcome.append(logits)
    assert outcome[0] == outcome[1]
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "steps are not recorded, which is slower, and it is tried again every 1 steps: no memory" in said[0]
    assert len(said) == 1


def no_memory(*given: Any, **named: Any) -> Any:
    raise DeviceMemoryError("no memory for a graph; make room")


def no_memory_once(device: Any) -> Callable[..., Any]:
    """``finish_decode`` that fails when it is captured first."""
    calls, do = iter([no_memory]), device.ops.finish_decode

    def call(*given: Any, **named: Any) -> Any:
        return (next(calls, do) if device._capture.active else do)(*given, **named)

    return call


def test_a_launch_that_fails_has_not_happened(
    machine: Machine, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded step that cannot be launched can be launched later."""
    script = [(DECODE, 3, 2), (DECODE, 3, 3), (DECODE, 3, 1)]
    outcome = []
    for fails in (False, True):
        with engine(models["qwen35"], kv=kv_settings(), pool=0.0, fixed=True, device=machine.device) as built:
            logits = play(built, [(PREFILL, 64, 64)] * machine.choose(1, 5))
            for number, move in enumerate(script):
                if fails:
                    with monkeypatch.context() as patch:
                        patch.setattr(Launches, "launch", failing(Launches.launch, 0))
                        with one_line("a broken part"):
                            built.step(text(built.spec.n_vocab, 3, number), DECODE)
                logits += play(built, [move])
            assert built._captured.recorded == 1
            outcome.append(logits)
    assert outcome[0] == outcome[1]


@pytest.mark.parametrize(
    "purpose", ["weights", "step tables", "the arena", "plan tables", "the tokens of a step", "recurrent state"]
)
def test_device_memory_that_cannot_be_had(machine: Machine, models: dict[str, Path], purpose: str) -> None:
    """No engine comes of it, and the error names what the memory was for."""
    runtime = machine.runtime()
    runtime.refuse = purpose

    with one_line(purpose), engine(models["qwen35"], kv=kv_settings(), device=lambda: machine.device(runtime)):
        pass


def test_pinned_memory_that_cannot_be_had(
    machine: Machine, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A history that cannot grow, for there is no RAM either, stops a step before it touches anything: with memory the
    same step goes on. Slabs are small, so that a short text needs three."""
    monkeypatch.setattr(slabs, "_FIRST", 4)
    monkeypatch.setattr(slabs, "_FULL", 8)
    script = [(PREFILL, 64, 64)] * 5 + [(DECODE, 8, 8)] * 2
    with engine(models["llama"], kv=kv_settings(), pool=0.0, fixed=True, device=machine.device) as built:
        expected = play(built, script)
    runtime, got, refused = machine.runtime(), [], []
    with engine(
        models["llama"], kv=kv_settings(), pool=0.0, fixed=True, device=lambda: machine.device(runtime)
    ) as built:
        for number, (phase, width, _) in enumerate(script):
            tokens = text(built.spec.n_vocab, width, number)
            runtime.pinned = False
            try:
                with monkeypatch.context() as patch:
                    patch.setattr(pageable, "available_ram_bytes", lambda: 0)
                    step = built.step(tokens, phase)
            except DeviceMemoryError as error:
                refused.append(str(error))
                runtime.pinned = True
                step = built.step(tokens, phase)
            runtime.pinned = True
            with step:
                got.append(step.logits().tobytes())
                step.settle()
    assert len(refused) == 3
    for line in refused:
        assert re.fullmatch(
            r"no host memory for [\d.]+ MiB more of KV history \(\d+ MiB held, \d+ of \d+ MiB of RAM are free\); "
            "lower --ctx-size or use smaller --cache-type-k and --cache-type-v", line,
        )
    assert got == expected


@pytest.mark.parametrize("drafting", [pytest.param(NO_DRAFTING, marks=FOR_LONG), Drafting(nextn=True)])
def test_a_history_that_cannot_be_pinned_gives_the_same_text(
    machine: Machine, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    drafting: Drafting, tmp_path: Path,
) -> None:
    """From some slab on nothing can be pinned at all, not what runs pass through either. It is said once, with
    what to do; steps that stream such a slab are not recorded; a conversation that is set aside comes back the same."""
    monkeypatch.setattr(slabs, "_FIRST", 4)
    monkeypatch.setattr(slabs, "_FULL", 8)
    kv, path = kv_settings(ring_slots=3, run_pages=2), models["qwen35"]
    if drafting.nextn:
        path = write_tiny_qwen35(tmp_path / "mtp.gguf", seed=1, weight_type="q8_0", n_layer=4, interval=2, mtp=True)
    reading = [(PREFILL, 64, 64)]
    writing = [(DECODE, width, keep) for width, keep in ((1, 1), (8, 3), (2, 2), (8, 8))]

    def run(pinned: bool) -> list[bytes]:
        runtime = machine.runtime()
        with engine(
            path, kv=kv, pool=0.1, fixed=True, lower=True, drafting=drafting, device=lambda: machine.device(runtime)
        ) as built:
            logits = play(built, reading)
            runtime.pinned = pinned
            logits += play(built, 4 * reading)
            built.unpark(built.park())
            logits += play(built, writing)
            assert built.report().h2d_bytes > 0
            if drafting.nextn:
                with built.open(3) as step:
                    step.draft_next(1)
                    logits.append(step.logits().tobytes())
                    step.run([1, 2])
                    logits.append(step.logits(0).tobytes())
            assert built._kv._history.has_pageable != pinned
            if not pinned:
                assert built._captured.recorded == drafting.nextn   # a draft streams nothing
            return logits

    expected = run(pinned=True)
    assert not caplog.records
    assert run(pinned=False) == expected
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2
    assert "MiB of KV history are pinned, no more can be: the rest is copied more slowly; " in said[0]
    assert "MiB of RAM for copies of the KV history cannot be pinned" in said[1]
    assert all(line.endswith(pinning_advice_here()) for line in said)


@pytest.mark.parametrize("name", ["drain", "vacate", "_bind"])
def test_a_change_of_phase_that_fails(
    machine: Machine, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Before its commit it changes nothing, and the session goes on with the same bits; behind it the session is
    closed, and says so."""
    moves = [(DECODE, 3, 3), (PREFILL, 20, 20), (DECODE, 3, 3)]
    outcome: list[list[bytes]] = []
    for fails in (False, True):
        with engine(models["qwen35"], kv=kv_settings(), pool=0.0, device=machine.device) as built:
            logits = play(built, [(PREFILL, 64, 64)] * machine.choose(1, 5))
            for move in moves:
                if fails:
                    where = built._handover if name == "_bind" else built._kv
                    with monkeypatch.context() as patch:
                        patch.setattr(where, name, failing(getattr(where, name), 0))
                        with one_line("a broken part"):
                            built.step([1], move[0])
                    if name == "_bind":
                        with one_line("a change of phase failed", "the session is closed"):
                            built.step([1], PREFILL)
                        return
                logits += play(built, [move])
            outcome.append(logits)
    assert outcome[0] == outcome[1]


def test_what_cannot_be_is_refused_before_the_weights(machine: Machine, models: dict[str, Path]) -> None:
    """An arena with no room for a pool costs no upload."""
    runtime = machine.runtime()
    device = machine.device(runtime)
    ready = runtime.allocations
    with one_line("arena too small", "raise it"):
        Engine(
            GgufFile.open(models["llama"]), device, context=ContextSettings(ctx_size=512), kv=kv_settings(),
            rope=RopeSettings(), arena_bytes=4096,
        )
    device.close()
    assert runtime.allocations == ready
