"""Judges: what the target's logits make of a draft. Whatever was drafted, the text is distributed as without drafts.

    matching    the target's own token is sampled at each row, and goes on while it is the drafted one. The generator
                takes one step per token, so a seed gives the very text that it gives without drafts. For a draft
                without ``candidates`` this is rejection sampling: the token d is accepted with probability p(d), and
                what comes instead is distributed as p without d
    rejection   a token drawn from the drafter's distribution q is accepted with probability min(1, p / q); if it is
                not, the next is drawn from max(0, p - q), scaled to 1 (Leviathan et al. 2023, Chen et al. 2023)

p is the sampler's distribution, after its whole chain. An end token ends the round: no row behind it is looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from kvs_core.sampling.candidates import Candidates, Logits
from kvs_core.sampling.chain import Sampler
from kvs_core.sampling.rng import MersenneTwister
from kvs_core.sampling.stages import draw_index
from kvs_core.speculative.drafter import Draft
from kvs_core.speculative.verdict import Verdict

Row: TypeAlias = Logits | Candidates
"""What follows one row of a step: logits [V] float32, or the sampler's ``enough`` largest of them."""

_ACCEPTANCE_SEED = 0x9E3779B9


class Judge(Protocol):
    """Legal moves: ``judge`` once per round of one request."""

    def judge(self, draft: Draft, rows: Sequence[Row], sampler: Sampler) -> Verdict:
        """What the round generates.

        rows     [1 + len(draft)]: what follows the token sampled last, and each drafted token. Read in order, and no
                 further than needed
        sampler  has accepted every token up to the one sampled last; afterwards those of the verdict too
        """
        ...


class Verifier:
    """Matching, or rejection for a draft that tells what its tokens were drawn from."""

    def __init__(self, eog_ids: Collection[int], *, seed: int) -> None:
        """``seed`` of the request's sampler; acceptance has a generator of its own, seeded from it."""
        self._eog_ids = frozenset(eog_ids)
        self._dice = MersenneTwister(seed ^ _ACCEPTANCE_SEED)

    def judge(self, draft: Draft, rows: Sequence[Row], sampler: Sampler) -> Verdict:
        """See ``Judge``."""
        assert len(rows) == 1 + len(draft)
        made: list[int] = []
        for index, row in enumerate(rows):
            drafted = draft.tokens[index] if index < len(draft) else None
            if drafted is None or not draft.candidates:
                token = sampler.pick(row).token
            else:
                token = self._accept_or_redraw(drafted, draft.candidates[index], row, sampler)
            sampler.accept(token)
            made.append(token)
            if token != drafted or token in self._eog_ids:
                break
        return Verdict(tuple(made))

    def _accept_or_redraw(self, drafted: int, drawn_from: Candidates, row: Row, sampler: Sampler) -> int:
        target = distribution(sampler, row)
        p, q = target.prob_of(drafted), drawn_from.prob_of(drafted)
        if self._dice.uniform() * q < p:
            return drafted
        ids, drafter_probs = drawn_from.ids.astype(np.int64), drawn_from.probs()
        at, which = target.positions_of(ids)
        rest = target.probs()
        rest[at] = np.maximum(rest[at] - drafter_probs[which], 0.0)
        total = float(rest.sum())
        if total <= 0.0:   # p equals q but for rounding
            return sampler.draw(target).token
        return int(target.ids[draw_index(rest / total, self._dice.uniform())])


def distribution(sampler: Sampler, row: Row) -> Candidates:
    """What the sampler's chain leaves of ``row``."""
    return sampler.distribution_among(row) if isinstance(row, Candidates) else sampler.distribution(row)
