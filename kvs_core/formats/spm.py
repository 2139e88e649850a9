"""SentencePiece's BPE on scores: the pair that joins to the best token is joined first.

The ``tokenizers`` library has this method only with a fixed list of merges. A list cannot say that equal scores go
from left to right, so its ids would differ in runs of equal characters; hence this implementation.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heapify, heappop, heappush

_CACHED_WORDS = 1 << 15
_CACHED_CHARS = 24


class SpmEncoder:
    """Text, with ``▁`` for spaces, to ids.

    Two neighbouring characters that stand together in no token can never be joined. Cutting there leaves short
    words, most of which were seen before.
    """

    def __init__(self, ids: dict[str, int], scores: list[float], unk_id: int | None) -> None:
        self._ids = ids
        self._scores = scores
        self._unk = [] if unk_id is None else [unk_id]
        self._byte_ids = [ids.get(f"<0x{byte:02X}>") for byte in range(256)]
        self._joints = {text[i : i + 2] for text in ids for i in range(len(text) - 1)}
        self._cached = lru_cache(_CACHED_WORDS)(self._join)

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``. A character that is no token becomes its bytes, or ``unk`` where they are none."""
        ids: list[int] = []
        joints = self._joints
        start = 0
        for at in range(1, len(text) + 1):
            if text[at - 1 : at + 1] not in joints:  # at the end one character, which is no joint
                word = text[start:at]
                ids += self._cached(word) if at - start <= _CACHED_CHARS else self._join(word)
                start = at
        return ids

    def _join(self, word: str) -> list[int]:
        # A symbol is named by where it starts; ends[s] is where it ends, 0 once it is part of another.
        size = len(word)
        ends = list(range(1, size + 1))
        before = list(range(-1, size - 1))

        def candidate(left: int, right: int) -> tuple[float, int, int, int] | None:
            end = ends[right]
            token = self._ids.get(word[left:end])
            return None if token is None else (-self._scores[token], left, right, end - left)

        heap = [pair for left in range(size - 1) if (pair := candidate(left, left + 1))]
        heapify(heap)
        while heap:
            _, left, right, length = heappop(heap)
            if not ends[left] or not ends[right] or ends[right] - left != length or ends[left] != right:
                continue  # one of the two has grown or gone
            end = ends[left] = ends[right]
            ends[right] = 0
            if end < size:
                before[end] = left
                if pair := candidate(left, end):
                    heappush(heap, pair)
            if before[left] >= 0 and (pair := candidate(before[left], left)):
                heappush(heap, pair)

        ids: list[int] = []
        start = 0
        while start < size:
            token = self._ids.get(word[start : ends[start]])
            ids += self._bytes_of(word[start]) if token is None else [token]
            start = ends[start]
        return ids

    def _bytes_of(self, char: str) -> list[int]:
        """A symbol without a token is one character: joining gives tokens alone."""
        ids = [self._byte_ids[byte] for byte in char.encode()]
        return [i for i in ids if i is not None] if None not in ids else self._unk
