"""A verification of any width, of which any number of rows is kept, changes no bit of the text.

The drafts are of one who knows what will come. ``KVS_TEST_LONG=1`` takes larger models too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest

from kvs_core.device.host.device import HostDebug
from kvs_core.engine.budget import NO_DRAFTING, Drafting
from kvs_core.engine.session import Session
from kvs_core.settings.drafters import SpeculativeSettings
from kvs_core.speculative.drafter import NO_DRAFT, Draft
from kvs_core.speculative.text import Text
from kvs_core.speculative.verdict import Verdict
from tests.engine.tiny import engine, kv_settings
from tests.engine.written import LONG, Counting, Model, Rounds, read, write

WIDEST = 65
"""Rows of the widest verification."""

WIDE = ((65, 65), (65, 1), (64, 2), (48, 1), (33, 33), (24, 3), (17, 17), (16, 12), (9, 9), (9, 1))
WANTED = [
    *(pair for pair in WIDE if pair[0] <= WIDEST),
    *((rows, kept) for rows in range(8, 0, -1) for kept in range(rows, 0, -1)),
]
"""Rows of a verification, and how many of them are kept: of narrow ones any number."""

COUNT = sum(kept for _, kept in WANTED) + 1


@dataclass(frozen=True)
class Size:
    """Sizes at which a wide step finds room: in a pool of all pages without moving any, in one of that share by taking
    the place of pages."""

    context: int
    share: float
    prompts: range   # one behind the other


SIZES = {
    "tiny": Size(4096, 0.65, range(33, 38)), "demo": Size(6144, 0.93, range(32, 40)),
    "smollm2": Size(1536, 0.5, range(34, 36)),
}


class Knowing:
    """Drafts what will come, up to a token that is wrong: a round for each of ``WANTED``, then none."""

    name = "ngram-simple"

    def __init__(self, tokens: Sequence[int]) -> None:
        """``tokens``: the prompt and all that will come."""
        self._tokens = tokens
        self._wanted = iter(WANTED)

    def begin(self, prompt: Text) -> None:
        """It knows already."""

    def propose(self, text: Text, limit: int) -> Draft:
        """What is wanted next; see ``Drafter``."""
        rows, kept = next(self._wanted, (1, 1))
        right = self._tokens[text.size : text.size + rows - 1]
        wrong = [token - 1 if token else 1 for token in right[kept - 1 :]]
        return Draft((*right[: kept - 1], *wrong), self.name) if rows > 1 else NO_DRAFT

    def accept(self, verdict: Verdict, drafted: int) -> None:
        """Nothing is learnt."""


@contextmanager
def session_of(name: str, path: Path, streamed: bool, drafting: Drafting) -> Iterator[Session]:
    """A session of the size for that model. Large pages: the fewer make room for a wide step."""
    size = SIZES[name]
    with engine(
        path, kv=kv_settings("f32", "f32"), pool=size.share if streamed else None, fixed=True, ubatch=96,
        context=size.context, drafting=drafting, debug=HostDebug(poison=True),
    ) as built:
        yield Session(built)
        if drafting is not NO_DRAFTING:
            assert (built.report().h2d_bytes > 0) == streamed


@pytest.mark.parametrize("streamed", [False, True], ids=["resident", "streamed"])
@pytest.mark.parametrize("name", SIZES)
def test_every_width_writes_what_is_written_without(
    name: str, streamed: bool, request: pytest.FixtureRequest
) -> None:
    """Tokens, logits and log-probabilities, bit for bit; with all pages on the device, and where rows of a wide step
    take the place of pages, which are streamed then."""
    if name != "tiny" and not LONG:
        pytest.skip("with KVS_TEST_LONG=1 alone")
    model = Model(name)
    path = model.path(request)
    prompt = list(chain(*model.prompts(path, SIZES[name].prompts).values()))
    with session_of(name, path, streamed, NO_DRAFTING) as session:
        plain = write(session, model.sampler(session, 0), read(session, prompt), COUNT)
    rounds, drafter = Rounds(), Knowing([*prompt, *(each.token for each in plain)])
    with session_of(name, path, streamed, Drafting(nextn=model.has_nextn, resident=True)) as session:
        logits, sampler = read(session, prompt), model.sampler(session, 0)
        told = SpeculativeSettings((drafter.name,), adaptive=False)
        speculation = Counting(session.engine, told, sampler, [drafter], rounds)
        written = write(session, sampler, logits, COUNT, speculation)
    assert [at for at, (one, other) in enumerate(zip(written, plain, strict=True)) if one != other] == []
    assert rounds == Rounds(WANTED)
