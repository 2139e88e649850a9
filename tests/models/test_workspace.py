"""Workspaces: named buffers in a window of the arena."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.device.workspace import BufferSpec, Workspace, workspace_bytes


def device(arena_bytes: int) -> Any:
    arena = np.zeros(arena_bytes, np.uint8)

    def view(offset: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        assert offset + size <= arena_bytes
        return arena[offset : offset + size].view(dtype).reshape(shape)

    return SimpleNamespace(arena_view=view)


shapes = st.tuples(st.integers(1, 9), st.integers(1, 300))
dtypes = st.sampled_from([np.float32, np.uint8])
parts = st.lists(st.tuples(shapes, dtypes, st.sampled_from(["", "a", "b"])), max_size=8)


@given(parts)
def test_buffers_are_aligned_and_only_overlays_share_bytes(drawn: list[Any]) -> None:
    """Every buffer fits in workspace_bytes, starts at a multiple of 256, and overlaps no buffer alive with it."""
    specs = [BufferSpec(str(i), shape, dtype, overlay) for i, (shape, dtype, overlay) in enumerate(drawn)]
    size = workspace_bytes(specs)
    places: dict[str, tuple[int, int]] = {}

    def record(offset: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        places[str(len(places))] = (offset, offset + int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return np.zeros(shape, dtype)

    recorder: Any = SimpleNamespace(arena_view=record)
    Workspace(recorder, 512, size, specs)
    for spec in specs:
        start, end = places[spec.name]
        assert start % 256 == 0
        assert 512 <= start < end <= 512 + size
        for other in specs:
            if other.name != spec.name and not (spec.overlay and other.overlay and spec.overlay != other.overlay):
                other_start, other_end = places[other.name]
                assert end <= other_start or other_end <= start


def test_overlays_take_the_room_of_the_largest() -> None:
    """Buffers that are never alive together are counted once."""
    specs = [
        BufferSpec("x", (2, 64), np.float32),
        BufferSpec("a", (4, 64), np.float32, overlay="a"),
        BufferSpec("b", (8, 64), np.float32, overlay="b"),
        BufferSpec("y", (1, 1), np.float32),
    ]
    assert workspace_bytes(specs) == 512 + 256 + 2048
    assert workspace_bytes([]) == 0


def test_rows_are_the_first_of_a_buffer() -> None:
    """``rows`` is a contiguous view, so what is written to it is in the buffer."""
    specs = [BufferSpec("x", (4, 3), np.float32), BufferSpec("y", (4, 3), np.float32)]
    ws = Workspace(device(1024), 256, workspace_bytes(specs), specs)
    ws.rows("x", 2)[:] = 7
    assert ws["x"].tolist() == [[7] * 3, [7] * 3, [0] * 3, [0] * 3]
    assert ws.rows("x", 2).flags.c_contiguous
    assert not ws["y"].any()
    with pytest.raises(AssertionError, match="5 rows of x, which has 4"):
        ws.rows("x", 5)


def test_a_window_too_small_is_a_bug() -> None:
    """One byte less than ``workspace_bytes`` is refused before any buffer is bound."""
    specs = [BufferSpec("x", (4, 3), np.float32)]
    with pytest.raises(AssertionError, match="256 bytes in a workspace of 255"):
        Workspace(device(1024), 0, 255, specs)
