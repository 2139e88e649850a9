"""ParkedSessions: which conversation a prompt goes on with, whether it leaves it whole, and which goes first."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.engine.checkpoints import Checkpoint, ParkedSequence
from kvs_core.engine.parked import ParkedSessions, parts_from
from kvs_core.engine.session import ParkedSession
from kvs_core.models.recurrent import StateSnapshot
from kvs_core.streaming.history import ParkedHistory


def parked(tokens: list[int], size: int, places: tuple[int, ...] = (), *, can_rewind: bool = False) -> ParkedSession:
    """One of ``size`` bytes."""
    history = ParkedHistory(len(tokens), 1, ((np.zeros(size, np.uint8),),))
    held = tuple(Checkpoint(StateSnapshot(place, {}), None) for place in places)
    return ParkedSession(
        tuple(tokens), ParkedSequence(history, Checkpoint(StateSnapshot(len(tokens), {}), None)), held, can_rewind
    )


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 12)), max_size=40), st.integers(0, 30))
def test_the_least_recently_used_go_until_the_rest_fits(moves: list[tuple[str, int]], most: int) -> None:
    """Against a list kept by hand: one of size 0 is a touch, another is set aside, or taken up where it is held."""
    held = ParkedSessions(most)
    model: list[tuple[str, int]] = []
    for name, size in moves:
        prompt = [ord(name)] * 3
        known = next((entry for entry in model if entry[0] == name), None)
        found = held.best([*prompt, 1])
        assert (found is not None) == (known is not None) == held.covers(prompt)
        if found is not None and known is not None:
            model.remove(known)
            if size == 0:
                held.touch(found)
                model.append(known)
            else:
                held.remove(found)
        elif size > 0:
            gone = held.add(parked(prompt, size))
            model.append((name, size))
            before = len(model)
            while sum(size for _, size in model) > most:
                model.pop(0)
            assert gone == before - len(model)
        assert (len(held), held.size_bytes) == (len(model), sum(size for _, size in model))
    while model:
        assert held.drop_oldest()
        assert held.best([ord(model.pop(0)[0])] * 4) is None
    assert not held.drop_oldest()


def test_the_best_one_gives_most_then_loses_least() -> None:
    """And of those that are as good, the last used; none where none gives a token."""
    held = ParkedSessions(1 << 20)
    first, second = parked([1, 2, 3, 4], 1, (2,)), parked([1, 2, 9, 9, 9, 9], 1, (2,))
    for each in (first, second):
        held.add(each)
    assert held.best([1, 2, 3, 4, 5]) is first
    assert held.best([1, 2, 7, 7]) is first
    third = parked([1, 2, 8, 8], 1, (2,))
    held.add(third)
    assert held.best([1, 2, 7, 7]) is third
    assert held.best([5, 6, 7]) is None
    assert held.best([1, 7, 7]) is None   # no place to take it up at 1
    anywhere = parked([1, 6, 6], 1, can_rewind=True)
    held.add(anywhere)
    assert held.best([1, 7, 7]) is anywhere
    assert held.best([1, 6, 6]) is anywhere   # one token is left to be read
    assert anywhere.reusable([1, 6, 6]) == 2


def test_one_that_gives_all_of_another_takes_its_place() -> None:
    """But not where it cannot be taken up at the other's end."""
    held = ParkedSessions(1 << 20)
    short = parked([1, 2, 3], 5)
    held.add(short)
    assert held.covers([1, 2, 3])
    assert not held.covers([1, 2])
    held.add(parked([1, 2, 3, 4, 5], 7))
    assert len(held) == 2
    held.add(parked([1, 2, 3, 4, 5, 6], 9, (3,)))
    assert (len(held), held.size_bytes) == (2, 16)


def test_one_that_is_too_large_is_not_held() -> None:
    held = ParkedSessions(10)
    assert (held.fits(10), held.fits(11), ParkedSessions(0).fits(1)) == (True, False, False)


def test_where_a_prompt_leaves_a_conversation() -> None:
    """When both are to be kept."""
    held = list(range(1000, 1200))
    answer = held[180:]
    assert not parts_from(held, [*held, 1, 2, 3], 200)                         # goes on with it
    assert not parts_from([], held, 0)                                         # there is none
    assert parts_from(held, [1, 2, 3], 0)                                      # another one
    assert parts_from(held, [*held[:90], 1], 90)                               # more than half would be lost
    assert not parts_from(held, held[:150], 149)                               # the answer is written anew
    assert not parts_from(held, [*held[:150], 1, 2], 150)                      # likewise, behind another opening
    assert parts_from(held, [*held[:150], *range(20)], 150)                    # what was asked is another thing
    assert not parts_from(held, [*held[:150], *answer, 1, 2, 3, 4, 5], 150)    # thoughts are dropped
    assert not parts_from(held, [*held[:20], *answer[:-1], *range(20)], 20)    # a great many
    assert not parts_from(held, [*held[:195], *range(20)], 195)                # so few are soon read again
    assert parts_from(held, [*held[:150], *range(20)], 20)                     # from a checkpoint far back
