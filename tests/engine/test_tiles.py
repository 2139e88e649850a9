"""Steps of up to 65 rows, in tiles: their bits are those of single rows, and what they borrow comes back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvs_core.device.host.device import HostDevice
from kvs_core.device.operands import Buffer
from kvs_core.engine.budget import Drafting
from kvs_core.engine.engine import Engine
from kvs_core.errors import ContextError
from kvs_core.streaming.places import KvStats
from tests.engine.rounds import DECODE, PREFILL, WIDE_ROUNDS, Left, Played, Round, play_rounds
from tests.engine.test_cuda_failures import failing
from tests.engine.test_exact import hostile
from tests.engine.tiny import engine, kv_settings, text
from tests.support.examples import examples
from tests.support.tiny_gguf import write_tiny_llama

WIDE = 65
CONTEXT = 768
UBATCH = 72

BOTH = Drafting(nextn=True, resident=True)


@contextmanager
def build(
    path: Path, drafting: Drafting = BOTH, *, ring: int = 0, residency_mode: str = "adaptive", **others: Any
) -> Iterator[Engine]:
    """An engine with pages large enough for wide steps."""
    others = {"context": CONTEXT, "ubatch": UBATCH, "fixed": True, "lower": True} | others
    kv = kv_settings("f32", "f32", ring_slots=ring, residency_mode=residency_mode)
    with engine(path, kv=kv, drafting=drafting, **others) as built:
        yield built


def read(built: Engine, tokens: int) -> None:
    """A prompt of so many tokens."""
    for at in range(0, tokens, UBATCH):
        with built.step(text(built.spec.n_vocab, min(UBATCH, tokens - at), at), PREFILL) as step:
            step.settle()


def wide(built: Engine, rows: int, keep: int, seed: int = 1) -> bytes:
    """A step of exactly so many rows; the logits of all."""
    assert built.widest(rows) == rows
    with built.open(rows) as step:
        step.run(text(built.spec.n_vocab, rows, seed))
        logits = step.logits(0).tobytes()
        step.settle(keep)
    return logits


def single(built: Engine, count: int = 1) -> None:
    """Steps of one row."""
    for _ in range(count):
        with built.step([7], DECODE) as step:
            step.settle()


def stats(built: Engine) -> KvStats:
    """Where pages are."""
    return built.report().stats


# Any rounds.

EVERY = [
    Round("", 1, 65, 65), Round("next", 3, 8, 5), Round("", 1, 33, 9, place="mark"), Round("", 1, 17, 0),
    Round("resident", 8, 8, 8), Round("", 1, 40, 0, left_open=True), Round("", 1, 65, 1, place="back"),
    Round("", 1, 20, 20, prefill=True), Round("next", 1, 8, 0), Round("", 1, 9, 9), Round("", 1, 65, 64),
    Round("next", 1, 8, 3), Round("", 1, 20, 0), Round("", 1, 12, 5), Round("", 1, 10, 10), Round("next", 2, 2, 1),
]


@dataclass(frozen=True)
class Compared:
    """What a run of wide steps did that left no trace: widths of its wide steps, bytes that were streamed."""

    widths: list[int]
    h2d_bytes: int


def compare(
    path: Path, drafting: Drafting, prompt: int, rounds: Sequence[Round], pool: float | None, ring: int, seed: int
) -> Compared:
    """Play the rounds, and their kept rows alone, one at a time with every page held; both must show the same."""
    tried, alone = Played(), Played()
    with build(path, drafting, pool=pool, ring=ring, debug=hostile(seed)) as built:
        found = Left.by(built, play_rounds(built, prompt, rounds, seed, drafting=True, played=tried))
        h2d_bytes = built.report().h2d_bytes
    with build(path, drafting, residency_mode="resident") as built:
        found.check(Left.by(built, play_rounds(built, prompt, rounds, seed, drafting=False, played=alone)))
    assert tried.logits == alone.logits
    return Compared(tried.widths, h2d_bytes)


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.sampled_from(["qwen35", "qwen35moe", "llama", "gemma3", "gemma4"]),
    prompt=st.integers(1, 500), rounds=WIDE_ROUNDS,
    pool=st.sampled_from([None, 0.0, 0.1, 0.5, 0.5, 0.8]), ring=st.sampled_from([0, 0, 1, 4]), seed=st.integers(0, 99),
)
def test_wide_steps_leave_what_single_rows_leave(
    wide_models: dict[str, Path], model: str, prompt: int, rounds: list[Round], pool: float | None, ring: int, seed: int
) -> None:
    """Whatever was run wide, drafted, taken back or left, streamed from any pool through any ring by slow copies over
    poisoned memory: logits of kept rows, keys and values, states and the drafts that follow are those of a run of the
    kept rows alone."""
    compare(wide_models[model], *of_model(model, rounds, prompt), pool, ring, seed)


@pytest.mark.parametrize("ring", [0, 1])
@pytest.mark.parametrize("model", ["qwen35", "qwen35moe", "llama", "gemma3", "gemma4"])
def test_the_widest_steps_leave_what_single_rows_leave(wide_models: dict[str, Path], model: str, ring: int) -> None:
    """The same where it is known that 65 rows ran at once, over the ends of pages, from a pool that streams."""
    done = compare(wide_models[model], *of_model(model, EVERY, 475), 0.5, ring, 1)
    assert done.widths.count(WIDE) == 3
    assert done.h2d_bytes > 0


@pytest.mark.parametrize("prompt", [1, 2, 3, 4])
def test_a_wide_step_at_the_start(wide_models: dict[str, Path], prompt: int) -> None:
    """The same where a convolution reads what stands before the first row of all."""
    for keep in (0, 1, 2, 65):
        rounds = [Round("", 1, 65, keep), Round("", 1, 10, 3), Round("", 1, 3, 2)]
        assert compare(wide_models["qwen35"], BOTH, prompt, rounds, 1.0, 0, 1).widths[0] == WIDE


def of_model(model: str, rounds: Sequence[Round], prompt: int) -> tuple[Drafting, int, list[Round]]:
    """How a model drafts, and the rounds that it can play."""
    if model.startswith("qwen35"):
        return BOTH, prompt, list(rounds)
    return Drafting(resident=True), prompt, [replace(each, kind="resident" if each.kind else "") for each in rounds]


def test_any_row_can_be_asked_for(wide_models: dict[str, Path]) -> None:
    """Logits of the last row, or from any row on, over the ends of tiles."""
    with build(wide_models["qwen35"], pool=0.5) as built:
        read(built, 100)
        with built.open(29) as step:
            step.run(text(256, 29))
            every = step.logits(0)
            assert every.shape == (29, built.spec.n_vocab)
            for row in (0, 1, 7, 8, 15, 23, 24, 28):
                assert step.logits(row).tobytes() == every[row:].tobytes()
            assert step.logits().tobytes() == every[28:].tobytes()


# Where there is no room.

def test_the_context_bounds_a_step(wide_models: dict[str, Path]) -> None:
    """No step reaches beyond it."""
    with build(wide_models["llama"], Drafting(), context=256) as built:
        read(built, 256 - 20)
        rows = built.widest(WIDE)
        assert 8 < rows <= 20
        wide(built, rows, rows)
        assert built.widest(built.context.context_tokens - built.committed) == 20 - rows
        with pytest.raises(ContextError):
            built.open(21 - rows)


@pytest.mark.parametrize(("ubatch", "most"), [(4, 8), (8, 8), (24, 24), (30, 30), (65, 65), (72, 65)])
def test_no_step_is_wider_than_a_prefill_step(wide_models: dict[str, Path], ubatch: int, most: int) -> None:
    """But for the usual ones; devices have room for as many rows."""
    with build(wide_models["llama"], Drafting(), ubatch=ubatch) as built:
        single(built)
        assert [built.widest(rows) for rows in (1, 8, 9, WIDE)] == [1, 8, min(9, most), most]


def test_pages_that_must_stay_leave_no_room(wide_models: dict[str, Path]) -> None:
    """In resident mode slots are lent as long as no page has a use for them, and nothing is streamed."""
    with build(wide_models["llama"], Drafting(), pool=1.0, residency_mode="resident") as built:
        read(built, 64)
        wide(built, WIDE, WIDE)
        read(built, 600)
        assert built.committed == 729
        assert built.widest(WIDE) == 8
        single(built)
        assert built.report().h2d_bytes == 0


def test_half_of_the_pool_is_the_most_that_is_lent(wide_models: dict[str, Path]) -> None:
    """However much of it is free; and a pool that is too small for more gives usual steps."""
    for pool in (0.0, 0.1, 0.3, 0.6, 1.0):
        with build(wide_models["qwen35"], pool=pool) as built:
            single(built)
            rows, pages = built.widest(WIDE), stats(built).pool_pages
            if rows > 8:
                wide(built, rows, 1)
            assert pages / 2 <= stats(built).pool_pages <= pages - (rows > 8)


@pytest.mark.parametrize("pool", [0.0, 0.025, 0.05, 0.1])
def test_a_wide_loan_does_not_starve_a_narrower_step(tmp_path: Path, pool: float) -> None:
    """Where a pool is so small that only some positions leave room for the widest step, ``widest`` is still true: what
    is lent to a step is given back where the next wide one could not run beside it."""
    path = write_tiny_llama(
        tmp_path / "llama.gguf", seed=1, n_layer=4, embd=32, heads=1, kv_heads=1, head_dim=64, ffn=32
    )
    with build(path, Drafting(), pool=pool, context=1024, ubatch=96) as built:
        for at in range(0, 512, 64):
            with built.step(text(256, 64, at), PREFILL) as step:
                step.settle()
        widths = set()
        while built.committed < 660:
            for most, keep in ((WIDE, 1), (9, 9), (9, 9)):
                rows = built.widest(most)
                widths.add(rows)
                with built.open(rows) as step:
                    step.run(text(256, rows))
                    step.settle(min(keep, rows))
        assert {9, 56} <= widths or {9, 64} <= widths or {9, 65} <= widths


@pytest.mark.parametrize("model", ["qwen35", "llama", "gemma3", "gemma4"])
def test_what_is_lent_is_large_enough(wide_models: dict[str, Path], model: str) -> None:
    """All that a step of any width computes in beside the usual workspace lies in the slots that are lent to it, and
    no tile shares a byte with another, or with the rows that recurrent layers save."""
    with build(wide_models[model], BOTH if model == "qwen35" else Drafting()) as built:
        single(built)
        layout, room = built._handover.layout, built._tiles
        pool_end = layout.pool.ctypes.data + layout.pool.nbytes
        for rows in range(9, WIDE + 1):
            buffers = room.lend(rows, layout)
            tiles = [[tile[spec.name] for spec in room._tile_specs] for tile in buffers.workspaces[1:]]
            rings = [[ring] for layer in buffers.rings.values() for ring in layer.values()]
            assert 8 * len(buffers.workspaces) - 8 < rows <= 8 * len(buffers.workspaces) == 8 * len(buffers.scratch)
            used = sorted(span_of(arrays) for arrays in (*tiles, *rings))
            first_slot = len(layout.pool) - built._kv.lent_slots
            assert layout.pool[first_slot].ctypes.data <= used[0].start
            assert used[-1].stop <= pool_end
            assert all(before.stop <= after.start for before, after in pairwise(used))
            for tile, scratch in zip(tiles, buffers.scratch[1:], strict=True):
                within = span_of(tile)
                for part in (scratch.groups, scratch.segments):
                    assert within.start <= span_of([part]).start < span_of([part]).stop <= within.stop


@dataclass(frozen=True, order=True)
class Span:
    """Addresses."""

    start: int
    stop: int


def span_of(arrays: Sequence[Buffer]) -> Span:
    """From the first byte of some arrays to the last."""
    return Span(
        min(array.ctypes.data for array in arrays), max(array.ctypes.data + array.nbytes for array in arrays)
    )


# What moves.

def test_a_wide_step_allocates_nothing(wide_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device: all of its buffers lie in the arena."""
    with build(wide_models["qwen35"], pool=0.5) as built:
        read(built, 475)
        report = built._device.memory_report()
        refuse = failing(HostDevice.allocate, 0)
        monkeypatch.setattr(HostDevice, "allocate", refuse)
        monkeypatch.setattr(HostDevice, "allocate_arena", refuse)
        for keep in (0, 3, 60):
            wide(built, WIDE, keep)
        single(built)
        assert built._device.memory_report() == report


def test_slots_that_were_lent_come_back(wide_models: dict[str, Path]) -> None:
    """A step that is no wider than usual has the whole pool again, with the pages that it had; wide steps that follow
    each other stream what a step of their cuts streams, and move nothing else."""
    with build(wide_models["qwen35"], pool=0.5) as built:
        read(built, 500)
        single(built)
        built._kv.drain()
        before, moved, pages = stats(built), [], []
        assert before.streamed_pages_per_step == 0
        for _ in range(4):
            start, repartitions = built.report().h2d_bytes, stats(built).repartitions
            wide(built, WIDE, 0)
            built._kv.drain()
            moved.append(built.report().h2d_bytes - start)
            pages.append(stats(built).streamed_pages_per_step)
            assert stats(built).repartitions - repartitions <= (2 if len(moved) == 1 else 0)
            assert stats(built).pool_pages < before.pool_pages
        assert moved[1:] == [pages[0] * built.geometry.page_bytes] * 3
        start = built.report().h2d_bytes
        single(built)
        after = stats(built)
        assert built.report().h2d_bytes - start <= moved[1], "streamed pages come back once"
        start = built.report().h2d_bytes
        single(built, 3)
        assert built.report().h2d_bytes == start
        assert (after.pool_pages, after.ring_slots, after.streamed_pages_per_step) == (before.pool_pages, 0, 0)
        assert after.resident_pages == before.resident_pages


def test_prefill_after_a_wide_step_has_its_whole_pool(wide_models: dict[str, Path]) -> None:
    """And so has the step behind it, and a usual step that is opened before it runs."""
    with build(wide_models["llama"], Drafting(), pool=0.5) as built:
        read(built, 100)
        wide(built, WIDE, 30)
        read(built, 30)
        assert stats(built).pool_pages == built.memory.slots(PREFILL)
        single(built)
        assert stats(built).pool_pages == built.memory.slots(DECODE)
        wide(built, 9, 0)
        with built.open(2) as step:
            assert stats(built).pool_pages == built.memory.slots(DECODE)
            step.run([1, 2])
