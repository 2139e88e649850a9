"""Requests and rounds for tests: texts that repeat themselves, and a target that accepts what chance decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from kvs_core.speculative.drafter import Drafter
from kvs_core.speculative.text import Text
from kvs_core.speculative.verdict import Verdict

ANY = 1 << 30   # a limit that cuts nothing


def text_of(tokens: Sequence[int]) -> Text:
    return np.array(tokens, np.int32)


def proposed(drafter: Drafter, history: Sequence[int]) -> list[int]:
    """What the drafter expects after ``history``."""
    return list(drafter.propose(text_of(history), ANY).tokens)


def verdict_of(accepted: int) -> Verdict:
    """A round that accepted so many drafted tokens; what they were does not matter to n-gram drafters."""
    return Verdict((0,) * (accepted + 1))


def repetitive(random: Random, length: int, alphabet: int) -> list[int]:
    """Tokens, many of them copied from further back."""
    tokens: list[int] = []
    while len(tokens) < length:
        if tokens and random.random() < 0.6:
            start = random.randrange(len(tokens))
            tokens += tokens[start : start + random.randint(1, 30)]
        else:
            tokens.append(random.randrange(alphabet))
    return tokens[:length]


@dataclass(frozen=True, slots=True)
class Oracle:
    """The same drafter, slowly: the moves it is compared in."""

    begin: Callable[[list[int]], None]
    draft: Callable[[list[int], int], list[int]]
    accept: Callable[[int], None]


def play(random: Random, drafter: Drafter, oracle: Oracle, *, alphabet: int, requests: int = 4) -> int:
    """Some requests against both: every draft has to be the same. The drafted tokens, all together.

    A request starts behind a part of the one before, as in a chat, or with a text of its own.
    """
    drafted = 0
    history: list[int] = []
    for _ in range(requests):
        kept = history[: random.randint(0, len(history))] if random.random() < 0.7 else []
        history = kept + repetitive(random, random.randint(1, 120), alphabet)
        drafter.begin(text_of(history))
        oracle.begin(list(history))
        for _ in range(random.randint(1, 25)):
            history.append(random.randrange(alphabet) if random.random() < 0.3 else history[-len(history) // 2])
            draft = proposed(drafter, history)
            assert draft == oracle.draft(history[:-1], history[-1])
            drafted += len(draft)
            if draft:
                accepted = random.choice((len(draft), random.randint(0, len(draft))))
                drafter.accept(verdict_of(accepted), len(draft))
                oracle.accept(accepted)
                history += draft[:accepted]
            else:
                drafter.accept(verdict_of(0), 0)
    return drafted
