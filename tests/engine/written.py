"""Texts with all the bits that they were made of, and the rounds they took, for tests of drafters."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvs_core.demo import DEMO_MODEL
from kvs_core.engine.engine import Engine
from kvs_core.engine.round import accept_prompt, generate
from kvs_core.engine.session import Session
from kvs_core.engine.speculation import Speculation
from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.sampling.chain import Pick, Sampler
from kvs_core.sampling.params import SamplingParams
from kvs_core.settings.drafters import SpeculativeSettings
from kvs_core.speculative.drafter import Drafter
from kvs_core.speculative.verdict import Verdict
from kvs_core.speculative.verifier import Row
from tests.engine.prompts import prompt
from tests.sampling.vocabs import LetterVocab

LONG = os.environ.get("KVS_TEST_LONG", "0") != "0"
FOR_LONG = pytest.mark.skipif(
    not (LONG or os.environ.get("KVS_TEST_GPU_ONLY")), reason="KVS_TEST_LONG is not set"
)
"""Cases that others stand for where time counts."""
TOP = 5
"""Log-probabilities that are kept of a token."""

FEW = (40, 60, 80, 101)

Rounds = Counter[tuple[int, int]]
"""Rounds by their rows, and by those of them that were kept."""


@dataclass(frozen=True, slots=True)
class Written:
    """A token, the bits of the logits that it was picked from, and those of its log-probability and the best ones."""

    token: int
    logits: bytes
    probs: bytes


class Hashing(Sampler):
    """A greedy sampler that keeps the bits of all that it picked from."""

    def __init__(self, n_vocab: int, **params: Any) -> None:
        super().__init__(
            SamplingParams(temperature=0.0, **params), n_vocab=n_vocab, vocab=LetterVocab(n_vocab), eog_ids=()
        )
        self.seen: list[bytes] = []

    def pick(self, source: Row) -> Pick:
        assert isinstance(source, np.ndarray)
        self.seen.append(sha256(source.tobytes()).digest())
        return super().pick(source)


class Counting(Speculation):
    """Counts its rounds."""

    def __init__(
        self, built: Engine, told: SpeculativeSettings, sampler: Sampler, drafters: Sequence[Drafter], rounds: Rounds
    ) -> None:
        super().__init__(built, told, sampler, drafters, ())
        self._counted = rounds

    def judge(self, rows: Sequence[Row], sampler: Sampler) -> Verdict:
        verdict = super().judge(rows, sampler)
        self._counted[len(rows), len(verdict.tokens)] += 1
        return verdict


@dataclass(frozen=True)
class Model:
    """A model under test: "tiny", of random weights, "demo" or "smollm2"."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def has_nextn(self) -> bool:
        """An MTP block."""
        return self.name != "smollm2"

    def path(self, request: pytest.FixtureRequest) -> Path:
        """Its file."""
        if self.name == "demo":
            return DEMO_MODEL
        path: Path = request.getfixturevalue("tiny_qwen35" if self.name == "tiny" else "smollm2_path")
        return path

    def prompts(self, path: Path, numbers: Sequence[int]) -> dict[int, list[int]]:
        """Of the forty, by number. The tiny model takes bytes for tokens; every other prompt is of a few alone, and so
        is what follows: with random weights else nothing repeats itself."""
        if self.name != "tiny":
            encode = Tokenizer.from_metadata(GgufFile.open(path).metadata, source=self.name).encode
            return {number: prompt(number, encode) for number in numbers}
        made = {number: prompt(number, lambda text: list(text.encode())) for number in numbers}
        return {
            number: [FEW[token % len(FEW)] for token in tokens] if number % 2 else tokens
            for number, tokens in made.items()
        }

    def sampler(self, session: Session, number: int) -> Hashing:
        """For the text behind that prompt."""
        few = self.name == "tiny" and number % 2 == 1
        return Hashing(
            session.engine.spec.n_vocab, **({"logit_bias": tuple((token, 60.0) for token in FEW)} if few else {})
        )


def read(session: Session, tokens: Sequence[int]) -> np.ndarray:
    """Run a prompt; the logits [V] behind it."""
    session.rewind(0)
    logits: np.ndarray = session.prefill(tokens)[0]
    return logits


def write(
    session: Session, sampler: Hashing, logits: np.ndarray, count: int, speculation: Speculation | None = None
) -> list[Written]:
    """``count`` tokens behind the prompt that the session has run, whose last one gave ``logits``."""
    accept_prompt(sampler, session.tokens)
    tokens = list(generate(
        session, sampler, logits, n_predict=count, eog_ids=frozenset(), n_probs=TOP, speculation=speculation,
    ))
    made = []
    for token, seen in zip(tokens, sampler.seen, strict=True):
        assert token.probs is not None
        best = [(each.id, each.logprob) for each in token.probs.top]
        assert len(best) == TOP
        made.append(Written(token.id, seen, np.array([(token.probs.id, token.probs.logprob), *best]).tobytes()))
    return made
