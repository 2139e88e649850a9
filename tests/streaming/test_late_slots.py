"""What a step leaves to be copied when the next one begins, between captured steps and others."""

from __future__ import annotations

from tests.streaming.marks import DECODE, LEAST, PAGE, PREFILL, PREFILL_ROWS, Simulation


def streaming(seed: int) -> Simulation:
    """Most of a context, whose steps leave slots to be filled when the next one begins."""
    one = Simulation(seed, LEAST + 10, ring=8, run=4)
    while len(one.tokens) < 16 * PAGE:
        one.step(PREFILL, PREFILL_ROWS, 0)
    one.step(DECODE, 1, 0)
    assert one.kv.streamer.schedule.late_slots
    return one


def test_what_a_launch_left_is_not_filled_while_it_runs() -> None:
    """A step that is not captured comes behind one that is: no fence tells when that has read its last slots."""
    for seed in range(12):
        one = streaming(seed)
        for _ in range(4):
            launched = one.launched
            one.step(DECODE, 1, 0)
            assert one.launched == launched + 1
            one.step(PREFILL, 1, 0)
        one.check_history()
        one.close()


def test_a_draft_that_could_not_be_recorded_leaves_the_ring_as_steps_find_it() -> None:
    """The step behind it may be launched from a recording, which fills the rest itself."""
    one = streaming(0)
    with one.kv.begin(1, DECODE) as step:
        found = one.kv.streamer.in_ring
        step.before_launch()
        step.after_capture(step.moved)
        step.not_captured()
        assert one.kv.streamer.in_ring == found
    one.close()
