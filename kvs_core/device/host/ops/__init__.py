"""The host's ops, assembled: the reference numbers that every other device is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvs_core.device.base import StepInputs
from kvs_core.device.host.ops import attention, basic, experts, gdn, kv_shift, kv_write, per_layer
from kvs_core.device.host.workers import Team
from kvs_core.device.operands import (
    Activation,
    AttentionParams,
    Buffer,
    ExpertWeights,
    MixtureWeights,
    PerLayerWeights,
    Weight,
)
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import PageGeometry
from kvs_core.paging.shift import PageMove
from kvs_core.paging.spans import LayerPlan, row_spans


class HostOps:
    """``Ops`` on NumPy arrays. An op is done when it returns; no bit depends on the team's number of threads."""

    def __init__(self, team: Team, *, round_q: bool = False) -> None:
        """``round_q``: attention rounds queries to q8_0 when keys are quantised, as llama.cpp's CPU code does."""
        self._team = team
        self._round_q = round_q
        self._inputs: StepInputs | None = None
        self._turn = 0

    zero_page = staticmethod(kv_write.zero_page)
    prefill_sums = staticmethod(attention.prefill_sums)
    log_sums = staticmethod(attention.log_sums)
    gdn_decode = staticmethod(gdn.gdn_decode)
    gdn_apply = staticmethod(gdn.gdn_apply)
    gdn_prefill = staticmethod(gdn.gdn_prefill)

    def begin_step(self, inputs: StepInputs) -> None:
        """See ``Device.begin_step``."""
        self._inputs = inputs

    def begin_shift(self, positions: int) -> None:
        """See ``Device.begin_shift``."""
        self._turn = positions

    def embed(self, table: Weight, x: Buffer, *, factor: float = 1.0) -> None:
        """See ``Ops.embed``."""
        basic.embed(table, self._step.tokens, x)
        if factor != 1.0:
            basic.scale(x, factor)

    def project(self, x: Buffer, norm: Buffer, weight: Weight, out: Buffer, *, eps: float, phase: Phase) -> None:
        """See ``Ops.project``."""
        normed = np.empty_like(x)
        basic.rms_norm(x, norm, normed, eps=eps)
        basic.matmul(normed, weight, out, phase=phase, team=self._team)

    def project_gated(
        self, x: Buffer, norm: Buffer, weight: Weight, out: Buffer, *, eps: float, phase: Phase,
        activation: Activation = Activation.SILU,
    ) -> None:
        """See ``Ops.project_gated``."""
        rows = np.empty((len(x), weight.n_out), np.float32)
        self.project(x, norm, weight, rows, eps=eps, phase=phase)
        basic.gated(rows, out, activation)

    def add_projected(self, rows: Buffer, weight: Weight, x: Buffer, *, phase: Phase) -> None:
        """See ``Ops.add_projected``."""
        out = np.empty_like(x)
        basic.matmul(rows, weight, out, phase=phase, team=self._team)
        x += out

    def add_normed(self, rows: Buffer, weight: Weight, norm: Buffer, x: Buffer, *, eps: float, phase: Phase) -> None:
        """See ``Ops.add_normed``."""
        out = np.empty_like(x)
        basic.matmul(rows, weight, out, phase=phase, team=self._team)
        basic.rms_norm(out, norm, out, eps=eps)
        x += out

    def add_experts(self, x: Buffer, norm: Buffer, weights: ExpertWeights, *, eps: float, phase: Phase) -> None:
        """See ``Ops.add_experts``."""
        experts.add_experts(x, norm, weights, eps=eps, phase=phase, team=self._team)

    def add_mixture(self, x: Buffer, weights: MixtureWeights, *, eps: float, phase: Phase) -> None:
        """See ``Ops.add_mixture``."""
        experts.add_mixture(x, weights, eps=eps, phase=phase, team=self._team)

    def per_layer_inputs(self, x: Buffer, weights: PerLayerWeights, out: Buffer, *, eps: float, phase: Phase) -> None:
        """See ``Ops.per_layer_inputs``."""
        per_layer.inputs(self._step.tokens, x, weights, out, eps=eps, phase=phase, team=self._team)

    def add_per_layer(
        self, x: Buffer, inputs: Buffer, gate: Weight, project: Weight, norm: Buffer, *, eps: float, phase: Phase
    ) -> None:
        """See ``Ops.add_per_layer``."""
        per_layer.add(x, inputs, gate, project, norm, eps=eps, phase=phase, team=self._team)

    def scale(self, x: Buffer, factor: float) -> None:
        """See ``Ops.scale``."""
        basic.scale(x, factor)

    def top_logits(self, logits: Buffer, k: int) -> None:
        """See ``Ops.top_logits``. The host has all logits at hand."""

    def softcap(self, logits: Buffer, cap: float) -> None:
        """See ``Ops.softcap``."""
        basic.softcap(logits, cap)

    def rms_norm(self, x: Buffer, norm: Buffer, out: Buffer, *, eps: float) -> None:
        """See ``Ops.rms_norm``."""
        basic.rms_norm(x, norm, out, eps=eps)

    def take_kept(self, rows: Buffer, out: Buffer) -> None:
        """See ``Ops.take_kept``."""
        out[0] = rows[self._step.kept]

    def clear(self, buffer: Buffer) -> None:
        """See ``Ops.clear``."""
        buffer.fill(0)

    def load_plan(self, layer: int, rows: int, plan: LayerPlan) -> LayerPlan:
        """See ``Ops.load_plan``. Plans are read as they are."""
        return plan

    def write_kv(
        self, y: Buffer, params: AttentionParams, q: Buffer, pool: Buffer, geometry: PageGeometry, plan: LayerPlan, *,
        phase: Phase,
    ) -> None:
        """See ``Ops.write_kv``."""
        rows, position = len(y), self._step.first_position
        heads, kv_heads, k_dim, v_dim = params.heads, params.kv_heads, params.k_dim, params.v_dim
        queries = y[:, : params.q_columns].reshape(rows, heads, -1)[..., :k_dim]
        q = q[:rows]
        if params.q_norm is None:
            q[...] = queries
        else:
            basic.rms_norm(queries, params.q_norm, q, eps=params.eps)
        basic.rope(q, position, params.rope)
        basic.scale(q, params.scale)
        if geometry.k_rotation:
            basic.hadamard(q, geometry.k_rotation)
        if params.shares:
            return
        keys, values = np.split(y[:, params.q_columns :], [kv_heads * k_dim], axis=1)
        k, v = keys.reshape(rows, kv_heads, k_dim).copy(), values.reshape(rows, kv_heads, v_dim).copy()
        if params.k_norm is not None:
            basic.rms_norm(k, params.k_norm, k, eps=params.eps)
        basic.rope(k, position, params.rope)
        if params.v_norm:
            basic.rms_norm(v, np.float32(1.0), v, eps=params.eps)
        if geometry.k_rotation:
            basic.hadamard(k, geometry.k_rotation)
        if geometry.v_rotation:
            basic.hadamard(v, geometry.v_rotation)
        kv_write.kv_write(k, v, pool, geometry, row_spans(position, rows, geometry.page_tokens, plan.slots))

    def shift_rows(
        self, page: Buffer, sources: Sequence[Buffer], params: AttentionParams, geometry: PageGeometry, move: PageMove
    ) -> None:
        """See ``Ops.shift_rows``."""
        kv_shift.shift_rows(page, sources, geometry, params.rope, move, positions=self._turn)

    def attend_decode(
        self, q: Buffer, params: AttentionParams, pool: Buffer, geometry: PageGeometry, plan: LayerPlan, call: int,
        scratch: Buffer,
    ) -> None:
        """See ``Ops.attend_decode``."""
        attention.attend_decode(
            q[: self._rows], pool, geometry, plan.calls[call].parts, plan.slots, scratch,
            first_position=self._step.first_position, window=params.window, round_q=self._round_q,
        )

    def fold(self, params: AttentionParams, plan: LayerPlan, call: int, scratch: Buffer, segments: Buffer) -> None:
        """See ``Ops.fold``."""
        attention.fold(scratch, segments, plan.calls[call].folds)

    def finish_decode(
        self, y: Buffer, params: AttentionParams, geometry: PageGeometry, plan: LayerPlan, scratch: Buffer,
        segments: Buffer, out: Buffer,
    ) -> None:
        """See ``Ops.finish_decode``."""
        attention.fold(scratch, segments, plan.last_folds)
        heads = out.reshape(len(out), params.heads, params.v_dim)
        attention.finish_decode(segments, plan.segments, heads)
        _unrotate_and_gate(heads, y, params, geometry)

    def attend_prefill(
        self, q: Buffer, params: AttentionParams, pool: Buffer, geometry: PageGeometry, plan: LayerPlan, pages: range,
        running: Buffer, *, fresh: bool,
    ) -> None:
        """See ``Ops.attend_prefill``."""
        attention.attend_prefill(
            q[: self._rows], pool, geometry, pages, plan.slots, running,
            fresh=fresh, first_position=self._step.first_position, window=params.window, round_q=self._round_q,
        )

    def finish_prefill(
        self, y: Buffer, params: AttentionParams, geometry: PageGeometry, running: Buffer, out: Buffer
    ) -> None:
        """See ``Ops.finish_prefill``."""
        heads = out.reshape(len(out), params.heads, params.v_dim)
        attention.finish_prefill(running, heads)
        _unrotate_and_gate(heads, y, params, geometry)

    @property
    def _step(self) -> StepInputs:
        assert self._inputs is not None, "an op outside a step"
        return self._inputs

    @property
    def _rows(self) -> int:
        return len(self._step.tokens)


def _unrotate_and_gate(heads: Buffer, y: Buffer, params: AttentionParams, geometry: PageGeometry) -> None:
    """Undo V's rotation in rows [T, H, Dv], then multiply by sigmoid(gate) of their projected rows."""
    if geometry.v_rotation:
        basic.hadamard(heads, geometry.v_rotation)
    if params.gated:
        basic.gate_heads(heads, y[:, : params.q_columns].reshape(len(y), params.heads, -1)[..., params.k_dim :])
