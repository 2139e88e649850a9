"""Decode steps as captured work: recorded once, launched for every token until what they move or read changes.

    signature unchanged ──> launch
    changed             ──> drop the old recording, record the step, launch

Recording runs the same model code that an eager step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kvs_core.device.base import Captured, Device, StepInputs
from kvs_core.streaming.kv_step import KvStep


@dataclass(frozen=True, slots=True)
class _Recording:
    signature: Hashable
    work: Captured


class CapturedSteps:
    """The recordings of one engine, one per width of step. ``recorded`` counts them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._recordings: dict[int, _Recording] = {}
        self.recorded = 0

    def launch(self, inputs: StepInputs, kv: KvStep, record: Callable[[], None]) -> None:
        """Launch the step ``kv``, recording it first if need be.   record enqueues the step's work"""
        rows = len(inputs.tokens)
        signature = kv.signature
        kv.before_launch()
        if rows not in self._recordings or self._recordings[rows].signature != signature:
            self._recordings.pop(rows, None)   # its memory goes before the new one's comes
            try:
                work = self._device.capture(inputs, record)
            finally:
                kv.after_capture()
            self._recordings[rows] = _Recording(signature, work)
            self.recorded += 1
        self._recordings[rows].work.launch(inputs)

    def elapsed_s(self, rows: int) -> float | None:
        """Seconds that the last step, of that width, took on the device, if it is done."""
        known = self._recordings.get(rows)
        return None if known is None else known.work.elapsed_s()

    def forget(self) -> None:
        """Drop all recordings: addresses change."""
        self._recordings.clear()
