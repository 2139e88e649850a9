"""Small vocabularies, and llama.cpp's tokenizer over them: ids to compare with.

A vocabulary is the metadata mapping that ``Tokenizer.from_metadata`` takes; ``write_vocab`` makes of it a GGUF without
tensors, which llama.cpp opens as a vocabulary alone.
"""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_char_p, c_int32, c_void_p
from pathlib import Path
from typing import Any, Self

import gguf
import numpy as np
from gguf import TokenType

from tests.support import llamacpp
from tests.support.tiny_vocab import byte_alphabet

_lib = llamacpp._lib
for _name in ("bos", "eos", "eot"):
    getattr(_lib, f"llama_vocab_{_name}").argtypes = (c_void_p,)
_lib.llama_vocab_get_add_bos.argtypes = _lib.llama_vocab_get_add_eos.argtypes = (c_void_p,)
_lib.llama_vocab_get_add_bos.restype = _lib.llama_vocab_get_add_eos.restype = c_bool
_lib.llama_vocab_is_control.argtypes, _lib.llama_vocab_is_control.restype = (c_void_p, c_int32), c_bool
_lib.llama_token_to_piece.argtypes = (c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool)

Metadata = dict[str, Any]


class LlamaVocab:
    """llama.cpp's tokenizer for one file."""

    def __init__(self, path: Path) -> None:
        params = _lib.llama_model_default_params()
        params.vocab_only = True
        self._model = _lib.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, f"llama.cpp cannot load {path}"
        self._vocab = _lib.llama_model_get_vocab(self._model)
        self.n_vocab: int = _lib.llama_vocab_n_tokens(self._vocab)
        self.eot_id: int = _lib.llama_vocab_eot(self._vocab)
        self.add_bos: bool = _lib.llama_vocab_get_add_bos(self._vocab)
        self.add_eos: bool = _lib.llama_vocab_get_add_eos(self._vocab)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        data = text.encode()
        room = 2 * len(data) + 8
        ids = (c_int32 * room)()
        count = _lib.llama_tokenize(self._vocab, data, len(data), ids, room, add_special, parse_special)
        assert count >= 0
        return list(ids[:count])

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        buffer = ctypes.create_string_buffer(1 << 12)
        count = _lib.llama_token_to_piece(self._vocab, token_id, buffer, len(buffer), 0, special)
        assert count >= 0
        return buffer.raw[:count]

    def is_control(self, token_id: int) -> bool:
        return bool(_lib.llama_vocab_is_control(self._vocab, token_id))

    @property
    def eog_ids(self) -> set[int]:
        return {i for i in range(self.n_vocab) if _lib.llama_vocab_is_eog(self._vocab, i)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _lib.llama_model_free(self._model)


def write_vocab(path: Path, metadata: Metadata) -> Path:
    """A GGUF with these keys and the sizes that arch ``llama`` needs."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value if isinstance(value, list) else value.tolist())
    writer.add_vocab_size(len(metadata["tokenizer.ggml.tokens"]))
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_head_count(1)
    writer.add_feed_forward_length(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_vocab(
    pre: str | None, special: dict[str, int] | None = None, *, joined: str = "a1 !\nA'", **keys: Any
) -> Metadata:
    """Byte-level BPE that shows every cut: each byte joins with each of some common characters, on both sides.

    special  texts and types of tokens after the ordinary ones
    joined   the common characters
    keys     further ``tokenizer.ggml`` keys
    """
    alphabet = byte_alphabet()
    merges = {}
    for byte in range(255, -1, -1):
        for common in map(ord, joined):
            merges[alphabet[byte], alphabet[common]] = merges[alphabet[common], alphabet[byte]] = None
    ordinary = [*alphabet, *dict.fromkeys(left + right for left, right in merges)]
    special = special or {}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*ordinary, *special],
        "tokenizer.ggml.token_type": np.array([TokenType.NORMAL] * len(ordinary) + list(special.values()), np.int32),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def spm_vocab(**keys: Any) -> Metadata:
    """SPM over few letters, many tokens and few scores, so that ties and rival splits are common."""
    words = ["▁", "a", "b", "c", "é", "aa", "ab", "ba", "bb", "▁a", "▁b", "▁▁", "aaa", "aab", "aba", "bab", "▁ab",
             "▁ba", "aaaa", "abab", "▁▁▁▁", "b▁", "b▁a", "▁aba", "cc", "éa", "unused"]  # fmt: skip
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<|u|>", "<|im_end|>"]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    types += [TokenType.NORMAL] * (len(words) - 1) + [TokenType.UNUSED, TokenType.USER_DEFINED, TokenType.CONTROL]
    scores = [0.0] * 259 + [-float(i // 3) for i in range(len(words))] + [0.0, 0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def gemma4_vocab(**keys: Any) -> Metadata:
    """BPE on plain UTF-8 with ``▁`` for spaces and bytes as a last resort."""
    merges = ["▁ a", "a b", "▁a b", "\n \n", "é a", "▁ ▁", "▁▁ ▁▁", "b ▁"]
    words = ["▁", "a", "b", "c", "é", "\n", *(merge.replace(" ", "") for merge in merges), "\n\n\n"]
    texts = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<turn|>", "<u>"]
    types = [TokenType.CONTROL] * 3 + [TokenType.UNKNOWN] + [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(words)
    types += [TokenType.CONTROL, TokenType.USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
