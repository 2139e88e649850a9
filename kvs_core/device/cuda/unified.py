"""CUDA's unified memory, in which weights may be larger than the GPU's memory: the driver moves what kernels read."""

from __future__ import annotations

import os

VARIABLE = "GGML_CUDA_ENABLE_UNIFIED_MEMORY"
"""llama.cpp's name for it."""


def is_asked() -> bool:
    """As llama.cpp reads the variable: whether it is there, with any value."""
    return VARIABLE in os.environ
