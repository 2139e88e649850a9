"""Experts on a device: which matrices of theirs are held, and that it does not show in the bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvs_core.device.host.device import HostDevice
from kvs_core.formats.gguf import GgufFile, split_experts
from kvs_core.formats.quants import dequantize_rows
from tests.engine.tiny import engine, kv_settings, run, text
from tests.support.tiny_gguf import SHARED, Experts, write_tiny_qwen3moe, write_tiny_qwen35moe

LAYERS = 4


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen35moe(
        tmp_path_factory.mktemp("experts") / "m.gguf", seed=3, n_layer=LAYERS, mtp=False, weight_type="q8_0"
    )


def test_a_tensor_of_experts_is_their_matrices(path: Path) -> None:
    """One behind the other, with names of their own; no byte is copied."""
    tensor = GgufFile.open(path).tensors["blk.1.ffn_down_exps.weight"]
    parts = list(split_experts(tensor))
    assert [part.shape for part in parts] == [(32, 64)] * SHARED.count
    assert parts[2].name == "blk.1.ffn_down_exps.weight[2]"
    assert sum(part.n_bytes for part in parts) == tensor.n_bytes
    assert all(np.shares_memory(part.data[:1], tensor.data[number * parts[0].n_bytes :][:1])
               for number, part in enumerate(parts))
    values = dequantize_rows(tensor, 0, 64 * SHARED.count).reshape(SHARED.count, 64, 32)
    for part, expected in zip(parts, values, strict=True):
        assert np.array_equal(dequantize_rows(part, 0, 64), expected)


def logits(path: Path, limit_bytes: int | None) -> tuple[bytes, int]:
    """Of a prompt and single steps, and the bytes of weights held, on a device that may hold so many."""
    with engine(path, kv=kv_settings(), device=lambda: HostDevice(1, memory_limit_bytes=limit_bytes)) as built:
        vocab = built.spec.n_vocab
        made = run(built, text(vocab, 40), text(vocab, 8, 1)).tobytes()
        return made, built._device.memory_report()["weights"]


def test_experts_without_room_stay_in_the_file(path: Path) -> None:
    """A limit that all other matrices just fit holds those, experts are unpacked as rows choose them, and no bit
    tells; with less room than one expert more takes, that one is not held either."""
    expert = 4 * 64 * SHARED.ffn                       # bytes of one matrix
    experts = 3 * SHARED.count * LAYERS * expert
    everything, all_bytes = logits(path, None)
    nothing, vector_bytes = logits(path, 0)
    dense = all_bytes - vector_bytes - experts
    assert dense > 0
    for room, held in ((0, 0), (expert - 1, 0), (2 * expert, 2 * expert)):
        made, held_bytes = logits(path, dense + room)
        assert held_bytes == vector_bytes + dense + held
        assert made == everything
    assert nothing == everything


def test_experts_of_a_row_matter(tmp_path: Path) -> None:
    """A model in which rows take one expert more is another one: none of those chosen is left out."""
    made = []
    for used in (2, 3):
        path = tmp_path / f"{used}.gguf"
        write_tiny_qwen3moe(path, seed=1, experts=Experts(count=6, used=used))
        made.append(np.frombuffer(logits(path, None)[0], np.float32))
    assert np.abs(made[0] - made[1]).max() > 0.1
