"""Random legal and illegal moves on a LogicalCache against a dumb model: a list of rows with a mark each."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvs_core.errors import ContextError
from kvs_core.paging.cache import Frontiers, LogicalCache

COUNTS = st.integers(-2, 20)
PLACES = st.one_of(COUNTS, st.floats(0, 1))   # a number of tokens, or a part of those committed


class CacheMachine(RuleBasedStateMachine):
    """Every move is what the list says; a refused move changes nothing."""

    @initialize(capacity=st.integers(1, 40))
    def start(self, capacity: int) -> None:
        self.capacity = capacity
        self.cache = LogicalCache(capacity)
        self.rows: list[str] = []   # "home", "here" or "open", in that order

    def count(self, *marks: str) -> int:
        return sum(mark in marks for mark in self.rows)

    @property
    def committed(self) -> int:
        return self.count("home", "here")

    @rule(rows=COUNTS)
    def reserve(self, rows: int) -> None:
        if rows < 1 or "open" in self.rows:
            with pytest.raises(AssertionError):
                self.cache.reserve(rows)
        elif len(self.rows) + rows > self.capacity:
            with pytest.raises(ContextError, match="--ctx-size") as caught:
                self.cache.reserve(rows)
            assert caught.value.prompt_tokens == len(self.rows) + rows
            assert caught.value.context_tokens == self.capacity
        else:
            assert self.cache.reserve(rows) == range(len(self.rows), len(self.rows) + rows)
            self.rows += ["open"] * rows

    @rule(keep=COUNTS)
    def settle(self, keep: int) -> None:
        if "open" not in self.rows or not 0 <= keep <= self.count("open"):
            with pytest.raises(AssertionError):
                self.cache.settle(keep)
        else:
            self.cache.settle(keep)
            self.rows = [*self.rows[: self.committed], *(["here"] * keep)]

    def place(self, place: float) -> int:
        return place if isinstance(place, int) else round(place * self.committed)

    @rule(place=PLACES)
    def publish(self, place: float) -> None:
        tokens = self.place(place)
        if not 0 <= tokens <= self.committed:
            with pytest.raises(AssertionError):
                self.cache.publish(tokens)
        else:
            self.cache.publish(tokens)
            self.rows[:tokens] = ["home"] * tokens

    @rule(place=PLACES)
    def truncate(self, place: float) -> None:
        tokens = self.place(place)
        if "open" in self.rows or not 0 <= tokens <= self.committed:
            with pytest.raises(AssertionError):
                self.cache.truncate(tokens)
        else:
            self.cache.truncate(tokens)
            del self.rows[tokens:]

    @invariant()
    def frontiers_are_the_lists(self) -> None:
        assert self.cache.frontiers == Frontiers(self.count("home"), self.committed, len(self.rows))
        assert self.cache.published <= self.cache.committed <= self.cache.reserved <= self.cache.capacity_tokens


TestCacheMachine = CacheMachine.TestCase
