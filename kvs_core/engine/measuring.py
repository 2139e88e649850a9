"""What only measurements do: fill an engine's context without reading a prompt, run steps without copies, and ask how
long work takes.

Nothing that is generated behind the first two means anything. Times do: a step costs the same whatever its pages hold.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np

from kvs_core.device.base import PASSED, Fence, PassedFence
from kvs_core.engine.budget import BudgetDevice, plan_budget
from kvs_core.engine.engine import Engine
from kvs_core.engine.levers import UNBOUND, Bounds
from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.memory.phases import Phase
from kvs_core.sampling.chain import Sampler
from kvs_core.sampling.params import SamplingParams
from kvs_core.settings.rooms import ContextSettings, KvSettings
from kvs_core.units import MIB

_STRIDE = 7            # from page to page; with the layer's number added, neighbours and layers hold different pages
_MOST_THREADS = 8
_THREAD_BYTES = 256 * MIB
_TIMES = 8


def random_tokens(engine: Engine, count: int, seed: int = 0) -> np.ndarray:
    """Ids of the engine's vocabulary, int32 [count]."""
    return np.random.default_rng(seed).integers(0, engine.spec.n_vocab, count).astype(np.int32)


def greedy_sampler(file: GgufFile) -> Sampler:
    """Picks the most likely token, and takes those that end a text for tokens like others."""
    vocab = Tokenizer.from_metadata(file.metadata, source=str(file.path))
    return Sampler(SamplingParams(temperature=0.0, seed=1), n_vocab=vocab.n_vocab, vocab=vocab, eog_ids=())


def seconds_of(work: Callable[[], object]) -> float:
    """See ``seconds_of_each``."""
    return seconds_of_each([work])[0]


def seconds_of_each(works: Sequence[Callable[[], object]]) -> list[float]:
    """Of each the shortest of some runs, by turns, after one that does not count: what disturbs makes it longer."""
    taken = []
    for _ in range(_TIMES + 1):
        taken.append([_timed(work) for work in works])
    return [min(each) for each in zip(*taken[1:], strict=True)]


def _timed(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def free_bytes(engine: Engine) -> int:
    """Device memory that could be had now, beside all that the engine holds."""
    return engine._device.free_bytes()


def check_memory(
    engine: Engine, context: ContextSettings, kv: KvSettings, *, pool_bytes: int | None = None,
    bounds: Bounds = UNBOUND,
) -> None:
    """``BudgetError`` or ``SettingsError`` if an engine of the same model on the same device could not have these
    settings. ``pool_bytes``, ``bounds``: as in ``Engine``."""
    plan_budget(
        engine.spec, context, kv, free_bytes=free_bytes(engine), pool_bytes=pool_bytes,
        device=BudgetDevice.of(engine._device), ring_bytes=engine.split.ring.size_bytes, bounds=bounds,
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


@contextmanager
def launch_seconds(engine: Engine) -> Iterator[Callable[[], float]]:
    """In the block, a function that tells how long the launches of captured work took on the device, in all since it
    was asked last; 0 on a device that captures nothing.

    Each launch is looked at when the next one comes, or when the function is asked: whoever waits for what a launch
    brings before that, as rounds do, has them all.
    """
    captured: Any = engine._captured
    launch = captured.launch
    total_s, waiting = 0.0, False

    def look() -> None:
        nonlocal total_s, waiting
        if waiting:
            total_s += captured.elapsed_s() or 0.0
            waiting = False

    def look_and_launch(*args: Any) -> bool:
        nonlocal waiting
        look()
        waiting = bool(launch(*args))
        return waiting

    def spent_s() -> float:
        nonlocal total_s
        look()
        spent, total_s = total_s, 0.0
        return spent

    captured.launch = look_and_launch
    try:
        yield spent_s
    finally:
        del captured.launch


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
