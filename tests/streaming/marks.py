"""Captured steps without kernels: a cache whose pages hold marks, one for each layer and token.

The ops are checks that run when the device would: they take positions and plans from the tables in device memory, as
kernels do.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvs_core.device.base import StepInputs
from kvs_core.device.cuda.device import CudaDevice
from kvs_core.device.cuda.plan import DevicePlan
from kvs_core.device.cuda.tables import STEP_PENDING, STEP_POSITION, STEP_ROWS, STEP_TOKENS
from kvs_core.device.operands import AttentionParams, AttentionRows
from kvs_core.engine.captured import CapturedSteps
from kvs_core.errors import DeviceError
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import KvType, PageGeometry
from kvs_core.paging.residency import ResidencyConfig, ResidencyMode, least_pool_slots
from kvs_core.streaming.kv_stream import KvStream
from kvs_core.streaming.layer_kv import AttentionScratch
from tests.streaming.deferred import DeferredRuntime

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
LAYERS, PAGE, ROWS, PREFILL_ROWS = 3, 32, 8, 64
CONTEXT = 24 * PAGE   # of which up to 20 are streamed: from two slabs
GEOMETRY = PageGeometry(PAGE, 1, 32, 32, KvType.F32, KvType.F32)
PARAMS = AttentionParams(1, 1, 32, 32, False, 1.0, None, 1e-6)
LEAST = least_pool_slots(LAYERS, CONTEXT, PAGE, PREFILL_ROWS)


class MarkOps:
    """Ops that write and check marks. ``truth``: by number of a step, the token of every position that it may see."""

    def __init__(self, device: CudaDevice, runtime: DeferredRuntime) -> None:
        self._device = device
        self._runtime = runtime
        self.truth: dict[int, list[int]] = {}
        self.seen: dict[tuple[int, int], list[int]] = defaultdict(list)   # pages, by step and layer
        self.load_plan = device._ops.load_plan
        self.fail_at: tuple[str, int] | None = None   # op and layer
        self.error = DeviceError("a broken part; mend it")

    def zero_page(self, pool: np.ndarray, geometry: PageGeometry, slot: int) -> None:
        def work() -> None:
            pool[slot] = 0

        self._runtime.compute.enqueue(work)

    def write_kv(
        self, y: Any, params: Any, q: Any, pool: np.ndarray, geometry: Any, plan: DevicePlan, *, phase: Phase
    ) -> None:
        layer = self._layer(y, "write_kv")

        def work() -> None:
            number, position, rows = self._step()
            slots = _words(plan.slots, _words(plan.header, 1)[0])
            tokens = self._device._steps.memory[STEP_TOKENS:] if phase is DECODE else self._device._steps.tokens
            for row in range(rows):
                page, at = divmod(position + row, PAGE)
                _marks(pool, slots[page])[at] = _mark(layer, int(tokens[row]))
                assert tokens[row] == self.truth[number][position + row], f"step {number} has another's tokens"

        self._runtime.compute.enqueue(work)

    def attend_decode(
        self, q: Any, params: Any, pool: np.ndarray, geometry: Any, plan: DevicePlan, call: int, scratch: Any
    ) -> None:
        layer = self._layer(q, "attend_decode")

        def work() -> None:
            first, count, _, _ = _words(plan.calls + 16 * call, 4)
            for part in range(first, first + count):
                _, _, page, pages = _words(plan.parts + 16 * part, 4)
                self._check(layer, pool, plan, range(page, page + pages))

        self._runtime.compute.enqueue(work)

    def attend_prefill(
        self, q: Any, params: Any, pool: np.ndarray, geometry: Any, plan: DevicePlan, pages: range, running: Any, *,
        fresh: bool,
    ) -> None:
        layer = self._layer(q, "attend_prefill")
        self._runtime.compute.enqueue(lambda: self._check(layer, pool, plan, pages))

    def fold(self, params: Any, plan: DevicePlan, call: int, scratch: Any, segments: Any) -> None:
        """Nothing."""

    def finish_decode(
        self, y: Any, params: Any, geometry: Any, plan: DevicePlan, scratch: Any, segments: Any, out: Any
    ) -> None:
        self._finish(self._layer(y, "finish_decode"))

    def finish_prefill(self, y: Any, params: Any, geometry: Any, running: Any, out: Any) -> None:
        self._finish(self._layer(y, "finish_prefill"))

    def _finish(self, layer: int) -> None:
        def work() -> None:
            number, position, rows = self._step()
            pages = GEOMETRY.pages_of(position + rows)
            assert sorted(self.seen.pop((number, layer))) == list(range(pages)), f"step {number}, layer {layer}"

        self._runtime.compute.enqueue(work)

    def _layer(self, layer: int, op: str) -> int:
        if self.fail_at == (op, layer):
            raise self.error
        return layer

    def _step(self) -> tuple[int, int, int]:
        table = self._device._steps.memory
        return int(table[STEP_PENDING]), int(table[STEP_POSITION]), int(table[STEP_ROWS])

    def _check(self, layer: int, pool: np.ndarray, plan: DevicePlan, pages: range) -> None:
        number, position, rows = self._step()
        truth = self.truth[number]
        for page, slot in zip(pages, _words(plan.slots, pages.stop)[pages.start :], strict=True):
            positions = range(page * PAGE, min((page + 1) * PAGE, position + rows))
            expected = [_mark(layer, truth[at]) for at in positions]
            assert _marks(pool, slot)[: len(expected)].tolist() == expected, f"step {number}, {layer=}, {page=}"
            self.seen[number, layer].append(page)


def _mark(layer: int, token: int) -> int:
    return token * LAYERS + layer + 1


def _marks(pool: np.ndarray, slot: int) -> np.ndarray:
    """The marks of the tokens in a slot."""
    return pool[slot, : 4 * PAGE].view(np.int32)


def _words(address: int, count: int) -> list[int]:
    """int32 at an address of the device."""
    return list((ctypes.c_int32 * count).from_address(address))


class Simulation:
    """A cache of marks on a device without kernels, and the engine's way of running steps on it."""

    def __init__(self, seed: int, pool_slots: int, *, ring: int = 0, run: int = 0) -> None:
        self.runtime = DeferredRuntime(seed)
        runtime: Any = self.runtime
        self.device = CudaDevice(runtime)
        self.ops = MarkOps(self.device, self.runtime)
        self.device.ops = self.ops   # type: ignore[assignment]
        pages = CONTEXT // PAGE
        self.device.allocate_arena(LAYERS * pages * GEOMETRY.page_bytes)
        self.device.reserve_steps(LAYERS, pages, PREFILL_ROWS)
        config = ResidencyConfig(ResidencyMode.ADAPTIVE, LAYERS, GEOMETRY.page_bytes, ring, run)
        self.kv = KvStream(self.device, GEOMETRY, config, CONTEXT)
        self.captured = CapturedSteps(self.device)
        self.tokens: list[int] = []
        self.launched = self.eager = 0   # decode steps
        self._number = self._next_token = 0
        self._bind(pool_slots)

    def step(self, phase: Phase, rows: int, keep: int, *, leave: bool = False) -> None:
        """Run a step as ``engine.Step`` does, of tokens never seen before."""
        rows = min(rows, CONTEXT - len(self.tokens))
        if rows == 0:
            return
        tokens = list(range(self._next_token, self._next_token + rows))
        self._next_token += rows
        self._number += 1
        self.ops.truth[self._number] = self.tokens + tokens
        with self.kv.begin(rows, phase) as step:
            inputs = StepInputs(np.array(tokens, np.int32), step.first_position, self._number, phase)

            def record() -> None:
                step.fill_ring()
                for layer in range(LAYERS):
                    step.layer(layer).attend(AttentionRows(layer, layer, np.empty(rows)), PARAMS)

            captures = phase is DECODE and step.can_capture
            if captures and self.captured.launch(("step", rows), inputs, step, record):
                self.launched += 1
            else:
                self.ops.fail_at = None
                self.device.begin_step(inputs)
                record()
                self.eager += phase is DECODE
            if leave:
                return
            keep = rows if phase is PREFILL else min(keep, rows)
            step.settle(keep)
        self.tokens += tokens[:keep]

    def resize(self, pool_slots: int) -> None:
        """What a hand-over does."""
        self.captured.forget()
        self.kv.vacate(pool_slots)
        self.kv.drain()
        self._bind(pool_slots)

    def truncate(self, tokens: int) -> None:
        self.kv.truncate(tokens)
        del self.tokens[tokens:]

    def check_history(self) -> None:
        """All is done and home."""
        self.kv.drain()
        assert not self.ops.seen
        for layer in range(LAYERS):
            for page in range(GEOMETRY.pages_of(len(self.tokens))):
                tokens = self.tokens[page * PAGE : (page + 1) * PAGE]
                marks = self.kv.history_page(layer, page)[: 4 * len(tokens)].view(np.int32)
                assert marks.tolist() == [_mark(layer, token) for token in tokens]

    def close(self) -> None:
        self.device.close()
        self.kv.close()

    def _bind(self, pool_slots: int) -> None:
        held = 32
        partial = ROWS * (GEOMETRY.v_dim + 2)
        scratch = AttentionScratch(
            held * ROWS, np.empty(held * partial, np.float32), np.empty(2 * partial, np.float32),
            np.empty(PREFILL_ROWS * (GEOMETRY.v_dim + 2), np.float32),
        )
        self.kv.bind(self.device.arena_view(0, (pool_slots, GEOMETRY.page_bytes), np.uint8), scratch)


POOLS = st.integers(LEAST, LEAST + 12)
