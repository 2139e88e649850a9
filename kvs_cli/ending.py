"""How a command ends: its exit codes, and output that cannot be written. Light, since help imports it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from kvs_core.errors import LESS_MEMORY, KvsError

FAILED = 1
INTERRUPTED = 130
"""By Ctrl-C: 128 and the number of the signal, as shells count."""


class OutputError(KvsError):
    """What stdout is connected to takes no more."""


class ReaderLeft(OutputError):
    """Whoever read stdout has closed it, which is nothing to tell anybody."""


def error_text(error: KvsError | OSError | MemoryError) -> str:
    """The line about an error that ends a command. One of the system is what no adapter has made an error of kvs."""
    if isinstance(error, OSError):
        return f"the system says: {error}; check what it names, and try again"
    return f"out of memory; {LESS_MEMORY}" if isinstance(error, MemoryError) else str(error)


@contextmanager
def writing() -> Iterator[None]:
    """Around whatever writes to stdout and does nothing else. Raises OutputError."""
    try:
        yield
    except BrokenPipeError:
        raise ReaderLeft("the reader of the output has left") from None
    except OSError as error:
        raise OutputError(f"the output cannot be written: {error.strerror or error}") from None


def open_missing_streams() -> None:
    """Standard streams that the shell has closed (``>&-``) read and write nothing, as ``/dev/null`` does.

    In the order of their numbers, so that each gets its own and no file of ours comes to stand in its place.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  for the whole process


def drop(stream: TextIO) -> None:
    """Keep the interpreter from writing, at its end, what is still in the buffer of a standard stream."""
    with suppress(OSError):  # one without a file, such as a caller's in the same process, has nothing left to write
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def printable(text: str) -> str:
    """``text`` without characters that a terminal would act upon: names of files and in models are anybody's."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
