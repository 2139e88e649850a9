"""What does a context shift cost: in perplexity, against a text that is read anew at every shift, and in time?

    python -m benchmarks.context_shift MODEL.gguf [--device NAME] [--text FILE] [--ctx-size N] [--threads N]
                                       [--time-only | --perplexity-only] [--output FILE.json]

    perplexity  of the text behind the first shift, in a context of N tokens that is shifted whenever it is full, half
                of what is not kept at a time; beside it that of the same tokens where the shifted text is read anew
    text        three contexts of greedy text, resident and through a small pool: whether they are the same
    time        of one shift of 32,767 tokens, whose rows are random bytes, in a context of 32,768: by the CPU, and by
                the GPU if there is one, with how many times as fast that is and whether the history has the same bytes
The context is N whatever the model was trained for. Perplexity and text are the CPU's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.commit import commit
from kvs_core.device.choose import open_device
from kvs_core.device.cuda.modules import CudaFound, find_cuda
from kvs_core.engine.checkpoints import Checkpoint
from kvs_core.engine.context_shift import ContextShift
from kvs_core.engine.engine import Engine
from kvs_core.engine.round import generate
from kvs_core.engine.session import Session
from kvs_core.formats.gguf import GgufFile, parse_override
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.models.recurrent import StateSnapshot
from kvs_core.sampling.chain import Sampler
from kvs_core.sampling.params import SamplingParams
from kvs_core.settings.rooms import ContextSettings, DeviceSettings, KvSettings, RopeSettings

ROOT = Path(__file__).resolve().parents[1]
HARBOUR = ROOT / "tests" / "data" / "harbour.txt"
TYPES = (("f16", "f16"), ("q8_0", "q4_0"))
KEPT = (4, 64, 0)
LONG = 32768
RUNS = 3   # of which the fastest counts


class Bench:
    """A model, and a text in its tokens."""

    def __init__(self, path: Path, text: Path, ctx_size: int, threads: int) -> None:
        """``threads``: of the CPU device"""
        self.file = GgufFile.open(path)
        self.tokenizer = Tokenizer.from_metadata(self.file.metadata, source=str(path))
        self.tokens = self.tokenizer.encode(text.read_text())
        self.ctx_size = ctx_size
        self.threads = threads

    @contextmanager
    def session(
        self, types: tuple[str, str], *, ctx_size: int = 0, ubatch: int = 512, device: str = "cpu", **kv: Any
    ) -> Iterator[Session]:
        """A session on a fresh engine."""
        context = ctx_size or self.ctx_size
        file = self.file.override([parse_override(f"{self.file.arch}.context_length=int:{context}")])
        engine = Engine(
            file, open_device(DeviceSettings(device, threads=self.threads)),
            context=ContextSettings(ctx_size=context, ubatch=ubatch, shift=True), kv=KvSettings(*types, **kv),
            rope=RopeSettings(),
        )
        try:
            yield Session(engine)
        finally:
            engine.close()


def perplexities(bench: Bench, types: tuple[str, str], keep: int) -> dict[str, Any]:
    """Shifted and read anew, over the tokens behind the first shift."""
    with bench.session(types) as shifted, bench.session(types) as anew:
        room, at, shifts = shifted.context_left - 1, 0, 0
        losses: list[list[float]] = [[], []]
        while at < len(bench.tokens):
            part = bench.tokens[at : at + room]
            for session, lost in zip((shifted, anew), losses, strict=True):
                logits = session.prefill(part, all_logits=True)
                if shifts and len(part) > 1:
                    lost += loss(logits[:-1], part[1:])
            at += len(part)
            if at == len(bench.tokens):
                break
            ContextShift(keep, prompt_tokens=0, bos=False).make_room(shifted)
            anew.rewind(0)
            anew.prefill(shifted.tokens)
            room, shifts = shifted.context_left - 1, shifts + 1
    both = [float(np.exp(np.mean(lost))) for lost in losses]
    return {
        "type_k": types[0], "type_v": types[1], "keep": keep, "shifts": shifts, "tokens": len(losses[0]),
        "shifted": both[0], "read_anew": both[1], "ratio": both[0] / both[1],
    }


def loss(logits: np.ndarray, tokens: Sequence[int]) -> list[float]:
    """-ln p of each token, after the logits in front of it."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    picked = wide[np.arange(len(tokens)), tokens] - np.log(np.exp(wide).sum(axis=-1))
    return [float(value) for value in -picked]


def three_contexts(bench: Bench) -> dict[str, Any]:
    """Greedy text three times as long as the context, resident and streamed."""
    made = []
    for small in ({}, {"pool_mib": 3, "ring_slots": 8}):
        with bench.session(("q8_0", "q4_0"), ubatch=64, page_tokens=32, **small) as session:
            logits = session.prefill(bench.tokens[:32])[0]
            sampler = Sampler(
                SamplingParams(temperature=0.0), n_vocab=session.engine.spec.n_vocab, vocab=bench.tokenizer, eog_ids=()
            )
            shift = ContextShift(4, prompt_tokens=32, bos=False)
            tokens = [token.id for token in generate(
                session, sampler, logits, n_predict=3 * bench.ctx_size, eog_ids=frozenset(), shift=shift
            )]
            made.append((tokens, shift.dropped, session.engine.report()))
    (resident, dropped, _), (streamed, _, report) = made
    return {
        "tokens": len(resident), "dropped": dropped, "same": resident == streamed,
        "h2d_mib": report.h2d_bytes / (1 << 20),
    }


def long_shift(bench: Bench, types: tuple[str, str], device: str) -> dict[str, Any]:
    """Seconds of shifts of all that a context of 32,768 holds, half of which goes."""
    with bench.session(types, ctx_size=LONG, device=device) as session:
        engine, tokens = session.engine, LONG - 1
        dice, seconds = np.random.default_rng(0), []
        # Bytes below 60 are numbers in every format: scales between 0 and 1.
        page = dice.integers(0, 60, engine.geometry.page_bytes, np.uint8).data
        for _ in range(RUNS):
            pages = ((layer, number, page) for layer in range(engine.kv_layers)
                     for number in range(engine.geometry.pages_of(tokens)))
            session.take_up([5] * tokens, pages, [Checkpoint(StateSnapshot(tokens, {}), None)])
            session.decode(5)   # what stays on the device is there
            session.rewind(tokens)
            start = perf_counter()
            ContextShift(4, prompt_tokens=0, bos=False).make_room(session)
            seconds.append(perf_counter() - start)
        held = sha256()
        for _, _, rows in engine.pages():
            held.update(rows)
        return {
            "type_k": types[0], "type_v": types[1], "device": engine.device_name, "tokens": tokens,
            "left": len(session.tokens), "seconds": min(seconds), "all_seconds": seconds,
            "history_mib": engine.memory_report()["history"] / (1 << 20),
            "layout": engine.geometry.layout_id, "pages_sha256": held.hexdigest(),
        }


def long_shifts(bench: Bench, device: str) -> list[dict[str, Any]]:
    """Of the CPU and of that device, with the ratio, and ``same`` where pages can be compared."""
    made = []
    for types in TYPES:
        host = long_shift(bench, types, "cpu")
        made.append(host)
        print(f"K {types[0]}, V {types[1]}: a shift of {host['tokens']} tokens takes {host['seconds']:.3f} s on cpu",
              flush=True)
        if device == "cpu":
            continue
        other = long_shift(bench, types, device)
        other["times_as_fast"] = host["seconds"] / other["seconds"]
        other["same"] = other["pages_sha256"] == host["pages_sha256"] if other["layout"] == host["layout"] else None
        made.append(other)
        print(f"    {other['seconds']:.3f} s on {other['device']}, {other['times_as_fast']:.1f} times as fast; "
              f"the same bytes: {'other layout' if other['same'] is None else other['same']}", flush=True)
    return made


def gpu_at_hand(name: str) -> str:
    """``name``, or "cpu" where ``auto`` finds no GPU."""
    settings = DeviceSettings(name)
    if settings.wants_cpu or (name == "auto" and not isinstance(find_cuda(settings.gpu_index), CudaFound)):
        return "cpu"
    return name


def print_perplexities(bench: Bench) -> list[dict[str, Any]]:
    """For each pair of types and number of tokens that are kept."""
    print("K     V     keep  shifts  tokens  shifted  read anew  ratio")
    made = []
    for types in TYPES:
        for keep in KEPT:
            row = perplexities(bench, types, keep)
            made.append(row)
            print(f"{types[0]:5} {types[1]:5} {keep:4}  {row['shifts']:6}  {row['tokens']:6}  {row['shifted']:7.3f}  "
                  f"{row['read_anew']:9.3f}  {row['ratio']:.4f}", flush=True)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="auto", metavar="NAME", help="as of kvs run; default: auto")
    parser.add_argument("--text", type=Path, default=HARBOUR, metavar="FILE", help="default: a story in the tests")
    parser.add_argument("--ctx-size", type=int, default=512, metavar="N")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--time-only", action="store_true", help="leave perplexity and text out")
    only.add_argument("--perplexity-only", action="store_true", help="leave text and time out: for long texts")
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    start = perf_counter()
    device = "cpu" if options.perplexity_only else gpu_at_hand(options.device)
    bench = Bench(options.model, options.text, options.ctx_size, options.threads)
    found: dict[str, Any] = {}
    if not options.perplexity_only:
        found["time"] = long_shifts(bench, device)
        device = found["time"][-1]["device"]
    if not options.time_only:
        found["perplexity"] = print_perplexities(bench)
    if not (options.time_only or options.perplexity_only):
        text = found["text"] = three_contexts(bench)
        print(f"{text['tokens']} tokens of text, {text['dropped']} forgotten; the same when streamed: {text['same']}")
    report = {
        "question": (__doc__ or "").splitlines()[0],
        "machine": {
            "device": device, "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(), "threads": options.threads,
        },
        "commit": commit(),
        "command": f"python -m benchmarks.context_shift {options.model.name} --ctx-size {options.ctx_size}"
                   + (f" --text {options.text.name}" if options.text != HARBOUR else "")
                   + (" --time-only" if options.time_only else "")
                   + (" --perplexity-only" if options.perplexity_only else ""),
        "model": options.model.name,
        "seconds": round(perf_counter() - start, 1),
        **found,
    }
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
