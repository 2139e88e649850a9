"""A model ready to run: embedding, a mixer and a feed-forward part per layer, output norm and head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvs_core.device.base import Buffer, Device, Weight
from kvs_core.device.workspace import BufferSpec, Workspace
from kvs_core.memory.phases import Phase
from kvs_core.models.blocks import ACTIVATION, Attention, Batch, DeltaNet, FeedForward, KvView, Step, residual_buffers
from kvs_core.models.recurrent import RecurrentState
from kvs_core.models.spec import ModelSpec


def forward_buffers(spec: ModelSpec, rows: int) -> list[BufferSpec]:
    """The buffers of ``Model.forward`` for steps of up to ``rows`` rows: from the sizes alone, before any weight."""
    buffers = residual_buffers(rows, spec.n_embd)
    for layer in spec.layers:
        buffers += (Attention if layer.gdn is None else DeltaNet).buffers(layer, rows)
    buffers += FeedForward.buffers(rows, spec.n_ff)
    return list(dict.fromkeys(buffers))


def logit_buffers(spec: ModelSpec, rows: int) -> list[BufferSpec]:
    """The buffer of ``Model.logits`` for up to ``rows`` rows. No other call writes to it."""
    return [BufferSpec("logits", (rows, spec.n_vocab), ACTIVATION)]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the trunk."""

    mixer: Attention | DeltaNet
    feed_forward: FeedForward


class Model:
    """The forward pass of any arch, from its parts."""

    def __init__(
        self,
        spec: ModelSpec,
        device: Device,
        *,
        embedding: Weight,
        layers: Sequence[Layer],
        output_norm: Buffer,
        head: Weight,
    ) -> None:
        self.spec = spec
        self._ops = device.ops
        self._embedding = embedding
        self._layers = tuple(layers)
        self._output_norm = output_norm
        self._head = head

    def forward(self, batch: Batch, kv: KvView, state: RecurrentState | None, ws: Workspace) -> Buffer:
        """Run a step and return its hidden rows after output_norm, [T, E], in the workspace until the next call.

        Adds the step's keys and values to ``kv`` and begins a step of ``state``: the caller settles or drops both.
        ``state`` may be None for a model without recurrent layers. ``ws`` holds at least ``forward_buffers(spec, T)``.
        """
        assert 0 <= batch.tokens.min() <= batch.tokens.max() < self.spec.n_vocab, "a token outside the vocabulary"
        if state is not None:
            state.begin(batch.phase, batch.rows)
        step = Step(self._ops, batch, kv, state, ws, self.spec.rms_eps)
        self._ops.embed(self._embedding, batch.tokens, step.rows("x"))
        for layer in self._layers:
            layer.mixer.add_to(step)
            layer.feed_forward.add_to(step)
        return step.normed(self._output_norm)

    def logits(self, hidden_rows: Buffer, ws: Workspace) -> Buffer:
        """[n, V] of hidden rows [n, E]: always as in decode, so that a row's bits do not depend on the others."""
        out = ws.rows("logits", len(hidden_rows))
        self._ops.matmul(hidden_rows, self._head, out, phase=Phase.DECODE)
        return out
