"""Wide steps that fail have not happened, and cost no more than themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvs_core.device.base import Stream
from kvs_core.device.host.device import HostDebug
from kvs_core.device.operands import Buffer
from kvs_core.engine.engine import Engine
from kvs_core.errors import DeviceError
from tests.engine.rounds import Left
from tests.engine.test_cuda_failures import failing
from tests.engine.test_tiles import WIDE, build, read, single, wide
from tests.engine.tiny import text

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


def test_a_copy_that_fails_loses_nothing(wide_models: dict[str, Path]) -> None:
    """Any copy, to make room, for a wide step, or for pages that come back after it: the step fails, and the same step
    made again has the bits of a run without failures; so has what comes then."""
    with build(wide_models["qwen35"], pool=0.5) as built:
        copies, _ = play_copying(built)
        expected = Left.by(built, 5)
    failures = 0
    for number in range(0, copies, 11):
        with build(wide_models["qwen35"], pool=0.5, debug=HostDebug(poison=True)) as built:
            failed = play_copying(built, number)[1]
            assert failed <= 1
            failures += failed
            left = Left.by(built, 5)
            assert (left.committed, left.rows) == (expected.committed, expected.rows), number
            assert (left.states, left.logits) == (expected.states, expected.logits), number
    assert failures > 3


def test_a_link_that_broke_is_one_error(wide_models: dict[str, Path]) -> None:
    """A copy that fails on its way to a wide step ends all work with that message, and none hangs."""
    with build(wide_models["qwen35"], pool=0.5) as built:
        read(built, 500)
        built._kv.drain()
        counters = built._device.counters()
        before = counters.copy_calls + counters.publish_calls
    with build(wide_models["qwen35"], pool=0.5, debug=HostDebug(poison=True, fail_copy_at=before)) as built:
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
    "project_gated", "rms_norm", "clear",
)


def test_a_wide_step_that_fails_has_not_happened(wide_models: dict[str, Path]) -> None:
    """Whatever op fails in it: nothing is committed, recurrent states are what they were, and the step made again has
    the bits of a run without failures."""
    with build(wide_models["qwen35"], pool=0.5) as built:
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
def test_rows_that_cannot_be_kept_are_dropped(wide_models: dict[str, Path], op: str) -> None:
    """A failure after the rows have been computed: none of them counts, and a new text can be begun. Where a recurrent
    layer was changed, this one cannot be gone on with."""
    with build(wide_models["qwen35"], pool=0.5) as built:
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
