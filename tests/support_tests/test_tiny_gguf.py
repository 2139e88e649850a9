"""The generated models are valid, small, repeatable, and behave enough like trained ones to be worth testing with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference.forward import GgufModel
from tests.support.compare import log_probs
from tests.support.llamacpp import LlamaCppError, Model
from tests.support.tiny_gguf import (
    LOGIT_STD,
    WEIGHT_TYPES,
    write_tiny_gemma3,
    write_tiny_gemma4,
    write_tiny_llama,
    write_tiny_qwen2,
    write_tiny_qwen3,
    write_tiny_qwen3moe,
    write_tiny_qwen35,
    write_tiny_qwen35moe,
)
from tests.support.tiny_vocab import TRAINING_TEXT, byte_alphabet, tokens

WRITERS = [
    write_tiny_gemma3, write_tiny_llama, write_tiny_qwen2, write_tiny_qwen3, write_tiny_qwen3moe, write_tiny_qwen35,
    write_tiny_qwen35moe,
]
MAX_BYTES = 2 << 20
PLAIN_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)


@pytest.fixture(
    scope="module",
    params=["gemma3 with BOS", "gemma4 with BOS", "llama", "llama with BOS", "qwen2", "qwen3", "qwen3moe", "qwen35",
            "qwen35moe"],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    match request.param:
        case "gemma3 with BOS":
            write_tiny_gemma3(path, seed=1)
        case "gemma4 with BOS":
            write_tiny_gemma4(path, seed=1)
        case "qwen2":
            write_tiny_qwen2(path, seed=1)
        case "qwen3":
            write_tiny_qwen3(path, seed=1)
        case "qwen3moe":
            write_tiny_qwen3moe(path, seed=1)
        case "qwen35moe":
            write_tiny_qwen35moe(path, seed=1)
        case "qwen35":
            write_tiny_qwen35(path, seed=1)
        case name:
            write_tiny_llama(path, seed=1, pre="llama-bpe" if name == "llama with BOS" else "smollm")
    with Model(path) as loaded:
        yield loaded


@pytest.mark.parametrize("write", WRITERS)
def test_same_arguments_give_the_same_file(write: Callable[..., Path], tmp_path: Path) -> None:
    """Equal seeds give equal bytes, another seed other ones, and the file stays small."""
    first, again, other = (write(tmp_path / f"{i}.gguf", seed=seed).read_bytes() for i, seed in enumerate((3, 3, 4)))
    assert first == again
    assert first != other
    assert len(first) < MAX_BYTES


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize("write", WRITERS)
def test_llamacpp_runs_every_variant(write: Callable[..., Path], weight_type: str, tied: bool, tmp_path: Path) -> None:
    """With every weight type, tied or not, llama.cpp loads the file and its logits have the intended spread."""
    path = write(tmp_path / "model.gguf", seed=5, weight_type=weight_type, tied=tied)
    assert path.stat().st_size < MAX_BYTES
    with Model(path) as model, model.context() as context:
        logits = context.decode(model.tokenize(TRAINING_TEXT)[:64])
    assert 0.7 * LOGIT_STD < logits.std(axis=1).mean() < 1.3 * LOGIT_STD
    log_p = log_probs(logits)
    entropy = -(np.exp(log_p) * log_p).sum(axis=1).mean()
    assert 2.0 < entropy < 5.0


def test_rope_divisors_change_the_result(tmp_path: Path) -> None:
    """A file with ``rope_freqs`` is one that a loader must not read without them."""
    logits = []
    for rope_freqs in (False, True):
        path = write_tiny_llama(tmp_path / f"{rope_freqs}.gguf", seed=5, rope_freqs=rope_freqs)
        weights = GgufModel(path)
        assert weights.has("rope_freqs.weight") == rope_freqs
        with Model(path) as model, model.context() as context:
            logits.append(context.decode(model.tokenize(TRAINING_TEXT)[:64]))
    assert np.abs(logits[0] - logits[1]).max() > 0.1


@pytest.mark.parametrize("mtp", [True, False])
def test_mtp_block_is_there_when_asked_for(mtp: bool, tmp_path: Path) -> None:
    """llama.cpp counts one MTP block behind the eight trunk layers, or none, and makes its context only with one."""
    with Model(write_tiny_qwen35(tmp_path / "model.gguf", seed=1, mtp=mtp), load_mtp=mtp) as model:
        assert (model.n_layer, model.n_layer_mtp) == (8, int(mtp))
        if mtp:
            with model.context(mtp=True) as context:
                assert context.decode([1, 2], np.zeros((2, model.n_embd), np.float32)).shape == (2, model.n_vocab)
        else:
            with pytest.raises(LlamaCppError):
                model.context(mtp=True)


def test_greedy_text_is_varied(model: Model) -> None:
    """128 likeliest tokens in a row come without an end token and use at least 30 different ones."""
    with model.context() as context:
        generated = context.greedy(model.tokenize("The river"), 128)
    assert len(generated) == 128
    assert len(set(generated)) >= 30


def test_early_tokens_matter_later(model: Model) -> None:
    """Without its first half, a text's second half gets other logits: a lost page cannot go unnoticed."""
    ids = model.tokenize(TRAINING_TEXT)[:512]
    half = len(ids) // 2
    with model.context() as context:
        whole = context.decode(ids)[half:]
        context.clear()
        alone = context.decode(ids[half:])
    assert np.abs(log_probs(whole[-64:]) - log_probs(alone[-64:])).mean() > 0.02


def test_recurrent_state_decays_as_in_real_models(tmp_path: Path) -> None:
    """One token keeps 0.6 to 0.999 of the state, before its own contribution to the rate."""
    weights = GgufModel(write_tiny_qwen35(tmp_path / "model.gguf", seed=1))
    for layer in (0, 1, 2, 4, 5, 6):
        rate = np.log1p(np.exp(weights.tensor(f"blk.{layer}.ssm_dt.bias"))) * -weights.tensor(f"blk.{layer}.ssm_a")
        assert (np.exp(-rate) > 0.6).all()
        assert (np.exp(-rate) < 0.999).all()


def test_every_byte_has_a_token() -> None:
    """The first 256 tokens are the bytes in order, each with a printable character of its own."""
    assert len(set(byte_alphabet())) == 256
    assert all(character.isprintable() and not character.isspace() for character in byte_alphabet())
    assert tokens("qwen35")[:256] == list(byte_alphabet())
    assert tokens("qwen35")[ord("a")] == "a"


@given(text=PLAIN_TEXT)
def test_any_text_survives_the_tokenizer(model: Model, text: str) -> None:
    """llama.cpp gets back exactly the bytes it tokenised, special tokens in the text or not."""
    ids = model.tokenize(f"<|im_start|>{text}", add_special=False)
    assert model.detokenize(ids) == f"<|im_start|>{text}".encode()


def test_bos_is_added_only_where_the_vocabulary_wants_it(model: Model, request: pytest.FixtureRequest) -> None:
    """``llama-bpe``, ``gemma3`` and ``gemma4`` files start a text with BOS, the others do not."""
    added = len(model.tokenize("river")) - len(model.tokenize("river", add_special=False))
    assert added == int(model.detokenize(model.tokenize("river")).startswith((b"<|begin_of_text|>", b"<bos>")))
    assert added == int("BOS" in request.node.name)


def test_merges_shorten_the_text(model: Model) -> None:
    """The trained merges are used: known text takes fewer tokens than bytes."""
    assert len(model.tokenize(TRAINING_TEXT)) < 0.8 * len(TRAINING_TEXT.encode())
