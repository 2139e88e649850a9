"""Rows and answers of points that nobody has measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvs_cli.bench.columns import COLUMNS, Row
from kvs_cli.bench.processes import Answer, Job


def measured(context: int = 1024, n_max: int = 0, **other: str | float | bool | None) -> Row:
    """A row of a point that did not fail."""
    row: Row = dict.fromkeys(COLUMNS, 1.0)
    return row | {
        "context_capacity": context, "spec_type": "draft-mtp" if n_max else "none", "draft_n_max": n_max,
        "cache_type_k": "q8_0", "cache_type_v": "q4_0", "residency_mode": "adaptive", "arena_auto": False, "repeat": 1,
        "synth_len": None, "device": "cpu", "model": "demo", "synthetic": False, "error": None, "log": "logs/x.log",
        "key": f"{context}-{n_max}", "arena_mib": 4.0,
    } | other


class FakeWorkers:
    """``run_job`` without processes: remembers the jobs; what ``fail`` says of a context or an arena goes wrong."""

    def __init__(self, *, fail_contexts: Sequence[int] = (), interrupt_at: int | None = None,
                 most_arena_mib: int = 100) -> None:
        self.jobs: list[Job] = []
        self._fail_contexts, self._interrupt_at, self._most_arena_mib = fail_contexts, interrupt_at, most_arena_mib

    @property
    def kinds(self) -> list[str]:
        """Of the jobs so far."""
        return [job["kind"] for job in self.jobs]

    def __call__(self, job: Job, log: Path) -> Answer:
        if len(self.jobs) == self._interrupt_at:
            raise KeyboardInterrupt
        self.jobs.append(job)
        with log.open("a") as lines:
            lines.write(f"{job['kind']}\n")
        context, arena = (_flag(job, flag) for flag in ("--ctx-size", "--kv-stream-arena-mib"))
        if context in self._fail_contexts:
            return {"error": "it broke, as asked for"}
        if arena is not None and arena > self._most_arena_mib:
            return {"error": f"{arena} MiB cannot be had"}
        if job["kind"] == "probe":
            return {"arena_mib": 10, "full_mib": 400, "free_mib": 120}
        row = {name: cell for name, cell in measured().items()
               if name in ("prompt_tokens", "decode_tps", "ms_per_step_p50", "step_over_floor", "device", "rounds",
                           "compute_floor_ms", "link_floor_ms", "prefill_tps", "synthetic")}
        return {"row": row | {"context_capacity": context}, "machine": {"device": "cpu"}}


def _flag(job: Job, flag: str) -> int | None:
    found = [int(value) for name, value in zip(job["arguments"], job["arguments"][1:], strict=False) if name == flag]
    return found[-1] if found else None
