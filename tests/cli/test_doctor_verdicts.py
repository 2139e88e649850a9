"""``kvs doctor``'s verdicts: facts of machines that are nowhere near, and what is said of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvs_cli.doctor.check import Check, Verdict
from kvs_cli.doctor.facts import SETTINGS, CudaFacts, Facts, GpuFacts, HostFacts, Rates
from kvs_cli.doctor.verdicts import can_run, judge
from kvs_core.device.cuda.about import Gpu
from kvs_core.device.cuda.nvml import Card, Holder, PcieLink
from kvs_core.device.cuda.nvrtc import KernelCache
from kvs_core.device.host.machine import BlasLibrary
from kvs_core.device.pinning import Pinned
from kvs_core.units import MIB

GIB = 1024 * MIB
CARD = Card(24 * GIB, 23 * GIB, (), PcieLink(4, 4, 16, 16))
GPU = GpuFacts(Gpu(0, "Some GPU", 89, 24 * GIB, "0000:01:00.0"), None, CARD, Rates(25e9, 24e9, 800e9))
HOST = HostFacts(
    system="Linux 6.1", python="3.12.1", version="1.0", cpu="Some CPU", cores=8,
    instruction_sets=("avx", "avx2", "fma"), blas=(BlasLibrary("openblas", "0.3.31", "Haswell", 8),),
    ram_bytes=64 * GIB, ram_free_bytes=50 * GIB, ram_rate=20e9, memlock_is_unlimited=True,
)
CUDA = CudaFacts(
    nvidia_cards=1, driver_version="580.65", driver_cuda=(13, 0), source="nvml", gpus=(GPU,),
    cupy_packages=("cupy-cuda13x 14.2.0",), cupy_cuda=(13, 0), nvrtc=(13, 0), pinned=Pinned(2 * GIB, 2 * GIB, None),
)
GOOD = Facts(HOST, CUDA, KernelCache(Path("/cache/kernels"), 12, 3 * MIB, True, 90 * GIB))
NO_GPU = CudaFacts(
    nvidia_cards=0, driver_problem="there is no NVIDIA driver (libcuda.so.1); install one, or use --device cpu",
    cupy_packages=(), cupy_problem="CuPy is not installed; pip install 'kvs-llm[cuda13]'",
    nvrtc_problem="the CUDA compiler NVRTC is not installed; pip install 'kvs-llm[cuda13]', or [cuda12]",
)


def host(**changes: object) -> Facts:
    return replace(GOOD, host=replace(HOST, **changes))   # type: ignore[arg-type]


def cuda(**changes: object) -> Facts:
    return replace(GOOD, cuda=replace(CUDA, **changes))   # type: ignore[arg-type]


def gpu(**changes: object) -> Facts:
    return cuda(gpus=(replace(GPU, **changes),))   # type: ignore[arg-type]


def card(**changes: object) -> Facts:
    return gpu(card=replace(CARD, **changes))   # type: ignore[arg-type]


def settings(**values: str) -> Facts:
    return replace(GOOD, settings=dict.fromkeys(SETTINGS) | values)


def check_of(facts: Facts, name: str) -> Check:
    (found,) = [check for check in judge(facts) if check.name == name]
    return found


def test_a_good_machine_has_nothing_to_do() -> None:
    """All is ok, and each thing is a line of its own."""
    checks = judge(GOOD)
    assert [check.name for check in checks] == [
        "kvs", "system", "CPU", "BLAS", "RAM", "container limit", "driver", "cuda:0", "cuda:0 memory", "cuda:0 PCIe",
        "cuda:0 rates", "CuPy", "NVRTC", "pinned memory", "kernel cache", "device",
    ]
    assert {check.verdict for check in checks} == {Verdict.OK}
    assert can_run(checks)
    assert check_of(GOOD, "cuda:0 rates").found == (
        "25.0 GB/s to the GPU, 24.0 GB/s back, 800.0 GB/s within its memory")
    assert check_of(GOOD, "cuda:0 memory").found == "23.0 GiB of 24.0 GiB free"
    assert check_of(GOOD, "device").found == "--device auto takes cuda:0"


def test_a_machine_without_a_gpu_has_nothing_to_do() -> None:
    """The CPU counts; nobody is told to install what a GPU would need."""
    facts = replace(GOOD, cuda=NO_GPU)
    checks = judge(facts)
    assert {check.verdict for check in checks} == {Verdict.OK}
    assert can_run(checks)
    assert check_of(facts, "device").found == "--device auto takes cpu"


def test_nothing_known_is_nothing_wrong_that_is_fatal() -> None:
    """Facts that nobody could find out: verdicts all the same, and kvs is not said to be unable."""
    assert can_run(judge(Facts()))


CUPY_PROBLEM = "CuPy is not installed; pip install 'kvs-llm[cuda13]'"
OTHERS = (Holder(7, "python", 9 * GIB), Holder(8, "game", 6 * GIB), Holder(9, None, None), Holder(5, "x", MIB))


@pytest.mark.parametrize(
    ("facts", "name", "verdict", "found", "advice"),
    [
        # The driver.
        (cuda(driver_cuda=(11, 4)), "driver", "problem", "knows CUDA 11.4, 12.0 or newer is needed",
         "update the driver"),
        (replace(GOOD, cuda=replace(NO_GPU, nvidia_cards=1)), "driver", "problem", "no NVIDIA driver", "install one"),
        (replace(GOOD, cuda=replace(NO_GPU, nvidia_cards=None)), "driver", "warning", "no NVIDIA driver",
         "if there is an NVIDIA GPU, install its driver"),
        (replace(host(is_wsl=True), cuda=NO_GPU), "driver", "warning", "no NVIDIA driver",
         "update NVIDIA's driver in Windows, and install none in WSL"),
        (replace(settings(CUDA_VISIBLE_DEVICES="5"), cuda=replace(NO_GPU, nvidia_cards=1, driver_problem=(
            "the NVIDIA driver sees no GPU; look at nvidia-smi and at CUDA_VISIBLE_DEVICES"))),
         "driver", "warning", "sees no GPU", "unset CUDA_VISIBLE_DEVICES, which is '5'"),
        # GPUs.
        (gpu(gpu=replace(GPU.gpu, arch=70), problem="GPU 0 has compute capability 7.0; 7.5 or newer is needed"),
         "cuda:0", "problem", "compute capability 7.0", "use a GPU of 7.5 or newer"),
        (gpu(problem=CUPY_PROBLEM), "cuda:0", "problem", "Some GPU, compute capability 8.9: CuPy is not installed",
         "pip install 'kvs-llm[cuda13]'"),
        (gpu(problem="RuntimeError: odd"), "cuda:0", "problem", "odd", "look whether nvidia-smi works"),
        (card(free_bytes=9 * GIB, holders=OTHERS), "cuda:0 memory", "warning",
         "9,216 MiB of 24.0 GiB free; held by python [7] (9,216 MiB), game [8] (6,144 MiB), x [5] (1 MiB) and 1 others",
         "end the programs that hold it"),
        (card(free_bytes=9 * GIB), "cuda:0 memory", "warning", "who holds the rest is not known", "end the programs"),
        (card(free_bytes=100 * MIB, holders=None), "cuda:0 memory", "problem", "100 MiB of 24.0 GiB free",
         "give --device cpu"),
        (gpu(card=None), "cuda:0 memory", "ok", "24.0 GiB; how much is free is not known", ""),
        (card(link=PcieLink(4, 4, 4, 16)), "cuda:0 PCIe", "warning", "4 of 16 lanes", "seat the card again"),
        (card(link=PcieLink(3, 3, 4, 4)), "cuda:0 PCIe", "warning", "4 of 4 lanes", "a slot with 16 lanes"),
        (card(link=PcieLink(1, 4, 16, 16)), "cuda:0 PCIe", "ok",
         "generation 1 of 4, 16 of 16 lanes; an idle GPU lowers its generation", ""),
        (card(link=PcieLink()), "cuda:0 PCIe", "ok", "not known", ""),
        (gpu(rates=Rates(3e9, 24e9, 800e9)), "cuda:0 rates", "warning", "the link could carry 31.5 GB/s", "a riser"),
        (gpu(rates=Rates(25e9, 3e9, 800e9)), "cuda:0 rates", "warning", "the link could carry 31.5 GB/s", "a riser"),
        (gpu(rates=Rates(3e9, 3e9, 800e9), card=None), "cuda:0 rates", "ok", "3.0 GB/s to the GPU", ""),
        # What is installed for them.
        (cuda(cupy_packages=(), cupy_cuda=None, cupy_problem=CUPY_PROBLEM), "CuPy", "problem", "is not installed",
         "pip install 'kvs-llm[cuda13]'"),
        (cuda(driver_cuda=(12, 8)), "CuPy", "problem", "the driver knows CUDA 12.8, CuPy is built for 13",
         "remove that CuPy and pip install 'kvs-llm[cuda12]'"),
        (cuda(cupy_packages=("cupy-cuda12x 14.2.0", "cupy-cuda13x 14.2.0")), "CuPy", "problem",
         "cupy-cuda12x 14.2.0, cupy-cuda13x 14.2.0: they break each other", "uninstall all of them"),
        (cuda(cupy_cuda=None, cupy_problem="AttributeError: half"), "CuPy", "problem", "AttributeError: half",
         "pip install --force-reinstall 'kvs-llm[cuda13]'"),
        (cuda(nvrtc=None, nvrtc_problem=NO_GPU.nvrtc_problem), "NVRTC", "problem", "is not installed",
         "pip install 'kvs-llm[cuda13]', or [cuda12]"),
        (cuda(nvrtc_problem="zero_page.cu does not compile"), "NVRTC", "problem", "13.0: zero_page.cu does not compile",
         "pip install --force-reinstall"),
        (cuda(driver_cuda=(12, 8), cupy_cuda=(12, 9)), "NVRTC", "problem", "the compiler NVRTC is 13.0",
         "or pip install 'kvs-llm[cuda12]'"),
        (replace(GOOD, cuda=replace(NO_GPU, cupy_packages=("cupy-cuda13x 14.2.0",))), "CuPy", "ok",
         "cupy-cuda13x 14.2.0; without a GPU it is not needed", ""),
        (replace(GOOD, cuda=replace(NO_GPU, nvrtc=(13, 0), nvrtc_problem="odd")), "NVRTC", "ok",
         "13.0; without a GPU it is not needed", ""),
        # Pinned memory.
        (replace(host(memlock_is_unlimited=False, memlock_bytes=65536), cuda=replace(CUDA, pinned=None)),
         "pinned memory", "warning", "the limit for locked memory is 0.06 MiB", "ulimit -l unlimited"),
        (replace(host(memlock_is_unlimited=False, memlock_bytes=8 * MIB),
                 cuda=replace(CUDA, pinned=Pinned(2 * GIB, 64 * MIB, "no"))),
         "pinned memory", "problem", "64 MiB pinned of 2,048 MiB tried", "--ulimit memlock=-1"),
        (replace(host(memlock_is_unlimited=False, memlock_bytes=8 * MIB)), "pinned memory", "ok",
         "2,048 MiB pinned of 2,048 MiB tried", ""),
        (cuda(pinned=Pinned(2 * GIB, GIB, "no")), "pinned memory", "warning", "1,024 MiB pinned", "lower --ctx-size"),
        (replace(host(is_wsl=True), cuda=replace(CUDA, pinned=Pinned(2 * GIB, GIB, "no"))), "pinned memory", "warning",
         "1,024 MiB pinned", ".wslconfig"),
        # The host.
        (host(is_wsl=True), "system", "warning", "in WSL", "install NVIDIA's driver in Windows alone"),
        (host(is_linux=False, system="Windows 11"), "system", "warning", "Windows 11", "use WSL 2"),
        (host(instruction_sets=("avx",)), "CPU", "warning", "no AVX2", "a newer processor"),
        (host(instruction_sets=("asimd",)), "CPU", "ok", "Some CPU, 8 cores: asimd", ""),
        (host(cpu_problem="rows vary; use another BLAS"), "CPU", "problem", "rows vary", "use another BLAS"),
        (host(blas=()), "BLAS", "warning", "none that is known", "pip install numpy"),
        (host(blas=(BlasLibrary("openblas", None, "Nehalem", 8),)), "BLAS", "warning", "the processor has AVX2",
         "unset OPENBLAS_CORETYPE"),
        (replace(settings(OPENBLAS_NUM_THREADS="1"), host=replace(HOST, blas=(BlasLibrary("openblas", "1", None, 1),))),
         "BLAS", "warning", "kvs takes 1 of 8 cores", "unset OPENBLAS_NUM_THREADS (1), or give --threads 8"),
        (host(ram_free_bytes=2 * GIB), "RAM", "warning", "2,048 MiB of 64.0 GiB can be had", "end other programs"),
        (host(ram_limit_bytes=4 * GIB), "container limit", "warning", "4,096 MiB of memory", "docker run --memory"),
        (host(ram_limit_bytes=32 * GIB), "container limit", "ok", "32.0 GiB of memory", ""),
        # The rest.
        (replace(GOOD, cache=KernelCache(Path("/c"), 0, 0, False, GIB)), "kernel cache", "warning",
         "/c: 0 kernels, 0 MiB, cannot be written", "set KVS_CACHE_DIR"),
        (replace(GOOD, cache=KernelCache(Path("/c"), 0, 0, True, MIB)), "kernel cache", "warning",
         "1 MiB of the disk are free", "make room"),
        (settings(CUDA_VISIBLE_DEVICES=""), "CUDA_VISIBLE_DEVICES", "warning", "'' hides every GPU", "unset"),
        (settings(CUDA_VISIBLE_DEVICES="-1"), "CUDA_VISIBLE_DEVICES", "warning", "hides every GPU", "unset"),
        (settings(CUDA_VISIBLE_DEVICES="1"), "CUDA_VISIBLE_DEVICES", "ok", "'1'", ""),
        (settings(GGML_CUDA_ENABLE_UNIFIED_MEMORY="1"), "GGML_CUDA_ENABLE_UNIFIED_MEMORY", "ok",
         "'1': weights that --gpu-layers keeps on the GPU may exceed its memory", ""),
        (replace(settings(GGML_CUDA_ENABLE_UNIFIED_MEMORY="1"), cuda=CudaFacts()), "GGML_CUDA_ENABLE_UNIFIED_MEMORY",
         "ok", "'1': no effect without a GPU", ""),
        (replace(settings(GGML_CUDA_ENABLE_UNIFIED_MEMORY="1"), host=replace(HOST, is_wsl=True)),
         "GGML_CUDA_ENABLE_UNIFIED_MEMORY", "warning", "'1' has no effect in WSL",
         "weights beyond the GPU are streamed"),
        (settings(KVS_CACHE_DIR="/c"), "KVS_CACHE_DIR", "ok", "'/c'", ""),
        (replace(GOOD, failed={"NVML": "NVML failed: odd; look at nvidia-smi"}), "NVML", "warning",
         "not known: NVML failed: odd", "look at nvidia-smi"),
        (replace(GOOD, failed={"cores": "ValueError: odd"}), "cores", "warning", "not known: ValueError: odd",
         "kvs may run all the same"),
        (gpu(problem=CUPY_PROBLEM), "device", "warning", "--device auto takes cpu", "mend what the lines above say"),
        (cuda(gpus=(replace(GPU, problem="old; buy"), replace(GPU, gpu=replace(GPU.gpu, index=1)))), "device",
         "warning", "--device auto takes cpu", "give --device cuda:1"),
    ],
)
def test_what_is_wrong_and_what_to_do(facts: Facts, name: str, verdict: str, found: str, advice: str) -> None:
    """Of one thing in a machine that is good otherwise. None of these keeps kvs from running: there is the CPU, or the
    GPU where the CPU does not do."""
    check = check_of(facts, name)
    assert check.verdict.value == verdict
    assert found in check.found
    assert advice in check.advice
    assert bool(advice) == bool(check.advice)
    assert can_run(judge(facts))


@pytest.mark.parametrize(
    ("facts", "fatal"),
    [
        (host(load_problem="ModuleNotFoundError: No module named 'gguf'"), "kvs"),
        (host(ram_free_bytes=100 * MIB), "RAM"),
        (replace(host(cpu_problem="rows vary; use another BLAS"), cuda=NO_GPU), "device"),
    ],
)
def test_what_makes_it_impossible(facts: Facts, fatal: str) -> None:
    """kvs that cannot be loaded, no RAM, no device at all."""
    checks = judge(facts)
    assert not can_run(checks)
    assert [check.name for check in checks if check.fatal] == [fatal]
    assert check_of(facts, fatal).verdict is Verdict.PROBLEM
    assert check_of(facts, fatal).advice
