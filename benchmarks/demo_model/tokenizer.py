"""The byte-level BPE vocabulary of the demo model, trained on its own text.

The cuts before merging are those of the pre-tokenizer ``qwen35``: words with one leading sign, single digits, runs of
signs, space. Ids: 256 bytes, merged tokens in merge order, then the special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CUTS = (
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _empty(ids: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, merges))
    cuts = pre_tokenizers.Split(tokenizers.Regex(CUTS), "isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cuts, spell])
    return tokenizer


def end_id(merges: list[tuple[str, str]]) -> int:
    """The token that ends a document."""
    return token_texts(merges).index(SPECIAL[0])


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte (GPT-2's table)."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def train(texts: Iterable[str], n_vocab: int) -> tokenizers.Tokenizer:
    """A tokenizer of ``n_vocab`` tokens, special ones included."""
    learner = _empty({}, [])
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab - len(SPECIAL), initial_alphabet=byte_alphabet(), show_progress=False,
        special_tokens=[], max_token_length=24,
    )  # fmt: skip
    learner.train_from_iterator(texts, trainer)
    return from_merges(merges_of(learner))


def merges_of(tokenizer: tokenizers.Tokenizer) -> list[tuple[str, str]]:
    """The merges of a tokenizer, the first to apply first."""
    return [(left, right) for left, right in json.loads(tokenizer.to_str())["model"]["merges"]]


def from_merges(merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    """The tokenizer that applies ``merges``, with ids as this module numbers them."""
    plain = token_texts(merges)[: -len(SPECIAL)]
    tokenizer = _empty({text: i for i, text in enumerate(plain)}, merges)
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def token_texts(merges: list[tuple[str, str]]) -> list[str]:
    """All tokens in id order. Two merges may give the same token, which is then listed once."""
    plain = dict.fromkeys([*byte_alphabet(), *(left + right for left, right in merges)])
    return [*plain, *SPECIAL]


def token_bytes(merges: list[tuple[str, str]]) -> list[bytes]:
    """What each token prints; nothing for the special ones."""
    values = {char: byte for byte, char in enumerate(byte_alphabet())}
    plain = token_texts(merges)[: -len(SPECIAL)]
    return [bytes(values[char] for char in text) for text in plain] + [b""] * len(SPECIAL)


def save(merges: list[tuple[str, str]], path: Path) -> None:
    """Write the merges as JSON."""
    path.write_text(json.dumps(merges, ensure_ascii=True), encoding="utf-8")


def load(path: Path) -> list[tuple[str, str]]:
    """Read the merges."""
    return [(left, right) for left, right in json.loads(path.read_text(encoding="utf-8"))]
