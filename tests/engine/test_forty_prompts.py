"""At temperature 0 no drafter, and no mix of them, changes a token or a bit of what forty prompts are followed by.

Each text is compared with that of an engine without drafters and of the same residency. ``KVS_TEST_LONG=1`` takes all
prompts and also SmolLM2; without it the small models get a few.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvs_core.device.host.device import HostDebug
from kvs_core.engine.budget import NO_DRAFTING, Drafting
from kvs_core.engine.checkpoints import Checkpoints
from kvs_core.engine.session import Session
from kvs_core.settings.drafters import (
    DRAFTERS,
    MODEL_DRAFTERS,
    ModelDraftSettings,
    NgramMapSettings,
    NgramModSettings,
    NgramSimpleSettings,
    SpeculativeSettings,
)
from kvs_core.speculative.ngram import ngram_drafters
from tests.engine.prompts import FORTY
from tests.engine.tiny import engine, kv_settings
from tests.engine.written import FOR_LONG, LONG, Counting, Model, Rounds, read, write

LOGGER = logging.getLogger(__name__)

NGRAMS = tuple(name for name in DRAFTERS if name not in MODEL_DRAFTERS)
MIXES = [
    *((name,) for name in DRAFTERS), NGRAMS, ("ngram-mod", "draft-resident"), ("ngram-simple", "draft-mtp"),
    MODEL_DRAFTERS, DRAFTERS,
]
SIZES = (7, 48, 3, 12, 64, 5, 20, 33)   # tokens that n-gram drafters draft at most, by prompt

SOME: dict[str, tuple[int, ...]] = {"tiny": (20, 27, 33), "demo": (25, 35), "smollm2": ()}
"""Prompts of each model, if not all are taken."""


def mixes(model: Model) -> list[tuple[str, ...]]:
    """Without what needs an MTP block, if there is none."""
    able = {tuple(name for name in types if model.has_nextn or name != "draft-mtp") for types in MIXES}
    return sorted(able - {()}, key=lambda types: (len(types), types))


def speculative(types: tuple[str, ...], number: int) -> SpeculativeSettings:
    """Drafters that match little, so that they draft often and are wrong at any place; lengths go by the prompt."""
    most, least = SIZES[number % len(SIZES)], 2 + number % 2
    return SpeculativeSettings(
        types=types, ngram_simple=NgramSimpleSettings(least, most), ngram_map_k=NgramMapSettings(least, most, 1),
        ngram_map_k4v=NgramMapSettings(least, most, 1), ngram_mod=NgramModSettings(least, 1, most),
        draft=ModelDraftSettings(n_max=1 + number % 7), adaptive=set(MODEL_DRAFTERS) <= set(types) or number % 4 == 3,
    )


@contextmanager
def session_of(path: Path, streamed: bool, drafting: Drafting) -> Iterator[Session]:
    """A session that can go back to the end of its prompt. If streamed, from the smallest pool that there is."""
    with engine(
        path, kv=kv_settings(), pool=0.0 if streamed else None, fixed=True, ubatch=96, context=4096, drafting=drafting,
        debug=HostDebug(poison=True),
    ) as built:
        yield Session(built, Checkpoints(4, 1 << 30))
        assert (built.report().h2d_bytes > 0) == streamed


@pytest.mark.parametrize("streamed", [pytest.param(False, marks=FOR_LONG), True], ids=["resident", "streamed"])
@pytest.mark.parametrize("name", SOME)
def test_every_drafter_writes_what_is_written_without(
    name: str, streamed: bool, request: pytest.FixtureRequest
) -> None:
    """Tokens, logits and log-probabilities, bit for bit, whoever drafts; and everyone drafts."""
    model = Model(name)
    numbers: Sequence[int] = range(FORTY) if LONG else SOME[name]
    if not numbers:
        pytest.skip("with KVS_TEST_LONG=1 alone")
    count = 16 if name == "smollm2" else 40 if LONG else 20
    path = model.path(request)
    prompts = model.prompts(path, numbers)
    with session_of(path, streamed, NO_DRAFTING) as session:
        plain = {
            number: write(session, model.sampler(session, number), read(session, tokens), count)
            for number, tokens in prompts.items()
        }

    rounds, drafted, accepted = Rounds(), Counter[str](), Counter[str]()
    others: list[tuple[int, tuple[str, ...]]] = []
    with session_of(path, streamed, Drafting(nextn=model.has_nextn, resident=True)) as session:
        for number, tokens in prompts.items():
            logits = read(session, tokens)
            for types in mixes(model):
                assert session.keep_common([*tokens, 0]) == len(tokens)
                told, sampler = speculative(types, number), model.sampler(session, number)
                drafters = ngram_drafters(told, n_vocab=session.engine.spec.n_vocab)
                speculation = Counting(session.engine, told, sampler, drafters, rounds)
                if write(session, sampler, logits, count, speculation) != plain[number]:
                    others.append((number, types))
                for drafter, stats in speculation.stats.items():
                    drafted[drafter] += stats.drafted_tokens
                    accepted[drafter] += stats.accepted_tokens
    by_rows = Counter[int]()
    for (rows, _), times in rounds.items():
        by_rows[rows] += times
    LOGGER.info(
        "%s, streamed %s: %d texts; drafted %s, accepted %s; rounds by rows %s", name, streamed,
        len(prompts) * len(mixes(model)), dict(drafted), dict(accepted), sorted(by_rows.items()),
    )
    assert others == []
    able = {drafter for types in mixes(model) for drafter in types}
    assert set(+drafted) == able
    assert name == "tiny" or set(+accepted) == able   # random weights repeat little
