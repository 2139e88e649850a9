"""Kernels are compiled once, kept, and launched as asked; a GPU that cannot be used is named in one line.

The driver is a fake with the driver's own structures; NVRTC is the real one.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvs_core.device.cuda import modules, nvrtc
from kvs_core.device.cuda.kernel import F32, I32, I64, PTR, Kernel
from kvs_core.device.cuda.modules import CudaFound, CudaModules, find_cuda
from kvs_core.errors import DeviceError, SettingsError

SOURCE = """#include "common/base.cuh"
extern "C" __global__ void fill(float* out, int n, long long at, float v) { if (n > N) out[at] = v + BASE; }
"""
FILL = Kernel("fill.cu", "fill", (PTR, I32, I64, F32), (("N", 3),))


class Config(ctypes.Structure):
    """CUlaunchConfig, as cuda.h has it."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("attribute_count", ctypes.c_uint),
    ]


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, padded to 8 bytes, and a union of 64, here as its first int."""

    _fields_ = [
        ("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60)
    ]


class FakeCuda:
    """libcuda with one GPU. ``launches``: what came in; ``statuses``: what the next launches return.

    It takes cubins, and PTX that ends with a zero.
    """

    def __init__(self, arch: int = 90, gpus: int = 1, version: int = 13000, init: int = 0) -> None:
        self.arch, self.gpus, self.version, self.init = arch, gpus, version, init
        self.launches: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self.loaded: list[bytes] = []
        self.loading = threading.Lock()
        self.max_shared_bytes = 0
        self.contexts_set = 0
        self.cuLaunchKernelEx = self.Launch(self)

    class Launch:
        """Reads what the addresses point to at once, as the driver does."""

        argtypes: Any

        def __init__(self, cuda: FakeCuda) -> None:
            self.cuda = cuda

        def __call__(self, config_at: int, function: int, pointers: ctypes.Array[ctypes.c_void_p], extra: None) -> int:
            if self.cuda.statuses and (status := self.cuda.statuses.pop(0)):
                return status
            config = Config.from_address(config_at)
            early = config.attribute_count and Attribute.from_address(config.attributes)
            kinds = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_float
            self.cuda.launches.append({
                "grid": tuple(config.grid), "block": tuple(config.block), "shared_bytes": config.shared_bytes,
                "stream": config.stream, "function": function, "early": early and (early.id, early.value),
                "args": tuple(kind.from_address(at).value for kind, at in zip(kinds, pointers, strict=True)),
            })
            return 0

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"it is broken"
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.gpus
        return 0

    def cuDeviceGetName(self, text: Any, size: int, index: int) -> int:
        text.value = b"Fake GPU"
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, index: int) -> int:
        value._obj.value = {16: 132, 75: self.arch // 10, 76: self.arch % 10, 97: 232448}[attribute]
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, index: int) -> int:
        size._obj.value = (24 + index) << 30
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, size: int, index: int) -> int:
        text.value = b"0000:C%d:00.0" % index
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, index: int) -> int:
        context._obj.value = 0xC0
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        assert context.value == 0xC0
        self.contexts_set += 1
        return 0

    def cuModuleLoadData(self, module: Any, cubin: bytes) -> int:
        with self.loading:
            self.loaded.append(cubin)
            module._obj.value = len(self.loaded)
        is_ptx = b"\n.version " in cubin and cubin.endswith(b"\0")
        return 0 if cubin.startswith(b"\x7fELF") or is_ptx else 200

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = 0xF0 + module.value
        code = self.loaded[module.value - 1]
        return 0 if name + b"\0" in code or b".entry " + name + b"(" in code else 500

    def cuFuncGetAttribute(self, value: Any, attribute: int, function: Any) -> int:
        assert attribute == 1   # static shared memory
        value._obj.value = 1000
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        assert attribute == 8   # most dynamic shared memory
        self.max_shared_bytes = value
        return 0


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of sources, and an empty cache beside it."""
    try:
        nvrtc.nvrtc()
    except DeviceError as error:
        pytest.skip(str(error))
    folder = tmp_path / "sources"
    (folder / "common").mkdir(parents=True)
    (folder / "fill.cu").write_text(SOURCE)
    (folder / "common/base.cuh").write_text("#define BASE 1.f\n")
    monkeypatch.setattr(nvrtc, "SOURCES", folder)
    monkeypatch.setenv("KVS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("KVS_CUDA_PATH", raising=False)
    nvrtc._sources_digest.cache_clear()
    yield folder
    nvrtc._sources_digest.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda | None) -> None:
    """Make ``cuda`` the driver of this process; None: there is none."""
    real = ctypes.CDLL

    def load(name: str, *args: Any, **kwargs: Any) -> Any:
        if name != "libcuda.so.1":
            return real(name, *args, **kwargs)
        if cuda is None:
            raise OSError("no such file")
        return cuda

    monkeypatch.setattr(ctypes, "CDLL", load)


def test_launches_arrive_as_given(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grid, block, shared memory, stream and every argument with its type; room for all shared memory of a block."""
    cuda = FakeCuda()
    install(monkeypatch, cuda)
    launcher = CudaModules(0x57)
    assert (launcher.arch, launcher.sm_count, launcher.shared_bytes) == (90, 132, 232448)
    launcher.prepare([FILL])
    assert cuda.max_shared_bytes == 231448
    launcher.launch(FILL, (7,), 64, (0x1000, -5, 1 << 40, 0.5), shared_bytes=4096)
    launcher.launch(FILL, (1, 2, 3), 32, (0x2000, 6, -1, 2))
    first, second = cuda.launches
    assert first == {
        "grid": (7, 1, 1), "block": (64, 1, 1), "shared_bytes": 4096, "stream": 0x57, "function": 0xF1, "early": 0,
        "args": (0x1000, -5, 1 << 40, 0.5),
    }
    assert (second["grid"], second["block"], second["args"]) == ((1, 2, 3), (32, 1, 1), (0x2000, 6, -1, 2.0))


@pytest.mark.parametrize("arch", [86, 90])
def test_overlap_where_it_is_safe(sources: Path, monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    """Only from sm_90 on, only if asked, not for the first launch, and not for one that follows something else."""
    cuda = FakeCuda(arch)
    install(monkeypatch, cuda)
    launcher = CudaModules(0)
    for overlap in (True, True, False, True):
        launcher.launch(FILL, (1,), 32, (0, 0, 0, 0), overlap=overlap)
    launcher.plain_next()
    for _ in range(2):
        launcher.launch(FILL, (1,), 32, (0, 0, 0, 0), overlap=True)
    programmatic = (6, 1) if arch == 90 else 0
    assert [launch["early"] for launch in cuda.launches] == [0, programmatic, 0, programmatic, 0, programmatic]


@pytest.mark.parametrize(
    ("arch", "holds", "ending"), [(80, b"\x7fELF", "cubin"), (90, b"\n.target sm_80\n", "ptx")]
)
def test_the_path_of_sm_80_on_newer_gpus(
    sources: Path, monkeypatch: pytest.MonkeyPatch, arch: int, holds: bytes, ending: str
) -> None:
    """KVS_CUDA_PATH=sm_80: code or PTX of that, kept under a name of its own; 99 KiB a block; no launch is early."""
    cuda = FakeCuda(arch)
    install(monkeypatch, cuda)
    monkeypatch.setenv("KVS_CUDA_PATH", "")
    CudaModules(0).prepare([FILL])
    monkeypatch.setenv("KVS_CUDA_PATH", "sm_80")
    launcher = CudaModules(0)
    assert (launcher.arch, launcher.sm_count, launcher.shared_bytes) == (80, 132, 99 << 10)
    assert launcher.path.named("Fake GPU") == "Fake GPU, kernels of sm_80"
    launcher.prepare([FILL])
    assert holds in cuda.loaded[-1]
    for _ in range(3):
        launcher.launch(FILL, (1,), 32, (0, 0, 0, 0), overlap=True)
    assert [launch["early"] for launch in cuda.launches] == [0, 0, 0]
    assert cuda.max_shared_bytes == (99 << 10) - 1000
    kept = sorted(path.suffix for path in (sources.parent / "cache/kernels").iterdir())
    assert kept == ([".cubin"] if arch == 80 else [".cubin", f".{ending}"])
    CudaModules(0).prepare([FILL])
    assert cuda.loaded[-1] == cuda.loaded[-2]
    assert len(kept) == len(list((sources.parent / "cache/kernels").iterdir()))


NO_PATH = "KVS_CUDA_PATH=sm_90 is no path of the kernels; set it to sm_80, or unset it for the GPU's own"


@pytest.mark.parametrize(
    ("asked", "arch", "said"),
    [
        ("sm_90", 90, NO_PATH),
        ("sm_90", None, NO_PATH),
        ("sm_80", 75, "KVS_CUDA_PATH=sm_80: this GPU has compute capability 7.5, 8.0 or newer is needed; unset it"),
    ],
)
def test_a_path_that_cannot_be_is_one_line(
    sources: Path, monkeypatch: pytest.MonkeyPatch, asked: str, arch: int | None, said: str
) -> None:
    """An error on every machine: what was asked for is not what the CPU would do."""
    install(monkeypatch, None if arch is None else FakeCuda(arch))
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(13000))
    monkeypatch.setenv("KVS_CUDA_PATH", asked)
    with pytest.raises(SettingsError) as caught:
        find_cuda()
    assert str(caught.value) == said


def test_a_path_is_what_the_compiler_must_know(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is newer than NVRTC runs PTX of sm_80."""
    install(monkeypatch, FakeCuda(arch=990))
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(13000))
    assert "does not know sm_990" in str(find_cuda())
    monkeypatch.setenv("KVS_CUDA_PATH", "sm_80")
    assert isinstance(find_cuda(), CudaFound)


def test_kernels_are_compiled_once(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances of one source and defines share a module; the next start finds all on disk, unless a header changed."""
    cuda = FakeCuda()
    install(monkeypatch, cuda)
    kernels = [FILL, replace(FILL), replace(FILL, defines=(("N", 4),))]

    def start() -> list[tuple[int, int]]:
        said: list[tuple[int, int]] = []
        CudaModules(0).prepare(kernels, lambda done, total: said.append((done, total)))
        return said

    compiled: list[str] = []
    compile_cached = modules.compile_cached

    def counted(source: str, *args: Any) -> bytes:
        compiled.append(source)
        return compile_cached(source, *args)

    monkeypatch.setattr(modules, "compile_cached", counted)
    assert start() == [(0, 2), (1, 2), (2, 2)]
    assert len(compiled) == 2
    assert start() == [(0, 2), (1, 2), (2, 2)]
    assert len(compiled) == 2
    assert len(cuda.loaded) == 4
    assert sorted(cuda.loaded[:2]) == sorted(cuda.loaded[2:])
    (sources / "common/base.cuh").write_text("#define BASE 2.f\n")
    nvrtc._sources_digest.cache_clear()
    start()
    assert len(compiled) == 4


def test_what_was_begun_is_there_when_it_is_prepared(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``begin`` returns at once; what fails in the background is an error of ``prepare``, and may be tried again."""
    cuda = FakeCuda()
    install(monkeypatch, cuda)
    held, release = threading.Event(), threading.Event()
    compile_cached = modules.compile_cached

    def slow(*args: Any) -> bytes:
        held.set()
        assert release.wait(10)
        return compile_cached(*args)

    monkeypatch.setattr(modules, "compile_cached", slow)
    launcher = CudaModules(0)
    (sources / "late.cu").write_text("__device__ int x = nonsense;\n")
    broken = replace(FILL, source="late.cu")
    launcher.begin([FILL, broken])
    assert held.wait(10)
    assert not cuda.loaded
    release.set()
    launcher.prepare([FILL])
    assert len(cuda.loaded) == 1
    with pytest.raises(DeviceError, match=r"late\.cu .* does not compile"):
        launcher.prepare([FILL, broken])
    (sources / "late.cu").write_text((sources / "fill.cu").read_text())
    launcher.prepare([FILL, broken])
    assert len(cuda.loaded) == 2


def test_a_launcher_that_is_closed_begins_nothing_more(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends while kernels are compiled waits for those under way alone."""
    install(monkeypatch, FakeCuda())
    monkeypatch.setattr(modules, "_COMPILERS", 1)
    held, release, ran = threading.Event(), threading.Event(), []

    def slow(source: str, *args: Any) -> bytes:
        ran.append(source)
        held.set()
        assert release.wait(10)
        return b""

    monkeypatch.setattr(modules, "compile_cached", slow)
    launcher = CudaModules(0)
    launcher.begin([FILL, *(replace(FILL, defines=(("N", n),)) for n in range(5))])
    assert held.wait(10)
    launcher.close()
    release.set()
    launcher._pool.shutdown(wait=True)
    assert len(ran) == 1


def test_a_damaged_cache_is_made_good(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cubin that was cut off is compiled again."""
    cuda = FakeCuda()
    install(monkeypatch, cuda)
    CudaModules(0).prepare([FILL])
    (kept,) = (sources.parent / "cache/kernels").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-100])
    CudaModules(0).prepare([FILL])
    assert kept.read_bytes() == whole
    assert cuda.loaded == [whole[32:]] * 2


def test_no_cache_costs_a_warning(
    sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where nothing can be written, kernels are compiled all the same."""
    install(monkeypatch, FakeCuda())
    monkeypatch.setenv("KVS_CACHE_DIR", str(sources / "fill.cu"))
    launcher = CudaModules(0)
    launcher.prepare([FILL])
    launcher.launch(FILL, (1,), 32, (0, 0, 0, 0))
    assert "compiled kernels cannot be kept in" in caplog.text
    assert "set KVS_CACHE_DIR" in caplog.text


def test_failures_are_one_line(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the compiler, of a launch; but a thread without a context gets one."""
    cuda = FakeCuda()
    install(monkeypatch, cuda)
    launcher = CudaModules(0)
    (sources / "broken.cu").write_text("__device__ int x = nonsense;\n")
    with pytest.raises(DeviceError, match=r"^broken.cu \{\} does not compile for sm_90 with NVRTC .*nonsense.*$"):
        launcher.prepare([FILL, Kernel("broken.cu", "k", ())])
    with pytest.raises(DeviceError, match="CUDA failed in looking for kernel nothing: "):
        launcher.launch(Kernel("fill.cu", "nothing", (), FILL.defines), (1,), 32, ())
    cuda.statuses = [1]
    with pytest.raises(DeviceError, match=r"^CUDA failed in launching fill \(9, 1, 1\) x 32, 0 bytes shared: it is"):
        launcher.launch(FILL, (9,), 32, (0, 0, 0, 0))
    cuda.statuses = [201]
    before = cuda.contexts_set
    launcher.launch(FILL, (8,), 32, (0, 0, 0, 0))
    assert cuda.launches[-1]["grid"] == (8, 1, 1)
    assert cuda.contexts_set == before + 1


def fake_cupy(runtime: int) -> Any:
    """CuPy, as far as it is asked."""
    return SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(runtimeGetVersion=lambda: runtime)))


@pytest.mark.parametrize(
    ("cuda", "index", "cupy", "said"),
    [
        (None, 0, 13000, r"there is no NVIDIA driver \(libcuda.so.1\); install one, or use --device cpu"),
        (FakeCuda(init=100), 0, 13000, "the NVIDIA driver sees no GPU; look at nvidia-smi"),
        (FakeCuda(init=803), 0, 13000, r"CUDA failed in starting the NVIDIA driver: it is broken \(803\)"),
        (FakeCuda(gpus=2), 2, 13000, "there is no GPU 2; the driver sees 2, counted from 0"),
        (FakeCuda(arch=70), 0, 13000, "GPU 0, Fake GPU, has compute capability 7.0; 7.5 or newer is needed"),
        (FakeCuda(), 0, None, r"CuPy is not installed; pip install 'kvs-llm\[cuda13\]'"),
        (FakeCuda(version=11080), 0, 11080, "the driver knows CUDA 11.8, 12.0 or newer is needed; update the driver"),
        (FakeCuda(version=12080), 0, None, r"CuPy is not installed; pip install 'kvs-llm\[cuda12\]'"),
        (FakeCuda(version=12080), 0, 13000, r"the driver knows CUDA 12.8, CuPy is built for 13; update the driver"),
        (FakeCuda(version=12080), 0, 12000, r"the driver knows CUDA 12.8, the compiler NVRTC is 13.\d+; update"),
        (FakeCuda(arch=77), 0, 13000, r"NVRTC 13.\d+ does not know sm_77 \(Fake GPU\); install a newer one"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_one_line(
    sources: Path, monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda | None, index: int, cupy: int | None, said: str
) -> None:
    """What is missing, and what to do."""
    install(monkeypatch, cuda)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(cupy) if cupy else None)
    found = find_cuda(index)
    assert isinstance(found, str)
    assert "\n" not in found
    assert re.match(said, found), found


def test_a_gpu_that_can_be_used_is_described(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its name, compute capability and versions; without NVRTC it cannot be."""
    install(monkeypatch, FakeCuda(arch=120))
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(13000))
    version = ".".join(map(str, nvrtc.nvrtc().version))
    assert find_cuda() == CudaFound(0, "Fake GPU", 120, "13.0", version)

    def missing() -> None:
        raise DeviceError("the CUDA compiler NVRTC is not installed")

    monkeypatch.setattr(modules, "nvrtc", missing)
    assert find_cuda() == "the CUDA compiler NVRTC is not installed"
