"""From a model file to its spec, and to a model on a device. Every arch that kvs has code for is listed here."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np

from kvs_core.device.base import ModelDevice
from kvs_core.errors import ModelFileError
from kvs_core.formats.gguf import GgufFile
from kvs_core.models import gemma3, gemma4, llama, qwen2, qwen3, qwen3moe, qwen35, qwen35moe
from kvs_core.models.model import Layer, Model
from kvs_core.models.nextn import NextN
from kvs_core.models.rope import DIVISORS, Ropes, divisors_name, reach_tokens
from kvs_core.models.spec import ModelSpec, TensorSpec
from kvs_core.models.weights import Loader, check_tensors
from kvs_core.settings.rooms import AS_IN_FILE, RopeSettings
from kvs_core.units import Progress


@dataclass(frozen=True, slots=True)
class Arch:
    """What a module named after an architecture offers."""

    read_spec: Callable[[GgufFile], ModelSpec]
    trunk_tensors: Callable[[ModelSpec], list[TensorSpec]]
    nextn_tensors: Callable[[ModelSpec], list[TensorSpec]]
    load_layers: Callable[[ModelSpec, Loader, Ropes], list[Layer]]
    load_nextn: Callable[[ModelSpec, Loader, Ropes], NextN]


ARCHS = {
    module.ARCH: Arch(
        module.read_spec, module.trunk_tensors, module.nextn_tensors, module.load_layers, module.load_nextn
    )
    for module in (gemma3, gemma4, llama, qwen2, qwen3, qwen3moe, qwen35, qwen35moe)
}


def read_spec(file: GgufFile, rope: RopeSettings = AS_IN_FILE) -> ModelSpec:
    """The model in ``file``, its metadata and tensor table checked; nothing is loaded.

    rope  replaces the file's rotary settings, on which the longest context depends
    Raises ModelFileError for what is wrong in the file, CapabilityError for a sound model without code here.
    """
    arch = _arch_of(file)
    spec = arch.read_spec(file)
    check_tensors(file, spec.arch, [*arch.trunk_tensors(spec), *arch.nextn_tensors(spec)])
    return replace(spec, n_ctx_most=max(spec.n_ctx_train, reach_tokens(spec.rope, rope)))


def load_model(
    file: GgufFile, device: ModelDevice, *, context_tokens: int, rope: RopeSettings = AS_IN_FILE, nextn: bool = False,
    passing: Collection[int] = (), progress: Progress | None = None,
) -> Model:
    """Check the file as ``read_spec`` does and put the model on ``device``.

    context_tokens  the context that it will run in
    rope            replaces the file's rotary settings
    nextn           with the MTP block, which the file must have; without, it stays in the file
    passing         layers whose matrices pass through the arena: ``Model.pass_weights_through`` before the first step
    progress        hears of the loading work in bytes
    """
    spec = read_spec(file, rope)
    arch = _arch_of(file)
    loader = Loader(file, device, [spec.layers[index] for index in passing])
    # As in llama.cpp: of tensors that divide angles, the one that holds for every context comes first.
    divisors = DIVISORS if DIVISORS in file.tensors else divisors_name(spec.rope, context_tokens)
    ropes = Ropes.of(
        spec.rope, spec.rope_sliding, rope, None if divisors is None else _read_divisors(file, divisors, device)
    )
    loader.prepare([*arch.trunk_tensors(spec), *(arch.nextn_tensors(spec) if nextn else ())], progress)
    layers = arch.load_layers(spec, loader, ropes)
    return Model(
        spec,
        device,
        embedding=loader.table("token_embd.weight"),
        layers=[replace(layer, parts=loader.parts.get(index, ())) for index, layer in enumerate(layers)],
        output_norm=loader.vector("output_norm.weight"),
        head=loader.matrix(loader.head),
        nextn=arch.load_nextn(spec, loader, ropes) if nextn else None,
        per_layer=gemma4.load_per_layer(spec, loader),
    )


def _arch_of(file: GgufFile) -> Arch:
    arch = ARCHS.get(file.arch)
    if arch is None:
        raise ModelFileError(
            f"{file.path}: general.architecture is {file.arch!r}; kvs can run {', '.join(sorted(ARCHS))}"
        )
    return arch


def _read_divisors(file: GgufFile, name: str, device: ModelDevice) -> np.ndarray:
    """[n_rot / 2] on the host: the divisors of the rotary angles."""
    divisors = device.download(device.load_vector(file.tensors[name]))
    if not (np.isfinite(divisors).all() and (divisors > 0.0).all()):
        raise ModelFileError(f"{file.path}: tensor {name} holds numbers that are not positive and finite")
    return divisors
