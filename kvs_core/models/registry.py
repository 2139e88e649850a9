"""From a model file to its spec, and to a model on a device. Every arch that kvs has code for is listed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvs_core.device.base import Device, RopeTable
from kvs_core.errors import ModelFileError
from kvs_core.formats.gguf import GgufFile
from kvs_core.models import llama, qwen2, qwen3, qwen35
from kvs_core.models.model import Layer, Model
from kvs_core.models.nextn import NextN
from kvs_core.models.rope import rope_table
from kvs_core.models.spec import ModelSpec, TensorSpec
from kvs_core.models.weights import Loader, check_tensors
from kvs_core.settings.rooms import RopeSettings
from kvs_core.units import Progress


@dataclass(frozen=True, slots=True)
class Arch:
    """What a module named after an architecture offers."""

    read_spec: Callable[[GgufFile], ModelSpec]
    trunk_tensors: Callable[[ModelSpec], list[TensorSpec]]
    nextn_tensors: Callable[[ModelSpec], list[TensorSpec]]
    load_layers: Callable[[ModelSpec, Loader, RopeTable], list[Layer]]
    load_nextn: Callable[[ModelSpec, Loader, RopeTable], NextN]


ARCHS = {
    module.ARCH: Arch(
        module.read_spec, module.trunk_tensors, module.nextn_tensors, module.load_layers, module.load_nextn
    )
    for module in (llama, qwen2, qwen3, qwen35)
}


def read_spec(file: GgufFile) -> ModelSpec:
    """The model in ``file``, its metadata and tensor table checked; nothing is loaded.

    Raises ModelFileError for what is wrong in the file, CapabilityError for a sound model without code here.
    """
    arch = _arch_of(file)
    spec = arch.read_spec(file)
    check_tensors(file, spec.arch, [*arch.trunk_tensors(spec), *arch.nextn_tensors(spec)])
    return spec


def load_model(
    file: GgufFile, device: Device, *, rope: RopeSettings | None = None, nextn: bool = False,
    progress: Progress | None = None,
) -> Model:
    """Check the file as ``read_spec`` does and put the model on ``device``.

    rope      replaces the file's rotary settings
    nextn     with the MTP block, which the file must have; without, it stays in the file
    progress  hears of the loading work in bytes
    """
    spec = read_spec(file)
    arch = _arch_of(file)
    loader = Loader(file, device)
    table = rope_table(spec.rope, rope or RopeSettings(), _rope_divisors(file, device))
    loader.prepare([*arch.trunk_tensors(spec), *(arch.nextn_tensors(spec) if nextn else ())], progress)
    return Model(
        spec,
        device,
        embedding=loader.table("token_embd.weight"),
        layers=arch.load_layers(spec, loader, table),
        output_norm=loader.vector("output_norm.weight"),
        head=loader.matrix(loader.head),
        nextn=arch.load_nextn(spec, loader, table) if nextn else None,
    )


def _arch_of(file: GgufFile) -> Arch:
    arch = ARCHS.get(file.arch)
    if arch is None:
        raise ModelFileError(
            f"{file.path}: general.architecture is {file.arch!r}; kvs can run {', '.join(sorted(ARCHS))}"
        )
    return arch


def _rope_divisors(file: GgufFile, device: Device) -> np.ndarray | None:
    """``rope_freqs.weight`` [n_rot / 2] on the host, or None: the divisors of the rotary angles (Llama 3.1)."""
    info = file.tensors.get("rope_freqs.weight")
    if info is None:
        return None
    divisors = device.download(device.load_vector(info))
    if not (np.isfinite(divisors).all() and (divisors > 0.0).all()):
        raise ModelFileError(f"{file.path}: tensor rope_freqs.weight holds numbers that are not positive and finite")
    return divisors
