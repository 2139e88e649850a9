"""Large products by cuBLAS, called through ctypes: CuPy refuses its own cuBLAS calls while a stream is captured, and
allocates workspace as it goes. Here the handle, its stream and its workspace are set once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from kvs_core.device.cuda.kernel import Gemm, address
from kvs_core.device.operands import Buffer
from kvs_core.errors import DeviceError
from kvs_core.units import MIB

WORKSPACE_BYTES = 32 * MIB
"""What cuBLAS asks for on sm_90; less on others does no harm."""

_TRANSPOSED, _PLAIN = 1, 0        # cublasOperation_t
_R_32F, _R_16F = 0, 2             # cudaDataType_t
_COMPUTE_32F = 68                 # cublasComputeType_t
_DEFAULT_ALGORITHM = -1           # cublasGemmAlgo_t

_int, _pointer = ctypes.c_int, ctypes.c_void_p


class CublasGemm(Gemm):
    """One cuBLAS handle on one stream. After ``__init__`` nothing allocates, so that a product may be captured."""

    def __init__(self, stream: int, allocate: Callable[[int], Buffer]) -> None:
        """
        stream    cudaStream_t that all products run on
        allocate  device memory of so many bytes, for the workspace
        Raises ``DeviceError`` if there is no cuBLAS or it does not start.
        """
        self._library = _load_library()
        self._handle = _pointer()
        # Host memory that every call points to.
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._workspace = allocate(WORKSPACE_BYTES)
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        try:
            # In this order: setting the stream takes the workspace back.
            self._call("cublasSetStream_v2", self._handle, _pointer(stream))
            self._call("cublasSetWorkspace_v2", self._handle, _pointer(address(self._workspace)),
                       ctypes.c_size_t(WORKSPACE_BYTES))
        except DeviceError:
            self.close()
            raise
        self._multiply = self._library.cublasGemmEx
        self._multiply.argtypes = [
            _pointer, _int, _int, _int, _int, _int, _pointer, _pointer, _int, _int, _pointer, _int, _int, _pointer,
            _pointer, _int, _int, _int, _int,
        ]

    def gemm(
        self, rows: Any, weight: Any, out: Any, *, n_rows: int, n_out: int, n_in: int, out_stride: int, accumulate: bool
    ) -> None:
        """See ``Gemm.gemm``. cuBLAS goes by columns: ``weight`` is its A, ``rows`` its B, ``out`` its C."""
        status = self._multiply(
            self._handle, _TRANSPOSED, _PLAIN, n_out, n_rows, n_in,
            ctypes.addressof(self._one), _address(weight), _R_16F, n_in, _address(rows), _R_16F, n_in,
            ctypes.addressof(self._one if accumulate else self._zero), _address(out), _R_32F, out_stride,
            _COMPUTE_32F, _DEFAULT_ALGORITHM,
        )
        if status:
            raise self._error(f"a product of [{n_rows}, {n_in}] and [{n_in}, {n_out}]", status)

    def close(self) -> None:
        """Give the handle back, after all work on the stream. Idempotent."""
        if self._handle:
            self._library.cublasDestroy_v2(self._handle)
            self._handle = _pointer()

    def _call(self, name: str, *args: Any) -> None:
        function: Callable[..., int] = getattr(self._library, name)
        status = function(*args)
        if status:
            raise self._error(name, status)

    def _error(self, what: str, status: int) -> DeviceError:
        describe = self._library.cublasGetStatusString
        describe.restype = ctypes.c_char_p
        meaning = (describe(status) or b"unknown").decode()
        return DeviceError(f"cuBLAS failed in {what}: {meaning} ({status}); if device memory is short, free some of it")


def _address(buffer: Buffer | int) -> int:
    return buffer if isinstance(buffer, int) else address(buffer)


def _load_library() -> ctypes.CDLL:
    """The very library that CuPy has loaded: there are several places for one, and two versions may be installed."""
    try:
        from cupy.cuda import cublas  # noqa: F401  imported for what it loads
    except ImportError as error:
        raise DeviceError(
            f"cuBLAS cannot be loaded ({error}); install it with pip install 'kvs-llm[cuda13]' or [cuda12]"
        ) from error
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        # address permissions offset device inode path
        paths = [line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/libcublas.so" in line]
    if not paths:
        raise DeviceError("cuBLAS cannot be found in this process; install it with pip install 'kvs-llm[cuda13]'")
    return ctypes.CDLL(paths[0])
