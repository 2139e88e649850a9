"""The process that renders chat templates: a model file's template is a program by whoever made the file.

It says ``ready``; then one JSON object per line comes in and one goes out:

    {"template": text, "variables": {...}}  ->  {"text": rendered}
    {"template": text, "variables": null}   ->  {"names": [every name it reads]}, once it compiles
    or, to either                           ->  {"bad_template": why} or {"bad_input": why}

Jinja's immutable sandbox keeps the template from reaching Python objects and bounds ``range``. What a sandbox inside
one process cannot bound is time and memory (``'a' * 10**10``, nested loops, comparing nested lists), hence this
process: its memory is limited here, its output below, and its parent ends it when it takes too long. When the parent is
gone it ends itself within a second, or, in the midst of one long operation, the system ends it after as much processor
time as its argument says, in whole seconds per request.

Run as a script with nothing but the standard library and Jinja, so that it starts in a tenth of a second.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from datetime import datetime
from math import ceil
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.exceptions import SecurityError

MEMORY_LIMIT_BYTES = 1 << 29
OUTPUT_LIMIT_CHARS = 1 << 24


class RaisedByTemplate(Exception):
    """``raise_exception`` was called."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise RaisedByTemplate(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
            sort_keys: bool = False) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> jinja2.Environment:
    """What chat templates are written for: the settings, functions and tags that Hugging Face's library gives them."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The rendered text, its size limited."""
    pieces: list[str] = []
    size = 0
    for piece in template.generate(variables):
        pieces.append(piece)
        size += len(piece)
        if size > OUTPUT_LIMIT_CHARS:
            raise OverflowError(f"it prints more than {OUTPUT_LIMIT_CHARS} characters")
    return "".join(pieces)


class Renderer:
    """Answers requests. Compiled templates are kept: a model has one or two."""

    def __init__(self) -> None:
        self.env = environment()
        self.compiled: dict[str, jinja2.Template] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to one request."""
        try:
            return self._answer(request["template"], request["variables"])
        except jinja2.TemplateSyntaxError as error:
            return {"bad_template": f"line {error.lineno}: {error.message}"}
        except RaisedByTemplate as error:
            return {"bad_input": str(error)}
        except MemoryError:
            return {"bad_template": f"it needs more than {MEMORY_LIMIT_BYTES >> 20} MiB"}
        except (RecursionError, OverflowError, SecurityError) as error:
            return {"bad_template": str(error)}
        except Exception as error:  # whatever a template does to the values it is given
            return {"bad_input": f"{type(error).__name__}: {error}"}

    def _answer(self, text: str, variables: dict[str, Any] | None) -> dict[str, Any]:
        template = self.compiled.get(text)
        if template is None:
            template = self.compiled[text] = self.env.from_string(text)
        if variables is not None:
            return {"text": render(template, variables)}
        names = self.env.parse(text).find_all(jinja2.nodes.Name)
        return {"names": sorted({name.name for name in names if name.ctx == "load"})}


def allow_cpu_seconds(seconds: int) -> None:
    """Have the system end this process once it has computed that much longer."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    limit = ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def end_with_parent(parent: int) -> NoReturn:
    """End this process once its parent is another one, which is when the first has ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    seconds = int(sys.argv[1])
    renderer = Renderer()
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        allow_cpu_seconds(seconds)
        sys.stdout.buffer.write(json.dumps(renderer.answer(json.loads(line))).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
