"""Forty prompts of eight kinds, 3 to 400 tokens long: texts that repeat, or nearly, and texts that do not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count, cycle
from pathlib import Path

HARBOUR = Path(__file__).parents[1] / "data" / "harbour.txt"

NAMES = ("anna", "boris", "chen", "divya", "emil", "fatou", "goran")
GOODS = ("apples", "bread", "candles", "dried figs", "eggs", "flour", "garlic", "honey", "ink", "jam")
FOREIGN = (
    "Der Hafen ist älter als die Stadt. ", "Où sont les bateaux ? ", "Прилив был выше обычного. ",
    "港の水位は三尺です。", "🌊⛵🌊⛵ ", "Ελάτε το πρωί. ", "naïve coöperation, déjà vu — “quoted”. ", "नाव घाट पर है। ",
)


def _repeated(dice: random.Random) -> Iterator[str]:
    while True:
        yield "the boat goes out, the boat comes in, and the water is " + dice.choice(("low", "low", "high")) + "; "


def _code(dice: random.Random) -> Iterator[str]:
    for number in count():
        name = NAMES[number % len(NAMES)]
        yield (f"    def get_{name}(self, index: int) -> float:\n        if index >= len(self._{name}):\n"
               f"            raise IndexError(index)\n        return self._{name}[index] * {dice.randrange(1, 4)}\n\n")


def _list(dice: random.Random) -> Iterator[str]:
    for number, goods in enumerate(cycle(GOODS), 1):
        yield f"{number}. {dice.randrange(1, 9)} {goods} for {NAMES[number % 3]}\n"


def _chat(dice: random.Random) -> Iterator[str]:
    yield "<|im_start|>system\nYou answer in one sentence.<|im_end|>\n"
    while True:
        goods = dice.choice(GOODS[:4])
        yield (f"<|im_start|>user\nHow many {goods} are there?<|im_end|>\n<|im_start|>assistant\n"
               f"There are {dice.randrange(2, 5)} {goods} on the table.<|im_end|>\n")


def _prose(dice: random.Random) -> Iterator[str]:
    text = HARBOUR.read_text()
    while True:
        start = dice.randrange(0, len(text) - 900)
        yield text[start : start + 900]


def _numbers(dice: random.Random) -> Iterator[str]:
    for row in count(dice.randrange(100)):
        yield f"{row},{row * row},{row % 7}.50,{2000 + row % 3}-01-{1 + row % 28:02}\n"


def _foreign(dice: random.Random) -> Iterator[str]:
    while True:
        yield dice.choice(FOREIGN)


def _noise(dice: random.Random) -> Iterator[str]:
    while True:
        yield "".join(dice.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(dice.randrange(2, 9))) + " "


KINDS = (_repeated, _code, _list, _chat, _prose, _numbers, _foreign, _noise)
LENGTHS = ((3, 1), (20, 2), (60, 5), (140, 9), (330, 10))   # of the first kind, and how much longer each next one is
FORTY = len(KINDS) * len(LENGTHS)


def prompt(number: int, encode: Callable[[str], Sequence[int]]) -> list[int]:
    """Prompt ``number``, of ``FORTY``, in the tokens of ``encode``; the same at every call."""
    length, kind = divmod(number, len(KINDS))
    first, more = LENGTHS[length]
    tokens = first + more * kind
    parts = KINDS[kind](random.Random(number))
    text = ""
    while len(encoded := encode(text)) < tokens:
        text += next(parts)
    return list(encoded[:tokens])
