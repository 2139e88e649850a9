"""Tiny models, written once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_gguf import (
    Gemma4,
    write_tiny_gemma3,
    write_tiny_gemma4,
    write_tiny_llama,
    write_tiny_qwen2,
    write_tiny_qwen3,
    write_tiny_qwen3moe,
    write_tiny_qwen35,
    write_tiny_qwen35moe,
)


@pytest.fixture(scope="session")
def tiny_qwen35(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 recurrent and 2 attention layers, one MTP block."""
    path = tmp_path_factory.mktemp("tiny") / "qwen35.gguf"
    write_tiny_qwen35(path, seed=1)
    return path


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 attention layers."""
    path = tmp_path_factory.mktemp("tiny") / "llama.gguf"
    write_tiny_llama(path, seed=2)
    return path


@pytest.fixture(scope="session")
def tiny_models(tiny_qwen35: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By arch, every one that there is in ``models.registry``."""
    folder = tmp_path_factory.mktemp("tiny")
    return {
        "qwen35": tiny_qwen35,
        "llama": tiny_llama,
        "qwen2": write_tiny_qwen2(folder / "qwen2.gguf", seed=2),
        "qwen3": write_tiny_qwen3(folder / "qwen3.gguf", seed=2),
        "gemma3": write_tiny_gemma3(folder / "gemma3.gguf", seed=2, n_layer=6, pattern=[True, False, False] * 2),
        # Of each kind three layers, the last two of them without keys and values of their own.
        "gemma4": write_tiny_gemma4(
            folder / "gemma4.gguf", seed=2, pattern=[True, False, True, False, True, False],
            more=Gemma4(shared=2, per_layer=16, values=False),
        ),
        "qwen3moe": write_tiny_qwen3moe(folder / "qwen3moe.gguf", seed=2),
        "qwen35moe": write_tiny_qwen35moe(folder / "qwen35moe.gguf", seed=2),
    }


@pytest.fixture(scope="session")
def wide_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By arch: two attention layers, with two recurrent ones and an MTP block, with experts too, with one whose window
    is smaller than the widest step, or alone. Pages of float32 are large beside what a tile of 8 rows needs of them,
    so that a few pages make room for wide steps."""
    folder = tmp_path_factory.mktemp("wide")
    small: dict[str, Any] = {"embd": 32, "heads": 2, "kv_heads": 2, "head_dim": 64, "ffn": 32}
    hybrid: dict[str, Any] = {"n_layer": 4, "interval": 2, "ssm_state": 32, "ssm_k_heads": 1, "ssm_v_heads": 2, **small}
    return {
        "qwen35": write_tiny_qwen35(folder / "qwen35.gguf", seed=1, **hybrid),
        "qwen35moe": write_tiny_qwen35moe(folder / "qwen35moe.gguf", seed=1, **hybrid),
        "llama": write_tiny_llama(folder / "llama.gguf", seed=2, n_layer=2, **small),
        "gemma3": write_tiny_gemma3(
            folder / "gemma3.gguf", seed=2, n_layer=3, window=40, pattern=[True, False, False], **small
        ),
        "gemma4": write_tiny_gemma4(
            folder / "gemma4.gguf", seed=2, window=40, pattern=[False, True, False, True, False], embd=32,
            heads=2, kv_heads=(1, 2), head_dims=(32, 64), ffn=32, more=Gemma4(shared=2, per_layer=16),
        ),
    }
