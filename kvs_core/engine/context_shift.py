"""Context shift: room in a context that is full while text is generated, as llama-server makes it.

    n_past tokens    | n_keep | n_discard: forgotten | n_left - n_discard |      n_left = n_past - n_keep
    afterwards       | n_keep | n_left - n_discard |

What stays was computed while the forgotten tokens could be seen, so the text goes on from their gist, not anew.
"""

from __future__ import annotations

import logging

from kvs_core.engine.session import Session

LOGGER = logging.getLogger(__name__)

_LEAST_LEFT = 4   # tokens of the context that are not kept


def most_kept(context_tokens: int, *, bos: bool) -> int:
    """The largest ``keep`` that a context has room for. ``ContextShift`` cuts a larger one down to it."""
    return max(0, context_tokens - _LEAST_LEFT - bos)


class ContextShift:
    """How the context of one text is shifted.

    dropped  tokens that have been forgotten so far
    """

    def __init__(self, keep: int, *, prompt_tokens: int, bos: bool, discard: int = 0) -> None:
        """
        keep     tokens at the beginning that stay; -1: as many as the prompt has. Four of the context never do
        bos      the vocabulary puts a token in front of texts, which stays too
        discard  tokens that go at a time, but none of those that stay; 0: half of the others
        """
        self._keep = (prompt_tokens if keep < 0 else keep) + bos
        self._discard = discard
        self.dropped = 0

    def make_room(self, session: Session) -> None:
        """Shift, between steps, a session whose context is full. See ``Session.shift``."""
        tokens, most = len(session.tokens), session.engine.context.context_tokens - _LEAST_LEFT
        keep = min(self._keep, max(0, most), tokens)
        left = tokens - keep
        discard = min(self._discard or max(1, left // 2), left)
        session.shift(keep, discard)
        self.dropped += discard
        LOGGER.debug("context shift: %d tokens kept, %d forgotten, %d moved down", keep, discard, left - discard)
