"""Whatever allocation fails, ``kvs run`` ends in one line or goes on without it: no traceback, no thread left."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvs_cli import open_model
from kvs_cli.commands import run
from kvs_core.device import pageable
from kvs_core.device.base import Device
from kvs_core.device.cuda.device import CudaDevice
from kvs_core.device.host.device import HostDebug, HostDevice
from kvs_core.engine.engine import Engine
from kvs_core.errors import DeviceMemoryError
from kvs_core.paging import slabs
from tests.cli.conftest import GREEDY, Ended, Kvs
from tests.engine.machines import MACHINES, Machine, Watched, machine_of
from tests.engine.written import FOR_LONG
from tests.support.tiny_gguf import write_tiny_qwen35

WRITES = ("-c", 256, "-ub", 64, "--kv-page-tokens", 32, "--device", "cpu", *GREEDY)
PROMPT = "The river in the north is as wide as a lake. " * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recurrent layer and one of attention, and an MTP block."""
    return write_tiny_qwen35(
        tmp_path_factory.mktemp("model") / "m.gguf", seed=1, n_layer=2, interval=2, embd=32, heads=2, kv_heads=1,
        ssm_k_heads=1, ssm_v_heads=2, weight_type="q8_0",
    )


@pytest.fixture
def threads() -> Any:
    """None is left behind. What compiles a kernel ends with it."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        if thread.name.startswith("kvs-compile"):
            thread.join(60)
    assert not [thread.name for thread in left if thread.is_alive()]


def run_on(kvs: Kvs, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Device], model: Path, *flags: object) -> Ended:
    with monkeypatch.context() as patch:
        patch.setattr(open_model, "open_device", lambda settings: make())
        return kvs("run", "-m", model, "-p", PROMPT, *WRITES, *flags)


def sweep(run: Callable[[int], Ended], expected: Ended, most: int) -> tuple[list[str], list[str]]:
    """Have allocation 1, 2, 3, ... ``most`` fail; the errors of the runs that ended by it, and the warnings of those
    that did not: they have the text."""
    errors, warnings = [], []
    for number in range(1, most + 1):
        ended = run(number)
        assert "Traceback" not in ended.err
        if ended.code == 0:
            assert ended.out == expected.out, number
            warnings += [line for line in ended.err.splitlines() if "cannot be" in line or "pinned" in line]
        else:
            errors.append(ended.error)
    return errors, warnings


@FOR_LONG
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("machine_name", MACHINES)
@pytest.mark.parametrize("kind", ["device", "pinned"])
def test_every_allocation_of_a_gpu_may_fail(
    kvs: Kvs, monkeypatch: pytest.MonkeyPatch, model: Path, machine_name: str, kind: str
) -> None:
    """Of its memory, each ends the run with what it was for. Of pinned memory, only the inputs of steps do."""
    machine = machine_of(machine_name)
    watched: list[Watched] = []

    def fail(number: int) -> Ended:
        runtime = machine.runtime()
        watched.append(runtime)
        setattr(runtime, "fail_at" if kind == "device" else "fail_pinned_at", number)
        return run_on(kvs, monkeypatch, lambda: _device(machine, runtime), model, "-n", 3, "--spec-type", "draft-mtp")

    expected = fail(0)
    assert expected.code == 0, expected.err
    most = watched[0].allocations if kind == "device" else watched[0].pinnings
    assert most > 15
    errors, warnings = sweep(fail, expected, most)
    if kind == "device":
        assert len(errors) == most
        for purpose in ("weights", "recurrent state", "the arena", "step tables", "plan tables", "tokens of a step"):
            assert any(purpose in line for line in errors), purpose
    else:
        assert all("the inputs of steps" in line for line in errors)
        assert len(errors) < most - 4
        if not machine.on_gpu:   # where all are asked for again, smaller, the second one is granted
            assert any("weights on their way cannot be pinned: they pass through" in line for line in warnings)
            assert any("it takes memory of the GPU instead" in line for line in warnings)
            assert any("of KV history are pinned, no more can be" in line for line in warnings)


def _device(machine: Machine, runtime: Watched) -> Device:
    try:
        return machine.device(runtime)
    except BaseException:
        runtime.close()
        raise


@pytest.mark.usefixtures("threads")
def test_every_allocation_of_the_host_may_fail(kvs: Kvs, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """Arena, recurrent state, history: each ends the run."""
    made: list[HostDevice] = []

    def fail(number: int) -> Ended:
        def make() -> HostDevice:
            made.append(HostDevice(1, debug=HostDebug(fail_alloc_at=number - 1)))
            return made[-1]

        return run_on(kvs, monkeypatch, make, model, "-n", 3)

    expected = fail(0)
    most = next(made[0]._alloc_numbers)
    errors, _ = sweep(fail, expected, most)
    assert len(errors) == most >= 4
    for purpose in ("the arena", "recurrent state", "KV history"):
        assert any(purpose in line for line in errors), purpose


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("machine_name", ["cpu", *MACHINES])
def test_text_that_was_written_stays(
    kvs: Kvs, monkeypatch: pytest.MonkeyPatch, model: Path, machine_name: str
) -> None:
    """RAM ends while a text grows: what there is of it has been printed, and the error tells what to do."""
    monkeypatch.setattr(slabs, "_FIRST", 4)
    monkeypatch.setattr(slabs, "_FULL", 4)

    def make() -> Device:
        return HostDevice(1) if machine_name == "cpu" else machine_of(machine_name).device()

    flags = ("-n", 120, "--ignore-eos")
    whole = run_on(kvs, monkeypatch, make, model, *flags)
    kind: Any = HostDevice if machine_name == "cpu" else CudaDevice
    allocate = kind.allocate_pinned
    slabs_left = iter([True])   # of the one layer

    def allocate_pinned(device: Any, size_bytes: int) -> np.ndarray:
        if next(slabs_left, False):
            return allocate(device, size_bytes)
        raise MemoryError

    monkeypatch.setattr(kind, "allocate_pinned", allocate_pinned)
    monkeypatch.setattr(pageable, "available_ram_bytes", lambda: 0)
    monkeypatch.setattr(run, "end_text", lambda: run.write_text("\n"))   # as on a terminal
    ended = run_on(kvs, monkeypatch, make, model, *flags)
    assert (whole.code, ended.code) == (0, 1)
    assert 1 < len(ended.out) < len(whole.out)
    assert ended.out.endswith("\n")
    assert whole.out.startswith(ended.out[:-1])
    assert re.search(
        r"^error: no host memory for .* MiB more of KV history .* of RAM are free\); lower --ctx-size",
        ended.err.splitlines()[-1],
    )


def test_an_error_within_the_text_comes_with_what_there_is(
    kvs: Kvs, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path
) -> None:
    """As JSON: the tokens so far, their text and the error; the line on stderr and the exit code are those of any
    error. Within the prompt it has no text."""
    common = ("run", "-m", tiny_llama, "-p", PROMPT, "-n", 20, "--ignore-eos", *WRITES)
    whole = kvs(*common, "--json").json
    steps, opened = 0, Engine.open

    def failing(engine: Engine, *given: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > 7:
            raise DeviceMemoryError("no host memory for 3 MiB more of KV history; lower --ctx-size")
        return opened(engine, *given)

    monkeypatch.setattr(Engine, "open", failing)
    ended = kvs(*common, "--json")
    assert (ended.code, ended.out.count("\n")) == (1, 1)
    got = json.loads(ended.out)
    error = "no host memory for 3 MiB more of KV history; lower --ctx-size"
    assert ended.err.splitlines()[-1] == f"error: {error}"
    assert (got["error"], got["stop_reason"], got["generated_tokens"]) == (error, "error", 8)
    assert got["token_ids"] == whole["token_ids"][:8]
    assert whole["text"].startswith(got["text"])
    assert got.keys() == {*whole, "error"}
    steps = 0
    assert kvs(*common).err.splitlines()[-1] == f"error: {error}"
    monkeypatch.setattr(Engine, "step", failing)   # no more of them
    ended = kvs(*common, "--json")
    assert ended.err.splitlines()[-1] == f"error: {error}"
    got = json.loads(ended.out)
    assert (got["error"], got["stop_reason"], got["text"], got["model"]) == (error, "error", "", whole["model"])
