"""Choosing a device on the command line, on a machine without a GPU (or as if it had none)."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvs_core.device.cuda.modules import find_cuda
from tests.cli.conftest import GREEDY, Kvs


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none."""
    monkeypatch.setattr("kvs_core.device.cuda.modules.find_cuda", lambda index=0: f"there is no GPU {index}; get one")


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--device", "cuda"), "--device cuda: there is no GPU 0; get one"),
        (("--device", "CUDA1"), "--device cuda:1: there is no GPU 1; get one"),
        (("-dev", "cuda", "--main-gpu", "2"), "--device cuda: there is no GPU 2; get one"),
        (("--device", "cuda", "-ngl", "0"), "--device cuda: there is no GPU 0; get one"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, tuple) else "",
)
def test_a_gpu_that_is_not_there(kvs: Kvs, tiny_llama: Path, flags: tuple[str, ...], error: str) -> None:
    """One line, exit code 1, nothing on stdout."""
    assert kvs("run", "-m", tiny_llama, "-p", "x", "-n", "1", *flags).error == error


def test_a_path_of_the_kernels_that_is_none(kvs: Kvs, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, whatever GPU there is or not; who wants the CPU has no use for it."""
    monkeypatch.setattr("kvs_core.device.cuda.modules.find_cuda", find_cuda)
    monkeypatch.setenv("KVS_CUDA_PATH", "sm_50")
    assert kvs("run", "-m", tiny_llama, "-p", "x", "-n", "1").error == (
        "KVS_CUDA_PATH=sm_50 is no path of the kernels; set it to sm_80, or unset it for the GPU's own"
    )
    assert kvs("run", "-m", tiny_llama, "-p", "x", "-n", "1", "--device", "cpu").code == 0


def test_auto_takes_the_cpu(kvs: Kvs, tiny_llama: Path) -> None:
    """And says why; the CPU asked for by name or by ``-ngl 0`` gives the same text without a word of GPUs."""
    command = ("run", "-m", tiny_llama, "-p", "x", "-n", "3", *GREEDY)
    auto = kvs(*command)
    assert auto.code == 0
    assert "device: no GPU is used: there is no GPU 0; get one" in auto.err
    for flags in (("--device", "cpu"), ("-ngl", "0"), ("--main-gpu", "1", "-ngl", "0")):
        done = kvs(*command, *flags)
        assert (done.code, done.out) == (0, auto.out)
        assert "GPU" not in done.err
    done = kvs(*command, "-ngl", "3")
    assert (done.code, done.out) == (0, auto.out)
    assert "--gpu-layers 3: without a GPU all weights are in the CPU's memory, and none moves" in done.err
