"""A synthetic model's weights arrive on the GPU as those of its file do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvs_core.device.cuda.device import CudaDevice
from kvs_core.device.cuda.matrices import ExpertStack, RecordSection, RowsSection
from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.gguf_writer import write_gguf
from kvs_core.models.synthetic import SHAPES, Mixture, Shape, synthetic_model
from tests.cuda_on_cpu.cpu_runtime import CpuRuntime


def loaded(file: GgufFile) -> list[np.ndarray]:
    """Bytes on the device: of a matrix of two types, a gate and up, a table, and the taps of a convolution."""
    device = CudaDevice(CpuRuntime())
    tensors = file.tensors
    qkv = device.load_matrix([tensors[f"blk.3.attn_{name}.weight"] for name in "kv"])
    gate_up = device.load_matrix([tensors[f"blk.0.ffn_{name}.weight"] for name in ("gate", "up")])
    table = device.load_table(tensors["token_embd.weight"])
    taps = device.load_vector(tensors["blk.0.ssm_conv1d.weight"], transposed=True)
    held = []
    for section in (*qkv.sections, *gate_up.sections, *table.sections):
        held.append(section.records if isinstance(section, RecordSection) else section.rows)
        assert isinstance(section, RecordSection | RowsSection)
    device.close()
    return [*(np.array(buffer).reshape(-1).view(np.uint8) for buffer in (*held, taps))]


def loaded_experts(file: GgufFile) -> list[np.ndarray]:
    """Bytes on the device of a block's experts."""
    device = CudaDevice(CpuRuntime())
    tensors = [file.tensors[f"blk.1.ffn_{name}_exps.weight"] for name in ("gate", "up", "down")]
    held = []
    for stack in (device.load_experts(tensors[:2]), device.load_experts(tensors[2:])):
        assert isinstance(stack, ExpertStack)
        section = stack.parts[0].section
        held.append(np.array(section.records if isinstance(section, RecordSection) else section.rows))
    device.close()
    return held


@pytest.mark.parametrize("mix", ["q4_k", "bf16"])
def test_experts_are_made_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mix: str) -> None:
    """Those of a mixture are the file's, one behind the other."""
    shape = Shape("qwen3moe", "qwen2", 2, 256, 256, 4, 2, 64, 512, 512, 1e6, mixture=Mixture(3, 2, 256))
    monkeypatch.setattr("kvs_core.models.synthetic.SHAPES", {**SHAPES, "small": shape})
    file = synthetic_model(f"small:{mix}")
    path = tmp_path / "small.gguf"
    write_gguf(path, file.metadata, file.tensors)
    made, uploaded = loaded_experts(file), loaded_experts(GgufFile.open(path))
    assert [part.size for part in made] == [sum(file.tensors[f"blk.1.ffn_{name}_exps.weight"].n_bytes for name in names)
                                            for names in (("gate", "up"), ("down",))]
    for one, other in zip(made, uploaded, strict=True):
        assert one.any()
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("mix", ["q8_0", "f16"])
def test_made_or_uploaded_they_are_the_same(tmp_path: Path, mix: str) -> None:
    """Records and plain rows, on the device and in pinned memory."""
    file = synthetic_model(f"tiny:{mix}")
    path = tmp_path / "tiny.gguf"
    write_gguf(path, file.metadata, file.tensors)
    made, uploaded = loaded(file), loaded(GgufFile.open(path))
    assert len(made) == len(uploaded) >= 4
    for one, other in zip(made, uploaded, strict=True):
        assert one.any()
        np.testing.assert_array_equal(one, other)
