"""The machines that tests of the whole CUDA engine run on: the CPU stand-in always, a GPU where there is one.

Environment:
    KVS_TEST_GPU_ONLY    leave the stand-in out, where time on a GPU counts
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvs_core.demo import DEMO_MODEL
from kvs_core.device.cuda.device import CudaDevice
from kvs_core.device.cuda.modules import CudaFound, find_cuda
from kvs_core.device.cuda.runtime import Runtime
from kvs_core.engine.engine import Engine
from kvs_core.errors import DeviceMemoryError
from kvs_core.memory.phases import Phase
from tests.cuda_on_cpu.cpu_runtime import CpuRuntime
from tests.cuda_on_cpu.path import launcher_on, on_path
from tests.engine.tiny import text
from tests.support.tiny_gguf import (
    Gemma4,
    write_tiny_gemma3,
    write_tiny_gemma4,
    write_tiny_llama,
    write_tiny_qwen2,
    write_tiny_qwen3,
    write_tiny_qwen35,
)

MACHINES = ["cuda"] if os.environ.get("KVS_TEST_GPU_ONLY") else ["cuda_on_cpu", "cuda"]


class Watched:
    """A runtime that counts what it gives, and can be told to give no more.

    allocations, pinnings    of device memory and of pinned memory
    refuse                   part of a purpose ("the arena") for which there is no device memory
    pinned                   whether there is pinned memory
    fail_at, fail_pinned_at  the number, counted from 1, of the one that fails
    """

    def __init__(self, inner: Runtime, on_gpu: bool) -> None:
        self._inner = inner
        self._on_gpu = on_gpu
        self.allocations = self.pinnings = 0
        self.refuse: str | None = None
        self.pinned = True
        self.fail_at = self.fail_pinned_at = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def allocate(self, size_bytes: int, purpose: str) -> Any:
        self.allocations += 1
        if (self.refuse is not None and self.refuse in purpose) or self.allocations == self.fail_at:
            size_bytes = self._too_much(purpose)
        return self._inner.allocate(size_bytes, purpose)

    def allocate_pinned(self, size_bytes: int, purpose: str) -> np.ndarray:
        self.pinnings += 1
        if not self.pinned or self.pinnings == self.fail_pinned_at:
            size_bytes = self._too_much(f"pinned memory for {purpose}")
        return self._inner.allocate_pinned(size_bytes, purpose)

    def _too_much(self, purpose: str) -> int:
        """Bytes that no GPU has, for its own refusal; the stand-in has none of its own."""
        if not self._on_gpu:
            raise DeviceMemoryError(f"no {purpose} here; there is no more")
        return 1 << 50


@dataclass(frozen=True)
class Machine:
    """Makes CUDA devices.

    on_gpu  a real one, where larger cases cost nothing
    path    of the kernels, as KVS_CUDA_PATH says it; "": by the device's capability, or as it is told to the tests
    ahead   on the stand-in kernels run ahead as far as they may
    """

    on_gpu: bool
    path: str = ""
    ahead: bool = False

    def runtime(self) -> Watched:
        """A runtime of its own."""
        if not self.on_gpu:
            return Watched(CpuRuntime(ahead=self.ahead, **launcher_on(self.path)), False)
        from kvs_core.device.cuda.cupy_runtime import CupyRuntime

        with on_path(self.path) if self.path else nullcontext():
            return Watched(CupyRuntime(0), True)

    def device(self, runtime: Watched | None = None) -> CudaDevice:
        """A device, by default on a runtime of its own."""
        own: Any = runtime or self.runtime()
        return CudaDevice(own)

    def choose(self, small: Any, large: Any) -> Any:
        """A case for the stand-in or for a GPU."""
        return large if self.on_gpu else small


def machine_of(name: str, path: str = "") -> Machine:
    """The machine of that name on a path of the kernels; skips the test if it is not there."""
    if name == "cuda":
        found = find_cuda()
        if not isinstance(found, CudaFound):
            pytest.skip(found)
    return Machine(name == "cuda", path)


def write_models(folder: Path, machine: Machine) -> dict[str, Path]:
    """Tiny models by arch: two layers that see everything on the stand-in, as everywhere else on a GPU, and there the
    demo model too."""
    archs = ("gemma3", "gemma4", "llama", "qwen2", "qwen3", "qwen35")
    gemma3, gemma4, llama, qwen2, qwen3, qwen35 = (folder / f"{arch}.gguf" for arch in archs)
    if machine.on_gpu:
        return {
            "gemma3": write_tiny_gemma3(
                gemma3, seed=2, weight_type="q8_0", n_layer=6, pattern=[True, False, False] * 2
            ),
            # Heads of the published models.
            "gemma4": write_tiny_gemma4(
                gemma4, seed=2, weight_type="q8_0", pattern=[True, False, True, False, True, False],
                kv_heads=(4, 1), head_dims=(256, 512), more=Gemma4(shared=2, per_layer=64, values=False),
            ),
            "llama": write_tiny_llama(llama, seed=2, weight_type="q8_0"),
            "qwen2": write_tiny_qwen2(qwen2, seed=2, weight_type="q8_0"),
            "qwen3": write_tiny_qwen3(qwen3, seed=2, weight_type="q8_0"),
            "qwen35": write_tiny_qwen35(qwen35, seed=1),
            "demo": DEMO_MODEL,
        }
    small: dict[str, Any] = {"embd": 32, "heads": 2, "kv_heads": 1, "head_dim": 64, "ffn": 32}
    write_tiny_gemma3(
        gemma3, seed=2, n_layer=3, weight_type="q8_0", window=40, pattern=[True, False, False], **small
    )
    write_tiny_gemma4(
        gemma4, seed=2, weight_type="q8_0", window=40, pattern=[False, True, False, False], embd=32, heads=2,
        kv_heads=(1, 1), head_dims=(32, 64), ffn=32, more=Gemma4(shared=1, per_layer=32, values=False),
    )
    write_tiny_llama(llama, seed=2, n_layer=2, weight_type="q8_0", **small)
    write_tiny_qwen2(qwen2, seed=2, n_layer=2, weight_type="q8_0", embd=64, heads=2, kv_heads=1, ffn=32)
    write_tiny_qwen3(qwen3, seed=2, n_layer=2, weight_type="q8_0", **small)
    write_tiny_qwen35(
        qwen35, seed=1, n_layer=4, interval=2, mtp=False, ssm_state=32, ssm_k_heads=1, ssm_v_heads=2, **small
    )
    return {"gemma3": gemma3, "gemma4": gemma4, "llama": llama, "qwen2": qwen2, "qwen3": qwen3, "qwen35": qwen35}


Move = tuple[Phase, int, int]
"""A step of a script: its phase, its rows, and how many of them are kept."""


def play(built: Engine, script: Sequence[Move], *, rows: int = 1) -> list[bytes]:
    """Run steps of made-up tokens; the logits of the last ``rows`` rows of each, or of as many as it has."""
    logits = []
    for number, (phase, width, keep) in enumerate(script):
        with built.step(text(built.spec.n_vocab, width, number), phase) as step:
            logits.append(step.logits(max(0, width - rows)).tobytes())
            step.settle(keep)
    return logits
