"""Filled contexts and steps without copies."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from kvs_core.demo import DEMO_MODEL
from kvs_core.device.host.device import HostDevice
from kvs_core.engine.budget import Drafting
from kvs_core.engine.engine import Engine
from kvs_core.engine.measuring import fill_context, free_bytes, random_tokens, without_copies
from kvs_core.formats.gguf import GgufFile
from kvs_core.memory.phases import Phase
from kvs_core.settings.rooms import ALL_LAYERS, ContextSettings, KvSettings, RopeSettings

PAGE = 32


@pytest.fixture(params=[ALL_LAYERS, 3], ids=["all weights stay", "some pass"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The demo model with its MTP block and a pool that holds a part of 1,024 tokens."""
    made = Engine(
        GgufFile.open(DEMO_MODEL), HostDevice(1), context=ContextSettings(ctx_size=1024, ubatch=64, batch=64),
        kv=KvSettings(page_tokens=PAGE, ring_slots=2), rope=RopeSettings(), drafting=Drafting(nextn=True),
        pool_bytes=40 * PAGE * 512, gpu_layers=request.param,
    )
    try:
        yield made
    finally:
        made.close()


def decode(engine: Engine, tokens: int) -> np.ndarray:
    """Logits behind some tokens."""
    for token in range(tokens):
        with engine.step([token], Phase.DECODE) as step:
            logits = step.logits()
            step.settle()
    return logits


def test_a_filled_context_is_one_of_that_length(engine: Engine) -> None:
    """Every page of the history holds the bytes of one that was read, neighbours differ, and steps go on behind it with
    as many pages to move as a context that was read."""
    fill_context(engine, 896, random_tokens(engine, 128).tolist())
    assert engine.committed == 896
    pages: dict[int, list[bytes]] = {}
    for layer, _, data in engine.pages():
        pages.setdefault(layer, []).append(data.tobytes())
    assert [len(held) for held in pages.values()] == [28] * engine.kv_layers
    for held in pages.values():
        assert len(set(held)) == 4
        assert all(one != other for one, other in pairwise(held))
    assert np.isfinite(decode(engine, 3)).all()
    assert engine.committed == 899
    filled = engine.report().stats
    engine.rewind(0)
    fill_context(engine, 896, random_tokens(engine, 896).tolist())   # all of it is read
    decode(engine, 3)
    read = engine.report().stats
    assert filled.streamed_pages_per_step == read.streamed_pages_per_step > 0
    assert filled.active_pages == read.active_pages


def test_a_short_context_is_read(engine: Engine) -> None:
    """A prompt that has all the tokens is not repeated: the engine is where it would be without."""
    tokens = random_tokens(engine, 128).tolist()
    fill_context(engine, 70, tokens)
    logits = decode(engine, 1)
    engine.rewind(0)
    for first in (0, 64):
        with engine.step(tokens[first : min(first + 64, 70)], Phase.PREFILL) as step:
            step.settle()
    assert logits.tobytes() == decode(engine, 1).tobytes()


def test_without_copies_nothing_is_moved(engine: Engine) -> None:
    """Steps run and count in the block, but no byte goes to the device; behind it copies are made again."""
    fill_context(engine, 896, random_tokens(engine, 128).tolist())
    decode(engine, 4)
    before = engine.report()
    with without_copies(engine):
        decode(engine, 4)
        assert engine.report().h2d_bytes == before.h2d_bytes
        assert engine.report().stats.streamed_pages_per_step > 0
    decode(engine, 4)
    assert engine.report().h2d_bytes > before.h2d_bytes
    assert engine.committed == 908


def test_free_bytes_are_the_devices(engine: Engine) -> None:
    """What could be had now."""
    assert free_bytes(engine) > 0
