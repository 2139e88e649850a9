"""The matrices that a decode step reads, in the form in which a device holds them: from a file's table, unread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from gguf.constants import GGMLQuantizationType as Quant

from kvs_core.device.cuda.weights import BLOCK, RECORD_TYPES, TILE_ROWS, held_type, record_bytes
from kvs_core.device.host.weights import HELD_SHARE
from kvs_core.engine.forecast import IN_FILE, Weights
from kvs_core.formats.gguf import GgufFile, TensorInfo, split_experts
from kvs_core.formats.quants import row_bytes
from kvs_core.models.spec import ModelSpec
from kvs_core.models.weights import PER_LAYER_TABLE
from kvs_core.units import ceil_div

FLOATS = "float32"
"""Name of what the host holds as float32."""

Held = Callable[[TensorInfo], tuple[str, int]]
"""The name of the form in which a matrix is held, and its bytes."""


def held_weights(
    file: GgufFile, spec: ModelSpec, held: Held, *, nextn: bool, table: bool = False, twice: bool = False
) -> Weights:
    """What a step reads. Matrices are the tensors of two dimensions, but for the taps of convolutions, and experts'
    parts of those of three, which are held last.

    nextn  with the MTP block
    table  the token table is held in device memory even if it is not the head
    twice  keys' matrices that make values too are held, and read, for both
    """
    table_bytes = 0
    trunk: Counter[str] = Counter()
    head: Counter[str] = Counter()
    block: Counter[str] = Counter()
    for info in _tensors(file, spec, nextn, dimensions=2):
        if info.name == "token_embd.weight" and "output.weight" in file.tensors:
            name, size = held(info) if table else ("", 0)
            table_bytes = 0 if name == IN_FILE else size
            continue
        if info.name in ("output.weight", "token_embd.weight"):
            part = head
        else:
            part = block if _layer(info.name) >= spec.n_layer else trunk
        name, size = held(info)
        part[name] += size * (2 if twice and _makes_values(file, info.name) else 1)
    experts: Counter[str] = Counter()
    block_experts: Counter[str] = Counter()
    for info in _tensors(file, spec, nextn, dimensions=3):
        part = block_experts if _layer(info.name) >= spec.n_layer else experts
        for matrix in split_experts(info):
            name, size = held(matrix)
            part[name] += size
    share = 0.0 if spec.experts is None else spec.experts.used / spec.experts.count
    return Weights(dict(trunk), dict(head), dict(block), table_bytes, dict(experts), dict(block_experts), share)


def held_on_cuda(info: TensorInfo) -> tuple[str, int]:
    """As ``device/cuda/weights.py`` holds it: whole tiles of records, or rows."""
    n_in, n_out = info.shape
    quant = held_type(info.quant)
    if quant in RECORD_TYPES:
        return quant.name, ceil_div(n_out, TILE_ROWS) * ceil_div(n_in, BLOCK) * record_bytes(quant)
    return quant.name, n_out * row_bytes(quant, n_in)


def held_on_host(free_bytes: int) -> Held:
    """As ``device/host/weights.py`` holds them: float32 as long as there is room, one after the other."""
    left = int(HELD_SHARE * free_bytes)

    def held(info: TensorInfo) -> tuple[str, int]:
        nonlocal left
        size = 4 * info.n_elements
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
        if _layer(info.name) < spec.n_layer or nextn:
            yield info


def _makes_values(file: GgufFile, name: str) -> bool:
    """Whether it is a keys' matrix of a layer that has none for values."""
    return name.endswith(".attn_k.weight") and name.replace("attn_k", "attn_v") not in file.tensors


def _layer(name: str) -> int:
    """Of ``blk.N.``; -1 for what is outside the layers."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" else -1
