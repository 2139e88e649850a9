"""Synthetic acceptance: drafts are accepted by rates that are given, to measure what a round costs. What comes out is
no text.

How much of each draft is accepted follows multiples of the golden ratio, modulo 1: after any number of rounds they
lie about evenly in [0, 1) (three-distance theorem; Knuth, TAOCP 3, section 6.4), so that a short measurement has the
rates that were asked for, which dice would miss by a tenth.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvs_core.sampling.chain import Sampler
from kvs_core.sampling.rng import MersenneTwister
from kvs_core.settings.drafters import SpeculativeSettings
from kvs_core.speculative.drafter import Draft
from kvs_core.speculative.verdict import Verdict
from kvs_core.speculative.verifier import Judge, Row, Verifier

_BISECTIONS = 32
_GOLDEN = (5**0.5 - 1) / 2


def make_judge(settings: SpeculativeSettings, eog_ids: Collection[int], *, seed: int) -> Judge:
    """The judge of one request, ``seed`` being its sampler's: a true one, unless settings ask for pretended acceptance;
    then each of its verdicts says so."""
    if settings.synth_rates is not None:
        return SyntheticVerifier(settings.synth_rates, eog_ids, seed=seed)
    if settings.synth_len is not None:
        return SyntheticVerifier(rates_of_length(settings.synth_len, settings.widest_draft), eog_ids, seed=seed)
    return Verifier(eog_ids, seed=seed)


def rates_of_length(length: float, widest_draft: int) -> tuple[float, ...]:
    """Rates p, p^2, ... p^widest_draft whose sum is ``length`` - 1, in [0, widest_draft]."""
    if length >= widest_draft + 1:
        return (1.0,) * widest_draft
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if sum(middle ** (1 + position) for position in range(widest_draft)) < length - 1.0:
            low = middle
        else:
            high = middle
    p = (low + high) / 2 if length > 1.0 else 0.0
    return tuple(p ** (1 + position) for position in range(widest_draft))


class SyntheticVerifier:
    """Accepts so much of the drafts that ``rates`` come out, and never an end token.

    The target is sampled at every row all the same: that is a part of what a round costs.
    """

    def __init__(self, rates: Sequence[float], eog_ids: Collection[int], *, seed: int) -> None:
        """``rates``, that never rise: the part of all drafts whose tokens up to that position are accepted."""
        self._rates = tuple(rates)
        self._eog_ids = frozenset(eog_ids)
        self._place = MersenneTwister(seed).uniform()

    def judge(self, draft: Draft, rows: Sequence[Row], sampler: Sampler) -> Verdict:
        """See ``Judge``."""
        assert len(rows) == 1 + len(draft) <= 1 + len(self._rates)
        if draft:
            self._place = (self._place + _GOLDEN) % 1.0
        made: list[int] = []
        for index, row in enumerate(rows):
            token = sampler.pick(row).token
            accepted = index < len(draft) and self._accepts(index, draft.tokens[index])
            if accepted:
                token = draft.tokens[index]
            sampler.accept(token)
            made.append(token)
            if not accepted:
                break
        return Verdict(tuple(made), synthetic=True)

    def _accepts(self, index: int, drafted: int) -> bool:
        return self._place < self._rates[index] and drafted not in self._eog_ids
