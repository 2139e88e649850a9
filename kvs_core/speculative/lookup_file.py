"""Files of counted followers, as llama.cpp's lookup tools write them: how often which token followed an n-gram.

    repeated    int32 [4]     the n-gram's 1 to 4 tokens, then -1
                int32         followers: how many pairs come
                int32 [2] ..  token, count > 0

All numbers are little-endian. There is no header and no end mark.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np

from kvs_core.errors import SettingsError

MAX_GRAM = 4
_NONE = -1

Gram: TypeAlias = tuple[int, ...]
Followers: TypeAlias = dict[int, int]
"""Token -> times, in the order in which they were first seen."""

Lookup: TypeAlias = dict[Gram, Followers]


def read_lookup(path: Path, n_vocab: int) -> Lookup:
    """The counts in ``path``, of tokens below ``n_vocab``. SettingsError if it cannot be read, or is no such file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}; give a lookup cache of llama.cpp, or none") from None
    if len(data) % 4:
        raise _broken(path, len(data), "its size is no multiple of 4")
    numbers = np.frombuffer(data, "<i4")
    lookup: Lookup = {}
    at = 0
    while at < numbers.size:
        if numbers.size - at <= MAX_GRAM:
            raise _broken(path, 4 * at, "it ends inside an n-gram")
        *slots, followers = numbers[at : at + MAX_GRAM + 1].tolist()
        size = next((index for index, token in enumerate(slots) if token == _NONE), MAX_GRAM)
        if size == 0 or min(slots[:size]) < 0 or any(token != _NONE for token in slots[size:]):
            raise _broken(path, 4 * at, f"{slots} is no n-gram")
        pairs = at + MAX_GRAM + 1
        at = pairs + 2 * followers
        if followers < 0 or at > numbers.size:
            raise _broken(path, 4 * (pairs - 1), f"{followers} followers do not fit in what is left")
        tokens, counts = numbers[pairs:at:2].tolist(), numbers[pairs + 1 : at : 2].tolist()
        if min(tokens, default=0) < 0 or min(counts, default=1) < 1:
            raise _broken(path, 4 * pairs, "a token below 0, or a count below 1")
        highest = max(slots[:size] + tokens)
        if highest >= n_vocab:
            raise SettingsError(f"{path}: it counts token {highest}, this model's tokens are 0 to {n_vocab - 1}: it is "
                                "of another model; give this model's, or none")
        lookup[tuple(slots[:size])] = dict(zip(tokens, counts, strict=True))
    return lookup


def write_lookup(path: Path, lookup: Mapping[Gram, Mapping[int, int]]) -> None:
    """Write ``lookup`` so that ``read_lookup`` and llama.cpp read it back."""
    numbers: list[int] = []
    for gram, followers in lookup.items():
        assert 1 <= len(gram) <= MAX_GRAM
        numbers += (*gram, *[_NONE] * (MAX_GRAM - len(gram)), len(followers))
        for pair in followers.items():
            numbers += pair
    path.write_bytes(np.array(numbers, "<i4").tobytes())


def _broken(path: Path, at_bytes: int, why: str) -> SettingsError:
    return SettingsError(f"{path}: no lookup cache of llama.cpp: {why} (byte {at_bytes}); give one, or none")
