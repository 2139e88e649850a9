"""A step's embeddings and rotary tables are the host's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from kvs_core.device.cuda.matrices import CudaWeight
from kvs_core.device.cuda.ops.embed import Embed, instances, kernels_for
from kvs_core.device.cuda.ops.matmul_rows import BLOCK_TYPES
from kvs_core.device.operands import RopeTable
from kvs_core.memory.phases import Phase
from tests.ops.test_cuda_matmul_rows import ALL_TYPES, random_rows, row_section, some_columns, values_of

Quant = GGMLQuantizationType
V = 11


def table_of(lab: Any, quant: Quant, rows: np.ndarray, cols: int) -> CudaWeight:
    """An embedding table on the device."""
    return CudaWeight("token_embd", cols, len(rows), (row_section(lab, quant, rows),), None)


def embedded(lab: Any, table: CudaWeight, tokens: list[int], phase: Phase) -> np.ndarray:
    """x of a step."""
    x = lab.empty((len(tokens), table.n_in), np.float32)
    Embed(lab.context(len(tokens), tokens=np.array(tokens, np.int32), phase=phase)).run(table, x)
    return lab.host(x)


def angles(first: int, rows: int, table: RopeTable) -> np.ndarray:
    """(cos, sin) in float64, [rows, pairs, 2]."""
    angle = np.multiply.outer(np.arange(first, first + rows, dtype=np.float64), table.inv_freq)
    return table.magnitude * np.stack([np.cos(angle), np.sin(angle)], axis=-1)


def rope_of(n_rot: int, base: float = 1e6, magnitude: float = 1.0) -> RopeTable:
    """The usual frequencies."""
    return RopeTable(base ** (-np.arange(0, n_rot, 2) / n_rot), False, magnitude)


@ALL_TYPES
def test_rows_are_the_host_s_bit_for_bit(lab: Any, quant: Quant) -> None:
    """Any type and width, in any order, some more than once."""
    for cols in some_columns(quant):
        rows = random_rows(quant, V, cols, scale=0.5)
        tokens = [3, 0, V - 1, 3, 7]
        out = embedded(lab, table_of(lab, quant, rows, cols), tokens, Phase.DECODE)
        np.testing.assert_array_equal(out, values_of(quant, rows, cols)[tokens], f"{cols} columns")


@pytest.mark.parametrize("phase", Phase)
def test_rows_times_a_factor(lab: Any, phase: Phase) -> None:
    """One rounding of each number."""
    rows, tokens, factor = random_rows(Quant.Q6_K, V, 512), [4, 0, 10], 5376**0.5
    x = lab.empty((3, 512), np.float32)
    context = lab.context(3, tokens=np.array(tokens, np.int32), phase=phase)
    Embed(context).run(table_of(lab, Quant.Q6_K, rows, 512), x, factor)
    np.testing.assert_array_equal(lab.host(x), values_of(Quant.Q6_K, rows, 512)[tokens] * np.float32(factor))


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("cols", [512, 2304])
def test_tokens_that_do_not_exist_are_zeros(lab: Any, phase: Phase, cols: int) -> None:
    """Ids below 0 and from V on read nothing; prefill takes more rows than decode, from its own buffer."""
    rows = random_rows(Quant.Q4_0, V, cols)
    tokens = [-1, 4, V, 2**31 - 1, 0, -(2**31)] + [5, 6, V - 1, 1, 10] * (phase is Phase.PREFILL)
    exact = values_of(Quant.Q4_0, rows, cols)
    out = embedded(lab, table_of(lab, Quant.Q4_0, rows, cols), tokens, phase)
    for token, row in zip(tokens, out, strict=True):
        np.testing.assert_array_equal(row, exact[token] if 0 <= token < V else np.zeros(cols), f"token {token}")


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("position", [0, 1, 4095, 262_140])
def test_rotary_tables_follow_the_step(lab: Any, phase: Phase, position: int) -> None:
    """Every registered embedding has cosine and sine of the step's positions, within a rounding of float32."""
    rows, tables = 4, [rope_of(64), rope_of(18, 1e4, 1.25), rope_of(130, 5e5)]
    weight = table_of(lab, Quant.F16, random_rows(Quant.F16, V, 256), 256)
    context = lab.context(rows, position=position, tokens=np.arange(rows, dtype=np.int32), phase=phase)
    if phase is Phase.DECODE:
        context.position = -1   # a launch that is replayed must not know it
    embed = Embed(context)
    ropes = [embed.add_rope(table, lab.array) for table in tables]
    embed.reserve(rows + 1, lab.array)
    embed.run(weight, lab.empty((rows, 256), np.float32))
    for rope, table in zip(ropes, tables, strict=True):
        assert rope.n_rot == table.n_rot
        cs = lab.host(rope.cs)
        assert cs.shape == (rows + 1, table.n_rot // 2, 2)
        off = np.abs(cs[:rows] - angles(position, rows, table)).max()
        assert off < 1e-7 * table.magnitude, f"n_rot {table.n_rot}: off by {off:.2e}"
        assert (cs[rows] == 0).all()


def test_equal_rotary_tables_are_one(lab: Any) -> None:
    """Layers that turn alike share a table; another magnitude, order or base is another one."""
    embed = Embed(lab.context(1, tokens=np.zeros(1, np.int32)))
    first = embed.add_rope(rope_of(32), lab.array)
    assert embed.add_rope(rope_of(32), lab.array) is first
    interleaved = RopeTable(rope_of(32).inv_freq, True)
    for other in (rope_of(32, 1e4), rope_of(32, magnitude=1.5), interleaved, rope_of(30)):
        assert embed.add_rope(other, lab.array) is not first
    assert embed.add_rope(interleaved, lab.array).interleaved
    assert not first.interleaved


def test_instances_have_every_type() -> None:
    """The list that is compiled for every architecture has what any table needs."""
    listed = set(instances(90))
    for quant in BLOCK_TYPES:
        assert set(kernels_for(quant)) <= listed
