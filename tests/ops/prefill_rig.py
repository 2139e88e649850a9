"""Prefill attention as a layer runs it, for tests of its kernels: cases, and a run on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvs_core.device.cuda.kernel import address
from kvs_core.device.cuda.ops.attend_prefill import AttendPrefill
from kvs_core.device.host.ops import basic, kv_codec
from kvs_core.device.operands import AttentionParams
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import KvType, PageGeometry, PageOrder
from tests.ops import kv_pages
from tests.ops.paged import POISON
from tests.reference import kv_fragments

# Keys, values and weights in float16 (2^-11), values about 1 and scores up to about 8, against float64.
CLOSE = 4e-3


@dataclass(frozen=True)
class Case:
    """T rows from ``position`` on of an attention layer, and random keys and values up to the last row."""

    geometry: PageGeometry
    rows: int
    position: int
    per_kv_head: int = 2
    gated: bool = False
    seed: int = 0
    window: int = 0

    @property
    def params(self) -> AttentionParams:
        """The layer; what concerns the writing of keys alone is left out."""
        g = self.geometry
        return AttentionParams(
            g.kv_heads * self.per_kv_head, g.kv_heads, g.k_dim, g.v_dim, self.gated, scale=1.0, rope=None, eps=0.0,
            window=self.window,
        )

    @property
    def tokens(self) -> int:
        """Positions that have keys."""
        return self.position + self.rows

    def _normal(self, salt: int, *shape: int) -> np.ndarray:
        return np.random.default_rng((self.seed, salt)).standard_normal(shape).astype(np.float32)

    @cached_property
    def q(self) -> np.ndarray:
        """float16 [T, H, Dk], spread so that some keys stand out."""
        rows = self._normal(1, self.rows, self.params.heads, self.geometry.k_dim)
        return np.asarray(3 * rows / self.geometry.k_dim**0.5, np.float16)

    @cached_property
    def y(self) -> np.ndarray:
        """float32 [T, columns]: only the gates are read."""
        return self._normal(2, self.rows, self.params.columns)

    @property
    def first_seen(self) -> int:
        """The first token that a row sees."""
        return max(0, self.position + 1 - self.window) if self.window else 0

    @cached_property
    def pages(self) -> np.ndarray:
        """uint8 [pages, page_bytes]; rows behind the last token are zero."""
        return self.stored(0)

    def stored(self, spoilt: int) -> np.ndarray:
        """The pages, of which the first ``spoilt`` tokens are poison."""
        g = self.geometry
        count = g.pages_of(self.tokens)
        parts = []
        for salt, kv_type, dim in ((3, g.k_type, g.k_dim), (4, g.v_type, g.v_dim)):
            data = kv_codec.encode(kv_type, self._normal(salt, count * g.page_tokens, g.kv_heads, dim))
            data[self.tokens :] = 0
            data[:spoilt] = POISON
            by_head = data.reshape(count, g.page_tokens, g.kv_heads, -1).swapaxes(1, 2)
            parts.append(by_head.reshape(count, g.kv_heads, -1))
        pages = np.concatenate(parts, axis=2).reshape(count, g.page_bytes)
        if g.order is PageOrder.FRAGMENTS:
            pages = np.stack([kv_fragments.pack(page, g.kv_heads) for page in pages])
        return pages

    def _stored(self, part: int) -> np.ndarray:
        """K (0) or V (1) as stored, float64 [G, S, D]."""
        both = [kv_pages.dequantise(page, self.geometry) for page in self.pages]
        return np.concatenate([pair[part] for pair in both], axis=1).astype(np.float64)

    def _scores(self) -> np.ndarray:
        """In units of log2, float64 [T, G, R, S]; -inf of keys that a row does not see."""
        k = self._stored(0)
        q = self.q.astype(np.float64).reshape(self.rows, self.geometry.kv_heads, self.per_kv_head, -1)
        scores = np.einsum("tgrd,gsd->tgrs", q, k)
        ahead = np.arange(k.shape[1]) - self.position - np.arange(self.rows)[:, None]
        hidden = (ahead > 0) | (ahead <= -self.window if self.window else False)
        return np.where(hidden[:, None, None], -np.inf, scores)

    def log_sums(self) -> np.ndarray:
        """ln of the sum of the weights that a softmax divides by, float64 [T, H]."""
        return np.log(np.exp2(self._scores()).sum(axis=-1)).reshape(self.rows, -1)

    def expected(self) -> np.ndarray:
        """Softmax attention in float64 over the numbers as stored, with V's rotation undone, and gated: [T, H * Dv]."""
        scores, v = self._scores(), self._stored(1)
        weights = np.exp2(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out = np.einsum("tgrs,gsd->tgrd", weights, v).reshape(self.rows, self.params.heads, -1)
        if self.geometry.v_rotation:
            basic.hadamard(out, self.geometry.v_rotation)
        if self.gated:
            heads = self.y[:, : self.params.q_columns].reshape(self.rows, self.params.heads, 2, -1)
            out /= 1 + np.exp(-heads[:, :, 1].astype(np.float64))
        return np.asarray(out).reshape(self.rows, -1)


class Confined:
    """A launcher that says it has less shared memory than it has."""

    def __init__(self, launcher: Any, shared_bytes: int) -> None:
        self._launcher = launcher
        self.shared_bytes = shared_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launcher, name)


def attend(
    lab: Any, case: Case, *, slots: Sequence[int] | None = None, calls: Sequence[range] = (), shared_bytes: int = 0,
    spoilt: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """The running partial and the output. Free slots are poisoned, and the first ``spoilt`` tokens; without ``calls``
    all pages come in one."""
    count = len(case.pages)
    slots = range(count) if slots is None else slots
    pool = np.full((max(slots) + 2, case.geometry.page_bytes), POISON, np.uint8)
    pool[list(slots)] = case.stored(spoilt) if spoilt else case.pages
    table = lab.array(np.array(slots, np.int32))
    context = lab.context(case.rows, position=case.position, phase=Phase.PREFILL)
    if shared_bytes:
        if shared_bytes > context.launcher.shared_bytes:
            pytest.skip(f"a block has {context.launcher.shared_bytes} bytes of shared memory here")
        context = replace(context, launcher=Confined(context.launcher, shared_bytes))
    ops = AttendPrefill(context)
    plan: Any = SimpleNamespace(slots=address(table))
    q, y, pool = lab.array(case.q), lab.array(case.y), lab.array(pool)
    running = lab.empty((case.rows, case.params.heads, case.geometry.v_dim + 2), np.float32)
    for number, call in enumerate(calls or [range(count)]):
        ops.attend_prefill(q, case.params, pool, case.geometry, plan, call, running, fresh=number == 0)
    out = lab.empty((case.rows, case.params.heads * case.geometry.v_dim), np.float32)
    ops.finish_prefill(y, case.params, case.geometry, running, out)
    return lab.host(running), lab.host(out)


def check(lab: Any, case: Case, **how: Any) -> None:
    """The output is close to the expected one."""
    _, out = attend(lab, case, **how)
    error = np.abs(out - case.expected())
    assert error.max() < CLOSE, f"largest error {error.max():.2e}, mean {error.mean():.2e}"
    assert error.mean() < CLOSE / 8, f"largest error {error.max():.2e}, mean {error.mean():.2e}"


def geometry_of(
    k_type: KvType = KvType.F16, v_type: KvType = KvType.F16, *, dim: int = 64, v_dim: int | None = None,
    page_tokens: int = 32, kv_heads: int = 1, v_rotation: int = 0,
) -> PageGeometry:
    """Small pages, but for what is given."""
    return PageGeometry(page_tokens, kv_heads, dim, v_dim or dim, k_type, v_type, v_rotation=v_rotation)
