"""The oracle answers what it is asked, refuses what would crash it, and its settings really arrive."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.compare import max_difference, mean_kl
from tests.support.llamacpp import ContextParams, LlamaCppError, Model, ModelParams
from tests.support.tiny_gguf import write_tiny_qwen35
from tests.support.tiny_vocab import TRAINING_TEXT

# Another split of a text into batches only reorders float32 sums.
REORDERED = 2e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model(write_tiny_qwen35(tmp_path_factory.mktemp("oracle") / "model.gguf", seed=2)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def ids(model: Model) -> list[int]:
    return model.tokenize(TRAINING_TEXT)[:96]


def logits_of(model: Model, ids: list[int], type_k: str = "f32", type_v: str = "f32", **settings: bool) -> np.ndarray:
    with model.context(type_k=type_k, type_v=type_v, **settings) as context:
        return context.decode(ids)


def test_structs_have_the_sizes_that_the_library_fills() -> None:
    """The default functions write 78 of 80 and 168 of 168 bytes."""
    assert (ctypes.sizeof(ModelParams), ctypes.sizeof(ContextParams)) == (80, 168)


def test_logits_do_not_depend_on_how_tokens_are_fed(model: Model, ids: list[int]) -> None:
    """One batch, small batches, small ubatches and one token at a time agree, at every position."""
    whole = logits_of(model, ids)
    assert whole.shape == (len(ids), model.n_vocab)
    with model.context(n_batch=7) as context:
        assert max_difference(context.decode(ids), whole) < REORDERED
    with model.context(n_ubatch=5) as context:
        assert max_difference(context.decode(ids), whole) < REORDERED
    with model.context() as context:
        assert max_difference(np.vstack([context.decode([token]) for token in ids]), whole) < REORDERED


def test_cleared_context_starts_anew(model: Model, ids: list[int]) -> None:
    """After ``clear`` the same tokens give the same logits, bit for bit."""
    with model.context() as context:
        first = context.decode(ids)
        context.clear()
        assert np.array_equal(context.decode(ids), first)


def test_kv_types_arrive(model: Model, ids: list[int]) -> None:
    """Coarser K/V types are further from float32, in the expected order, and none is the same as another."""
    exact = logits_of(model, ids)
    distances = [
        mean_kl(logits_of(model, ids, type_k, type_v, flash_attn=True), exact)
        for type_k, type_v in (("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0"))
    ]
    assert distances == sorted(distances)
    assert distances[0] < 1e-6 < distances[1] < 1e-4 < distances[2] < 1e-2


def test_rotation_follows_the_environment(model: Model, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """``LLAMA_ATTN_ROT_DISABLE=1`` changes the numbers of a quantised cache and not those of a float one."""
    exact, rotated = logits_of(model, ids), logits_of(model, ids, type_k="q4_0")
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    assert np.array_equal(logits_of(model, ids), exact)
    assert max_difference(logits_of(model, ids, type_k="q4_0"), rotated) > 0.01


def test_a_quantised_v_needs_flash_attention(model: Model) -> None:
    """What llama.cpp refuses becomes an exception that carries its words."""
    with pytest.raises(LlamaCppError, match="requires flash_attn"):
        model.context(type_v="q4_0")


def test_what_would_abort_is_refused_first(model: Model) -> None:
    """Tokens out of range, too many tokens, states of a wrong shape and a closed context are exceptions."""
    with model.context(n_ctx=256) as context:
        assert context.n_ctx == 256
        with pytest.raises(LlamaCppError, match="outside"):
            context.decode([model.n_vocab])
        with pytest.raises(LlamaCppError, match="outside"):
            model.detokenize([-1])
        with pytest.raises(LlamaCppError, match="do not fit"):
            context.decode([0] * 257)
        with pytest.raises(LlamaCppError, match="states are"):
            context.decode([0], np.zeros((1, model.n_embd + 1), np.float32))
    with pytest.raises(LlamaCppError, match="closed"):
        context.decode([0])


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    """A wrong file is an exception with its name."""
    path = tmp_path / "note.gguf"
    path.write_text("not a model")
    with pytest.raises(LlamaCppError, match=r"note\.gguf"):
        Model(path)


def test_smollm2_knows_the_capital_of_france(smollm2_path: Path) -> None:
    """The real model says Paris within a few tokens, in plain text and in a chat."""
    with Model(smollm2_path) as model, model.context(n_threads=1) as context:
        answer = context.greedy(model.tokenize("The capital of France is"), 8)
        assert b"Paris" in model.detokenize(answer)
        context.clear()
        chat = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        assert b"Paris" in model.detokenize(context.greedy(model.tokenize(chat), 12))
