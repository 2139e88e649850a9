"""A target that writes a text known beforehand: how fast are drafters on that text, with a model of random weights?

Every step is run and costs what it costs; only the verdict is taken from the text. An n-gram draft is accepted as far
as it is the text. The MTP block's guesses mean nothing here, so a draft of its own is accepted as far as the text's
tokens are ones that such a block guesses: each is with probability 0.9, by dice that do not depend on who drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from benchmarks.gpu.runs import tokens_of
from kvs_core.engine.engine import Engine
from kvs_core.engine.round import generate
from kvs_core.engine.session import Session
from kvs_core.engine.speculation import make_speculation
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.sampling.chain import Sampler
from kvs_core.sampling.params import SamplingParams
from kvs_core.settings.drafters import MODEL_DRAFTERS, SpeculativeSettings
from kvs_core.speculative.drafter import Draft
from kvs_core.speculative.verdict import Verdict
from kvs_core.speculative.verifier import Row

GUESSED = 0.9   # of a text's tokens


class GivenText:
    """A ``Judge`` whose target writes ``text``."""

    def __init__(self, text: Sequence[int], seed: int = 0) -> None:
        self._text = list(text)
        self._guessed = np.random.default_rng(seed).random(len(self._text)) < GUESSED
        self._written = 0

    def judge(self, draft: Draft, rows: Sequence[Row], sampler: Sampler) -> Verdict:
        """See ``Judge``."""
        made: list[int] = []
        for index, row in enumerate(rows):
            sampler.pick(row)   # a part of what a round costs
            token, guessed = self._text[self._written], bool(self._guessed[self._written])
            made.append(token)
            self._written += 1
            if index == len(draft):
                break
            if not (guessed if draft.source in MODEL_DRAFTERS else draft.tokens[index] == token):
                break
        return Verdict(tuple(made), synthetic=True)


def tokens_per_s(
    engine: Engine, vocab: Tokenizer, settings: SpeculativeSettings, before: Sequence[int], text: Sequence[int]
) -> dict[str, float]:
    """Tokens a second of ``text`` with these drafters, who know that ``before`` stands before it: by the host's clock,
    from a quarter of the text on, when what is recorded on first use has been recorded."""
    session = Session(engine)
    history = tokens_of(engine, engine.committed)
    history[-len(before) :] = before
    session.tokens = history.tolist()
    sampler = Sampler(SamplingParams(temperature=0.0, seed=1), n_vocab=engine.spec.n_vocab, vocab=vocab, eog_ids=())
    speculation = make_speculation(engine, settings, sampler, ())
    assert speculation is not None
    speculation._judge = GivenText(text[1:])
    first = np.zeros(engine.spec.n_vocab, np.float32)
    first[text[0]] = 1.0
    skipped = len(text) // 4
    start, rounds = 0.0, 0
    for number, token in enumerate(generate(
        session, sampler, first, n_predict=len(text) - 80, eog_ids=frozenset(), speculation=speculation
    )):
        assert token.id == text[number]
        if number == skipped:
            start, rounds = perf_counter(), speculation.rounds
    taken = perf_counter() - start
    drafted = {name: each.drafted_tokens for name, each in speculation.stats.items()}
    accepted = {name: each.accepted_tokens for name, each in speculation.stats.items()}
    return {"tokens_per_s": (number - skipped) / taken, "rounds": speculation.rounds - rounds,
            **{f"{name} drafted": count for name, count in drafted.items()},
            **{f"{name} accepted": count for name, count in accepted.items()}}
