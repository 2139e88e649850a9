"""Engines on tiny models with arenas of any number of pages, for tests of the whole machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from kvs_core.device.base import Device
from kvs_core.device.cuda.path import VARIABLE, asked_path
from kvs_core.device.host.device import HostDebug, HostDevice
from kvs_core.engine.arena_size import arena_for
from kvs_core.engine.budget import NO_DRAFTING, BudgetDevice, Drafting, plan_budget
from kvs_core.engine.engine import Engine
from kvs_core.engine.session import Session
from kvs_core.engine.split import plan_split
from kvs_core.errors import CapabilityError
from kvs_core.formats.gguf import GgufFile
from kvs_core.models.registry import read_spec
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
    device: Callable[[], Device] | None = None,
    drafting: Drafting = NO_DRAFTING,
    gpu_layers: int | None = None,
    shift: bool = False,
) -> Iterator[Engine]:
    """An engine whose pool lies between the least (0.0) and all pages (1.0); None: all pages.

    fixed       the pool has that size in both phases; otherwise in the phase with the larger workspace
    lower       a ring or a run that this pool cannot have becomes the largest that it can
    device      what it runs on: by default the host, with ``debug``
    drafting    what it will be drafted with
    gpu_layers  see ``Engine``
    shift       the context may be shifted
    """
    wanted = ContextSettings(ctx_size=context, ubatch=ubatch, shift=shift)
    file = GgufFile.open(path)
    chosen = HostDevice(1, debug=debug) if device is None else device()
    try:
        size = Size()
        if pool is not None:
            size, most = _size(file, chosen, wanted, kv, pool, fixed, drafting, gpu_layers)
            if lower:
                kv = replace(kv, ring_slots=min(kv.ring_slots, most), run_pages=min(kv.run_pages, most))
        built = Engine(
            file, chosen, context=wanted, kv=kv, rope=RopeSettings(),
            arena_bytes=size.arena_bytes, pool_bytes=size.pool_bytes, drafting=drafting, gpu_layers=gpu_layers,
        )
    except BaseException as error:
        chosen.close()
        if isinstance(error, CapabilityError) and asked_path() and "shared memory" in str(error):
            pytest.skip(f"{VARIABLE}={asked_path()}: {error}")   # as on a GPU that is one
        raise
    try:
        yield built
    finally:
        built.close()


@dataclass(frozen=True)
class Size:
    """What an ``Engine`` is told of its arena: the bytes of all of it, or of its pool."""

    arena_bytes: int | None = None
    pool_bytes: int | None = None


def _size(
    file: GgufFile, device: Device, context: ContextSettings, kv: KvSettings, pool: float, fixed: bool,
    drafting: Drafting, gpu_layers: int | None,
) -> tuple[Size, int]:
    """Of an arena, and the slots of its pool that may be the ring."""
    asked = kv if kv.residency_mode == "window" else replace(kv, ring_slots=0, run_pages=0)
    spec = read_spec(file)
    split = plan_split(file, spec, context, asked, device, gpu_layers=gpu_layers, drafting=drafting)
    budget = plan_budget(
        spec, context, asked, free_bytes=device.free_bytes(),
        device=BudgetDevice(device.scratch, device.page_layout), drafting=drafting, ring_bytes=split.ring.size_bytes,
    )
    need = budget.need
    slots = round(need.least_slots + pool * (need.all_slots - need.least_slots))
    most = slots - need.least_slots + 1
    if fixed:
        return Size(pool_bytes=slots * budget.geometry.page_bytes), most
    return Size(arena_bytes=arena_for(budget.memory, slots)), most


def run(built: Engine, prompt: Sequence[int], decode: Sequence[int]) -> np.ndarray:
    """Logits of every prompt position, then of each decode step: [T, V]."""
    session = Session(built)
    logits = [session.prefill(prompt, all_logits=True)]
    logits += [session.decode(token)[None] for token in decode]
    return np.concatenate(logits)


def text(vocab: int, count: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]
