"""The sweep: every point in a fresh process, its row on the disk before the next one begins.

    points ─ those whose key the folder has are skipped ─ [probe for the arena] ─ worker ─ row ─ ... ─ plots, summary

A point that fails is a row with its error. Ctrl-C ends the point in hand; what is finished is complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvs_cli.bench.arenas import FoundArena, find_arena
from kvs_cli.bench.checks import check_engine, prompt_room
from kvs_cli.bench.columns import Row
from kvs_cli.bench.grid import Point
from kvs_cli.bench.machine import host_facts
from kvs_cli.bench.plots import draw
from kvs_cli.bench.processes import RunJob, run_job
from kvs_cli.bench.progress import PointProgress
from kvs_cli.bench.store import RowStore, write_text
from kvs_cli.bench.summary import summary
from kvs_cli.flag_names import with_flags
from kvs_cli.open_model import open_model
from kvs_cli.options import parse
from kvs_cli.render import Screen
from kvs_core.errors import KvsError, SettingsError
from kvs_core.settings import EngineSettings, SyntheticModel
from kvs_core.settings.typed import engine_settings

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """One sweep.

    arguments       flags of ``kvs run`` that hold for every point
    environ         variables that do
    prompt          the text that every point begins with; None: contexts are filled (synthetic models)
    auto_max_arena  each point gets the largest arena that works
    flag_names      what the sweep's own flags are called that stand for flags of ``kvs run``, for errors
    """

    points: Sequence[Point]
    arguments: Sequence[str]
    environ: Mapping[str, str]
    prompt: str | None
    decode_tokens: int
    output: Path
    resume: bool = False
    auto_max_arena: bool = False
    flag_names: Mapping[str, str] = field(default_factory=dict)

    def arguments_of(self, point: Point) -> list[str]:
        """The point's flags: its own come last, so they count."""
        return [*self.arguments, *point.variant.arguments, "--ctx-size", str(point.context_tokens)]

    def engine(self, arguments: Sequence[str]) -> EngineSettings:
        """What these flags and the variables say."""
        return engine_settings(parse(arguments, self.environ, "run").values)


def run_sweep(settings: SweepSettings, *, run: RunJob = run_job) -> list[Row]:
    """Run it, and write everything; the rows of the folder. Raises ``KvsError``.

    Nothing is written before the model is open and every point is known to suit it. ``KeyboardInterrupt`` passes on,
    when plots and summary of what is finished are written.
    """
    _check(settings)
    store = RowStore(settings.output, resume=settings.resume)
    prompt_file = None
    if settings.prompt is not None:
        prompt_file = settings.output / "prompt.txt"
        write_text(prompt_file, settings.prompt)
    machine = host_facts(["kvs", *sys.argv[1:]])
    write_text(settings.output / "machine.json", json.dumps(machine, indent=1) + "\n")
    sweep = _Sweep(settings, store, prompt_file, run, machine)
    try:
        sweep.run()
    finally:
        write_report(settings.output, store.rows)
    return store.rows


def _check(settings: SweepSettings) -> None:
    told = dict.fromkeys(tuple(settings.arguments_of(point)) for point in settings.points)   # repeats are told alike
    engines = list(map(settings.engine, told))
    model = open_model(engines[0].model, Screen(), engines[0].rope)
    try:
        for engine in engines:
            context = check_engine(model, engine, "--contexts")
            prompt_room(context.context_tokens, settings.decode_tokens)
    except KvsError as error:
        raise SettingsError(with_flags(str(error), settings.flag_names)) from None


def write_report(folder: Path, rows: Sequence[Row]) -> None:
    """``summary.md``, and the plots if there is something to plot. Raises SettingsError."""
    write_text(folder / "summary.md", summary(rows))
    draw(folder, rows)


class _Sweep:
    def __init__(self, settings: SweepSettings, store: RowStore, prompt_file: Path | None, run: RunJob,
                 machine: dict[str, Any]) -> None:
        self._settings, self._store, self._prompt_file, self._run = settings, store, prompt_file, run
        self._machine = machine
        self._arenas: dict[tuple[str, ...], FoundArena] = {}   # repeats of a point need not probe again

    def run(self) -> None:
        settings, done = self._settings, self._store.keys
        planned = [(point, settings.arguments_of(point)) for point in settings.points]
        keyed = [(point, job, self._key(point, job)) for point, job in planned]
        waiting = [entry for entry in keyed if entry[2] not in done]
        if len(waiting) < len(keyed):
            LOGGER.info("%d of %d points are finished already", len(keyed) - len(waiting), len(keyed))
        with PointProgress([point.context_tokens for point, _, _ in waiting]) as progress:
            for point, job, key in waiting:
                progress.begin(f"{point.context_tokens:,} tokens, {point.variant.name}")
                row = self._measure(point, job, key)
                self._store.add(row)
                progress.end(_line(row))

    def _measure(self, point: Point, arguments: list[str], key: str) -> Row:
        log = f"logs/{point.name}-{key[:6]}.log"
        path = self._settings.output / log
        path.write_bytes(b"")
        row: Row = self._parameters(point, arguments) | {"key": key, "log": log}
        if self._settings.auto_max_arena:
            found = self._arenas.get(tuple(arguments)) or find_arena(self._run, arguments, path)
            self._arenas[tuple(arguments)] = found
            if found.error:
                return row | {"error": with_flags(found.error, self._settings.flag_names)}
            arguments = [*arguments, "--kv-stream-arena-mib", str(found.arena_mib)]
            row["arena_mib"] = found.arena_mib
        answer = self._run({
            "kind": "point", "arguments": arguments, "decode_tokens": self._settings.decode_tokens,
            "prompt_file": None if self._prompt_file is None else str(self._prompt_file),
        }, path)
        if "error" in answer:
            return row | {"error": with_flags(answer["error"], self._settings.flag_names)}
        if not answer["machine"].items() <= self._machine.items():
            self._machine |= answer["machine"]
            write_text(self._settings.output / "machine.json", json.dumps(self._machine, indent=1) + "\n")
        measured: Row = answer["row"]
        return row | measured

    def _parameters(self, point: Point, arguments: Sequence[str]) -> Row:
        engine = self._settings.engine(arguments)
        return {
            "context_capacity": point.context_tokens,
            "decode_tokens": self._settings.decode_tokens,
            "spec_type": point.variant.spec_type,
            "draft_n_max": point.variant.n_max,
            "p_min": engine.speculative.draft.p_min,
            "synth_len": point.variant.synth_len,
            "cache_type_k": engine.kv.type_k,
            "cache_type_v": engine.kv.type_v,
            "batch_size": engine.context.batch,
            "ubatch_size": engine.context.ubatch,
            "residency_mode": engine.kv.residency_mode,
            "arena_auto": self._settings.auto_max_arena,
            "arena_mib": engine.kv.arena_mib if isinstance(engine.kv.arena_mib, int) else None,
            "repeat": point.repeat,
            "model": model_name(engine),
            "synthetic": isinstance(engine.model.source, SyntheticModel),
        }

    def _key(self, point: Point, arguments: Sequence[str]) -> str:
        """Of everything that decides what is measured, wherever it was said."""
        settings = self._settings
        prompt = None if settings.prompt is None else hashlib.sha256(settings.prompt.encode()).hexdigest()
        told = (repr(settings.engine(arguments)), prompt, settings.decode_tokens, settings.auto_max_arena, point.repeat)
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def model_name(engine: EngineSettings) -> str:
    """The model as a row names it: no folders, which say more of a machine than of a model."""
    source = engine.model.source
    if source is None:
        return "demo"
    if isinstance(source, SyntheticModel):
        return f"synthetic:{source.name}"
    if isinstance(source, Path):
        return source.name
    return getattr(source, "repo", "") or Path(getattr(source, "url", "")).name


def _line(row: Row) -> str:
    if row.get("error"):
        return f"failed: {row['error']}"
    return (f"{row['decode_tps']:.2f} tokens/s, {row['ms_per_step_p50']:.2f} ms per round, "
            f"{row['step_over_floor']:.2f} times the floor")
