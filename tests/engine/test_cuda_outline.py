"""What the outline of a model says its steps will launch is what the loaded model's steps launch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from kvs_core.device.cuda.device import CudaDevice
from kvs_core.device.cuda.kernel import Kernel
from kvs_core.engine.budget import Drafting
from kvs_core.models.registry import ARCHS
from kvs_core.units import Progress
from tests.cuda_on_cpu.cpu_runtime import CpuRuntime
from tests.engine.tiny import engine, kv_settings
from tests.support.tiny_gguf import ROUTED, Gemma4, write_tiny_gemma4

MIXTURE = "gemma4 with experts"


@pytest.mark.parametrize("model", [*sorted(ARCHS), MIXTURE])
def test_the_outline_names_the_kernels_of_the_model(
    model: str, tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them and no other, besides those that repack weights; and nothing is held for it."""
    runtime = CpuRuntime()
    begun: list[Kernel] = []
    prepared: list[Kernel] = []
    allocated: list[int] = []

    def begin(kernels: Iterable[Kernel]) -> None:
        assert not begun
        begun.extend(kernels)
        allocated.append(runtime.allocations)

    def prepare(kernels: Iterable[Kernel], progress: Progress | None = None) -> None:
        prepared.extend(kernels)

    monkeypatch.setattr(runtime.launcher, "begin", begin)
    monkeypatch.setattr(runtime.launcher, "prepare", prepare)
    before = runtime.allocations
    device = CudaDevice(runtime)
    made = runtime.allocations - before
    nextn = model.startswith("qwen35")
    if model == MIXTURE:
        path = write_tiny_gemma4(tmp_path / "model.gguf", seed=2, more=Gemma4(experts=ROUTED))
    else:
        path = tiny_models[model]
    with engine(path, kv=kv_settings("f16", "f16"), device=lambda: device, drafting=Drafting(nextn=nextn)):
        repacking = [kernel for kernel in begun if kernel.source == "repack.cu"]
        assert begun == [*repacking, *prepared]
        assert prepared
        assert allocated == [before + made]
