"""Facts to be found again in a long text: what the demo model is trained on, tested with and shown with.

    The secret number of the amber falcon is 48213.                                           (somewhere in the text)
    What is the secret number of the amber falcon? The secret number of the amber falcon is   (its end)

Also the filler: plain sentences made from word lists, so that a prompt of any length may be published.
Everything follows from the ``random.Random`` that is handed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from benchmarks.demo_model.words import ADJECTIVES, COLOURS, NAMES, NOUNS, PEOPLE, PLACES, THINGS


@dataclass(frozen=True, slots=True)
class Kind:
    """A sort of fact. ``{key}`` stands for an adjective and a noun, ``{value}`` for what is to be found.

    lead    the sentence up to the value; it is stated with it, and begins the answer
    """

    lead: str
    question: str
    value: str


SECRET_NUMBER = Kind("The secret number of the {key} is", "What is the secret number of the {key}?", "digits")
KINDS = (
    SECRET_NUMBER,
    Kind("The pass key for the {key} is", "What is the pass key for the {key}?", "digits"),
    Kind("The colour of the {key} is", "What is the colour of the {key}?", "colour"),
    Kind("The {key} is kept in the", "Where is the {key} kept?", "place"),
    Kind("The owner of the {key} is", "Who is the owner of the {key}?", "name"),
)
_KIND_WEIGHTS = (6, 1, 1, 1, 1)


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact. ``value`` begins with a space."""

    kind: Kind
    key: str
    value: str

    @property
    def lead(self) -> str:
        """The statement up to its value."""
        return self.kind.lead.format(key=self.key)

    @property
    def statement(self) -> str:
        """The sentence."""
        return f"{self.lead}{self.value}."

    @property
    def question(self) -> str:
        """Asks for the value."""
        return self.kind.question.format(key=self.key)

    @property
    def prompt(self) -> str:
        """The question and its answer up to the value."""
        return f"{self.question} {self.lead}"


def draw_value(kind: Kind, rng: Random) -> str:
    """A value with its leading space; numbers have five digits."""
    if kind.value == "digits":
        return f" {rng.randrange(10_000, 100_000)}"
    return " " + rng.choice({"colour": COLOURS, "place": PLACES, "name": NAMES}[kind.value])


def draw_facts(count: int, rng: Random, *, kind: Kind | None = None) -> list[Fact]:
    """Facts with different keys. Half of the keys share a word with an earlier one, so that one word is not enough."""
    keys: list[tuple[str, str]] = []
    facts: list[Fact] = []
    while len(facts) < count:
        key = (rng.choice(ADJECTIVES), rng.choice(NOUNS))
        if keys and rng.random() < 0.5:
            other = rng.choice(keys)
            key = (other[0], key[1]) if rng.random() < 0.5 else (key[0], other[1])
        if key not in keys:
            keys.append(key)
            chosen = kind or rng.choices(KINDS, _KIND_WEIGHTS)[0]
            facts.append(Fact(chosen, " ".join(key), draw_value(chosen, rng)))
    return facts


_TIMES = (
    "In the morning", "At noon", "In the evening", "On Monday", "On Friday", "Before the rain", "After the storm",
    "In the first week of spring", "One winter", "Late in the summer", "Every autumn", "When the bell rang",
    "Long before the war", "The next day", "As soon as the snow had gone", "At the end of the month",
)  # fmt: skip
_ACTIONS = (
    "carried {things} to the {place}", "sold {things} at the {place}", "counted the {things} in the {place}",
    "forgot the {things} in the {place}", "bought {things} from the {person}", "showed the {things} to the {person}",
    "talked about {things} with the {person}", "left the {place} without a word", "walked past the {place}",
    "repaired the roof of the {place}", "painted the door of the {place}", "waited for the {person} at the {place}",
    "wrote a long letter about the {place}", "hid the {things} under the stairs", "cleaned the windows of the {place}",
    "asked {name} for {things}", "thanked {name} for the {things}", "looked for {name} in the {place}",
)  # fmt: skip
_ENDINGS = (
    "", "", "", "", ", and nobody asked why", ", as always", ", which took until dark", " and came back late",
    ", although it was cold", ", because the road was closed", ", and {name} helped", " while the {person} watched",
    ", but the {person} did not notice", " and said nothing about it", ", for the price was good",
)  # fmt: skip
_PLAIN = (
    "The road to the {place} was {adjective} and {adjective2}.", "It was a {adjective} day, and the {place} was empty.",
    "Nobody in the village had seen so many {things} before.",
    "There were {things} on the table and {things2} on the floor.",
    "The {person} and the {person2} had known each other for years.", "{name} said that the {place} had to be rebuilt.",
    "\"Where are the {things}?\" asked {name}.", "\"They are in the {place},\" said the {person}.",
    "A {adjective} {noun} stood in front of the {place}.", "The {noun} near the {place} belonged to nobody.",
    "{name} and {name2} were the last to leave the {place}.", "The price of {things} had gone up again.",
)  # fmt: skip


def sentence(rng: Random) -> str:
    """One sentence of filler, without a digit in it."""
    if rng.random() < 0.35:
        pattern = rng.choice(_PLAIN)
    else:
        who = rng.choice(("the {person}", "the {person}", "{name2}", "the old {person2}", "the {adjective} {person}"))
        pattern = f"{rng.choice(_TIMES)}, {who} {rng.choice(_ACTIONS)}{rng.choice(_ENDINGS)}."
        if rng.random() < 0.4:
            pattern = pattern.split(", ", 1)[1]
            pattern = pattern[0].upper() + pattern[1:]
    return pattern.format(
        things=rng.choice(THINGS), things2=rng.choice(THINGS), place=rng.choice(PLACES), person=rng.choice(PEOPLE),
        person2=rng.choice(PEOPLE), name=rng.choice(NAMES), name2=rng.choice(NAMES), adjective=rng.choice(ADJECTIVES),
        adjective2=rng.choice(ADJECTIVES), noun=rng.choice(NOUNS),
    )  # fmt: skip


def paragraphs(rng: Random) -> Iterator[str]:
    """Paragraphs of filler without end."""
    while True:
        yield " ".join(sentence(rng) for _ in range(rng.randrange(3, 9)))
