"""DRY ("don't repeat yourself"): tokens that would continue a repetition of the context's end lose logits.

    context (last N tokens)  ... a b c X ........ a b c |     M = 3 tokens match, so X loses
                                                        multiplier * base ** (M - allowed_length)

Sequence breakers (a newline, a quote, ...) end a repetition: matches do not reach back across one. Follows llama.cpp's
sampler of that name, an idea of p-e-w's. Deliberately absent: any notion of messages or roles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvs_core.sampling.candidates import Ids
from kvs_core.sampling.vocab import VocabView

_MAX_BREAKER_BYTES = 40
_MAX_TAIL_TOKENS = 20
_LOG_FLOAT32_MAX = 88.7228391


@dataclass(frozen=True, slots=True)
class Breakers:
    """Sequence breakers as tokens: a head token, then one of its tails (an empty tail: the head alone breaks).

    tails    head -> its tails, longest first
    is_head  [V] bool
    """

    tails: dict[int, tuple[tuple[int, ...], ...]]
    is_head: npt.NDArray[np.bool_]

    def is_single(self, token: int) -> bool:
        """Whether ``token`` alone is a breaker."""
        return token in self.tails and not self.tails[token][-1]

    def reach(self, context: Ids) -> int:
        """How many tokens at the end of ``context`` lie behind its last breaker; all of them without a breaker."""
        for position in np.flatnonzero(self.is_head[context])[::-1].tolist():
            behind = context[position + 1 :]
            for tail in self.tails[int(context[position])]:
                if behind[: len(tail)].tolist() == list(tail):
                    return len(behind) - len(tail)
        return len(context)


def expand_breakers(texts: Iterable[str], vocab: VocabView) -> Breakers:
    """Find the token sequences that spell each breaker text, whatever surrounds it.

    A token that contains the text is a head with an empty tail. A token that ends with the first bytes of the text is
    a head, and the tokens of the remaining text are its tail (none if the cut falls inside a character). Control tokens
    have their texts here, so the end of a turn can be a breaker. Texts are cut to 40 bytes, tails to 20 tokens.
    """
    texts = [text for text in texts if text]
    tails: dict[int, set[tuple[int, ...]]] = {}
    is_head = np.zeros(vocab.n_vocab, np.bool_)
    if texts:
        words = [vocab.token_bytes(token, special=True) for token in range(vocab.n_vocab)]
        ends = np.cumsum([len(word) for word in words])
        letters = np.frombuffer(b"".join(words), np.uint8)
        for text in texts:
            _expand(text.encode("utf-8", "surrogatepass")[:_MAX_BREAKER_BYTES], letters, ends, vocab, tails)
    is_head[list(tails)] = True
    ordered = {head: tuple(sorted(some, key=len, reverse=True)) for head, some in tails.items()}
    return Breakers(ordered, is_head)


def _expand(
    text: bytes,
    letters: npt.NDArray[np.uint8],
    ends: npt.NDArray[np.int64],
    vocab: VocabView,
    tails: dict[int, set[tuple[int, ...]]],
) -> None:
    """Add the heads and tails of one breaker; ``letters`` are all tokens' bytes, ``ends`` where each token ends."""
    starts = np.flatnonzero(letters == text[0])
    tokens = np.searchsorted(ends, starts, side="right")
    overlaps: list[tuple[int, list[int]]] = []   # (bytes of the text that the token's end covers, tokens)
    for matched in range(1, len(text)):
        inside = starts + matched < ends[tokens]
        overlaps.append((matched, tokens[~inside].tolist()))
        starts, tokens = starts[inside], tokens[inside]
        same = letters[starts + matched] == text[matched]
        starts, tokens = starts[same], tokens[same]
    whole = set(tokens.tolist())
    for head in whole:
        tails.setdefault(head, set()).add(())
    for matched, heads in overlaps:
        tail = _tail_tokens(text[matched:], vocab)
        for head in heads:
            if tail and head not in whole:
                tails.setdefault(head, set()).add(tail)


def _tail_tokens(rest: bytes, vocab: VocabView) -> tuple[int, ...]:
    try:
        return tuple(vocab.encode(rest.decode("utf-8"), add_special=False, parse_special=False)[:_MAX_TAIL_TOKENS])
    except UnicodeDecodeError:
        return ()


def suffix_matches(context: Ids) -> tuple[list[int], list[int]]:
    """Where the end of ``context`` occurred before, by the Z-algorithm on the reversed context (Gusfield, 1997).

    Returns ends and lengths: ``context[: ends[i]]`` and the whole context have a common suffix of ``lengths[i]`` > 0
    tokens (the occurrence may overlap the end itself). Linear in the tokens, and only occurrences of the last token
    cost more than a comparison.
    """
    backwards = context[::-1]
    tokens: list[int] = backwards.tolist()
    total = len(tokens)
    lengths = [0] * total
    starts = (np.flatnonzero(backwards[1:] == backwards[0]) + 1).tolist()
    left = right = 0   # [left, right): the match that reaches furthest so far; it equals the prefix
    for start in starts:
        length = min(right - start, lengths[start - left]) if start < right else 0
        if start + length >= right:
            while start + length < total and tokens[start + length] == tokens[length]:
                length += 1
            left, right = start, start + length
        lengths[start] = length
    return [total - start for start in starts], [lengths[start] for start in starts]


@dataclass(frozen=True, slots=True)
class DryRule:
    """DRY's numbers and breakers; ``penalties`` is a pure function of the context."""

    multiplier: float
    base: float
    allowed_length: int
    breakers: Breakers

    def penalties(self, context: Ids) -> dict[int, float]:
        """Token -> what is to be added to its logit (below 0 for a positive multiplier), given the last N tokens."""
        if len(context) <= self.allowed_length:
            return {}
        reach = self.breakers.reach(context)
        if reach < self.allowed_length:
            return {}
        longest: dict[int, int] = {}   # token that would continue a repetition -> its length M
        if self.allowed_length == 0:
            longest = dict.fromkeys(context[1:].tolist(), 0)
        ends, lengths = suffix_matches(context)
        followers = context[ends].tolist() if ends else []
        for token, length in zip(followers, lengths, strict=True):
            repeated = min(length, reach)
            if repeated >= max(self.allowed_length, longest.get(token, 0)):
                longest[token] = repeated
        return {
            token: self._penalty(length - self.allowed_length)
            for token, length in longest.items()
            if not self.breakers.is_single(token)
        }

    def _penalty(self, exponent: int) -> float:
        return -self.multiplier * math.exp(min(exponent * math.log(self.base), _LOG_FLOAT32_MAX))
