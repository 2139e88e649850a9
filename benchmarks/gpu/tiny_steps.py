"""Every kind of step on tiny models, for a checker of memory accesses and races:

    compute-sanitizer --tool memcheck python -m benchmarks.gpu.tiny_steps
    compute-sanitizer --tool racecheck python -m benchmarks.gpu.tiny_steps small

Prefill and decode with streamed pages, experts beside a dense part, verify widths, dropped rows, a change of phase.
Prints how many logits are finite, and how long each model took. Models that are named are the only ones: qwen35, llama,
gemma4, small. A checker of races makes steps many times slower, and a limit of time ends a process without a word of
its checker; ended by SIGTERM, or by a fault, this one says where it was.
"""

from __future__ import annotations

import argparse
import faulthandler
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvs_core.device.cuda.cupy_runtime import CupyRuntime
from kvs_core.device.cuda.device import CudaDevice
from kvs_core.engine.budget import plan_budget
from kvs_core.engine.engine import Engine
from kvs_core.formats.gguf import GgufFile
from kvs_core.memory.phases import Phase
from kvs_core.models.registry import read_spec
from kvs_core.models.synthetic import synthetic_model
from kvs_core.settings.rooms import ContextSettings, KvSettings, RopeSettings
from tests.support.tiny_gguf import ROUTED, Gemma4, write_tiny_gemma4, write_tiny_llama, write_tiny_qwen35


def steps(file: GgufFile, type_k: str, type_v: str, page_tokens: int) -> None:
    """One engine, with hardly more slots than it must have."""
    kv = KvSettings(type_k=type_k, type_v=type_v, page_tokens=page_tokens)
    context = 40 * page_tokens
    sizes = ContextSettings(ctx_size=context, ubatch=64, batch=64)
    budget = plan_budget(read_spec(file), sizes, kv, free_bytes=1 << 32)
    engine = Engine(
        file, CudaDevice(CupyRuntime()), context=sizes, kv=kv, rope=RopeSettings(),
        pool_bytes=(budget.need.least_slots + 8) * budget.geometry.page_bytes,
    )
    tokens = np.random.default_rng(0).integers(0, engine.spec.n_vocab, context).astype(np.int32)
    finite = 0
    try:
        for first in range(0, min(20 * page_tokens, 1024), 64):
            with engine.step(tokens[first : first + 64], Phase.PREFILL) as step:
                step.settle()
        for rows, keep in ((1, 1), (1, 1), (4, 2), (8, 8), (1, 1)):
            with engine.step(tokens[:rows], Phase.DECODE) as step:
                finite += int(np.isfinite(step.logits(0)).sum())
                assert step.best(3) is not None
                step.settle(keep)
        with engine.step(tokens[:64], Phase.PREFILL) as step:
            finite += int(np.isfinite(step.logits()).sum())
            step.settle()
        report = engine.report()
        print(f"{engine.spec.name} {type_k}/{type_v}: {finite} finite logits, {report.h2d_bytes} bytes streamed")
    finally:
        engine.close()


@dataclass(frozen=True, slots=True)
class Case:
    """A model and how its history is kept.   write: the model, in a folder if it needs one"""

    write: Callable[[Path], GgufFile]
    type_k: str
    type_v: str
    page_tokens: int


def _written(write: Callable[..., Path], **options: Any) -> Callable[[Path], GgufFile]:
    return lambda folder: GgufFile.open(write(folder / "tiny.gguf", seed=1, weight_type="q8_0", **options))


CASES = {
    "qwen35": Case(_written(write_tiny_qwen35, head_dim=64), "q8_0", "q4_0", 32),
    "llama": Case(_written(write_tiny_llama, head_dim=64), "f16", "q5_1", 32),
    "gemma4": Case(_written(write_tiny_gemma4, more=Gemma4(experts=ROUTED)), "f16", "f16", 32),
    # Heads of 256 and pages of 256: the kernels of the large models.
    "small": Case(lambda folder: synthetic_model("small:iq4_xs"), "q8_0", "q4_0", 256),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(CASES)}; none: all")
    names = parser.parse_args(arguments).models or list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no model {', '.join(unknown)}: choose from {', '.join(CASES)}")
    for name in names:
        case, begun = CASES[name], time.monotonic()
        print(f"{name} ...", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            steps(case.write(Path(folder)), case.type_k, case.type_v, case.page_tokens)
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)
    main()
