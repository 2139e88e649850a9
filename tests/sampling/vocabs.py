"""A vocabulary for tests that need texts of tokens, but no model."""

from __future__ import annotations


class ListVocab:
    """Tokens are the given texts; ``encode`` takes the longest token at each place. ``control``: ids that print nothing
    unless asked to, as a real tokenizer's control tokens."""

    def __init__(self, texts: list[bytes], control: frozenset[int] = frozenset()) -> None:
        self.texts = texts
        self.control = control
        self.n_vocab = len(texts)

    def token_bytes(self, token: int, /, *, special: bool = False) -> bytes:
        return b"" if token in self.control and not special else self.texts[token]

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        rest, ids = text.encode(), []
        while rest:
            best = max((i for i, word in enumerate(self.texts) if word and rest.startswith(word)),
                       key=lambda i: len(self.texts[i]))
            ids.append(best)
            rest = rest[len(self.texts[best]) :]
        return ids


class LetterVocab(ListVocab):
    """``n_vocab`` tokens of one character each, from U+0100 on: no token is a part of another, or of ASCII text."""

    def __init__(self, n_vocab: int) -> None:
        super().__init__([chr(0x100 + token).encode() for token in range(n_vocab)])
