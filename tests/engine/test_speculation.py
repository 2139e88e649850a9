"""Speculation changes no bit: texts, logits, keys, values and states are those of a run that never drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvs_core.demo import DEMO_MODEL
from kvs_core.device.host.device import HostDebug
from kvs_core.engine.budget import Drafting
from kvs_core.engine.round import accept_prompt, generate
from kvs_core.engine.session import Session
from kvs_core.engine.speculation import MOST_DRAFTED, make_speculation
from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.sampling.chain import Pick, Sampler
from kvs_core.sampling.params import SamplingParams
from kvs_core.settings.drafters import (
    MODEL_DRAFTERS,
    ModelDraftSettings,
    NgramMapSettings,
    NgramModSettings,
    NgramSimpleSettings,
    SpeculativeSettings,
)
from kvs_core.speculative.drafter import DraftStats
from kvs_core.speculative.verifier import Row
from tests.engine.machines import MACHINES, Machine, machine_of
from tests.engine.rounds import PREFILL, ROUNDS, Left, Round, play_rounds
from tests.engine.test_exact import hostile
from tests.engine.tiny import engine, kv_settings, text
from tests.sampling.vocabs import LetterVocab
from tests.support.examples import examples
from tests.support.tiny_gguf import write_tiny_qwen35

HARBOUR = Path(__file__).parents[1] / "data" / "harbour.txt"

NGRAMS = [("ngram-simple",), ("ngram-map-k",), ("ngram-map-k4v",), ("ngram-mod",), ("ngram-cache",)]
RESIDENT = [("draft-resident",), ("ngram-mod", "draft-resident")]
MTP = [("draft-mtp",), ("draft-mtp", "draft-resident"), ("ngram-simple", "draft-mtp")]

GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 0.8, "seed": 7}
FEW = (20, 40, 60, 80)
OF_FEW = {"logit_bias": tuple((token, 60.0) for token in FEW)}   # text that repeats itself


def speculative(types: tuple[str, ...], **others: Any) -> SpeculativeSettings:
    """Drafters that match two tokens, so that they draft often and are often wrong."""
    return SpeculativeSettings(
        types=types, ngram_simple=NgramSimpleSettings(2, 5), ngram_map_k=NgramMapSettings(2, 6, 1),
        ngram_map_k4v=NgramMapSettings(4, 2, 1), ngram_mod=NgramModSettings(2, 1, 9), **others,
    )


class Watching(Sampler):
    """A sampler that keeps the bits of all that it is asked to pick from."""

    def __init__(self, params: SamplingParams, n_vocab: int) -> None:
        super().__init__(params, n_vocab=n_vocab, vocab=LetterVocab(n_vocab), eog_ids=())
        self.seen: list[bytes] = []

    def pick(self, source: Row) -> Pick:
        rows = source if isinstance(source, np.ndarray) else np.concatenate([source.ids, source.logits])
        self.seen.append(rows.tobytes())
        return super().pick(source)


@dataclass(frozen=True)
class Written:
    """A text: its tokens, the bits of the logits that each was picked from, and of all log-probabilities."""

    tokens: list[int]
    logits: list[bytes]
    probs: list[object]
    stats: dict[str, DraftStats]
    h2d_bytes: int

    @property
    def drafted(self) -> int:
        return sum(stats.drafted_tokens for stats in self.stats.values())

    @property
    def accepted(self) -> int:
        return sum(stats.accepted_tokens for stats in self.stats.values())

    def is_that_of(self, other: Written) -> bool:
        return (self.tokens, self.logits, self.probs) == (other.tokens, other.logits, other.probs)


def write(
    path: Path, prompt: Sequence[int], told: SpeculativeSettings, *, count: int = 30, params: dict[str, Any] = GREEDY,
    n_probs: int = 1, pool: float | None = None, ring: int = 0, context: int = 512,
) -> Written:
    """``count`` tokens behind ``prompt``, with these drafters.   n_probs 0: the sampler gets what it needs alone"""
    kv, drafting = kv_settings(ring_slots=ring), Drafting.of(told.types)
    debug = hostile(len(prompt)) if ring else HostDebug(poison=True)
    with engine(
        path, kv=kv, pool=pool, fixed=True, lower=True, drafting=drafting, context=context, debug=debug
    ) as built:
        session = Session(built)
        logits = session.prefill(prompt)[0]
        sampler = Watching(SamplingParams(**params), built.spec.n_vocab)
        accept_prompt(sampler, prompt)
        speculation = make_speculation(built, told, sampler, ())
        tokens = list(generate(
            session, sampler, logits, n_predict=count, eog_ids=frozenset(), n_probs=n_probs, speculation=speculation,
        ))
        ids = [token.id for token in tokens]
        assert session.tokens == [*prompt, *ids[:-1]]
        assert built.committed == len(session.tokens)
        return Written(
            ids, sampler.seen, [token.probs for token in tokens], {} if speculation is None else speculation.stats,
            built.report().h2d_bytes,
        )


NONE = SpeculativeSettings()


TEXTS: dict[object, Written] = {}
"""Of runs without drafts."""


def plain(path: Path, prompt: Sequence[int], **others: Any) -> Written:
    """The text without drafts, all resident."""
    key = (path, len(prompt), repr(others))
    if key not in TEXTS:
        TEXTS[key] = write(path, prompt, NONE, **others)
    return TEXTS[key]


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    ("model", "types"),
    [("qwen35", types) for types in [*NGRAMS, *RESIDENT, *MTP]]
    + [(model, types) for model in ("llama", "gemma3", "gemma4") for types in [*NGRAMS, *RESIDENT]],
    ids=str,
)
def test_the_text_is_that_without_drafts(
    tiny_models: dict[str, Path], model: str, types: tuple[str, ...], params: dict[str, Any]
) -> None:
    """Tokens, raw logits and probabilities to the last bit, at temperature 0 and with a seed; resident, and streamed
    from pools and through rings of several sizes."""
    path = tiny_models[model]
    by_ngram = types[0] not in MODEL_DRAFTERS
    params = params | (OF_FEW if by_ngram else {})
    setups: list[tuple[float | None, int, bool]] = [(0.15, 5, True)]
    if params["temperature"] == 0.0:
        setups = [(0.0, 0, False)] if by_ngram else [(None, 0, False), (0.0, 0, False), *setups]
    prompt = [*text(256, 200), *(FEW[token] for token in text(len(FEW), 200))]
    expected = plain(path, prompt, params=params)
    for pool, ring, adaptive in setups:
        found = write(path, prompt, speculative(types, adaptive=adaptive), params=params, pool=pool, ring=ring)
        assert found.is_that_of(expected), (pool, ring)
        assert (found.h2d_bytes > 0) == (pool is not None)
        assert found.drafted > 0


@pytest.fixture(scope="module")
def prose() -> list[int]:
    """English, with a part of it twice."""
    tokenizer = Tokenizer.from_metadata(GgufFile.open(DEMO_MODEL).metadata, source="demo")
    tokens = list(tokenizer.encode(HARBOUR.read_text()))
    return [*tokens[:180], *tokens[130:180], *tokens[130:150]]


@pytest.mark.parametrize("types", [("ngram-simple",), ("ngram-cache",), *RESIDENT[:1], *MTP], ids=str)
def test_the_demo_model_writes_the_same(prose: list[int], types: tuple[str, ...]) -> None:
    """The same on the demo model, whose drafts are often right."""
    for params, pool, n_max in ((GREEDY, 0.0, 7), (DRAWN, 0.1, 3)):
        expected = plain(DEMO_MODEL, prose, params=params, count=30)
        told = speculative(types, adaptive=False, draft=ModelDraftSettings(n_max=n_max))
        found = write(DEMO_MODEL, prose, told, params=params, pool=pool, count=30)
        assert found.is_that_of(expected), (params, pool, n_max)
        if params is GREEDY:
            assert found.accepted > 1


def test_the_sampler_gets_what_it_needs_in_every_row(prose: list[int]) -> None:
    """The same where rows are the largest logits alone, as they are unless log-probabilities are asked for."""
    expected = plain(DEMO_MODEL, prose, count=30, n_probs=0)
    found = write(DEMO_MODEL, prose, speculative(("draft-mtp",), adaptive=False), count=30, n_probs=0)
    assert found.is_that_of(expected)
    assert expected.tokens == plain(DEMO_MODEL, prose, params=GREEDY, count=30).tokens
    assert found.accepted > 1


def test_drafts_on_resident_pages_are_right_where_all_is_resident(tiny_models: dict[str, Path]) -> None:
    """Then a draft attends to everything, and at temperature 0 each is the target's own token: rounds of 1 + n."""
    for path in tiny_models.values():
        told = speculative(("draft-resident",), adaptive=False, draft=ModelDraftSettings(n_max=5))
        found = write(path, text(256, 200), told, count=37)
        assert found.drafted == found.accepted == 30
        assert found.stats["draft-resident"].drafts == 6


@pytest.mark.parametrize("left", [1, 2, 3, 5, 9])
def test_a_context_is_filled_to_its_end(tiny_qwen35: Path, left: int) -> None:
    """No draft reaches beyond the context, nor beyond the tokens asked for; the text ends where it does without."""
    prompt = text(256, 256 - left)
    for count in (-1, left // 2 + 1):
        expected = write(tiny_qwen35, prompt, NONE, context=256, count=count)
        told = speculative(("draft-resident",), adaptive=False, draft=ModelDraftSettings(n_max=7))
        assert write(tiny_qwen35, prompt, told, context=256, count=count).is_that_of(expected)
        assert len(expected.tokens) == (left if count < 0 else count)


# Rounds of any kind, whose rejections leave no trace.

BOTH = Drafting(nextn=True, resident=True)


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.sampled_from(["qwen35", "qwen35moe", "llama", "gemma3", "gemma4"]),
    prompt=st.integers(1, 330), rounds=ROUNDS,
    pool=st.sampled_from([None, 0.0, 0.2]), ring=st.sampled_from([0, 1, 4]), seed=st.integers(0, 99),
)
@example(
    model="gemma3", prompt=315, pool=0.0, ring=0, seed=1,
    rounds=[Round("", 8, 8, 8), Round("resident", 8, 8, 8), Round("", 8, 8, 1), Round("resident", 8, 1, 0)] * 2,
)
@example(
    model="qwen35", prompt=315, pool=0.0, ring=0, seed=1,
    rounds=[Round("next", 8, 8, 8), Round("resident", 8, 8, 8), Round("next", 8, 8, 1), Round("resident", 8, 1, 0)] * 2,
)
def test_rejections_leave_no_trace(
    tiny_models: dict[str, Path], model: str, prompt: int, rounds: list[Round], pool: float | None, ring: int, seed: int
) -> None:
    """Whatever was drafted, by whom, and how much of it was taken back: keys and values, the MTP block's among them,
    recurrent states, and all that is computed next are those of a run of the kept rows alone."""
    path, drafting = tiny_models[model], BOTH if model.startswith("qwen35") else Drafting(resident=True)
    if not drafting.nextn:
        rounds = [Round("", *_rest(each)) if each.kind == "next" else each for each in rounds]
    kv = kv_settings(ring_slots=ring)
    debug = HostDebug(poison=True)
    with engine(path, kv=kv, pool=pool, fixed=True, lower=True, drafting=drafting, debug=debug) as built:
        found = Left.by(built, play_rounds(built, prompt, rounds, seed, drafting=True))
    with engine(path, kv=kv_settings(residency_mode="resident"), drafting=drafting) as built:
        found.check(Left.by(built, play_rounds(built, prompt, rounds, seed, drafting=False)))


def _rest(each: Round) -> tuple[int, int, int, bool, bool]:
    return each.drafts, each.rows, each.keep, each.left_open, each.prefill


SCRIPT = [
    Round("next", 3, 4, 2), Round("resident", 3, 4, 4), Round("next", 5, 4, 1), Round("resident", 1, 1, 0, True),
    Round("", 1, 3, 3, prefill=True), Round("next", 1, 4, 0), Round("resident", 2, 4, 3),
]


@pytest.fixture(scope="module", params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Machine:
    """See ``MACHINES``."""
    return machine_of(request.param)


@pytest.fixture(scope="module")
def tiny_mtp(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recurrent layer, one of attention and an MTP block; larger on a GPU."""
    path = tmp_path_factory.mktemp("mtp") / "qwen35.gguf"
    if machine.on_gpu:
        return write_tiny_qwen35(path, seed=1)
    return write_tiny_qwen35(
        path, seed=1, n_layer=2, interval=2, embd=32, heads=2, kv_heads=1, head_dim=64, ffn=32, ssm_state=32,
        ssm_k_heads=1, ssm_v_heads=2,
    )


def test_rejections_leave_no_trace_on_cuda(machine: Machine, tiny_mtp: Path) -> None:
    """The same on captured steps, streamed against resident."""
    drafting = machine.choose(Drafting(nextn=True), BOTH)   # without a head to keep the context may be shorter
    cases = machine.choose([(188, SCRIPT, 0)], [(prompt, SCRIPT * 3, prompt) for prompt in range(255, 275, 3)])
    for prompt, script, seed in cases:
        outcome = []
        for pool in (0.05, None):   # the first streams, but nothing of the MTP block
            with engine(
                tiny_mtp, kv=kv_settings(ring_slots=1), pool=pool, fixed=True, ubatch=32, drafting=drafting,
                device=machine.device,
            ) as built:
                outcome.append(Left.by(built, play_rounds(built, prompt, script, seed, drafting=pool is not None)))
                assert (built.report().h2d_bytes > 0) == (pool is not None)
        outcome[0].check(outcome[1])
        assert outcome[0].drafts


# What moves.

@pytest.mark.parametrize("kind", ["", "next", "resident"])
def test_a_rejection_moves_nothing(tiny_qwen35: Path, kind: str) -> None:
    """With all pages resident, rows are drafted, run and taken back, over page ends too, without a byte on the way."""
    with engine(tiny_qwen35, kv=kv_settings(residency_mode="resident"), drafting=BOTH) as built:
        with built.step(text(256, 61), PREFILL) as step:
            step.settle()
        built._kv.drain()
        before = built._device.counters()
        for keep in (0, 1, 0, 1, 0):   # 61 + 2 tokens: the page that ends at 64 is never full
            with built.open(8) as step:
                for token in range(7 if kind else 0):
                    (step.draft_next if kind == "next" else step.draft_resident)(token)
                step.run(range(8))
                step.settle(keep)
        after = built._device.counters()
        assert built.committed == 63
        assert (after.copy_bytes, after.copy_calls) == (before.copy_bytes, before.copy_calls) == (0, 0)
        assert after.publish_bytes == before.publish_bytes > 0


def test_drafts_on_resident_pages_leave_the_link_alone(tiny_llama: Path) -> None:
    """A streamed context: drafts copy nothing, the step behind them streams what one without drafts streams."""
    with engine(
        tiny_llama, kv=kv_settings(), pool=0.0, fixed=True, drafting=Drafting(resident=True)
    ) as built:
        for at in range(5):
            with built.step(text(256, 64, at), PREFILL) as step:
                step.settle()
        moved = []
        for drafts in (0, 0, 7, 0, 7):
            start = built.report().h2d_bytes
            with built.open(8) as step:
                opened = built.report().h2d_bytes
                for token in range(drafts):
                    step.draft_resident(token)
                assert built.report().h2d_bytes == opened
                step.run([5])
                step.settle(0)
            moved.append(built.report().h2d_bytes - start)
        assert moved[1:] == [moved[1]] * 4
        assert moved[1] == built.report().stats.streamed_pages_per_step * built.geometry.page_bytes > 0


def test_drafts_have_their_place(tiny_qwen35: Path) -> None:
    """Drafts come before the step runs, of one kind, and no more than it has rows; the step runs once."""
    with engine(tiny_qwen35, kv=kv_settings(), drafting=BOTH) as built:
        with built.step(text(256, 10), PREFILL) as step:
            step.settle()
        with built.open(2) as step:
            step.draft_next(1)
            with pytest.raises(AssertionError, match="two kinds"):
                step.draft_resident(1)
            step.draft_next(2)
            with pytest.raises(AssertionError, match="3 drafts in a step of 2 rows"):
                step.draft_next(3)
            with pytest.raises(AssertionError, match="not run"):
                step.settle()
            step.run([1])
            with pytest.raises(AssertionError, match="before the step runs"):
                step.draft_next(1)
            with pytest.raises(AssertionError, match="runs once"):
                step.run([1])
            step.settle()
        assert built.committed == 11
        assert MOST_DRAFTED == 7
