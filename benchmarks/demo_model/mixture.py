"""Training sequences: natural text mixed with tasks that only a memory of the distant text can solve.

A sequence of T tokens is one long recall document, or a row of segments of these sorts:

    text      a window of the natural text
    recall    filler with facts scattered in it, some of them repeated later, and questions at the end
    repeat    a passage, other text, and the passage again
    pairs     a list of pairs, then the same pairs in another order
    copy      random words, then the same words

Every token has a weight in the loss: 1 for text, more for what can only be known from far back, 0 for what nobody can
guess, such as the digits of a number when it is first named. Sequence ``i`` depends on the seed and on ``i`` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import tokenizers

from benchmarks.demo_model import recall
from benchmarks.demo_model.tokenizer import end_id, from_merges, load, token_bytes
from benchmarks.demo_model.words import ADJECTIVES, NAMES, NOUNS

ANSWER_WEIGHT = 4.0
LONG_RECALL = 0.35  # of the sequences
SORTS = ("text", "recall", "repeat", "pairs", "copy")
SORT_WEIGHTS = (0.60, 0.24, 0.10, 0.03, 0.03)  # of the segments
NATURAL_FILLER = 0.65


@dataclass(slots=True)
class Piece:
    """Tokens under construction, with their weights."""

    ids: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)

    def add(self, ids: Sequence[int] | np.ndarray, weight: float) -> None:
        self.ids.append(np.asarray(ids, dtype=np.uint16))
        self.weights.append(np.full(len(ids), weight, dtype=np.float32))

    @property
    def size(self) -> int:
        return sum(map(len, self.ids))


class Stream:
    """A row of tokens, and where a sentence ends in it.

    after_sentence   positions where a sentence that begins with a space may be put
    after_paragraph  positions where a paragraph may be put
    """

    def __init__(self, ids: np.ndarray, pieces: Sequence[bytes]) -> None:
        self.ids = ids
        stop = np.array([piece.rstrip(b'"').endswith((b".", b"?", b"!")) for piece in pieces])
        blank = np.array([piece.endswith(b"\n\n") for piece in pieces])
        space = np.array([piece[:1] == b" " and len(piece) > 1 and piece[1:2].isalpha() for piece in pieces])
        word = np.array([piece[:1].isalpha() for piece in pieces])
        first, second = ids[:-1], ids[1:]
        self.after_sentence = np.flatnonzero(stop[first] & space[second]) + 1
        self.after_paragraph = np.flatnonzero(blank[first] & word[second]) + 1

    def window(self, size: int, rng: np.random.Generator) -> tuple[int, int]:
        """A random range of ``size`` tokens."""
        start = int(rng.integers(0, max(1, len(self.ids) - size)))
        return start, min(start + size, len(self.ids))

    def gaps(self, start: int, stop: int, count: int, rng: np.random.Generator) -> list[tuple[int, bool]]:
        """Up to ``count`` places in a range to put a fact at, in order, and whether each begins a paragraph."""
        places = []
        for positions, paragraph in ((self.after_sentence, False), (self.after_paragraph, True)):
            low, high = np.searchsorted(positions, (start + 1, stop))
            places += [(int(at), paragraph) for at in positions[low:high]]
        if not places:
            return []
        chosen = rng.choice(len(places), size=min(count, len(places)), replace=False)
        return sorted(places[i] for i in chosen)


class Mixture:
    """Draws sequences."""

    def __init__(self, data: Path, *, seed: int) -> None:
        """``data``: the folder that ``prepare`` wrote."""
        merges = load(data / "merges.json")
        self.encoder: tokenizers.Tokenizer = from_merges(merges)
        pieces = token_bytes(merges)
        arrays = np.load(data / "tokens.npz")
        self.text = Stream(arrays["train"], pieces)
        self.filler = Stream(arrays["filler"], pieces)
        self.end = end_id(merges)
        self._seed = seed
        self._sorts: dict[str, Callable[[Piece, int, np.random.Generator], None]] = {
            "text": self._add_text, "recall": self._add_recall, "repeat": self._add_repeat,
            "pairs": self._add_pairs, "copy": self._add_copy,
        }  # fmt: skip

    def sequence(self, index: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, int64 [size], and the weight of each as a target, float32 [size]."""
        rng = np.random.default_rng((self._seed, index))
        piece = Piece()
        if rng.random() < LONG_RECALL:
            self._add_recall(piece, size, rng)
        while piece.size < size:
            left = size - piece.size
            sort = SORTS[rng.choice(len(SORTS), p=SORT_WEIGHTS)]
            self._sorts[sort](piece, min(left, int(np.exp(rng.uniform(np.log(256), np.log(max(257, size)))))), rng)
        return np.concatenate(piece.ids)[:size].astype(np.int64), np.concatenate(piece.weights)[:size]

    def batch(self, index: int, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """``count`` sequences: [count, size] tokens and weights."""
        rows = [self.sequence(index * count + row, size) for row in range(count)]
        return np.stack([ids for ids, _ in rows]), np.stack([weights for _, weights in rows])

    def encode(self, text: str) -> list[int]:
        """The tokens of a piece of text that begins and ends where tokens do."""
        ids: list[int] = self.encoder.encode(text, add_special_tokens=False).ids
        return ids

    def _add_text(self, piece: Piece, size: int, rng: np.random.Generator) -> None:
        start, stop = self.text.window(size, rng)
        piece.add(self.text.ids[start:stop], 1.0)

    def _add_recall(self, piece: Piece, size: int, rng: np.random.Generator) -> None:
        words = Random(int(rng.integers(1 << 62)))
        questions = 1 if words.random() < 0.6 else words.randrange(2, 9)
        count = max(questions, int(np.exp(rng.uniform(0.0, np.log(max(2.0, min(size / 40, 120)))))))
        facts = recall.draw_facts(count, words)
        restated = [words.randrange(count) for _ in range(words.randrange(1 + count))]
        stream = self.text if rng.random() < NATURAL_FILLER else self.filler
        room = size - 22 * (count + len(restated)) - 45 * questions
        start, stop = stream.window(max(64, room), rng)
        known: list[recall.Fact] = []
        waiting = list(facts)
        # Each gap states a new fact or, now and then, one that was stated before.
        gaps = stream.gaps(start, stop, count + len(restated), rng)
        at = start
        for left, (position, paragraph) in zip(range(len(gaps), 0, -1), gaps, strict=True):
            piece.add(stream.ids[at:position], 1.0 if stream is self.text else 0.2)
            at = position
            if waiting and (not known or words.random() < len(waiting) / left):
                known.append(waiting.pop())
                self._add_fact(piece, known[-1], paragraph, again=False)
            else:
                self._add_fact(piece, words.choice(known), paragraph, again=True)
        piece.add(stream.ids[at:stop], 1.0 if stream is self.text else 0.2)
        if known:
            piece.add(self.encode("\n\n"), 0.0)
            self._add_questions(piece, [words.choice(known) for _ in range(questions)])

    def _add_fact(self, piece: Piece, fact: recall.Fact, paragraph: bool, *, again: bool) -> None:
        before, after = ("", "\n\n") if paragraph else (" ", "")
        piece.add(self.encode(before + fact.lead), 0.0)
        piece.add(self.encode(fact.value), ANSWER_WEIGHT if again else 0.0)
        piece.add(self.encode("." + after), 0.2)

    def _add_questions(self, piece: Piece, facts: Sequence[recall.Fact]) -> None:
        for number, fact in enumerate(facts):
            piece.add(self.encode(("\n" if number else "") + fact.question), 0.0)
            piece.add(self.encode(" " + fact.lead), 0.5)
            piece.add(self.encode(fact.value), ANSWER_WEIGHT)
            piece.add(self.encode("."), 1.0)
        piece.add([self.end], 1.0)

    def _add_repeat(self, piece: Piece, size: int, rng: np.random.Generator) -> None:
        length = int(rng.integers(32, max(33, min(1024, size // 2))))
        start, stop = self.text.window(length, rng)
        passage = self.text.ids[start:stop]
        piece.add(passage, 1.0)
        if size > 2 * length:
            self._add_text(piece, size - 2 * length, rng)
        piece.add(passage[:1], 0.0)
        piece.add(passage[1:], 1.0)

    def _add_pairs(self, piece: Piece, size: int, rng: np.random.Generator) -> None:
        words = Random(int(rng.integers(1 << 62)))
        count = min(200, max(2, size // 30))
        sign = words.choice((" =", ":", " ->"))
        pairs = [
            (f"{words.choice(ADJECTIVES)} {noun}", self._value(words))
            for noun in words.sample(NOUNS, min(count, len(NOUNS)))
        ]
        for again in (False, True):
            for key, value in pairs:
                piece.add(self.encode(key + sign), 0.0)
                piece.add(self.encode(value), ANSWER_WEIGHT if again else 0.0)
                piece.add(self.encode("\n"), 0.2)
            words.shuffle(pairs)
        piece.add([self.end], 0.0)

    def _value(self, words: Random) -> str:
        return f" {words.randrange(10 ** words.randrange(1, 7))}" if words.random() < 0.6 else " " + words.choice(NAMES)

    def _add_copy(self, piece: Piece, size: int, rng: np.random.Generator) -> None:
        words = Random(int(rng.integers(1 << 62)))
        pool = NOUNS if words.random() < 0.5 else [str(words.randrange(10_000)) for _ in range(300)]
        ids = self.encode("".join(" " + words.choice(pool) for _ in range(min(300, size // 4))))
        piece.add(self.encode("Copy:"), 0.0)
        piece.add(ids, 0.0)
        piece.add(self.encode("\nAgain:"), 0.0)
        piece.add(ids[:3], 0.0)
        piece.add(ids[3:], 1.0)
        piece.add(self.encode("\n"), 0.2)
        piece.add([self.end], 0.0)
