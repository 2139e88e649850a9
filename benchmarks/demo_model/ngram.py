"""The baseline: bits per byte of a 5-gram model of bytes on the held-out text.

    python -m benchmarks.demo_model.ngram --data FOLDER [--order 5]

Witten-Bell interpolation: with a context seen n times, followed by t different bytes,

    p(byte | context) = (count(context byte) + t p(byte | shorter context)) / (n + t)

down to the uniform distribution over 256 bytes. Counts are of the training documents; the held-out ones are those that
``prepare`` left out, so both models see the same text.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.demo_model.fetch_data import read_documents
from benchmarks.demo_model.prepare import split

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Grams = np.ndarray[Any, np.dtype[np.uint64]]


def grams(text: Bytes, length: int) -> Grams:
    """Every run of ``length`` (at most 8) bytes of ``text`` as a number, the first byte the highest."""
    count = max(0, len(text) - length + 1)
    packed = np.zeros(count, dtype=np.uint64)
    for offset in range(length):
        packed = (packed << np.uint64(8)) | text[offset : offset + count].astype(np.uint64)
    return packed


class NgramModel:
    """Counts of all runs of up to ``order`` bytes."""

    def __init__(self, text: Bytes, order: int) -> None:
        """Raises ValueError for an order outside 1 to 8 or above the length of the text."""
        if not 1 <= order <= min(8, len(text)):
            raise ValueError(f"order {order} is outside 1 to 8, or above the {len(text)} bytes of the text")
        self._tables = []
        for length in range(1, order + 1):
            runs, counts = np.unique(grams(text, length), return_counts=True)
            # Runs are sorted, so those with the same first bytes lie together: one group per context.
            starts = np.flatnonzero(np.r_[True, np.diff(runs >> np.uint64(8)) != 0])
            contexts = runs[starts] >> np.uint64(8)
            followers = np.diff(np.r_[starts, len(runs)])
            self._tables.append((runs, counts, contexts, np.add.reduceat(counts, starts), followers))

    def bits(self, text: Bytes) -> float:
        """Bits of ``text`` from its byte ``order - 1`` on, all told."""
        order = len(self._tables)
        runs = grams(text, order)
        chance = np.full(len(runs), 1 / 256)
        for length, (known, counts, contexts, totals, followers) in enumerate(self._tables, 1):
            # the low bytes: the last ``length`` of each run
            wanted = runs & np.uint64((1 << 8 * length) - 1)
            seen = _looked_up(known, counts, wanted)
            total = _looked_up(contexts, totals, wanted >> np.uint64(8))
            kinds = _looked_up(contexts, followers, wanted >> np.uint64(8))
            chance = np.where(total > 0, (seen + kinds * chance) / np.maximum(1, total + kinds), chance)
        return float(-np.log2(chance).sum())


def _looked_up(keys: Grams, values: np.ndarray[Any, Any], wanted: Grams) -> np.ndarray[Any, Any]:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def text_of(documents: list[str]) -> Bytes:
    """The documents as one row of bytes, a zero after each."""
    return np.frombuffer("".join(text + "\0" for text in documents).encode(), dtype=np.uint8)


def main() -> int:
    parser = argparse.ArgumentParser(description="Bits per byte of an n-gram model on the held-out text.")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--order", type=int, default=5, metavar="N")
    arguments = parser.parse_args()
    train, held_out = split(read_documents(arguments.data / "corpus.txt.xz"), seed=1)
    test = text_of(held_out)
    model = NgramModel(text_of(train), arguments.order)
    count = len(test) - arguments.order + 1
    print(json.dumps({"order": arguments.order, "bytes": count, "bits_per_byte": model.bits(test) / count}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
