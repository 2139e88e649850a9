"""The vocabulary in a GGUF file's metadata: texts, types and roles of all tokens, checked.

Keys are ``tokenizer.ggml.*``. Which tokens are control tokens and which end a generation follows llama.cpp: many files
mark them wrongly or not at all, so it also goes by their texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NoReturn

import numpy as np
from gguf.constants import TokenType

from kvs_core.errors import TokenizerError

_MAX_TOKENS = 1 << 22
_MAX_MERGES = 1 << 23
_MAX_TOKEN_CHARS = 1 << 16
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")

# How writers of GGUF files say "no such token".
_NO_ID = (-1, 0xFFFFFFFF)

# Texts that end a turn, the likeliest first; ``eot_token_id`` is looked for among them when the file does not name it.
_EOT_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
    "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>",
)  # fmt: skip
_EOM_TEXTS = ("<|eom_id|>",)
_EOG_TEXTS = (
    *_EOT_TEXTS, *_EOM_TEXTS, "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "[EOS]", "<eos>", "<turn|>",
    "<|tool_response>", "[e~[",
)  # fmt: skip
# Fill-in-the-middle tokens: the key's name, its older name, the texts to look for.
_FIM_TEXTS = {
    "fim_pre": ("prefix", ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
                           "<|code_prefix|>", "<|prefix|>")),
    "fim_suf": ("suffix", ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
                           "<|code_suffix|>", "<|suffix|>")),
    "fim_mid": ("middle", ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
                           "<|code_middle|>", "<|middle|>")),
    "fim_pad": (None, ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    "fim_rep": (None, ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    "fim_sep": (None, ("<|file_sep|>",)),
}  # fmt: skip
# Marks inside a turn which gpt-oss files call control tokens, but which are part of the text to be parsed.
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """All tokens of a model, and what each is for.

    model          ``gpt2`` (byte-level BPE), ``llama`` (SPM) or ``gemma4`` (BPE on plain UTF-8)
    texts, types   one per id; a type is NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED or BYTE
    ids            the id of each text; texts are unique
    scores         SPM only: the higher, the earlier a token is joined; else empty
    merges         BPE only, the first to apply first; else empty
    eot_id         the end of a turn, by key or by text
    eog_ids        all ids that end a generation
    fim_ids        ids for filling in the middle, as far as there are: of fim_pre, fim_suf, fim_mid, fim_rep, fim_sep,
                   fim_pad
    pre, add_bos, add_eos, add_space_prefix   as the file has them, None where it has not
    """

    source: str
    model: str
    texts: list[str] = field(repr=False)
    types: list[int] = field(repr=False)
    ids: dict[str, int] = field(repr=False)
    scores: list[float] = field(repr=False)
    merges: list[tuple[str, str]] = field(repr=False)
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    unk_id: int | None
    eog_ids: frozenset[int]
    suppress_ids: tuple[int, ...]
    pre: str | None
    add_bos: bool | None
    add_eos: bool | None
    add_space_prefix: bool | None
    fim_ids: Mapping[str, int]

    @staticmethod
    def from_metadata(metadata: Mapping[str, Any], *, source: str) -> Vocabulary:
        """Read and check all keys. ``source`` names the file in messages. Raises TokenizerError."""
        return _Reader(metadata, source).vocabulary()


def byte_value(text: str) -> int | None:
    """The byte that a token such as ``<0x0A>`` stands for, None for any other text."""
    match = _BYTE_TOKEN.fullmatch(text)
    return int(match[1], 16) if match else None


class _Reader:
    """Reads the keys one by one; ``fail`` words every error alike."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.metadata = metadata
        self.source = source

    def fail(self, key: str, what: str) -> NoReturn:
        raise TokenizerError(f"{self.source}: tokenizer.ggml.{key} {what}")

    def get(self, key: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}")

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            self.fail(key, f"is {type(value).__name__}; a string is expected")
        return value

    def flag(self, key: str) -> bool | None:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            self.fail(key, f"is {type(value).__name__}; true or false is expected")
        return value

    def strings(self, key: str, most: int) -> list[str]:
        value = self.get(key)
        if value is None:
            self.fail(key, "is missing: the file has no usable vocabulary; convert the model again")
        if not isinstance(value, list) or not set(map(type, value)) <= {str}:
            self.fail(key, "is not an array of strings; convert the model again")
        if len(value) > most:
            self.fail(key, f"has {len(value)} entries; at most {most} make sense")
        return value

    def numbers(self, key: str, *, kinds: str, length: int | None = None) -> np.ndarray[Any, Any] | None:
        value = self.get(key)
        if value is None:
            return None
        array = np.asarray(value) if isinstance(value, list | np.ndarray) else np.empty((0, 0))
        if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
            self.fail(key, "is not an array of numbers of the right kind; convert the model again")
        if length is not None and len(array) != length:
            self.fail(key, f"has {len(array)} entries for {length} tokens; convert the model again")
        return array

    def token_id(self, key: str, n_vocab: int) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if type(value) is not int:
            self.fail(key, f"is {type(value).__name__}; a token id is expected")
        if value in _NO_ID:
            return None
        if not 0 <= value < n_vocab:
            self.fail(key, f"is {value}; the ids of this vocabulary are 0 to {n_vocab - 1}; override it")
        return value

    def vocabulary(self) -> Vocabulary:
        model = self.text("model")
        if model not in ("gpt2", "llama", "gemma4"):
            named = "is missing" if model is None else f"is {model!r:.40}, which cannot be used"
            self.fail("model", f"{named}; gpt2 (byte-level BPE), llama (SPM) and gemma4 work")
        # An empty text is no text to find; its token still needs a name of its own.
        texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(self.strings("tokens", _MAX_TOKENS))]
        if not texts:
            self.fail("tokens", "is empty: the file has no usable vocabulary; convert the model again")
        longest = max(map(len, texts))
        if longest > _MAX_TOKEN_CHARS:
            self.fail("tokens", f"holds a token of {longest} characters; at most {_MAX_TOKEN_CHARS} make sense")
        ids = dict(zip(texts, range(len(texts)), strict=True))
        if len(ids) != len(texts):
            twice = next(text for i, text in enumerate(texts) if ids[text] != i)
            self.fail("tokens", f"holds {twice!r:.40} twice: ids {texts.index(twice)} and {ids[twice]}")
        types = self.types(texts)
        scores = self.scores(len(texts)) if model == "llama" else []
        merges = [] if model == "llama" else self.merges()
        bos, eos, unk = (self.token_id(f"{name}_token_id", len(texts)) for name in ("bos", "eos", "unknown"))
        if model == "llama" and len(texts) > 2:  # SPM's own numbering, which files need not repeat
            unk, bos, eos = (0 if unk is None else unk), (1 if bos is None else bos), (2 if eos is None else eos)
        eot, eog, fim = self.assign_roles(ids, types, eos)
        suppressed = self.numbers("suppress_tokens", kinds="iu")
        return Vocabulary(
            self.source, model, texts, types, ids, scores, merges, bos, eos, eot, unk, eog,
            () if suppressed is None else tuple(int(i) for i in suppressed if 0 <= i < len(texts)),
            self.text("pre"), self.flag("add_bos_token"), self.flag("add_eos_token"), self.flag("add_space_prefix"),
            fim,
        )  # fmt: skip

    def types(self, texts: list[str]) -> list[int]:
        array = self.numbers("token_type", kinds="iu", length=len(texts))
        if array is None:
            return [int(TokenType.NORMAL)] * len(texts)
        if array.min() < 0 or array.max() > max(TokenType):
            self.fail("token_type", f"holds a type outside 0 to {max(TokenType)}; convert the model again")
        types: list[int] = np.where(array == 0, TokenType.UNUSED, array).tolist()  # 0: undefined, which prints nothing
        for i in np.flatnonzero(array == TokenType.BYTE):
            if byte_value(texts[i]) is None:
                self.fail("tokens", f"has {texts[i]!r:.40} as byte token {i}; such texts look like <0x0A>")
        return types

    def scores(self, n_vocab: int) -> list[float]:
        array = self.numbers("scores", kinds="fiu", length=n_vocab)
        if array is None:
            self.fail("scores", "is missing, and an SPM vocabulary cannot be used without; convert the model again")
        scores: list[float] = array.astype(np.float32).tolist()
        if not all(map(isfinite, scores)):
            self.fail("scores", "holds a value that is not finite; convert the model again")
        return scores

    def merges(self) -> list[tuple[str, str]]:
        """The first of equal merges counts. Whether they join tokens to tokens is checked when they are used."""
        lines = dict.fromkeys(self.strings("merges", _MAX_MERGES))
        # The space between is the first that is not the line's first character.
        cuts = ((line[:1], line[1:].partition(" ")) for line in lines)
        merges = [(first + rest, right) for first, (rest, _, right) in cuts]
        if not all(right for _, right in merges):
            odd = next(line for line in lines if not line[1:].partition(" ")[2])
            self.fail("merges", f"has {odd!r:.60}, which is not two tokens with a space between; convert again")
        return merges

    def assign_roles(
        self, ids: dict[str, int], types: list[int], eos: int | None
    ) -> tuple[int | None, frozenset[int], dict[str, int]]:
        """The end-of-turn id, all ids that end a generation, and those for infill. Corrects ``types`` on the way."""

        def present(*texts: str) -> set[int]:
            return {ids[text] for text in texts if text in ids}

        def named_or_found(keys: Iterable[str], texts: Iterable[str]) -> set[int]:
            for key in keys:
                named = self.token_id(f"{key}_token_id", len(types))
                if named is not None:
                    return {named}
            for text in texts:
                if text in ids:
                    types[ids[text]] = TokenType.CONTROL
                    return {ids[text]}
            return set()

        eot = named_or_found(("eot",), _EOT_TEXTS)
        ends = eot | named_or_found(("eom",), _EOM_TEXTS) | present(*_EOG_TEXTS)
        if eos is not None:
            ends.add(eos)
        fim: dict[str, int] = {}
        for key, (older, texts) in _FIM_TEXTS.items():
            found = named_or_found((older, key) if older else (key,), texts)
            for token in found:
                fim[key] = token
            if key in ("fim_pad", "fim_rep", "fim_sep"):
                ends |= found
        for i in present(*_EOG_TEXTS):
            types[i] = TokenType.CONTROL
        for i in present(*_ALWAYS_SHOWN):
            types[i] = TokenType.USER_DEFINED

        # Where a vocabulary has ends of its own, two older ones mean something else.
        if ends & present("<|call|>", "<|calls|>") and ends & present("<|return|>", "<|flush|>"):
            for i in ends & present("<|end|>"):
                types[i] = TokenType.USER_DEFINED
                ends.discard(i)
        if ends & present("<|tool_response>"):
            for i in ends & present("</s>"):
                types[i] = TokenType.NORMAL
                ends.discard(i)
        return next(iter(eot), None), frozenset(ends), fim
