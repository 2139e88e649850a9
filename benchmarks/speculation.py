"""How many drafted tokens are accepted, and how many tokens does a round give: MTP, n-grams, drafts on resident pages?

    python -m benchmarks.speculation --data FOLDER [--threads N] [--output FILE.json]

FOLDER is what ``benchmarks.demo_model.prepare`` wrote; the text is the part of it that the demo model was not trained
on. Everything runs on the CPU: acceptance is the same on any device, but for rounding. Drafters are never paused.

    mtp        behind prompts of 256 tokens, for every --spec-draft-n-max, at temperatures 0 and 0.8
    ngram      behind 160 random words that are to be copied, a part of which has been: the demo model was trained to
               copy so, and the text to come has been there before
    resident   behind 8,192 and 16,384 tokens, with arenas that hold a part of the pages; ``plain_equals`` says that
               the text is the one that is written without drafts
"""

from __future__ import annotations

import argparse
import json
import lzma
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

from benchmarks.commit import commit
from benchmarks.demo_model.words import NOUNS
from kvs_core.demo import DEMO_MODEL
from kvs_core.device.host.device import HostDevice
from kvs_core.engine.budget import Drafting
from kvs_core.engine.engine import Engine
from kvs_core.engine.round import accept_prompt, generate
from kvs_core.engine.session import Session
from kvs_core.engine.speculation import make_speculation
from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.sampling.chain import Sampler
from kvs_core.sampling.params import SamplingParams
from kvs_core.settings.drafters import ModelDraftSettings, SpeculativeSettings
from kvs_core.settings.rooms import ContextSettings, KvSettings, RopeSettings

NGRAMS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
TEMPERATURES = (0.0, 0.8)
PAGE_TOKENS = 64
RING_SLOTS = 4
LONG = (8192, 16384)
SHARES = (1.0, 0.5, 0.25, 0.1)


class Bench:
    """The demo model, held-out text, and texts written behind parts of it."""

    def __init__(self, data: Path, threads: int) -> None:
        self.file = GgufFile.open(DEMO_MODEL)
        self.tokenizer = Tokenizer.from_metadata(self.file.metadata, source="demo model")
        self.threads = threads
        with lzma.open(data / "held_out.txt.xz", "rt", encoding="utf-8") as text:
            self.tokens = self.tokenizer.encode(text.read(200_000))

    @contextmanager
    def session(
        self, types: Sequence[str], *, context_tokens: int, pool_pages: int | None = None
    ) -> Iterator[Session]:
        """On an engine that can draft so; ``pool_pages`` of KV, or as many as there are."""
        kv = KvSettings(page_tokens=PAGE_TOKENS, ring_slots=0 if pool_pages is None else RING_SLOTS)
        page_bytes = PAGE_TOKENS * 512   # two heads of 64, keys and values in f16
        engine = Engine(
            self.file, HostDevice(self.threads), context=ContextSettings(ctx_size=context_tokens, ubatch=128), kv=kv,
            rope=RopeSettings(), drafting=Drafting.of(types),
            pool_bytes=None if pool_pages is None else pool_pages * page_bytes,
        )
        try:
            assert engine.geometry.page_bytes == page_bytes
            yield Session(engine)
        finally:
            engine.close()

    def write(
        self, session: Session, told: SpeculativeSettings, prompt: Sequence[int], count: int, temperature: float
    ) -> tuple[list[int], dict[str, Any]]:
        """The text behind ``prompt``, and what its drafts were worth."""
        session.rewind(0)
        logits = session.prefill(prompt)[0]
        vocab, eog_ids = session.engine.spec.n_vocab, self.tokenizer.eog_ids
        sampler = Sampler(
            SamplingParams(temperature=temperature, seed=1), n_vocab=vocab, vocab=self.tokenizer, eog_ids=eog_ids
        )
        accept_prompt(sampler, prompt)
        speculation = make_speculation(session.engine, told, sampler, eog_ids)
        start = perf_counter()
        text = [token.id for token in generate(
            session, sampler, logits, n_predict=count, eog_ids=frozenset(), speculation=speculation
        )]
        made_s = perf_counter() - start
        stats = [] if speculation is None else list(speculation.stats.values())
        return text, {
            "tokens": len(text) - 1,   # the first one comes from the prompt
            "rounds": len(text) - 1 if speculation is None else speculation.rounds,
            "drafted": sum(part.drafted_tokens for part in stats),
            "accepted": sum(part.accepted_tokens for part in stats),
            "seconds": made_s,
        }


def total(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of several texts."""
    sums = {key: sum(run[key] for run in runs) for key in runs[0]}
    return sums | {
        "acceptance": round(sums["accepted"] / max(1, sums["drafted"]), 4),
        "tokens_per_round": round(sums["tokens"] / sums["rounds"], 3),
        "seconds": round(sums["seconds"], 2),
    }


def settings(types: tuple[str, ...], n_max: int = 3) -> SpeculativeSettings:
    """Drafters with llama-server's sizes, that are never paused."""
    return SpeculativeSettings(types=types, adaptive=False, draft=ModelDraftSettings(n_max=n_max))


def mtp(bench: Bench, prompts: int, count: int) -> list[dict[str, Any]]:
    """By temperature and ``--spec-draft-n-max``."""
    rows = []
    with bench.session(("draft-mtp",), context_tokens=512) as session:
        for temperature in TEMPERATURES:
            for n_max in range(1, 8):
                runs = [
                    bench.write(
                        session, settings(("draft-mtp",), n_max), bench.tokens[at * 4096 :][:256], count, temperature
                    )[1]
                    for at in range(prompts)
                ]
                rows.append({"temperature": temperature, "n_max": n_max} | total(runs))
    return rows


def ngram(bench: Bench, prompts: int, count: int) -> list[dict[str, Any]]:
    """By drafter."""
    rows = []
    with bench.session((), context_tokens=1024) as session:
        for name in NGRAMS:
            runs = []
            for at in range(prompts):
                words = bench.tokenizer.encode("".join(" " + word for word in Random(at).choices(NOUNS, k=160)))
                prompt = [*bench.tokenizer.encode("Copy:"), *words, *bench.tokenizer.encode("\nAgain:"), *words[:60]]
                runs.append(bench.write(session, settings((name,)), prompt, count, 0.0)[1])
            rows.append({"type": name} | total(runs))
    return rows


def resident(bench: Bench, count: int) -> list[dict[str, Any]]:
    """By context, and by the part of its pages that the arena holds."""
    rows = []
    for length in LONG:
        prompt = bench.tokens[4096:][:length]
        for share in SHARES:
            layers, pages = 2, -(-(length + count) // PAGE_TOKENS)
            slots = None if share == 1.0 else round(share * layers * pages) + RING_SLOTS
            with bench.session(("draft-resident",), context_tokens=length + 256, pool_pages=slots) as session:
                if share == 1.0:
                    plain = bench.write(session, SpeculativeSettings(), prompt, count, 0.0)[0]
                text, run = bench.write(session, settings(("draft-resident",)), prompt, count, 0.0)
                stats = session.engine.report().stats
                rows.append({
                    "prompt": length, "share": share, "resident_pages": stats.resident_pages,
                    "pages": stats.active_pages, "n_max": 3, "plain_equals": text == plain,
                } | total([run]))
    return rows


def print_table(title: str, rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> None:
    """Columns of ``keys``, and those that every table has."""
    columns = (*keys, "rounds", "drafted", "accepted", "acceptance", "tokens_per_round")
    print(f"\n{title}\n" + "  ".join(f"{name:>16}" for name in columns))
    for row in rows:
        print("  ".join(f"{row[name]!s:>16}" for name in columns))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--prompts", type=int, default=3, metavar="N")
    parser.add_argument("--count", type=int, default=64, metavar="N", help="tokens of every text")
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    start = perf_counter()
    bench = Bench(options.data, options.threads)
    tables = {
        "mtp": mtp(bench, options.prompts, options.count),
        "ngram": ngram(bench, options.prompts, options.count),
        "resident": resident(bench, 2 * options.count),
    }
    print_table("draft-mtp, held-out prompts", tables["mtp"], ("temperature", "n_max"))
    print_table("n-gram types, words that are copied", tables["ngram"], ("type",))
    print_table("draft-resident, held-out text", tables["resident"], ("prompt", "share", "resident_pages", "pages"))
    report = {
        "question": (__doc__ or "").splitlines()[0],
        "machine": {"device": "cpu", "cpu": platform.processor() or platform.machine(), "threads": options.threads},
        "commit": commit(),
        "command": " ".join(["python -m benchmarks.speculation", *sys.argv[1:]]),
        "model": "kvs-demo.gguf, K and V in f16",
        "seconds": round(perf_counter() - start, 1),
        **tables,
    }
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
