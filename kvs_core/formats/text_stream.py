"""Text from tokens as they come: whole characters only, and no part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import NamedTuple


class Utf8Stream:
    """Decodes bytes that arrive in pieces of any length.

    All texts returned, with ``flush`` at the end, join to ``whole.decode("utf-8", errors="replace")``.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, piece: bytes) -> str:
        """All characters that are complete now."""
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """What was held back: U+FFFD if the bytes ended inside a character. The stream is as new afterwards."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class Matched(NamedTuple):
    """What may be shown of the text so far, and the stop string that ended it, if one did."""

    text: str
    stop: str | None


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces, and never lets a part of it out.

    First means the one that is complete first, the longest of those that end at the same character. So the result
    does not depend on how the text was cut.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Empty stop strings are ignored."""
        self._stops = [stop for stop in dict.fromkeys(stops) if stop]
        self._begins = {stop[:size] for stop in self._stops for size in range(1, len(stop))}
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._stop: str | None = None

    def push(self, text: str) -> Matched:
        """The text that can be shown now. After a stop string there is none."""
        if self._stop is not None:
            return Matched("", self._stop)
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self._stop = min(ends)
            self._held = ""
            return Matched(text[:at], self._stop)
        keep = next((n for n in range(min(len(text), self._longest - 1), 0, -1) if text[-n:] in self._begins), 0)
        self._held = text[len(text) - keep :]
        return Matched(text[: len(text) - keep], None)

    def flush(self) -> str:
        """The text held back, once no more will come."""
        text, self._held = self._held, ""
        return text
