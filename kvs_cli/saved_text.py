"""The session file of ``kvs run``: what an earlier run has read and written need not be read again."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from kvs_cli.open_model import OpenModel
from kvs_core.engine.context_shift import ContextShift
from kvs_core.engine.engine import Engine
from kvs_core.engine.session import Session
from kvs_core.engine.session_file import load_session, model_key, save_session
from kvs_core.errors import SettingsError
from kvs_core.models.rope import divisors_name
from kvs_core.settings import RopeSettings
from kvs_core.settings.serving import CacheSettings
from kvs_core.units import MIB, counted

LOGGER = logging.getLogger(__name__)

def check_place(path: Path) -> None:
    """SettingsError for a session file that could not be written in the end, before anything is done."""
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise SettingsError(f"--session {path}: cannot be written; name a file in a folder that can be written to")


class SavedText:
    """A session on an engine, and the file that it comes from and goes to."""

    def __init__(self, engine: Engine, model: OpenModel, rope: RopeSettings, path: Path) -> None:
        """Takes the file up if there is one. ``SessionFileError`` if it does not fit."""
        defaults = CacheSettings()
        self.session = Session(
            engine, engine.make_checkpoints(defaults.checkpoints, defaults.ram_mib * MIB),
            checkpoint_tokens=defaults.checkpoint_tokens,
        )
        self._path = path
        self._key = model_key(model.file, rope, divisors_name(model.spec.rope, engine.context.context_tokens))
        self.tokens: list[int] = []
        if path.exists():
            saved = load_session(self.session, path, self._key)
            self.tokens = [*self.session.tokens, *saved.tail]

    def keep(self, prompt: Sequence[int]) -> int:
        """How many tokens of ``prompt`` need not be read."""
        kept = self.session.keep_common(prompt)
        LOGGER.info("session: %d of %s are there already", kept, counted(len(prompt), "prompt token"))
        return kept

    def make_room(self, shift: ContextShift) -> list[int]:
        """Where the text fills the context: forget some of it, and return what is left, as a prompt that goes on."""
        tail = self.tokens[len(self.session.tokens) :]
        shift.make_room(self.session)
        return [*self.session.tokens, *tail]

    def save(self, text: Sequence[int], *, dropped: int = 0) -> None:
        """Write the file, for a session that has come to these tokens, prompt included, and has forgotten ``dropped``
        of them. ``SessionFileError``. What was interrupted in a context shift has no rows left: then the file stays as
        it was."""
        if text and not self.session.tokens:
            LOGGER.warning("session: a context shift was broken off and its rows are lost; %s is as it was", self._path)
            return
        tail = text[dropped + len(self.session.tokens) :]
        saved = save_session(self.session, self._path, self._key, tail)
        tokens = counted(saved.tokens + len(tail), "token")
        LOGGER.info("session: %s, %.1f MiB in %s", tokens, saved.size_bytes / MIB, self._path)
