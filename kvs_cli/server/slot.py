"""The one slot: which tokens the engine holds between requests, what of them a new prompt keeps, and what /slots tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvs_core.engine.session import Session


class Conversation(Protocol):
    """Tokens that stay with the engine from one request to the next. For the engine's thread alone."""

    @property
    def session(self) -> Session:
        """What ``begin`` left; its user extends it."""

    def begin(self, prompt: Sequence[int], *, reuse: bool) -> int:
        """Keep what the session shares with ``prompt``, and return how many tokens that is: the rest is to be run,
        and is never nothing. Not ``reuse``: keep nothing."""

    def erase(self) -> int:
        """Forget everything; how many tokens that was."""


class PrefixConversation:
    """Keeps the longest common prefix of the last request and the new prompt.

    A model with recurrent layers cannot go back: it keeps all it holds if the prompt continues that, else nothing.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def session(self) -> Session:
        """See ``Conversation``."""
        return self._session

    def begin(self, prompt: Sequence[int], *, reuse: bool) -> int:
        """See ``Conversation``."""
        held = self._session.tokens
        common = min(shared(held, prompt), len(prompt) - 1) if reuse else 0
        if common < len(held) and not self._session.engine.can_rewind:
            common = 0
        self._session.rewind(common)
        return common

    def erase(self) -> int:
        """See ``Conversation``."""
        held = len(self._session.tokens)
        self._session.rewind(0)
        return held


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


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
