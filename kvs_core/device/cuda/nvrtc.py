"""CUDA sources compiled at run time by NVRTC, called through ctypes: several threads compile at once, and no CuPy is
needed. What comes of them is kept on disk, code of a GPU (cubins) or PTX, which the driver turns into code of its GPU:

    KVS_CACHE_DIR, else XDG_CACHE_HOME/kvs, else ~/.cache/kvs      there kernels/<source>-<hash>.cubin or .ptx

The hash covers the source, everything in ``cuda_src/common``, the options and NVRTC's version; the file begins with
the hash of what follows, so that a damaged one is compiled again.

Floats: subnormal results are zero (-ftz=true), products and sums contract to fused ones where C++ lets them.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import cuda_src
from kvs_core.errors import DeviceError

LOGGER = logging.getLogger(__name__)

Defines: TypeAlias = Sequence[tuple[str, int | str]]

SOURCES = Path(cuda_src.__path__[0])
"""Where the CUDA sources are."""

_DIGEST_BYTES = 32


class Nvrtc:
    """The library. ``version``: such as (13, 0)."""

    def __init__(self) -> None:
        """Raises ``DeviceError`` if it is not installed."""
        try:
            from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
        except ImportError as error:
            raise DeviceError(_MISSING) from error
        try:
            found = load_nvidia_dynamic_lib("nvrtc")
        except (DynamicLibNotFoundError, OSError) as error:
            raise DeviceError(_MISSING) from error
        self._library = ctypes.CDLL(found.abs_path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = major.value, minor.value

    def supports(self, arch: int) -> bool:
        """Whether it compiles for compute capability ``arch`` / 10."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", archs)
        return arch in archs

    def compile(self, source: str, defines: Defines, target: str) -> bytes:
        """``cuda_src/source`` for ``target``: the cubin of sm_90, say, or the PTX of compute_80, a zero behind it. May
        run in several threads.

        Raises ``DeviceError`` with the first error that NVRTC reports.
        """
        program = ctypes.c_void_p()
        text = (SOURCES / source).read_bytes()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text, source.encode(), 0, None, None)
        try:
            options = [option.encode() for option in (*_options(defines, target), f"-I{SOURCES}")]
            array = (ctypes.c_char_p * len(options))(*options)
            status = self._library.nvrtcCompileProgram(program, len(options), array)
            if status:
                log = self._bytes("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program).rstrip(b"\0").decode()
                LOGGER.debug("%s %s for %s:\n%s", source, dict(defines), target, log)
                first = next((line for line in log.splitlines() if "error" in line), self._meaning(status))
                raise DeviceError(
                    f"{source} {dict(defines)} does not compile for {target} with NVRTC "
                    f"{'.'.join(map(str, self.version))}: {first}"
                )
            if _is_ptx(target):
                return self._bytes("nvrtcGetPTXSize", "nvrtcGetPTX", program)
            return self._bytes("nvrtcGetCUBINSize", "nvrtcGetCUBIN", program)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, size_name: str, name: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(size_name, program, ctypes.byref(size))
        out = ctypes.create_string_buffer(size.value)
        self._call(name, program, out)
        return out.raw

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._library, name)(*args)
        if status:
            raise DeviceError(f"NVRTC failed in {name}: {self._meaning(status)}; install it again, or another version")

    def _meaning(self, status: int) -> str:
        return str(self._library.nvrtcGetErrorString(status).decode())


_MISSING = "the CUDA compiler NVRTC is not installed; pip install 'kvs-llm[cuda13]', or [cuda12]"


@cache
def nvrtc() -> Nvrtc:
    """The library of this process. Raises ``DeviceError`` if there is none."""
    return Nvrtc()


def compile_only(source: str, defines: Defines, target: str) -> bytes:
    """A source for ``target``, see ``Nvrtc.compile``, without the cache and without a GPU."""
    return nvrtc().compile(source, defines, target)


def cached_code(source: str, defines: Defines, target: str) -> bytes | None:
    """What an earlier run left on disk."""
    path = _cache_path(source, defines, target)
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    digest, code = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def compile_cached(source: str, defines: Defines, target: str) -> bytes:
    """Compile, and leave what comes of it on disk for the next run. A disk that takes nothing costs a warning."""
    code = compile_only(source, defines, target)
    path = _cache_path(source, defines, target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Under another name first: a process that is killed, or another one that reads, finds all or nothing.
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(file.name, path)
    except OSError as error:
        _warn_once(f"compiled kernels cannot be kept in {path.parent}: {error.strerror}; set KVS_CACHE_DIR")
    return code


@cache
def _warn_once(message: str) -> None:
    LOGGER.warning("%s", message)


def _is_ptx(target: str) -> bool:
    return target.startswith("compute_")


def _options(defines: Defines, target: str) -> tuple[str, ...]:
    return ("-std=c++17", f"-arch={target}", "-ftz=true", *(f"-D{name}={value}" for name, value in defines))


def _cache_path(source: str, defines: Defines, target: str) -> Path:
    parts = (_sources_digest(source), *_options(defines, target), *map(str, nvrtc().version))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    ending = "ptx" if _is_ptx(target) else "cubin"
    return cache_root() / "kernels" / f"{Path(source).stem}-{digest}.{ending}"


def cache_root() -> Path:
    """The folder of what can be made again."""
    if own := os.environ.get("KVS_CACHE_DIR"):
        return Path(own)
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "kvs"


@dataclass(frozen=True, slots=True)
class KernelCache:
    """Compiled kernels on disk.

    writable         whether the next one could be kept, also where the folder is still to be made
    disk_free_bytes  None if the disk does not tell
    """

    folder: Path
    entries: int
    size_bytes: int
    writable: bool
    disk_free_bytes: int | None


def kernel_cache() -> KernelCache:
    """Its state now. Leaves nothing behind."""
    folder = cache_root() / "kernels"
    sizes = []
    with suppress(OSError):
        sizes = [path.stat().st_size for path in folder.iterdir() if path.suffix in (".cubin", ".ptx")]
    above = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.exists(place))
    try:
        with tempfile.TemporaryFile(dir=above):
            writable = True
    except OSError:
        writable = False
    free = None
    with suppress(OSError):
        free = shutil.disk_usage(above).free
    return KernelCache(folder, len(sizes), sum(sizes), writable, free)


@cache
def _sources_digest(source: str) -> str:
    """Of a source and of all headers: which of them it includes is not looked at."""
    digest = hashlib.sha256()
    for path in (SOURCES / source, *sorted((SOURCES / "common").glob("*.cuh"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
