"""Is the CUDA engine right, and how near is it to what the GPU and the link can do?

    python benchmarks/gpu_check.py [--tests] [--parts resident,streamed,weights,...] [--path sm_80] [--output FILE.json]

``--tests`` first runs the kernel and engine tests on the GPU. ``--path sm_80`` checks the kernels of older GPUs on this
one (KVS_CUDA_PATH), with marks and, unless they are named, parts of its own. Speeds are of synthetic Qwen3.5-27B models
(real shapes, random weights and pages); each is divided by a rate probed in the same run. Results are printed as one
table and written as JSON with the GPU's name, the driver's and the commit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks.commit import commit  # noqa: E402
from benchmarks.gpu import runs  # noqa: E402
from benchmarks.gpu.given_text import Arm, write_by_turns  # noqa: E402
from benchmarks.gpu.rates import Rates, probe  # noqa: E402
from kvs_core.demo import DEMO_MODEL  # noqa: E402
from kvs_core.device.cuda.path import VARIABLE, asked_path  # noqa: E402
from kvs_core.engine.budget import Drafting  # noqa: E402
from kvs_core.engine.measuring import without_copies  # noqa: E402
from kvs_core.errors import SettingsError  # noqa: E402
from kvs_core.formats.gguf import GgufFile  # noqa: E402
from kvs_core.formats.tokenizer import Tokenizer  # noqa: E402
from kvs_core.models.registry import read_spec  # noqa: E402
from kvs_core.models.synthetic import synthetic_model  # noqa: E402
from kvs_core.settings.drafters import ModelDraftSettings, SpeculativeSettings  # noqa: E402

ARENA_MIB = 2240
MODEL = "qwen3.5-27b"


@dataclass(frozen=True)
class Line:
    """One line of the table. ``bar``: what it must reach, if anything; ``below`` it is good, or above."""

    what: str
    value: float
    bar: float | None = None
    below: bool = False
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """ok, short, or nothing where there is no bar."""
        if self.bar is None:
            return ""
        good = self.value <= self.bar if self.below else self.value >= self.bar
        return "ok" if good else "short"


Report = Callable[[Line], None]


def resident(rates: Rates, report: Report) -> None:
    """Decode with all pages on the device, 4 Ki tokens of context."""
    for mix, bar in (("q4_k", 0.66), ("iq4_xs", 0.63)):
        with runs.engine_on(synthetic_model(f"{MODEL}:{mix}"), context=8192, ubatch=2048) as engine:
            runs.fill(engine, 4096)
            weights = runs.weight_bytes(engine)
            first = 0.0
            for rows in (1, 2, 4, 6, 8):
                steps = runs.decode(engine, rows, 24, keep=1)
                first = first or steps.gpu_ms
                share = weights / steps.gpu_ms * 1e3 / rates.hbm_read
                if rows == 1:
                    report(Line(f"{mix}, 1 row: weights / time / HBM", share, bar, detail=asdict(steps)))
                    report(Line(f"{mix}: host ms per step", steps.host_ms, 1.0, True))
                else:
                    report(Line(f"{mix}, {rows} rows / 1 row", steps.gpu_ms / first, 1.15 if rows == 4 else None, True,
                                asdict(steps)))
            if mix == "q4_k":
                report(Line("decode workspace of 8 rows at 8 Ki, MiB", runs.decode_workspace_bytes(engine) / 2**20))


def streamed(rates: Rates, report: Report) -> None:
    """Decode through a bounded arena, at growing contexts."""
    file = synthetic_model(f"{MODEL}:q4_k")
    for context, bar in ((16384, 1.03), (65536, 1.03), (131072, 1.06), (262144, 1.03)):
        name = f"{context >> 10} Ki"
        with runs.engine_on(file, context=context, ubatch=512) as engine:
            runs.fill(engine, context - 1024)
            alone = runs.decode(engine, 1, 24)
            if context == 262144:
                pages = engine.geometry.pages_of(context - 1024)
                for rows in (1, 4):
                    read_ms, all_ms = runs.attention_ms(engine, rows)
                    share = pages * engine.geometry.page_bytes / read_ms * 1e3 / rates.hbm_read
                    report(Line(f"attention at 256 Ki, {rows} row(s): KV / time / HBM", share,
                                0.80 if rows == 1 else None, detail={"read_ms": read_ms, "read_and_merge_ms": all_ms}))
                report(Line("decode workspace of 8 rows at 256 Ki, MiB", runs.decode_workspace_bytes(engine) / 2**20,
                            32.0, True))
        with runs.engine_on(file, context=context, ubatch=512, arena_mib=ARENA_MIB) as engine:
            runs.fill(engine, context - 1024)
            runs.decode(engine, 1, 12)   # the policy settles
            both = runs.decode(engine, 1, 24)
            with without_copies(engine):
                kernels = runs.decode(engine, 1, 24)
            stats = engine.report().stats
            link_ms = both.streamed_bytes / rates.h2d * 1e3
            detail = {"both": asdict(both), "kernels": asdict(kernels), "all_resident": asdict(alone),
                      "kv": asdict(stats), "link_ms": link_ms}
            ratio = both.gpu_ms / max(kernels.gpu_ms, link_ms)
            report(Line(f"{name}: step / max(kernels, link)", ratio, bar, True, detail))
            report(Line(f"{name}: kernels / all resident", kernels.gpu_ms / alone.gpu_ms,
                        1.10 if context <= 65536 else None, True))
            if both.streamed_bytes:
                report(Line(f"{name}: H2D rate / probed", both.streamed_bytes / both.gpu_ms * 1e3 / rates.h2d, 0.96))
            report(Line(f"{name}: host ms per step", both.host_ms, 1.0, True))


def weights(rates: Rates, report: Report) -> None:
    """Decode with the weights of half of the layers in host memory."""
    file = synthetic_model(f"{MODEL}:q4_k")
    layers = read_spec(file).n_layer
    with runs.engine_on(file, context=8192, ubatch=512, gpu_layers=1 + layers // 2) as engine:
        runs.fill(engine, 4096)
        both = runs.decode(engine, 1, 12)
        with without_copies(engine):
            kernels = runs.decode(engine, 1, 12)
        passing = engine.weights_report()
        link_ms = both.streamed_bytes / rates.h2d * 1e3
        detail = {"both": asdict(both), "kernels": asdict(kernels), "weights": asdict(passing), "link_ms": link_ms}
        report(Line(f"weights of {len(passing.passing)} of {layers} layers streamed: step / max(kernels, link)",
                    both.gpu_ms / max(kernels.gpu_ms, link_ms), 1.05, True, detail))


def prefill(rates: Rates, report: Report) -> None:
    """Reading a prompt."""
    file = synthetic_model(f"{MODEL}:q4_k")
    with runs.engine_on(file, context=10240, ubatch=2048) as engine:
        taken_ms, operations = runs.matmuls_ms(engine, 2048)
        report(Line("products at 2,048 rows / GEMM", operations / taken_ms * 1e3 / rates.gemm, 0.75,
                    detail={"ms": taken_ms}))
        runs.prefill_ms(engine, 512, 512)   # what is set up on first use
        taken_ms = runs.prefill_ms(engine, 8192, 2048)
        share = runs.matmul_operations(engine, 8192) / taken_ms * 1e3 / rates.gemm
        report(Line("8 Ki prompt, ubatch 2,048 / GEMM", share, 0.40, detail={"ms": taken_ms,
                    "tokens_per_s": 8192 / taken_ms * 1e3}))
    times: dict[tuple[int, bool], float] = {}
    context, tokens = 131072, 4096
    for small in (False, True):
        with runs.engine_on(file, context=context, ubatch=2048, arena_mib=ARENA_MIB if small else None) as engine:
            runs.fill(engine, context - 5 * tokens)
            for ubatch in (2048, 512, 256):
                runs.prefill_ms(engine, ubatch, ubatch)
                times[ubatch, small] = runs.prefill_ms(engine, tokens - ubatch, ubatch)
    for ubatch in (2048, 512, 256):
        alone, streaming = times[ubatch, False], times[ubatch, True]
        report(Line(f"128 Ki, ubatch {ubatch}: resident / streamed", alone / streaming,
                    0.95 if ubatch == 2048 else None,
                    detail={"resident_ms": alone, "streamed_ms": streaming, "tokens": tokens - ubatch}))


def speculation(rates: Rates, report: Report) -> None:
    """Rounds at 256 Ki in the small arena. Acceptance is synthetic: only what a round costs is measured.

    Two ways of drafting are compared on one text, by turns of a few rounds: tokens of all rounds, by what these take
    (see ``Arm.tokens_per_s``)."""
    file, context = synthetic_model(f"{MODEL}:q4_k:mtp"), 262144
    vocab = Tokenizer.from_metadata(file.metadata, source="synthetic")
    rates_3 = (0.9, 0.81, 0.729)
    with runs.engine_on(
        file, context=context, ubatch=512, arena_mib=ARENA_MIB, drafting=Drafting(nextn=True, resident=True)
    ) as engine:
        runs.fill(engine, context - 4096)
        # By turns: the link's rate changes by 2 % within seconds.
        turns = [(runs.decode(engine, 1, 8), runs.decode(engine, 4, 8, keep=1)) for _ in range(5)]
        ratio = float(np.median([four.gpu_ms for _, four in turns]) / np.median([one.gpu_ms for one, _ in turns]))
        report(Line("256 Ki: 4 rows / 1 row, streamed", ratio, 1.02, True,
                    {"turns": [[asdict(one), asdict(four)] for one, four in turns]}))
        plain = runs.text(engine, vocab, SpeculativeSettings(), 24)
        mtp = runs.text(engine, vocab, SpeculativeSettings(("draft-mtp",), synth_rates=rates_3), 96)
        report(Line("256 Ki: MTP of 3 (synthetic acceptance) / plain, tokens/s", mtp.tokens_per_s / plain.tokens_per_s,
                    2.9, detail={"plain": asdict(plain), "mtp": asdict(mtp)}))
        seven = ModelDraftSettings(n_max=7)
        draft_ms = runs.resident_draft_ms(engine, 7)
        resident_text = runs.text(
            engine, vocab, SpeculativeSettings(("draft-resident",), draft=seven, synth_len=5.0), 96
        )
        allowed_ms = 7 * draft_ms + 1.03 * plain.round_ms
        report(Line("256 Ki: round of 7 resident drafts / (7 drafts + 1.03 steps)", resident_text.round_ms / allowed_ms,
                    1.0, True, {"draft_ms": draft_ms, "resident": asdict(resident_text)}))
    with runs.engine_on(
        file, context=context, ubatch=512, arena_mib=ARENA_MIB, drafting=Drafting(nextn=True)
    ) as engine:
        runs.fill(engine, context - 8192)
        one = runs.decode(engine, 1, 8)
        for rows in (17, 49, 65):
            taken_ms = runs.tiles_ms(engine, rows)
            report(Line(f"256 Ki: step of {rows} rows in tiles / 1 row", taken_ms / one.wall_ms,
                        detail={"ms": taken_ms}))
        five = ModelDraftSettings(n_max=5)
        for name, before, text in given_texts(engine.spec.n_vocab):
            alone, mixed = arms = [
                Arm(engine, vocab, SpeculativeSettings(types, draft=five), before, text)
                for types in (("draft-mtp",), ("ngram-simple", "draft-mtp"))
            ]
            write_by_turns(arms)
            report(Line(f"256 Ki: {name}: MTP of 5 and ngram-simple / MTP of 5",
                        mixed.tokens_per_s / alone.tokens_per_s, 0.98,
                        detail={"mtp": alone.detail, "both": mixed.detail, "kv": asdict(engine.report().stats)}))


def given_texts(n_vocab: int) -> Iterator[tuple[str, list[int], list[int]]]:
    """Name, what stands before, and a text: this project's own source, a part of it copied with changes, and ids of
    which no two follow each other twice."""
    tokenizer = Tokenizer.from_metadata(GgufFile.open(DEMO_MODEL).metadata, source="demo model")
    files = sorted((ROOT / "kvs_core" / "paging").glob("*.py"))
    source = tokenizer.encode("".join(file.read_text() for file in files))
    yield "source", source[:4000], source[4000:4640]
    dice = np.random.default_rng(0)
    changed = [token if dice.random() > 0.01 else int(dice.integers(n_vocab)) for token in source[1000:1640]]
    yield "source copied with changes", source[:4000], changed
    other = dice.permutation(n_vocab)[:4640].tolist()
    yield "no repetition", other[:4000], other[4000:]


PARTS: dict[str, Callable[[Rates, Report], None]] = {
    "resident": resident, "streamed": streamed, "weights": weights, "prefill": prefill,
    "speculation": speculation,
}


PATH_PARTS = ("resident", "streamed", "prefill")
"""What is run where a path of the kernels is asked for."""
PATH_BARS = {"q4_k, 1 row: weights / time / HBM": 0.50, ": step / max(kernels, link)": 1.05}
"""By the end of a line's name, what it must reach there; the other lines have no mark."""


def on_path(line: Line) -> Line:
    """The line with the mark that it has where a path of the kernels is asked for."""
    bars = (bar for end, bar in PATH_BARS.items() if line.what.endswith(end))
    return replace(line, bar=next(bars, None))


def run_tests(path: str) -> str:
    """The last line of pytest, on the GPU alone; with a path those that are about it."""
    about = ["tests/ops/test_cuda_path.py", "tests/engine/test_cuda_path.py"]
    if not path:
        about = [
            "tests/ops", about[1], "tests/engine/test_cuda_engine.py", "tests/engine/test_cuda_experts.py",
            "tests/engine/test_cuda_context_shift.py", "tests/device/test_cuda_device.py",
        ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-n", "6",
               "--dist", "loadfile", "-k", "cuda", *about]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"KVS_TEST_GPU_ONLY": "1"}, capture_output=True, text=True
    )
    print(done.stdout[-6000:] if done.returncode else done.stdout.splitlines()[-1])
    return done.stdout.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", action="store_true")
    parser.add_argument("--parts")
    parser.add_argument("--path", default=os.environ.get(VARIABLE, ""))
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    os.environ[VARIABLE] = args.path
    try:
        asked_path()
    except SettingsError as error:
        parser.error(str(error))
    parts = args.parts.split(",") if args.parts else PATH_PARTS if args.path else tuple(PARTS)
    import cupy

    start = time.perf_counter()
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    result: dict[str, Any] = {
        "gpu": properties["name"].decode(), "driver_cuda": cupy.cuda.runtime.driverGetVersion(),
        "python": platform.python_version(), "cupy": cupy.__version__, "commit": args.commit or commit(),
        "path": args.path or "own", "synthetic": True, "lines": [],
    }
    if args.tests:
        result["tests"] = run_tests(args.path)
    rates = probe()
    result["rates"] = rates.as_dict()
    print(f"{result['gpu']}, path of the kernels: {result['path']}; "
          f"HBM read {rates.hbm_read / 1e9:.0f} GB/s, pinned H2D {rates.h2d / 1e9:.1f} GB/s, "
          f"fp16 GEMM {rates.gemm / 1e12:.0f} TFLOP/s; synthetic {MODEL}", flush=True)

    def report(line: Line) -> None:
        if args.path:
            line = on_path(line)
        result["lines"].append(asdict(line) | {"verdict": line.verdict})
        bar = "" if line.bar is None else f"{'<=' if line.below else '>='} {line.bar:g}"
        print(f"{line.what:<52} {line.value:8.3f}  {bar:<8} {line.verdict}", flush=True)
        if args.output:
            args.output.write_text(json.dumps(result, indent=1) + "\n")

    for part in parts:
        began = time.perf_counter()
        try:
            PARTS[part](rates, report)
        except Exception as error:   # the other parts are worth having all the same
            traceback.print_exc()
            result[f"{part}_error"] = str(error)
        result[f"{part}_s"] = round(time.perf_counter() - began, 1)
    result["total_s"] = round(time.perf_counter() - start, 1)
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
