"""All printing of the commands but help: bars and lines on stderr, and the text, JSON and tables on stdout.

On a terminal a stage of the work shows a bar that goes away; elsewhere, and in a log of JSON lines, it leaves one line
when it is done. Lines are log lines, so ``--verbosity`` and the other logging flags hold for them.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, TypeAlias

from rich.console import Console

from kvs_cli.ending import printable, writing
from kvs_cli.own_line import text_written
from kvs_cli.result import Drafts, RunResult, Timings
from kvs_core.settings import LoggingSettings
from kvs_core.units import MIB, Progress, counted

Unit: TypeAlias = Literal["bytes", "kernels", "tokens"]

LOGGER = logging.getLogger(__name__)


class Screen:
    """Shows stages of the work. ``console``: where bars are drawn, None for lines instead."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console

    @staticmethod
    def of(settings: LoggingSettings) -> Screen:
        """Bars if stderr is a terminal and log lines are for people who want to see phases."""
        bars = sys.stderr.isatty() and not settings.jsonl and LOGGER.isEnabledFor(logging.INFO)
        return Screen(Console(stderr=True) if bars else None)

    @contextmanager
    def stage(self, title: str, unit: Unit) -> Iterator[Progress]:
        """Shows ``title`` for as long as the block runs; the block calls what it is lent. Nothing if it never does."""
        start = time.perf_counter()
        done = 0

        def rate() -> str:
            return amount(done / max(time.perf_counter() - start, 1e-9), unit)

        if self._console is None:
            def note(now: int, _all: int) -> None:
                nonlocal done
                done = now

            yield note
            if done:
                LOGGER.info("%s: %s in %.1f s, %s/s", title, amount(done, unit), time.perf_counter() - start, rate())
            return

        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        text = TextColumn("{task.fields[text]}")
        columns = TextColumn("{task.description}"), BarColumn(), text, TimeRemainingColumn()
        with Bars(*columns, console=self._console, transient=True) as bars:
            bar = bars.add_task(title, total=None, text="")

            def draw(now: int, all_there_is: int) -> None:
                nonlocal done
                done = now
                of_all = f" of {amount(all_there_is, unit)}" if all_there_is else ""
                bars.update(bar, completed=now, total=all_there_is or None,
                            text=f"{amount(now, unit)}{of_all}, {rate()}/s")

            yield draw


    @contextmanager
    def stages(self) -> Iterator[Callable[[str, Unit], Progress]]:
        """Stages one after the other: the block makes a progress for each; its first call ends the one before."""
        with ExitStack() as shown:
            def make(title: str, unit: Unit) -> Progress:
                progress: Progress | None = None

                def note(now: int, all_there_is: int) -> None:
                    nonlocal progress
                    if progress is None:
                        shown.close()
                        progress = shown.enter_context(self.stage(title, unit))
                    progress(now, all_there_is)

                return note

            yield make


def amount(number: float, unit: Unit) -> str:
    """A number of bytes or tokens for people."""
    if unit == "bytes":
        return f"{number / MIB:.1f} MiB"
    if unit == "kernels":
        return counted(round(number), "kernel")
    return counted(round(number), "token") if number >= 100 or number == int(number) else f"{number:.1f} tokens"


def write_text(text: str) -> None:
    """A piece of the generated text, seen at once."""
    if text:
        with writing():
            sys.stdout.write(text)
            sys.stdout.flush()
        text_written(text)


def end_text() -> None:
    """The shell's prompt stands on a line of its own; a file or a pipe gets the text alone."""
    if sys.stdout.isatty():
        write_text("\n")


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on one line. Numbers keep all their digits; text beyond ASCII is escaped, whatever the locale."""
    text = json.dumps(value, allow_nan=False)
    with writing():
        print(text)


def print_sections(sections: Mapping[str, Mapping[str, str]]) -> None:
    """Headings with aligned lines of names and values below them."""
    console = Console(highlight=False, markup=False, soft_wrap=True, emoji=False)
    width = max(len(name) for lines in sections.values() for name in lines)
    with writing():
        for number, (heading, lines) in enumerate(sections.items()):
            if number:
                console.print()
            console.print(heading, style="bold")
            for name, value in lines.items():
                console.print(f"  {name:<{width}}  {printable(value)}")


def log_drafts(drafts: Drafts) -> None:
    """What speculation was worth."""
    by_type = ", ".join(
        f"{name} {stats.accepted_tokens} of {stats.drafted_tokens}" for name, stats in drafts.by_type.items()
    )
    pretended = "; acceptance is synthetic, the text means nothing" if drafts.synthetic else ""
    share = 100 * drafts.accepted / drafts.drafted if drafts.drafted else 0.0
    LOGGER.info(
        "drafts: %s; %d of %s accepted (%.0f%%): %s%s",
        counted(drafts.rounds, "round"), drafts.accepted, counted(drafts.drafted, "token"), share, by_type, pretended,
    )


def _text_speed(times: Timings) -> str:
    """A single token comes with the prompt: it has no speed."""
    if times.predicted_n <= 1:
        return counted(times.predicted_n, "token")
    return f"{times.predicted_n} tokens, {times.predicted_per_second:.1f} tokens/s"


def log_summary(result: RunResult) -> None:
    """How a run ended, how fast it was and what its KV took."""
    seed = f"; seed {result.seed}" if result.seed_is_random else ""
    of_what = "; all of it of a synthetic model" if result.synthetic else ""
    LOGGER.info("stop: %s%s%s", result.stop_reason, seed, of_what)
    if result.dropped_tokens:
        LOGGER.info("context shift: %s forgotten", counted(result.dropped_tokens, "token"))
    times = result.timings
    LOGGER.info(
        "prompt: %s, %.1f tokens/s; text: %s; first token after %.0f ms",
        counted(times.prompt_n, "token"), times.prompt_per_second, _text_speed(times), times.first_token_ms,
    )
    if result.drafts is not None:
        log_drafts(result.drafts)
    kv, stats = result.kv, result.kv.stats
    LOGGER.info(
        "KV: %s, arena %.1f MiB; %d of %d pages resident, %d streamed per step through a ring of %d",
        kv.mode, kv.arena_bytes / MIB, stats.resident_pages, stats.active_pages, stats.streamed_pages_per_step,
        stats.ring_slots,
    )
    weights = result.weights
    if weights.passing:
        LOGGER.info(
            "weights: %d of %d layers resident, %d streamed, %.2f MiB per step",
            weights.layers - len(weights.passing), weights.layers, len(weights.passing), weights.home_bytes / MIB,
        )
    LOGGER.info(
        "moved: %.2f MiB to the device per token%s; history %.1f MiB in host memory",
        result.h2d_bytes_per_token / MIB, "" if kv.stall_ms is None else f", {kv.stall_ms:.0f} ms stalled",
        stats.history_bytes / MIB,
    )
