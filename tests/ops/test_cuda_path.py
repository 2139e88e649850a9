"""What kernels promise holds on the path of older GPUs too: promises of each kernel family, on the path of sm_80.

The other files of this folder say what is promised, on the device's own path and with more cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant

from kvs_core.device.cuda.ops.matmul_kernels import fit
from kvs_core.memory.phases import Phase
from tests.ops import (
    test_cuda_attend_decode,
    test_cuda_attend_prefill,
    test_cuda_attend_window,
    test_cuda_embed,
    test_cuda_experts,
    test_cuda_fold,
    test_cuda_gdn,
    test_cuda_matmul,
    test_cuda_matmul_rows,
    test_cuda_norm,
    test_cuda_prefill_matmul,
    test_cuda_sample,
    test_cuda_synthetic,
    test_cuda_write_kv,
)
from tests.ops.conftest import DEVICES, Lab, lab_of
from tests.ops.record_weights import random_tensor, store_in

PATH = "sm_80"

PROMISES: list[tuple[Callable[..., None], dict[str, Any]]] = [
    (test_cuda_attend_decode.test_fragments, {"rows": 3, "rep": 6}),
    (test_cuda_attend_decode.test_rows_do_not_see_each_other, {"case": test_cuda_attend_decode.ROW_CASES[2]}),
    (test_cuda_attend_decode.test_splitting_does_not_matter_to_fragments, {}),
    (test_cuda_attend_prefill.test_fragment_pages_attend, {"shared_kib": 99}),
    (test_cuda_attend_window.test_pages_of_several_tiles, {"window": 100}),
    (test_cuda_embed.test_rows_are_the_host_s_bit_for_bit, {"quant": Quant.Q4_K}),
    (test_cuda_experts.test_experts_of_any_type, {"quant": Quant.Q5_K}),
    (test_cuda_fold.test_folding, {"groups": 17}),
    (test_cuda_gdn.test_rows_in_one_step_are_rows_one_by_one_bit_for_bit, {"shape": test_cuda_gdn.SMALL[0]}),
    (test_cuda_gdn.test_prefill_follows_the_delta_rule, {"n": 33}),
    (test_cuda_matmul.test_products_are_right, {"quant": Quant.Q4_K}),
    (test_cuda_matmul.test_bits_do_not_depend_on_other_rows, {"quant": Quant.Q8_0}),
    (test_cuda_matmul_rows.test_a_row_s_bits_do_not_depend_on_the_others,
     {"quant": Quant.Q4_K, "cols": 1280, "n_out": 3}),
    (test_cuda_norm.test_rms_norm, {"n": 300}),
    (test_cuda_prefill_matmul.test_project, {"quant": Quant.Q8_0, "biased": True}),
    (test_cuda_sample.test_top_k_is_exact_and_sorted, {}),
    (test_cuda_synthetic.test_bytes_are_the_host_s, {"quant": Quant.Q4_K}),
    (test_cuda_write_kv.test_fragment_pages_hold_the_same_blocks, {"phase": Phase.DECODE}),
]


@pytest.fixture(params=DEVICES)
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """On the path, see ``tests.ops.conftest``."""
    yield from lab_of(request.param, PATH)


@pytest.mark.parametrize(("promise", "case"), PROMISES, ids=[
    f"{promise.__module__.rsplit('_cuda_', 1)[-1]}: {promise.__name__.removeprefix('test_')}"
    for promise, _ in PROMISES
])
def test_promises(lab: Lab, promise: Callable[..., None], case: dict[str, Any]) -> None:
    """Right numbers, and bits that do not depend on company, places or cuts."""
    assert (lab.launcher.arch, lab.launcher.shared_bytes) == (80, 99 << 10)
    promise(lab, **case)


@pytest.mark.parametrize("device", DEVICES)
def test_products_have_the_bits_of_the_own_path(device: str) -> None:
    """Where as many warps fit a block: weights come in another way and in fewer stages, to the same sums."""
    n_in, outcome, fits = 4864, [], []
    for path in ("", PATH):
        for lab in lab_of(device, path):
            weight = store_in(lab).load([random_tensor("w", Quant.Q4_K, 40, n_in)])
            x = test_cuda_matmul.rows_of(4, n_in)
            bench = test_cuda_matmul.Bench(lab, 4, n_embd=n_in)
            outcome.append(bench.project(x, np.ones(n_in, np.float32), weight).tobytes())
            fits.append(fit(Quant.Q4_K, n_in // 256, 4, lab.launcher.shared_bytes))
    assert outcome[0] == outcome[1]
    assert fits[0].warps == fits[1].warps == 12
    if device == "cuda_on_cpu":   # a GPU may have been told the path for all tests
        assert [best.stages for best in fits] == [4, 1]
