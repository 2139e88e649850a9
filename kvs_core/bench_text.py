"""The benchmark text: 1.5 MB of stories, letters, dialogue, reports, tables, programs and logs, made up here.

Its source is the generator below with the words in ``data/benchmark_text.grammar``, written for kvs and under its
licence (MIT); nothing in it is quoted. Every run of every Python gives the same text. It means little, but it is built
as texts are: a document has its people and its subject, comes back to its words, and no two paragraphs are equal, so
perplexity, acceptance of drafts and repetitions are those of a mixed text and not of a loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path

from kvs_core.data.phrases import Dice, Grammar, Writer, plural
from kvs_core.data.programs import program, query

TEXT_BYTES = 1_500_000
"""More than this, by a part of a document. ASCII: a byte is a character."""

_GRAMMAR = Path(__file__).with_name("data") / "benchmark_text.grammar"
_SEED = 1_000_003   # documents are seeded with its multiples


@cache
def benchmark_text() -> str:
    """The text, at least 300,000 tokens with any tokenizer of today. Takes seconds the first time."""
    return "\n\n".join(_documents(TEXT_BYTES)) + "\n"


def _documents(least_bytes: int) -> Iterator[str]:
    """Documents of that length together. One with a paragraph that was there before is left out."""
    grammar = Grammar.read(_GRAMMAR.read_text(encoding="ascii"))
    seen: set[str] = set()
    written = 0
    for number in count(1):
        writer = Writer(grammar, Dice(_SEED * number))
        text = writer.dice.pick(_KINDS, 1.2)(writer)
        paragraphs = [part.strip() for part in text.split("\n\n")]
        if len(set(paragraphs)) < len(paragraphs) or not seen.isdisjoint(paragraphs):
            continue
        seen.update(paragraphs)
        yield text
        written += len(text) + 2
        if written > least_bytes:
            return


def _story(writer: Writer) -> str:
    parts = [writer.capital("heading")]
    for _ in range(writer.dice.between(6, 24)):
        if writer.dice.chance(0.25):
            parts += [writer.line("speech") for _ in range(writer.dice.between(2, 5))]
        else:
            parts.append(writer.paragraph("sentence", 3, 8))
    return "\n\n".join(parts)


def _letter(writer: Writer) -> str:
    dice, (sender, reader) = writer.dice, writer.cast[:2]
    body = [
        " ".join(writer.line("wish" if dice.chance(0.5) else "sentence") for _ in range(dice.between(2, 6)))
        for _ in range(dice.between(2, 5))
    ]
    place = f"{writer.word('town')}, {dice.between(1, 28)} {writer.word('month')} {dice.between(1790, 1935)}"
    name = reader.given if dice.chance(0.5) else reader.title
    end = dice.pick(("Yours,", "Your friend", "With kind regards,", "Sincerely,", "In haste,"))
    return "\n\n".join([place, f"Dear {name},", *body, f"{end}\n{sender.given} {sender.surname}"])


def _article(writer: Writer) -> str:
    parts = [writer.capital("heading")]
    for number in range(writer.dice.between(3, 8)):
        if number and writer.dice.chance(0.3):
            parts.append(f"{number}. {writer.capital('heading')}")
        parts.append(writer.paragraph("fact", 3, 7))
        if writer.dice.chance(0.2):
            parts.append(_table(writer))
    return "\n\n".join(parts)


def _play(writer: Writer) -> str:
    dice = writer.dice
    parts = [f"{writer.capital('heading')}, a scene in the {writer.word('place')}"]
    for _ in range(dice.between(8, 30)):
        person = dice.pick(writer.cast)
        lines = [
            f"{writer.line('question')}?" if dice.chance(0.3) else f"{writer.capital('remark')}."
            for _ in range(dice.between(1, 3))
        ]
        aside = f" ({writer.phrase('act', 'ing')})" if dice.chance(0.15) else ""
        parts.append(f"{person.given.upper()}{aside}: {' '.join(lines)}")
    return "\n\n".join(parts)


def _minutes(writer: Writer) -> str:
    dice = writer.dice
    head = (
        f"Minutes of the meeting at {writer.word('town')} on {writer.word('weekday')}, {dice.between(1, 28)} "
        f"{writer.word('month')}. Present: {', '.join(f'{p.given} {p.surname}' for p in writer.cast)}."
    )
    items = [f"{number}. {writer.paragraph('motion', 1, 3)}" for number in range(1, dice.between(4, 10))]
    return "\n".join([head, "", *items])


def _instructions(writer: Writer) -> str:
    dice = writer.dice
    needed = [
        f"- {dice.between(1, 60)} {writer.word('measure')} of {writer.word('goods')}" for _ in range(dice.between(2, 6))
    ]
    steps = [f"{number}. {writer.capital('step')}." for number in range(1, dice.between(5, 12))]
    title = f"How to {writer.phrase('act')}"
    return "\n\n".join([title, "You need:\n" + "\n".join(needed), "\n".join(steps), writer.paragraph("fact", 1, 3)])


def _table(writer: Writer) -> str:
    dice = writer.dice
    columns = [writer.word("attribute") for _ in range(dice.between(2, 4))]
    first = dice.pick(("goods", "thing", "town", "job", "animal"))
    rows = [
        [f"{writer.word('quality')} {writer.word(first)}", *(str(dice.between(1, 9_999)) for _ in columns)]
        for _ in range(dice.between(4, 12))
    ]
    head = [first, *columns]
    if dice.chance(0.4):
        return "\n".join(",".join(row) for row in [head, *rows])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |", *lines])


def _accounts(writer: Writer) -> str:
    parts = [f"{writer.capital('heading')}: figures"]
    for _ in range(writer.dice.between(1, 3)):
        parts += [writer.paragraph("fact", 1, 3), _table(writer)]
    return "\n\n".join(parts)


def _log(writer: Writer) -> str:
    dice = writer.dice
    second, lines = dice.below(80_000), []
    day = f"19{dice.between(10, 36)}-{dice.between(1, 12):02}-{dice.between(1, 28):02}"
    for _ in range(dice.between(8, 40)):
        second += 1 + dice.below(dice.pick((3, 60, 900)))
        clock = f"{second // 3600 % 24:02}:{second // 60 % 60:02}:{second % 60:02}"
        level = dice.pick(("INFO", "INFO", "DEBUG", "WARN", "ERROR"), 1.5)
        lines.append(f"{day} {clock} {level} {writer.word('place').replace(' ', '_')}: {writer.line('event')}")
    return "\n".join(lines)


def _catalogue(writer: Writer) -> str:
    dice = writer.dice
    entries = []
    for _ in range(dice.between(2, 6)):
        names = dict.fromkeys(writer.word("attribute") for _ in range(dice.between(1, 4)))
        entries.append({
            "id": dice.between(1_000, 99_999),
            "title": writer.capital("heading"),
            "owner": writer.someone(),
            **{name: dice.pick((dice.between(1, 500), writer.word("quality"), dice.chance(0.5))) for name in names},
            plural(writer.word("noun")): [writer.word("thing") for _ in range(dice.between(1, 4))],
        })
    return json.dumps(entries, indent=2)


def _questions(writer: Writer) -> str:
    pairs = [
        f"Q: {writer.line('question')}?\nA: {writer.paragraph('fact' if writer.dice.chance(0.5) else 'sentence', 1, 3)}"
        for _ in range(writer.dice.between(3, 9))
    ]
    return "\n\n".join(pairs)


_KINDS: tuple[Callable[[Writer], str], ...] = (
    _story, _article, program, _letter, _play, _questions, _minutes, _instructions, query, _accounts, _log, _catalogue,
)
"""The first are the commonest."""
