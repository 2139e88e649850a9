"""Prompts that hide a fact in a long text and ask for it at the end, made of tokens so that they have any length.

    The secret number of the small lamp is 48213.                                         (somewhere in the text)
    What is the secret number of the small lamp? The secret number of the small lamp is   (its end)

Other facts of the same sort stand elsewhere, and half of their names share a word with one before: whoever answers
must have read the whole name. Everything follows from the seed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from kvs_core.errors import SettingsError
from kvs_core.formats.tokenizer import Tokenizer

_ADJECTIVES = (
    "small", "old", "heavy", "narrow", "cold", "green", "dark", "quiet", "bright", "rusty", "empty", "crooked", "blue",
    "warm", "dusty", "pale", "round", "smooth", "strange", "red", "tall", "grey", "yellow", "lucky", "wise", "silver",
)  # fmt: skip
_NOUNS = (
    "lamp", "clock", "chair", "boat", "bell", "table", "wheel", "ladder", "mirror", "barrel", "kettle", "falcon",
    "door",
    "anvil", "violin", "bucket", "bottle", "drum", "owl", "goat",
    "harbour", "bridge", "garden", "tower", "castle", "fox",
)  # fmt: skip
_END = (b".", b"?", b"!")


@dataclass(frozen=True, slots=True)
class Fact:
    """The secret number of something."""

    name: str
    number: str

    @property
    def statement(self) -> str:
        """The sentence."""
        return f"The secret number of the {self.name} is {self.number}."

    @property
    def question(self) -> str:
        """Ends where the number follows, with a space before it."""
        return f"\n\nWhat is the secret number of the {self.name}? The secret number of the {self.name} is"


def draw_facts(count: int, random: Random) -> list[Fact]:
    """Facts with different names and different numbers of five digits."""
    names: list[tuple[str, str]] = []
    while len(names) < count:
        name = (random.choice(_ADJECTIVES), random.choice(_NOUNS))
        if names and random.random() < 0.5:
            other = random.choice(names)
            name = (other[0], name[1]) if random.random() < 0.5 else (name[0], other[1])
        if name not in names:
            names.append(name)
    numbers = random.sample(range(10_000, 100_000), count)
    return [Fact(" ".join(name), str(number)) for name, number in zip(names, numbers, strict=True)]


MOST_FACTS = len(_ADJECTIVES) * len(_NOUNS) // 8
"""Names are drawn until they differ, so not nearly all of them are used."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """tokens      end where the answer begins
    fact_token  where the fact that is asked for stands
    fact        that one
    """

    tokens: tuple[int, ...]
    fact_token: int
    fact: Fact


class Haystack:
    """A text to hide facts in. ``tokens``: of the text; ``start_tokens``: before every prompt."""

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[int], start_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._start = list(start_tokens)
        pieces = [tokenizer.token_bytes(token) for token in tokens]
        # Where a fact may stand: as a line of its own before a line, or behind a sentence.
        self._lines = {at for at in range(1, len(tokens)) if pieces[at - 1].endswith(b"\n")}
        sentences = {
            at for at in range(1, len(tokens)) if pieces[at - 1].endswith(_END) and pieces[at][:1] in (b" ", b"\n")
        }
        self._gaps = sorted(self._lines | sentences)

    def prompt(self, length: int, depth_pct: int, facts: int, seed: int) -> Prompt:
        """A prompt of exactly ``length`` tokens with the fact at ``depth_pct`` percent of its text, or as near to that
        as lines or sentences end. Raises ``SettingsError`` if the facts alone take more, or the text is too short."""
        random = Random(seed)
        hidden = draw_facts(facts, random)
        question = self._encode(hidden[0].question)
        stated = [self._encode(" " + fact.statement) for fact in hidden]
        on_lines = [self._encode(fact.statement + "\n") for fact in hidden]
        most, least = (
            sum(choose(map(len, forms)) for forms in zip(stated, on_lines, strict=True)) for choose in (max, min)
        )
        room = length - len(self._start) - len(question) - most   # and up to most - least more
        if room < length // 2:
            raise SettingsError(
                f"--lengths {length}: {facts} facts and a question take {length - room} tokens of it; use at least "
                f"{2 * (length - room)}, or fewer --facts"
            )
        spare = len(self._tokens) - (room + most - least)
        if spare < 0:
            raise SettingsError(f"--lengths {length}: the text has {len(self._tokens)} tokens, {-spare} too few; "
                                "give a longer --text-file or lower --lengths")
        first = random.randrange(spare + 1)
        places = [first + depth_pct / 100 * room, *(random.uniform(first, first + room) for _ in hidden[1:])]
        order = sorted((self._gap(place, first, first + room), number) for number, place in enumerate(places))
        made = list(self._start)
        at, fact_token = first, 0
        for gap, number in order:
            made += self._tokens[at:gap]
            at = gap
            if number == 0:
                fact_token = len(made)
            made += on_lines[number] if gap == first or gap in self._lines else stated[number]
        made += self._tokens[at : at + length - len(made) - len(question)]
        return Prompt((*made, *question), fact_token, hidden[0])

    def _gap(self, place: float, first: int, last: int) -> int:
        """The place nearest to ``place`` in [first, last] where a fact may stand: the start is always one."""
        at = bisect_left(self._gaps, place)
        near = [gap for gap in self._gaps[max(0, at - 1) : at + 1] if first <= gap <= last]
        return min([first, *near], key=lambda gap: abs(gap - place))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)
