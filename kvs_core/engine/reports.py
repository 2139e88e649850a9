"""What an engine tells of its memory, for summaries, metrics and pages that show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvs_core.streaming.places import KvStats


@dataclass(frozen=True, slots=True)
class KvReport:
    """Counters of the KV machinery since the engine was built. Bytes and milliseconds; None: not measured here.

    h2d_bytes, h2d_calls  all copies to the device: weights that pass through the arena are among them
    """

    mode: str
    arena_bytes: int
    page_tokens: int
    page_bytes: int                # of those that stream
    stats: KvStats
    layer_numbers: Sequence[int]   # the model's numbers of the layers that ``stats`` counts
    h2d_bytes: int
    h2d_calls: int
    d2h_bytes: int
    stall_ms: float | None


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """Where the weights of the trunk's layers are.

    passing            layers whose matrices pass through the arena
    resident_bytes     of the device: all weights that stay there
    home_bytes         of host memory: those that pass, and so what a pass over the layers moves
    ring_bytes         of the arena
    h2d_bytes          moved since the engine was built
    """

    layers: int
    passing: tuple[int, ...]
    resident_bytes: int
    home_bytes: int
    ring_bytes: int
    h2d_bytes: int
