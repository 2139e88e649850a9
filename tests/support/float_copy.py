"""A float32 copy of a GGUF: the same model without the rounding of activations that quantised kernels do.

llama.cpp rounds activations to 8 bits before it multiplies them with quantised weights (and to float16 with float16
weights), so its logits on such a file are far from exact ones. On a copy whose matrices hold the dequantised numbers
as float32 it multiplies in float32, and a comparison can be tight.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import gguf
import numpy as np

# Untrue of the copy.
_TYPE_KEYS = ("general.quantization_version", "general.file_type")


def write_float_copy(source: Path, target: Path) -> Path:
    """Write ``source`` with every tensor as float32, metadata and tokenizer unchanged, to ``target`` and return it.

    Takes 4 bytes per parameter on disk, and memory for the largest tensor only. ``target`` appears complete or not
    at all, so one that is there may be used again.
    """
    reader = gguf.GGUFReader(source)
    part = target.with_suffix(f".part{os.getpid()}")
    writer = gguf.GGUFWriter(part, str(reader.fields["general.architecture"].contents()))
    copy_metadata(reader, writer, without=_TYPE_KEYS)
    for tensor in reader.tensors:
        # gguf-py keeps shapes in file order, contiguous dimension first; the writer wants NumPy's order.
        shape = [int(size) for size in reversed(tensor.shape)]
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), 4 * int(tensor.n_elements))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        writer.write_tensor_data(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.close()
    part.replace(target)
    return target


def copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, *, without: Collection[str] = ()) -> None:
    """Add all metadata of ``reader`` to ``writer``, in order, but for the keys in ``without`` and the architecture."""
    for name, field in reader.fields.items():
        if name in without or name == "general.architecture" or name.startswith("GGUF."):
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, element)
