"""Returns against simulated drafters: drafts of the length that pays, or none, and trials that cost next to nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from kvs_core.speculative.drafter import NO_DRAFT, Draft, DrafterMix
from kvs_core.speculative.returns import Returns
from kvs_core.speculative.verdict import Verdict
from tests.speculative.test_drafter import Scripted

USUAL = 7
LIMIT = 64
LONG = 48   # what a drafter drafts if it may
WARM = 100
AGAIN = 64   # rounds


@dataclass(frozen=True)
class Played:
    """One round: what the drafter was allowed, what it drafted, what the round gave and took."""

    allowed: int
    drafted: int
    tokens: int
    seconds: float


@dataclass
class World:
    """One n-gram drafter that always has a draft.

    right     how many of the next tokens it knows, by round
    seconds   of rounds of so many drafted tokens, without, with a short and with a long draft
    after_s   what a round that is not long costs more behind one that is
    noise     relative, of every time
    """

    right: Callable[[int], int]
    seconds: tuple[float, float, float] = (1.0, 1.05, 1.5)
    after_s: float = 0.0
    noise: float = 0.0
    longest: int = LONG
    returns: Returns = field(default_factory=lambda: Returns(["ngram-mod"], USUAL))

    def __post_init__(self) -> None:
        self.dice = np.random.default_rng(1)
        self.round = 0
        self.was_long = False

    def play(self, rounds: int, limit: int = LIMIT) -> list[Played]:
        """So many rounds."""
        done = []
        for _ in range(rounds):
            allowed = self.returns.limits(limit)["ngram-mod"]
            assert 0 <= allowed <= limit
            drafted = min(allowed, self.longest)
            tokens = 1 + min(drafted, self.right(self.round))
            seconds = self.seconds[(drafted > 0) + (drafted > USUAL)]
            if self.was_long and drafted <= USUAL:
                seconds += self.after_s
            seconds *= 1.0 + self.noise * abs(float(self.dice.normal()))
            self.returns.observe("ngram-mod" if drafted else "", drafted=drafted, tokens=tokens, seconds=seconds)
            self.was_long = drafted > USUAL
            self.round += 1
            done.append(Played(allowed, drafted, tokens, seconds))
        return done


def share(done: Sequence[Played], wanted: Callable[[Played], bool]) -> float:
    """Of the rounds."""
    return sum(map(wanted, done)) / len(done)


def lost_s(done: Sequence[Played], best_rate: float) -> float:
    """Seconds more than the best would have taken for the same tokens."""
    return sum(each.seconds for each in done) - sum(each.tokens for each in done) / best_rate


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("cost", [1.05, 1.3, 3.0, 20.0])
@pytest.mark.parametrize("longest", [5, LONG])
def test_a_drafter_that_never_pays_is_hardly_asked(cost: float, longest: int, noise: float) -> None:
    """In one round of 64, less if that costs more than 1 % of the time; whatever lengths it drafts."""
    world = World(lambda number: 0, (1.0, cost, 2 * cost), noise=noise, longest=longest)
    world.play(WARM)
    done = world.play(3000)
    assert share(done, lambda each: each.drafted > 0) <= 1 / AGAIN
    assert lost_s(done, 1.0 / (1.0 + noise * 0.8)) <= 0.02 * 3000 + cost


def test_only_trials_that_cost_less_than_one_percent_are_made() -> None:
    """One more round than that at most: the trial that was one too many."""
    for cost in (1.1, 1.6, 2.5, 5.0, 40.0):
        world = World(lambda number: 0, (1.0, cost, cost))
        world.play(WARM)
        for rounds in (64, 200, 1000, 4000):
            done = world.play(rounds)
            spent = sum(each.seconds - each.tokens for each in done if each.drafted)
            assert spent <= 0.01 * sum(each.seconds for each in world_seconds(done, WARM)) + cost - 1.0
        done = world.play(10_000)
        trials = [number for number, each in enumerate(done) if each.drafted]
        assert len(trials) >= min(150, int(0.009 * 10_000 / (cost - 1.0))), "and they are made"
        assert all(later - earlier >= AGAIN for earlier, later in pairwise(trials))


def world_seconds(done: Sequence[Played], before: int) -> Sequence[Played]:
    """The rounds, and as many as came before them."""
    return [*done, *[Played(0, 0, 1, 1.0)] * before]


def test_drafts_that_pay_only_if_short_are_short() -> None:
    """A drafter that knows the next seven tokens, in a world where a long step costs twice as much."""
    world = World(lambda number: USUAL, (1.0, 1.05, 2.0), noise=0.02)
    world.play(WARM)
    done = world.play(2000)
    assert share(done, lambda each: each.drafted == USUAL) >= 0.97
    assert share(done, lambda each: each.drafted > USUAL) <= 0.02


@pytest.mark.parametrize("long_s", [1.5, 4.0])
def test_drafts_that_pay_if_long_are_long(long_s: float) -> None:
    """A text that is being copied."""
    world = World(lambda number: LONG, (1.0, 1.05, long_s), noise=0.02)
    world.play(WARM)
    done = world.play(2000)
    assert share(done, lambda each: each.allowed == LIMIT) >= 0.97
    assert lost_s(done, 49 / (long_s * 1.02)) <= 0.02 * sum(each.seconds for each in done)


def test_a_draft_is_long_only_behind_one_that_was_accepted_whole() -> None:
    """So a drafter that guesses does not cost wide steps."""
    world = World(lambda number: USUAL - 1, noise=0.02)
    assert not any(each.drafted > USUAL for each in world.play(1000))
    returns = Returns(["ngram-mod"], USUAL)
    for whole in (True, False, True, True, False):
        tokens = USUAL + 1 if whole else USUAL
        returns.observe("ngram-mod", drafted=USUAL, tokens=tokens, seconds=1.0)
        returns.observe("", drafted=0, tokens=1, seconds=1.0)
        assert returns.limits(LIMIT) == {"ngram-mod": LIMIT if whole else USUAL}


def test_a_drafter_comes_back_when_it_pays() -> None:
    """Within a few hundred rounds, at most; and is left as soon when it does not pay any more."""
    hard, easy = (lambda number: 0), (lambda number: LONG)
    world = World(hard, (1.0, 1.3, 2.0))
    world.play(WARM)
    for right, is_used in ((easy, True), (hard, False), (easy, True)):
        world.right = right
        world.play(300)
        asked = share(world.play(200), lambda each: each.drafted > 0)
        assert asked > 0.95 if is_used else asked < 0.05


def test_rounds_that_were_worth_it_cost_no_credit() -> None:
    """A text that was copied with breaks in it, so that good short drafts lost against better long ones; when drafts
    stop to pay, and later pay again, that is noticed as soon as ever."""
    world = World(lambda number: [LONG, 7, 3, 5][number % 4])
    assert share(world.play(600), lambda each: each.drafted > 0) > 0.95
    world.right = lambda number: 0
    assert share(world.play(500), lambda each: each.drafted > 0) < 0.1
    world.right = lambda number: LONG
    world.play(200)
    assert share(world.play(200), lambda each: each.drafted > 0) > 0.95


def test_rounds_without_are_seen_first() -> None:
    """Where a drafter has a draft in every round there is nothing to compare it with: two rounds go without."""
    done = World(lambda number: 4).play(20)
    assert [each.allowed for each in done[:7]] == [USUAL] * 4 + [0, 0] + [USUAL]
    assert all(each.drafted for each in done[6:])


def test_rounds_without_that_came_by_themselves_count() -> None:
    """Then none is asked for."""
    returns = Returns(["ngram-mod"], USUAL)
    for drafted in (4, 0, 4, 0, 4, 4, 4, 4):
        assert returns.limits(LIMIT)["ngram-mod"] > 0
        returns.observe("ngram-mod" if drafted else "", drafted=drafted, tokens=drafted, seconds=1.0)


def test_a_first_draft_to_no_avail_is_enough() -> None:
    """One whose tokens were all wrong; where some were right, a second one is seen."""
    for right, allowed in ((0, 0), (1, USUAL)):
        returns = Returns(["ngram-mod"], USUAL)
        for _ in range(2):
            returns.observe("", drafted=0, tokens=1, seconds=1.0)
        returns.observe("ngram-mod", drafted=5, tokens=1 + right, seconds=3.0)
        assert returns.limits(LIMIT) == {"ngram-mod": allowed}


def test_what_a_long_draft_costs_afterwards_is_its_own() -> None:
    """Pages that make room for a wide step come back in the round behind it: where that costs more than the long draft
    gives, drafts are short, and the rounds behind count as any other."""
    world = World(lambda number: [LONG, 0][number % 2], (1.0, 1.05, 2.0), after_s=60.0)
    world.play(WARM)
    assert share(world.play(1000), lambda each: each.drafted > USUAL) <= 0.01
    returns = Returns(["ngram-mod"], USUAL)
    for drafted, tokens, seconds in ((0, 1, 1.0), (0, 1, 1.0), (LONG, 49, 2.0), (0, 1, 50.0)) * 3:
        returns.observe("ngram-mod" if drafted else "", drafted=drafted, tokens=tokens, seconds=seconds)
    for _ in range(2):   # slower than other rounds are, unless those behind long drafts count whole
        returns.observe("ngram-mod", drafted=3, tokens=1, seconds=2.0)
    assert returns.limits(USUAL) == {"ngram-mod": 0}


def test_drafters_are_judged_one_by_one() -> None:
    """One that pays beside one that does not."""
    returns = Returns(["ngram-simple", "ngram-mod"], USUAL)
    for _ in range(4):
        returns.observe("ngram-simple", drafted=5, tokens=1, seconds=1.5)
        returns.observe("ngram-mod", drafted=5, tokens=5, seconds=1.5)
        returns.observe("", drafted=0, tokens=1, seconds=1.0)
    assert returns.limits(LIMIT) == {"ngram-simple": 0, "ngram-mod": USUAL}
    assert returns.limits(3) == {"ngram-simple": 0, "ngram-mod": 3}


def test_what_a_round_can_use_is_not_exceeded() -> None:
    """Near the end of a text or of the context."""
    world = World(lambda number: LONG)
    for limit in [1, 2, 6, 7, 8, 9, 30, 64] * 30:
        assert world.play(1, limit)[0].allowed <= limit


# Before a model's drafter.

def watching(others: int = 5) -> Returns:
    """Two rounds in which the model's own drafts gave so many tokens a second."""
    returns = Returns(["ngram-simple"], USUAL, models=True)
    for _ in range(2):
        returns.observe("", drafted=4, tokens=others, seconds=1.0)
    return returns


def watch(returns: Returns, right: int, drafted: int = LONG, *, take: int = 5) -> None:
    """One draft that is watched, its first tokens right, while rounds give ``take`` tokens each."""
    assert returns.limits(LIMIT) == {"ngram-simple": 0}
    assert list(returns.to_watch) == ["ngram-simple"]
    returns.watch("ngram-simple", range(drafted), 0.0)
    comes = [*range(right), *[-1] * LIMIT][: min(right + 1, USUAL, drafted)]
    for at in range(0, len(comes), take):
        assert at == 0 or not returns.to_watch
        returns.written(comes[at : at + take])
        returns.observe("", drafted=4, tokens=take, seconds=1.0)
        returns.limits(LIMIT)


def test_drafts_before_a_model_are_watched_first() -> None:
    """Wrong ones are never verified; right ones are after two, and as both were right as a whole, at any length."""
    returns = watching()
    for _ in range(50):
        watch(returns, 2)
    returns = watching()
    watch(returns, LONG)
    watch(returns, LONG)
    assert returns.limits(LIMIT) == {"ngram-simple": LIMIT}
    assert not returns.to_watch


def test_what_fails_is_watched_again() -> None:
    """A drafter that was right while it was watched, and wrong when it was asked."""
    returns = watching()
    watch(returns, LONG)
    watch(returns, LONG)
    for _ in range(5):
        if returns.limits(LIMIT)["ngram-simple"] == 0:
            break
        returns.observe("ngram-simple", drafted=USUAL, tokens=1, seconds=1.0)
    watch(returns, 0)


def test_what_promises_and_loses_is_watched_too() -> None:
    """Six tokens right are more than the model's rounds give, but verifying them takes longer than that is worth. It is
    not asked as long as the text shows no more, and at once when it is being copied, not after 64 rounds."""
    returns = watching()
    for _ in range(3):
        watch(returns, 6)
    for _ in range(2):
        assert returns.limits(LIMIT) == {"ngram-simple": USUAL}
        returns.observe("ngram-simple", drafted=USUAL, tokens=7, seconds=1.5)
    for _ in range(25):   # of two rounds each
        watch(returns, 6)
    watch(returns, LONG)
    assert returns.limits(LIMIT) == {"ngram-simple": LIMIT}


@pytest.mark.parametrize("watching_s", [0.0, 0.01, 0.05])
def test_watching_leaves_time_for_trials(watching_s: float) -> None:
    """What verified slowly at first, and would not any more, is asked again soon after 64 rounds, however much of the
    time that trials may take goes into watching."""
    returns = watching()
    for _ in range(3):
        watch(returns, 6)
    for _ in range(2):
        assert returns.limits(LIMIT) == {"ngram-simple": USUAL}
        returns.observe("ngram-simple", drafted=USUAL, tokens=7, seconds=1.5)
    for number in range(200):
        if returns.limits(USUAL)["ngram-simple"]:
            assert number >= 62
            return
        for name in returns.to_watch:
            returns.watch(name, [1] * 6 + [0], watching_s)
        returns.written([1] * 5)
        returns.observe("", drafted=4, tokens=5, seconds=1.0 + watching_s)
    raise AssertionError("it is never asked again")


def test_a_draft_that_is_short_is_worth_its_tokens() -> None:
    """Two tokens, always right, before a model whose rounds give five, and before one whose rounds give two."""
    for others, asked in ((5, 0), (2, USUAL)):
        returns = watching(others)
        for _ in range(4):
            watch(returns, LONG, 2, take=others)
            if returns.limits(USUAL)["ngram-simple"]:
                break
        assert returns.limits(USUAL) == {"ngram-simple": asked}


def test_a_model_that_is_rarely_right_is_worth_no_watching() -> None:
    """Nor is none at all: a draft to no avail costs next to nothing there."""
    returns = watching(1)
    assert returns.limits(LIMIT) == {"ngram-simple": USUAL}
    assert not returns.to_watch


def test_looking_takes_one_percent_of_the_time() -> None:
    """A drafter that needs 50 ms to say what it would draft, before rounds of a second: one round in five or less."""
    returns = watching()
    looks = 0
    for _ in range(500):
        assert returns.limits(LIMIT) == {"ngram-simple": 0}
        for name in returns.to_watch:
            returns.watch(name, (), 0.05)
            looks += 1
        returns.observe("", drafted=4, tokens=5, seconds=1.0)
    assert 95 <= looks <= 102


# The mix, told lengths.

def test_a_peek_counts_for_nothing() -> None:
    """Only what the drafter said last is its draft."""
    made, _ = mix(ngram_simple=(1, 2, 3), draft_mtp=(7, 8))
    assert made.peek("ngram-simple", [1, 2], 2) == Draft((1, 2), "ngram-simple")
    assert made.peek("ngram-simple", [1, 2], 0) == NO_DRAFT
    assert made.propose([1, 2], 9, limits={"ngram-simple": 0}) == Draft((7, 8), "draft-mtp")
    made.accept(Verdict((7, 8, 9)))
    assert (made.stats["ngram-simple"].draft_calls, made.stats["ngram-simple"].accept_calls) == (0, 0)


def mix(**drafts: Sequence[int]) -> tuple[DrafterMix, Mapping[str, Scripted]]:
    """A mix of drafters with these drafts, begun."""
    drafters = {name.replace("_", "-"): Scripted(name.replace("_", "-"), tuple(of)) for name, of in drafts.items()}
    made = DrafterMix(list(drafters.values()))
    made.begin([1])
    return made, drafters


def test_single_types_have_limits() -> None:
    """They are asked for no more, or not at all; others are asked as ever."""
    made, drafters = mix(ngram_simple=(1, 2, 3), ngram_mod=(4, 5, 6), draft_mtp=(7, 8, 9))
    assert made.propose([1, 2], 9, limits={"ngram-simple": 2}) == Draft((1, 2), "ngram-simple")
    assert made.propose([1, 2], 9, limits={"ngram-simple": 0, "ngram-mod": 1}) == Draft((4,), "ngram-mod")
    assert made.propose([1, 2], 2, limits={"ngram-simple": 0, "ngram-mod": -1}) == Draft((7, 8), "draft-mtp")
    assert made.propose([1, 2], 2, limits={"ngram-simple": 60}) == Draft((1, 2), "ngram-simple")
    asked = {name: [told[2] for told in each.told if told[0] == "propose"] for name, each in drafters.items()}  # type: ignore[index]
    assert asked == {"ngram-simple": [2, 2], "ngram-mod": [1], "draft-mtp": [2]}
    assert [made.stats[name].drafted_tokens for name in asked] == [4, 1, 2]


@pytest.mark.parametrize(("room", "left"), [(0, ()), (-3, ()), (1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (9, (1, 2, 3))])
def test_what_has_no_room_was_not_drafted(room: int, left: tuple[int, ...]) -> None:
    """A draft that is shortened counts, and is judged, as the shorter one; to nothing, as none."""
    made, drafters = mix(ngram_simple=(1, 2, 3), ngram_mod=(4,))
    made.propose([1, 2], 9)
    assert made.shorten(room) == (Draft(left, "ngram-simple") if left else NO_DRAFT)
    made.accept(Verdict((*left, 8)))
    stats = made.stats["ngram-simple"]
    assert (stats.drafts, stats.drafted_tokens) == (bool(left), len(left))
    assert (stats.accept_calls, stats.accepted_tokens) == (bool(left), len(left))
    assert drafters["ngram-simple"].told[-1] == ((*left, 8), len(left))
    assert drafters["ngram-mod"].told[-1] == ((*left, 8), 0)


def test_no_draft_is_not_shortened() -> None:
    """There is nothing to count."""
    made, _ = mix(ngram_simple=())
    made.propose([1, 2], 9)
    assert made.shorten(3) == NO_DRAFT
    assert made.stats["ngram-simple"].drafts == 0
