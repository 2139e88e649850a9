"""What ``--json`` prints where an error or Ctrl-C ends a command before its object: one that tells so. Light, since
help imports it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kvs_cli.ending import OutputError, drop, error_text, writing
from kvs_core.errors import KvsError

LOGGER = logging.getLogger(__name__)

INTERRUPTED = "interrupted"
"""The stop reason of a text that Ctrl-C ended."""

FAILED = "error"
"""That of one which an error ended."""

NO_TEXT: Mapping[str, Any] = MappingProxyType(
    {"generated_tokens": 0, "token_ids": [], "text": "", "stop_reason": FAILED}
)
"""Of ``kvs run``: the parts of its object (see ``RunResult``) that are known before there is text."""


@dataclass(slots=True)
class ErrorObject:
    """due: one is to be printed, if an error or Ctrl-C comes; facts: what else stands in it."""

    due: bool
    facts: dict[str, Any] = field(default_factory=dict)


@contextmanager
def error_object(*, due: bool, facts: Mapping[str, Any] | None = None) -> Iterator[ErrorObject]:
    """Around a command: prints the object for an error that passes through, with the ``error``, and for Ctrl-C, with
    the stop reason, which a line tells too. The block adds what it learns to ``facts``, and says by ``due`` that its
    own object is printed. Output that cannot be written has none."""
    told = ErrorObject(due, dict(facts or {}))
    try:
        yield told
    except OutputError:
        raise
    except (KvsError, OSError, MemoryError) as error:
        if told.due:
            _print(told.facts | {"error": error_text(error)})
        raise
    except KeyboardInterrupt:
        LOGGER.info("stop: %s", INTERRUPTED)
        if told.due:
            _print(told.facts | {"stop_reason": INTERRUPTED})
        raise


def _print(value: Mapping[str, Any]) -> None:
    from kvs_cli.render import print_json  # here, since help needs none of what it imports

    try:
        print_json(value)
        with writing():
            sys.stdout.flush()
    except OutputError:   # the error that it would tell is told on stderr
        drop(sys.stdout)
