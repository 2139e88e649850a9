"""Train the demo model.

    python -m benchmarks.demo_model.train --data FOLDER --output FOLDER [--resume FOLDER] [--seconds N]

``--data`` holds what ``prepare`` wrote. ``--output`` gets ``train.jsonl`` (the log), ``weights.*`` (to go on from),
``demo.gguf`` and ``evaluation.json``. A run that reaches ``--seconds`` stops early and can be resumed; the file and the
evaluation are written all the same.

The length of a sequence grows in stages (``STAGES``); a step always has ``--tokens`` tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.demo_model import export_gguf
from benchmarks.demo_model.checkpoint import load_checkpoint, save_checkpoint
from benchmarks.demo_model.evaluate import LENGTHS, Texts, evaluate
from benchmarks.demo_model.mixture import ANSWER_WEIGHT, Mixture
from benchmarks.demo_model.model import Config, Model, initial_weights
from benchmarks.demo_model.optim import Optimizer, schedule
from benchmarks.demo_model.tokenizer import load

STAGES = ((0.30, 2048), (0.88, 8192), (1.0, 32768))
"""Up to this share of all steps, sequences of this many tokens."""
MTP_WEIGHT = 0.3
LICENCE = "MIT"


@dataclass(frozen=True, slots=True)
class Plan:
    """One training, whatever number of runs it takes."""

    steps: int
    tokens: int
    longest: int
    seed: int
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    decay: float = 0.05
    warm_up: int = 60
    cool_down: float = 0.5

    def length(self, step: int) -> int:
        """Tokens per sequence in a step."""
        share = (step + 0.5) / self.steps
        return min(self.longest, next(length for until, length in STAGES if share <= until))


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """The batch of each step, made by a worker process."""

    def __init__(self, data: Path, plan: Plan, first: int) -> None:
        self._data, self._plan, self._first = data, plan, first
        self._mixture: Mixture | None = None

    def __len__(self) -> int:
        return self._plan.steps - self._first

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._mixture is None:
            self._mixture = Mixture(self._data, seed=self._plan.seed)
        step = self._first + index
        length = self._plan.length(step)
        ids, weights = self._mixture.batch(step, self._plan.tokens // length, length + 1)
        return torch.from_numpy(ids), torch.from_numpy(weights)


def batches(data: Path, plan: Plan, first: int, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of tokens and weights from step ``first`` on."""
    yield from DataLoader(
        Batches(data, plan, first), batch_size=None, num_workers=workers, pin_memory=torch.cuda.is_available(),
        prefetch_factor=4 if workers else None,
    )  # fmt: skip


class Log:
    """One JSON object per line, in a file and on the terminal."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def write(self, **entry: Any) -> None:
        line = json.dumps({"s": round(self.seconds, 1)} | entry)
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()


def train(
    data: Path, output: Path, plan: Plan, config: Config, *, resume: Path | None, seconds: float, cases: int,
    workers: int, compiled: bool,
) -> None:  # fmt: skip
    """One run. See the module."""
    output.mkdir(parents=True, exist_ok=True)
    log = Log(output / "train.jsonl")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.set_float32_matmul_precision("high")
    first = 0
    weights = initial_weights(config, plan.seed)
    if resume is not None:
        checkpoint = load_checkpoint(resume)
        config, weights, first = checkpoint.config, checkpoint.weights, checkpoint.step
    weights = {name: weight.to(device).requires_grad_() for name, weight in weights.items()}
    model = Model(config, weights, dtype=dtype, compiled=compiled)
    optimizer = Optimizer(weights, muon_rate=plan.muon_rate, adam_rate=plan.adam_rate, decay=plan.decay)
    log.write(
        event="start", step=first, parameters=sum(weight.numel() for weight in weights.values()), plan=asdict(plan),
        config=asdict(config), torch=torch.__version__,
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    )  # fmt: skip
    step = _run(model, optimizer, batches(data, plan, first, workers), plan, first, seconds, log, device)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    log.write(event="trained", step=step, tokens=step * plan.tokens, device_gib=round(peak / 2**30, 1))
    save_checkpoint(output, config, weights, step)
    export_gguf.write(
        output / "demo.gguf", config, weights, load(data / "merges.json"), name="kvs demo", licence=LICENCE,
        description=f"A small model trained for kvs: {step * plan.tokens / 1e6:.0f} M tokens of public-domain and "
        "permissively licensed English text and of recall tasks, sequences up to "
        f"{plan.length(step - 1)} tokens; see benchmarks/demo_model",
    )  # fmt: skip
    config, rounded = export_gguf.read(output / "demo.gguf")
    rounded = {name: weight.to(device) for name, weight in rounded.items()}
    lengths = tuple(length for length in LENGTHS if length <= max(plan.longest, LENGTHS[0]))
    measured = evaluate(Model(config, rounded, dtype=dtype), Texts(data), cases=cases, lengths=lengths)
    measured["step"], measured["trained_tokens"] = step, step * plan.tokens
    (output / "evaluation.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    log.write(event="evaluated", **measured["text"], recall={
        name: {length: entry["mean"] for length, entry in by_length.items()}
        for name, by_length in measured["recall"].items()
    })  # fmt: skip


def _run(
    model: Model, optimizer: Optimizer, source: Iterator[tuple[Tensor, Tensor]], plan: Plan, first: int, seconds: float,
    log: Log, device: torch.device,
) -> int:  # fmt: skip
    """Steps until the plan or the time is at its end; the number of steps done in all."""
    sums = torch.zeros(7, device=device)
    step, since, when = first, first, log.seconds
    for step, (ids, weights) in enumerate(source, first):
        ids, weights = ids.to(device, non_blocking=True), weights.to(device, non_blocking=True)
        targets, weight = ids[:, 1:].contiguous(), weights[:, 1:].contiguous()
        part = model.losses(ids[:, :-1].contiguous(), targets, weight)
        total = weight.sum()
        ((part.own + MTP_WEIGHT * part.drafted) / total).backward()  # type: ignore[no-untyped-call]
        done = step - first  # momentum starts anew in each run, so each run warms up
        rising = min(1.0, (done + 1) / plan.warm_up)
        rate = schedule(step, plan.steps, warm_up=plan.warm_up, cool_down=plan.cool_down)
        optimizer.step(min(rate, rising))
        rows = (total, (weight > 0).sum(), (weight >= ANSWER_WEIGHT).sum())
        sums += torch.stack([value.detach().float() for value in (*part, *rows)])
        last = step + 1 == plan.steps or log.seconds > seconds
        turns = not last and plan.length(step + 1) != plan.length(step)
        if (step + 1) % 50 == 0 or last or turns or done < 3:
            loss, mtp, agreed, recalled, weighed, counted, answers = sums.tolist()
            speed = (step + 1 - since) * plan.tokens / (log.seconds - when)
            log.write(
                step=step + 1, length=plan.length(step), loss=round(loss / weighed, 4), mtp=round(mtp / weighed, 4),
                agreement=round(agreed / counted, 4), recall=round(recalled / max(answers, 1), 4),
                tokens_per_s=round(speed), rate=round(rate, 4),
            )  # fmt: skip
            sums.zero_()
            since, when = step + 1, log.seconds
        if last:
            break
    return step + 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on from the weights in this folder")
    parser.add_argument("--seconds", type=float, default=495.0, help="stop training after this time")
    parser.add_argument("--steps", type=int, default=2550)
    parser.add_argument("--tokens", type=int, default=131_072, help="per step")
    parser.add_argument("--longest", type=int, default=32_768, help="no sequence has more tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=40, help="prompts per cell of the recall table")
    parser.add_argument("--workers", type=int, default=12, help="processes that make batches")
    parser.add_argument("--plain", action="store_true", help="without torch.compile")
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that everything works on a CPU")
    a = parser.parse_args()
    plan = Plan(a.steps, a.tokens, a.longest, a.seed)
    small = Config(embd=64, ffn=96, layers=4, heads=2, kv_heads=1, ssm_k_heads=1, ssm_v_heads=2)
    train(
        a.data, a.output, plan, small if a.small else Config(), resume=a.resume, seconds=a.seconds, cases=a.cases,
        workers=a.workers, compiled=not a.plain,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
