"""What only measurements do to an engine: fill its context without reading a prompt, and run steps without copies.

Nothing that is generated behind either means anything. Times do: a step costs the same whatever its pages hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvs_core.device.base import PASSED, Fence, PassedFence
from kvs_core.engine.budget import BudgetDevice, plan_budget
from kvs_core.engine.engine import Engine
from kvs_core.memory.phases import Phase
from kvs_core.settings.rooms import ContextSettings, KvSettings
from kvs_core.units import MIB

_STRIDE = 7            # from page to page; with the layer's number added, neighbours and layers hold different pages
_MOST_THREADS = 8
_THREAD_BYTES = 256 * MIB


def random_tokens(engine: Engine, count: int, seed: int = 0) -> np.ndarray:
    """Ids of the engine's vocabulary, int32 [count]."""
    return np.random.default_rng(seed).integers(0, engine.spec.n_vocab, count).astype(np.int32)


def free_bytes(engine: Engine) -> int:
    """Device memory that could be had now, beside all that the engine holds."""
    return engine._device.free_bytes()


def check_memory(engine: Engine, context: ContextSettings, kv: KvSettings, *, pool_bytes: int | None = None) -> None:
    """``BudgetError`` or ``SettingsError`` if an engine of the same model on the same device could not have these
    settings. ``pool_bytes``: as in ``Engine``."""
    plan_budget(
        engine.spec, context, kv, free_bytes=free_bytes(engine), pool_bytes=pool_bytes,
        device=BudgetDevice.of(engine._device), ring_bytes=engine.split.ring.size_bytes,
    )


def fill_context(engine: Engine, tokens: int, prompt: Sequence[int]) -> None:
    """Bring an engine that holds nothing to ``tokens`` committed tokens: ``prompt`` is read, and its pages, repeated in
    the history, stand for a context of that length.

    tokens  whole pages, unless the prompt has them all
    prompt  whole pages; what is beyond ``tokens`` is left out
    Between steps. ``DeviceError`` where the history finds no host memory.
    """
    kv = engine._kv
    prompt = prompt[:tokens]
    for first in range(0, len(prompt), engine.context.ubatch_tokens):
        with engine.step(prompt[first : first + engine.context.ubatch_tokens], Phase.PREFILL) as step:
            step.settle()
    if tokens <= len(prompt):
        return
    assert tokens % kv.geometry.page_tokens == len(prompt) % kv.geometry.page_tokens == 0, (tokens, len(prompt))
    kv.drain()
    base = [[np.array(data) for _, data in kv.history_pages(layer)] for layer in range(kv.layers)]
    kv.truncate(0)
    needed = [kv.needed_pages(layer, tokens) for layer in range(kv.layers)]
    homes = [[kv.room_for(layer, page) for page in pages] for layer, pages in enumerate(needed)]   # from this thread

    def repeat(layer: int) -> None:
        have = base[layer]
        for page, home in zip(needed[layer], homes[layer], strict=True):
            home[:] = have[(page * _STRIDE + layer) % len(have)]

    size_bytes = sum(home.nbytes for pages in homes for home in pages)
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1, 1 + size_bytes // _THREAD_BYTES)) as threads:
        list(threads.map(repeat, range(kv.layers)))
    kv.restore(tokens)
    engine._state.flush()
    engine._state.restore(tokens)


class _NoStream:
    """A copy stream on which nothing is done and nothing is waited for."""

    name = "copy"

    def record(self) -> PassedFence:
        return PASSED

    def wait(self, fence: Fence) -> None:
        pass

    def synchronize(self) -> None:
        pass


@contextmanager
def without_copies(engine: Engine) -> Iterator[None]:
    """Steps in the block launch all that they would, but the copies to the device: what the kernels alone take.

    They read whatever lies in the ring, so outputs mean nothing; afterwards too, since pages that become resident are
    not copied either. The engine is only good for more measurements then.
    """
    device: Any = engine._device
    enqueue, copy = device.enqueue_copy, device.copy
    stand_in = _NoStream()

    def only_others(dst: Any, src: Any, stream: Any) -> None:
        if stream is not stand_in:
            enqueue(dst, src, stream)

    engine._kv.streamer.settle_fences()
    if engine._weights is not None:
        engine._weights.settle_fences()
    device.compute.synchronize()
    device.copy, device.enqueue_copy = stand_in, only_others
    engine._captured.forget()
    try:
        yield
    finally:
        device.copy = copy
        del device.enqueue_copy
        engine._captured.forget()
