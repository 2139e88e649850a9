"""The vocabulary of synthetic models: a token per byte, and words that no text becomes."""

from __future__ import annotations

import numpy as np
from gguf.constants import TokenType

from kvs_core.formats.gguf_header import MetaValue
from kvs_core.formats.tokenizer import BYTE_CHARS

_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")   # the last ids
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def synthetic_vocab(n_vocab: int, pre: str) -> dict[str, MetaValue]:
    """``tokenizer.*`` of a byte-level vocabulary of ``n_vocab`` tokens, with the pre-tokenizer ``pre``.

    ids [0, 256)        the bytes
    ids [256, n - 3)    `` w256`` and so on
    the last three      ChatML's control tokens
    The one merge rule, which readers want to see, joins a space and ``w``, as the token 256.
    """
    space = BYTE_CHARS[ord(" ")]
    words = [f"{space}w", *(f"{space}w{index}" for index in range(257, n_vocab - len(_CONTROL)))]
    tokens = [*BYTE_CHARS, *words, *_CONTROL]
    assert len(tokens) == n_vocab
    types = np.full(n_vocab, TokenType.NORMAL, np.int32)
    types[-len(_CONTROL) :] = TokenType.CONTROL
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [f"{space} w"],
        "tokenizer.ggml.eos_token_id": n_vocab - 1,
        "tokenizer.ggml.padding_token_id": n_vocab - 3,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _CHAT_TEMPLATE,
    }
