"""A small vocabulary, trained here on a few sentences, in the forms a GGUF carries: byte-level BPE, and SPM.

ids [0, 256)              one token per byte, in byte order, written in GPT-2's printable alphabet
ids [256, 256 + merges)   merged tokens, in merge order
the last ids              special tokens

All 256 bytes are covered, so any byte string has tokens and comes back exactly. An SPM vocabulary begins with its
special tokens, has bytes as ``<0xNN>``, and then the same merged tokens with ``▁`` for spaces, and their characters.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import gguf

MERGES = 120

TRAINING_TEXT = """
The cache holds the keys and the values of every token that the model has read. The keys and the values of one
layer lie in pages, and the pages of the layer lie in the memory of the host. When the model reads the next token,
the pages that are not in the device are copied there, one run after the other, and the attention of the layer is
computed over all of them. There is no page that is dropped, and there is no value that is rounded again.
A river in the north of the country carries stones from the mountain to the sea; in the winter the river is quiet,
and in the spring the water is high. The children of the village know the stones, the colours of the stones, and
the names that the old people gave to them. "Where does the water come from?" they ask, and the answer is always
the same: from the snow, from the rain, and from the other side of the mountain.
def read(page, layer):
    for row in page.rows:
        if row.layer == layer:
            return row.value
    return None
def write(page, row):
    page.rows.append(row)
    return len(page.rows)
Der Fluss trägt die Steine, die Kinder zählen die Steine; él lee la página, ella escribe la página. Наука и река.
1, 2, 3, 10, 20, 30, 100, 200, 300: the numbers of the pages.
"""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TURNS = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n{{ message['content'] }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
SPM = "spm"
"""The style of ``gemma3``: no pre-tokenizer, but scores."""
PLAIN_BPE = "gemma4"
"""The style of ``gemma4``: the same tokens, joined by merges."""


@dataclass(frozen=True, slots=True)
class Style:
    """What differs between the vocabularies of two model families: special tokens and the text around a chat."""

    control: tuple[str, ...]
    user_defined: tuple[str, ...]
    bos: str | None
    eos: str
    pad: str
    chat_template: str


_CHATML_STYLE = Style(
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    ("<think>", "</think>"),
    None,
    "<|im_end|>",
    "<|endoftext|>",
    CHATML,
)
STYLES = {
    "qwen2": _CHATML_STYLE,
    "qwen35": _CHATML_STYLE,
    "smollm": _CHATML_STYLE,
    "llama-bpe": Style(
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        (),
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|end_of_text|>",
        HEADERS,
    ),
    SPM: Style(
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"), (), "<bos>", "<end_of_turn>", "<pad>",
        TURNS,
    ),
}


@dataclass(frozen=True, slots=True)
class Vocab:
    """Number of tokens, and the ids of the control tokens among them."""

    size: int
    control: slice


@cache
def byte_alphabet() -> tuple[str, ...]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table).

    Bytes that are visible in Latin-1 stand for themselves; the others take the code points from 256 on, in byte order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return tuple(chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256))


@cache
def merge_rules() -> tuple[tuple[str, str], ...]:
    """``MERGES`` pairs, most frequent first: byte-pair encoding trained on ``TRAINING_TEXT``, ties in text order."""
    alphabet = byte_alphabet()
    pieces = re.findall(r" ?[^\W\d_]+|\d| ?[^\s\w]+|\s+", TRAINING_TEXT)
    words = Counter(tuple(alphabet[byte] for byte in piece.encode()) for piece in pieces)
    rules: list[tuple[str, str]] = []
    while len(rules) < MERGES:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        best = max(pairs, key=pairs.__getitem__)  # the first of equals: Counter keeps the order of insertion
        rules.append(best)
        joined: Counter[tuple[str, ...]] = Counter()
        for word, count in words.items():
            joined[_join(word, best)] += count
        words = joined
    return tuple(rules)


def _join(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return tuple(out)


def tokens(pre: str) -> list[str]:
    """All token texts of the vocabulary for pre-tokenizer ``pre``, in id order."""
    style = STYLES[pre]
    merged = [left + right for left, right in merge_rules()]
    return [*byte_alphabet(), *merged, *style.control, *style.user_defined]


def add_vocab(writer: gguf.GGUFWriter, pre: str) -> Vocab:
    """Write the tokenizer's metadata for pre-tokenizer ``pre``, a key of ``STYLES``."""
    return _add_plain(writer, pre) if pre in (SPM, PLAIN_BPE) else _add_bpe(writer, pre)


def _add_plain(writer: gguf.GGUFWriter, pre: str) -> Vocab:
    style, control = STYLES[SPM], len(STYLES[SPM].control)
    alphabet = {char: bytes([byte]) for byte, char in enumerate(byte_alphabet())}
    merged, merges = [], []
    for pair in merge_rules():
        raw = [b"".join(alphabet[char] for char in part) for part in pair]
        with suppress(UnicodeDecodeError):   # parts of a character are no token here
            merged.append(b"".join(raw).decode().replace(" ", "\N{LOWER ONE EIGHTH BLOCK}"))
            merges.append(" ".join(part.decode().replace(" ", "\N{LOWER ONE EIGHTH BLOCK}") for part in raw))
    pieces = dict.fromkeys([*merged, *sorted({char for piece in merged for char in piece})])
    texts = [*style.control, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [gguf.TokenType.CONTROL] * control + [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(pieces)
    types[style.control.index("<unk>")] = gguf.TokenType.UNKNOWN
    writer.add_tokenizer_model("llama" if pre == SPM else pre)
    writer.add_token_list(texts)
    if pre == SPM:
        writer.add_token_scores([0.0] * (control + 256) + [-float(rank) for rank in range(len(pieces))])
    else:
        writer.add_token_merges(merges)
    writer.add_token_types(types)
    writer.add_bos_token_id(texts.index("<bos>"))
    writer.add_eos_token_id(texts.index(style.eos))
    writer.add_unk_token_id(texts.index("<unk>"))
    writer.add_pad_token_id(texts.index(style.pad))
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(style.chat_template)
    return Vocab(len(texts), slice(0, control))


def _add_bpe(writer: gguf.GGUFWriter, pre: str) -> Vocab:
    style = STYLES[pre]
    texts = tokens(pre)
    plain = len(texts) - len(style.control) - len(style.user_defined)
    types = (
        [gguf.TokenType.NORMAL] * plain
        + [gguf.TokenType.CONTROL] * len(style.control)
        + [gguf.TokenType.USER_DEFINED] * len(style.user_defined)
    )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges([f"{left} {right}" for left, right in merge_rules()])
    writer.add_eos_token_id(texts.index(style.eos))
    writer.add_pad_token_id(texts.index(style.pad))
    if style.bos is not None:
        writer.add_bos_token_id(texts.index(style.bos))
    writer.add_add_bos_token(style.bos is not None)
    writer.add_chat_template(style.chat_template)
    return Vocab(len(texts), slice(plain, plain + len(style.control)))
