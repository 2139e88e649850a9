"""``kvs bench needle``: does the model find a fact in a long text, wherever it stands?

    lengths x depths x repeats ─ Haystack.prompt ─ prefill, a few greedy tokens ─ found or not ─ CSV, JSON, heat map
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvs_cli.ending import writing
from kvs_cli.quality.haystack import Haystack, Prompt
from kvs_cli.quality.setup import Bench
from kvs_core.engine.engine import Engine
from kvs_core.engine.session import Session
from kvs_core.units import MIB, Progress

LOGGER = logging.getLogger(__name__)

_LEAST_TEXT = 32_768
MORE_TOKENS = 3
"""Of an answer, beside those of its number: a space before it and what ends it."""


@dataclass(frozen=True, slots=True)
class NeedleGrid:
    """What is asked. lengths: tokens of prompts; depths: percent; repeats: prompts per cell; facts: in a prompt."""

    lengths: tuple[int, ...]
    depths: tuple[int, ...]
    repeats: int
    facts: int
    seed: int

    @property
    def prompts(self) -> list[tuple[int, int, int]]:
        """Length, depth and number, in the order in which they are run."""
        return [(length, depth, number) for length in self.lengths for depth in self.depths
                for number in range(self.repeats)]


def run_needle(bench: Bench, grid: NeedleGrid, text_file: Path | None) -> None:
    """Run it, write what is found and say so on stdout. Raises ``KvsError``.

    After Ctrl-C what was found until then is written, and ``KeyboardInterrupt`` goes on.
    """
    start_tokens = bench.start_tokens
    context_tokens = bench.context_of(max(grid.lengths) + _answer_tokens(bench), "--lengths")
    # More text than one prompt takes, since each begins somewhere else; not all of it, since that takes seconds.
    text = bench.tokens_of(text_file, 1, max(4 * max(grid.lengths), _LEAST_TEXT), "--lengths")
    haystack = Haystack(bench.model.tokenizer, text, start_tokens)
    prompts = [haystack.prompt(length, depth, grid.facts, seed_of(grid.seed, length, depth, number))
               for length, depth, number in grid.prompts]
    rows: list[dict[str, Any]] = []
    interrupted = False
    with bench.engine(context_tokens) as engine, bench.screen.stage("looking for needles", "tokens") as progress:
        bench.make_output()
        session = Session(engine)
        done, total = 0, sum(len(prompt.tokens) for prompt in prompts)
        try:
            for (length, depth, number), prompt in zip(grid.prompts, prompts, strict=True):
                asked = _ask(bench, session, prompt, _shifted(progress, done, total))
                rows.append({"length": length, "depth_pct": depth, "repeat": number + 1, **asked})
                done += len(prompt.tokens)
        except KeyboardInterrupt:
            if not rows:
                raise
            interrupted = True
        summary = {**_summary(bench, grid, rows, engine), "interrupted": interrupted}
    picture = None if bench.output is None else _draw(summary, bench.output / "needle.png")
    bench.write(summary, rows)
    if not bench.json:
        with writing():
            print(table_text(summary["cells"], grid.lengths, grid.depths))
            print(summary_line(summary))
    if picture is not None:
        LOGGER.info("%s", picture)
    if interrupted:
        raise KeyboardInterrupt


def seed_of(seed: int, length: int, depth: int, number: int) -> int:
    """A seed for one prompt, the same whatever else is asked."""
    return ((seed * 1_000_003 + length) * 1_000_003 + depth) * 1_000_003 + number


def found_in(answer: str, number: str) -> bool:
    """Whether an answer begins with that number, and the number ends there."""
    begins = re.match(r"\s*(\d+)", answer)
    return begins is not None and begins[1] == number


def _answer_tokens(bench: Bench) -> int:
    return len(bench.model.tokenizer.encode(" 12345", add_special=False)) + MORE_TOKENS


def _shifted(progress: Progress, done: int, total: int) -> Progress:
    return lambda now, _all: progress(done + now, total)


def _ask(bench: Bench, session: Session, prompt: Prompt, progress: Progress) -> dict[str, Any]:
    """One prompt: read from the start, answered greedily."""
    tokenizer, engine = bench.model.tokenizer, session.engine
    session.rewind(0)
    copied = engine.report().h2d_bytes
    start = time.perf_counter()
    logits = session.prefill(prompt.tokens, progress=progress)[0]
    read = time.perf_counter()
    answer: list[int] = []
    while True:
        token = int(np.argmax(logits))
        if token in tokenizer.eog_ids:
            break
        answer.append(token)
        if len(answer) == _answer_tokens(bench):
            break
        decoded = session.decode(token)
        assert isinstance(decoded, np.ndarray)
        logits = decoded
    text = tokenizer.decode(answer)
    report = engine.report()
    return {
        "prompt_tokens": len(prompt.tokens),
        "fact_token": prompt.fact_token,
        "expected": prompt.fact.number,
        "answer": text,
        "found": found_in(text, prompt.fact.number),
        "active_pages": report.stats.active_pages,
        "streamed_pages_per_step": report.stats.streamed_pages_per_step,
        "h2d_mib": round((report.h2d_bytes - copied) / MIB, 3),
        "prefill_s": round(read - start, 4),
        "answer_s": round(time.perf_counter() - read, 4),
    }


def _summary(bench: Bench, grid: NeedleGrid, rows: Sequence[dict[str, Any]], engine: Engine) -> dict[str, Any]:
    asked: dict[tuple[int, int], list[bool]] = {}
    for row in rows:
        asked.setdefault((row["length"], row["depth_pct"]), []).append(row["found"])
    cells = [
        {"length": length, "depth_pct": depth, "prompts": len(found), "found": sum(found)}
        for (length, depth), found in asked.items()
    ]
    return {
        **bench.facts(),
        "device": engine.device_name,
        "arena_mib": engine.memory.arena_bytes / MIB,
        "facts": grid.facts,
        "seed": grid.seed,
        "prompts": len(rows),
        "found": sum(row["found"] for row in rows),
        "h2d_mib": engine.report().h2d_bytes / MIB,
        "most_streamed_share": max(
            row["streamed_pages_per_step"] / max(1, row["active_pages"]) for row in rows
        ),
        "cells": cells,
    }


def table_text(cells: Sequence[dict[str, Any]], lengths: Sequence[int], depths: Sequence[int]) -> str:
    """The shares as lines of text, a row per depth and a column per length; - where nothing was asked."""
    share = {
        (cell["length"], cell["depth_pct"]): f"{100 * cell['found'] / cell['prompts']:.0f} %" for cell in cells
    }
    width = max(7, *(len(f"{length:,}") + 2 for length in lengths))
    lines = ["depth \\ tokens" + "".join(f"{length:>{width},}" for length in lengths)]
    for depth in depths:
        lines.append(f"{depth:>12} %" + "".join(f"{share.get((length, depth), '-'):>{width}}" for length in lengths))
    return "\n".join(lines)


def summary_line(summary: dict[str, Any]) -> str:
    """All of it in one line."""
    pretended = "; the model is synthetic, so none should be" if summary["synthetic"] else ""
    share = 100 * summary["found"] / summary["prompts"]
    streamed = 100 * summary["most_streamed_share"]
    return (
        f"found {summary['found']} of {summary['prompts']} ({share:.1f} %){pretended}; arena "
        f"{summary['arena_mib']:.1f} MiB, K {summary['type_k']}, V {summary['type_v']}, up to {streamed:.0f} % of the "
        "pages streamed in a step"
    )


def _draw(summary: dict[str, Any], path: Path) -> str:
    """The heat map; what to say of it."""
    try:
        from kvs_cli.quality.heat_map import draw_heat_map
    except ImportError:
        return "no heat map: matplotlib is missing; pip install 'kvs-llm[bench]' brings it"
    draw_heat_map(summary, path)
    return f"heat map: {path}"
