"""Decode speed against what is streamed: where is the cliff, and how near to it does kvs run?

    python benchmarks/cliff.py [--models NAME,NAME] [--points F,F,...] [--commit HASH] --output FOLDER
    python benchmarks/cliff.py --plot FOLDER

Synthetic models (real shapes, random weights) at one context, through arenas from all pages down. A point is named by
what its copies take at the probed rate of the link, as a share of the same launches without copies: at 0 all pages are
resident, at 1 the link is as busy as the GPU. The limit is the larger of the two times. Marks: no point more than 8 %
above its limit; points up to 0.9 at 0.94 of the speed of their launches alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.commit import commit  # noqa: E402

MODELS = {"qwen2.5-14b:q4_k": 65536, "gemma4-31b:q4_k": 131072, "gemma4-26b-a4b:q4_k": 131072}
"""With the context of each."""

POINTS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.15, 1.5, 2.0, 3.0)
STEPS = 24
_FIRST_SHARE = 1.5   # of the point that tells how much of an arena is not for resident pages


@dataclass(frozen=True)
class Point:
    """A row of the CSV. Times of one step in milliseconds, by the GPU's clock but for tokens_per_s.

    kernels_ms  the same launches without copies
    link_ms     what was streamed, at the probed rate
    """

    model: str
    context: int
    arena_mib: int
    resident_pages: int
    ring_slots: int
    streamed_mib_per_step: float
    copies_per_step: int
    step_ms: float
    kernels_ms: float
    link_ms: float
    limit_ms: float
    step_over_limit: float
    link_share: float
    tokens_per_s: float

    @property
    def verdict(self) -> str:
        """Against the marks."""
        slow = self.step_over_limit > 1.08
        hidden = self.link_share < 0.9 and self.kernels_ms / self.step_ms < 0.94
        return "short" if slow or hidden else "ok"


def measure(model: str, context: int, arena_mib: int | None, h2d: float) -> Point:
    """A point; without ``arena_mib`` all pages are resident."""
    from benchmarks.gpu import runs
    from kvs_core.engine.measuring import without_copies
    from kvs_core.models.synthetic import synthetic_model

    with runs.engine_on(synthetic_model(model), context=context, ubatch=512, arena_mib=arena_mib) as engine:
        runs.fill(engine, context - 1024)
        runs.decode(engine, 1, 12)   # the policy settles
        both = runs.decode(engine, 1, STEPS)
        with without_copies(engine):
            kernels = runs.decode(engine, 1, STEPS)
        stats = engine.report().stats
        link_ms = both.streamed_bytes / h2d * 1e3
        limit_ms = max(kernels.gpu_ms, link_ms)
        return Point(
            model, context, engine.memory.arena_bytes >> 20, stats.resident_pages, stats.ring_slots,
            both.streamed_bytes / 2**20, both.copies,
            both.gpu_ms, kernels.gpu_ms, link_ms, limit_ms, both.gpu_ms / limit_ms, link_ms / kernels.gpu_ms,
            1e3 / both.wall_ms,
        )


def sweep(models: list[str], shares: list[float], folder: Path, commit: str) -> None:
    """Measure, print, and write ``cliff.csv`` and ``machine.json`` after every point."""
    import cupy

    from benchmarks.gpu.rates import probe

    rates = probe()
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    machine: dict[str, Any] = {
        "gpu": properties["name"].decode(), "commit": commit, "rates": rates.as_dict(), "synthetic": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "machine.json").write_text(json.dumps(machine, indent=1) + "\n")
    points: list[Point] = []

    def add(point: Point) -> None:
        points.append(point)
        print(
            f"{point.model:20} {point.link_share:5.2f}: {point.streamed_mib_per_step:8.1f} MiB/step, "
            f"step {point.step_ms:7.3f} ms, launches {point.kernels_ms:7.3f}, link {point.link_ms:7.3f}: "
            f"{point.step_over_limit:.3f} {point.verdict}", flush=True,
        )
        with (folder / "cliff.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [each.name for each in fields(Point)])
            writer.writeheader()
            writer.writerows(asdict(each) for each in points)

    print(f"{machine['gpu']}, pinned H2D {rates.h2d / 1e9:.1f} GB/s; models are synthetic", flush=True)
    for model in models:
        context = MODELS[model]
        alone = measure(model, context, None, rates.h2d)
        mib_per_share = alone.kernels_ms / 1e3 * rates.h2d / 2**20
        # What is streamed and the arena are one sum, as long as the ring is.
        first = measure(model, context, int(alone.arena_mib - _FIRST_SHARE * mib_per_share), rates.h2d)
        whole_mib = first.arena_mib + first.streamed_mib_per_step
        add(alone)
        for share in shares:
            add(measure(model, context, int(whole_mib - share * mib_per_share), rates.h2d))


def plot(folder: Path) -> None:
    """``cliff.png`` and ``cliff.svg`` from the CSV: a panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with (folder / "cliff.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    gpu = json.loads((folder / "machine.json").read_text())["gpu"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(1, len(models), figsize=(5.5 * len(models), 4), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        own = [row for row in rows if row["model"] == model]
        own.sort(key=lambda row: float(row["streamed_mib_per_step"]))
        streamed = [float(row["streamed_mib_per_step"]) for row in own]
        axis.plot(streamed, [1e3 / float(row["limit_ms"]) for row in own], color="0.6", label="max(launches, link)")
        axis.plot(streamed, [1e3 / float(row["step_ms"]) for row in own], "o-", ms=4, label="kvs, GPU time of a step")
        axis.plot(streamed, [float(row["tokens_per_s"]) for row in own], "x", ms=4, label="kvs, by the host's clock")
        axis.set_title(f"{model}, {int(own[0]['context']) >> 10} Ki tokens (synthetic)", fontsize=10)
        axis.set_xlabel("streamed MiB per step")
        axis.set_ylabel("decoded tokens/s")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(gpu, fontsize=9)
    figure.tight_layout()
    for ending in ("png", "svg"):
        figure.savefig(folder / f"cliff.{ending}", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--points", default=",".join(map(str, POINTS)))
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if args.plot:
        plot(args.plot)
        return
    if not args.output:
        parser.error("--output FOLDER is missing")
    shares = [float(share) for share in args.points.split(",")]
    sweep(args.models.split(","), shares, args.output, args.commit or commit())


if __name__ == "__main__":
    main()
