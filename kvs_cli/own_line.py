"""Lines of their own: text on stdout comes in pieces, and what stderr has to say must not come inside a line of it.

Where both lead to one place (a terminal, ``2>&1``), a line for stderr that comes within a line of text begins a new one
there. Elsewhere nothing is added to either. Light, since help imports it.
"""

from __future__ import annotations

import os
import sys

_within = False   # the text on stdout has come to the middle of a line


def text_written(text: str) -> None:
    """Some text has been written to stdout."""
    global _within
    if text:
        _within = not text.endswith("\n")


def begin_line() -> None:
    """Before a line is written to stderr. ``OSError`` if it takes no more."""
    global _within
    if _within and _is_one_place():
        sys.stderr.write("\n")
        sys.stderr.flush()
        _within = False


def _is_one_place() -> bool:
    try:
        return os.path.samestat(os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno()))
    except (OSError, ValueError):   # one of them has no file, or it is closed
        return False
