"""``kvs bench equivalence``: the same logits from every arena, bit for bit; and how far other engines' are.

    resident ─ all logits to a scratch file ─┬─ each arena: read the same tokens, compare the bits
                                             └─ llama.cpp, the CPU: compare distributions over the last rows
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from kvs_cli.ending import printable, writing
from kvs_cli.flag_names import with_flags
from kvs_cli.quality import llamacpp
from kvs_cli.quality.distance import Bits, Distance, log_probs
from kvs_cli.quality.setup import Bench, between
from kvs_core.engine.budget import pool_need
from kvs_core.engine.engine import Engine
from kvs_core.engine.levers import Bounds
from kvs_core.engine.measuring import check_memory
from kvs_core.engine.session import ubatches
from kvs_core.errors import BudgetError, DeviceError, SettingsError
from kvs_core.memory.phases import Phase
from kvs_core.paging.residency import ResidencyMode
from kvs_core.settings import DeviceSettings, KvSettings
from kvs_core.settings.kinds import shown
from kvs_core.units import MIB, Progress, mib_ceil

CPU = "cpu"
_OTHERS = (llamacpp.NAME, CPU)
_POOLS = 3   # that are chosen here: shares 0, 1/3, 2/3 of the way from the least to the whole


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared. arenas_mib: None: pools are chosen here. others: names; None: those that are there."""

    prompt_tokens: int
    decode_tokens: int
    arenas_mib: tuple[int, ...] | None
    others: tuple[str, ...] | None

    @staticmethod
    def checked(prompt_tokens: int, decode_tokens: int, arenas_mib: tuple[int, ...] | None, against: str) -> Plan:
        """From the flags. Raises ``SettingsError``."""
        between(prompt_tokens, 1, 1 << 27, "--prompt-tokens")
        between(decode_tokens, 1, 1 << 20, "--decode-tokens")
        if against in ("auto", "none"):
            return Plan(prompt_tokens, decode_tokens, arenas_mib, None if against == "auto" else ())
        names = tuple(dict.fromkeys(part.strip() for part in against.split(",")))
        for name in names:
            if name not in _OTHERS:
                raise SettingsError(f"--against {shown(name)}: give {', '.join(_OTHERS)}, auto or none")
        return Plan(prompt_tokens, decode_tokens, arenas_mib, names)

    @property
    def tokens(self) -> int:
        """All that are read."""
        return self.prompt_tokens + self.decode_tokens


class Recording:
    """Logits float32 [rows, V] on disk, since those of a large vocabulary are gigabytes."""

    def __init__(self, file: IO[bytes], n_vocab: int) -> None:
        self._file = file
        self._n_vocab = n_vocab
        self.rows = 0

    def write(self, logits: np.ndarray) -> None:
        """Append rows."""
        self._file.write(np.ascontiguousarray(logits, np.float32).tobytes())
        self.rows += len(logits)

    def read(self, first: int, rows: int) -> np.ndarray:
        """Rows [first, first + rows)."""
        self._file.seek(first * self._n_vocab * 4)
        data = self._file.read(rows * self._n_vocab * 4)
        return np.frombuffer(data, np.float32).reshape(rows, self._n_vocab)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The tokens that everybody reads, and what came out of the resident cache."""

    bench: Bench
    plan: Plan
    tokens: Sequence[int]
    context_tokens: int
    recording: Recording

    @property
    def first(self) -> int:
        """Of the rows that are compared with other engines: the prompt's last."""
        return self.plan.prompt_tokens - 1

    def check(self, engine: Engine, arenas_mib: Sequence[int], pools: Sequence[int]) -> None:
        """``BudgetError`` or ``SettingsError`` for arenas, in MiB, and pools, in bytes, that the text could not be read
        with, before any of it is: ``engine`` is the resident one."""
        sizes: list[tuple[int | None, int | None]] = [
            *((arena_mib, None) for arena_mib in arenas_mib), *((None, pool_bytes) for pool_bytes in pools)
        ]
        context = replace(self.bench.settings.context, ctx_size=self.context_tokens)
        bounds = Bounds(context_tokens=self.context_tokens)
        for arena_mib, pool_bytes in sizes:
            try:
                check_memory(engine, context, self._kv(arena_mib), pool_bytes=pool_bytes, bounds=bounds)
            except BudgetError as error:
                names = {} if self.plan.arenas_mib is None else {"--kv-stream-arena-mib": "--arenas-mib"}
                raise BudgetError(with_flags(str(error), names), needed_mib=error.needed_mib,
                                  given_mib=error.given_mib) from None

    def _kv(self, arena_mib: int | None) -> KvSettings:
        return replace(self.bench.settings.kv, residency_mode="adaptive", arena_mib=arena_mib, pool_mib=None)

    def record(self, engine: Engine) -> None:
        """Read the tokens and keep all logits."""
        for logits in self._read(engine, "resident"):
            self.recording.write(logits)

    def with_memory(self, *, arena_mib: int | None = None, pool_bytes: int | None = None) -> dict[str, Any]:
        """The row of an arena, or of a pool."""
        settings = replace(self.bench.settings, kv=self._kv(arena_mib))
        name = f"pool of {(pool_bytes or 0) / MIB:.2f} MiB" if arena_mib is None else f"arena of {arena_mib} MiB"
        bits = Bits()
        with self.bench.engine(self.context_tokens, settings, pool_bytes=pool_bytes) as engine:
            for logits in self._read(engine, name):
                bits.add(logits, self.recording.read(bits.rows, len(logits)))
            report = engine.report()
        return _row(
            "bits", "resident", memory=name, arena_mib=report.arena_bytes / MIB, pool_pages=report.stats.pool_pages,
            active_pages=report.stats.active_pages, streamed_pages_per_step=report.stats.streamed_pages_per_step,
            streamed_mib=report.h2d_bytes / MIB, **asdict(bits),
        )

    def with_other(self, name: str) -> dict[str, Any]:
        """The row of another engine: rows from ``first`` on, as distributions."""
        distance = Distance()
        with self.bench.screen.stage(f"comparing with {name}", "tokens") as progress:
            theirs = (
                llamacpp.log_probs_behind(self.bench, self.tokens, self.first) if name == llamacpp.NAME
                else self._on_cpu()
            )
            for number, row in enumerate(theirs):
                distance.add(self.recording.read(self.first + number, 1)[0], row)
                progress(number + 1, len(self.tokens) - self.first)
        parting = distance.parting
        return _row(
            "distance", name, rows=len(distance.kl), kl_mean=float(np.mean(distance.kl)), kl_max=max(distance.kl),
            same_top=distance.agreed, largest_difference=distance.largest,
            first_row=None if parting is None else self.first + parting.row,
            first_difference=None if parting is None else (
                f"{self._text(parting.ours)} for {self._text(parting.theirs)}, {parting.gap:.4f} nats apart"
            ),
        )

    def _on_cpu(self) -> Iterator[np.ndarray]:
        settings = self.bench.settings
        settings = replace(settings, device=DeviceSettings(CPU, threads=settings.device.threads))
        row = 0
        with self.bench.engine(self.context_tokens, settings) as engine:
            for logits in self._steps(engine, lambda done, total: None):
                for one in logits[max(0, self.first - row) :]:
                    yield log_probs(one)
                row += len(logits)

    def _read(self, engine: Engine, name: str) -> Iterator[np.ndarray]:
        with self.bench.screen.stage(f"reading the text: {name}", "tokens") as progress:
            yield from self._steps(engine, progress)

    def _steps(self, engine: Engine, progress: Progress) -> Iterator[np.ndarray]:
        """Logits float32 [n, V] of all rows in order: ubatches of the prompt, then token by token."""
        prompt, context = self.plan.prompt_tokens, engine.context
        sizes = [*ubatches(prompt, context.batch_tokens, context.ubatch_tokens), *[1] * self.plan.decode_tokens]
        first = 0
        for rows in sizes:
            phase = Phase.PREFILL if first < prompt else Phase.DECODE
            with engine.step(self.tokens[first : first + rows], phase) as step:
                yield step.logits(0)
                step.settle()
            first += rows
            progress(first, len(self.tokens))

    def _text(self, token: int) -> str:
        return repr(self.bench.model.tokenizer.decode([token], special=True))


def run_equivalence(bench: Bench, plan: Plan, text_file: Path | None) -> None:
    """Run it, write what is found and say so on stdout. Raises ``KvsError``, also if a bit differs."""
    others, left_out = _others(bench, plan)
    context_tokens = bench.context_of(plan.tokens, "--prompt-tokens")
    text = bench.tokens_of(text_file, plan.tokens, plan.tokens, "--prompt-tokens")
    tokens = [*bench.start_tokens, *text][: plan.tokens]
    n_vocab = bench.model.spec.n_vocab
    _check_room(plan.tokens * n_vocab * 4)
    kv = bench.settings.kv
    resident = replace(bench.settings, kv=replace(
        kv, residency_mode="resident", arena_mib=None, pool_mib=None, ring_slots=0, run_pages=0
    ))
    arenas = plan.arenas_mib or ((kv.arena_mib,) if isinstance(kv.arena_mib, int) else ())
    with tempfile.TemporaryFile() as file:
        comparison = Comparison(bench, plan, tokens, context_tokens, Recording(file, n_vocab))
        with bench.engine(context_tokens, resident) as engine:
            device = engine.device_name
            pools = [kv.pool_mib * MIB] if kv.pool_mib else [] if arenas else _pools(engine, plan.tokens)
            comparison.check(engine, arenas, pools)
            bench.make_output()
            comparison.record(engine)
        rows = [comparison.with_memory(arena_mib=arena_mib) for arena_mib in arenas]
        rows += [comparison.with_memory(pool_bytes=pool_bytes) for pool_bytes in pools]
        if device == CPU and CPU in others:
            others.remove(CPU)
            left_out[CPU] = "kvs runs on it already"
        rows += [comparison.with_other(name) for name in others]
    compared = [row for row in rows if row["kind"] == "bits"]
    summary = {
        **bench.facts(), "device": device, "prompt_tokens": plan.prompt_tokens, "decode_tokens": plan.decode_tokens,
        "n_vocab": n_vocab, "logits": sum(row["logits"] for row in compared),
        "bits_differ": sum(row["bits_differ"] for row in compared), "left_out": left_out,
    }
    bench.write(summary, rows)
    if not bench.json:
        with writing():
            print("\n".join([*map(_line, rows), *_ending(summary, compared)]))
    if summary["bits_differ"]:
        raise DeviceError(
            f"equivalence: {summary['bits_differ']} bits differ between arenas, where none may; check the memory of "
            "this machine, and report it with the files of --output"
        )


def _others(bench: Bench, plan: Plan) -> tuple[list[str], dict[str, str]]:
    """The other engines that can be asked, and why those that cannot be are left out."""
    wanted = _OTHERS if plan.others is None else plan.others
    found, left_out = [], {}
    for name in wanted:
        reason = llamacpp.why_not(bench) if name == llamacpp.NAME else ""
        if reason and plan.others is not None:
            raise SettingsError(f"--against {name}: {reason}; use --against none")
        if reason:
            left_out[name] = reason
        else:
            found.append(name)
    return found, left_out


def _pools(engine: Engine, tokens: int) -> list[int]:
    """Pools in bytes between the least that runs this context and the one that holds so many tokens."""
    least = pool_need(engine.shapes, engine.spec.kv_layers, engine.context, ResidencyMode.ADAPTIVE).least_slots
    pooled = sum(engine.shapes.geometry(layer) == engine.geometry for layer in engine.drafting.kv_layers(engine.spec))
    every = max(least, pooled * engine.geometry.pages_of(tokens))
    slots = [least + (every - least) * part // _POOLS for part in range(_POOLS)]
    return [count * engine.geometry.page_bytes for count in dict.fromkeys(slots)]


def _row(kind: str, against: str, **values: Any) -> dict[str, Any]:
    """A row of the CSV: all columns, None where they say nothing."""
    columns = (
        "memory", "arena_mib", "pool_pages", "active_pages", "streamed_pages_per_step", "streamed_mib",
        "rows", "logits", "logits_differ", "bits_differ", "kl_mean", "kl_max", "same_top", "largest_difference",
        "first_row", "first_difference",
    )
    assert set(values) <= set(columns), values
    return {"kind": kind, "against": against, **{name: values.get(name) for name in columns}}


def _line(row: dict[str, Any]) -> str:
    where = row["first_row"]
    if row["kind"] == "bits":
        ends = "" if where is None else f", first in row {where}"
        return (
            f"{row['memory']}: {row['streamed_mib']:.1f} MiB streamed, in the last step "
            f"{row['streamed_pages_per_step']} of {row['active_pages']} pages; {row['logits']:,} logits in "
            f"{row['rows']:,} rows, {row['bits_differ']:,} bits differ{ends}"
        )
    ends = "" if where is None else f"; first other token in row {where}: {row['first_difference']}"
    return printable(
        f"{row['against']}: KL mean {row['kl_mean']:.2e}, max {row['kl_max']:.2e} nats; same likeliest token in "
        f"{row['same_top']} of {row['rows']} rows; log-probabilities at most {row['largest_difference']:.4f} "
        f"apart{ends}"
    )


def _ending(summary: dict[str, Any], compared: Sequence[dict[str, Any]]) -> list[str]:
    lines = [f"{name}: left out: {reason}" for name, reason in summary["left_out"].items()]
    if not any(row["streamed_mib"] for row in compared):
        lines.append("no arena was small enough to stream anything: raise --prompt-tokens or lower --arenas-mib")
    lines.append(
        f"{summary['logits']:,} logits compared with the resident cache: {summary['bits_differ']:,} bits differ"
    )
    return lines


def _check_room(needed_bytes: int) -> None:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise SettingsError(
            f"--prompt-tokens: their logits take {mib_ceil(needed_bytes)} MiB of {folder}, {free // MIB} are free; "
            "lower it, or set TMPDIR to a folder on another disk"
        )
