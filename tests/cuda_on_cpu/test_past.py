"""What kernels that run ahead find on the stand-in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvs_core.device.cuda.kernel import PTR, Kernel
from tests.cuda_on_cpu import memory
from tests.cuda_on_cpu.launcher import CpuLauncher
from tests.cuda_on_cpu.past import Past

ADD = "if (threadIdx.x == 0 && blockIdx.x == 0) x[0]++;"
LOOK = (
    "const int found = *(volatile int*)x; {} int* const out = x + 1 + 2 * blockIdx.x;"
    "out[0] = found, out[1] = *(volatile int*)x;"
)


@pytest.mark.parametrize(("before", "early"), [
    (["pdl_trigger(); pdl_wait();" + ADD], 5),
    (["pdl_trigger(); pdl_wait();" + ADD] * 3, 5),
    ([ADD], 6),                                                                     # lets nobody in
    (["pdl_trigger(); pdl_wait();" + ADD, "pdl_wait(); pdl_trigger();" + ADD], 6),   # only behind the first
    (["pdl_trigger(); pdl_wait();" + ADD, "pdl_wait();" + ADD, "pdl_trigger(); pdl_wait();" + ADD], 7),
])
def test_a_kernel_finds_what_was_before_the_chain(tmp_path: Path, before: Sequence[str], early: int) -> None:
    """Up to its wait, in every block, and then what the others left; a plain one finds that at once."""
    past = Past()
    launcher = CpuLauncher(past=past)
    x = memory.poisoned(8, np.int32)
    past.memories.append(x.view(np.uint8))
    kernels = []
    for number, body in enumerate([*before, LOOK.format("pdl_trigger(); pdl_wait();")]):
        source = tmp_path / f"k{number}.cu"
        source.write_text(
            f'#include "common/ptx.cuh"\nextern "C" __global__ void k(int* x) {{ {body} }}\n'
        )
        kernels.append(Kernel(str(source), "k", (PTR,)))
    for ahead, found in ((True, early), (False, 5 + len(before))):
        x[:] = [5, *[0] * 7]
        for number, kernel in enumerate(kernels):
            is_ahead = number > 0 and (ahead or kernel is not kernels[-1])
            launcher.launch(kernel, (2, 1, 1), 32, (x,), overlap=is_ahead, ahead=is_ahead)
        assert x.tolist() == [5 + len(before), *[found, 5 + len(before)] * 2, 0, 0, 0]


def test_what_a_kernel_writes_early_stays(tmp_path: Path) -> None:
    """Beside what it has not seen yet."""
    past = Past()
    launcher = CpuLauncher(past=past)
    x = memory.poisoned(2, np.int32)
    past.memories.append(x.view(np.uint8))
    x[:] = 5, 5
    for number, body in enumerate(["pdl_trigger(); x[0] = 6;", "x[1] = 7; pdl_wait();"]):
        source = tmp_path / f"k{number}.cu"
        source.write_text(f'#include "common/ptx.cuh"\nextern "C" __global__ void k(int* x) {{ {body} }}\n')
        launcher.launch(Kernel(str(source), "k", (PTR,)), (1, 1, 1), 32, (x,), overlap=number > 0, ahead=number > 0)
    assert x.tolist() == [6, 7]
