"""A model ready to run: embedding, a mixer and a feed-forward part per layer, output norm and head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from kvs_core.device.base import ExpertSizes, ModelDevice, StepSizes, Turn
from kvs_core.device.operands import AttentionParams, Buffer, GdnShape, PerLayerWeights, Weight, WeightPart
from kvs_core.device.workspace import BufferSpec, Workspace
from kvs_core.memory.phases import Phase
from kvs_core.models.blocks import (
    ACTIVATION,
    Attention,
    Batch,
    DeltaNet,
    Experts,
    FeedForward,
    KvView,
    LayerStates,
    Mixture,
    PerLayer,
    Step,
    attention_columns,
)
from kvs_core.models.nextn import NextN
from kvs_core.models.spec import ModelSpec


def forward_buffers(spec: ModelSpec, rows: int, *, nextn: bool = False) -> list[BufferSpec]:
    """The buffers of ``Model.forward`` for steps of up to ``rows`` rows: from the sizes alone, before any weight.

    nextn  with the MTP block
    """
    buffers = [BufferSpec("x", (rows, spec.n_embd), ACTIVATION)]
    if nextn:
        buffers += NextN.buffers(rows, spec.n_embd)
    for layer in (*spec.layers, *(spec.nextn if nextn else ())):
        buffers += (Attention if layer.gdn is None else DeltaNet).buffers(layer, rows)
        if spec.experts is None:
            buffers += FeedForward.buffers(rows, layer.n_ff or spec.n_ff)
    if spec.n_per_layer:
        buffers += PerLayer.buffers(rows, spec.n_layer * spec.n_per_layer)
    return list(dict.fromkeys(buffers))


def logit_buffers(spec: ModelSpec, rows: int) -> list[BufferSpec]:
    """The buffer of ``Model.logits`` for up to ``rows`` rows. No other call writes to it."""
    return [BufferSpec("logits", (rows, spec.n_vocab), ACTIVATION)]


def step_sizes(spec: ModelSpec, rows: int) -> StepSizes:
    """What a device's scratch for steps of up to ``rows`` rows depends on."""
    attention = [layer for layer in (*spec.layers, *spec.nextn) if layer.gdn is None]
    gdn = [layer.gdn for layer in spec.layers if layer.gdn is not None]
    inner = [layer.heads * layer.v_dim for layer in attention] + [shape.inner for shape in gdn]
    columns = [attention_columns(layer) for layer in attention] + [shape.columns for shape in gdn]
    experts = spec.experts
    n_ff = max(spec.n_ff, 0 if experts is None else experts.n_shared)   # of the part that all rows take
    return StepSizes(
        rows=rows,
        n_embd=spec.n_embd,
        widest_in=max((2 if spec.nextn else 1) * spec.n_embd, n_ff, *inner),
        widest_out=max(2 * n_ff, *columns),
        n_vocab=spec.n_vocab,
        heads=max((layer.heads for layer in attention), default=0),
        kv_heads=max((layer.kv_heads for layer in attention), default=0),
        k_dim=max((layer.k_dim for layer in attention), default=0),
        gdn=gdn[0] if gdn else None,
        post_norms=spec.post_norms,
        per_layer_columns=spec.n_layer * spec.n_per_layer,
        experts=None if experts is None else ExpertSizes(experts.count, experts.used, experts.n_ff, n_ff),
    )


_MIXER, _FEED_FORWARD = 0, 1   # of ``Layer.parts``


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the trunk.

    scale  of the residual rows behind it
    parts  the matrices of both parts, where they pass through the arena; none where they stay on the device
    """

    mixer: Attention | DeltaNet
    feed_forward: FeedForward | Experts | Mixture
    per_layer: PerLayer | None = None
    scale: float = 1.0
    parts: tuple[WeightPart, ...] = ()

    def add_to(self, step: Step) -> None:
        """All parts."""
        self.mixer.add_to(step)
        self.finish(step)

    def finish(self, step: Step) -> None:
        """All behind the mixer."""
        self.feed_forward.add_to(step)
        if self.per_layer is not None:
            self.per_layer.add_to(step)
        if self.scale != 1.0:
            step.ops.scale(step.x, self.scale)


class WeightFlow(Protocol):
    """Brings parts of layers to the device: in each pass over the layers every one of them, in order."""

    def begin(self) -> None:
        """A pass begins; one that broke off is forgotten."""
        ...

    def acquire(self, part: WeightPart) -> None:
        """What is enqueued from here on finds the part in its place."""
        ...

    def release(self, part: WeightPart) -> None:
        """What was enqueued was the last of this pass to need it."""
        ...


class Model:
    """The forward pass of any arch, from its parts."""

    def __init__(
        self,
        spec: ModelSpec,
        device: ModelDevice,
        *,
        embedding: Weight,
        layers: Sequence[Layer],
        output_norm: Buffer,
        head: Weight,
        nextn: NextN | None = None,
        per_layer: PerLayerWeights | None = None,
    ) -> None:
        self.spec = spec
        self._per_layer = per_layer
        self._ops = device.ops
        self._embedding = embedding
        self._layers = tuple(layers)
        self._output_norm = output_norm
        self._head = head
        self.nextn = nextn
        self._flow: WeightFlow | None = None

    @property
    def parts(self) -> list[WeightPart]:
        """Those that pass through the arena, in the order of a pass."""
        return [part for layer in self._layers for part in layer.parts]

    def pass_weights_through(self, flow: WeightFlow) -> None:
        """``flow`` brings ``parts``. Before the first step."""
        self._flow = flow

    @property
    def attention(self) -> list[AttentionParams]:
        """Of the attention layers, in order, the MTP block's included."""
        mixers = [layer.mixer for layer in self._layers] + ([self.nextn.attention] if self.nextn else [])
        return [mixer.params for mixer in mixers if isinstance(mixer, Attention)]

    @property
    def recurrent(self) -> list[GdnShape]:
        """Of the recurrent layers, in order."""
        return [layer.gdn for layer in self.spec.recurrent_layers if layer.gdn is not None]

    def forward(
        self, batch: Batch, kv: KvView, state: LayerStates | None, ws: Workspace, *, draft: bool = False
    ) -> None:
        """Run a step that has begun and leave its residual rows in the workspace until the next one.

        The device has been told the step's inputs. Adds the step's keys and values to ``kv``; the caller settles or
        drops them. ``ws`` holds at least ``forward_buffers(spec, T)``.
        draft  the trunk drafts for itself: the MTP block does not follow
        """
        step = Step(self._ops, batch, kv, state, ws, self.spec.rms_eps)
        nextn = None if draft else self.nextn
        if nextn is not None:
            nextn.begin(step)
        self._embed(step)
        self._begin_pass()
        for layer in self._layers:
            with self._passing(layer, _MIXER):
                layer.mixer.add_to(step)
            with self._passing(layer, _FEED_FORWARD):
                layer.finish(step)
        if nextn is not None:
            nextn.follow(step, self._output_norm)

    def tile(self, batch: Batch, kv: KvView, state: LayerStates, ws: Workspace) -> Step:
        """One tile of a step for ``forward_tiles``."""
        return Step(self._ops, batch, kv, state, ws, self.spec.rms_eps)

    def forward_tiles(self, tiles: Sequence[Step], turn: Turn) -> None:
        """``forward`` of a decode step in tiles: rows that follow each other, each tile with a workspace of its own.

        In each layer every tile runs, so that the history is read once. The device has been told the tiles' inputs.
        """
        def each(work: Callable[[Step], None]) -> None:
            for number, tile in enumerate(tiles):
                turn(number)
                work(tile)

        if self.nextn is not None:
            turn(0)
            self.nextn.begin_tiles(tiles[0])
        def mix(layer: Layer) -> None:
            if isinstance(layer.mixer, Attention):
                layer.mixer.add_to_tiles(tiles, turn)
            else:
                each(layer.mixer.add_to)

        each(self._embed)
        self._begin_pass()
        for layer in self._layers:
            if layer.parts or isinstance(layer.mixer, Attention):
                with self._passing(layer, _MIXER):
                    mix(layer)
                with self._passing(layer, _FEED_FORWARD):
                    each(layer.finish)
            else:
                each(layer.add_to)
        if self.nextn is not None:
            self.nextn.follow_tiles(tiles, self._output_norm, turn)

    def keep_tiles(self, tiles: Sequence[Step], keep: int) -> None:
        """Of the last ``forward_tiles`` the first ``keep`` rows count: what the MTP block needs of them is kept."""
        if self.nextn is not None and keep > 0:
            number, row = divmod(keep - 1, tiles[0].batch.rows)
            self.nextn.keep(tiles[number], row, self._output_norm)

    def draft_next(self, batch: Batch, kv: KvView, ws: Workspace) -> Buffer:
        """One row of the MTP block alone: logits [1, V] of the token behind it."""
        assert self.nextn is not None
        out = ws.rows("logits", 1)
        self.nextn.draft(Step(self._ops, batch, kv, None, ws, self.spec.rms_eps), out)
        return out

    def logits(self, x: Buffer, ws: Workspace) -> Buffer:
        """[n, V] of some residual rows of the last ``forward``: always as in decode, so that a row's bits do not depend
        on the others."""
        out = ws.rows("logits", len(x))
        self._ops.project(x, self._output_norm, self._head, out, eps=self.spec.rms_eps, phase=Phase.DECODE)
        if self.spec.logit_softcap:
            self._ops.softcap(out, self.spec.logit_softcap)
        return out

    def _begin_pass(self) -> None:
        if self._flow is not None:
            self._flow.begin()

    @contextmanager
    def _passing(self, layer: Layer, part: int) -> Iterator[None]:
        """What the block enqueues has the matrices of that part; after an error the next pass begins anew."""
        if not layer.parts:
            yield
            return
        assert self._flow is not None, "nobody brings the weights that pass through the arena"
        self._flow.acquire(layer.parts[part])
        yield
        self._flow.release(layer.parts[part])

    def _embed(self, step: Step) -> None:
        self._ops.embed(self._embedding, step.x, factor=self.spec.embedding_factor)
        if self._per_layer is not None:
            out = step.rows("per_layer")
            self._ops.per_layer_inputs(step.x, self._per_layer, out, eps=step.eps, phase=step.batch.phase)
