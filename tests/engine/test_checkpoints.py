"""Checkpoints go back with the same bits; which of them are kept; what a prompt keeps of the one before."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.engine.budget import Drafting
from kvs_core.engine.checkpoints import Checkpoint, Checkpoints
from kvs_core.engine.session import Session
from kvs_core.models.recurrent import StateSnapshot
from tests.engine.tiny import engine, kv_settings

PROMPT = [7 + index * 31 % 190 for index in range(200)]
OTHER = [11 + index * 17 % 190 for index in range(60)]


def checkpoint(position: int, size: int = 4) -> Checkpoint:
    """One of ``2 * size`` bytes."""
    return Checkpoint(StateSnapshot(position, {0: (np.zeros(size, np.uint8), np.zeros(size, np.uint8))}), None)


@pytest.mark.parametrize("pool", [None, 0.3])
def test_going_back_gives_the_same_bits(tiny_qwen35: Path, pool: float | None) -> None:
    """Also over pages that the other text has filled, and behind decoded tokens."""
    with engine(tiny_qwen35, kv=kv_settings(), pool=pool) as built:
        session = Session(built)
        session.prefill(PROMPT[:130])
        session.decode(5)
        held = built.checkpoint()
        wanted = [session.decode(token) for token in PROMPT[130:140]]
        session.prefill(OTHER)
        built.go_back(held)
        assert built.committed == held.position == 131
        assert all(np.array_equal(session.decode(token), logits)
                   for token, logits in zip(PROMPT[130:140], wanted, strict=True))


def test_a_prompt_goes_on_at_a_checkpoint(tiny_qwen35: Path) -> None:
    """The end of the last prompt is one: a next turn reads its own tokens alone, and its logits are those of a fresh
    session that was cut at the same place."""
    with engine(tiny_qwen35, kv=kv_settings()) as built:
        session = Session(built, Checkpoints(8, 1 << 30), checkpoint_tokens=64)
        session.prefill(PROMPT)
        session.decode(3)
        turn = PROMPT + OTHER
        assert session.keep_common(turn) == len(PROMPT)
        logits = session.prefill(turn[len(PROMPT) :])
        assert session.tokens == turn

        edited = PROMPT[:150] + OTHER
        assert session.keep_common(edited) == 128   # ubatches of 64
        again = session.prefill(edited[128:])
        assert session.keep_common(OTHER) == 0      # nothing in common: it begins anew
        session.prefill(PROMPT)
        assert np.array_equal(session.prefill(OTHER), logits)
        assert session.keep_common([*PROMPT[:128], 1]) == 128
        assert np.array_equal(session.prefill(edited[128:]), again)


def test_the_block_goes_back_too(tiny_qwen35: Path) -> None:
    """Drafts of the MTP block behind a checkpoint are those of the first time: it knows the row before."""
    with engine(tiny_qwen35, kv=kv_settings(), drafting=Drafting(True)) as built:
        session = Session(built)
        session.prefill(PROMPT[:70])
        held = built.checkpoint()

        def drafts() -> bytes:
            with built.open(3) as step:
                step.draft_next(7)
                return step.logits().tobytes()

        wanted = drafts()
        session.prefill(OTHER)
        session.decode(3)
        assert drafts() != wanted
        built.go_back(held)
        assert drafts() == wanted


def test_what_begins_anew_forgets_the_checkpoints_of_the_old_text(tiny_qwen35: Path) -> None:
    """Those before its own first one included: they are of another text."""
    with engine(tiny_qwen35, kv=kv_settings()) as built:
        session = Session(built, Checkpoints(8, 1 << 30))
        session.prefill(PROMPT, border=30)
        session.rewind(0)
        session.prefill(OTHER)
        assert [held.position for held in session.checkpoints] == [60]
        assert session.keep_common([*OTHER[:40], 1]) == 0


def test_one_that_is_too_large_ends_them(tiny_qwen35: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is made once, said once, and the conversation goes on without."""
    with engine(tiny_qwen35, kv=kv_settings()) as built:
        session = Session(built, built.make_checkpoints(8, 1000), checkpoint_tokens=64)
        with patch.object(built, "checkpoint", wraps=built.checkpoint) as made:
            session.prefill(PROMPT, border=100)
        assert made.call_count == 1
        assert len(session.checkpoints) == 0
        assert [record.message[:28] for record in caplog.records] == ["a checkpoint is not kept: it"]
        assert session.keep_common(PROMPT[:100]) == 0


def test_without_checkpoints_a_recurrent_model_begins_anew(tiny_qwen35: Path) -> None:
    with engine(tiny_qwen35, kv=kv_settings()) as built:
        session = Session(built)
        session.prefill(PROMPT)
        assert session.keep_common([*PROMPT, 1]) == len(PROMPT)
        assert session.keep_common(PROMPT[:100]) == 0


def test_attention_alone_goes_back_anywhere(tiny_llama: Path) -> None:
    with engine(tiny_llama, kv=kv_settings()) as built:
        session = Session(built)
        session.prefill(PROMPT)
        logits = session.decode(9)
        session.prefill(OTHER)
        assert session.keep_common([*PROMPT, 9]) == len(PROMPT)
        assert np.array_equal(session.decode(9), logits)
        assert session.keep_common([*PROMPT[:77], 1]) == 77


@given(st.lists(st.integers(1, 500), max_size=30), st.integers(0, 6), st.integers(0, 60))
def test_so_many_and_so_many_bytes(positions: list[int], most: int, most_bytes: int) -> None:
    held = Checkpoints(most, most_bytes)
    for position in positions:
        held.add(checkpoint(position))
        assert len(held) <= most
        assert held.size_bytes <= most_bytes
        assert list(held.positions) == sorted(set(held.positions))
        if most and most_bytes >= 8:
            assert held.positions[-1] == position
        best = held.best(position - 1)
        assert best is None or best.position < position


def test_the_one_that_leaves_the_smallest_gap_goes() -> None:
    held = Checkpoints(3, 1 << 20)
    for position in (100, 200, 250, 300):
        held.add(checkpoint(position))
    assert list(held.positions) == [100, 200, 300]
    held.forget_behind(299)
    assert held.best(299) is not None
    assert held.best(99) is None


def test_thinning_leaves_the_last_two() -> None:
    held = Checkpoints(8, 1 << 20)
    for position in (100, 200, 250, 300):
        held.add(checkpoint(position))
    assert [held.thin(), held.thin(), held.thin()] == [True, True, False]
    assert len(held) == 2
    assert held.positions[-1] == 300
