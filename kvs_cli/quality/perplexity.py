"""``kvs bench perplexity``: what a text costs, read in windows through the streamed cache.

    windows of C tokens, a stride apart ─ ubatch by ubatch ─ nats of the tokens no window had before ─ CSV, JSON

Perplexity is exp of the mean nats per token. Standard errors are those of a mean of independent values, carried over to
exp and to bytes by their slopes; tokens are not quite independent, so the truth is a little wider.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from kvs_cli.ending import writing
from kvs_cli.quality.setup import Bench, between
from kvs_core.engine.engine import Engine
from kvs_core.engine.session import ubatches
from kvs_core.errors import DeviceError
from kvs_core.memory.phases import Phase
from kvs_core.units import MIB

DEFAULT_WINDOW = 2048
_BLOCK_ROWS = 16   # whose logits are in float64 at a time


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens [first, last) of the text are read, [scored, last) are scored."""

    first: int
    scored: int
    last: int


def windows(text_tokens: int, room: int, stride: int) -> Iterator[Window]:
    """Windows over a text of so many tokens that score every token but the first one once.

    room    tokens of text in one window
    stride  of [1, room]: the first tokens of two windows are that far apart; the last window may be shorter
    """
    first, scored = 0, 1
    while scored < text_tokens:
        last = min(first + room, text_tokens)
        yield Window(first, scored, last)
        first, scored = first + stride, last


def nats_of(logits: np.ndarray, targets: Sequence[int]) -> np.ndarray:
    """-log p of each target, float64 [n]. logits: float32 [n, V], of the rows before them."""
    found = np.empty(len(targets))
    for at in range(0, len(targets), _BLOCK_ROWS):
        rows = logits[at : at + _BLOCK_ROWS].astype(np.float64)
        wanted = rows[np.arange(len(rows)), targets[at : at + _BLOCK_ROWS]]
        most = rows.max(axis=1)
        found[at : at + len(rows)] = most + np.log(np.exp(rows - most[:, None]).sum(axis=1)) - wanted
    return found


def score_window(engine: Engine, start_tokens: Sequence[int], text: Sequence[int], window: Window) -> np.ndarray:
    """Nats of the scored tokens of a window, float64 [n]; the engine is empty before, and need not be after.

    Raises ``DeviceError`` if the model gives what is no number.
    """
    engine.rewind(0)
    # The last token is only scored; the others are read.
    read = [*start_tokens, *text[window.first : window.last - 1]]
    found: list[np.ndarray] = []
    done = 0
    for rows in ubatches(len(read), engine.context.batch_tokens, engine.context.ubatch_tokens):
        # Row i is about the token behind it: read[i + 1], which is text[i + 1 - start].
        behind = window.first + done + 1 - len(start_tokens)
        with engine.step(read[done : done + rows], Phase.PREFILL) as step:
            skipped = min(rows, max(0, window.scored - behind))
            if skipped < rows:
                found.append(nats_of(step.logits(skipped), text[behind + skipped : behind + rows]))
            step.settle()
        done += rows
    nats = np.concatenate(found)
    if not np.isfinite(nats).all():
        raise DeviceError("the model's logits are not all numbers: no perplexity; --check-tensors looks at its weights")
    return nats


@dataclass(frozen=True, slots=True)
class Score:
    """Of tokens with ``nats`` float64 [n] that are ``text_bytes`` long together."""

    nats: np.ndarray
    text_bytes: int

    @property
    def mean(self) -> float:
        """Nats per token."""
        return float(self.nats.mean())

    @property
    def error(self) -> float | None:
        """Standard error of the mean, in nats; None for one token: nothing is known of it."""
        count = len(self.nats)
        return float(self.nats.std(ddof=1)) / math.sqrt(count) if count > 1 else None

    def as_json(self) -> dict[str, Any]:
        """All measures with their errors."""
        count = len(self.nats)
        bits = count / (max(1, self.text_bytes) * math.log(2))   # bits per byte of a nat per token
        ppl = math.exp(min(self.mean, 700.0))   # of a model that is nearly sure of something else every time

        def error_in(unit: float) -> float | None:
            return None if self.error is None else self.error * unit

        return {
            "tokens": count,
            "bytes": self.text_bytes,
            "nats_per_token": self.mean,
            "nats_per_token_error": self.error,
            "nats_per_byte": self.mean * count / max(1, self.text_bytes),
            "nats_per_byte_error": error_in(count / max(1, self.text_bytes)),
            "bits_per_byte": self.mean * bits,
            "bits_per_byte_error": error_in(bits),
            "perplexity": ppl,
            "perplexity_error": error_in(ppl),
        }


def run_perplexity(bench: Bench, most_tokens: int, stride: int | None, text_file: Path | None) -> None:
    """Run it, write what is found and say so on stdout. Raises ``KvsError``.

    After Ctrl-C the windows that were read until then are written, and ``KeyboardInterrupt`` goes on.
    """
    between(most_tokens, 1, 1 << 27, "--tokens")
    start = bench.start_tokens
    asked = bench.settings.context.ctx_size or min(DEFAULT_WINDOW, bench.model.spec.n_ctx_train)
    window_tokens = bench.context_of(asked, "--ctx-size")
    room = between(window_tokens, 2 + len(start), window_tokens, "--ctx-size") - len(start)
    if stride is None:
        stride = max(1, room // 2)
    between(stride, 1, room, "--stride")
    text = bench.tokens_of(text_file, 2, most_tokens + 1, "--tokens")
    plan = list(windows(len(text), room, stride))
    read = [0, *accumulate(window.last - window.first for window in plan)]
    nats: list[np.ndarray] = []
    rows: list[dict[str, Any]] = []
    with bench.engine(window_tokens) as engine, bench.screen.stage("reading the text", "tokens") as progress:
        bench.make_output()
        try:
            for number, window in enumerate(plan):
                nats.append(score_window(engine, start, text, window))
                score = Score(nats[-1], _bytes_of(bench, text[window.scored : window.last]))
                so_far = Score(np.concatenate(nats), _bytes_of(bench, text[1 : window.last]))
                rows.append({
                    "window": number + 1, "first_token": window.first, "scored_from": window.scored, **score.as_json(),
                    "perplexity_so_far": so_far.as_json()["perplexity"],
                })
                progress(read[number + 1], read[-1])
        except KeyboardInterrupt:
            if not rows:
                raise
        report = engine.report()
        summary = {
            **bench.facts(),
            "text": "benchmark text" if text_file is None else str(text_file),
            "device": engine.device_name,
            "arena_mib": report.arena_bytes / MIB,
            "window_tokens": window_tokens,
            "stride_tokens": stride,
            "windows": len(rows),
            "read_tokens": read[len(rows)],
            "interrupted": len(rows) < len(plan),
            "h2d_mib": report.h2d_bytes / MIB,
            **so_far.as_json(),
        }
    bench.write(summary, rows)
    if not bench.json:
        with writing():
            print(summary_text(summary))
    if summary["interrupted"]:
        raise KeyboardInterrupt


def summary_text(summary: dict[str, Any]) -> str:
    """The measures, for people."""
    def line(name: str, key: str) -> str:
        error = summary[f"{key}_error"]
        spread = "unknown with one token" if error is None else f"{error:.4f}"
        return f"{name:<16}{summary[key]:.4f} ± {spread}"

    note = ", of a synthetic model: it means nothing" if summary["synthetic"] else ""
    return "\n".join([
        line("perplexity", "perplexity") + note,
        line("nats per token", "nats_per_token"),
        line("nats per byte", "nats_per_byte"),
        line("bits per byte", "bits_per_byte"),
        f"over {summary['tokens']:,} tokens ({summary['bytes']:,} bytes) of {summary['text']}, in {summary['windows']} "
        f"windows of {summary['window_tokens']:,} tokens, {summary['stride_tokens']:,} apart",
        f"arena {summary['arena_mib']:.1f} MiB, K {summary['type_k']}, V {summary['type_v']}; "
        f"{summary['h2d_mib']:.1f} MiB streamed to the device",
    ])


def _bytes_of(bench: Bench, tokens: Sequence[int]) -> int:
    return len(bench.model.tokenizer.decode_bytes(tokens))
