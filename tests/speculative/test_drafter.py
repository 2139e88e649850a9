"""The mix asks in its order, tells everyone, and counts; what a round can use is limited."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from kvs_core.errors import SettingsError
from kvs_core.sampling.candidates import Candidates
from kvs_core.settings.drafters import DRAFTERS, SpeculativeSettings
from kvs_core.speculative.drafter import NO_DRAFT, Draft, DrafterMix, draft_limit, verify_width
from kvs_core.speculative.ngram import ngram_drafters
from kvs_core.speculative.ngram_mod import NextTokens
from kvs_core.speculative.text import Text
from kvs_core.speculative.verdict import Verdict


@dataclass
class Scripted:
    """Drafts what it is told to, and writes down what it is told."""

    name: str
    tokens: tuple[int, ...] = ()
    candidates: tuple[Candidates, ...] = ()
    told: list[object] = field(default_factory=list)

    def begin(self, prompt: Text) -> None:
        self.told.append(("begin", prompt.tolist()))

    def propose(self, text: Text, limit: int) -> Draft:
        self.told.append(("propose", text.tolist(), limit))
        return Draft(self.tokens, self.name, self.candidates) if self.tokens else NO_DRAFT

    def accept(self, verdict: Verdict, drafted: int) -> None:
        self.told.append((verdict.tokens, drafted))


def test_the_first_draft_in_the_fixed_order_wins() -> None:
    """Whatever order the drafters are given in, n-gram types come first; who comes after the winner is not asked. All
    see the prompt and every outcome, and only the winner is told that the draft was its own."""
    mtp, cache, simple = (Scripted("draft-mtp", (5, 6)), Scripted("ngram-cache", (7,)), Scripted("ngram-simple"))
    mix = DrafterMix([mtp, cache, simple])
    mix.begin([1, 2])
    assert mix.propose([1, 2, 3], 9) == Draft((7,), "ngram-cache")
    mix.accept(Verdict((7, 8)))
    cache.tokens = ()
    assert mix.propose([1, 2, 3, 7, 8], 9) == Draft((5, 6), "draft-mtp")
    mix.accept(Verdict((4,)))
    first, second = ("propose", [1, 2, 3], 9), ("propose", [1, 2, 3, 7, 8], 9)
    assert simple.told == [("begin", [1, 2]), first, ((7, 8), 0), second, ((4,), 0)]
    assert cache.told == [("begin", [1, 2]), first, ((7, 8), 1), second, ((4,), 0)]
    assert mtp.told == [("begin", [1, 2]), ((7, 8), 0), second, ((4,), 2)]
    assert list(mix.stats) == ["ngram-simple", "ngram-cache", "draft-mtp"]


def test_the_order_is_llama_servers() -> None:
    """n-gram types in their order, then those that run the model."""
    assert DRAFTERS == ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache", "draft-mtp",
                        "draft-resident")


def test_a_draft_is_cut_to_what_can_be_used() -> None:
    """With its candidates; and nobody is asked where nothing can be used."""
    lone = Candidates(np.array([5], np.int32), np.zeros(1, np.float32))
    drafter = Scripted("draft-mtp", (5, 5, 5), (lone,) * 3)
    mix = DrafterMix([drafter])
    mix.begin([1])
    assert mix.propose([1, 2], 2) == Draft((5, 5), "draft-mtp", (lone, lone))
    mix.accept(Verdict((5, 5, 1)))
    drafter.told.clear()
    assert mix.propose([1, 2, 5, 5, 1], 0) == NO_DRAFT
    assert mix.propose([1, 2, 5, 5, 1], -3) == NO_DRAFT
    mix.accept(Verdict((3,)))
    assert drafter.told == [((3,), 0)]
    assert mix.stats["draft-mtp"].draft_calls == 1


def test_skipped_types_are_not_asked() -> None:
    """They still see what comes of the round."""
    simple, mtp = Scripted("ngram-simple", (1,)), Scripted("draft-mtp", (2,))
    mix = DrafterMix([simple, mtp])
    mix.begin([1])
    assert mix.propose([1, 2], 5, skip=("ngram-simple",)).source == "draft-mtp"
    mix.accept(Verdict((2, 4)))
    assert simple.told == [("begin", [1]), ((2, 4), 0)]
    assert mix.propose([1, 2, 2, 4], 5, skip=("ngram-simple", "draft-mtp")) == NO_DRAFT


def test_counts() -> None:
    """As llama-server reports them: acceptance counts for the winner, per draft, token and position."""
    simple, mtp = Scripted("ngram-simple"), Scripted("draft-mtp", (1, 2, 3))
    mix = DrafterMix([simple, mtp])
    mix.begin([1])
    for accepted in (3, 0, 2):
        mix.propose([1, 1], 3)
        mix.accept(Verdict((0,) * (accepted + 1)))
    stats = mix.stats["draft-mtp"]
    assert (stats.begin_calls, stats.draft_calls, stats.accept_calls) == (1, 3, 3)
    assert (stats.drafts, stats.drafted_tokens, stats.accepted_drafts, stats.accepted_tokens) == (3, 9, 2, 5)
    assert stats.accepted_at == [2, 2, 1]
    assert stats.mean_tokens == pytest.approx(1 + 5 / 3)
    none = mix.stats["ngram-simple"]
    assert (none.begin_calls, none.draft_calls, none.accept_calls, none.drafts) == (1, 3, 0, 0)
    assert (none.accepted_at, none.mean_tokens) == ([], 0.0)


def test_a_round_that_was_given_up_leaves_no_trace() -> None:
    """Without ``accept`` the next round is judged by its own draft."""
    mtp = Scripted("draft-mtp", (1, 2))
    mix = DrafterMix([mtp])
    mix.begin([1])
    mix.propose([1, 1], 3)
    mtp.tokens = ()
    assert mix.propose([1, 1], 3) == NO_DRAFT
    mix.accept(Verdict((4,)))
    assert mtp.told[-1] == ((4,), 0)
    assert mix.stats["draft-mtp"].accept_calls == 0


@pytest.mark.parametrize(
    ("context", "history", "remaining", "limit"),
    [(100, 10, None, 89), (100, 99, None, 0), (100, 10, 5, 4), (100, 10, 1, 0), (100, 98, 50, 1)],
)
def test_what_a_round_can_use(context: int, history: int, remaining: int | None, limit: int) -> None:
    """The context less what was run and two, and one less than what may still be generated."""
    assert draft_limit(context_tokens=context, history_tokens=history, remaining_tokens=remaining) == limit


def test_the_verify_width_has_to_fit() -> None:
    """One row and the widest draft; what cannot hold it is named with both numbers. Without drafters all fits."""
    settings = SpeculativeSettings(types=("draft-mtp", "ngram-simple"))
    assert verify_width(settings, ubatch_tokens=512, context_tokens=4096) == 49
    assert verify_width(SpeculativeSettings(), ubatch_tokens=1, context_tokens=1) == 1
    with pytest.raises(SettingsError, match=r"^--spec-ngram-simple-size-m drafts 48 tokens: verifying them takes 49 "
                                            r"rows, the size given by --ubatch-size is 32"):
        verify_width(settings, ubatch_tokens=32, context_tokens=4096)
    with pytest.raises(SettingsError, match="--ctx-size is 48"):
        verify_width(settings, ubatch_tokens=512, context_tokens=48)


def test_drafters_of_settings() -> None:
    """Every n-gram type of the settings is made, and a table can be shared; types that run the model are not."""
    made = ngram_drafters(SpeculativeSettings(types=DRAFTERS), n_vocab=10)
    assert [drafter.name for drafter in made] == list(DRAFTERS[:5])
    assert ngram_drafters(SpeculativeSettings(), n_vocab=10) == []
    table = NextTokens()
    settings = SpeculativeSettings(types=("ngram-mod",))
    one, other = (ngram_drafters(settings, n_vocab=10, next_tokens=table)[0] for _ in range(2))
    text = np.arange(200, dtype=np.int32) % 60
    one.begin(text)
    assert list(other.propose(text[:90], 99).tokens) == [(90 + index) % 60 for index in range(64)]
