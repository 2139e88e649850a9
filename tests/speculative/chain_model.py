"""A target for tests: logits that depend on the last two tokens, and text from it with and without drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvs_core.sampling.candidates import Candidates, Logits
from kvs_core.sampling.chain import Sampler
from kvs_core.sampling.params import SamplingParams
from kvs_core.speculative.drafter import Draft
from kvs_core.speculative.verifier import Judge, Row
from tests.sampling.vocabs import LetterVocab

Drafting = Callable[[Sequence[int]], Draft]


def sampler_of(n_vocab: int, *, eog_ids: tuple[int, ...] = (), **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), n_vocab=n_vocab, vocab=LetterVocab(n_vocab), eog_ids=eog_ids)


class ChainModel:
    """Logits [V] after a text: fixed random ones for each of its last two tokens."""

    def __init__(self, n_vocab: int, seed: int, *, spread: float = 1.5) -> None:
        self.n_vocab = n_vocab
        self._table = np.random.default_rng(seed).normal(0, spread, (n_vocab, n_vocab, n_vocab)).astype(np.float32)

    def logits(self, text: Sequence[int]) -> Logits:
        return self._table[text[-2], text[-1]]

    def row(self, text: Sequence[int], sampler: Sampler) -> Row:
        """What an engine hands on: the ``enough`` largest logits where these decide."""
        logits = self.logits(text)
        if sampler.enough is None:
            return logits
        return Candidates(np.arange(self.n_vocab, dtype=np.int32), logits, is_full=True).top(sampler.enough)

    def plain(self, text: Sequence[int], count: int, sampler: Sampler, eog_ids: Sequence[int] = ()) -> list[int]:
        """``count`` tokens behind ``text``, or fewer up to an end token."""
        made: list[int] = []
        while len(made) < count:
            token = sampler.pick(self.row([*text, *made], sampler)).token
            sampler.accept(token)
            made.append(token)
            if token in eog_ids:
                break
        return made

    def speculative(
        self, text: Sequence[int], count: int, sampler: Sampler, judge: Judge, drafting: Drafting,
        eog_ids: Sequence[int] = (),
    ) -> list[int]:
        """The same, by rounds of drafts."""
        made: list[int] = []
        while len(made) < count:
            history = [*text, *made]
            draft = drafting(history).head(count - len(made) - 1)
            rows = [self.row([*history, *draft.tokens[:index]], sampler) for index in range(1 + len(draft))]
            made += judge.judge(draft, rows, sampler).tokens
            if made[-1] in eog_ids:
                break
        return made
