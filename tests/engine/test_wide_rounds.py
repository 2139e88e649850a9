"""Rounds with long drafts: verified at once where there is room, cut to it otherwise, and never another text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvs_core.engine.budget import Drafting
from kvs_core.engine.engine import Engine
from kvs_core.engine.round import accept_prompt, generate
from kvs_core.engine.session import Session
from kvs_core.engine.speculation import make_speculation
from kvs_core.engine.step import Step
from kvs_core.sampling.chain import Pick
from kvs_core.sampling.params import SamplingParams
from kvs_core.settings.drafters import ModelDraftSettings, NgramSimpleSettings, SpeculativeSettings
from kvs_core.speculative.drafter import DraftStats
from kvs_core.speculative.verifier import Row
from tests.engine.test_speculation import GREEDY, NONE, OF_FEW, Watching
from tests.engine.test_tiles import build
from tests.engine.tiny import text

PERIOD = tuple(range(20, 80))


class Reciting(Watching):
    """A sampler that picks the tokens of ``PERIOD``, again and again, whatever the logits are."""

    def __init__(self, params: SamplingParams, n_vocab: int) -> None:
        super().__init__(params, n_vocab)
        self._last = -1

    def accept(self, token: int) -> None:
        super().accept(token)
        self._last = token

    def pick(self, source: Row) -> Pick:
        at = (self._last - PERIOD[0] + 1) % len(PERIOD)
        return replace(super().pick(source), token=PERIOD[at])


RECITED = [*text(256, 280), *PERIOD * 2]


@dataclass(frozen=True)
class Written:
    """A text, the bits of the logits of each token, rows of every step that was opened, and counts."""

    tokens: list[int]
    logits: list[bytes]
    rows: list[int]
    stats: dict[str, DraftStats]
    rounds: int


def write(
    path: Path, prompt: Sequence[int], told: SpeculativeSettings, monkeypatch: pytest.MonkeyPatch, *, count: int = 100,
    params: dict[str, Any] | None = None, **others: Any,
) -> Written:
    """``count`` tokens behind ``prompt``, with these drafters; without ``params`` those of ``PERIOD``."""
    with build(path, Drafting.of(told.types), **others) as built, monkeypatch.context() as patch:
        session = Session(built)
        logits = session.prefill(prompt)[0]
        of_params = Reciting if params is None else Watching
        sampler = of_params(SamplingParams(**GREEDY, **(params or {})), built.spec.n_vocab)
        accept_prompt(sampler, prompt)
        speculation = make_speculation(built, told, sampler, ())
        rows = []

        def opened(self: Engine, wanted: int) -> Step:
            rows.append(wanted)
            return open_step(self, wanted)

        open_step = Engine.open
        patch.setattr(Engine, "open", opened)
        tokens = list(generate(
            session, sampler, logits, n_predict=count, eog_ids=frozenset(), n_probs=1, speculation=speculation,
        ))
        stats = {} if speculation is None else speculation.stats
        return Written(
            [token.id for token in tokens], sampler.seen, rows, stats, 0 if speculation is None else speculation.rounds
        )


def simple(*more: str, adaptive: bool = False, size_n: int = 2) -> SpeculativeSettings:
    """Drafts of 48 tokens behind any two that were seen before, and drafters behind that."""
    return SpeculativeSettings(
        types=("ngram-simple", *more), ngram_simple=NgramSimpleSettings(size_n, 48), adaptive=adaptive,
        draft=ModelDraftSettings(n_max=3),
    )


def test_a_draft_of_48_tokens_is_one_round(wide_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 49 rows; what is generated beyond it, and at the end of the text, takes the rest."""
    prompt = RECITED
    for path in wide_models.values():
        found = write(path, prompt, simple(), monkeypatch, count=1 + 49 + 49 + 20)
        assert found.tokens == list(PERIOD * 2)[:119]
        assert found.rows == [49, 49, 20]
        assert found.rounds == 3
        stats = found.stats["ngram-simple"]
        assert (stats.drafts, stats.drafted_tokens, stats.accepted_tokens) == (3, 48 + 48 + 19, 48 + 48 + 19)


def test_a_draft_is_cut_to_what_there_is_room_for(
    wide_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pool that can lend little, in ubatches that are small, at the end of a context; only what was verified
    counts."""
    prompt = RECITED
    for most, others in ((24, {"pool": 0.0}), (32, {"ubatch": 32}), (8, {"ubatch": 8}), (17, {"ubatch": 17})):
        found = write(wide_models["qwen35"], prompt, simple(), monkeypatch, **others)
        assert found.tokens == list(PERIOD * 2)[:100]
        assert found.rows[:3] == [most] * 3
        stats = found.stats["ngram-simple"]
        assert stats.drafted_tokens == stats.accepted_tokens == sum(found.rows) - len(found.rows)
        assert stats.drafts == stats.accept_calls == found.rounds == len(found.rows)
    found = write(wide_models["llama"], prompt, simple(), monkeypatch, context=512, count=-1)
    assert found.tokens == list(PERIOD * 2)[:112]
    assert found.stats["ngram-simple"].drafted_tokens == sum(found.rows) - len(found.rows)
    assert sum(found.rows) <= 112


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("more", [(), ("draft-mtp",), ("draft-mtp", "draft-resident")], ids=str)
def test_the_text_is_that_without_drafts(
    wide_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], adaptive: bool
) -> None:
    """Where long drafts are mostly wrong, and the model drafts where they have nothing: tokens and logits to the last
    bit, from a streamed pool."""
    few = dict(OF_FEW["logit_bias"])
    for seed in range(12):   # a random model writes something else on every kind of processor
        prompt = [*text(256, 300), *(list(few)[token] for token in text(len(few), 150, seed))]
        expected = write(wide_models["qwen35"], prompt, NONE, monkeypatch, params=OF_FEW)
        found = write(
            wide_models["qwen35"], prompt, simple(*more, adaptive=adaptive, size_n=3), monkeypatch, params=OF_FEW,
            pool=0.5,
        )
        assert (found.tokens, found.logits) == (expected.tokens, expected.logits)
        stats = found.stats["ngram-simple"]
        assert stats.accepted_tokens < stats.drafted_tokens
        if adaptive or (stats.accepted_tokens > 0 and 49 in found.rows):
            return
    pytest.fail("no long draft began with a right token")


def test_adaptive_drafts_grow_with_the_first_that_is_right(
    wide_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A usual step first; when all of its draft was right, as many tokens as there are."""
    prompt = RECITED
    found = write(wide_models["qwen35"], prompt, simple(adaptive=True), monkeypatch, count=1 + 8 + 49)
    assert found.rows == [8, 49]
