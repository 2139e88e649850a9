"""KV without a model: random rows through a ``KvStream``, remembered row by row, compared with plain attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import gguf
import numpy as np

from kvs_core.device.base import StepInputs
from kvs_core.device.host.device import HostDebug, HostDevice
from kvs_core.device.host.ops import basic, kv_codec, kv_shift
from kvs_core.device.operands import AttentionParams, AttentionRows, RopeTable
from kvs_core.device.workspace import BufferSpec, workspace_bytes
from kvs_core.memory.arena import ALIGNMENT, Arena
from kvs_core.memory.phases import MemoryPlan, Phase, PhaseRequest
from kvs_core.paging.geometry import GROUP_PAGES, SEGMENT_GROUPS, KvType, PageGeometry
from kvs_core.paging.residency import ResidencyConfig, ResidencyMode, least_pool_slots, most_sliding_pages
from kvs_core.paging.spans import LEAST_SCRATCH_GROUPS
from kvs_core.streaming.handover import Handover, PhaseBuffers, attention_scratch
from kvs_core.streaming.kv_stream import KvStream
from kvs_core.units import align_up, ceil_div

PAGE = 32
LAYERS = 2
HEADS = 2
DIM = 64
DECODE_ROWS = 8
PREFILL_ROWS = 64

ROTATED = PageGeometry(PAGE, 1, DIM, DIM, KvType.Q8_0, KvType.Q4_0, k_rotation=64, v_rotation=64)
PLAIN = PageGeometry(PAGE, 2, 32, 32, KvType.F16, KvType.BF16)


@dataclass(frozen=True)
class Pools:
    """Slots of the pool in each phase."""

    prefill: int
    decode: int

    @classmethod
    def between(cls, context: int, prefill: float, decode: float, windows: Sequence[int] = ()) -> Pools:
        """Pools between the least that will do (0.0) and one for all pages (1.0). ``windows``: see ``Rig``."""
        sliding = [pages for pages in sliding_pages(windows) if pages is not None]
        whole = LAYERS - len(sliding)
        least = least_pool_slots(whole, context, PAGE, PREFILL_ROWS, sliding_pages=sliding)
        every = whole * ceil_div(context, PAGE)
        every += sum(most_sliding_pages(context, PAGE, PREFILL_ROWS, pages) for pages in sliding)
        return cls(least + round(prefill * (every - least)), least + round(decode * (every - least)))

    @classmethod
    def all_of(cls, context: int, windows: Sequence[int] = ()) -> Pools:
        """Pools for all pages."""
        return cls.between(context, 1.0, 1.0, windows)


def sliding_pages(windows: Sequence[int]) -> tuple[int | None, ...]:
    """Pages before a row's own that it sees, where windows are tokens and 0 is everything."""
    return tuple(ceil_div(window - 1, PAGE) if window else None for window in windows)


@dataclass(frozen=True)
class Rows:
    """Rows as pages hold them: k and v uint8 [rows, G, row_bytes]."""

    k: np.ndarray
    v: np.ndarray

    def first(self, count: int) -> Rows:
        return Rows(self.k[:count], self.v[:count])

    def from_row(self, first: int) -> Rows:
        return Rows(self.k[first:], self.v[first:])

    def and_then(self, other: Rows) -> Rows:
        return Rows(np.concatenate([self.k, other.k]), np.concatenate([self.v, other.v]))


class Rig:
    """One cache on one device; ``rows[layer]`` is what its history must come to hold."""

    def __init__(
        self, geometry: PageGeometry, context: int, pools: Pools, device: HostDevice, *,
        ring_slots: int = 0, run_pages: int = 0, mode: ResidencyMode = ResidencyMode.ADAPTIVE,
        windows: Sequence[int] = (),
    ) -> None:
        """``windows``: keys that a row of each layer sees, its own the last; 0, or (): all."""
        self.geometry = geometry
        self.context = context
        self.device = device
        config = ResidencyConfig(
            mode, LAYERS, geometry.page_bytes, ring_slots, run_pages, link_bytes_per_s=1e9,
            sliding_pages=sliding_pages(windows),
        )
        self.kv = KvStream(device, geometry, config, context)
        memory, buffers = _memory(geometry, context, pools)
        device.allocate_arena(memory.arena_bytes)
        self.arena = Arena(memory.arena_bytes)
        self.handover = Handover(device, self.arena, memory, self.kv, buffers)
        # Nothing turns: a rotary embedding of one pair that stands still.
        params = AttentionParams(
            HEADS, geometry.kv_heads, geometry.k_dim, geometry.v_dim, False, 1.0, RopeTable(np.zeros(1), False), 1e-6
        )
        self.params = [replace(params, window=window) for window in windows or (0,) * LAYERS]
        row_bytes = (geometry.k_row_bytes, geometry.v_row_bytes)
        self.rows = [
            Rows(*(np.zeros((0, geometry.kv_heads, size), np.uint8) for size in row_bytes)) for _ in range(LAYERS)
        ]

    @property
    def committed(self) -> int:
        """Rows that count."""
        return len(self.rows[0].k)

    def enter(self, phase: Phase) -> None:
        """Change phase if it is another."""
        if self.handover.layout.phase is not phase:
            self.handover.change(phase)

    def step(
        self, phase: Phase, rows: int, keep: int | None = None, *, seed: int = 0, leave_after: int = 2 * LAYERS
    ) -> np.ndarray:
        """Run a step of random rows and keep the first; outputs [layers, T, H, Dv], after a check against ``dense``.

        leave_after  of the two moves (attend, next) per layer, those done before the step is abandoned
        """
        self.enter(phase)
        dice = np.random.default_rng(seed)
        geometry = self.geometry
        inputs = [
            (
                dice.standard_normal((rows, geometry.kv_heads, geometry.k_dim), np.float32),
                dice.standard_normal((rows, geometry.kv_heads, geometry.v_dim), np.float32),
                dice.standard_normal((rows, HEADS, geometry.k_dim), np.float32) * np.float32(0.4),
            )
            for _ in range(LAYERS)
        ]
        outputs = np.zeros((LAYERS, rows, HEADS, geometry.v_dim), np.float32)
        try:
            left = self._run(phase, inputs, outputs, rows if keep is None else keep, leave_after)
        finally:
            # Also after an error: a step that could not send its pages home is settled all the same.
            before = self.rows
            kept = self.kv.cache.committed - self.committed
            self.rows = [
                old.and_then(self._stored(k, v).first(kept)) for old, (k, v, _) in zip(before, inputs, strict=True)
            ]
        if not left:
            for old, (k, v, q), out, params in zip(before, inputs, outputs, self.params, strict=True):
                self._check(old.and_then(self._stored(k, v)), q, out, params.window)
        return outputs

    def _run(
        self, phase: Phase, inputs: list[tuple[np.ndarray, np.ndarray, np.ndarray]], outputs: np.ndarray, keep: int,
        leave_after: int,
    ) -> bool:
        """True if the step was left."""
        with self.kv.begin(outputs.shape[1], phase) as step:
            assert step.first_position == self.committed
            self._check_windows()
            tokens = np.zeros(outputs.shape[1], np.int32)
            self.device.begin_step(StepInputs(tokens, step.first_position, 0, phase))
            for layer, (k, v, q) in enumerate(inputs):
                if leave_after <= 2 * layer:
                    return True
                y = np.concatenate([part.reshape(len(q), -1) for part in (q, k, v)], axis=1)
                queries = np.empty((align_up(len(q), 8), *q.shape[1:]), np.float32)
                attended = AttentionRows(y, queries, outputs[layer].reshape(len(q), -1))
                step.layer(layer).attend(attended, self.params[layer])
                assert step.plan(layer).plan.pages == ceil_div(step.first_position + len(q), PAGE)
            if leave_after < 2 * LAYERS:
                return True
            step.settle(keep)
        return False

    def _check_windows(self) -> None:
        """In a step, a sliding layer has what its rows see, less than a group and a page more, and streams nothing."""
        for params, places in zip(self.params, self.kv.places(), strict=True):
            first_seen = max(0, self.committed + 1 - params.window) if params.window else 0
            assert places.first_page * PAGE <= first_seen < (places.first_page + GROUP_PAGES + 1) * PAGE
            assert params.window == 0 or not places.streamed

    def prefill(self, tokens: int, *, seed: int = 0) -> None:
        """Steps of the widest kind until that many rows are committed."""
        while self.committed < tokens:
            self.step(Phase.PREFILL, min(PREFILL_ROWS, tokens - self.committed), seed=seed + self.committed)

    def truncate(self, tokens: int) -> None:
        """Forget rows."""
        self.kv.truncate(tokens)
        self.rows = [rows.first(tokens) for rows in self.rows]

    def shift(self, keep: int, discard: int) -> None:
        """Drop rows in the middle; keys behind them are stored anew, without a turn."""
        tokens = self.committed
        self.kv.drain()
        self.kv.truncate(0)
        before, self.rows = self.rows, [rows.first(0) for rows in self.rows]
        self.kv.shift(self.params, keep=keep, discard=discard, tokens=tokens)
        self.rows = [
            rows.first(keep).and_then(self._stored_anew(rows.from_row(keep + discard), discard)) for rows in before
        ]

    def _stored_anew(self, rows: Rows, by: int) -> Rows:
        """Rows as they are behind a shift by so many positions."""
        if by == 0 or len(rows.k) == 0:
            return rows
        keys = np.ascontiguousarray(rows.k.swapaxes(0, 1))
        return Rows(kv_shift.turned(keys, self.geometry, self.params[0].rope, -by).swapaxes(0, 1), rows.v)

    def publish_all(self) -> None:
        """Everything home."""
        self.kv.publish_dirty()
        self.kv.drain()
        assert self.kv.cache.published == self.committed

    def check_history(self) -> None:
        """Every published row is in the history, byte for byte; but a page that is being sent again is not looked at.

        The second copy of a page writes the same bytes over its published rows, and a debug device poisons its target.
        """
        geometry, published = self.geometry, self.kv.cache.published
        if self.kv._publisher.enqueued > published:
            published -= published % PAGE
        for layer, rows in enumerate(self.rows):
            for page in range(ceil_div(published, PAGE)):
                heads = self.kv.history_page(layer, page).reshape(geometry.kv_heads, -1)
                count = min(PAGE, published - page * PAGE)
                here = slice(page * PAGE, page * PAGE + count)
                k_part, v_part = heads[:, : geometry.k_part_bytes], heads[:, geometry.k_part_bytes :]
                for part, kept in ((k_part, rows.k), (v_part, rows.v)):
                    there = part.reshape(geometry.kv_heads, PAGE, -1)[:, :count].swapaxes(0, 1)
                    assert (there == kept[here]).all(), f"layer {layer}, page {page}"

    def check_frontiers(self) -> None:
        """Committed rows are those remembered; slots are all accounted for; device memory has not grown."""
        assert self.kv.cache.committed == self.kv.cache.reserved == self.committed
        stats = self.kv.stats()
        assert stats.resident_pages + stats.ring_slots <= stats.pool_pages == self.handover.layout.pool.shape[0]
        assert stats.active_pages <= LAYERS * ceil_div(self.committed, PAGE)
        assert self.device.memory_report() == {"weights": 0, "state": 0, "arena": self.arena.plan.total_bytes}

    def close(self) -> None:
        """Stop the threads."""
        self.device.close()
        self.kv.close()

    def _stored(self, k: np.ndarray, v: np.ndarray) -> Rows:
        """What pages hold of some rows."""
        k, v = k.copy(), v.copy()
        self._rotate(k, v)
        return Rows(kv_codec.encode(self.geometry.k_type, k), kv_codec.encode(self.geometry.v_type, v))

    def _check(self, stored: Rows, q: np.ndarray, out: np.ndarray, window: int) -> None:
        """Compare a layer's outputs with ``dense`` over all its rows."""
        k, v = _decoded(self.geometry.k_type, stored.k), _decoded(self.geometry.v_type, stored.v)
        self._rotate(k, v)
        np.testing.assert_allclose(out, dense(q, k, v, window), atol=3e-5)

    def _rotate(self, k: np.ndarray, v: np.ndarray) -> None:
        if self.geometry.k_rotation:
            basic.hadamard(k, self.geometry.k_rotation)
        if self.geometry.v_rotation:
            basic.hadamard(v, self.geometry.v_rotation)


def _decoded(kv_type: KvType, data: np.ndarray) -> np.ndarray:
    """Bytes [S, G, row_bytes] as float32 [S, G, D], by another reader than the device's."""
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kv_type.name]).astype(np.float32)


def dense(q: np.ndarray, keys: np.ndarray, values: np.ndarray, window: int = 0) -> np.ndarray:
    """Causal attention of the last T rows in float64.   q [T, H, Dk]; keys [S, G, Dk]; values [S, G, Dv]

    window  keys that a row sees, its own the last; 0: all
    """
    rows, heads, _ = q.shape
    of_head = np.arange(heads) * keys.shape[1] // heads
    scores = np.einsum("thd,shd->ths", q, keys[:, of_head], dtype=np.float64)
    own = len(keys) - rows + np.arange(rows)[:, None]
    unseen = (np.arange(len(keys)) > own) | (np.arange(len(keys)) <= own - (window or len(keys)))
    scores = np.where(unseen[:, None], -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out: np.ndarray = np.einsum("ths,shd->thd", weights, values[:, of_head], dtype=np.float64)
    return out


def _memory(geometry: PageGeometry, context: int, pools: Pools) -> tuple[MemoryPlan, dict[Phase, PhaseBuffers]]:
    """An arena whose phases leave pools of exactly those slots: what is too much is filled up."""
    slots = {Phase.PREFILL: pools.prefill, Phase.DECODE: pools.decode}
    groups = ceil_div(ceil_div(context, PAGE), GROUP_PAGES)
    specs, names = {}, {}
    for phase, rows in ((Phase.PREFILL, PREFILL_ROWS), (Phase.DECODE, DECODE_ROWS)):
        scratch = attention_scratch(
            phase, rows=rows, heads=HEADS, v_dim=geometry.v_dim,
            groups=min(LEAST_SCRATCH_GROUPS, groups), segments=ceil_div(groups, SEGMENT_GROUPS),
        )
        specs[phase] = [spec for _, spec in scratch]
        names[phase] = tuple(name for name, _ in scratch)
    pool_bytes = {phase: align_up(slots[phase] * geometry.page_bytes, ALIGNMENT) for phase in Phase}
    need = {phase: workspace_bytes(specs[phase]) + pool_bytes[phase] for phase in Phase}
    arena_bytes = max(need.values())
    buffers = {}
    for phase in Phase:
        spare = arena_bytes - need[phase]
        filler = [BufferSpec("filler", (spare,), np.uint8)] if spare else []
        group_rows = min(LEAST_SCRATCH_GROUPS, groups) * DECODE_ROWS if phase is Phase.DECODE else 0
        buffers[phase] = PhaseBuffers((*specs[phase], *filler), names[phase], group_rows)
    prefill, decode = (PhaseRequest.of_bytes(phase, buffers[phase].size_bytes) for phase in Phase)
    return MemoryPlan(arena_bytes, geometry.page_bytes, min(slots.values()), prefill, decode), buffers


@contextmanager
def rig(
    context: int = 512, pools: Pools | None = None, geometry: PageGeometry = ROTATED, *,
    debug: HostDebug | None = None, ring_slots: int = 0, run_pages: int = 0,
) -> Iterator[Rig]:
    """A rig that is closed at the end; without ``pools`` the least that will do."""
    pools = pools or Pools.between(context, 0.0, 0.0)
    built = Rig(geometry, context, pools, HostDevice(1, debug=debug), ring_slots=ring_slots, run_pages=run_pages)
    try:
        yield built
    finally:
        built.close()
