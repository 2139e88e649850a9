"""The one slot: which tokens the engine holds between requests, what of them a new prompt keeps, and what /slots tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvs_core.engine.session import Session
from kvs_core.engine.session_file import SavedSession, load_session, save_session

_RESERVED = '/\\:*?"<>|'
_LONGEST_NAME = 200


class Conversation:
    """Tokens that stay with the engine from one request to the next. For the engine's thread alone."""

    def __init__(self, session: Session, model: str, folder: Path | None) -> None:
        """
        model   the key under which conversations are saved, ``model_key``
        folder  where to; None: nowhere
        """
        self.session = session
        self._model = model
        self._folder = folder

    def begin(self, prompt: Sequence[int], *, reuse: bool) -> int:
        """Keep what the session shares with ``prompt``, and return how many tokens that is: the rest is to be run,
        and is never nothing. Not ``reuse``: keep nothing."""
        if reuse:
            return self.session.keep_common(prompt)
        self.session.rewind(0)
        return 0

    def erase(self) -> int:
        """Forget everything; how many tokens that was."""
        held = len(self.session.tokens)
        self.session.rewind(0)
        return held

    def save(self, name: str) -> SavedSession:
        """Write it to a file of the folder. ``SessionFileError``."""
        return save_session(self.session, self._path(name), self._model)

    def restore(self, name: str) -> SavedSession:
        """Go on where a saved one stood. ``SessionFileError`` for a file that does not fit; then nothing changes."""
        return load_session(self.session, self._path(name), self._model)

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
