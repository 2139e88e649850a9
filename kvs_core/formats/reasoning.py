"""Thoughts in a model's text: which tags mark them in a format, and text that is taken apart at those tags as it comes.

    <think>\\n thoughts \\n</think>\\n\\n the answer          the prompt may have opened the first tag already
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class ReasoningTags(NamedTuple):
    """What opens and what closes a stretch of thought."""

    start: str
    end: str


_KNOWN = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
)


def reasoning_tags(template: str) -> ReasoningTags:
    """The tags that a chat template writes; those of most models if it writes none."""
    return next((tags for tags in _KNOWN if tags.start in template and tags.end in template), _KNOWN[0])


def is_open(prompt: str, tags: ReasoningTags) -> bool:
    """Whether text that follows ``prompt`` begins inside of thoughts: the prompt ends with their tag."""
    return prompt.rstrip().endswith(tags.start)


def open_tags(prompt: str) -> ReasoningTags | None:
    """The tags whose first one ``prompt`` ends with; None if what follows begins outside of thoughts."""
    return next((tags for tags in _KNOWN if is_open(prompt, tags)), None)


def held_back(text: str, tags: Iterable[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of one of ``tags``."""
    return max((size for tag in tags for size in range(min(len(tag) - 1, len(text)), 0, -1)
                if text.endswith(tag[:size])), default=0)


class Part(NamedTuple):
    """A piece of the answer, or of the thoughts before it."""

    is_reasoning: bool
    text: str


class _Where(Enum):
    START = "start"        # nothing but white space so far: thoughts may open
    THOUGHT = "thought"
    BETWEEN = "between"    # behind the closing tag, before the answer
    ANSWER = "answer"


class ReasoningSplitter:
    """Takes apart text that arrives in pieces. White space around thoughts is dropped, and so are empty thoughts; an
    answer without thoughts in front is passed on as it is. The result does not depend on how the text was cut."""

    def __init__(self, tags: ReasoningTags, *, is_open: bool, also_ends: Iterable[str] = ()) -> None:
        """``also_ends``: other texts that end thoughts, and belong to the answer."""
        self._tags = tags
        self._ends = (tags.end, *also_ends)
        self._where = _Where.THOUGHT if is_open else _Where.START
        self._held = ""
        self._begun = False   # some thought was passed on

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside of thoughts."""
        return self._where is _Where.THOUGHT

    def push(self, text: str) -> list[Part]:
        """What is certain now."""
        self._held += text
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        """What was held back, once no more comes."""
        text, self._held = self._held, ""
        if self._where is _Where.THOUGHT:
            text = text.rstrip() if self._begun else text.strip()
            return [Part(True, text)] if text else []
        return [Part(False, text)] if text and self._where is not _Where.BETWEEN else []

    def _advance(self, parts: list[Part]) -> bool:
        """One move; False if more text is needed for the next."""
        match self._where:
            case _Where.START:
                return self._open()
            case _Where.THOUGHT:
                return self._think(parts)
            case _Where.BETWEEN:
                self._held = self._held.lstrip()
                if self._held:
                    self._where = _Where.ANSWER
                return bool(self._held)
            case _Where.ANSWER:
                if self._held:
                    parts.append(Part(False, self._held))
                    self._held = ""
                return False

    def _open(self) -> bool:
        text = self._held.lstrip()
        if len(text) < len(self._tags.start) and self._tags.start.startswith(text):
            return False
        if text.startswith(self._tags.start):
            self._held = text[len(self._tags.start) :]
            self._where = _Where.THOUGHT
        else:
            self._where = _Where.ANSWER
        return True

    def _think(self, parts: list[Part]) -> bool:
        if not self._begun:
            self._held = self._held.lstrip()
        ends = [(at, end) for end in self._ends if (at := self._held.find(end)) >= 0]
        if ends:
            at, end = min(ends)
            self._emit(parts, self._held[:at].rstrip())
            self._held = self._held[at + len(end) if end == self._tags.end else at :]
            self._where = _Where.BETWEEN
            return True
        sure = self._held[: len(self._held) - held_back(self._held, self._ends)].rstrip()
        self._held = self._held[len(sure) :]
        self._emit(parts, sure)
        return False

    def _emit(self, parts: list[Part], text: str) -> None:
        if text:
            self._begun = True
            parts.append(Part(True, text))
