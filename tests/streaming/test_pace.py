"""Pace: a larger ring is asked for where steps are slow, and taken back where it did not help."""

from __future__ import annotations

from collections.abc import Callable

from kvs_core.streaming.pace import Advice, Pace

LINK = 1e9
MOVED = 100_000_000   # a tenth of a second


def asked(pace: Pace, steps: int, step_s: float | Callable[[int], float]) -> int:
    """By how many runs the ring has grown after so many steps. ``step_s`` may depend on that."""
    grown = 0
    for _ in range(steps):
        advice = pace.observe(step_s(grown) if callable(step_s) else step_s, MOVED)
        grown += {Advice.KEEP: 0, Advice.GROW: 1, Advice.TAKE_BACK: -1}[advice]
    return grown


def fresh() -> Pace:
    pace = Pace(LINK)
    assert pace.observe(0.02, 0) is Advice.KEEP
    return pace


def test_four_slow_steps_in_a_row_ask_once() -> None:
    """Three do not, nor do any number of them with a good one in between."""
    pace = fresh()
    for _ in range(20):
        assert asked(pace, 3, 0.2) == 0
        assert asked(pace, 1, 0.101) == 0
    assert asked(pace, 4, 0.2) == 1


def test_a_ring_that_helps_may_grow_on() -> None:
    """As long as every growth makes steps faster, until they are as fast as the link."""
    pace = fresh()
    assert asked(pace, 1000, lambda grown: max(0.2 - 0.01 * grown, 0.102)) == 10   # the last one leaves 0.10


def test_a_ring_that_does_not_help_is_taken_back() -> None:
    """A link that is slower than it was when it was measured is no reason for a larger one, however long it lasts."""
    pace = fresh()
    assert asked(pace, 4, 0.12) == 1
    assert asked(pace, 4, 0.12) == -1
    assert asked(pace, 10_000, 0.12) == 0


def test_what_gets_worse_is_tried_again() -> None:
    """Beside what is expected by then; and after a time of fast steps less is expected."""
    pace = fresh()
    assert asked(pace, 100, 0.12) == 0
    assert asked(pace, 100, 0.124) == 0
    assert asked(pace, 4, 0.15) == 1
    assert asked(pace, 4, 0.15) == -1
    assert asked(pace, 500, 0.101) == 0
    assert asked(pace, 4, 0.12) == 1


def test_kernels_that_take_longer_than_the_link_are_no_starvation() -> None:
    """The least time is the longer of the two; without a measured step that streams nothing, nothing is known."""
    pace = Pace(LINK)
    assert asked(pace, 100, 0.3) == 0
    assert pace.observe(0.29, 0) is Advice.KEEP
    assert asked(pace, 100, 0.3) == 0
    assert asked(pace, 4, 0.32) == 1


def test_what_else_passes_the_link_is_no_reason() -> None:
    """Weights that pass take their time in every step: one that is as fast as the link with them is not slow."""
    pace = Pace(LINK, 2 * MOVED)
    assert pace.observe(0.2, 0) is Advice.KEEP
    assert asked(pace, 100, 0.31) == 0
    assert asked(pace, 4, 0.33) == 1
