"""Derived model files: float32 copies say the same, broken copies are refused, and the real model is fetched whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.support.broken_gguf import BREAKAGES, break_gguf
from tests.support.float_copy import write_float_copy
from tests.support.llamacpp import LlamaCppError, Model
from tests.support.tiny_gguf import WEIGHT_TYPES, write_tiny_llama, write_tiny_qwen35

FETCH = Path(__file__).parents[2] / "benchmarks" / "fetch_smollm2.py"


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_float_copy_holds_the_dequantised_numbers(weight_type: str, tmp_path: Path) -> None:
    """Every tensor of the copy is float32 and equals the dequantised original; all metadata but the type is equal."""
    source = write_tiny_qwen35(tmp_path / "source.gguf", seed=1, weight_type=weight_type)
    copy = gguf.GGUFReader(write_float_copy(source, tmp_path / "copy.gguf"))
    original = gguf.GGUFReader(source)
    assert [tensor.name for tensor in copy.tensors] == [tensor.name for tensor in original.tensors]
    for mine, theirs in zip(copy.tensors, original.tensors, strict=True):
        assert mine.tensor_type == gguf.GGMLQuantizationType.F32
        assert np.array_equal(mine.data, gguf.quants.dequantize(theirs.data, theirs.tensor_type))
    without = {"general.quantization_version", "GGUF.tensor_count", "GGUF.kv_count"}
    assert {name: field.contents() for name, field in copy.fields.items() if name not in without} == {
        name: field.contents() for name, field in original.fields.items() if name not in without
    }


def test_float_copy_of_a_float_file_is_the_same_file(tmp_path: Path) -> None:
    """Nothing is lost, added or moved."""
    source = write_tiny_llama(tmp_path / "source.gguf", seed=1, pre="llama-bpe", rope_freqs=True)
    assert write_float_copy(source, tmp_path / "copy.gguf").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("name", BREAKAGES)
@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_qwen35])
def test_every_breakage_is_one(name: str, write: type, tmp_path: Path) -> None:
    """llama.cpp loads the valid file and refuses the broken one."""
    valid = write(tmp_path / "valid.gguf", seed=1)
    Model(valid).close()
    with pytest.raises(LlamaCppError):
        Model(break_gguf(name, valid, tmp_path / "broken.gguf"))


def run_fetch(output: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FETCH), "--output", str(output)]
    env = {**os.environ, "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0", **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_fetch_keeps_a_complete_model(smollm2_path: Path, tmp_path: Path) -> None:
    """With the right file in place nothing is downloaded, and the path and the licence are printed."""
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").symlink_to(smollm2_path.resolve())
    result = run_fetch(tmp_path)
    assert result.returncode == 0
    assert result.stdout.startswith(str(tmp_path))
    assert "Apache-2.0" in result.stdout


def test_fetch_fails_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """Without a network there is one line on stderr, exit code 1, and no half file; a wrong file is not accepted."""
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"not the model")
    result = run_fetch(tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("fetch_smollm2: ")
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
