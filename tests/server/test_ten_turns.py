"""Ten turns of a conversation over HTTP with a hybrid model: what each reads, and that its numbers are the same bits
when it is told again, beside another conversation, and after a restart.

Environment:
    KVS_TEST_LONG   also with 8,000 tokens, and with the demo model: minutes
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvs_core.demo import DEMO_MODEL
from kvs_core.engine.session import common_prefix
from tests.server.running import Running, running
from tests.support.tiny_gguf import write_tiny_qwen35

_HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
KEEPING = _HEAD + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
"""Keeps what was written, to the letter."""
FORGETFUL = _HEAD + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
"""Opens an answer with thoughts, here empty ones, and drops them from the answers before, as Qwen's does."""
WORDS = ("harbour", "night", "boat", "lamp", "river", "miller", "oak", "brother", "stone", "winter", "letter", "window")
TURNS = 10
HALF = 5
CLOSE = 0.01
"""Two tokens whose logarithms are nearer than that may change places where a prompt is cut into other ubatches."""

_LONG = pytest.mark.skipif(not os.environ.get("KVS_TEST_LONG"), reason="KVS_TEST_LONG is not set")


@dataclass(frozen=True)
class Case:
    """A model, characters that are said in a turn, tokens of an answer, and tokens that there are at least in the end.
    """

    model: str
    characters: int
    answer: int
    least: int


CASES = [
    pytest.param(Case("tiny", 150, 8, 1000), id="tiny"),
    pytest.param(Case("tiny", 1700, 32, 8000), id="tiny-8K", marks=_LONG),
    pytest.param(Case("demo", 2900, 32, 8000), id="demo-8K", marks=_LONG),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 recurrent and 2 attention layers."""
    return write_tiny_qwen35(tmp_path_factory.mktemp("tiny") / "qwen35.gguf", seed=1)


@dataclass
class Talk:
    """A conversation, and what of it the slot must hold: worked out here, from its tokens alone.

    held    tokens with rows after the last turn
    places  where the model can go back to: the ends of prompts, and of what the user said last in each
    """

    case: Case
    topic: str
    messages: list[dict[str, str]] = field(default_factory=list)
    told: list[Any] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)   # per turn: tokens of the last one that the template did not repeat

    def turn(self, server: Running) -> None:
        """Say something and note the answer. It reads what is new, and where tokens before that have changed, what lies
        behind the last place before the change."""
        dice = Random(f"{self.topic} {len(self.messages)}")
        said = f"About the {self.topic}:"
        while len(said) < self.case.characters:
            said += f" the {dice.choice(WORDS)} and the {dice.choice(WORDS)} of the {dice.choice(WORDS)},"
        self.messages.append({"role": "user", "content": said})
        prompt, message_end = self._prompt(server)
        reply = self.ask(server, cache_prompt=True)
        content = reply["choices"][0]["logprobs"]["content"]
        self.messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        self.told.append(content)
        timings = reply["timings"]
        assert timings["cache_n"] + timings["prompt_n"] == len(prompt)
        assert timings["cache_n"] == self._kept(prompt)
        self.cached.append(timings["cache_n"])
        self.read.append(timings["prompt_n"])
        self.gone.append(len(self.held) - common_prefix(self.held, prompt))
        self.places = [place for place in self.places if place <= self.cached[-1]]
        self.places += [place for place in (message_end, len(prompt)) if place > self.cached[-1]]
        self.held = [*prompt, *(entry["id"] for entry in content[:-1])]   # the last one has not been run

    def ask(self, server: Running, *, cache_prompt: bool) -> Any:
        """The reply to the messages so far."""
        return server.post(
            "/v1/chat/completions", messages=self.messages, max_tokens=self.case.answer, temperature=0, logprobs=True,
            top_logprobs=2, ignore_eos=True, reasoning_format="none", cache_prompt=cache_prompt,
        )

    def _kept(self, prompt: list[int]) -> int:
        common = common_prefix(self.held, prompt)
        return common if common == len(self.held) else max([0, *(at for at in self.places if at <= common)])

    def _prompt(self, server: Running) -> tuple[list[int], int]:
        """Its tokens, and how many of them are before the answer is opened."""
        tokens = []
        for opens in (True, False):
            text = server.post("/apply-template", messages=self.messages, add_generation_prompt=opens)["prompt"]
            tokens.append(server.post("/tokenize", content=text, add_special=True, parse_special=True)["tokens"])
        return tokens[0], common_prefix(tokens[1], tokens[0])

    @property
    def figures(self) -> tuple[list[int], list[int], list[Any]]:
        """What two tellings of it must have in common: counts, tokens, and the bits of their probabilities."""
        return self.cached, self.read, self.told


@pytest.mark.parametrize("template", [KEEPING, FORGETFUL], ids=["keeping", "forgetful"])
@pytest.mark.parametrize("case", CASES)
def test_ten_turns(case: Case, template: str, tiny: Path, tmp_path: Path) -> None:
    """Each reads its new tokens alone. The forgetful template changes the opening of each answer when it is in the
    past: there a turn goes on at the end of what was said before that answer, and reads the answer too. With a template
    that keeps all a turn does so from the end of the last prompt, where the answer's text has other tokens than those
    that were drawn.

    The bits are the same when it is told again by turns with another conversation, of which the same holds, and when
    the second half of it is told by another server that took up what the first saved. Read at once, by a prompt that
    reuses nothing, the last answer is the same or leaves it where two tokens are as good.
    """
    path = tiny if case.model == "tiny" else DEMO_MODEL
    flags = ("-m", path, "-c", 10240, "--chat-template", template, "--slot-save-path", tmp_path)
    talk = Talk(case, "old harbour")
    with running(*flags) as server:
        for turn in range(TURNS):
            if turn == HALF:
                assert server.post("/slots/0?action=save", filename="talk.kvs")["n_saved"] == len(talk.held)
                half = Talk(case, talk.topic, list(talk.messages), held=talk.held, places=talk.places)
            talk.turn(server)
        answer = talk.messages.pop()
        cold = talk.ask(server, cache_prompt=False)
        talk.messages.append(answer)
    assert len(talk.held) >= case.least
    assert cold["timings"]["cache_n"] == 0
    same_or_close(talk.told[-1], cold["choices"][0]["logprobs"]["content"])
    assert sum(talk.read) < len(talk.held) + TURNS * (case.answer + 20)   # nothing is read a second time but answers
    assert all(gone > 0 for gone in talk.gone[1:]) or template == KEEPING

    with running(*flags) as server:
        assert server.post("/slots/0?action=restore", filename="talk.kvs")["n_restored"] == len(half.held)
        for _ in range(HALF, TURNS):
            half.turn(server)
    assert half.figures == tuple(figures[HALF:] for figures in talk.figures)

    with running(*flags) as server:
        both = [Talk(case, talk.topic), Talk(case, "new mill")]
        for _ in range(TURNS):
            for each in both:
                each.turn(server)
    assert both[0].figures == talk.figures
    assert sum(both[1].read) < len(both[1].held) + TURNS * (case.answer + 20)


def same_or_close(warm: list[dict[str, Any]], cold: list[dict[str, Any]]) -> None:
    """The same tokens, or at the first that differs two that are nearly as likely."""
    for one, other in zip(warm, cold, strict=True):
        if one["id"] != other["id"]:
            best, second = (entry["logprob"] for entry in one["top_logprobs"])
            assert best - second < CLOSE
            return
