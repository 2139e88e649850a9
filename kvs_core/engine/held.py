"""The matrices that a decode step reads, in the form in which a device holds them: from a file's table, unread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from gguf.constants import GGMLQuantizationType as Quant

from kvs_core.device.cuda.matrices import held_type
from kvs_core.device.cuda.weights import held_bytes
from kvs_core.device.host.weights import HELD_SHARE
from kvs_core.engine.forecast import IN_FILE, Weights
from kvs_core.formats.gguf import GgufFile, TensorInfo, split_experts
from kvs_core.models.spec import ModelSpec
from kvs_core.models.weights import PER_LAYER_TABLE, is_unused, layer_of, makes_values

FLOATS = "float32"
"""Name of what the host holds as float32."""

Held = Callable[[TensorInfo], tuple[str, int]]
"""The name of the form in which a matrix is held, and its bytes."""


def held_weights(
    file: GgufFile, spec: ModelSpec, held: Held, *, nextn: bool, table: bool = False, passing: Collection[int] = (),
    twice: bool = False,
) -> Weights:
    """What a step reads. Matrices are the tensors of two dimensions, but for the taps of convolutions, and experts'
    parts of those of three, which are held last.

    nextn    with the MTP block
    table    the token table is held in device memory even if it is not the head
    passing  layers whose matrices pass through the arena
    twice    keys' matrices that make values too are held, and read, for both
    """
    table_bytes = passing_bytes = cached_bytes = 0

    def take(info: TensorInfo) -> tuple[str, int]:
        nonlocal cached_bytes
        name, size = held(info)
        cached_bytes += size if name == FLOATS and info.quant is not Quant.F32 else 0
        return name, size

    trunk: Counter[str] = Counter()
    head: Counter[str] = Counter()
    block: Counter[str] = Counter()
    for info in _tensors(file, spec, nextn, dimensions=2):
        if info.name == "token_embd.weight" and "output.weight" in file.tensors:
            name, size = take(info) if table else ("", 0)
            table_bytes = 0 if name == IN_FILE else size
            continue
        if info.name in ("output.weight", "token_embd.weight"):
            part = head
        else:
            part = block if layer_of(info.name) >= spec.n_layer else trunk
        name, size = take(info)
        size *= 2 if twice and makes_values(file, info.name) else 1
        part[name] += size
        if layer_of(info.name) in passing and name != IN_FILE:
            passing_bytes += size
    experts: Counter[str] = Counter()
    block_experts: Counter[str] = Counter()
    for info in _tensors(file, spec, nextn, dimensions=3):
        part = block_experts if layer_of(info.name) >= spec.n_layer else experts
        for matrix in split_experts(info):
            name, size = take(matrix)
            part[name] += size
            if layer_of(info.name) in passing and name != IN_FILE:
                passing_bytes += size
    share = 0.0 if spec.experts is None else spec.experts.used / spec.experts.count
    return Weights(
        dict(trunk), dict(head), dict(block), table_bytes, dict(experts), dict(block_experts), share, passing_bytes,
        cached_bytes,
    )


def held_on_cuda(info: TensorInfo) -> tuple[str, int]:
    """As ``device/cuda/weights.py`` holds it: whole tiles of records, or rows."""
    return held_type(info.quant).name, held_bytes(info)


def cache_limit_bytes(free_bytes: int) -> int:
    """What the host's float32 values of quantised matrices take at most, of so much free memory."""
    return int(HELD_SHARE * free_bytes)


def held_on_host(free_bytes: int, passing: Collection[int] = ()) -> Held:
    """As ``device/host/weights.py`` holds them: float32 as long as there is room, one after the other. Those of layers
    that are ``passing`` are dequantised at every use, as if they were in the file."""
    left = cache_limit_bytes(free_bytes)

    def held(info: TensorInfo) -> tuple[str, int]:
        nonlocal left
        size = 4 * info.n_elements
        if layer_of(info.name) in passing:
            return IN_FILE, size
        if info.quant is Quant.F32 or size <= left:
            left -= 0 if info.quant is Quant.F32 else size
            return FLOATS, size
        return IN_FILE, size

    return held


_NOT_MULTIPLIED = ("conv1d.weight", "embed_tokens.weight", PER_LAYER_TABLE)


def _tensors(file: GgufFile, spec: ModelSpec, nextn: bool, *, dimensions: int) -> Iterable[TensorInfo]:
    for info in file.tensors.values():
        if len(info.shape) != dimensions or info.name.endswith(_NOT_MULTIPLIED):
            continue
        layer = layer_of(info.name)
        if layer >= spec.n_layer:
            used = nextn
        else:
            used = layer < 0 or not is_unused(spec.layers[layer], info.name)
        if used:
            yield info
