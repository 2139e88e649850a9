"""A look at every weight of a file before it is used (``--check-tensors``)."""

from __future__ import annotations

import numpy as np

from kvs_core.errors import ModelFileError
from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.quants import dequantize_rows
from kvs_core.units import Progress

_PIECE_VALUES = 1 << 20


def check_finite(file: GgufFile, progress: Progress | None = None) -> None:
    """Read all weights; raises ModelFileError for the first tensor in which some are NaN or infinite.

    ``progress`` hears of the bytes read and of all there are.
    """
    total_bytes = sum(info.n_bytes for info in file.tensors.values())
    done_bytes = 0
    for info in file.tensors.values():
        rows = info.n_elements // info.shape[0]
        step = max(1, _PIECE_VALUES // info.shape[0])
        broken = 0
        for first in range(0, rows, step):
            values = dequantize_rows(info, first, min(step, rows - first))
            broken += values.size - int(np.count_nonzero(np.isfinite(values)))
        if broken:
            raise ModelFileError(
                f"{file.path}: {broken} of {info.n_elements} weights in tensor {info.name} are NaN or infinite; "
                "convert or download the file again"
            )
        done_bytes += info.n_bytes
        if progress is not None:
            progress(done_bytes, total_bytes)
