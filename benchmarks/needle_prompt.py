"""Write a long prompt that hides facts in generated text and asks for one of them.

    python -m benchmarks.needle_prompt --tokens 20000 --output prompt.txt

The text consists of sentences made from word lists, so it may be published. It has at most ``--tokens`` tokens of the
model's tokenizer, and lacks no more than a sentence. Equal arguments give equal text. The answer, and the token at
which its fact stands, go to standard error.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.demo_model import recall
from kvs_core.demo import DEMO_MODEL
from kvs_core.errors import KvsError
from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class NeedlePrompt:
    """text         ends where the answer begins
    tokens       of the text
    answer       what should follow, with its leading space
    fact_token   tokens of the text before the fact that is asked for
    """

    text: str
    tokens: int
    answer: str
    fact_token: int


def make_prompt(tokenizer: Tokenizer, *, tokens: int, depth: float, facts: int, seed: int) -> NeedlePrompt:
    """A prompt of at most ``tokens`` tokens.

    depth  where the fact that is asked for stands: 0 at the start, 1 right before the question
    facts  how many facts of the same sort there are, that one included; the others are spread evenly
    Raises ValueError if they do not fit.
    """
    random = Random(seed)
    hidden = recall.draw_facts(facts, random, kind=recall.SECRET_NUMBER)
    question = "\n\n" + hidden[0].prompt
    room = tokens - len(tokenizer.encode(question)) - sum(len(tokenizer.encode(" " + f.statement)) for f in hidden)
    sentences: list[str] = []
    paragraph = recall.paragraphs(random)
    while room > 0:
        added = next(paragraph)
        sentences += [(" " if i else "\n\n") + part for i, part in enumerate(_sentences(added))]
        room -= len(tokenizer.encode(added + "\n\n"))
    sentences[:1] = [sentences[0].lstrip()] if sentences else []
    while True:
        text, at = _joined(sentences, hidden, depth)
        if not sentences:
            raise ValueError(f"{facts} facts and a question take more than {tokens} tokens")
        count = len(tokenizer.encode(text + question))
        if count <= tokens:
            return NeedlePrompt(text + question, count, hidden[0].value, len(tokenizer.encode(text[:at])))
        sentences.pop()


def _sentences(paragraph: str) -> list[str]:
    """A paragraph cut behind its full stops."""
    parts = paragraph.split(". ")
    return [part + "." for part in parts[:-1]] + parts[-1:]


def _joined(sentences: list[str], facts: list[recall.Fact], depth: float) -> tuple[str, int]:
    """The text with all facts, and the place of the first of them."""
    others = len(facts) - 1
    places = sorted([(depth, 0), *(((i + 0.5) / others, i + 1) for i in range(others))])
    parts, at, start = [], 0, 0
    for share, number in places:
        # A fact stands behind a sentence, so the first one comes before all of them.
        stop = max(1, round(share * len(sentences)))
        parts += sentences[start:stop]
        start = max(start, stop)
        if number == 0:
            at = sum(map(len, parts))
        parts.append(" " + facts[number].statement)
    return "".join([*parts, *sentences[start:]]), at


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a long prompt that hides facts and asks for one of them.")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, metavar="FILE",
                        help="the GGUF whose tokens count; by default the demo model")
    parser.add_argument("--tokens", type=int, default=20_000, metavar="N", help="most tokens of the prompt")
    parser.add_argument("--depth", type=float, default=0.1, metavar="X", help="place of the fact, from 0 to 1")
    parser.add_argument("--facts", type=int, default=8, metavar="N", help="facts in the text")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write here and not to standard output")
    a = parser.parse_args()
    if not 0 <= a.depth <= 1 or a.facts < 1:
        parser.error("--depth is from 0 to 1, --facts at least 1")
    try:
        metadata = GgufFile.open(a.model).metadata
        tokenizer = Tokenizer.from_metadata(metadata, source=str(a.model))
        prompt = make_prompt(tokenizer, tokens=a.tokens, depth=a.depth, facts=a.facts, seed=a.seed)
        if a.output:
            a.output.write_text(prompt.text, encoding="utf-8")
        else:
            sys.stdout.write(prompt.text)
    except (KvsError, ValueError, OSError) as error:
        print(f"needle_prompt: {error}", file=sys.stderr)
        return 1
    print(
        f"{prompt.tokens} tokens; the fact stands after {prompt.fact_token}; the answer is{prompt.answer}",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
