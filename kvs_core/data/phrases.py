"""Phrases from a grammar: rules whose alternatives hold words, other rules and people. The same dice, the same phrases.

    act:                                         a rule; each line below it is one alternative
      [carry] {np} to the {place}                {act.past}: carried ..., {act.ing}: carrying ...
    thing: lamp letter harbour_bell              a rule of single words; {thing.s}: lamps
    forms:                                       verbs that are not inflected by rule: base, past, -ing

An early alternative is likelier than a late one. A ``Writer`` writes one document: it has a cast of people, and takes
words of a kind that it has used before more often than others, as people do who write about something.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

T = TypeVar("T")

_SLOT = re.compile(r"\{(\w+)(?:\.(\w+))?\}")
_VERB = re.compile(r"\[(\w+)\]")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])")
_SENTENCE_START = re.compile(r"(?:^|(?<=[.?!] )|(?<=[.?!]\n))[a-z]")
_SHARED = frozenset((
    "thing", "place", "goods", "material", "subject", "town", "animal", "plant", "quality", "part", "job",
    "verb", "noun", "attribute",
))  # fmt: skip
_REUSE = 0.5      # of the words of a kind that a document shares with itself
_SLOPE = 1.6      # how much likelier early alternatives are: the share of the first half is 0.5 ** (1 / slope)
_MOST_DEPTH = 5   # of rules within rules, from where the short alternatives are taken
_NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "twenty")
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "ninth", "tenth", "twelfth", "fifteenth", "last day")


class Dice:
    """Choices from a seed by ``Random.random`` alone, the one draw that Python promises never to change."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed).random

    def chance(self, share: float) -> bool:
        """True in that share of the calls."""
        return self._random() < share

    def below(self, stop: int) -> int:
        """A number of [0, stop)."""
        return int(self._random() * stop)

    def between(self, first: int, last: int) -> int:
        """A number of [first, last]."""
        return first + self.below(last - first + 1)

    def pick(self, choices: Sequence[T], slope: float = 1.0) -> T:
        """One of them; with a slope above 1 an early one is likelier."""
        return choices[int(len(choices) * self._random() ** slope)]


@dataclass(frozen=True, slots=True)
class Grammar:
    """rules: alternatives by name. forms: past tense and -ing form by verb."""

    rules: Mapping[str, Sequence[str]]
    forms: Mapping[str, tuple[str, str]]

    @staticmethod
    def read(text: str) -> Grammar:
        """The grammar that a text describes; see the top of the file."""
        rules: dict[str, list[str]] = {}
        found: list[str] = []
        is_words = False
        for line in text.splitlines():
            if not line.strip() or line.startswith("#"):
                continue
            if not line.startswith(" "):
                name, _, words = line.partition(":")
                found = rules[name] = []
                is_words = bool(words.strip())
                line = words
            if is_words:
                found += [word.replace("_", " ") for word in line.split()]
            elif line.strip():
                found.append(line.strip())
        forms = {base: (past, ing) for base, past, ing in map(str.split, rules.pop("forms", []))}
        return Grammar(rules, forms)

    def inflected(self, verb: str, form: str) -> str:
        """A verb's ``past`` or ``ing`` form; its base for any other word."""
        if form not in ("past", "ing"):
            return verb
        if verb in self.forms:
            return self.forms[verb][form == "ing"]
        if form == "past" and verb.endswith("y") and verb[-2] not in "aeo":
            return verb[:-1] + "ied"
        stem = verb[:-1] if verb.endswith("e") else verb
        return stem + form.replace("past", "ed")


def plural(noun: str) -> str:
    """Of a noun that has a regular one."""
    for singular, several in (("sheep", "sheep"), ("trout", "trout"), ("knife", "knives"), ("loaf", "loaves")):
        if noun == singular:
            return several
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody in a document. pronouns: as a subject, an object, an owner."""

    given: str
    surname: str
    job: str
    pronouns: tuple[str, str, str]

    @property
    def title(self) -> str:
        """How strangers call the person."""
        return f"{'Mr' if self.pronouns[0] == 'he' else 'Mrs'} {self.surname}"


class Writer:
    """Writes one document."""

    def __init__(self, grammar: Grammar, dice: Dice) -> None:
        self.dice = dice
        self._grammar = grammar
        self._used: dict[str, list[str]] = {}
        self.cast = [self._person() for _ in range(dice.between(2, 4))]
        self._subject = self.cast[0]
        self._named: set[Person] = set()
        self._depth = 0

    def line(self, rule: str, form: str = "") -> str:
        """An alternative of a rule, written out: articles fit, sentences begin with a capital."""
        return _SENTENCE_START.sub(lambda found: found[0].upper(), self.phrase(rule, form))

    def phrase(self, rule: str, form: str = "") -> str:
        """An alternative of a rule as a part of a sentence."""
        return _ARTICLE.sub(r"\1n ", self._expand(rule, form))

    def paragraph(self, rule: str, least: int, most: int) -> str:
        """Sentences of a rule."""
        return " ".join(self.line(rule) for _ in range(self.dice.between(least, most)))

    def capital(self, rule: str) -> str:
        """A line that begins with a capital."""
        text = self.line(rule)
        return text[0].upper() + text[1:]

    def word(self, rule: str) -> str:
        """A word of a rule, sooner one that the document has used already."""
        used = self._used.setdefault(rule, [])
        if used and rule in _SHARED and self.dice.chance(_REUSE):
            return self.dice.pick(used)
        chosen = self.dice.pick(self._grammar.rules[rule], _SLOPE)
        used.append(chosen)
        return chosen

    def someone(self) -> str:
        """A name that is not of this document's cast."""
        person = self._person()
        return f"{person.given} {person.surname}"

    def _person(self) -> Person:
        rules, dice = self._grammar.rules, self.dice
        female = dice.chance(0.5)
        return Person(
            dice.pick(rules["she" if female else "he"]), dice.pick(rules["surname"]), dice.pick(rules["job"]),
            ("she", "her", "her") if female else ("he", "him", "his"),
        )

    def _expand(self, rule: str, form: str) -> str:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            chosen = self.dice.pick(self._grammar.rules[rule][:5])
        else:
            chosen = self.word(rule)
        if form == "s":
            chosen = plural(chosen)
        text = _VERB.sub(lambda verb: self._grammar.inflected(verb[1], form), chosen)
        text = _SLOT.sub(lambda slot: self._filled(slot[1], slot[2] or ""), text)
        self._depth -= 1
        return text[:1].upper() + text[1:] if form == "cap" else text

    def _filled(self, name: str, form: str) -> str:
        person, dice = self._subject, self.dice
        match name:
            case "who":
                return self._who()
            case "he" | "him" | "his":
                return person.pronouns[("he", "him", "his").index(name)]
            case "other":
                return self._called(dice.pick([other for other in self.cast if other is not person]))
            case "person":
                return self.someone()
            case "n":
                return dice.pick(_NUMBERS, _SLOPE)
            case "ordinal":
                return dice.pick(_ORDINALS)
            case "num":
                return str(dice.between(13, dice.pick((99, 400, 2_000, 90_000))))
            case "dec":
                return f"{dice.between(0, 60)}.{dice.between(1, 9)}"
            case "pct":
                return str(dice.between(2, 95))
            case "year":
                return str(dice.between(1770, 1936))
            case "clock":
                hour = dice.pick(_NUMBERS[:10])
                return dice.pick((hour, f"half past {hour}", "noon", "midnight"))
        return self._expand(name, form)

    def _who(self) -> str:
        if self._named and self.dice.chance(0.45):
            return self._subject.pronouns[0]
        self._subject = self.dice.pick(self.cast, _SLOPE)
        return self._called(self._subject)

    def _called(self, person: Person) -> str:
        if person not in self._named:
            self._named.add(person)
            return f"{person.given} {person.surname}"
        return self.dice.pick((person.given, person.given, f"the {person.job}", person.title))
