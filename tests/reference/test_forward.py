"""The plain NumPy passes are right: they give llama.cpp's numbers on float32 weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.written import FOR_LONG
from tests.reference.forward import forward, forward_mtp
from tests.support.compare import max_difference
from tests.support.float_copy import write_float_copy
from tests.support.llamacpp import Model
from tests.support.tiny_gguf import (
    Experts,
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
from tests.support.tiny_vocab import TRAINING_TEXT

# float64 here against float32 sums there, over up to 30 layers.
FLOAT32_SUMS = 2e-4
TOKENS = 128
# llama.cpp's CPU code looks GELU up in a table of float16 numbers. With the same table here most numbers round alike;
# those next to a boundary, which its sums move over it, are a step of float16 away. Of each layer:
GELU_TABLE = 2e-3

VARIANTS: list[tuple[Callable[..., Path], dict[str, Any]]] = [
    (write_tiny_llama, {}),
    (write_tiny_llama, {"tied": False, "rope_freqs": True, "pre": "llama-bpe"}),
    (write_tiny_llama, {"heads": 3, "kv_heads": 1, "head_dim": 32, "n_layer": 2}),
    (write_tiny_qwen2, {}),
    (write_tiny_qwen2, {"tied": False, "heads": 4, "kv_heads": 2}),
    (write_tiny_qwen3, {}),
    (write_tiny_qwen3, {"tied": False, "heads": 3, "kv_heads": 1, "head_dim": 48}),
    (write_tiny_gemma3, {"window": 20}),
    (write_tiny_gemma3, {"tied": False, "window": 7, "rope_scale": 8.0, "softcap": 3.0, "heads": 3, "kv_heads": 1}),
    (write_tiny_gemma3, {"n_layer": 62, "embd": 32, "ffn": 32, "heads": 2, "kv_heads": 1, "pattern": 6}),
    (write_tiny_gemma4, {"window": 20, "softcap": 0.0}),
    (write_tiny_gemma4, {"more": Gemma4(values=False, shared=2, per_layer=16), "ffn": [64, 32, 96, 64, 128]}),
    (write_tiny_gemma4, {"more": Gemma4(scaled=False, experts=Experts(joined=True)), "softcap": None}),
    (write_tiny_gemma4, {"more": Gemma4(values=False, experts=Experts(count=5, used=1)), "window": 7}),
    (write_tiny_qwen3moe, {}),
    (write_tiny_qwen3moe, {"tied": False, "experts": Experts(count=5, used=1, ffn=48)}),
    (write_tiny_qwen35moe, {}),
    (write_tiny_qwen35moe, {"mtp": False, "experts": Experts(count=9, used=4, shared=32, joined=True)}),
    (write_tiny_qwen35, {"mtp": False}),
    (write_tiny_qwen35, {"tied": False}),
    (write_tiny_qwen35, {"head_dim": 128, "ssm_k_heads": 4, "ssm_v_heads": 8, "interval": 3, "n_layer": 6}),
]


@pytest.mark.parametrize(("write", "options"), VARIANTS)
def test_agrees_with_llamacpp_on_tiny_models(
    write: Callable[..., Path], options: dict[str, Any], tmp_path: Path
) -> None:
    """Log-probabilities of every position and token are within the rounding of float32 sums."""
    path = write(tmp_path / "model.gguf", seed=11, **options)
    with Model(path) as model, model.context() as context:
        ids = model.tokenize(TRAINING_TEXT)[:TOKENS]
        bar = GELU_TABLE * model.n_layer if write in (write_tiny_gemma3, write_tiny_gemma4) else FLOAT32_SUMS
        assert max_difference(forward(path, ids, gelu_table=True).logits, context.decode(ids)) < bar


@pytest.mark.parametrize("weight_type", ["q8_0", "q4_0"])
def test_quantised_weights_are_used_as_they_dequantise(weight_type: str, tmp_path: Path) -> None:
    """On a quantised file the pass gives what llama.cpp gives on the file's float32 copy."""
    path = write_tiny_qwen35(tmp_path / "model.gguf", seed=12, weight_type=weight_type)
    with Model(write_float_copy(path, tmp_path / "copy.gguf")) as model, model.context() as context:
        ids = model.tokenize(TRAINING_TEXT)[:TOKENS]
        assert max_difference(forward(path, ids).logits, context.decode(ids)) < FLOAT32_SUMS


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("write", [write_tiny_qwen35, write_tiny_qwen35moe])
def test_hidden_rows_and_mtp_block_agree(write: Callable[..., Path], tied: bool, tmp_path: Path) -> None:
    """The rows after output_norm are llama.cpp's, and so are the MTP block's logits and rows that follow from them."""
    path = write(tmp_path / "model.gguf", seed=13, tied=tied)
    with (
        Model(path, load_mtp=True) as model,
        model.context(hidden=True) as trunk,
        model.context(mtp=True) as draft,
    ):
        ids = model.tokenize(TRAINING_TEXT)[:TOKENS]
        trunk.decode(ids)
        expected = forward(path, ids)
        assert np.abs(expected.hidden - trunk.hidden_rows).max() < FLOAT32_SUMS
        mtp = forward_mtp(path, ids, expected.hidden)
        before = np.vstack([np.zeros((1, model.n_embd), np.float32), trunk.hidden_rows[:-1]])
        assert max_difference(mtp.logits, draft.decode(ids, before)) < FLOAT32_SUMS
        assert np.abs(mtp.hidden - draft.hidden_rows).max() < FLOAT32_SUMS


@FOR_LONG
def test_agrees_with_llamacpp_on_a_real_model(smollm2_path: Path, smollm2_float_path: Path) -> None:
    """On SmolLM2 the pass over the Q4_1 file gives llama.cpp's numbers on the float32 copy."""
    with Model(smollm2_float_path) as model, model.context(n_threads=1) as context:
        ids = model.tokenize(TRAINING_TEXT)[:64]
        assert max_difference(forward(smollm2_path, ids).logits, context.decode(ids)) < FLOAT32_SUMS
