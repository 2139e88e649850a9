"""A synthetic model's weights arrive on the GPU as those of its file do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvs_core.device.cuda.device import CudaDevice
from kvs_core.device.cuda.weights import RecordSection, RowsSection
from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.gguf_writer import write_gguf
from kvs_core.models.synthetic import synthetic_model
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
