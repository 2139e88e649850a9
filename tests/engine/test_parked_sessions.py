"""ParkedSessions: which conversation a prompt goes on with, whether it leaves it whole, and which goes first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.engine.checkpoints import Checkpoint, ParkedSequence
from kvs_core.engine.parked import ParkedSessions, parts_from
from kvs_core.engine.session import ParkedSession
from kvs_core.models.recurrent import StateSnapshot
from kvs_core.paging.passed import Slides
from kvs_core.streaming.history import ParkedHistory


def parked(tokens: list[int], size: int, places: tuple[int, ...] = (), *, can_rewind: bool = False) -> ParkedSession:
    """One of ``size`` bytes."""
    history = ParkedHistory(len(tokens), (1,), Slides((None,), 1), ({0: np.zeros(size, np.uint8)},))
    held = tuple(Checkpoint(StateSnapshot(place, {}), None) for place in places)
    return ParkedSession(
        tuple(tokens), ParkedSequence(history, Checkpoint(StateSnapshot(len(tokens), {}), None)), held, can_rewind
    )


Held = list[tuple[str, int, bool]]
"""Name, size, and whether it is short, the least recently used first."""


def without_the_first(held: Held, *, short_alone: bool) -> Held | None:
    """What is left when one goes: a short one, else any; None if none may."""
    first = next((entry for entry in held if entry[2]), None)
    if first is None and held and not short_alone:
        first = held[0]
    return None if first is None else [entry for entry in held if entry is not first]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 14), st.booleans()), max_size=40),
       st.integers(0, 30))
def test_short_ones_go_first_and_then_the_least_recently_used(moves: list[tuple[str, int, bool]], most: int) -> None:
    """Until the rest fits, against a list kept by hand: one of size 0 is a touch, another is set aside, or taken up
    where it is held. For a short one no other goes, and none at all for one that does not fit."""
    held = ParkedSessions(most, short_tokens=4)
    model: Held = []
    for name, size, short in moves:
        known = next((entry for entry in model if entry[0] == name), None)
        length = 3 if (known[2] if known else short) else 4
        prompt = [ord(name)] * length
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
            room = most - (sum(entry[1] for entry in model if not entry[2]) if short else 0)
            assert held.room_bytes(length) == room
            kept, before = model, len(model)
            while size <= room and sum(entry[1] for entry in kept) + size > most:
                kept = without_the_first(kept, short_alone=short) or []
            assert held.add(parked(prompt, size)) == before - len(kept)
            model = [*kept, (name, size, short)] if size <= room else model
        assert (len(held), held.size_bytes) == (len(model), sum(entry[1] for entry in model))
    left: Held | None = model
    while left:
        short = len(left) % 2 == 0
        after = without_the_first(left, short_alone=short)
        assert held.drop_one(3 if short else None) == (after is not None)
        left = after if after is not None else without_the_first(left, short_alone=False)
        if after is None:
            assert held.drop_one()
        assert left is not None
        assert len(held) == len(left)
        assert all(held.best([ord(name)] * 5) is not None for name, _, _ in left)
    assert not held.drop_one()


@given(st.lists(st.tuples(st.integers(1, 9), st.sets(st.integers(0, 5))), max_size=12), st.integers(0, 60))
def test_what_several_share_counts_once(made: list[tuple[int, set[int]]], most: int) -> None:
    """``size_bytes`` is the sum over the distinct histories and checkpoints of those that are held, and no more than
    the limit; a newcomer that is too large alone leaves all the others where they are."""
    shared = [Checkpoint(StateSnapshot(1, {0: (np.zeros(3 + at, np.uint8), np.zeros(0, np.uint8))}), None)
              for at in range(6)]
    held = ParkedSessions(most)
    for number, (size, places) in enumerate(made):
        one = parked([number] * 3, size)
        newcomer = replace(one, checkpoints=tuple(shared[place] for place in sorted(places)))
        own_bytes = size + sum(3 + place for place in places)
        before = list(held._held)
        gone = held.add(newcomer)
        if own_bytes > most:
            assert (gone, held._held) == (0, before)
        else:
            assert held._held == [*before[gone:], newcomer]
        there = {id(part): part for each in held._held for part in each.parts}
        assert held.size_bytes == sum(part.size_bytes for part in there.values()) <= most


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


def test_a_newcomer_that_is_not_held_does_not_take_the_place_of_what_it_gives_all_of() -> None:
    """It would be lost with it."""
    held = ParkedSessions(10)
    held.add(parked([1, 2, 3], 5))
    assert held.add(parked([1, 2, 3, 4], 11, (3,))) == 0
    assert (len(held), held.covers([1, 2, 3]), held.covers([1, 2, 3, 4])) == (1, True, False)


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
