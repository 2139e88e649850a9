"""Engines on tiny models with arenas of any number of pages, for tests of the whole machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvs_core.device.host.device import HostDebug, HostDevice
from kvs_core.engine.engine import Engine
from kvs_core.engine.session import Session
from kvs_core.formats.gguf import GgufFile
from kvs_core.memory.phases import Phase, required_bytes
from kvs_core.settings.rooms import ContextSettings, KvSettings, RopeSettings

CONTEXT = 512


def kv_settings(type_k: str = "q8_0", type_v: str = "q4_0", **others: object) -> KvSettings:
    """Small pages, so that a short text has many."""
    return replace(KvSettings(type_k=type_k, type_v=type_v, page_tokens=32), **others)  # type: ignore[arg-type]


@contextmanager
def engine(
    path: Path,
    *,
    kv: KvSettings,
    pool: float | None = None,
    fixed: bool = False,
    ubatch: int = 64,
    context: int = CONTEXT,
    debug: HostDebug | None = None,
    lower: bool = False,
) -> Iterator[Engine]:
    """An engine whose pool lies between the least (0.0) and all pages (1.0); None: all pages.

    fixed  the pool has that size in both phases; otherwise in the phase with the larger workspace
    lower  a ring or a run that this pool cannot have becomes the largest that it can
    """
    settings: dict[str, Any] = {
        "context": ContextSettings(ctx_size=context, ubatch=ubatch), "kv": kv, "rope": RopeSettings()
    }
    file = GgufFile.open(path)
    sizes = {}
    if pool is not None:
        sizes, most = _sizes(file, settings, pool, fixed)
        if lower:
            kv = replace(kv, ring_slots=min(kv.ring_slots, most), run_pages=min(kv.run_pages, most))
            settings["kv"] = kv
    built = Engine(file, HostDevice(1, debug=debug), **settings, **sizes)
    try:
        yield built
    finally:
        built.close()


def _sizes(file: GgufFile, settings: dict[str, Any], pool: float, fixed: bool) -> tuple[dict[str, int], int]:
    """Arguments of an ``Engine``, and the slots of its pool that may be the ring."""
    probe = Engine(file, HostDevice(1), **{**settings, "kv": replace(settings["kv"], ring_slots=0, run_pages=0)})
    try:
        need, memory = probe.need, probe.memory
        slots = round(need.least_slots + pool * (need.all_slots - need.least_slots))
        page_bytes = probe.geometry.page_bytes
        if fixed:
            return {"pool_bytes": slots * page_bytes}, slots - need.least_slots + 1
        phases = [required_bytes(memory.request(phase), slot_bytes=page_bytes, slots=slots) for phase in Phase]
        return {"arena_bytes": max(phases)}, slots - need.least_slots + 1
    finally:
        probe.close()


def run(built: Engine, prompt: Sequence[int], decode: Sequence[int]) -> np.ndarray:
    """Logits of every prompt position, then of each decode step: [T, V]."""
    session = Session(built)
    logits = [session.prefill(prompt, all_logits=True)]
    logits += [session.decode(token)[None] for token in decode]
    return np.concatenate(logits)


def text(vocab: int, count: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]
