"""The CUDA driver through ctypes: what NVIDIA's driver itself brings, needed beside CuPy for launches that may overlap
and for answers about a GPU that do not depend on what else is installed.
"""

from __future__ import annotations

import ctypes
from typing import Any

from kvs_core.errors import LESS_MEMORY, DeviceError, DeviceMemoryError

INVALID_CONTEXT = 201
OUT_OF_MEMORY = 2   # the runtime has the same number for it
_NO_DEVICE = 100

# CUdevice_attribute
_ATTRIBUTES = {"sm_count": 16, "capability_major": 75, "capability_minor": 76, "shared_bytes": 97}
# CUfunction_attribute
_STATIC_SHARED_BYTES, _MAX_DYNAMIC_SHARED_BYTES = 1, 8


class Driver:
    """The library, initialised. Its calls raise ``DeviceError``."""

    def __init__(self) -> None:
        """Raises ``DeviceError`` if there is no driver or no GPU that it may use."""
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DeviceError("there is no NVIDIA driver (libcuda.so.1); install one, or use --device cpu") from error
        status = self.library.cuInit(0)
        if status == _NO_DEVICE:
            raise DeviceError("the NVIDIA driver sees no GPU; look at nvidia-smi and at CUDA_VISIBLE_DEVICES")
        self.check(status, "starting the NVIDIA driver")

    @property
    def cuda_version(self) -> tuple[int, int]:
        """The newest CUDA that the driver knows, such as (13, 0)."""
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        return version.value // 1000, version.value % 1000 // 10

    @property
    def gpus(self) -> int:
        """How many GPUs there are."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def name(self, index: int) -> str:
        """What the GPU is called."""
        text = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", text, len(text), index)
        return text.value.decode(errors="replace")

    def attribute(self, index: int, name: str) -> int:
        """``sm_count``, ``capability_major``, ``capability_minor``, or ``shared_bytes`` of one block at most."""
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), _ATTRIBUTES[name], index)
        return value.value

    def arch(self, index: int) -> int:
        """Compute capability times ten."""
        return 10 * self.attribute(index, "capability_major") + self.attribute(index, "capability_minor")

    def memory_bytes(self, index: int) -> int:
        """All of the GPU's memory."""
        size = ctypes.c_size_t()
        self.call("cuDeviceTotalMem_v2", ctypes.byref(size), index)
        return size.value

    def pci_address(self, index: int) -> str:
        """Such as 0000:01:00.0: the same whatever CUDA_VISIBLE_DEVICES makes of the order."""
        text = ctypes.create_string_buffer(32)
        self.call("cuDeviceGetPCIBusId", text, len(text), index)
        return text.value.decode().lower()

    def primary_context(self, index: int) -> ctypes.c_void_p:
        """The context that CuPy and the CUDA runtime use too; current in this thread afterwards."""
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), index)
        self.call("cuCtxSetCurrent", context)
        return context

    def load_module(self, code: bytes) -> ctypes.c_void_p:
        """A cubin, or PTX with a zero behind it, on the GPU of the current context."""
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), code)
        return module

    def function(self, module: ctypes.c_void_p, name: str, shared_bytes: int) -> int:
        """A handle of a kernel that may use ``shared_bytes`` of shared memory, its static part included."""
        function, static = ctypes.c_void_p(), ctypes.c_int()
        status = self.library.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        self.check(status, f"looking for kernel {name}")
        self.call("cuFuncGetAttribute", ctypes.byref(static), _STATIC_SHARED_BYTES, function)
        self.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes - static.value)
        assert function.value is not None
        return function.value

    def call(self, name: str, *args: Any) -> None:
        """Call a function of the driver."""
        self.check(getattr(self.library, name)(*args), name)

    def check(self, status: int, what: str) -> None:
        """Raise ``DeviceError`` for a status that is not success."""
        if status:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(status, ctypes.byref(text))
            meaning = (text.value or b"unknown error").decode()
            if status == OUT_OF_MEMORY:
                raise DeviceMemoryError(f"CUDA has no memory for {what}: {meaning} ({status}); {LESS_MEMORY}")
            raise DeviceError(f"CUDA failed in {what}: {meaning} ({status})")
