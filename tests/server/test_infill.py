"""``POST /infill``: how its prompt is put together, and models that have no tokens for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.vocabulary import Vocabulary
from tests.server.running import Running, running

FIM = {"fim_pre": 301, "fim_suf": 302, "fim_mid": 303}
FILES = FIM | {"fim_rep": 304, "fim_sep": 305}
BATCH, CONTEXT = 64, 256


def keys(ids: dict[str, int]) -> str:
    """Metadata that gives these roles to tokens of the tiny vocabulary."""
    return ",".join(f"tokenizer.ggml.{name}_token_id=int:{token}" for name, token in ids.items())


@pytest.fixture(scope="module")
def plain(llama_path: Path) -> Iterator[Running]:
    """The three tokens alone, prefix first."""
    with running("-m", llama_path, "-c", CONTEXT, "-b", BATCH, "-ub", BATCH, "--override-kv", keys(FIM)) as server:
        yield server


@pytest.fixture(scope="module")
def filed(llama_path: Path) -> Iterator[Running]:
    """Tokens for other files too, suffix first."""
    with running("-m", llama_path, "-c", CONTEXT, "-b", BATCH, "-ub", BATCH, "--override-kv", keys(FILES),
                 "--spm-infill") as server:
        yield server


def ids(server: Running, text: str) -> list[int]:
    """Tokens of a text alone."""
    tokens: list[int] = server.post("/tokenize", content=text, parse_special=False)["tokens"]
    return tokens


def text(server: Running, *parts: int | str | list[int]) -> str:
    """What the prompt of these parts reads like."""
    tokens = [token for part in parts
              for token in ([part] if isinstance(part, int) else part if isinstance(part, list) else ids(server, part))]
    content: str = server.post("/detokenize", tokens=tokens)["content"]
    return content


def prompt(server: Running, **body: Any) -> str:
    """The prompt of a request, as its reply shows it; a text follows it."""
    reply = server.post("/infill", n_predict=2, ignore_eos=True, temperature=0, **body)
    assert reply["tokens_predicted"] == 2
    shown: str = reply["prompt"]
    return shown


def test_prefix_prompt_suffix_middle(plain: Running) -> None:
    """Each behind its token, BOS in front; the texts of control tokens are text here, tokens stay tokens."""
    [bos] = plain.post("/tokenize", content="", add_special=True)["tokens"]
    assert prompt(plain, input_prefix="the sea ", input_suffix=" river", prompt="is ") == text(
        plain, bos, FIM["fim_pre"], "the sea ", "is ", FIM["fim_suf"], " river", FIM["fim_mid"])
    reply = plain.post("/infill", input_prefix="<|eot_id|>", input_suffix=[7, "x", 9], n_predict=1)
    assert reply["tokens_evaluated"] == 4 + len(ids(plain, "<|eot_id|>")) + 2 + len(ids(plain, "x"))
    streamed = plain.stream("/infill", input_prefix="the sea ", input_suffix=" river", n_predict=3, temperature=0)
    whole = plain.post("/infill", input_prefix="the sea ", input_suffix=" river", n_predict=3, temperature=0)
    assert "".join(event["content"] for event in streamed) == whole["content"]


def test_other_files_come_first(plain: Running, filed: Running) -> None:
    """With their names where there are tokens for them, else with a line between; and the suffix first if asked."""
    body: dict[str, Any] = {"input_prefix": "a", "input_suffix": "b", "input_extra": [
        {"text": "the river", "filename": "one.txt"}, {"text": "the sea"}]}
    [bos] = plain.post("/tokenize", content="", add_special=True)["tokens"]
    line = "\n\n--- snippet ---\n\n"
    assert prompt(plain, **body) == text(
        plain, line, "the river", line, "the sea", bos, FIM["fim_pre"], "a", FIM["fim_suf"], "b", FIM["fim_mid"])
    sep = FILES["fim_sep"]
    assert prompt(filed, **body) == text(
        filed, FILES["fim_rep"], "myproject\n", sep, "one.txt\n", "the river", sep, "tmp\n", "the sea", sep,
        "filename\n", bos, FIM["fim_suf"], "b", FIM["fim_pre"], "a", FIM["fim_mid"])


def test_what_is_too_long_is_cut_where_it_matters_least(plain: Running) -> None:
    """A prefix to its end, a suffix to its beginning, three to one of a batch; other files to what the context has
    left, their beginning first; the prompt always fits."""
    numbers = list(range(60, 200))
    [bos] = plain.post("/tokenize", content="", add_special=True)["tokens"]
    quarter = BATCH // 4
    assert prompt(plain, input_prefix=numbers, input_suffix=numbers, prompt="") == text(
        plain, bos, FIM["fim_pre"], numbers[-3 * quarter :], FIM["fim_suf"], numbers[: quarter - 2], FIM["fim_mid"])
    extra = [{"text": "the sea " * 500}]
    reply = plain.post("/infill", n_predict=1, input_prefix=numbers, input_suffix=numbers, input_extra=extra)
    assert CONTEXT - BATCH < reply["tokens_evaluated"] < CONTEXT


@pytest.mark.parametrize("change", [
    {"input_prefix": None}, {"input_suffix": None}, {"prompt": 3}, {"input_extra": 3}, {"input_extra": [3]},
    {"input_extra": [{"filename": "x"}]}, {"input_extra": [{"text": "x", "filename": 3}]}, {"input_prefix": {"a": 1}},
    {"input_prefix": [99999]}, {"temperature": "hot"},
])  # fmt: skip
def test_what_is_no_infill(plain: Running, change: dict[str, Any]) -> None:
    """A 400 of one line."""
    error = plain.post("/infill", 400, **{"input_prefix": "x", "input_suffix": "y"} | change)["error"]
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]


def test_the_tokens_are_found_by_their_texts(llama_path: Path) -> None:
    """Where a file names none; those of Qwen and of older models alike."""
    metadata: dict[str, Any] = dict(GgufFile.open(llama_path).metadata)
    texts = list(metadata["tokenizer.ggml.tokens"])
    texts[301:304] = ["<|fim_prefix|>", "<fim_suffix>", "<|fim_middle|>"]
    assert Vocabulary.from_metadata(metadata | {"tokenizer.ggml.tokens": texts}, source="test").fim_ids == FIM
    assert not Vocabulary.from_metadata(metadata, source="test").fim_ids


def test_a_vocabulary_without_the_tokens(llama: Running) -> None:
    """501, naming what is missing."""
    error = llama.post("/infill", 501, input_prefix="x", input_suffix="y")["error"]
    assert error["type"] == "not_supported_error"
    assert error["message"] == (
        "Infill is not supported by this model: prefix token is missing. suffix token is missing. "
        "middle token is missing.")
