"""Decode steps as captured work: recorded once, launched for every token until what they move or read changes.

    signature unchanged ──> launch
    changed             ──> drop the old recording, record the step, launch
    no memory for that  ──> nothing has happened: the step runs as it comes, and so do those that follow for a while

Recording runs the same model code that an eager step runs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kvs_core.device.base import Captured, Device, StepInputs
from kvs_core.device.copied import NONE_COPIED, Copied
from kvs_core.errors import DeviceMemoryError
from kvs_core.streaming.kv_step import KvStep
from kvs_core.streaming.weight_stream import WeightStream

LOGGER = logging.getLogger(__name__)

PAUSE_STEPS = 256
"""Steps that are not recorded after one for which there was no memory; by then there may be some again."""


@dataclass(frozen=True, slots=True)
class _Recording:
    signature: Hashable
    work: Captured
    moved: Counter[int]   # bytes of pages copied to the device by each launch, by layer
    weights: Copied       # and of weights


class CapturedSteps:
    """The recordings of one engine, one per kind and width of step. ``recorded`` counts them."""

    def __init__(self, device: Device, weights: WeightStream | None = None) -> None:
        """``weights``: brings those that do not stay on the device."""
        self._device = device
        self._weights = weights
        self._recordings: dict[tuple[str, int], _Recording] = {}
        self._last: Captured | None = None
        self.recorded = 0
        self._pause = 0
        self._warned = False

    def launch(
        self, key: tuple[str, int], inputs: StepInputs, kv: KvStep, record: Callable[[], None],
        layers: range | None = None,
    ) -> bool:
        """Launch what ``record`` enqueues for the step ``kv``, recording it first if need be.

        False: there is no memory for a recording, and nothing was enqueued.

        key     kind and width: what is launched by turns is kept side by side
        layers  attention layers of a draft; without, the step itself
        """
        signature = kv.signature(layers)
        is_new = key not in self._recordings or self._recordings[key].signature != signature
        if is_new:
            self._drop(key)   # its memory goes before the new one's comes
            if self._pause:
                self._pause -= 1
                return False
        kv.before_launch()
        if self._weights is not None:
            self._weights.settle_fences()
        try:
            if is_new:
                self._recordings[key] = self._record(signature, inputs, kv, record)
            recording = self._recordings[key]
            self._last = recording.work
            self._last.launch(inputs)   # the first one may take memory too
        except DeviceMemoryError as error:
            self._drop(key)
            self._postpone(error)
            kv.not_captured()
            if self._weights is not None:
                self._weights.empty()
            return False
        if is_new:
            self._warned = False
        kv.launched(recording.moved)
        if self._weights is not None:
            self._weights.launched(recording.weights)
        return True

    def elapsed_s(self) -> float | None:
        """Seconds that the last launch took on the device, if it is done."""
        return None if self._last is None else self._last.elapsed_s()

    def forget(self) -> None:
        """Drop all recordings: addresses change."""
        self._recordings.clear()
        self._last = None

    def _record(
        self, signature: Hashable, inputs: StepInputs, kv: KvStep, record: Callable[[], None]
    ) -> _Recording:
        before = kv.moved
        weights = NONE_COPIED if self._weights is None else self._weights.moved
        try:
            work = self._device.capture(inputs, record)
        finally:
            moved = kv.after_capture(before)
            if self._weights is not None:
                weights = self._weights.after_capture(weights)
        self.recorded += 1
        return _Recording(signature, work, moved, weights)

    def _drop(self, key: tuple[str, int]) -> None:
        self._recordings.pop(key, None)
        self._last = None

    def _postpone(self, error: DeviceMemoryError) -> None:
        self._pause = PAUSE_STEPS
        if not self._warned:
            self._warned = True
            LOGGER.warning("steps are not recorded, which is slower, and it is tried again every %d steps: %s",
                           PAUSE_STEPS, error)  # fmt: skip
