"""The parent's side of ``template_worker.py``: starts it, asks it, and ends it when it takes too long."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvs_core.errors import CapabilityError, SettingsError, TokenizerError

_WORKER = Path(__file__).with_name("template_worker.py")

TIME_LIMIT_S = 10.0
"""A long conversation renders in some hundredths of a second."""


class TemplateProcess:
    """Renders templates in a process of its own, started at the first use and again after it was ended.

    Threads may share it; they take turns.
    """

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

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
        """The worker's reply; None if it had to be ended or died, after which the next call starts another."""
        if self._process is None or self._process.poll() is not None:
            self._process = _start()
            weakref.finalize(self, _stop, self._process)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        too_late = threading.Event()

        def end() -> None:
            too_late.set()
            process.kill()

        reply = b""
        timer = threading.Timer(self._time_limit_s, end)
        timer.start()
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(request)
                process.stdin.flush()
                reply = process.stdout.readline()
        finally:
            timer.cancel()
            timer.join()  # from here on it ends nothing
        if reply and not too_late.is_set():
            return reply
        _stop(process)
        self._process = None
        return None


def _start() -> subprocess.Popen[bytes]:
    """A worker that is ready, so that the time limit is for rendering alone. Raises CapabilityError if it ends."""
    process = subprocess.Popen(
        [sys.executable, "-P", str(_WORKER)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for us alone
    )  # fmt: skip
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        _stop(process)
        raise CapabilityError(
            f"chat templates are rendered by a process of their own, and {sys.executable} {_WORKER.name} ended with "
            f"code {process.returncode} at its start; use a plain prompt without a template"
        )
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the worker and collect it."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            with suppress(BrokenPipeError):  # of what it did not read
                pipe.close()


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
