"""Tokens are llama.cpp's tokens, text comes back as it was, and a bad vocabulary is refused in one line."""

from __future__ import annotations

import logging
import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import TokenType
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.errors import SettingsError, TokenizerError
from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.pretokenizers import PRE_TOKENIZERS
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.formats.vocabulary import _EOG_TEXTS, _FIM_TEXTS
from tests.formats.llamacpp_vocab import LlamaVocab, Metadata, byte_vocab, gemma4_vocab, spm_vocab, write_vocab

RULES = {rule: name for name, rule in PRE_TOKENIZERS.items()}

# What pre-tokenizers tell apart: cases, digits, signs, spaces and line ends of many kinds, marks, scripts, emoji.
PARTS = [
    *"aAbB1 9!?'\n\t\r.,_$|`^+-/(", "  ", "   ", "\r\n", "'s", "'LL", "123", "the", " The", "é", "e\u0301", "\u0301",
    "你", "の", "カ", "한", "ㄱ", "ह", "ि", "١", "Ⅷ", "½", "🙂", "👍🏽", "…", "。", "—", "“", "ʰ", "ª", "ǅ", "ⅷ",
    "𝒳", "\u00a0", "\u3000", "\x85", "\u200b", "\u2028", "\x00", "\ufeff", "▁",
]  # fmt: skip
# Python 3.11 knows Unicode 14; what came later may be a letter to one side alone.
CHARS = st.characters(codec="utf-8").filter(lambda char: unicodedata.category(char) != "Cn")
TEXTS = st.lists(st.sampled_from(PARTS) | CHARS, max_size=24).map("".join)
SPECIALS = {
    "<|im_end|>": TokenType.CONTROL,
    "<|im_start|>": TokenType.CONTROL,
    "<|end": TokenType.CONTROL,
    "nd|><": TokenType.USER_DEFINED,
    "<think>": TokenType.USER_DEFINED,
    "<unk>": TokenType.UNKNOWN,
    "<extra>": TokenType.UNUSED,
}


def mixed(*parts: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(parts)).map("".join)


def load(metadata: Any) -> Tokenizer:
    return Tokenizer.from_metadata(metadata, source="test.gguf")


class Pair:
    """A vocabulary in both engines."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self.prefix = " " if metadata.get("tokenizer.ggml.add_space_prefix") else ""
        self.ours = load(metadata)
        self.theirs = LlamaVocab(write_vocab(path, metadata))

    def check(self, text: str) -> None:
        for special in (False, True):
            mine = self.ours.encode(text, add_special=special, parse_special=special)
            assert mine == self.theirs.encode(text, add_special=special, parse_special=special), ascii(text)


def check_pieces(ours: Tokenizer, theirs: LlamaVocab) -> None:
    assert ours.n_vocab == theirs.n_vocab
    for i in range(ours.n_vocab):
        for special in (False, True):
            expected = theirs.token_bytes(i, special=special)
            if b"[UNK_BYTE_" in expected:   # what llama.cpp makes of a plain token that is not in byte characters
                expected = ours.token_text(i).encode()
            assert ours.token_bytes(i, special=special) == expected, ours.token_text(i)
    assert ours.eog_ids == theirs.eog_ids
    assert (ours.add_bos, ours.add_eos) == (theirs.add_bos, theirs.add_eos)


@pytest.fixture(scope="module", params=sorted(RULES.values()))
def byte_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("vocab") / "bpe.gguf", byte_vocab(request.param, SPECIALS))
    with pair.theirs:
        yield pair


@pytest.fixture(scope="module")
def qwen_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("vocab") / "qwen35.gguf", byte_vocab("qwen35", SPECIALS))
    with pair.theirs:
        yield pair


@pytest.fixture(scope="module", params=[True, False])
def spm_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    metadata = spm_vocab(add_space_prefix=request.param, add_eos_token=not request.param)
    pair = Pair(tmp_path_factory.mktemp("vocab") / "spm.gguf", metadata)
    with pair.theirs:
        yield pair


@pytest.fixture(scope="module")
def gemma_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("vocab") / "gemma4.gguf", gemma4_vocab(add_bos_token=False))
    with pair.theirs:
        yield pair


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[tuple[Tokenizer, LlamaVocab]]:
    with LlamaVocab(smollm2_path) as theirs:
        yield load(GgufFile.open(smollm2_path).metadata), theirs


@given(text=TEXTS)
@settings(max_examples=30)
def test_byte_bpe_ids_are_those_of_llamacpp(byte_pair: Pair, text: str) -> None:
    """Under every rule of cutting, any text has the ids that llama.cpp gives it."""
    byte_pair.check(text)


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_each_pre_name_means_its_rule(name: str, tmp_path: Path) -> None:
    """Every accepted name cuts as llama.cpp does for that name, and BOS comes first where it does there."""
    pair = Pair(tmp_path / "bpe.gguf", byte_vocab(name))
    with pair.theirs:
        assert pair.ours.add_bos == pair.theirs.add_bos
        shuffled = random.Random(name)
        for _ in range(12):
            pair.check("".join(shuffled.choices(PARTS, k=60)))


@given(text=mixed(*"abc é\nx▁<", "aa", "  ", "<s>", "</s>", "<|u|>", "<|im_end|>", "你"))
def test_spm_ids_are_those_of_llamacpp(spm_pair: Pair, text: str) -> None:
    """SPM ids agree, also with equal scores, unknown characters, special tokens, with and without a space in front."""
    spm_pair.check(text)


@given(text=mixed(*"abc é\nx▁<", "\n\n\n", "  ", "<bos>", "<turn|>", "<u>", "你"))
def test_gemma4_ids_are_those_of_llamacpp(gemma_pair: Pair, text: str) -> None:
    """So do those of SPM-style BPE, runs of newlines included; BOS is added whatever the file says."""
    gemma_pair.check(text)


@given(text=mixed(*SPECIALS, "<|", "|>", "<", "x", " "))
def test_special_tokens_are_cut_out_as_in_llamacpp(qwen_pair: Pair, text: str) -> None:
    """Special tokens, also such as overlap, are found where llama.cpp finds them, in both ways of parsing."""
    qwen_pair.check(text)


@given(text=TEXTS | mixed("<|im_end|>", "<|im_start|>", "user\n", " the", "\x01"))
def test_smollm2_ids_are_those_of_llamacpp(smollm2: tuple[Tokenizer, LlamaVocab], text: str) -> None:
    """A real model's ids agree, though its vocabulary lacks some bytes."""
    ours, theirs = smollm2
    for parse in (False, True):
        assert ours.encode(text, parse_special=parse) == theirs.encode(text, parse_special=parse), ascii(text)


def test_smollm2_pieces_and_ends(smollm2: tuple[Tokenizer, LlamaVocab]) -> None:
    """Every token of a real model prints what llama.cpp prints, and the same ones end a generation."""
    check_pieces(*smollm2)
    assert smollm2[0].eog_ids == {0, 2, 4}


def test_pieces_of_every_kind_of_token(qwen_pair: Pair, spm_pair: Pair, gemma_pair: Pair) -> None:
    """Control tokens print nothing unless asked, bytes themselves, and so on through all types and models."""
    for pair in (qwen_pair, spm_pair, gemma_pair):
        check_pieces(pair.ours, pair.theirs)


FIM_TEXTS = {text: key for key, (_, texts) in _FIM_TEXTS.items() for text in texts}
ROLE_TEXTS = sorted({*_EOG_TEXTS, *FIM_TEXTS, "<|channel|>", "<|message|>"})


@given(
    texts=st.lists(st.sampled_from(ROLE_TEXTS), unique=True, max_size=9),
    kinds=st.lists(st.sampled_from([TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED]), min_size=9),
    named=st.sets(st.sampled_from(["eom", "fim_pre", "fim_pad", "fim_rep", "fim_sep", "prefix"])),
)
@settings(max_examples=30)
def test_roles_are_found_by_text_as_in_llamacpp(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], kinds: list[int], named: set[str]
) -> None:
    """Which tokens end a generation and which are control tokens agree for any mixture of keys and known texts."""
    # Two candidates for one role: llama.cpp takes either, by its hash table's order.
    taken: set[str] = set()
    special = {}
    for text, kind in zip(texts, kinds, strict=False):
        if FIM_TEXTS.get(text, text) not in taken:
            special[text] = kind
            taken.add(FIM_TEXTS.get(text, text))
    keys = {f"{name}_token_id": 100 + i for i, name in enumerate(sorted(named | {"eot"}))}
    metadata = byte_vocab("gpt-2", special, joined="a", **keys)
    pair = Pair(tmp_path_factory.mktemp("roles") / "v.gguf", metadata)
    with pair.theirs:
        check_pieces(pair.ours, pair.theirs)
        assert pair.ours.eot_id == pair.theirs.eot_id


def test_end_of_turn_is_found_by_text() -> None:
    """Without a key, the likeliest text names the end of a turn; where there is none, so is no id."""
    both = byte_vocab("qwen2", {"<|endoftext|>": TokenType.CONTROL, "<|im_end|>": TokenType.CONTROL})
    tokenizer = load(both)
    assert tokenizer.eot_id is not None
    assert tokenizer.token_text(tokenizer.eot_id) == "<|im_end|>"
    assert load(byte_vocab("qwen2")).eot_id is None


@given(text=st.text(st.characters(codec="utf-8")) | mixed(*SPECIALS, "x"))
@settings(max_examples=20)
def test_byte_bpe_text_comes_back(byte_pair: Pair, text: str) -> None:
    """Any text, special tokens' texts included, decodes to the same bytes when it is encoded as plain text."""
    ids = byte_pair.ours.encode(text, add_special=False, parse_special=False)
    assert not any(byte_pair.theirs.is_control(i) for i in ids)
    assert byte_pair.ours.decode_bytes(ids) == text.encode()


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="▁")))
def test_spm_text_comes_back_after_its_space(spm_pair: Pair, gemma_pair: Pair, text: str) -> None:
    """SPM text comes back with one space in front, where the vocabulary puts it there; gemma4's as it was."""
    ids = spm_pair.ours.encode(text, add_special=False, parse_special=False)
    assert spm_pair.ours.decode_bytes(ids) == ((spm_pair.prefix if text else "") + text).encode()
    ids = gemma_pair.ours.encode(text, add_special=False, parse_special=False)
    assert gemma_pair.ours.decode_bytes(ids) == text.encode()


def test_bos_and_eos_around_nothing() -> None:
    """An empty prompt is BOS and EOS where the model wants them, else nothing; without an id nothing is added."""
    assert load(byte_vocab("llama-bpe", add_eos_token=True)).encode("") == [0, 1]
    assert load(byte_vocab("qwen2")).encode("") == []
    nameless = {key: value for key, value in byte_vocab("llama-bpe").items() if "bos" not in key}
    assert load(nameless).encode("") == []


def test_lone_surrogates_become_replacement_characters() -> None:
    """Half a surrogate pair, which JSON can carry, is no reason to fail; a whole pair is its character."""
    tokenizer = load(byte_vocab("qwen2"))
    assert tokenizer.decode(tokenizer.encode("a\ud83d")) == "a\ufffd"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude42")) == "🙂"


def test_invalid_bytes_decode_to_replacement_characters() -> None:
    """Tokens that join to no UTF-8 decode all the same."""
    assert load(byte_vocab("qwen2")).decode([0xC3, 0x28]) == "\ufffd("


def test_ids_outside_the_vocabulary_are_refused() -> None:
    """An id that is no token is the caller's mistake, said with both numbers."""
    tokenizer = load(byte_vocab("qwen2"))
    for bad in (-1, tokenizer.n_vocab):
        with pytest.raises(SettingsError, match=rf"{bad} is outside .* 0 to {tokenizer.n_vocab - 1}"):
            tokenizer.decode([bad])


def test_suppressed_ids_are_those_in_the_vocabulary() -> None:
    """Tokens that must not be generated are read; ids outside the vocabulary mean nothing."""
    metadata = byte_vocab("qwen2", suppress_tokens=np.array([3, 9, 1 << 30, -1], np.int32))
    assert load(metadata).suppress_ids == (3, 9)


def test_a_missing_pre_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Old files without the name get the default rule, with a warning."""
    with caplog.at_level(logging.WARNING):
        tokenizer = load(byte_vocab(None))
    assert "tokenizer.ggml.pre is missing" in caplog.text
    assert tokenizer.encode("a1 b") == load(byte_vocab("default")).encode("a1 b")


def test_lost_bytes_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """A vocabulary without some bytes loses them, keeps their neighbours apart, and says which they are."""
    metadata = byte_vocab("gpt-2")
    metadata["tokenizer.ggml.tokens"][0x62] = "[b]"  # no token for b
    metadata["tokenizer.ggml.merges"] = [m for m in metadata["tokenizer.ggml.merges"] if "b" not in m]
    with caplog.at_level(logging.DEBUG):
        tokenizer = load(metadata)
    assert "bytes 62 have no token" in caplog.text
    assert tokenizer.encode("aba") == [0x61, 0x61]
    assert tokenizer.encode("aa") != [0x61, 0x61]


def changed(metadata: Metadata, **keys: Any) -> Metadata:
    """``metadata`` with other values; None takes a key away."""
    merged = metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return {key: value for key, value in merged.items() if value is not None}


BYTE = byte_vocab("qwen2")
SPM = spm_vocab()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "tokenizer.ggml.model is missing; gpt2 .* llama .* and gemma4 work"),
        (changed(BYTE, model="bert"), "model is 'bert', which cannot be used; gpt2"),
        (changed(BYTE, model=3), "model is int; a string is expected"),
        (changed(BYTE, pre="no-such"), "pre is 'no-such', for which there are no rules; these work: a.x-4.0, "),
        (changed(BYTE, tokens=None), "tokens is missing"),
        (changed(BYTE, tokens=[]), "tokens is empty"),
        (changed(BYTE, tokens=np.arange(3)), "tokens is not an array of strings"),
        (changed(BYTE, tokens=["a", b"b"]), "tokens is not an array of strings"),
        (changed(BYTE, tokens=["a", "b", "a"]), "tokens holds 'a' twice: ids 0 and 2"),
        (changed(BYTE, tokens=["a" * 70_000]), "a token of 70000 characters; at most 65536"),
        (changed(BYTE, tokens=["a"] * ((1 << 22) + 1)), "4194305 entries; at most 4194304"),
        (changed(BYTE, token_type=np.ones(7, np.int32)), r"token_type has 7 entries for \d+ tokens"),
        (changed(BYTE, token_type=np.ones((2, 2))), "token_type is not an array of numbers"),
        (changed(BYTE, token_type="x"), "token_type is not an array of numbers"),
        (changed(BYTE, tokens=["a"], token_type=np.array([9])), "type outside 0 to 6"),
        (changed(BYTE, tokens=["a"], token_type=np.array([6])), "has 'a' as byte token 0; such texts look like <0x0A>"),
        (changed(BYTE, merges=None), "merges is missing"),
        (changed(BYTE, merges=["ab"]), "merges has 'ab', which is not two tokens"),
        (changed(BYTE, merges=["a nope"]), "merges do not fit the tokens"),
        (changed(BYTE, merges=["b c"]), "merges do not fit the tokens"),
        (changed(BYTE, eos_token_id=1 << 20), r"eos_token_id is 1048576; the ids of this vocabulary are 0 to \d+"),
        (changed(BYTE, bos_token_id="1"), "bos_token_id is str; a token id is expected"),
        (changed(BYTE, eot_token_id=np.ones((2, 2))), "eot_token_id is ndarray; a token id"),
        (changed(BYTE, add_bos_token=1), "add_bos_token is int; true or false"),
        (changed(SPM, scores=None), "scores is missing, and an SPM vocabulary"),
        (changed(SPM, scores=np.zeros(2, np.float32)), "scores has 2 entries"),
        (changed(SPM, scores=np.full(len(SPM["tokenizer.ggml.tokens"]), np.nan)), "not finite"),
        (changed(gemma4_vocab(), merges=["a zz"]), "merges do not fit the tokens"),
    ],
)  # fmt: skip
def test_a_bad_vocabulary_is_refused(metadata: Metadata, message: str) -> None:
    """Whatever is wrong, one line names the file, the key and the value."""
    with pytest.raises(TokenizerError, match=message) as caught:
        load(metadata)
    assert str(caught.value).startswith("test.gguf: tokenizer.ggml.")
    assert "\n" not in str(caught.value)


def test_no_id_is_no_error() -> None:
    """All ones, which some writers put where a token does not exist, means just that."""
    assert load(changed(BYTE, bos_token_id=0xFFFFFFFF)).bos_id is None
