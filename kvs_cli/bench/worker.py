"""The process of one point: ``python -m kvs_cli.bench.worker``. A job as a line of JSON on stdin, its answer as one
JSON object on stdout, everything else on stderr. It ends when stdin does: nobody is left to be answered.

    {"kind": "point", "arguments": [...], "decode_tokens": 64, "prompt_file": "prompt.txt" or null}
        -> {"row": measured columns, "machine": facts of the device}
    {"kind": "probe", "arguments": [...]}      can an engine with these settings be made, and run a step of each phase?
        -> {"arena_mib", "full_mib", "free_mib"}: its arena, the one that holds every page, memory that is left
    either -> {"error": one line}
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvs_cli.bench.machine import device_facts
from kvs_cli.bench.measure import measure, plan_reading, try_steps
from kvs_cli.logging import configure_logging
from kvs_cli.open_model import OpenModel, open_engine, open_model
from kvs_cli.options import parse
from kvs_cli.render import Screen
from kvs_core.engine.arena_size import arena_for
from kvs_core.engine.engine import Engine
from kvs_core.engine.levers import Bounds
from kvs_core.engine.measuring import free_bytes
from kvs_core.errors import LESS_MEMORY, KvsError
from kvs_core.settings import EngineSettings, LoggingSettings
from kvs_core.settings.typed import engine_settings
from kvs_core.units import MIB, ceil_div

LOGGER = logging.getLogger("kvs_cli.bench.worker")   # its __name__ is __main__

_PROBE_TOKENS = 64


def main() -> int:
    """Do the job."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)   # whatever else prints
    with open(0, "rb", buffering=0, closefd=False) as jobs:
        job = json.loads(jobs.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    configure_logging(LoggingSettings(timestamps=True))
    try:
        answer = _point(job) if job["kind"] == "point" else _probe(job)
    except KvsError as error:
        LOGGER.error("%s", error)
        answer = {"error": str(error)}
    except MemoryError:
        LOGGER.exception("out of memory")
        answer = {"error": f"out of memory; {LESS_MEMORY}"}
    except Exception as error:
        LOGGER.exception("the point has failed")
        answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]}
    with answers:
        json.dump(answer, answers)
    return 0


def _point(job: Mapping[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    with _engine(job["arguments"]) as (model, settings, engine):
        loaded_ms = 1e3 * (time.perf_counter() - start)
        prompt_file = None if job["prompt_file"] is None else Path(job["prompt_file"])
        reading = plan_reading(engine, model, prompt_file, job["decode_tokens"])
        LOGGER.info("%d tokens to read, a context filled to %d", reading.read_tokens, reading.filled_to)
        row = measure(engine, model, settings.speculative, reading, job["decode_tokens"])
        row["load_ms"] = round(loaded_ms, 1)
        LOGGER.info("%s", json.dumps(row))
        return {"row": row, "machine": device_facts(engine.device_name)}


def _probe(job: Mapping[str, Any]) -> dict[str, Any]:
    with _engine(job["arguments"]) as (_, _, engine):
        tokens = min(_PROBE_TOKENS, engine.context.context_tokens - 2)
        try_steps(engine, [0] * tokens)
        full = arena_for(engine.memory, engine.need.all_slots)
        return {
            "arena_mib": engine.memory.arena_bytes // MIB,
            "full_mib": ceil_div(full, MIB),
            "free_mib": free_bytes(engine) // MIB,
        }


@contextmanager
def _engine(arguments: list[str]) -> Iterator[tuple[OpenModel, EngineSettings, Engine]]:
    parsed = parse(arguments, os.environ, "run")
    settings = engine_settings(parsed.values)
    screen = Screen()
    model = open_model(settings.model, screen, settings.rope)
    context = settings.context.plan(model.spec.n_ctx_train, model.spec.n_ctx_most)   # as --contexts says
    with open_engine(model, settings, screen, bounds=Bounds(context_tokens=context.context_tokens)) as engine:
        yield model, settings, engine


def _end_with_stdin() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
