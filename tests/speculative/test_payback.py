"""Payback against simulated costs and acceptances: it finds what is best, and what it tries costs next to nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import mul

import numpy as np
import pytest

from kvs_core.speculative.payback import NO_CHOICE, Choice, Payback

WARM = 300   # rounds until the state is steady
TRY_AGAIN = 64


@dataclass
class World:
    """What rounds cost and give.

    draft_s   seconds of a drafted token, by kind
    accepted  probability of the token at each position if those before it were accepted, by kind
    step_s    seconds of a step of so many rows
    noise     relative, one-sided, of every measured time; one time in a hundred is five times as long as it should be
    set_up    how many times as long it takes whatever is done for the first time
    """

    draft_s: Mapping[str, float]
    accepted: Mapping[str, Sequence[float]]
    step_s: Callable[[int], float]
    noise: float = 0.02
    set_up: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.dice = np.random.default_rng(self.seed)
        self.known: set[object] = set()

    @property
    def most(self) -> dict[str, int]:
        return {kind: len(rates) for kind, rates in self.accepted.items()}

    def tokens(self, choice: Choice) -> float:
        """That a round gives on average."""
        return 1.0 + (sum(accumulate(self.accepted[choice.kind][: choice.tokens], mul)) if choice.kind else 0.0)

    def seconds(self, choice: Choice) -> float:
        return self.step_s(1 + choice.tokens) + choice.tokens * self.draft_s.get(choice.kind, 0.0)

    def rate(self, choices: Sequence[Choice]) -> float:
        """Tokens per second of rounds of these."""
        return sum(map(self.tokens, choices)) / sum(map(self.seconds, choices))

    def best(self, limit: int = 7) -> Choice:
        """The best fixed choice."""
        every = [NO_CHOICE] + [
            Choice(kind, tokens) for kind, most in self.most.items() for tokens in range(1, min(limit, most) + 1)
        ]
        return max(every, key=lambda choice: self.rate([choice]))

    def play(self, payback: Payback, rounds: int, limit: int = 7) -> list[Choice]:
        """So many rounds; what was chosen."""
        chosen = []
        for _ in range(rounds):
            choice = payback.choose(limit)
            accepted = 0
            rates = self.accepted[choice.kind][: choice.tokens] if choice.kind else ()
            while accepted < len(rates) and self.dice.random() < rates[accepted]:
                accepted += 1
            payback.observe(
                choice, drafted=choice.tokens, accepted=accepted,
                draft_s=self._measured(choice.tokens * self.draft_s.get(choice.kind, 0.0), choice.kind),
                step_s=self._measured(self.step_s(1 + choice.tokens), choice.tokens),
            )
            chosen.append(choice)
        return chosen

    def _measured(self, seconds: float, what: object) -> float:
        times = 5.0 if self.dice.random() < 0.01 else 1.0
        if what not in self.known:
            self.known.add(what)
            times = self.set_up
        return seconds * times * (1.0 + self.noise * abs(float(self.dice.normal())))


def flat(rows: int) -> float:
    """The link decides: a step costs the same whatever its rows."""
    return 1.0


def steep(rows: int) -> float:
    """Compute decides: a row more is half a step more."""
    return 0.5 + 0.5 * rows


WORLDS = {
    "MTP, streamed": World({"mtp": 0.02}, {"mtp": [0.8, 0.7, 0.6, 0.5, 0.4, 0.4, 0.4]}, flat),
    "MTP of three, steep": World({"mtp": 0.05}, {"mtp": [0.8, 0.7, 0.6]}, steep),
    "hopeless": World({"mtp": 0.3}, {"mtp": [0.1] * 7}, steep),
    "all resident": World({"resident": 1.0}, {"resident": [1.0] * 7}, steep),
    "far more streamed than resident": World({"resident": 0.05}, {"resident": [0.9] * 7}, flat),
    "MTP is better": World({"mtp": 0.02, "resident": 0.3}, {"mtp": [0.85] * 7, "resident": [0.7] * 7}, flat),
    "resident is better": World({"mtp": 0.02, "resident": 0.04}, {"mtp": [0.4] * 3, "resident": [0.9] * 7}, flat),
    "the first tokens are cheap": World(
        {"mtp": 0.01}, {"mtp": [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]}, lambda rows: 1.0 if rows <= 4 else 2.0
    ),
    "near to nothing gained": World({"mtp": 0.1}, {"mtp": [0.3, 0.2, 0.2]}, lambda rows: 0.9 + 0.1 * rows),
}


@pytest.mark.parametrize("name", WORLDS)
def test_steady_rounds_are_worth_98_percent_of_the_best(name: str) -> None:
    """Of the best fixed choice's tokens per second, with what is spent on trying others."""
    world = replace(WORLDS[name])
    payback = Payback(world.most)
    world.play(payback, WARM)
    chosen = world.play(payback, 2000)
    assert world.rate(chosen) >= 0.98 * world.rate([world.best()]), world.best()


def test_any_world_is_worth_98_percent_on_average() -> None:
    """Costs, acceptances and steps drawn at random, two kinds or one: the same on average, and 94 % in each."""
    dice = np.random.default_rng(4)
    shares = []
    for seed in range(40):
        kinds = ("mtp", "resident")[: 1 + seed % 2]
        draft_s = {kind: float(10 ** dice.uniform(-2, 0.3)) for kind in kinds}
        accepted = {
            kind: [float(dice.uniform(0.05, 0.95)) * 0.9**position for position in range(int(dice.integers(1, 8)))]
            for kind in kinds
        }
        slope = float(dice.choice([0.0, 0.02, 0.1, 0.5, 1.0]))
        world = World(draft_s, accepted, lambda rows, slope=slope: 1.0 + slope * (rows - 1), seed=seed)  # type: ignore[misc]
        payback = Payback(world.most)
        world.play(payback, WARM)
        shares.append(world.rate(world.play(payback, 1000)) / world.rate([world.best()]))
    assert np.mean(shares) >= 0.98
    assert min(shares) >= 0.94


@pytest.mark.parametrize("name", ["MTP is better", "resident is better"])
def test_the_better_kind_is_found_and_kept(name: str) -> None:
    """It drafts in nearly every round; the other one is heard of again from time to time."""
    world = replace(WORLDS[name])
    payback = Payback(world.most)
    world.play(payback, WARM)
    kinds = [choice.kind for choice in world.play(payback, 1000)]
    best = world.best().kind
    assert kinds.count(best) >= 960
    assert len(set(kinds)) > 1


def test_what_does_not_pay_is_paused_and_tried_again() -> None:
    """After a round or two nobody drafts; no trial comes sooner than 64 rounds after the last, and trials are short."""
    world = World({"mtp": 0.3}, {"mtp": [0.02] * 7}, steep, noise=0.0)
    payback = Payback(world.most)
    world.play(payback, 20)
    chosen = world.play(payback, 1000)
    tried = [index for index, choice in enumerate(chosen) if choice.kind]
    trials = [index for index in tried if index - 1 not in tried]
    assert 3 <= len(trials) <= len(tried) <= 30
    assert all(later - earlier >= TRY_AGAIN for earlier, later in pairwise(trials))
    assert {chosen[index].tokens for index in trials} == {1}


def test_a_text_that_becomes_easy_is_noticed() -> None:
    """Drafts that did not pay and now do are used again within a few hundred rounds; and the other way round."""
    hard, easy = [0.02] * 3, [0.95] * 3
    world = World({"mtp": 0.05}, {"mtp": hard}, lambda rows: 0.8 + 0.2 * rows)
    payback = Payback(world.most)
    world.play(payback, WARM)
    for rates, is_used in ((easy, True), (hard, False)):
        world.accepted = {"mtp": rates}
        world.play(payback, 400)
        used = sum(choice.kind == "mtp" for choice in world.play(payback, 200))
        assert used > 180 if is_used else used < 20


def test_a_slow_first_time_is_no_judgement() -> None:
    """What is set up for a width or a kind, however long that takes, is not held against it."""
    for set_up in (1.0, 1000.0):
        world = World({"mtp": 0.02}, {"mtp": [0.8] * 3}, flat, noise=0.0, set_up=set_up)
        payback = Payback(world.most)
        world.play(payback, 30)
        assert world.play(payback, 20).count(Choice("mtp", 3)) >= 18


def test_limits_are_kept() -> None:
    """No choice asks for more than a round can use, or than its kind drafts; none at all for nothing."""
    world = World({"mtp": 0.01, "resident": 0.01}, {"mtp": [0.9] * 3, "resident": [0.9] * 7}, flat)
    payback = Payback(world.most)
    for limit in [0, 1, 2, 5, 7, 9, -3] * 30:
        choice = world.play(payback, 1, limit)[0]
        assert choice.tokens <= max(0, min(limit, world.most.get(choice.kind, 0)))
        assert (choice.kind == "") == (choice.tokens == 0)
        assert limit > 0 or choice == NO_CHOICE


def test_a_draft_that_ends_early_counts_as_rejected_there() -> None:
    """A kind that is too unsure to draft anything costs its time and gives nothing: it is paused."""
    payback = Payback({"mtp": 3})
    chosen = []
    for _ in range(100):
        choice = payback.choose(7)
        payback.observe(choice, drafted=0, accepted=0, draft_s=0.5 if choice.kind else 0.0, step_s=1.0)
        chosen.append(choice.kind)
    assert chosen[:4].count("mtp") == 2
    assert "mtp" not in chosen[10:64]


def test_rounds_of_other_drafters_are_times_alone() -> None:
    """Where an n-gram was verified nothing is learnt of the chosen kind, but how long such a step takes."""
    payback = Payback({"mtp": 3})
    for _ in range(10):
        payback.choose(7)
        payback.observe(NO_CHOICE, drafted=5, accepted=0, draft_s=0.0, step_s=1.0)
    assert payback.choose(7) in (NO_CHOICE, Choice("mtp", 3))
    for _ in range(6):
        choice = payback.choose(7)
        payback.observe(choice, drafted=choice.tokens, accepted=choice.tokens, draft_s=0.01, step_s=1.0)
    assert payback.choose(7) == Choice("mtp", 3)
