"""The parent's side of ``template_worker.py``: starts it, asks it, and ends it when it takes too long."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import ceil
from pathlib import Path
from typing import Any

from kvs_core.errors import CapabilityError, SettingsError, TokenizerError

_WORKER = Path(__file__).with_name("template_worker.py")

TIME_LIMIT_S = 10.0
"""A long conversation renders in some hundredths of a second."""

START_LIMIT_S = 60.0
"""The start takes a tenth of a second; a machine busy with other work may need some seconds."""


class TemplateProcess:
    """Renders templates in a process of its own, started at the first use and again after it was ended.

    Threads may share it; they take turns.
    """

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[[subprocess.Popen[bytes]], TemplateProcess] | None = None

    def names(self, template: str, *, name: str) -> set[str]:
        """The names that ``template`` reads. Raises TokenizerError if it is no template.

        name  what the template is called in messages, here and below
        """
        return set(self._ask({"template": template, "variables": None}, name)["names"])

    def render(self, template: str, variables: dict[str, Any], *, name: str) -> str:
        """The text that ``template`` makes of ``variables``.

        Raises SettingsError when it refuses them or fails on them, TokenizerError when it is no template, or takes
        more than the time limit, 512 MiB or 16 Mi characters.
        """
        text: str = self._ask({"template": template, "variables": variables}, name)["text"]
        return text

    def _ask(self, request: dict[str, Any], name: str) -> dict[str, Any]:
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise SettingsError(f"{name}: messages and variables must be JSON values: {error}") from None
        with self._lock:
            reply = self._exchange(line)
        if reply is None:
            raise TokenizerError(
                f"{name}: did not render within {self._time_limit_s:g} s or 512 MiB; use another with --chat-template"
            )
        answer: dict[str, Any] = json.loads(reply)
        if "bad_template" in answer:
            why = _one_line(answer["bad_template"])
            raise TokenizerError(f"{name}: cannot be used: {why}; use another with --chat-template")
        if "bad_input" in answer:
            raise SettingsError(f"{name}: refuses these messages: {_one_line(answer['bad_input'])}")
        return answer

    def _exchange(self, request: bytes) -> bytes | None:
        """The worker's reply; None if it had to be ended or died. After that, and after any exception, which may leave
        half a request or a reply in the pipes, the next call starts another worker."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            self._process = _start(self._time_limit_s)
            self._finalizer = weakref.finalize(self, _stop, self._process)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        reply = b""
        try:
            with _ended_after(process, self._time_limit_s) as too_late, suppress(BrokenPipeError):
                process.stdin.write(request)
                process.stdin.flush()
                reply = process.stdout.readline()
        except BaseException:
            self._end()
            raise
        if reply and not too_late.is_set():
            return reply
        self._end()
        return None

    def _end(self) -> None:
        """End the worker, if there is one, and forget it."""
        self._process = None
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None


@contextmanager
def _ended_after(process: subprocess.Popen[bytes], seconds: float) -> Iterator[threading.Event]:
    """Ends ``process`` if the block takes longer; what it is lent is set then."""
    too_late = threading.Event()

    def end() -> None:
        too_late.set()
        process.kill()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield too_late
    finally:
        timer.cancel()
        timer.join()  # from here on it ends nothing


def _start(time_limit_s: float) -> subprocess.Popen[bytes]:
    """A worker that is ready, so that the time limit is for rendering alone.

    Raises CapabilityError if there can be none, or if it ends or is not ready in time.
    """
    command = [sys.executable, "-P", str(_WORKER), str(ceil(time_limit_s) + 1)]
    why = f"chat templates are rendered by a process of their own, and {sys.executable} {_WORKER.name}"
    advice = "use a plain prompt without a template"
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us alone
        )  # fmt: skip
    except OSError as error:
        raise CapabilityError(f"{why} cannot be started: {error.strerror or error}; {advice}") from None
    assert process.stdout is not None
    try:
        with _ended_after(process, START_LIMIT_S) as too_late:
            greeting = process.stdout.readline()
    except BaseException:
        _stop(process)
        raise
    if greeting == b"ready\n" and not too_late.is_set():
        return process
    _stop(process)
    ending = f"was not ready within {START_LIMIT_S:g} s" if too_late.is_set() else (
        f"ended with code {process.returncode} at its start")
    raise CapabilityError(f"{why} {ending}; {advice}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the worker and collect it."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            with suppress(OSError):  # of what it did not read
                pipe.close()


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
