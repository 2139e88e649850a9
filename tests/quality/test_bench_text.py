"""The benchmark text is the same everywhere, long enough, and built as texts are."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import kvs_core
from kvs_core.bench_text import TEXT_BYTES, benchmark_text
from kvs_core.data.phrases import Dice, Grammar, Writer, plural
from kvs_core.demo import DEMO_MODEL
from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.tokenizer import Tokenizer

SHA256 = "e734ab3269ba36e8247ee9005557e49b671cbb72d8d45123e2012321935d814e"
LEAST_TOKENS = 300_000


@pytest.fixture(scope="module")
def text() -> str:
    return benchmark_text()


def tokens_of(path: Path, text: str) -> list[int]:
    return Tokenizer.from_metadata(GgufFile.open(path).metadata, source=path.name).encode(text, add_special=False)


def repeated(tokens: Sequence[int], n: int) -> float:
    """Share of the positions behind n tokens that have stood there before."""
    seen, hits = set(), 0
    for at in range(n, len(tokens)):
        before = tuple(tokens[at - n : at])
        hits += before in seen
        seen.add(before)
    return hits / (len(tokens) - n)


def test_it_is_pinned(text: str) -> None:
    """Measurements on it can be compared: another text is another benchmark."""
    assert hashlib.sha256(text.encode("ascii")).hexdigest() == SHA256
    assert TEXT_BYTES < len(text) < TEXT_BYTES + 30_000


def test_it_is_long_for_every_tokenizer(text: str, smollm2_path: Path) -> None:
    """300,000 tokens with the demo model's 4,096 words and with SmolLM2's 49,152."""
    assert len(tokens_of(DEMO_MODEL, text)) > LEAST_TOKENS
    assert len(tokens_of(smollm2_path, text)) > LEAST_TOKENS


def test_no_paragraph_comes_twice(text: str) -> None:
    """Nothing loops."""
    paragraphs = [part.strip() for part in text.split("\n\n")]
    assert len(paragraphs) > 6_000
    assert len(set(paragraphs)) == len(paragraphs)


def test_it_repeats_itself_as_prose_and_programs_do(text: str) -> None:
    """Short rows of tokens come again, long ones seldom: drafts from the text are accepted sometimes, not always.

    Measured the same way with SmolLM2's tokens: Python's library 43 % of 4, 10 % of 12; harbour.txt 3 % and none.
    """
    tokens = tokens_of(DEMO_MODEL, text[:400_000])
    assert 0.25 < repeated(tokens, 4) < 0.60
    assert 0.005 < repeated(tokens, 12) < 0.10
    assert repeated(tokens, 32) < 0.01


def test_programs_parse(text: str) -> None:
    """What looks like Python is Python."""
    functions = re.findall(r"(?m)^def \w+\(.*\n(?: {4}.*\n)+", text)
    assert len(functions) > 200
    for function in functions:
        assert isinstance(ast.parse(function).body[0], ast.FunctionDef)


def test_every_slot_has_a_rule_and_every_rule_a_use() -> None:
    """A word that is misspelt in the grammar would otherwise be found by chance."""
    grammar = Grammar.read((Path(kvs_core.__file__).parent / "data" / "benchmark_text.grammar").read_text("ascii"))
    sources = [path.read_text() for path in (Path(kvs_core.__file__).parent / "data").glob("*.py")]
    sources.append((Path(kvs_core.__file__).parent / "bench_text.py").read_text())
    known = {"who", "he", "him", "his", "other", "person", "n", "ordinal", "num", "dec", "pct", "year", "clock"}
    slots = {name for found in grammar.rules.values() for text in found for name in re.findall(r"\{(\w+)", text)}
    assert slots <= known | set(grammar.rules)
    for rule in set(grammar.rules) - slots:
        assert any(re.search(f"[\"']{rule}[\"']", source) for source in sources), rule
    for found in grammar.rules.values():
        for alternative in found:
            assert alternative.count("[") == alternative.count("]")


@pytest.mark.parametrize(
    ("verb", "past", "ing"),
    [("carry", "carried", "carrying"), ("hide", "hid", "hiding"), ("paint", "painted", "painting"),
     ("measure", "measured", "measuring"), ("stay", "stayed", "staying")],
)
def test_verbs_are_inflected(verb: str, past: str, ing: str) -> None:
    """By rule, and by the list where that fails."""
    grammar = Grammar.read("forms:\n  hide hid hiding\nact:\n  [x] y\n")
    assert [grammar.inflected(verb, form) for form in ("past", "ing", "")] == [past, ing, verb]


@pytest.mark.parametrize(
    ("noun", "several"),
    [("lamp", "lamps"), ("box", "boxes"), ("bench", "benches"), ("ferry", "ferries"), ("key", "keys"),
     ("knife", "knives"), ("sheep", "sheep")],
)
def test_nouns_have_plurals(noun: str, several: str) -> None:
    """Regular ones, and the few of the word lists that are not."""
    assert plural(noun) == several


def test_a_writer_fits_articles_and_capitals() -> None:
    """An before a vowel; a capital where a sentence begins; the same dice, the same words."""
    grammar = Grammar.read(
        "she: Ada\nhe: Ivo\nsurname: Holm\njob: cook\nthing: oven\nline:\n  a {thing} is a {thing}. {thing.s} [be].\n"
    )
    line = Writer(grammar, Dice(3)).line("line")
    assert line == "An oven is an oven. Ovens be."
