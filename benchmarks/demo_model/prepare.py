"""From text to tokens: trains the vocabulary, encodes the training text, and keeps a part aside for tests.

    python -m benchmarks.demo_model.prepare --data FOLDER [--vocab 4096]

Reads ``corpus.txt.xz`` of ``fetch_data``. Writes ``merges.json``, ``tokens.npz`` and ``held_out.txt.xz``. Arrays of
``tokens.npz``, all uint16, documents end with ``<|endoftext|>``:

    train, held_out        the text; every 40th document of the corpus is held out
    filler, filler_test    generated sentences, without end tokens
"""

from __future__ import annotations

import argparse
import lzma
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import tokenizers

from benchmarks.demo_model import recall, tokenizer
from benchmarks.demo_model.fetch_data import SEPARATOR, read_documents

HELD_OUT_EVERY = 40
FILLER_PARAGRAPHS = 15_000
TEST_PARAGRAPHS = 3_000
BATCH = 512


def split(documents: Sequence[str], seed: int) -> tuple[list[str], list[str]]:
    """Training documents in random order, and held-out ones."""
    train = [text for i, text in enumerate(documents) if i % HELD_OUT_EVERY != HELD_OUT_EVERY // 2]
    held_out = [text for i, text in enumerate(documents) if i % HELD_OUT_EVERY == HELD_OUT_EVERY // 2]
    Random(seed).shuffle(train)
    return train, held_out


def encode(encoder: tokenizers.Tokenizer, texts: Sequence[str], *, end: int | None) -> np.ndarray:
    """The tokens of all texts, each followed by ``end`` if there is one."""
    parts: list[np.ndarray] = []
    for at in range(0, len(texts), BATCH):
        for encoding in encoder.encode_batch(list(texts[at : at + BATCH]), add_special_tokens=False):
            ids = encoding.ids if end is None else [*encoding.ids, end]
            parts.append(np.asarray(ids, dtype=np.uint16))
    return np.concatenate(parts)


def filler(paragraphs: int, seed: int) -> list[str]:
    """Generated paragraphs, each with the blank line behind it."""
    source = recall.paragraphs(Random(seed))
    return [next(source) + "\n\n" for _ in range(paragraphs)]


def prepare(data: Path, *, n_vocab: int, seed: int) -> None:
    """Write the three files."""
    train, held_out = split(read_documents(data / "corpus.txt.xz"), seed)
    generated = filler(FILLER_PARAGRAPHS, seed)
    learnt = tokenizer.train([*train, *generated[:1000]], n_vocab)
    merges = tokenizer.merges_of(learnt)
    tokenizer.save(merges, data / "merges.json")
    end = tokenizer.end_id(merges)
    arrays = {
        "train": encode(learnt, train, end=end),
        "held_out": encode(learnt, held_out, end=end),
        "filler": encode(learnt, generated, end=None),
        "filler_test": encode(learnt, filler(TEST_PARAGRAPHS, seed + 1), end=None),
    }
    np.savez_compressed(data / "tokens.npz", allow_pickle=False, **arrays)
    with lzma.open(data / "held_out.txt.xz", "wt", encoding="utf-8") as file:
        file.write("".join(text + SEPARATOR for text in held_out))
    for name, array in arrays.items():
        print(f"{name}: {len(array) / 1e6:.2f} M tokens")
    size = sum(len(text.encode()) for text in train)
    print(f"{learnt.get_vocab_size()} tokens in the vocabulary, {size / len(arrays['train']):.2f} bytes per token")


def main() -> int:
    parser = argparse.ArgumentParser(description="Tokenize the training text of the demo model.")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--vocab", type=int, default=4096, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    arguments = parser.parse_args()
    prepare(arguments.data, n_vocab=arguments.vocab, seed=arguments.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
