"""The first command of README.md, which is the first that anybody types, works wherever it is typed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from kvs_cli import open_model
from kvs_core.device.base import Device
from kvs_core.device.host.device import HostDevice
from tests.cli.conftest import Kvs
from tests.engine.machines import MACHINES, machine_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def first_command() -> list[str]:
    """Its last part, which runs the demo model: the words behind ``kvs``."""
    (line,) = (line for line in (ROOT / "README.md").read_text().splitlines() if "benchmarks.needle_prompt" in line)
    words = shlex.split(line.rsplit("&& ", 1)[1])
    assert words[:3] == ["kvs", "run", "prompt.txt"]
    return words[1:]


def test_what_it_prints_is_of_that_command(first_command: list[str]) -> None:
    """The output below it names the arena that it asks for."""
    arena_mib = first_command[first_command.index("--kv-stream-arena-mib") + 1]
    assert f"    KV: adaptive, arena {arena_mib}.0 MiB; " in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("machine_name", ["cpu", *MACHINES])
def test_its_arena_is_large_enough_and_small_enough(
    kvs: Kvs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first_command: list[str], machine_name: str
) -> None:
    """Workspaces on a GPU are larger than on the CPU; and of the text's 626 pages most have to be streamed."""

    def make(settings: object) -> Device:
        return HostDevice(1) if machine_name == "cpu" else machine_of(machine_name).device()

    monkeypatch.setattr(open_model, "open_device", make)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The captain came back.")
    words = [str(prompt) if word == "prompt.txt" else word for word in first_command]
    kv = kvs(*words, "-n", 1, "--json").json["kv"]
    assert kv["pool_pages"] < 626 / 2
