"""How much of each layer's attention lies outside windows of several sizes, measured while a text is read.

The share that row t gives to keys before its newest w is 1 - exp(LSE_w - LSE), where LSE is ln of the sum of exp(score)
over all keys it sees and LSE_w the same over the newest w: both come out of the running softmax (m + ln l; Milakov and
Gimelshein, arXiv 1805.02867). So during prefill every piece of pages is attended once more for each window, into a
partial of its own, while it is on the device. The forward pass itself is what it always is, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvs_core.device.base import Device
from kvs_core.device.operands import AttentionParams, Buffer
from kvs_core.engine.engine import Engine
from kvs_core.engine.session import ubatches
from kvs_core.errors import DeviceError
from kvs_core.memory.phases import Phase
from kvs_core.models.spec import LayerSpec
from kvs_core.paging.geometry import PageGeometry
from kvs_core.settings.rooms import LayerWindow
from kvs_core.streaming.layer_kv import cut
from kvs_core.units import Progress


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One attention layer.

    layer    the model's number of it
    window   keys that a row sees by the model's own making; 0: all
    outside  for each window of the profile the share of attention before it, 0 to 1: the mean over heads and over the
             rows that see more keys than the window has; 0 without such rows. () for a layer with a window of its own
    """

    layer: int
    window: int
    outside: tuple[float, ...]

    @property
    def measured(self) -> bool:
        """Whether a window of residency is of use to it: a sliding layer never streams."""
        return not self.window


@dataclass(frozen=True, slots=True)
class Profile:
    """Of a text of ``tokens`` tokens. ``windows``: in tokens, ascending."""

    tokens: int
    windows: tuple[int, ...]
    layers: tuple[LayerProfile, ...]

    def least_window(self, layer: LayerProfile, threshold: float) -> int | None:
        """The smallest window outside which a measured layer has less than ``threshold``; None: none of them will do.

        One that no row sees beyond was not measured, so it is none of them.
        """
        shares = zip(self.windows, layer.outside, strict=True)
        return next((window for window, share in shares if window < self.tokens and share < threshold), None)

    def window_layers(self, threshold: float) -> tuple[LayerWindow, ...]:
        """What window residency could keep of the measured layers: their ``least_window``, else all; neighbours alike
        are together."""
        found: list[LayerWindow] = []
        joins = False
        for layer in self.layers:
            if layer.measured:
                tokens = self.least_window(layer, threshold)
                first = layer.layer
                if joins and found[-1].tokens == tokens:
                    first = found.pop().first
                found.append(LayerWindow(first, layer.layer, tokens))
            joins = layer.measured
        return tuple(found)


def profile_layers(
    engine: Engine, tokens: Sequence[int], windows: Sequence[int], progress: Progress | None = None
) -> Profile:
    """Read ``tokens``, which fit the context, into an engine that holds nothing, and measure.

    windows   of 1 or more tokens, ascending
    progress  in tokens
    Raises ``DeviceError`` if the model's scores are no numbers, or without memory for a partial per window.
    """
    layers, reads = engine.drafting.kv_layers(engine.spec), engine.drafting.kv_reads(engine.spec)
    watch = _Watch(engine._device, [layers[layer] for layer in reads], windows, engine.context.ubatch_tokens)
    done = 0
    engine._kv.watch = watch
    try:
        for rows in ubatches(len(tokens), engine.context.batch_tokens, engine.context.ubatch_tokens):
            with engine.step(tokens[done : done + rows], Phase.PREFILL) as step:
                step.settle()
            done += rows
            if progress is not None:
                progress(done, len(tokens))
    finally:
        engine._kv.watch = None
    outside = np.zeros((len(layers), len(windows)))
    np.maximum.at(outside, reads, watch.outside)   # where several layers read one's keys, the one that looks furthest
    if not np.isfinite(outside).all():
        raise DeviceError("the model's attention is not all numbers: no profile; --check-tensors looks at its weights")
    return Profile(done, tuple(windows), tuple(
        LayerProfile(layer.index, layer.window, () if layer.window else tuple(map(float, shares)))
        for layer, shares in zip(layers, outside, strict=True)
    ))


class _Watch:
    """``PrefillWatch`` that attends again for each window and adds up what lies before it."""

    def __init__(self, device: Device, layers: Sequence[LayerSpec], windows: Sequence[int], rows: int) -> None:
        """``layers``: whose keys each attention reads; ``rows``: of a step at most."""
        self._device = device
        self._layers = layers
        self._windows = windows
        size = rows * max(layer.heads * (layer.v_dim + 2) for layer in layers)
        self._partials = [device.allocate((size,), np.float32) for _ in windows]
        self._sums = np.zeros((len(layers), len(windows)))            # of shares, over rows and heads
        self._counts = np.zeros((len(layers), len(windows)), int)     # of these
        self._layer = 0
        self._positions = range(0)
        self._open: list[int] = []      # windows that a row of the step sees beyond
        self._begun: set[int] = set()   # those of them whose partials hold something

    def begin(self, layer: int, positions: range) -> None:
        """See ``PrefillWatch``."""
        self._layer, self._positions = layer, positions
        own = self._layers[layer].window
        self._open = [number for number, window in enumerate(self._windows) if not own and positions.stop > window]
        self._begun = set()

    def attended(
        self, q: Buffer, params: AttentionParams, pool: Buffer, geometry: PageGeometry, plan: Any, pages: range
    ) -> None:
        """See ``PrefillWatch``."""
        for number in self._open:
            window = self._windows[number]
            if pages.stop * geometry.page_tokens <= self._positions.start + 1 - window:
                continue   # before all that the rows see
            self._device.ops.attend_prefill(
                q, replace(params, window=window), pool, geometry, plan, pages,
                self._partial(number), fresh=number not in self._begun,
            )
            self._begun.add(number)

    def end(self, running: Buffer) -> None:
        """See ``PrefillWatch``."""
        if not self._open:
            return
        whole = self._log_sums(running)
        seen = np.arange(self._positions.start, self._positions.stop) + 1
        for number in self._open:
            beyond = seen > self._windows[number]
            # Rounding may put a part above the whole.
            inside = np.minimum(self._log_sums(self._partial(number)) - whole, 0.0)[beyond]
            self._sums[self._layer, number] -= np.expm1(inside).sum()
            self._counts[self._layer, number] += inside.size

    @property
    def outside(self) -> np.ndarray:
        """Shares, float64 [layers, windows]."""
        return np.divide(self._sums, np.maximum(self._counts, 1))

    def _partial(self, number: int) -> Buffer:
        layer = self._layers[self._layer]
        return cut(self._partials[number], len(self._positions), layer.heads, layer.v_dim + 2)[0]

    def _log_sums(self, running: Buffer) -> np.ndarray:
        ops = self._device.ops
        return ops.log_sums(self._device.download(ops.prefill_sums(running)))
