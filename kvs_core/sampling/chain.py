"""Sampler: one conversation's way from logits to tokens, llama-server's sampler chain.

    logits [V] ─ bias ─ penalties ─ dry ─ ... ─ temperature ─> distribution ─ draw ─> Pick
                          └────────── what accept() has seen ──────────┘

``distribution`` is the chain, ``draw`` the dice; ``pick`` is both. Nothing learns from a pick until ``accept``: a
rejected draft costs a draw of the generators, and no memory of it stays. Deliberately absent: grammars, stop strings,
and any tie to a device.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from kvs_core.errors import SettingsError
from kvs_core.sampling import stages
from kvs_core.sampling.adaptive import AdaptiveP
from kvs_core.sampling.candidates import Candidates, Logits
from kvs_core.sampling.dry import DryRule, expand_breakers
from kvs_core.sampling.infill import infill
from kvs_core.sampling.logprobs import check_logits
from kvs_core.sampling.mirostat import Mirostat
from kvs_core.sampling.params import RANDOM_SEED, SamplingParams
from kvs_core.sampling.recent import RecentCounts, TokenTail
from kvs_core.sampling.rng import MersenneTwister
from kvs_core.sampling.vocab import VocabView

Stage = Callable[[Candidates], Candidates]

# A greedy temperature right behind these may skip them: none of them removes the largest logit.
_KEEP_THE_MAXIMUM = frozenset({"top_n_sigma", "top_k", "top_p", "min_p"})


@dataclass(frozen=True, slots=True)
class Pick:
    """A chosen token.

    logprob     natural logarithm of its probability among ``candidates``; 0.0 when it was the only one
    candidates  what the draw chose from, in the chain's last order
    """

    token: int
    logprob: float
    candidates: Candidates


class Sampler:
    """Legal moves: ``accept`` any number of tokens; ``pick`` (or ``distribution``, then ``draw``); ``reset``.

    After ``reset`` (and at birth) nothing is accepted and the generators are seeded anew; the prompt's tokens are then
    accepted one by one, and after that each generated token.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        n_vocab: int,
        vocab: VocabView,
        eog_ids: Collection[int],
        suppress_ids: Collection[int] = (),
    ) -> None:
        """``eog_ids`` end generation; ``suppress_ids`` are never to be generated. SettingsError for a bias beyond V."""
        self.params = params
        self._n_vocab = n_vocab
        self._vocab = vocab
        self._eog_ids = frozenset(eog_ids)
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._bias = _total_bias(params, n_vocab, self._eog_ids, suppress_ids)
        self._skips_lone_draws = params.mirostat > 0 or "adaptive_p" in params.samplers
        self._dry = self._dry_rule()
        self.reset()

    @property
    def seed_used(self) -> int:
        """The seed in effect since the last reset: the one asked for, or the one drawn."""
        return self._seed

    def reset(self) -> None:
        """Forget every accepted token and start the random generators again (a random seed is drawn anew)."""
        params = self.params
        self._seed = params.seed if params.seed != RANDOM_SEED else secrets.randbelow(RANDOM_SEED)
        self._dice = MersenneTwister(self._seed)
        self._xtc_dice = MersenneTwister(self._seed)
        self._recent: RecentCounts | None = None
        self._tail: TokenTail | None = None
        self._mirostat: Mirostat | None = None
        self._adaptive: AdaptiveP | None = None
        self._judged: Candidates | None = None   # whose probabilities the next accepted token is judged by
        self._enough: int | None = None
        self._stages = self._build_mirostat() if params.mirostat else self._build_chain()

    def accept(self, token: int) -> None:
        """Take note of a token of the prompt, or of the one that follows the last ``distribution``."""
        assert 0 <= token < self._n_vocab, f"token {token} of {self._n_vocab}"
        if self._recent is not None:
            self._recent.accept(token)
        if self._tail is not None:
            self._tail.accept(token)
        judge = self._mirostat or self._adaptive
        if judge is not None and self._judged is not None:
            prob = self._judged.prob_of(token)
            if prob > 0.0:
                judge.observe(prob)
        self._judged = None

    @property
    def enough(self) -> int | None:
        """So many of the largest logits decide what the chain leaves; None if it looks at all of them."""
        return self._enough

    def distribution_among(self, best: Candidates) -> Candidates:
        """``distribution``, from the ``enough`` largest logits, sorted, instead of all.

        DeviceError for logits that are NaN or all -inf.
        """
        assert self._enough is not None
        assert best.is_sorted
        assert len(best) >= min(self._enough, self._n_vocab)
        candidates = best
        for stage in self._stages:
            candidates = stage(candidates)
        return candidates

    def distribution(self, logits: Logits) -> Candidates:
        """What the chain leaves of ``logits`` [V] float32 (copied): the candidates a draw is to choose from.

        Draws one number where XTC is active, and changes nothing else that a later call sees. DeviceError for logits
        that are NaN or all -inf; SettingsError if biases ban every token.
        """
        assert logits.shape == (self._n_vocab,), f"logits {logits.shape}, vocabulary {self._n_vocab}"
        check_logits(logits)
        candidates = Candidates(self._ids, np.array(logits, np.float32), is_full=True)
        for stage in self._stages:
            candidates = stage(candidates)
        return candidates

    def draw(self, candidates: Candidates) -> Pick:
        """Draw one of ``candidates`` by probability: one step of the generator.

        As in llama.cpp, a lone candidate takes that step too, except under mirostat and adaptive_p.
        """
        lone = len(candidates) == 1
        u = 0.0 if lone and self._skips_lone_draws else self._dice.uniform()
        if lone:
            return Pick(int(candidates.ids[0]), 0.0, candidates)
        probs = candidates.probs()
        index = stages.draw_index(probs, u)
        return Pick(int(candidates.ids[index]), math.log(float(probs[index])), candidates)

    def pick(self, logits: Logits | Candidates) -> Pick:
        """``draw`` from the distribution of ``logits`` [V], or of the ``enough`` largest. Nothing is accepted yet."""
        if isinstance(logits, Candidates):
            return self.draw(self.distribution_among(logits))
        return self.draw(self.distribution(logits))

    def _build_mirostat(self) -> list[Stage]:
        p = self.params
        mirostat = Mirostat(p.mirostat, tau=p.mirostat_tau, eta=p.mirostat_eta, n_vocab=self._n_vocab)
        self._mirostat = mirostat
        return [
            *self._bias_stages(),
            lambda c: stages.temperature(c, p.temperature),
            lambda c: self._judge(mirostat.cut(c)),
        ]

    def _build_chain(self) -> list[Stage]:
        names = [name for name in self.params.samplers if name != "adaptive_p"]
        chain = [(name, stage) for name in names if (stage := self._stage(name)) is not None]
        if self.params.temperature <= 0.0 and self.params.dynatemp_range <= 0.0:
            chain = _without_idle(chain)
        built = self._bias_stages() + [stage for _, stage in chain]
        if chain and not self._bias:
            name = chain[0][0]
            if name == "top_k":
                self._enough = self.params.top_k
            elif name == "temperature" and self.params.temperature <= 0.0 and self.params.dynatemp_range <= 0.0:
                self._enough = 1
        if "adaptive_p" in self.params.samplers and self.params.adaptive_target >= 0.0:
            adaptive = AdaptiveP(self.params.adaptive_target, self.params.adaptive_decay)
            self._adaptive = adaptive
            built.append(lambda c: adaptive.reshape(self._judge(c)))
        return built

    def _stage(self, name: str) -> Stage | None:
        """The stage called ``name`` with this request's numbers, or None where these turn it off."""
        p = self.params
        match name:
            case "penalties" if self._has_penalties:
                recent = self._recent = self._recent or RecentCounts(p.repeat_last_n)
                repeat, frequency, presence = p.repeat_penalty, p.frequency_penalty, p.presence_penalty
                return lambda c: stages.penalties(
                    c, recent.counts, repeat=repeat, frequency=frequency, presence=presence
                )
            case "dry" if self._dry is not None:
                rule = self._dry
                tail = self._tail = self._tail or TokenTail(p.dry_penalty_last_n)
                return lambda c: stages.add_to_logits(c, rule.penalties(tail.tokens))
            case "top_n_sigma" if p.top_n_sigma > 0.0:
                return lambda c: stages.top_n_sigma(c, p.top_n_sigma)
            case "top_k" if p.top_k > 0:
                return lambda c: stages.top_k(c, p.top_k)
            case "typ_p" if p.typical_p < 1.0:
                return lambda c: stages.typ_p(c, p.typical_p, min_keep=p.min_keep)
            case "top_p" if p.top_p < 1.0:
                return lambda c: stages.top_p(c, p.top_p, min_keep=p.min_keep)
            case "min_p" if p.min_p > 0.0:
                return lambda c: stages.min_p(c, p.min_p, min_keep=p.min_keep)
            case "xtc" if p.xtc_probability > 0.0 and p.xtc_threshold <= 0.5:
                return self._xtc
            case "temperature":
                return lambda c: stages.dynamic_temperature(
                    c, p.temperature, half_range=p.dynatemp_range, exponent=p.dynatemp_exponent
                )
            case "infill":
                ends = {token for token in self._eog_ids if self._bias.get(token) != -math.inf}
                return lambda c: infill(c, self._vocab.token_bytes, ends)
        return None

    @property
    def _has_penalties(self) -> bool:
        p = self.params
        return p.repeat_last_n > 0 and (p.repeat_penalty, p.frequency_penalty, p.presence_penalty) != (1.0, 0.0, 0.0)

    def _dry_rule(self) -> DryRule | None:
        p = self.params
        if p.mirostat or "dry" not in p.samplers or p.dry_multiplier == 0.0 or p.dry_penalty_last_n == 0:
            return None
        assert self._vocab.n_vocab == self._n_vocab, f"{self._vocab.n_vocab} tokens, {self._n_vocab} logits"
        breakers = expand_breakers(p.dry_sequence_breakers, self._vocab)
        return DryRule(p.dry_multiplier, p.dry_base, p.dry_allowed_length, breakers)

    def _bias_stages(self) -> list[Stage]:
        return [self._add_bias] if self._bias else []

    def _add_bias(self, candidates: Candidates) -> Candidates:
        biased = stages.add_to_logits(candidates, self._bias)
        if biased.logits.max() == -np.inf:
            banned = sum(amount == -math.inf for amount in self._bias.values())
            raise SettingsError(f"no token can follow: biases ban {banned} of {self._n_vocab} tokens; allow more")
        return biased

    def _xtc(self, candidates: Candidates) -> Candidates:
        p = self.params
        if len(candidates) < 2 or self._xtc_dice.uniform_single() > p.xtc_probability:
            return candidates
        return stages.xtc(candidates, p.xtc_threshold, min_keep=p.min_keep)

    def _judge(self, candidates: Candidates) -> Candidates:
        self._judged = candidates
        return candidates


def _without_idle(chain: list[tuple[str, Stage]]) -> list[tuple[str, Stage]]:
    """The chain without the filters right before a greedy temperature that cannot change its choice."""
    at = next((index for index, (name, _) in enumerate(chain) if name == "temperature"), 0)
    start = at
    while start > 0 and chain[start - 1][0] in _KEEP_THE_MAXIMUM:
        start -= 1
    return chain[:start] + chain[at:]


def _total_bias(
    params: SamplingParams, n_vocab: int, eog_ids: Collection[int], suppress_ids: Collection[int]
) -> dict[int, float]:
    """Token -> sum of its biases, with -inf for what must not be generated."""
    bias: dict[int, float] = {}
    for token, amount in params.logit_bias:
        if not 0 <= token < n_vocab:
            raise SettingsError(f"logit_bias names token {token}: this model's tokens are 0 to {n_vocab - 1}")
        bias[token] = bias.get(token, 0.0) + amount
    for token in (*suppress_ids, *(eog_ids if params.ignore_eos else ())):
        bias[token] = -math.inf
    return bias
