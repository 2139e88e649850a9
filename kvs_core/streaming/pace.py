"""Pace: whether a larger ring would make captured steps faster, from how long they take. Pure: it is told times.

The link could have moved a step's pages, and the device could have computed, in some least time. Steps that take
clearly longer may have kept the link waiting for slots, and a larger ring is tried. If that makes them no faster the
cause is another one (a link that others use, a rate that was measured too high): the ring should be what it was, and
what steps take is then what is expected of them, until they are faster again.
"""

from __future__ import annotations

from enum import Enum

_SLOW = 1.05      # times what is expected
_IN_A_ROW = 4     # slow steps, so that one that was disturbed changes nothing
_HELPED = 0.02    # part of the least time by which steps must be faster for a larger ring to have helped
_FOLLOW = 0.02    # weight of a step that was faster than expected


class Advice(Enum):
    """What to do about the ring."""

    KEEP = "keep"
    GROW = "grow"
    TAKE_BACK = "take back"   # the last growth


class Pace:
    """Steps of one engine, each told to ``observe``. ``other_bytes``: what each moves beside pages."""

    def __init__(self, link_bytes_per_s: float, other_bytes: int = 0) -> None:
        self._link_bytes_per_s = link_bytes_per_s
        self._other_bytes = other_bytes
        self._compute_s = 0.0                  # of a step that streams nothing; 0: not seen
        self._expected = 1.0                   # times the least time
        self._slow: list[float] = []           # times the least time, of slow steps in a row
        self._tried: float | None = None       # the same, mean, when a larger ring was asked for

    def observe(self, step_s: float, moved_bytes: int) -> Advice:
        """A step took that long and moved so many bytes of pages."""
        if moved_bytes == 0:
            self._compute_s = step_s
        if moved_bytes == 0 or not self._compute_s or not self._link_bytes_per_s:
            return Advice.KEEP
        ratio = step_s / max(self._compute_s, (moved_bytes + self._other_bytes) / self._link_bytes_per_s)
        if ratio <= _SLOW * self._expected:
            self._slow.clear()
            self._expected = max(1.0, min(self._expected, self._expected + _FOLLOW * (ratio - self._expected)))
            return Advice.KEEP
        self._slow.append(ratio)
        if len(self._slow) < _IN_A_ROW:
            return Advice.KEEP
        mean, tried = sum(self._slow) / len(self._slow), self._tried
        self._slow.clear()
        if tried is not None and mean > tried - _HELPED:
            self._expected, self._tried = mean, None
            return Advice.TAKE_BACK
        self._tried = mean
        return Advice.GROW
