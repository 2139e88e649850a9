"""Weights between two runs: bfloat16, in files small enough to be moved by any means.

Momentum is not kept: after a pause it builds up again within some dozens of steps.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.demo_model.model import Config

PART_BYTES = 15 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """step: the next one to be done."""

    config: Config
    weights: dict[str, Tensor]
    step: int


def save_checkpoint(folder: Path, config: Config, weights: Mapping[str, Tensor], step: int) -> list[Path]:
    """Write ``weights.0``, ``weights.1``, ... to ``folder``."""
    buffer = io.BytesIO()
    kept = {name: weight.detach().to("cpu", torch.bfloat16) for name, weight in weights.items()}
    torch.save({"config": asdict(config), "weights": kept, "step": step}, buffer)
    data = buffer.getvalue()
    paths = []
    for number, at in enumerate(range(0, len(data), PART_BYTES)):
        paths.append(folder / f"weights.{number}")
        paths[-1].write_bytes(data[at : at + PART_BYTES])
    return paths


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read what ``save_checkpoint`` wrote; weights as float32."""
    paths = sorted(folder.glob("weights.*"), key=lambda path: int(path.suffix[1:]))
    kept = torch.load(io.BytesIO(b"".join(path.read_bytes() for path in paths)), weights_only=True)
    weights = {name: weight.float() for name, weight in kept["weights"].items()}
    return Checkpoint(Config(**kept["config"]), weights, kept["step"])
