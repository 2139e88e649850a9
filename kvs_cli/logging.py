"""Log lines: everything to stderr, since stdout carries the generated text; a copy to ``--log-file``."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from datetime import UTC, datetime
from typing import TextIO

from rich.console import Console
from rich.logging import RichHandler

from kvs_cli.own_line import begin_line
from kvs_core.errors import SettingsError
from kvs_core.settings import LoggingSettings

_LOGGERS = ("kvs_core", "kvs_cli")
_SILENT = logging.CRITICAL + 1
_LEVELS = (_SILENT, logging.ERROR, logging.WARNING, logging.INFO)  # by verbosity; above: DEBUG


class _JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message and, if there is one, exception."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class _OwnLine(logging.Handler):
    """A record does not come inside a line of text."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):   # where stderr takes no more the record says so itself
            begin_line()
        super().emit(record)


class _Plain(_OwnLine, logging.StreamHandler[TextIO]):
    pass


class _Coloured(_OwnLine, RichHandler):
    pass


def configure_logging(settings: LoggingSettings) -> None:
    """Send the lines of kvs's loggers where ``settings`` says; earlier handlers are closed.

    Raises SettingsError if the log file cannot be opened.
    """
    handlers = [] if settings.disabled else [_stderr_handler(settings)]
    if settings.file is not None and not settings.disabled:
        handlers.append(_file_handler(settings))
    level = _LEVELS[settings.verbosity] if settings.verbosity < len(_LEVELS) else logging.DEBUG
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        for old in list(logger.handlers):
            logger.removeHandler(old)
            old.close()
        for handler in handlers or [logging.NullHandler()]:
            logger.addHandler(handler)
        logger.setLevel(_SILENT if settings.disabled else level)
        logger.propagate = False


def _stderr_handler(settings: LoggingSettings) -> logging.Handler:
    coloured = settings.colors == "on" or (settings.colors == "auto" and sys.stderr.isatty())
    if coloured and not settings.jsonl:
        console = Console(stderr=True, force_terminal=True if settings.colors == "on" else None)
        return _Coloured(console=console, show_time=settings.timestamps, show_level=settings.prefix, show_path=False)
    handler = _Plain(sys.stderr)
    handler.setFormatter(_formatter(settings))
    return handler


def _file_handler(settings: LoggingSettings) -> logging.Handler:
    assert settings.file is not None
    try:
        handler = logging.FileHandler(settings.file, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise SettingsError(f"--log-file {settings.file}: {error.strerror or error}; give a file that can be "
                            "written") from None
    handler.setFormatter(_formatter(settings))
    return handler


def _formatter(settings: LoggingSettings) -> logging.Formatter:
    if settings.jsonl:
        return _JsonFormatter()
    time = "%(asctime)s " if settings.timestamps else ""
    prefix = "%(levelname)s %(name)s: " if settings.prefix else ""
    return logging.Formatter(f"{time}{prefix}%(message)s")
