"""Models whose layers have pages of two shapes: each in a pool of its own, and all that is promised of one holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import mul
from pathlib import Path

import numpy as np
import pytest

from kvs_core.device.host.device import HostDevice
from kvs_core.engine.budget import DECODE_ROWS, Budget, plan_budget
from kvs_core.engine.engine import Engine
from kvs_core.engine.session import Session
from kvs_core.engine.session_file import load_session, save_session
from kvs_core.errors import BudgetError
from kvs_core.formats.gguf import GgufFile
from kvs_core.memory.phases import Phase
from kvs_core.models.registry import read_spec
from kvs_core.paging.residency import most_sliding_pages
from kvs_core.settings.rooms import ContextSettings, KvSettings, RopeSettings
from kvs_core.units import MIB
from tests.engine.test_exact import hostile
from tests.engine.tiny import CONTEXT, engine, kv_settings, run, text
from tests.support.tiny_gguf import ROUTED, Gemma4, write_tiny_gemma4

PROMPT, DECODE = text(256, 300), text(256, 24, 1)
KINDS = {
    "plain": Gemma4(),
    "shared": Gemma4(shared=2, values=False),
    "per layer": Gemma4(per_layer=16),
    "experts": Gemma4(experts=ROUTED),
}
PATTERN = (True, False, True, False, True, False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three layers of each kind, 80 tokens seen by those that slide."""
    folder = tmp_path_factory.mktemp("two")
    return {
        name: write_tiny_gemma4(folder / f"{number}.gguf", seed=5, pattern=PATTERN, more=more)
        for number, (name, more) in enumerate(KINDS.items())
    }


def check_pools(built: Engine) -> None:
    """In each pool, what may be resident and the ring fill it; who slides lies in its own and streams nothing."""
    pools = built._kv._pools
    layers = built.spec.kv_layers
    for table, slides in ((pools.shared, False), (pools.own, True)):
        assert len(table) + table.ring_slots <= table.pool_slots
        assert all(bool(layers[page.layer].window) == slides for page in table)
    assert pools.own.ring_slots == 0
    for layer, places in zip(layers, built._kv.places(), strict=True):
        assert not (layer.window and places.streamed)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_the_pools(models: dict[str, Path], kind: str) -> None:
    """Logits are those of a resident run for any pool, ring and run length, by slow copies over poisoned memory, and in
    window mode."""
    with engine(models[kind], kv=kv_settings(residency_mode="resident")) as built:
        expected = run(built, PROMPT, DECODE).tobytes()
        assert built.report().h2d_bytes == 0
    told = [(kv_settings(ring_slots=ring, run_pages=pages), pool) for ring, pages, pool in
            ((0, 0, 0.0), (1, 1, 0.0), (5, 2, 0.1), (3, 9, 0.3))]
    windows = kv_settings(residency_mode="window", window_tokens=64, run_pages=3)
    for kv, pool in [*told, (windows, 0.0)]:
        with engine(models[kind], kv=kv, pool=pool, fixed=True, debug=hostile(7), lower=True) as built:
            assert run(built, PROMPT, DECODE).tobytes() == expected, (kv, pool)
            check_pools(built)
            report = built.report()
            moved = dict(zip(built.spec.kv_layers, report.stats.moved_bytes, strict=True))
            assert sum(moved.values()) == report.h2d_bytes > 0
            assert not any(size for layer, size in moved.items() if layer.window)


def test_a_layer_that_others_read_streams_once_for_each(models: dict[str, Path]) -> None:
    """Its pages cross the link for every layer that reads them, in the order of the layers; so it is the last to
    stream."""
    with engine(models["shared"], kv=kv_settings(), pool=0.0, fixed=True) as built:
        assert built._kv.reads == (0, 1, 2, 3, 2, 3)
        run(built, PROMPT, DECODE)
        before = built.report()
        run_more = text(256, 1, 3)
        with built.step(run_more, Phase.DECODE) as step:
            step.logits()
            step.settle()
        after = built.report()
        moved = np.subtract(after.stats.moved_bytes, before.stats.moved_bytes) // built.geometry.page_bytes
        streamed = [len(places.streamed) for places in built._kv.places()]
        assert moved.tolist() == [0, streamed[1], 0, 2 * streamed[3]]
        assert after.stats.streamed_pages_per_step == streamed[1] + 2 * streamed[3]
        built._kv._history.has_pageable = True   # then each copy is asked whether its own layer's pages are pinned
        assert built._kv.streamer.can_capture
    with engine(models["shared"], kv=kv_settings(), pool=0.4, fixed=True) as built:
        run(built, PROMPT, DECODE)
        streamed = [len(places.streamed) for places in built._kv.places()]
        assert streamed[1] > streamed[3]


def budget_of(path: Path, kv: KvSettings, arena_bytes: int | None = None, context: int = CONTEXT) -> Budget:
    sizes = ContextSettings(ctx_size=context, ubatch=64)
    return plan_budget(read_spec(GgufFile.open(path)), sizes, kv, free_bytes=1 << 34, arena_bytes=arena_bytes)


@pytest.mark.parametrize("context", [64, CONTEXT, 4096])
def test_no_byte_of_the_pools_is_padding(models: dict[str, Path], context: int) -> None:
    """The own pool has what windows need in pages of their size, at any context; what is left is the shared one's, in
    pages of theirs."""
    spec = read_spec(GgufFile.open(models["plain"]))
    budget = budget_of(models["plain"], kv_settings(), context=context)
    sliding = budget.pages.sliding
    assert sliding is not None
    assert sliding.page_bytes != budget.geometry.page_bytes
    # Of 80 tokens, up to 3 pages before the one that is written.
    needed = 3 * most_sliding_pages(budget.context.context_tokens, 32, max(64, DECODE_ROWS), 3)
    assert budget.need.sliding_slots == needed
    memory = budget.memory
    for phase in Phase:
        plan = memory.plan(phase)
        own, pool = plan.region("sliding_pool"), plan.region("kv_pool")
        assert own.size_bytes == needed * sliding.page_bytes
        left = memory.arena_bytes - own.size_bytes - budget.buffers[phase].size_bytes
        assert left - pool.size_bytes < budget.geometry.page_bytes + 512   # a slot, and what two regions are aligned to
    assert memory.pool_bytes(Phase.DECODE) == own.size_bytes + memory.slots(Phase.DECODE) * budget.geometry.page_bytes
    whole = [layer for layer in spec.kv_layers if not layer.window]
    assert budget.need.all_slots == len(whole) * budget.geometry.pages_of(budget.context.context_tokens)


def test_a_budget_that_is_too_small_names_one_that_does(models: dict[str, Path]) -> None:
    """Its MiB count both pools: with them it runs, with a little less it does not."""
    kv = kv_settings("f32", "f32")
    with pytest.raises(BudgetError, match="arena too small") as caught:
        budget_of(models["plain"], kv, arena_bytes=256)
    needed = caught.value.needed_mib
    least = budget_of(models["plain"], kv, arena_bytes=needed * MIB)
    assert least.memory.slots(Phase.PREFILL) >= least.need.least_slots
    with pytest.raises(BudgetError, match=f"needs {needed} MiB"):
        budget_of(models["plain"], kv, arena_bytes=(needed - 1) * MIB)
    with engine(models["plain"], kv=replace(kv, arena_mib=needed)) as built:
        run(built, PROMPT, DECODE)
        check_pools(built)


@pytest.mark.parametrize("kind", ["plain", "shared"])
def test_a_saved_session_goes_on(models: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """Pages of both shapes go to the file and come back, into any pool, with the same bits."""
    expected = []
    with engine(models[kind], kv=kv_settings()) as built:
        session = Session(built)
        session.prefill(PROMPT)
        saved = save_session(session, tmp_path / "session", "key")
        expected = [session.decode(token).tobytes() for token in DECODE]
        # Windows of 80 tokens have passed the first four of ten pages.
        held = [6 if layer.window else 10 for layer in built.spec.kv_layers]
        assert 0 < saved.size_bytes - sum(map(mul, held, built.page_bytes)) < 2500   # tokens and header
        assert len(set(built.page_bytes)) == 2
    for pool in (None, 0.0):
        with engine(models[kind], kv=kv_settings(), pool=pool, fixed=True, debug=hostile(2)) as built:
            session = Session(built)
            load_session(session, tmp_path / "session", "key")
            assert [session.decode(token).tobytes() for token in DECODE] == expected
            check_pools(built)


def test_a_parked_sequence_goes_on(models: dict[str, Path]) -> None:
    """In between, another one ran."""
    with engine(models["shared"], kv=kv_settings(), pool=0.0, fixed=True, debug=hostile(4)) as built:
        expected = run(built, PROMPT, DECODE)[len(PROMPT) :].tobytes()
        built.rewind(0)
        Session(built).prefill(PROMPT)
        parked = built.park()
        run(built, text(256, 200, 9), DECODE)
        built.rewind(0)
        built.unpark(parked)
        got = []
        for token in DECODE:
            with built.step([token], Phase.DECODE) as step:
                got.append(step.logits())
                step.settle()
        assert np.concatenate(got).tobytes() == expected


@pytest.fixture
def plain_engine(models: dict[str, Path]) -> Iterator[Engine]:
    built = Engine(
        GgufFile.open(models["plain"]), HostDevice(1), context=ContextSettings(ctx_size=CONTEXT, ubatch=64),
        kv=kv_settings(), rope=RopeSettings(),
    )
    yield built
    built.close()


def test_counters_know_both_pools(plain_engine: Engine) -> None:
    """Pages, and their bytes, of both shapes."""
    run(plain_engine, PROMPT, DECODE)
    stats = plain_engine.report().stats
    own = plain_engine._kv._pools.own
    assert stats.pool_pages == plain_engine.memory.slots(Phase.DECODE) + own.pool_slots
    assert stats.resident_pages == stats.active_pages
    seen = [places.pages - places.first_page for places in plain_engine._kv.places()]
    assert stats.active_pages == sum(seen)
    assert stats.active_bytes == sum(np.multiply(seen, plain_engine.page_bytes))
