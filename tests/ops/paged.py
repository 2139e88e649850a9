"""K and V in pages for the attention tests: written, placed in slots, streamed, and attended to the slow way."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvs_core.device.host.ops import attention, kv_codec, kv_write
from kvs_core.paging.geometry import KvType, PageGeometry
from kvs_core.paging.schedule import Run
from kvs_core.paging.spans import LEAST_SCRATCH_GROUPS, Chunk, LayerPlan, RowSpan, plan_layer

POISON = 0xFF   # NaN in every format that has one


def geometry_of(
    *, page_tokens: int = 32, kv_heads: int = 2, k_dim: int = 64, v_dim: int | None = None,
    k_type: KvType = KvType.Q8_0, v_type: KvType = KvType.Q8_0,
) -> PageGeometry:
    """Small pages of q8_0, but for what is given."""
    return PageGeometry(page_tokens, kv_heads, k_dim, v_dim or k_dim, k_type, v_type)


@dataclass(frozen=True)
class Context:
    """``tokens`` random positions of one layer, and ``rep`` query heads per KV head."""

    geometry: PageGeometry
    tokens: int
    rep: int = 3
    seed: int = 0

    def _normal(self, salt: int, heads: int, dim: int) -> np.ndarray:
        rng = np.random.default_rng((self.seed, salt))
        return rng.standard_normal((self.tokens, heads, dim)).astype(np.float32)

    @cached_property
    def k(self) -> np.ndarray:
        """float32 [tokens, G, Dk]"""
        return self._normal(1, self.geometry.kv_heads, self.geometry.k_dim)

    @cached_property
    def v(self) -> np.ndarray:
        """float32 [tokens, G, Dv]"""
        return self._normal(2, self.geometry.kv_heads, self.geometry.v_dim)

    def q(self, rows: int) -> np.ndarray:
        """Scaled queries of the last ``rows`` positions, float32 [rows, H, Dk], spread so that some keys stand out."""
        heads = self.geometry.kv_heads * self.rep
        return (2 * self._normal(3, heads, self.geometry.k_dim) / self.geometry.k_dim**0.5)[self.tokens - rows :]

    def pages(self, tokens: int | None = None, *, behind: int = 0) -> np.ndarray:
        """The pages of the first ``tokens`` positions, uint8 [pages, page_bytes]; the bytes after: ``behind``."""
        tokens = self.tokens if tokens is None else tokens
        pages = np.full((self.geometry.pages_of(tokens), self.geometry.page_bytes), behind, np.uint8)
        page_tokens = self.geometry.page_tokens
        spans = [
            RowSpan(page, 0, page * page_tokens, min(page_tokens, tokens - page * page_tokens))
            for page in range(len(pages))
        ]
        kv_write.kv_write(self.k[:tokens], self.v[:tokens], pages, self.geometry, spans)
        return pages

    def expected(self, q: np.ndarray, window: int = 0) -> np.ndarray:
        """Softmax attention of the last rows in float64 over the bytes as stored, [rows, H, Dv]."""
        k = np.repeat(_stored(self.geometry.k_type, self.k), self.rep, axis=1)
        v = np.repeat(_stored(self.geometry.v_type, self.v), self.rep, axis=1)
        scores = np.einsum("thd,shd->hts", q.astype(np.float64), k)
        position = self.tokens - len(q) + np.arange(len(q))
        scores[:, np.arange(self.tokens) > position[:, None]] = -np.inf
        if window:
            scores[:, np.arange(self.tokens) <= position[:, None] - window] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hts,shd->thd", weights, v)


def _stored(kv_type: KvType, rows: np.ndarray) -> np.ndarray:
    out = np.empty(rows.shape, np.float32)
    kv_codec.decode(kv_type, kv_codec.encode(kv_type, rows), out)
    return out.astype(np.float64)


def spoil(pages: np.ndarray, geometry: PageGeometry, tokens: int) -> np.ndarray:
    """A copy of ROWS pages in which the first ``tokens`` positions are poison."""
    out = pages.copy()
    whole, rest = divmod(tokens, geometry.page_tokens)
    out[:whole] = POISON
    if rest:
        heads = out[whole].reshape(geometry.kv_heads, geometry.head_bytes)
        heads[:, : rest * geometry.k_row_bytes] = POISON
        heads[:, geometry.k_part_bytes :][:, : rest * geometry.v_row_bytes] = POISON
    return out


def plain_plan(pages: int, first: int = 0) -> LayerPlan:
    """All pages from ``first`` on resident, page p in slot p."""
    chunks = [Chunk(range(first, pages))]
    return plan_layer(range(pages), chunks, scratch_groups=LEAST_SCRATCH_GROUPS, partial=first > 0)


class Slots:
    """A pool in which only resident pages, and the run being read, hold anything but poison."""

    def __init__(self, pages: np.ndarray, plan: LayerPlan, spare: int = 0) -> None:
        self.pool = np.full((1 + max(plan.slots) + spare, pages.shape[1]), POISON, np.uint8)
        self._pages = pages
        for chunk in plan.chunks:
            if chunk.run is None:
                for page in chunk.pages:
                    self.pool[plan.slots[page]] = pages[page]

    def arrive(self, run: Run | None) -> None:
        if run is not None:
            self.pool[run.first_slot : run.first_slot + run.pages] = self._pages[run.first_page : run.end_page]

    def leave(self, run: Run | None) -> None:
        if run is not None:
            self.pool[run.first_slot : run.first_slot + run.pages] = POISON


def decode(
    geometry: PageGeometry, pages: np.ndarray, q: np.ndarray, first_position: int, plan: LayerPlan | None = None,
    *, spare: int = 0, round_q: bool = False, window: int = 0,
) -> np.ndarray:
    """Decode attention as a layer runs it, in scratch that holds NaN before: float32 [T, H, Dv]."""
    plan = plan or plain_plan(len(pages))
    slots = Slots(pages, plan, spare)
    width = (*q.shape[:2], geometry.v_dim + 2)
    rows = 1 + max(part.scratch_row for call in plan.calls for part in call.parts)
    scratch = np.full((rows, *width), np.nan, np.float32)
    segments = np.full((plan.segments, *width), np.nan, np.float32)
    for call in plan.calls:
        for run in call.runs if call.first else ():
            slots.arrive(run)
        attention.attend_decode(
            q, slots.pool, geometry, call.parts, plan.slots, scratch, first_position=first_position, window=window,
            round_q=round_q,
        )
        attention.fold(scratch, segments, call.folds)
        for run in call.runs if call.last else ():
            slots.leave(run)
    attention.fold(scratch, segments, plan.last_folds)
    out = np.full((*q.shape[:2], geometry.v_dim), np.nan, np.float32)
    attention.finish_decode(segments, plan.segments, out)
    return out


def prefill(
    geometry: PageGeometry, pages: np.ndarray, q: np.ndarray, first_position: int,
    calls: Sequence[range] | None = None, slots: Sequence[int] | None = None, *, round_q: bool = False, window: int = 0,
) -> np.ndarray:
    """Prefill attention over the pages, in these calls: float32 [T, H, Dv]."""
    calls = calls or [range(len(pages))]
    slots = slots or range(len(pages))
    plan = LayerPlan(tuple(slots), tuple(Chunk(call) for call in calls), partial=calls[0].start > 0)
    pool = Slots(pages, plan).pool
    running = np.full((*q.shape[:2], geometry.v_dim + 2), np.nan, np.float32)
    for number, call in enumerate(calls):
        attention.attend_prefill(
            q, pool, geometry, call, slots, running, fresh=number == 0, first_position=first_position, window=window,
            round_q=round_q,
        )
    out = np.full((*q.shape[:2], geometry.v_dim), np.nan, np.float32)
    attention.finish_prefill(running, out)
    return out
