"""One point of a sweep, measured on an engine that nobody else uses.

    prompt read, or context filled and its end read ─ first token ─ warm-up ─ timed rounds ─ rounds without copies

A round is what gives tokens: drafts, the step that verifies them, and sampling. Text is greedy, and end tokens are
tokens like others. Timed rounds are all of one kind: the last one drafts as far as the others, though it may bring more
tokens than were asked for. A shorter one would be a step of a new width, and setting that up would count as decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from kvs_cli.bench.checks import FLOOR_ROUNDS, FLOOR_WARM_ROUNDS, WARM_ROUNDS, prompt_room
from kvs_cli.bench.columns import Row
from kvs_cli.open_model import OpenModel
from kvs_cli.prompt import read_text_file
from kvs_core.engine.engine import Engine
from kvs_core.engine.measuring import fill_context, launch_seconds, random_tokens, without_copies
from kvs_core.engine.round import run_round
from kvs_core.engine.session import Session
from kvs_core.engine.speculation import Speculation, make_speculation
from kvs_core.errors import SettingsError
from kvs_core.memory.phases import Phase
from kvs_core.sampling.chain import Sampler
from kvs_core.sampling.params import SamplingParams
from kvs_core.settings import SpeculativeSettings
from kvs_core.units import MIB

CHARS_PER_TOKEN = 16
"""More than any text has on average."""

_FILL_TOKENS = 1024     # read, and repeated as the pages of a filled context
_END_TOKENS = 2048      # read behind a filled context: their rate is the rate at that depth


@dataclass(frozen=True, slots=True)
class Reading:
    """What comes before the text. base: read first, and repeated up to ``filled_to`` tokens; then ``prompt``, timed."""

    base: tuple[int, ...]
    filled_to: int
    prompt: tuple[int, ...]

    @property
    def read_tokens(self) -> int:
        """Really read."""
        return len(self.base) + len(self.prompt)


def plan_reading(engine: Engine, model: OpenModel, prompt_file: Path | None, decode_tokens: int) -> Reading:
    """What to read so that decoding ends near the end of the context.

    prompt_file  its text is read; None: the context is filled. Raises ContextError, SettingsError
    """
    context = engine.context.context_tokens
    room = prompt_room(context, decode_tokens)
    if prompt_file is not None:
        text = read_text_file(prompt_file, "prompt")[: room * CHARS_PER_TOKEN]
        tokens = model.tokenizer.encode(text)
        if len(tokens) < room:
            raise SettingsError(f"--prompt-file: the text has {len(tokens)} tokens, and a context of {context} takes "
                                f"{room}; give a longer text, or smaller --contexts")
        return Reading((), 0, tuple(tokens[:room]))
    end = min(_END_TOKENS, room // 2)
    filled_to = (room - end) // engine.geometry.page_tokens * engine.geometry.page_tokens
    base = random_tokens(engine, min(_FILL_TOKENS, filled_to)).tolist() if filled_to else []
    base = base[: len(base) // engine.geometry.page_tokens * engine.geometry.page_tokens]
    return Reading(tuple(base), filled_to, tuple(random_tokens(engine, end, 2).tolist()))


@dataclass(slots=True)
class Rounds:
    """Some rounds. Seconds, those of them in which captured work ran, and bytes to the device, by round; copies, and
    ``tokens`` generated, in all."""

    seconds: list[float]
    device_seconds: list[float]
    moved_bytes: list[int]
    copies: int
    tokens: int


class Text:
    """A text being generated, round by round."""

    def __init__(self, session: Session, model: OpenModel, speculative: SpeculativeSettings, token: int,
                 sampler: Sampler) -> None:
        self._session, self._sampler, self._token = session, sampler, token
        self.speculation: Speculation | None = make_speculation(session.engine, speculative, sampler, ())
        if self.speculation is not None:
            self.speculation.begin(session.tokens)

    def drafts(self) -> tuple[int, int]:
        """Tokens verified and accepted so far."""
        stats = self.speculation.stats.values() if self.speculation is not None else ()
        return sum(part.drafted_tokens for part in stats), sum(part.accepted_tokens for part in stats)

    def run(self, *, rounds: int = 0, tokens: int = 0) -> Rounds:
        """At least so many rounds and so many tokens; fewer where the context is full before."""
        engine, done = self._session.engine, Rounds([], [], [], 0, 0)
        with launch_seconds(engine) as spent:
            while len(done.seconds) < rounds or done.tokens < tokens:
                if self._session.context_left < 2:
                    break
                before, start = engine.report(), perf_counter()
                made = run_round(self._session, self._sampler, self._token, None, 0, self.speculation)
                done.seconds.append(perf_counter() - start)
                done.device_seconds.append(spent())
                after = engine.report()
                done.moved_bytes.append(after.h2d_bytes - before.h2d_bytes)
                done.copies += after.h2d_calls - before.h2d_calls
                done.tokens += len(made)
                self._token = made[-1][0]
        return done


def measure(engine: Engine, model: OpenModel, speculative: SpeculativeSettings, reading: Reading,
            decode_tokens: int) -> Row:
    """The measured columns, but for those of loading. Raises ``KvsError``; an ``AssertionError`` if a count is off.

    decode_tokens  at least so many are timed
    """
    session = Session(engine)
    if reading.filled_to:
        fill_context(engine, reading.filled_to, reading.base)
        session.tokens = random_tokens(engine, reading.filled_to).tolist()
    before, start = engine.report().h2d_bytes, perf_counter()
    logits = session.prefill(reading.prompt)[0]
    prefill_s = perf_counter() - start
    prefill_bytes = engine.report().h2d_bytes - before
    assert len(session.tokens) == engine.committed == max(len(reading.base), reading.filled_to) + len(reading.prompt)
    sampler = Sampler(SamplingParams(temperature=0.0, seed=1), n_vocab=engine.spec.n_vocab, vocab=model.tokenizer,
                      eog_ids=())
    first = sampler.pick(logits).token
    sampler.accept(first)
    first_token_s = perf_counter() - start
    text = Text(session, model, speculative, first, sampler)
    text.run(rounds=WARM_ROUNDS)
    drafted, accepted = text.drafts()
    timed = text.run(tokens=decode_tokens)
    drafted, accepted = (now - then for now, then in zip(text.drafts(), (drafted, accepted), strict=True))
    assert timed.tokens == len(timed.seconds) + accepted >= decode_tokens, (timed.tokens, accepted, decode_tokens)
    stats, link = engine.report().stats, engine.link_bytes_per_s
    step_ms = 1e3 * float(np.median(timed.seconds))
    streamed = float(np.median(timed.moved_bytes))
    kernels_ms = _kernels_ms(engine, text) if streamed else step_ms
    link_ms = 1e3 * streamed / link
    total_s, moved = sum(timed.seconds), sum(timed.moved_bytes)
    request = engine.memory.request(Phase.DECODE)
    held = engine.memory_report()
    return _rounded({
        "context_capacity": engine.context.context_tokens,
        "prompt_tokens": reading.read_tokens,
        "filled_tokens": max(0, reading.filled_to - len(reading.base)),
        "decode_tokens": decode_tokens,
        "draft_generated": drafted,
        "draft_accepted": accepted,
        "acceptance_pct": 100 * accepted / drafted if drafted else None,
        "mean_verify_width": (len(timed.seconds) + drafted) / len(timed.seconds),
        "rounds": len(timed.seconds),
        "arena_mib": engine.memory.arena_bytes / MIB,
        "decode_kv_pool_mib": engine.memory.pool_bytes(Phase.DECODE) / MIB,
        "decode_workspace_mib": sum(region.size_bytes for region in request.workspace) / MIB,
        "recurrent_mib": held["state"] / MIB,
        "resident_pages": stats.resident_pages,
        "ring_slots": stats.ring_slots,
        "active_pages": stats.active_pages,
        "kv_mib": stats.active_bytes / MIB,
        "streamed_mib_per_pass": streamed / MIB,
        "h2d_mib_per_token": moved / MIB / timed.tokens,
        "h2d_calls_per_token": timed.copies / timed.tokens,
        "h2d_gbps": moved / total_s / 1e9,
        "link_gbps": link / 1e9,
        "link_share_pct": 100 * moved / total_s / link,
        "prefill_tps": len(reading.prompt) / prefill_s,
        "prefill_link_tps": len(reading.prompt) * link / prefill_bytes if prefill_bytes else None,
        "decode_tps": timed.tokens / total_s,
        "ms_per_step_p50": step_ms,
        "ms_per_step_p95": 1e3 * float(np.percentile(timed.seconds, 95)),
        "host_ms": _host_ms(timed),
        "compute_floor_ms": kernels_ms,
        "link_floor_ms": link_ms,
        "step_over_floor": step_ms / max(kernels_ms, link_ms),
        "first_token_ms": 1e3 * first_token_s,
        "device_peak_mib": sum(size for purpose, size in held.items() if purpose != "history") / MIB,
        "host_history_mib": stats.history_bytes / MIB,
        "device": engine.device_name,
        "synthetic": model.file.synthetic,
    })


def _host_ms(timed: Rounds) -> float | None:
    if not any(timed.device_seconds):
        return None
    return 1e3 * float(np.median(np.subtract(timed.seconds, timed.device_seconds)))


def _kernels_ms(engine: Engine, text: Text) -> float:
    with without_copies(engine):
        text.run(rounds=FLOOR_WARM_ROUNDS)
        return 1e3 * float(np.median(text.run(rounds=FLOOR_ROUNDS).seconds))


def _rounded(row: Row) -> Row:
    return {name: float(f"{cell:.6g}") if isinstance(cell, float) else cell for name, cell in row.items()}


def try_steps(engine: Engine, tokens: Sequence[int]) -> None:
    """One step of each phase: what a probe of an arena has to be able to do."""
    session = Session(engine)
    session.prefill(tokens)
    session.decode(0)
