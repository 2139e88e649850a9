"""CUDA sources compiled by g++ into shared libraries for the CPU; see ``standin.h``.

The preprocessor runs first. In its output the words that C++ has no use for are replaced, and what is left of the
source after all ``#if``s says which kernels there are. The same text and options give the same library, so it is kept
in a folder for temporary files under a hash of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
CUDA_SRC = HERE.parents[1] / "cuda_src"

Defines = Sequence[tuple[str, int | str]]

# Not -O2: compiling takes longer than running. Nothing is contracted to fma behind the source's back, so two instances
# of one expression have the same bits.
_FLAGS = ("-O1", "-march=native", "-ffp-contract=off", "-std=c++17", "-fPIC", "-shared", "-Wl,-z,now", "-Wl,-Bsymbolic",
          "-fno-gnu-unique", "-U_FORTIFY_SOURCE", "-w")

_DYNAMIC_SHARED = re.compile(
    r"extern\s+(?:__attribute__\s*\(\(aligned\s*\(\s*\w+\s*\)\)\)\s*|__shared__\s+)+"
    r"([\w:]+(?:\s+[\w:]+)*)\s+(\w+)\s*\[\s*\]\s*;"
)
_KERNEL = re.compile(r"__global__\s+void\s+(\w+)\s*\(")


class BuildError(Exception):
    """g++ refused a source; the message is what it said."""


@cache
def kernel_library(source: Path, defines: Defines, arch: int, portable: bool = False) -> Path:
    """The library of one source with these defines, as if for the GPU ``arch`` (compute capability times ten). Sources
    stay as they are while a process lasts: only the first call reads them."""
    text = _prepared(_preprocess(source, defines, arch))
    runtime = runtime_library(portable)
    return _built(
        source.stem, text, _FLAGS, ("-x", "c++-cpp-output", "-", "-x", "none", str(runtime)),
        hash_also=runtime.name,
    )


@cache
def runtime_library(portable: bool = False) -> Path:
    """The library that runs threads, which kernel libraries need. ``portable``: without the switch in assembler."""
    parts = [HERE / "runtime.cpp", HERE / "mma.cpp"]
    texts = "".join(path.read_text() for path in sorted((*HERE.glob("*.h"), *parts)))
    flags = (*_FLAGS, "-O2", "-D__CUDA_ARCH__=900", *(("-DKVS_UCONTEXT",) if portable else ()))
    return _built("runtime", "", flags, tuple(map(str, parts)), hash_also=texts)


def _preprocess(source: Path, defines: Defines, arch: int) -> str:
    command = [
        "g++", "-E", "-x", "c++", "-std=c++17", "-DKVS_ON_CPU", f"-D__CUDA_ARCH__={arch * 10}",
        *(f"-D{name}={value}" for name, value in defines),
        "-include", str(HERE / "standin.h"), "-I", str(CUDA_SRC), str(source),
    ]
    return _run(command, "")


def _prepared(text: str) -> str:
    """Preprocessed CUDA as C++, with the entries of its kernels behind it."""
    kernels = _KERNEL.findall(text)
    text = _DYNAMIC_SHARED.sub(r"\1* const \2 = (\1*)kvs_dynamic_shared;", text)
    text = re.sub(r"\b__shared__\b", "static thread_local", text)
    text = re.sub(r"\b__global__\b", "", text)
    entries = "".join(
        f'extern "C" void kvs_call_{name}(void** args) {{ cpu::call({name}, args); }}\n'
        f'extern "C" const char* kvs_signature_{name}() {{ return cpu::Signature<decltype(&{name})>::text; }}\n'
        for name in dict.fromkeys(kernels)
    )
    return f"{text}\n{entries}"


def _built(stem: str, text: str, flags: Sequence[str], inputs: Sequence[str], hash_also: str) -> Path:
    digest = hashlib.sha256("\0".join((text, hash_also, *flags, _compiler())).encode()).hexdigest()[:24]
    path = _folder() / f"{stem}-{digest}.so"
    if not path.exists():
        with _turn(path), tempfile.TemporaryDirectory(dir=_folder()) as scratch:
            if not path.exists():
                fresh = Path(scratch) / path.name
                _run(["g++", *flags, "-o", str(fresh), *inputs], text)
                os.replace(fresh, path)
    return path


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Processes that want the same library at the same time: one compiles, the others wait for it."""
    lock = path.with_suffix(".lock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        lock.unlink(missing_ok=True)   # who waits holds the file still, and then finds the library


def _run(command: Sequence[str], text: str) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


@cache
def _compiler() -> str:
    """What a library depends on besides its text: the compiler, and the processor that -march=native means."""
    version = _run(["g++", "--version"], "")
    with open("/proc/cpuinfo") as info:
        features = next((line for line in info if line.startswith(("flags", "Features"))), "")
    return version + features


@cache
def _folder() -> Path:
    path = Path(tempfile.gettempdir()) / f"kvs-cuda-on-cpu-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path
