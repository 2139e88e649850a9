"""Feedback: what steps that have run say of the ring: the gap that it bridges, and whether it should grow or grew in
vain. Pure: it is told times.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvs_core.memory.phases import Phase
from kvs_core.streaming.pace import Advice, Pace


@dataclass(frozen=True, slots=True)
class Gap:
    """Longest time in a step in which attention consumed nothing, of the last step and of those before; seconds.

    steady_s  the shorter of the last two: a ring follows what steps have in common, not the one that was interrupted
    """

    steady_s: float = 0.0
    last_s: float = 0.0

    def then(self, gap_s: float) -> Gap:
        """After one more step."""
        return Gap(min(gap_s, self.last_s), gap_s)


class Feedback:
    """Of the steps of one stream.

    phase    of the last step
    gaps     by phase: a gap of prefill says nothing of decode
    in_vain  the ring grew and steps are no faster; set until the policy has taken the growth back
    """

    def __init__(self, link_bytes_per_s: float, reads: int, other_bytes: int = 0) -> None:
        """
        reads        attentions of a step that may have to wait for the link
        other_bytes  what each step moves to the device beside pages
        """
        self.phase = Phase.PREFILL
        self.gaps = {phase: Gap() for phase in Phase}
        self.in_vain = False
        self._reads = reads
        self._pace = Pace(link_bytes_per_s, other_bytes)   # of captured steps
        self._other_s = other_bytes / link_bytes_per_s if other_bytes else 0.0

    @property
    def gap_s(self) -> float:
        """What a ring for steps like the last one has to bridge."""
        return self.gaps[self.phase].steady_s

    def step_closed(self, longest_gap_s: float) -> None:
        """A step is over; 0: it measured no gap."""
        if longest_gap_s > 0:
            self.gaps[self.phase] = self.gaps[self.phase].then(longest_gap_s)

    def captured(self, step_s: float, moved_bytes: int) -> bool:
        """A captured step took that long on the device and moved so many bytes of pages; True: the ring should grow.

        One that streamed nothing tells how long the layers between two attention layers take, the gap that the ring
        bridges. One that streamed more than it may show that the link was kept waiting, which ``acquire`` cannot see.
        """
        if moved_bytes == 0:
            # While the link is busy with other things no slot is missing.
            gap_s = max(0.0, step_s - self._other_s) / self._reads
            self.gaps[Phase.DECODE] = Gap(gap_s, gap_s)
        advice = self._pace.observe(step_s, moved_bytes)
        if advice is Advice.TAKE_BACK:
            self.in_vain = True
        return advice is Advice.GROW
