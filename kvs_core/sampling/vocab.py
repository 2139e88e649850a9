"""VocabView: what the sampler asks of a tokenizer, and nothing else."""

from __future__ import annotations

from typing import Protocol


class VocabView(Protocol):
    """The text side of a vocabulary. DRY breakers and infill compare tokens by their bytes; control tokens have theirs
    for breakers alone."""

    @property
    def n_vocab(self) -> int:
        """Number of token ids; ids are ``[0, n_vocab)``."""

    def token_bytes(self, token: int, /, *, special: bool = False) -> bytes:
        """The text of one token as bytes (it may be part of a UTF-8 character); of a control token only if ``special``,
        else empty."""

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of ``text``; without BOS or EOS, and with special tokens' names read as plain text."""
