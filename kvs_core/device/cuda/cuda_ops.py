"""The CUDA device's ops, assembled from their families. Each launches kernels and returns; none knows CuPy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np

from kvs_core.device.base import Capabilities, StepInputs, StepSizes
from kvs_core.device.cuda.context import Context
from kvs_core.device.cuda.kernel import Gemm, Kernel, Launcher
from kvs_core.device.cuda.matrices import CudaWeight, ExpertStack
from kvs_core.device.cuda.ops import attend_decode, attend_prefill, embed, gdn, shift_kv, write_kv
from kvs_core.device.cuda.ops.attend_decode import LEAST_SHARED_FOR_512, AttendDecode
from kvs_core.device.cuda.ops.attend_prefill import AttendPrefill
from kvs_core.device.cuda.ops.embed import Embed, Rope
from kvs_core.device.cuda.ops.experts import Experts
from kvs_core.device.cuda.ops.experts import kernels_for as expert_kernels
from kvs_core.device.cuda.ops.gdn import Gdn
from kvs_core.device.cuda.ops.matmul import MAX_ROWS, DecodeMatmul
from kvs_core.device.cuda.ops.norm import Norm
from kvs_core.device.cuda.ops.norm import instances as norm_instances
from kvs_core.device.cuda.ops.per_layer import PerLayer
from kvs_core.device.cuda.ops.per_layer import instances as per_layer_instances
from kvs_core.device.cuda.ops.prefill_matmul import PrefillMatmul
from kvs_core.device.cuda.ops.prefill_matmul import instances as prefill_matmul_instances
from kvs_core.device.cuda.ops.sample import MAX_TOP_K, Sample
from kvs_core.device.cuda.ops.sample import instances as sample_instances
from kvs_core.device.cuda.ops.shift_kv import ShiftKv
from kvs_core.device.cuda.ops.write_kv import WriteKv
from kvs_core.device.cuda.plan import DevicePlan
from kvs_core.device.cuda.steps import PlanTables
from kvs_core.device.cuda.weights import Upload
from kvs_core.device.operands import (
    Activation,
    AttentionParams,
    Buffer,
    ExpertWeights,
    GdnShape,
    GdnState,
    GdnWeights,
    MixtureWeights,
    PerLayerWeights,
    RopeTable,
    Weight,
)
from kvs_core.device.workspace import BufferSpec, Workspace
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import KvType, PageGeometry, PageOrder
from kvs_core.paging.shift import PageMove
from kvs_core.paging.spans import LayerPlan

_LEAST_HEAD_DIM, _MOST_HEAD_DIM = 32, 256
_WIDE_HEAD_DIM = 512   # beside those, where there is shared memory for it


class CudaOps:
    """``Ops`` for buffers on one GPU."""

    def __init__(self, context: Context, gemm: Gemm, upload: Upload) -> None:
        """upload  puts a small host array on the device for good"""
        self._context = context
        self._step = context.step
        self._upload = upload
        self._embed = Embed(context)
        self._matmul = DecodeMatmul(context)
        self._prefill_matmul = PrefillMatmul(context, gemm, self._matmul.dequant)
        self._experts = Experts(context, self._matmul, self._prefill_matmul)
        self._norm = Norm(context)
        self._write = WriteKv(context)
        self._shift = ShiftKv(context)
        self._attend_decode = AttendDecode(context)
        self._attend_prefill = AttendPrefill(context)
        self._gdn = Gdn(context)
        self._sample = Sample(context)
        self._per_layer = PerLayer(context)
        self._plans: PlanTables | None = None
        self._tables: list[CudaWeight] = []
        self._names: tuple[str, ...] = ()

    # What the device asks of its ops.

    def capabilities(self, name: str) -> Capabilities:
        """What there are kernels for."""
        wide = {_WIDE_HEAD_DIM} if self._context.launcher.shared_bytes >= LEAST_SHARED_FOR_512 else set()
        return Capabilities(
            device=name,
            kv_pairs=frozenset(itertools.product(KvType, KvType)),
            head_dims=frozenset(range(_LEAST_HEAD_DIM, _MOST_HEAD_DIM + 1, 16)) | wide,
            max_decode_rows=MAX_ROWS,
        )

    def page_order(self, geometry: PageGeometry) -> PageOrder:
        """The order of bytes that such pages have: what the fastest kernel takes."""
        fragments = (
            (geometry.k_type, geometry.v_type) == (KvType.Q8_0, KvType.Q4_0)
            and geometry.k_dim == geometry.v_dim == geometry.page_tokens == 256
        )
        return PageOrder.FRAGMENTS if fragments else PageOrder.ROWS

    def scratch(self, phase: Phase, sizes: StepSizes) -> list[BufferSpec]:
        """The families' buffers."""
        families = (
            self._matmul, self._prefill_matmul, self._experts, self._gdn, self._sample, self._per_layer,
        )
        specs = [spec for family in families for spec in family.scratch(phase, sizes)]
        self._names = tuple(dict.fromkeys([*self._names, *(spec.name for spec in specs)]))
        return specs

    def bind_scratch(self, workspace: Workspace, phase: Phase) -> None:
        """Use these buffers from now on."""
        self._context.scratch = {name: workspace[name] for name in self._names if name in workspace}
        self._context.phase = phase

    def load_rope(self, table: RopeTable) -> Rope:
        """A rotary embedding that ``embed`` fills for each step."""
        return self._embed.add_rope(table, self._upload)

    def reserve(self, tokens: Buffer, plans: PlanTables, max_rows: int) -> None:
        """Room for what steps are told."""
        self._context.tokens = tokens
        self._plans = plans
        self._embed.reserve(max(max_rows, MAX_ROWS), self._upload)

    def kernels(
        self, weights: Sequence[CudaWeight], experts: Sequence[ExpertStack], tables: Sequence[CudaWeight],
        geometries: Sequence[PageGeometry], attention: Sequence[AttentionParams], recurrent: Sequence[GdnShape],
        activation: Activation,
    ) -> list[Kernel]:
        """All that a model with these parts launches."""
        launcher: Launcher = self._context.launcher
        arch = launcher.arch
        kernels = list(self._matmul.kernels_for(weights, gated_norm=bool(recurrent), activation=activation))
        if experts:
            kernels += expert_kernels(experts, activation)
        for table in tables:
            kernels += embed.kernels_for(table.sections[0].quant)
        for params, geometry in zip(attention, geometries, strict=True):
            kernels += write_kv.kernels_for(params, geometry)
            if not recurrent:   # whose state cannot be shifted
                kernels += shift_kv.kernels_for(params, geometry)
            kernels += attend_decode.kernels_for(params, geometry, launcher)
            kernels += attend_prefill.kernels_for(geometry, launcher.shared_bytes, window=params.window)
        for shape in recurrent:
            kernels += gdn.kernels_for(shape, launcher.shared_bytes)
        kernels += itertools.chain(prefill_matmul_instances(arch), sample_instances(arch), norm_instances(arch))
        if len(tables) > 1:   # embeddings per layer have a table of their own
            kernels += per_layer_instances(arch)
        return list(dict.fromkeys(kernels))

    def begin_step(self, inputs: StepInputs) -> None:
        """The step that the ops from here on belong to."""
        self._context.step, self._context.first_row = self._step, 0
        self._context.rows = len(inputs.tokens)
        self._context.position = inputs.first_position
        self._context.phase = inputs.phase
        self._matmul.begin_step()

    def begin_tiles(self) -> None:
        """A decode step in tiles."""
        self._context.phase = Phase.DECODE
        self._matmul.begin_step()

    def use_tile(self, index: int, step: Buffer, rows: int) -> None:
        """The tile that the ops from here on belong to: its step table and its rows."""
        self._context.step, self._context.first_row, self._context.rows = step, MAX_ROWS * index, rows

    # Ops.

    def embed(self, table: Weight, x: Buffer, *, factor: float = 1.0) -> None:
        """See ``Ops.embed``."""
        assert isinstance(table, CudaWeight)
        self._embed.run(table, x, factor)

    def project(self, x: Buffer, norm: Buffer, weight: Weight, out: Buffer, *, eps: float, phase: Phase) -> None:
        """See ``Ops.project``."""
        assert isinstance(weight, CudaWeight)
        family = self._matmul if phase is Phase.DECODE else self._prefill_matmul
        family.project(x, norm, weight, out, eps=eps)

    def project_gated(
        self, x: Buffer, norm: Buffer, weight: Weight, out: Buffer, *, eps: float, phase: Phase,
        activation: Activation = Activation.SILU,
    ) -> None:
        """See ``Ops.project_gated``."""
        assert isinstance(weight, CudaWeight)
        family = self._matmul if phase is Phase.DECODE else self._prefill_matmul
        family.project_gated(x, norm, weight, out, eps=eps, activation=activation)

    def add_projected(self, rows: Buffer, weight: Weight, x: Buffer, *, phase: Phase) -> None:
        """See ``Ops.add_projected``."""
        assert isinstance(weight, CudaWeight)
        family = self._matmul if phase is Phase.DECODE else self._prefill_matmul
        family.add_projected(rows, weight, x)

    def add_normed(self, rows: Buffer, weight: Weight, norm: Buffer, x: Buffer, *, eps: float, phase: Phase) -> None:
        """See ``Ops.add_normed``."""
        assert isinstance(weight, CudaWeight)
        family = self._matmul if phase is Phase.DECODE else self._prefill_matmul
        family.add_normed(rows, weight, norm, x, eps=eps)

    def add_experts(self, x: Buffer, norm: Buffer, weights: ExpertWeights, *, eps: float, phase: Phase) -> None:
        """See ``Ops.add_experts``."""
        self._experts.add(x, norm, weights, eps=eps, phase=phase)

    def add_mixture(self, x: Buffer, weights: MixtureWeights, *, eps: float, phase: Phase) -> None:
        """See ``Ops.add_mixture``."""
        self._experts.add_mixture(x, weights, eps=eps, phase=phase)

    def per_layer_inputs(self, x: Buffer, weights: PerLayerWeights, out: Buffer, *, eps: float, phase: Phase) -> None:
        """See ``Ops.per_layer_inputs``."""
        table = weights.table
        assert isinstance(table, CudaWeight)
        self._embed.rows(table, out, sqrt(len(weights.norm)))
        projected = self._product(x, weights.project, phase)
        self._per_layer.inputs(out, projected, weights.norm, x.shape[1], eps=eps)

    def add_per_layer(
        self, x: Buffer, inputs: Buffer, gate: Weight, project: Weight, norm: Buffer, *, eps: float, phase: Phase
    ) -> None:
        """See ``Ops.add_per_layer``."""
        rows = self._product(x, gate, phase)
        self._per_layer.gate(rows, inputs)
        self.add_normed(rows, project, norm, x, eps=eps, phase=phase)

    def _product(self, x: Buffer, weight: Weight, phase: Phase) -> Buffer:
        """x @ weight.T, in the scratch until the next.   x [T, n_in]; the result [T, n_out], contiguous"""
        out = self._per_layer.rows(len(x), weight.n_out)
        self._write.clear(out)
        self.add_projected(x, weight, out, phase=phase)
        if phase is Phase.DECODE:
            self._matmul.flush()
        return out

    def scale(self, x: Buffer, factor: float) -> None:
        """See ``Ops.scale``."""
        self._matmul.flush()
        self._norm.scale(x, factor)

    def load_plan(self, layer: int, rows: int, plan: LayerPlan) -> DevicePlan:
        """See ``Ops.load_plan``."""
        assert self._plans is not None
        return self._plans.load(layer, rows, plan)

    def write_kv(
        self, y: Buffer, params: AttentionParams, q: Buffer, pool: Buffer, geometry: PageGeometry, plan: Any, *,
        phase: Phase,
    ) -> None:
        """See ``Ops.write_kv``."""
        self._write.write_kv(y, params, q, pool, geometry, plan, phase=phase)

    def attend_decode(
        self, q: Buffer, params: AttentionParams, pool: Buffer, geometry: PageGeometry, plan: Any, call: int,
        scratch: Buffer,
    ) -> None:
        """See ``Ops.attend_decode``."""
        self._attend_decode.attend_decode(q, params, pool, geometry, plan, call, scratch)

    def fold(self, params: AttentionParams, plan: Any, call: int, scratch: Buffer, segments: Buffer) -> None:
        """See ``Ops.fold``."""
        self._attend_decode.fold(params, plan, call, scratch, segments)

    def finish_decode(
        self, y: Buffer, params: AttentionParams, geometry: PageGeometry, plan: Any, scratch: Buffer, segments: Buffer,
        out: Buffer,
    ) -> None:
        """See ``Ops.finish_decode``."""
        self._attend_decode.finish_decode(y, params, geometry, plan, scratch, segments, out)

    def attend_prefill(
        self, q: Buffer, params: AttentionParams, pool: Buffer, geometry: PageGeometry, plan: Any, pages: range,
        running: Buffer, *, fresh: bool,
    ) -> None:
        """See ``Ops.attend_prefill``."""
        self._attend_prefill.attend_prefill(q, params, pool, geometry, plan, pages, running, fresh=fresh)

    def finish_prefill(
        self, y: Buffer, params: AttentionParams, geometry: PageGeometry, running: Buffer, out: Buffer
    ) -> None:
        """See ``Ops.finish_prefill``."""
        self._attend_prefill.finish_prefill(y, params, geometry, running, out)

    def prefill_sums(self, running: Buffer) -> Buffer:
        """See ``Ops.prefill_sums``."""
        return self._attend_prefill.prefill_sums(running)

    def log_sums(self, sums: np.ndarray) -> np.ndarray:
        """See ``Ops.log_sums``."""
        return self._attend_prefill.log_sums(sums)

    def top_logits(self, logits: Buffer, k: int) -> tuple[Buffer, Buffer] | None:
        """See ``Ops.top_logits``."""
        if k > min(MAX_TOP_K, logits.shape[1]):
            return None
        top = self._sample.top_k(logits, k)
        return top.ids, top.values

    def softcap(self, logits: Buffer, cap: float) -> None:
        """See ``Ops.softcap``."""
        self._norm.softcap(logits, cap)

    def rms_norm(self, x: Buffer, norm: Buffer, out: Buffer, *, eps: float) -> None:
        """See ``Ops.rms_norm``."""
        self._matmul.flush()
        self._norm.rms_norm(x, norm, out, eps=eps)

    def take_kept(self, rows: Buffer, out: Buffer) -> None:
        """See ``Ops.take_kept``."""
        self._norm.take_kept(rows, out)

    def clear(self, buffer: Buffer) -> None:
        """See ``Ops.clear``."""
        self._write.clear(buffer)

    def shift_rows(
        self, page: Buffer, sources: Sequence[Buffer], params: AttentionParams, geometry: PageGeometry, move: PageMove
    ) -> None:
        """See ``Ops.shift_rows``."""
        self._shift.shift_rows(page, sources, params, geometry, move)

    def zero_page(self, pool: Buffer, geometry: PageGeometry, slot: int) -> None:
        """See ``Ops.zero_page``."""
        self._write.zero_page(pool, geometry, slot)

    def gdn_decode(
        self, y: Buffer, weights: GdnWeights, shape: GdnShape, state: GdnState, out: Buffer, *, position: int,
        pending: int, store: bool = True,
    ) -> None:
        """See ``Ops.gdn_decode``."""
        self._gdn.gdn_decode(y, weights, shape, state, out, position=position, pending=pending, store=store)

    def gdn_apply(self, shape: GdnShape, state: GdnState, *, position: int, pending: int) -> None:
        """See ``Ops.gdn_apply``."""
        self._gdn.gdn_apply(shape, state, position=position, pending=pending)

    def gdn_prefill(
        self, y: Buffer, weights: GdnWeights, shape: GdnShape, state: GdnState, out: Buffer, *, position: int
    ) -> None:
        """See ``Ops.gdn_prefill``."""
        self._gdn.gdn_prefill(y, weights, shape, state, out, position=position)
