"""The one slot: which conversation the engine holds between requests, which are set aside, what of them a new prompt
keeps, and what /slots tells.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvs_core.device.host.machine import available_ram_bytes
from kvs_core.engine.parked import ParkedSessions, gain, parts_from
from kvs_core.engine.session import ParkedSession, Session
from kvs_core.engine.session_file import SavedSession, load_session, save_session
from kvs_core.units import MIB

LOGGER = logging.getLogger(__name__)

LEAST_FREE_BYTES = 512 * MIB
"""RAM that conversations which are set aside leave to the machine."""
_RESERVED = '/\\:*?"<>|'
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class ParkedTotals:
    """How many conversations are set aside, and the host memory that they hold."""

    conversations: int
    size_bytes: int


class Conversation:
    """Tokens that stay with the engine from one request to the next, and conversations that take turns with them. For
    the engine's thread alone, but for ``parked_totals``: other threads must not reach into ``parked``, for what they
    hold on to would not be given back when memory ends.

    A prompt goes on with the conversation that gives it the most tokens, the one in hand or one set aside. If it parts
    from that one, see ``parts_from``, it begins with a copy of what they share, and that one stays whole; so does the
    one in hand when another is taken up. When memory ends short ones go first, then the least recently used, then what
    the history keeps for checkpoints of the one in hand.
    """

    def __init__(
        self, session: Session, model: str, folder: Path | None, parked: ParkedSessions | None = None
    ) -> None:
        """
        model   the key under which conversations are saved, ``model_key``
        folder  where to; None: nowhere
        parked  those that are set aside; None: none can be
        """
        self.session = session
        self._model = model
        self._folder = folder
        self.parked = ParkedSessions(0) if parked is None else parked
        self._copied: ParkedSession | None = None   # at this moment
        session.engine.reclaim_with(self._reclaim)
        self._note_parked()

    @property
    def parked_totals(self) -> ParkedTotals:
        """Of those that are set aside, as of the last change. From any thread."""
        return self._parked_totals

    def begin(self, prompt: Sequence[int], *, reuse: bool) -> int:
        """Have the session hold what can be kept for ``prompt``, and return how many tokens that is: the rest is to be
        run, and is never nothing. Not ``reuse``: it holds nothing.

        ``DeviceError`` if the device fails or has no memory; then the session is as it was, or empty.
        """
        try:
            return self._begin(prompt, reuse)
        finally:
            self._note_parked()

    def _begin(self, prompt: Sequence[int], reuse: bool) -> int:
        session = self.session
        if not reuse:
            if parts_from(session.tokens, prompt, 0) and self._can_set_aside():
                self._set_aside()
            session.rewind(0)
            return 0
        here = session.reusable(prompt)
        other = self.parked.best(prompt)
        if other is not None and gain(other.reusable(prompt), other.tokens) > gain(here, session.tokens):
            self._go_on_with(other, prompt)
        elif parts_from(session.tokens, prompt, here) and self._can_set_aside():
            held = self._set_aside()
            here = held.reusable(prompt)   # less than before, if a checkpoint had to go
            session.tell_lost(held.tokens, prompt, here)
            if here:
                self._fork(held, here)
        return session.keep_common(prompt)

    def _go_on_with(self, other: ParkedSession, prompt: Sequence[int]) -> None:
        """Have the session hold what another conversation gives ``prompt``, and set aside what it holds."""
        tokens = other.reusable(prompt)
        stays = parts_from(other.tokens, prompt, tokens)
        if stays:
            self.session.tell_lost(other.tokens, prompt, tokens)
            self.parked.touch(other)
        else:
            self.parked.remove(other)
        try:
            if self._can_set_aside():
                self._set_aside()
            else:
                self.session.rewind(0)
            if stays:
                self._fork(other, tokens)
            else:
                self.session.unpark(other)
                LOGGER.info("a conversation of %d tokens is taken up again", len(other.tokens))
        except BaseException:
            if not stays:
                self.parked.add(other)
            raise

    def _fork(self, held: ParkedSession, tokens: int) -> None:
        """Begin as a conversation that is set aside, and stays so even where memory ends on the way."""
        self._copied = held
        try:
            self.session.fork(held, tokens)
        finally:
            self._copied = None

    def _can_set_aside(self) -> bool:
        """Whether the conversation in hand is to be kept, and there is memory for it and for another."""
        session, parked, tokens = self.session, self.parked, len(self.session.tokens)
        if not tokens or parked.covers(session.tokens):
            return False
        room_bytes, needed_bytes = parked.room_bytes(tokens), session.least_parked_bytes
        if needed_bytes > room_bytes:
            LOGGER.info("a conversation of %d tokens is not kept: it needs %.1f MiB, of --cache-ram %d MiB it may have "
                        "%.1f", tokens, needed_bytes / MIB, parked.most_bytes // MIB, room_bytes / MIB)  # fmt: skip
            return False
        while (free_bytes := available_ram_bytes()) < LEAST_FREE_BYTES:
            if not parked.drop_one(tokens):
                LOGGER.info("a conversation of %d tokens is not kept: %.0f MiB of RAM are free, and %d are to stay so",
                            tokens, free_bytes / MIB, LEAST_FREE_BYTES // MIB)  # fmt: skip
                return False
        while session.parked_bytes > parked.room_bytes(tokens):   # better without some checkpoints than not at all
            if not session.thin():
                return False
        return True

    def _set_aside(self) -> ParkedSession:
        held = self.session.park()
        gone = self.parked.add(held)
        LOGGER.info("a conversation of %d tokens is set aside: %d are, in %.0f MiB; %d had to go", len(held.tokens),
                    len(self.parked), self.parked.size_bytes / MIB, gone)  # fmt: skip
        return held

    def _reclaim(self) -> bool:
        """Give back the memory of one, or else of a checkpoint of the one in hand; False if there is none. Checkpoints
        of recurrent state stay: theirs is not pinned, and as little may be left of what is."""
        dropped = self.parked.drop_one(but=self._copied) or (self.session.engine.drops_passed and self.session.thin())
        self._note_parked()
        return dropped

    def _note_parked(self) -> None:
        self._parked_totals = ParkedTotals(len(self.parked), self.parked.size_bytes)

    def erase(self) -> int:
        """Forget the conversation in hand; how many tokens it had."""
        held = len(self.session.tokens)
        self.session.rewind(0)
        return held

    def save(self, name: str) -> SavedSession:
        """Write the one in hand to a file of the folder. ``SessionFileError``."""
        return save_session(self.session, self._path(name), self._model)

    def restore(self, name: str) -> SavedSession:
        """Go on where a saved one stood; the one in hand is set aside. ``SessionFileError`` for a file that does not
        fit; then nothing changes."""
        try:
            return load_session(self.session, self._path(name), self._model, leave=self._leave)
        finally:
            self._note_parked()

    def _leave(self, tokens: Sequence[int], goes_on: Callable[[int], bool]) -> None:
        """Set aside what the session holds, unless ``tokens``, which it is to hold, give all of it: where it ended, a
        model that needs checkpoints to go back may find none, and another one may lack what windows have passed.

        goes_on  whether the session will find the pages to go on behind so many of the tokens
        """
        held = self.session.tokens
        anywhere = self.session.engine.can_rewind and not self.session.engine.drops_passed
        given = list(tokens[: len(held)] if anywhere else tokens) == held and goes_on(len(held))
        if not given and self._can_set_aside():
            self._set_aside()

    @property
    def can_save(self) -> bool:
        """Whether there is a folder."""
        return self._folder is not None

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / name


def is_plain_name(name: str) -> bool:
    """Whether a name stays in its folder, on any system: no separators, control characters or reserved ones."""
    return (
        0 < len(name.encode(errors="replace")) <= _LONGEST_NAME and name not in (".", "..") and name == name.strip(" ")
        and not name.endswith(".") and all(char.isprintable() and char not in _RESERVED for char in name)
    )


@dataclass(slots=True)
class SlotView:
    """What /slots shows of the request in progress, or of the last one. The engine's thread writes, others read."""

    speculative: bool = False
    task: int = -1
    processing: bool = False
    params: dict[str, Any] | None = None
    prompt_tokens: int = 0
    prompt_processed: int = 0
    prompt_cached: int = 0
    has_next_token: bool = False
    has_new_line: bool = False
    remaining: int = -1
    decoded: int = 0

    def as_json(self, n_ctx: int) -> dict[str, Any]:
        """One entry of /slots."""
        shown: dict[str, Any] = {
            "id": 0, "n_ctx": n_ctx, "speculative": self.speculative, "is_processing": self.processing,
        }  # fmt: skip
        if self.params is None:
            return shown
        return shown | {
            "id_task": self.task,
            "n_prompt_tokens": self.prompt_tokens,
            "n_prompt_tokens_processed": self.prompt_processed,
            "n_prompt_tokens_cache": self.prompt_cached,
            "params": self.params,
            "next_token": [{
                "has_next_token": self.has_next_token,
                "has_new_line": self.has_new_line,
                "n_remain": self.remaining,
                "n_decoded": self.decoded,
            }],
        }
