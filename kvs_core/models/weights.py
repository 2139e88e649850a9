"""A model's tensors: checked against the table of what it needs, then put on the device by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from kvs_core.device.base import ModelDevice
from kvs_core.device.operands import (
    Activation,
    AttentionParams,
    Buffer,
    ExpertWeights,
    PassingWeight,
    RopeTable,
    Weight,
)
from kvs_core.errors import DeviceError, ModelFileError
from kvs_core.formats.gguf import GgufFile, TensorInfo, split_experts
from kvs_core.formats.quants import can_dequantize
from kvs_core.models.blocks import Attention, Experts, FeedForward
from kvs_core.models.spec import ExpertSpec, LayerSpec, ModelSpec, TensorSpec
from kvs_core.units import MIB, Progress

POST_NORMS = ("post_attention_norm", "post_ffw_norm")
"""Names of the norms behind attention and feed-forward, with ``ModelSpec.post_norms``."""


PER_LAYER_TABLE = "per_layer_token_embd.weight"
"""The table of embeddings per layer: rows of it are looked up, never multiplied."""


def check_tensors(file: GgufFile, arch: str, table: Iterable[TensorSpec]) -> None:
    """Compare the file with ``table`` before anything is loaded.

    Raises ModelFileError for the first tensor that is missing, has another shape, has a type that cannot be read, or
    is not in the table: a tensor without a use here would be a part of the model that is left out of its results.
    """
    known = set()
    for spec in table:
        known.add(spec.name)
        info = file.tensors.get(spec.name)
        if info is None:
            if spec.optional:
                continue
            raise ModelFileError(
                f"{file.path}: has no tensor {spec.name} {list(spec.shape)}, which this {arch} model needs; "
                "the file is incomplete: convert or download it again"
            )
        if info.shape != spec.shape:
            raise ModelFileError(
                f"{file.path}: tensor {spec.name} has the shape {list(info.shape)}; {list(spec.shape)} is expected "
                f"from the file's {arch}.* keys"
            )
        if not can_dequantize(info.quant):
            raise ModelFileError(
                f"{file.path}: tensor {spec.name} has type {info.quant.name}, which cannot be read as weights; "
                "use another quantization"
            )
    unknown = sorted(file.tensors.keys() - known)
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ModelFileError(
            f"{file.path}: tensor {unknown[0]}{more} has no place in the {arch} model that the file's keys describe; "
            "it would be left out of the results"
        )


def is_matrix(spec: TensorSpec | TensorInfo) -> bool:
    """Whether a tensor is multiplied with rows. The taps of a convolution are two-dimensional too, and are not, nor is
    a table that is no head."""
    return len(spec.shape) == 2 and not spec.name.endswith(("conv1d.weight", PER_LAYER_TABLE))


def layer_of(name: str) -> int:
    """Number of the layer that a tensor belongs to; -1 for what is outside the layers."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" else -1


def is_unused(layer: LayerSpec, name: str) -> bool:
    """Whether a tensor of that layer is one for keys or values of its own, where it reads those of another."""
    return layer.shares and name.endswith((".attn_k.weight", ".attn_v.weight"))


def makes_values(file: GgufFile, name: str) -> bool:
    """Whether it is a keys' matrix of a layer that has none for values."""
    return name.endswith(".attn_k.weight") and name.replace("attn_k", "attn_v") not in file.tensors


def layer_matrices(file: GgufFile, layers: Iterable[LayerSpec]) -> dict[int, tuple[list[TensorInfo], list[TensorInfo]]]:
    """By layer, what its mixer and all behind it multiply with, experts too, as ``Loader`` loads it: twice what is used
    twice."""
    found: dict[int, tuple[list[TensorInfo], list[TensorInfo]]] = {layer.index: ([], []) for layer in layers}
    specs = {layer.index: layer for layer in layers}
    for info in file.tensors.values():
        layer = specs.get(layer_of(info.name))
        if layer is None or not (is_matrix(info) or len(info.shape) == 3) or is_unused(layer, info.name):
            continue
        found[layer.index][_part_of(info.name)].extend([info] * (2 if makes_values(file, info.name) else 1))
    return found


def _part_of(name: str) -> int:
    """0 for what a mixer has, 1 for the rest of a layer: as in ``models.model.Layer.parts``."""
    return 0 if name.split(".")[2].startswith(("attn_", "ssm_")) else 1


class LayerPart:
    """``WeightPart``: the matrices of a layer's mixer, or of all behind it, one after the other."""

    def __init__(self, room: np.ndarray) -> None:
        """``room``: pinned, for all that will be added."""
        self._room = room
        self._size_bytes = 0
        self._held: list[PassingWeight] = []

    @property
    def home(self) -> np.ndarray:
        """See ``WeightPart``."""
        return self._room[: self._size_bytes]

    @property
    def room(self) -> np.ndarray:
        """For the next one."""
        return self._room[self._size_bytes :]

    def add(self, held: PassingWeight) -> Any:
        """One more, whose home is the first bytes of ``room``; what to multiply with."""
        self._held.append(held)
        self._size_bytes += held.home.nbytes
        return held.weight

    def lie_in(self, place: Buffer) -> None:
        """See ``WeightPart``."""
        at = 0
        for held in self._held:
            held.lie_in(place[at : at + held.home.nbytes])
            at += held.home.nbytes


class Loader:
    """Loads tensors of a checked file by name.

    parts  those that pass through the arena, by layer: of its mixer, and of all behind it
    """

    def __init__(self, file: GgufFile, device: ModelDevice, passing: Collection[LayerSpec] = ()) -> None:
        """``passing``: layers whose matrices do not stay on the device."""
        self._file = file
        self._device = device
        self._passing = layer_matrices(file, passing)
        self.parts: dict[int, tuple[LayerPart, LayerPart]] = {}

    def prepare(self, table: Sequence[TensorSpec], progress: Progress | None) -> None:
        """Let the device do the loading work for all matrices of ``table`` at once.

        Experts come last: a device that has no room for all holds what every row is multiplied with.
        """
        there = [spec for spec in table if spec.name in self._file.tensors]
        stay = [spec for spec in there if layer_of(spec.name) not in self._passing]
        infos = [self._info(spec.name) for spec in stay if is_matrix(spec)]
        for spec in stay:
            if len(spec.shape) == 3:
                infos += split_experts(self._info(spec.name))
        passing = [info for parts in self._passing.values() for part in parts for info in part]
        self._device.prepare_weights(infos, progress, passing=passing)

    def has(self, name: str) -> bool:
        """Whether the file holds the (optional) tensor."""
        return name in self._file.tensors

    def table(self, name: str) -> Weight:
        """A matrix for ``ops.embed``."""
        return self._device.load_table(self._info(name))

    def vector(self, name: str) -> Buffer:
        """A small tensor as float32, shape as in the file reversed."""
        return self._device.load_vector(self._info(name))

    def transposed(self, name: str) -> Buffer:
        """A small two-dimensional tensor as float32, shape as in the file."""
        return self._device.load_vector(self._info(name), transposed=True)

    def matrix(self, *stems: str) -> Weight:
        """The matrices ``stem.weight``, joined, with what there is of ``stem.bias``."""
        infos = [self._info(f"{stem}.weight") for stem in stems]
        biases = [self._info(f"{stem}.bias") if self.has(f"{stem}.bias") else None for stem in stems]
        part = self._part(infos[0].name)
        if part is None:
            return self._device.load_matrix(infos, biases)
        weight: Weight = part.add(self._device.load_passing(infos, part.room, biases))
        return weight

    @property
    def head(self) -> str:
        """Stem of the output head: its own matrix, or the token table."""
        return "output" if self.has("output.weight") else "token_embd"

    def zeros(self, shape: tuple[int, ...]) -> Buffer:
        """float32 memory beside the arena."""
        return self._device.allocate(shape, np.float32)

    def rope(self, table: RopeTable) -> Any:
        """A rotary embedding for ``attention``."""
        return self._device.load_rope(table)

    def attention(self, spec: ModelSpec, layer: LayerSpec, rope: Any) -> Attention:
        """The attention part of a layer, with the norms of q and k per head, and behind it, where the arch has them."""
        block = f"blk.{layer.index}"
        stems = [f"{block}.attn_q"]
        if not layer.shares:
            # Without a matrix of their own, values are the keys before norm and rotary embedding.
            value = "attn_v" if self.has(f"{block}.attn_v.weight") else "attn_k"
            stems += [f"{block}.attn_k", f"{block}.{value}"]
        return Attention(
            layer=layer,
            norm=self.vector(f"{block}.attn_norm.weight"),
            qkv=self.matrix(*stems),
            out=self.matrix(f"{block}.attn_output"),
            params=AttentionParams(
                heads=layer.heads,
                kv_heads=layer.kv_heads,
                k_dim=layer.k_dim,
                v_dim=layer.v_dim,
                gated=layer.gated,
                scale=spec.attention_scale,
                rope=rope,
                eps=spec.rms_eps,
                q_norm=self._vector_if(f"{block}.attn_q_norm.weight"),
                k_norm=None if layer.shares else self._vector_if(f"{block}.attn_k_norm.weight"),
                window=layer.window,
                v_norm=spec.v_norms,
                shares=layer.shares,
            ),
            post_norm=self.vector(f"{block}.{POST_NORMS[0]}.weight") if spec.post_norms else None,
        )

    def feed_forward(self, spec: ModelSpec, layer: LayerSpec, norm: str) -> FeedForward | Experts:
        """The feed-forward part of a layer, or its experts, behind the norm of that name."""
        block = f"blk.{layer.index}"
        if spec.experts is not None:
            return Experts(
                self.vector(f"{block}.{norm}.weight"), self.experts(spec.experts, block, spec.activation)
            )
        return FeedForward(
            norm=self.vector(f"{block}.{norm}.weight"),
            gate_up=self.matrix(f"{block}.ffn_gate", f"{block}.ffn_up"),
            down=self.matrix(f"{block}.ffn_down"),
            activation=spec.activation,
            post_norm=self.vector(f"{block}.{POST_NORMS[1]}.weight") if spec.post_norms else None,
        )

    def experts(self, experts: ExpertSpec, block: str, activation: Activation) -> ExpertWeights:
        """The experts of a block and their router."""
        stems = ("ffn_gate_up",) if experts.joined else ("ffn_gate", "ffn_up")
        shared = experts.n_shared > 0
        return ExpertWeights(
            router=self.matrix(f"{block}.ffn_gate_inp"),
            used=experts.used,
            gate_up=self._experts([f"{block}.{stem}_exps.weight" for stem in stems]),
            down=self._experts([f"{block}.ffn_down_exps.weight"]),
            shared_gate=self.vector(f"{block}.ffn_gate_inp_shexp.weight") if shared else None,
            shared_gate_up=self.matrix(f"{block}.ffn_gate_shexp", f"{block}.ffn_up_shexp") if shared else None,
            shared_down=self.matrix(f"{block}.ffn_down_shexp") if shared else None,
            activation=activation,
        )

    def numbers(self, name: str) -> np.ndarray:
        """A small tensor as float32 on the host."""
        return self._device.download(self.vector(name))

    def _vector_if(self, name: str) -> Buffer | None:
        return self.vector(name) if self.has(name) else None

    def _experts(self, names: Sequence[str]) -> Any:
        infos = [self._info(name) for name in names]
        part = self._part(names[0])
        if part is None:
            return self._device.load_experts(infos)
        return part.add(self._device.load_passing(infos, part.room))

    def _part(self, name: str) -> LayerPart | None:
        """What a tensor passes with; None if it stays."""
        layer = layer_of(name)
        if layer not in self._passing:
            return None
        if layer not in self.parts:
            mixer, behind = self._passing[layer]
            self.parts[layer] = self._home_for(mixer), self._home_for(behind)
        return self.parts[layer][_part_of(name)]

    def _home_for(self, infos: Sequence[TensorInfo]) -> LayerPart:
        size = self._device.part_bytes(infos)
        try:
            return LayerPart(self._device.allocate_pinned(size))
        except (DeviceError, MemoryError) as error:
            held = sum(part.home.nbytes for parts in self.parts.values() for part in parts)
            raise DeviceError(
                f"no pinned host memory for {size / MIB:.1f} MiB more of weights that do not stay on the device "
                f"({held / MIB:.0f} MiB held); raise --gpu-layers, or end other programs"
            ) from error

    def _info(self, name: str) -> TensorInfo:
        return self._file.tensors[name]
