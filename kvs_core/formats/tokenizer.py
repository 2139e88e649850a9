"""Text to tokens and back, from nothing but a GGUF file's metadata.

Ids equal llama.cpp's. Text that encodes and decodes again is the same text, byte for byte, unless
- it holds the text of a special token, whose piece is empty when control tokens are not shown;
- the vocabulary is SPM (``llama``) or ``gemma4``: ``▁`` (U+2581) comes back as a space, and SPM puts a space before
  text at the start and after a special token (unless ``add_space_prefix`` is false), which stays;
- the vocabulary lacks the bytes for it, or it holds lone surrogates, which become U+FFFD.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import tokenizers
from gguf.constants import TokenType
from tokenizers import models, pre_tokenizers

from kvs_core.errors import SettingsError, TokenizerError
from kvs_core.formats.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from kvs_core.formats.special_tokens import SpecialSplitter
from kvs_core.formats.spm import SpmEncoder
from kvs_core.formats.text_stream import Matched, StopMatcher, Utf8Stream
from kvs_core.formats.vocabulary import Vocabulary, byte_value

__all__ = ["Matched", "StopMatcher", "Tokenizer", "Utf8Stream"]

_LOG = logging.getLogger(__name__)

_HIDDEN = (TokenType.CONTROL, TokenType.UNKNOWN)
_LINES = re.compile(r"\n+|[^\n]+")


def _byte_chars() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2): itself where it prints."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


BYTE_CHARS = _byte_chars()
"""The character for each byte, by byte."""

_CHAR_BYTES = {char: byte for byte, char in enumerate(BYTE_CHARS)}


class Tokenizer:
    """One model's tokenizer. Safe to share between threads.

    bos_id, eos_id, eot_id  None if the model has none
    add_bos, add_eos        whether ``encode`` puts them around text
    eog_ids                 every id that ends a generation
    fim_ids                 ids for filling in the middle, see ``Vocabulary``
    suppress_ids            ids that must never be generated
    """

    def __init__(
        self, vocabulary: Vocabulary, encode_plain: Callable[[str], Iterable[int]], *, add_bos: bool, space_prefix: bool
    ) -> None:
        """``encode_plain``: ids of text without special tokens. Use ``from_metadata``."""
        self._vocabulary = vocabulary
        self._encode_plain = encode_plain
        self._space_prefix = space_prefix
        self._pieces: list[bytes | None] = [None] * len(vocabulary.texts)
        self.n_vocab = len(vocabulary.texts)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eot_id = vocabulary.eot_id
        self.eog_ids = vocabulary.eog_ids
        self.fim_ids = vocabulary.fim_ids
        self.suppress_ids = vocabulary.suppress_ids
        self.add_bos = add_bos and self.bos_id is not None
        self.add_eos = bool(vocabulary.add_eos) and self.eos_id is not None

    @staticmethod
    def from_metadata(metadata: Mapping[str, Any], *, source: str) -> Tokenizer:
        """The tokenizer that ``tokenizer.ggml.*`` describes. ``source`` names the file in messages.

        Raises TokenizerError for a tokenizer model or ``pre`` name without code here, and for keys that are missing,
        contradict each other or point outside the vocabulary.
        """
        vocabulary = Vocabulary.from_metadata(metadata, source=source)

        space_prefix = False
        encode_plain: Callable[[str], Iterable[int]]
        if vocabulary.model == "llama":
            add_bos = vocabulary.add_bos is not False
            space_prefix = vocabulary.add_space_prefix is not False
            encode_plain = _spm(vocabulary)
        elif vocabulary.model == "gemma4":
            add_bos = True  # files that say otherwise are known to be wrong
            encode_plain = _line_bpe(vocabulary)
        else:
            pre = _pre_tokenizer(vocabulary)
            add_bos = pre.adds_bos if vocabulary.add_bos is None else vocabulary.add_bos
            encode_plain = _byte_bpe(vocabulary, pre)
        return Tokenizer(vocabulary, encode_plain, add_bos=add_bos, space_prefix=space_prefix)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of ``text``.

        add_special    BOS in front and EOS behind, if the model wants them
        parse_special  the texts of control tokens become those tokens; if not, they are text like any other, and
                       only user-defined tokens are recognised
        """
        if not text.isascii():
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        ids = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        prefix = " " if self._space_prefix else ""
        for part in (self._all_special if parse_special else self._user_defined).split(text):
            if isinstance(part, int):
                ids.append(part)
                prefix = " " if self._space_prefix else ""
            else:
                ids.extend(self._encode_plain(prefix + part))
                prefix = ""
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        """What a token prints, possibly a part of a character. Control tokens print nothing unless ``special``.

        Raises SettingsError for an id outside the vocabulary.
        """
        if not 0 <= token_id < self.n_vocab:
            raise SettingsError(f"token id {token_id} is outside the vocabulary; ids are 0 to {self.n_vocab - 1}")
        if not special and self._vocabulary.types[token_id] in _HIDDEN:
            return b""
        piece = self._pieces[token_id]
        if piece is None:
            piece = self._pieces[token_id] = self._piece(token_id)
        return piece

    def decode_bytes(self, ids: Iterable[int], *, special: bool = False) -> bytes:
        """The pieces of ``ids``, joined and otherwise untouched."""
        return b"".join(self.token_bytes(i, special=special) for i in ids)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The same as text, with U+FFFD for bytes that are no UTF-8.

        For all tokens at once, as a server's detokenize has them; text that comes token by token takes ``Utf8Stream``.
        """
        return self.decode_bytes(ids, special=special).decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        """The text of a token as the vocabulary holds it: byte-level characters or ``▁`` included."""
        return self._vocabulary.texts[token_id]

    @cached_property
    def _all_special(self) -> SpecialSplitter:
        return self._splitter(*_HIDDEN, TokenType.USER_DEFINED)

    @cached_property
    def _user_defined(self) -> SpecialSplitter:
        return self._splitter(TokenType.USER_DEFINED)

    def _splitter(self, *types: int) -> SpecialSplitter:
        texts = self._vocabulary.texts
        return SpecialSplitter((texts[i], i) for i, kind in enumerate(self._vocabulary.types) if kind in types)

    def _piece(self, token_id: int) -> bytes:
        text = self._vocabulary.texts[token_id]
        kind = self._vocabulary.types[token_id]
        if kind == TokenType.BYTE:
            return bytes([byte_value(text) or 0])
        if kind == TokenType.UNUSED:
            return b""
        if kind != TokenType.NORMAL:
            return text.encode()
        if self._vocabulary.model != "gpt2":
            return text.replace("▁", " ").encode()
        if all(char in _CHAR_BYTES for char in text):
            return bytes(_CHAR_BYTES[char] for char in text)
        return text.encode()  # a token added without the byte encoding


def _pre_tokenizer(vocabulary: Vocabulary) -> PreTokenizer:
    if vocabulary.pre is None:
        _LOG.warning("%s: tokenizer.ggml.pre is missing; 'default' is used, but few models were trained with it: "
                     "convert the model again", vocabulary.source)  # fmt: skip
    name = vocabulary.pre or "default"
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"{vocabulary.source}: tokenizer.ggml.pre is {name!r:.40}, for which there are no rules; "
            f"these work: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]


def _bpe(vocabulary: Vocabulary, ids: dict[str, int], **options: bool) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(ids, vocabulary.merges, **options))
    except Exception as error:  # the library has no class of its own for a merge of, or to, what is no token
        raise TokenizerError(
            f"{vocabulary.source}: tokenizer.ggml.merges do not fit the tokens: {error}; convert the model again"
        ) from None


def _byte_bpe(vocabulary: Vocabulary, pre: PreTokenizer) -> Callable[[str], list[int]]:
    """Byte-level BPE: text is cut by ``pre``, each piece spelt in byte characters and merged."""
    n_vocab = len(vocabulary.ids)
    absent = [char for char in BYTE_CHARS if char not in vocabulary.ids]
    if absent:
        _LOG.debug("%s: bytes %s have no token; text loses them", vocabulary.source,
                  bytes(_CHAR_BYTES[char] for char in absent).hex(" "))  # fmt: skip
    # Such a byte must still keep its neighbours apart, so it gets an id beyond the vocabulary, dropped at the end.
    ids = vocabulary.ids | {char: n_vocab + i for i, char in enumerate(absent)}
    bpe = _bpe(vocabulary, ids, ignore_merges=pre.whole_pieces)
    cuts = [pre_tokenizers.Split(tokenizers.Regex(regex), "isolated") for regex in pre.regexes]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*cuts, spell])

    def encode(text: str) -> list[int]:
        ids = bpe.encode(text, add_special_tokens=False).ids
        return [i for i in ids if i < n_vocab] if absent else ids

    return encode


def _line_bpe(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """BPE on plain UTF-8 with ``▁`` for spaces, line by line. A run of newlines that is a token is taken whole."""
    bpe = _bpe(vocabulary, vocabulary.ids, byte_fallback=True)

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for line in _LINES.findall(text.replace(" ", "▁")):
            whole = vocabulary.ids.get(line) if line[0] == "\n" else None
            ids += bpe.encode(line, add_special_tokens=False).ids if whole is None else [whole]
        return ids

    return encode


def _spm(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    encoder = SpmEncoder(vocabulary.ids, vocabulary.scores, vocabulary.unk_id)
    return lambda text: encoder.encode(text.replace(" ", "▁"))
