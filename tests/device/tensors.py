"""Tensors as a file would hold them, without a file."""

import gguf
import numpy as np

from kvs_core.formats.gguf import TensorInfo

F32 = gguf.GGMLQuantizationType.F32


def tensor(name: str, values: np.ndarray, quant: gguf.GGMLQuantizationType = F32) -> TensorInfo:
    """Values [rows, cols] as a tensor of shape [cols, rows] in the blocks of ``quant``."""
    data = gguf.quants.quantize(values, quant)
    return TensorInfo(name, values.shape[::-1], quant, values.size, data.nbytes, data.reshape(-1).view(np.uint8))
