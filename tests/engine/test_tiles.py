"""Steps of up to 65 rows, in tiles: their bits are those of single rows, and what they borrow comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvs_core.device.base import Buffer, Stream
from kvs_core.device.host.device import HostDebug, HostDevice
from kvs_core.engine.budget import Drafting
from kvs_core.engine.engine import Engine
from kvs_core.errors import ContextError, DeviceError
from kvs_core.streaming.kv_stream import KvStats
from tests.engine.rounds import DECODE, PREFILL, WIDE_ROUNDS, Left, Played, Round, play_rounds
from tests.engine.test_cuda_failures import failing
from tests.engine.test_exact import hostile
from tests.engine.tiny import engine, kv_settings, text
from tests.support.tiny_gguf import write_tiny_llama, write_tiny_qwen35

WIDE = 65
CONTEXT = 768
UBATCH = 72

# Pages of float32 are large beside what a tile needs of such models, so that a few of them make room.
SMALL: dict[str, Any] = {"embd": 32, "heads": 2, "kv_heads": 2, "head_dim": 64, "ffn": 32}
SSM: dict[str, Any] = {"ssm_state": 32, "ssm_k_heads": 1, "ssm_v_heads": 2}
BOTH = Drafting(nextn=True, resident=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two attention layers, with two recurrent ones and an MTP block, or without."""
    folder = tmp_path_factory.mktemp("tiles")
    return {
        "qwen35": write_tiny_qwen35(folder / "qwen35.gguf", seed=1, n_layer=4, interval=2, **SSM, **SMALL),
        "llama": write_tiny_llama(folder / "llama.gguf", seed=2, n_layer=2, **SMALL),
    }


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


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.sampled_from(["qwen35", "llama"]), prompt=st.integers(1, 500), rounds=WIDE_ROUNDS,
    pool=st.sampled_from([None, 0.0, 0.1, 0.5, 0.5, 0.8]), ring=st.sampled_from([0, 0, 1, 4]), seed=st.integers(0, 99),
)
def test_wide_steps_leave_what_single_rows_leave(
    models: dict[str, Path], model: str, prompt: int, rounds: list[Round], pool: float | None, ring: int, seed: int
) -> None:
    """Whatever was run wide, drafted, taken back or left, streamed from any pool through any ring by slow copies over
    poisoned memory: logits of kept rows, keys and values, states and the drafts that follow are those of a run of the
    kept rows alone."""
    compare(models[model], *of_model(model, rounds, prompt), pool, ring, seed)


@pytest.mark.parametrize("ring", [0, 1])
@pytest.mark.parametrize("model", ["qwen35", "llama"])
def test_the_widest_steps_leave_what_single_rows_leave(models: dict[str, Path], model: str, ring: int) -> None:
    """The same where it is known that 65 rows ran at once, over the ends of pages, from a pool that streams."""
    done = compare(models[model], *of_model(model, EVERY, 475), 0.5, ring, 1)
    assert done.widths.count(WIDE) == 3
    assert done.h2d_bytes > 0


@pytest.mark.parametrize("prompt", [1, 2, 3, 4])
def test_a_wide_step_at_the_start(models: dict[str, Path], prompt: int) -> None:
    """The same where a convolution reads what stands before the first row of all."""
    for keep in (0, 1, 2, 65):
        rounds = [Round("", 1, 65, keep), Round("", 1, 10, 3), Round("", 1, 3, 2)]
        assert compare(models["qwen35"], BOTH, prompt, rounds, 1.0, 0, 1).widths[0] == WIDE


def of_model(model: str, rounds: Sequence[Round], prompt: int) -> tuple[Drafting, int, list[Round]]:
    """How a model drafts, and the rounds that it can play."""
    if model == "qwen35":
        return BOTH, prompt, list(rounds)
    return Drafting(resident=True), prompt, [replace(each, kind="resident" if each.kind else "") for each in rounds]


# Failures, and where there is no room.

COPYING: list[Callable[[Engine], object]] = [
    lambda built: single(built), lambda built: wide(built, WIDE, 40), lambda built: wide(built, 20, 0),
    lambda built: single(built), lambda built: single(built), lambda built: wide(built, 33, 33),
]


def play_copying(built: Engine, fail_at: int = -1) -> tuple[int, int]:
    """A prompt and steps that move pages, of which the copy of that number fails when it is asked for, and a failed
    step is made again; how many copies there were, and how many steps failed."""
    read(built, 500)
    built._kv.drain()
    device, asked, failed = built._device, 0, 0
    copy = device.enqueue_copy

    def enqueue_copy(dst: Buffer, src: Buffer, stream: Stream) -> None:
        nonlocal asked
        if dst.nbytes >= built.geometry.page_bytes:
            asked += 1
            if asked - 1 == fail_at:
                raise DeviceError("a broken link; mend it")
        copy(dst, src, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "enqueue_copy", enqueue_copy)
        for move in COPYING:
            committed = built.committed
            try:
                move(built)
            except DeviceError:
                assert built.committed == committed
                failed += 1
                move(built)
    return asked, failed


def test_a_copy_that_fails_loses_nothing(models: dict[str, Path]) -> None:
    """Any copy, to make room, for a wide step, or for pages that come back after it: the step fails, and the same step
    made again has the bits of a run without failures; so has what comes then."""
    with build(models["qwen35"], pool=0.5) as built:
        copies, _ = play_copying(built)
        expected = Left.by(built, 5)
    failures = 0
    for number in range(0, copies, 11):
        with build(models["qwen35"], pool=0.5, debug=HostDebug(poison=True)) as built:
            failed = play_copying(built, number)[1]
            assert failed <= 1
            failures += failed
            left = Left.by(built, 5)
            assert (left.committed, left.rows) == (expected.committed, expected.rows), number
            assert (left.states, left.logits) == (expected.states, expected.logits), number
    assert failures > 3


def test_a_link_that_broke_is_one_error(models: dict[str, Path]) -> None:
    """A copy that fails on its way to a wide step ends all work with that message, and none hangs."""
    with build(models["qwen35"], pool=0.5) as built:
        read(built, 500)
        built._kv.drain()
        counters = built._device.counters()
        before = counters.copy_calls + counters.publish_calls
    with build(models["qwen35"], pool=0.5, debug=HostDebug(poison=True, fail_copy_at=before)) as built:
        read(built, 500)
        for _ in range(2):
            with pytest.raises(DeviceError, match=f"copy {before} "):
                wide(built, WIDE, 40)
            assert built.committed == 500


def count_ops(built: Engine, work: Callable[[], object]) -> Counter[str]:
    """Calls of each op."""
    ops, counts = built._device.ops, Counter[str]()

    def counted(name: str, do: Callable[..., object]) -> Callable[..., object]:
        def call(*args: Any, **kwargs: Any) -> object:
            counts[name] += 1
            return do(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in OPS:
            patch.setattr(ops, name, counted(name, getattr(ops, name)))
        work()
    return counts


OPS = (
    "embed", "take_kept", "project", "write_kv", "attend_decode", "finish_decode", "gdn_decode", "add_projected",
    "project_swiglu", "rms_norm", "clear",
)


def test_a_wide_step_that_fails_has_not_happened(models: dict[str, Path]) -> None:
    """Whatever op fails in it: nothing is committed, recurrent states are what they were, and the step made again has
    the bits of a run without failures."""
    with build(models["qwen35"], pool=0.5) as built:
        read(built, 475)
        single(built)
        expected = wide(built, WIDE, 0)
        counts = count_ops(built, lambda: wide(built, WIDE, 0))
        assert set(counts) == set(OPS)
        for op, count in counts.items():
            for after in {0, count // 2, count - 1}:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(built._device.ops, op, failing(getattr(built._device.ops, op), after))
                    with pytest.raises(DeviceError, match="a broken part"):
                        wide(built, WIDE, 0)
                assert built.committed == 476
            assert wide(built, WIDE, 0) == expected, op
        assert wide(built, WIDE, WIDE) == expected


@pytest.mark.parametrize("op", ["rms_norm", "gdn_apply"])
def test_rows_that_cannot_be_kept_are_dropped(models: dict[str, Path], op: str) -> None:
    """A failure after the rows have been computed: none of them counts, and a new text can be begun. Where a recurrent
    layer was changed, this one cannot be gone on with."""
    with build(models["qwen35"], pool=0.5) as built:
        read(built, 100)
        with built.open(WIDE) as step, pytest.MonkeyPatch.context() as patch:
            step.run(text(256, WIDE))
            patch.setattr(built._device.ops, op, failing(getattr(built._device.ops, op), 0))
            with pytest.raises(DeviceError, match="a broken part"):
                step.settle(20)
        assert built.committed == 100
        if op == "gdn_apply":
            with pytest.raises(DeviceError, match="start the session again"):
                built.open(WIDE)
        else:
            wide(built, WIDE, 1)
        built.rewind(0)
        read(built, 100)
        wide(built, WIDE, WIDE)


def test_the_context_bounds_a_step(models: dict[str, Path]) -> None:
    """No step reaches beyond it."""
    with build(models["llama"], Drafting(), context=256) as built:
        read(built, 256 - 20)
        rows = built.widest(WIDE)
        assert 8 < rows <= 20
        wide(built, rows, rows)
        assert built.widest(built.context.context_tokens - built.committed) == 20 - rows
        with pytest.raises(ContextError):
            built.open(21 - rows)


@pytest.mark.parametrize(("ubatch", "most"), [(4, 8), (8, 8), (24, 24), (30, 30), (65, 65), (72, 65)])
def test_no_step_is_wider_than_a_prefill_step(models: dict[str, Path], ubatch: int, most: int) -> None:
    """But for the usual ones; devices have room for as many rows."""
    with build(models["llama"], Drafting(), ubatch=ubatch) as built:
        single(built)
        assert [built.widest(rows) for rows in (1, 8, 9, WIDE)] == [1, 8, min(9, most), most]


def test_pages_that_must_stay_leave_no_room(models: dict[str, Path]) -> None:
    """In resident mode slots are lent as long as no page has a use for them, and nothing is streamed."""
    with build(models["llama"], Drafting(), pool=1.0, residency_mode="resident") as built:
        read(built, 64)
        wide(built, WIDE, WIDE)
        read(built, 600)
        assert built.committed == 729
        assert built.widest(WIDE) == 8
        single(built)
        assert built.report().h2d_bytes == 0


def test_half_of_the_pool_is_the_most_that_is_lent(models: dict[str, Path]) -> None:
    """However much of it is free; and a pool that is too small for more gives usual steps."""
    for pool in (0.0, 0.1, 0.3, 0.6, 1.0):
        with build(models["qwen35"], pool=pool) as built:
            single(built)
            rows, pages = built.widest(WIDE), stats(built).pool_pages
            if rows > 8:
                wide(built, rows, 1)
            assert pages / 2 <= stats(built).pool_pages <= pages - (rows > 8)


@pytest.mark.parametrize("pool", [0.0, 0.025, 0.05, 0.1])
def test_a_wide_loan_does_not_starve_a_narrower_step(tmp_path: Path, pool: float) -> None:
    """Where a pool is so small that only some positions leave room for the widest step, ``widest`` is still true: what
    is lent to a step is given back where the next wide one could not run beside it."""
    path = write_tiny_llama(tmp_path / "llama.gguf", seed=1, n_layer=4, **SMALL | {"heads": 1, "kv_heads": 1})
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


# What moves.

def test_a_wide_step_allocates_nothing(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device: all of its buffers lie in the arena."""
    with build(models["qwen35"], pool=0.5) as built:
        read(built, 475)
        report = built._device.memory_report()
        refuse = failing(HostDevice.allocate, 0)
        monkeypatch.setattr(HostDevice, "allocate", refuse)
        monkeypatch.setattr(HostDevice, "allocate_arena", refuse)
        for keep in (0, 3, 60):
            wide(built, WIDE, keep)
        single(built)
        assert built._device.memory_report() == report


def test_slots_that_were_lent_come_back(models: dict[str, Path]) -> None:
    """A step that is no wider than usual has the whole pool again, with the pages that it had; wide steps that follow
    each other stream what a step of their cuts streams, and move nothing else."""
    with build(models["qwen35"], pool=0.5) as built:
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


def test_prefill_after_a_wide_step_has_its_whole_pool(models: dict[str, Path]) -> None:
    """And so has the step behind it, whether slots were lent or not."""
    with build(models["llama"], Drafting(), pool=0.5) as built:
        read(built, 100)
        wide(built, WIDE, 30)
        read(built, 30)
        assert stats(built).pool_pages == built.memory.slots(PREFILL)
        single(built)
        assert stats(built).pool_pages == built.memory.slots(DECODE)
