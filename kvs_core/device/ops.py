"""What a device computes: the one list of ops, each with its shapes, its promise and its source.

Host and CUDA have an implementation each and keep the same promises. What ops take is in ``operands.py``; the device
that owns them, and the step that they belong to, in ``base.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

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
    Weight,
)
from kvs_core.memory.phases import Phase
from kvs_core.paging.geometry import PageGeometry
from kvs_core.paging.shift import PageMove
from kvs_core.paging.spans import LayerPlan

# Whose plan ``Ops.load_plan`` takes, where it is not that of a decode step of so many rows.
PREFILL_PLAN = 0
DRAFT_PLAN = -1   # one row that attends to what is resident
TILES_PLAN = -2   # a decode step in tiles


class Ops(Protocol):
    """What models and streaming compute with. All on the compute stream; T = rows of the step.

    ``phase`` picks the kernel family: DECODE ops give a row the same bits however many rows share the step; a PREFILL
    op's bits may depend on T. A device that captures steps reads positions, tokens and pending rows of a DECODE step
    from the ``StepInputs`` on the device, so they are no arguments; a plan's pages from what ``load_plan`` put there.
    """

    def embed(self, table: Weight, x: Buffer, *, factor: float = 1.0) -> None:
        """x[t] = row tokens[t] of the table times factor, for the step's tokens. The first op of a step.   x [T, E]"""
        ...

    def project(self, x: Buffer, norm: Buffer, weight: Weight, out: Buffer, *, eps: float, phase: Phase) -> None:
        """out = rms(x) * norm @ weight.T + bias, where rms(x) = x / sqrt(mean(x^2) + eps).

        x [T, E]; norm [E]; out [T, n_out]
        """
        ...

    def project_gated(
        self, x: Buffer, norm: Buffer, weight: Weight, out: Buffer, *, eps: float, phase: Phase,
        activation: Activation = Activation.SILU,
    ) -> None:
        """out = activation(g) * u, where g and u are the halves of ``project``'s rows.   weight [2 F, E]; out [T, F]

        out is what ``add_projected`` takes next; its form on the device is the device's own.
        """
        ...

    def add_projected(self, rows: Buffer, weight: Weight, x: Buffer, *, phase: Phase) -> None:
        """x += rows @ weight.T + bias   rows [T, n_in]; x [T, E]

        In DECODE a device may keep the sum back until the next op that takes x.
        """
        ...

    def add_normed(self, rows: Buffer, weight: Weight, norm: Buffer, x: Buffer, *, eps: float, phase: Phase) -> None:
        """x += rms(rows @ weight.T + bias) * norm   rows [T, n_in]; norm [E]; x [T, E]

        rows as in ``add_projected``. Source: Gemma 2 report, 2024, section 2 (post-norm).
        """
        ...

    def add_experts(self, x: Buffer, norm: Buffer, weights: ExpertWeights, *, eps: float, phase: Phase) -> None:
        """x += sum over a row's experts e of w_e f_e(y), then sigmoid(y . shared_gate) f_shared(y), y = rms(x) * norm.

        f(y) = down(activation(gate(y)) * up(y)), with the matrices of that expert. A row's experts are the ``used``
        ones of the largest logits y @ router.T, in float32, of equal ones the lower numbers; w is the softmax over all
        experts, scaled so that those of the row sum to 1. They are added in the order of their numbers, the shared one
        last.   x [T, E]; norm [E]
        Source: Qwen3 report, arXiv 2505.09388; the shared expert: Qwen2 report, arXiv 2407.10671; ggml's qwen35moe.
        """
        ...

    def add_mixture(self, x: Buffer, weights: MixtureWeights, *, eps: float, phase: Phase) -> None:
        """x += rms(rms(f(rms(x) * norm)) * dense_norm + rms(m(rms(x) * experts_norm)) * sum_norm) * post_norm

        f is the dense part; m sums, as in ``add_experts``, what a row's experts make of it, each times its scale. They
        are chosen by rms(x) / sqrt(E) * router_scale. All gates have the experts' activation.   x [T, E]
        Source: ggml's gemma4.
        """
        ...

    def per_layer_inputs(self, x: Buffer, weights: PerLayerWeights, out: Buffer, *, eps: float, phase: Phase) -> None:
        """out[t, i] = (sqrt(P) table[token t, i] + rms((x @ project.T)[t, i] / sqrt(E)) * norm) / sqrt(2) per layer i.

        Directly behind ``embed``.   x [T, E]; out [T, L P]   Source: ggml's gemma4.
        """
        ...

    def add_per_layer(
        self, x: Buffer, inputs: Buffer, gate: Weight, project: Weight, norm: Buffer, *, eps: float, phase: Phase
    ) -> None:
        """x += rms((gelu(x @ gate.T) * inputs) @ project.T) * norm

        x [T, E]; inputs [T, P], strided: a layer's part of ``per_layer_inputs``; gate [P, E]; project [E, P]; norm [E]
        """
        ...

    def scale(self, x: Buffer, factor: float) -> None:
        """x *= factor, in the same form in both phases.   x [T, E], the residual rows"""
        ...

    def load_plan(self, layer: int, rows: int, plan: LayerPlan) -> Any:
        """Make the pages of an attention layer known; what is returned stands for the plan in the ops below.

        It replaces the layer's plan for decode steps of ``rows`` rows, or for those that ``PREFILL_PLAN`` and its kind
        name.
        Captured work stays valid if ``plan.shape`` has not changed.
        """
        ...

    def write_kv(
        self, y: Buffer, params: AttentionParams, q: Buffer, pool: Buffer, geometry: PageGeometry, plan: Any, *,
        phase: Phase,
    ) -> None:
        """Turn projected rows into queries and store their keys and values in the plan's pages.

        Norms, rotary embedding, scale (queries) and, where the geometry says so, Hadamard rotation. Where the layer
        shares another's, there are queries alone and nothing is stored.
        y [T, params.columns]; q [T rounded up to 8, H, Dk] float32, or as many bytes in the device's own form;
        pool [slots, page_bytes] uint8
        """
        ...

    def attend_decode(
        self, q: Buffer, params: AttentionParams, pool: Buffer, geometry: PageGeometry, plan: Any, call: int,
        scratch: Buffer,
    ) -> None:
        """Add the attention of T rows over the pages of the plan's call ``call`` to the partials of their groups.

        scratch  [rows, T, H, Dv + 2] float32: per scratch row a group's partial (acc, l, m of a running softmax), in
                 the device's own order
        A row sees keys up to its own position, of those the last ``params.window`` if that is not 0. A group's pages
        are added one by one in logical order, so the bits do not depend on slots, nor on how a group is split into
        calls. Pages before all that the rows see add exactly nothing: a plan may leave out such groups, whole ones,
        and the bits are the same. What they hold, and what rows of a page hold that no row sees, is not looked at.
        The caller has waited for ready of every slot; it records consumed after this call.
        """
        ...

    def fold(self, params: AttentionParams, plan: Any, call: int, scratch: Buffer, segments: Buffer) -> None:
        """Merge the group partials of the call's folds into segment partials, in order.   segments [n, T, H, Dv + 2]"""
        ...

    def finish_decode(
        self, y: Buffer, params: AttentionParams, geometry: PageGeometry, plan: Any, scratch: Buffer, segments: Buffer,
        out: Buffer,
    ) -> None:
        """Do the plan's last folds, merge the segments in order, normalise, undo V's rotation, gate.   out [T, H * Dv]

        out is what ``add_projected`` takes next; its form on the device is the device's own.
        """
        ...

    def attend_prefill(
        self, q: Buffer, params: AttentionParams, pool: Buffer, geometry: PageGeometry, plan: Any, pages: range,
        running: Buffer, *, fresh: bool,
    ) -> None:
        """Add T rows' attention over consecutive pages to the running partial, page by page in logical order.

        running [T, H, Dv + 2] as a scratch row in ``attend_decode``. Calls for one layer come in logical order. A row
        sees the same keys as there; pages before all that the rows see may be left out.
        """
        ...

    def finish_prefill(
        self, y: Buffer, params: AttentionParams, geometry: PageGeometry, running: Buffer, out: Buffer
    ) -> None:
        """Normalise, undo V's rotation, gate.   running [T, H, Dv + 2]; out [T, H * Dv]"""
        ...

    def prefill_sums(self, running: Buffer) -> Buffer:
        """Of a running partial the sum of weights and the largest score of each row and head: [T, H, 2], no copy."""
        ...

    def log_sums(self, sums: np.ndarray) -> np.ndarray:
        """Of ``prefill_sums``, downloaded: ln of the sum of exp(score) over the keys added, float64 [T, H]."""
        ...

    def shift_rows(
        self, page: Buffer, sources: Sequence[Buffer], params: AttentionParams, geometry: PageGeometry, move: PageMove
    ) -> None:
        """Move rows of ``sources`` into ``page`` as ``move`` says, with the bits of the host's op on every device, but
        that a GPU takes float32 values below the normal ones for 0.

        Keys are turned by the positions that ``Device.begin_shift`` was told, and stored anew; values' bytes are moved.
        page, sources  uint8 [page_bytes] each; the page may be one of the sources only where the device is the host
        The caller has waited for ready of all of them; it records consumed after this call.
        """
        ...

    def zero_page(self, pool: Buffer, geometry: PageGeometry, slot: int) -> None:
        """Clear a slot that becomes a tail page: stale scales times zero weights would be NaN."""
        ...

    def gdn_decode(
        self, y: Buffer, weights: GdnWeights, shape: GdnShape, state: GdnState, out: Buffer, *, position: int,
        pending: int, store: bool = True,
    ) -> None:
        """Gated DeltaNet rows with deferred commit; row 0 is at ``position``.

        First applies the rows at positions [position - pending, position), which an earlier step left in the rings, to
        ``state`` and, if ``store``, stores it; then computes its own T rows on a copy, without storing the state, and
        leaves them in the rings. A device that captures steps reads these three from the step's inputs.
        y [T, shape.columns] before the convolution; out [T, v_heads * d_v]: normed and gated by silu(z), and what
        ``add_projected`` takes next.   Source: Yang et al., Gated Delta Networks, 2024.
        """
        ...

    def top_logits(self, logits: Buffer, k: int) -> tuple[Buffer, Buffer] | None:
        """The k largest of each row, largest first, of equal ones the lower id first; NaN counts as largest.

        logits [T, V]; results int32 and float32 [T, k], good until the next call. None if k is more than a device can.
        """
        ...

    def softcap(self, logits: Buffer, cap: float) -> None:
        """logits = cap * tanh(logits / cap), in place.   logits [T, V]; cap > 0. Source: as ``add_normed``."""
        ...

    def rms_norm(self, x: Buffer, norm: Buffer, out: Buffer, *, eps: float) -> None:
        """out = rms(x) * norm, in the same form in both phases.   x, out [T, n], out perhaps strided; norm [n]"""
        ...

    def take_kept(self, rows: Buffer, out: Buffer) -> None:
        """out[0] = rows[kept], where ``kept`` is the step's input.   rows [n, E]; out [1, E], perhaps rows[0] itself"""
        ...

    def clear(self, buffer: Buffer) -> None:
        """Every byte becomes 0. Of whole 16 bytes."""
        ...

    def gdn_apply(self, shape: GdnShape, state: GdnState, *, position: int, pending: int) -> None:
        """Apply the rows at positions [position - pending, position) to the state: the bits ``gdn_decode`` gives."""
        ...

    def gdn_prefill(
        self, y: Buffer, weights: GdnWeights, shape: GdnShape, state: GdnState, out: Buffer, *, position: int
    ) -> None:
        """The same for many rows, in chunks, storing the state after the last one. No rows may be pending."""
        ...
