"""The product's promises on the path of older GPUs: those of ``test_cuda_engine``, with kernels of sm_80."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine import test_cuda_engine
from tests.engine.machines import MACHINES, machine_of, write_models


@pytest.mark.parametrize("name", MACHINES)
def test_a_whole_engine(name: str, tmp_path: Path) -> None:
    """Bits depend neither on residency nor on how many rows a step has."""
    machine = machine_of(name, "sm_80")
    models = write_models(tmp_path, machine)
    runtime = machine.runtime()
    assert not machine.on_gpu or runtime.name.endswith(", kernels of sm_80")   # so it is told, and in --json
    assert (runtime.launcher.arch, runtime.launcher.shared_bytes) == (80, 99 << 10)
    runtime.close()
    test_cuda_engine.test_bits_do_not_depend_on_residency(machine, models, "qwen35", ("f32", "q5_1"))
    test_cuda_engine.test_rows_do_not_depend_on_their_number(machine, models, "llama", (3, 8))
