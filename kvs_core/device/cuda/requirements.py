"""What kvs needs of a GPU, its driver, CuPy and NVRTC, as judgements over facts. Pure.

Each is one line, with what to do, or empty where all is well. Versions of CUDA are (major, minor).
"""

from __future__ import annotations

LEAST_ARCH = 75
"""The first compute capability, times ten, that the kernels are written for."""

LEAST_CUDA = (12, 0)
"""The first CUDA of which there is an extra to install."""


def extra(driver_cuda: tuple[int, int] | None) -> str:
    """What to install for a driver that knows this CUDA; for an unknown one, the newest."""
    return "kvs-llm[cuda12]" if driver_cuda is not None and driver_cuda[0] < 13 else "kvs-llm[cuda13]"


def driver_problem(driver_cuda: tuple[int, int]) -> str:
    """Whether the driver is too old."""
    if driver_cuda >= LEAST_CUDA:
        return ""
    return f"the driver knows CUDA {dotted(driver_cuda)}, {dotted(LEAST_CUDA)} or newer is needed; update the driver"


def arch_problem(index: int, name: str, arch: int) -> str:
    """Whether the GPU is too old; ``arch``: compute capability times ten."""
    if arch >= LEAST_ARCH:
        return ""
    return f"GPU {index}, {name}, has compute capability {arch / 10}; {LEAST_ARCH / 10} or newer is needed"


def cupy_problem(driver_cuda: tuple[int, int], cupy_cuda: tuple[int, int]) -> str:
    """Whether CuPy is built for a CUDA that the driver does not know."""
    if cupy_cuda[0] <= driver_cuda[0]:
        return ""
    return (
        f"the driver knows CUDA {dotted(driver_cuda)}, CuPy is built for {cupy_cuda[0]}; update the driver, or remove "
        f"that CuPy and pip install '{extra(driver_cuda)}'"
    )


def nvrtc_problem(driver_cuda: tuple[int, int], version: tuple[int, int]) -> str:
    """Whether NVRTC makes code that the driver does not know."""
    if version[0] <= driver_cuda[0]:
        return ""
    return (
        f"the driver knows CUDA {dotted(driver_cuda)}, the compiler NVRTC is {dotted(version)}; update the driver, or "
        f"pip install '{extra(driver_cuda)}'"
    )


def dotted(version: tuple[int, int]) -> str:
    """Such as 13.0."""
    return ".".join(map(str, version))
