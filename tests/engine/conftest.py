"""Tiny models, written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_gguf import write_tiny_llama, write_tiny_qwen35


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
