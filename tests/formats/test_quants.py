"""Dequantization: the bits that gguf gives, for every type, however a tensor is cut into pieces."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.errors import ModelFileError
from kvs_core.formats.gguf import GgufFile, TensorInfo
from kvs_core.formats.quants import can_dequantize, dequantize, dequantize_rows, row_bytes

Q = GGMLQuantizationType
WEIGHT_TYPES = [quant for quant in Q if can_dequantize(quant)]
MIB = 1 << 20


def random_bytes(quant: Q, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Any bytes are a tensor; some of these have infinite or NaN scales, which must come through as well."""
    return np.random.default_rng(seed).integers(0, 256, rows * row_bytes(quant, cols), np.uint8)


def by_gguf(data: np.ndarray, quant: Q, rows: int) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(gguf.quants.dequantize(data.reshape(rows, -1), quant))


def as_tensor(data: np.ndarray, quant: Q, rows: int, cols: int) -> TensorInfo:
    return TensorInfo("t", (cols, rows), quant, rows * cols, data.size, data)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("quant", WEIGHT_TYPES, ids=lambda quant: quant.name)
@settings(max_examples=8, deadline=None)
@given(rows=st.integers(1, 40), blocks=st.integers(1, 5), seed=st.integers(0, 1000))
def test_every_type_gives_the_bits_of_gguf(quant: Q, rows: int, blocks: int, seed: int) -> None:
    """For random blocks of every type that gguf can read, the result equals gguf's to the last bit."""
    cols = blocks * max(GGML_QUANT_SIZES[quant][0], 32)
    data = random_bytes(quant, rows, cols, seed)
    result = dequantize(data, quant, (rows, cols))
    assert result.dtype == np.float32
    assert same_bits(result, by_gguf(data, quant, rows))


@pytest.mark.parametrize("quant", WEIGHT_TYPES, ids=lambda quant: quant.name)
def test_more_than_a_piece(quant: Q) -> None:
    """Tensors longer than one internal piece, and no multiple of it, are complete."""
    rows, cols = 31, 9 * 256
    data = random_bytes(quant, rows, cols)
    assert same_bits(dequantize(data, quant, (rows, cols)), by_gguf(data, quant, rows))


@pytest.mark.parametrize("quant", [Q.F32, Q.BF16, Q.Q4_1, Q.Q6_K, Q.IQ4_XS], ids=lambda quant: quant.name)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_rows_are_rows_of_the_whole(quant: Q, data: st.DataObject) -> None:
    """Any range of rows, into a given array or a new one, equals those rows of the whole tensor."""
    rows, cols = 12, 512
    tensor = as_tensor(random_bytes(quant, rows, cols), quant, rows, cols)
    whole = dequantize_rows(tensor, 0, rows)
    first = data.draw(st.integers(0, rows))
    count = data.draw(st.integers(0, rows - first))
    out = np.full((count, cols), 7, np.float32)
    assert dequantize_rows(tensor, first, count, out) is out
    assert same_bits(out, whole[first : first + count])
    assert same_bits(dequantize_rows(tensor, first, count), out)


def test_unaligned_read_only_data() -> None:
    """A view into a mapped file, at an odd address and not writable, reads as well."""
    for quant in WEIGHT_TYPES:
        data = random_bytes(quant, 2, 256)
        shifted = np.concatenate([np.zeros(1, np.uint8), data])[1:]
        shifted.flags.writeable = False
        assert same_bits(dequantize(shifted, quant, (2, 256)), by_gguf(data, quant, 2))


def test_a_vector_is_one_row_and_a_stack_is_its_rows() -> None:
    """Tensors of one and of three dimensions have the rows that their contiguous dimension makes."""
    values = np.arange(24, dtype=np.float32)
    vector = TensorInfo("v", (24,), Q.F32, 24, 96, values.view(np.uint8))
    stack = TensorInfo("s", (4, 3, 2), Q.F32, 24, 96, values.view(np.uint8))
    assert dequantize_rows(vector, 0, 1).tolist() == [values.tolist()]
    assert dequantize_rows(stack, 4, 2).tolist() == values[16:].reshape(2, 4).tolist()


def test_result_is_no_view_of_the_file() -> None:
    """Also float32 comes as memory of its own, which the caller may change."""
    data = np.zeros(16, np.uint8)
    result = dequantize(data, Q.F32, (1, 4))
    assert not np.shares_memory(result, data)
    assert result.flags.writeable


def test_type_without_values_is_refused_by_name() -> None:
    """Integer and intermediate types are no weights: the error names tensor and type."""
    for quant in (Q.I8, Q.I16, Q.I32, Q.I64, Q.F64, Q.Q8_1, Q.Q8_K):
        assert not can_dequantize(quant)
        data = np.zeros(GGML_QUANT_SIZES[quant][1], np.uint8)
        tensor = TensorInfo("blk.3.odd", (GGML_QUANT_SIZES[quant][0],), quant, 1, data.size, data)
        with pytest.raises(ModelFileError, match=rf"blk\.3\.odd.*{quant.name}"):
            dequantize_rows(tensor, 0, 1)


def test_no_type_of_gguf_is_left_out() -> None:
    """Every type that gguf has code for can be read: a list of its own would fall behind."""
    assert set(WEIGHT_TYPES) >= {Q.F32, Q.F16, Q.BF16, Q.Q5_0, Q.Q2_K, Q.Q3_K, Q.Q5_K, Q.IQ1_S, Q.IQ4_NL, Q.MXFP4}


@pytest.mark.parametrize("quant", WEIGHT_TYPES, ids=lambda quant: quant.name)
def test_temporaries_stay_small(quant: Q) -> None:
    """With a given result array, memory beside it stays within a few MiB, whatever the tensor's size."""
    rows, cols = 512, 4096
    data = random_bytes(quant, rows, cols)
    out = np.empty((rows, cols), np.float32)
    dequantize(data, quant, (rows, cols), out)  # tables are made at first use
    tracemalloc.start()
    dequantize(data, quant, (rows, cols), out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * MIB


def test_real_model_is_read_fast(smollm2_path: Path) -> None:
    """All 135 million weights of a Q4_1 model take about a second of one core, and equal gguf's."""
    file = GgufFile.open(smollm2_path)
    out = np.zeros(max(info.n_elements for info in file.tensors.values()), np.float32)
    start = time.process_time()
    for info in file.tensors.values():
        cols = info.shape[0]
        rows = info.n_elements // cols
        dequantize_rows(info, 0, rows, out[: info.n_elements].reshape(rows, cols))
    assert time.process_time() - start < 1.5
    for name in ("token_embd.weight", "blk.7.ffn_down.weight"):
        info = file.tensors[name]
        rows = info.n_elements // info.shape[0]
        assert same_bits(dequantize_rows(info, 0, rows), by_gguf(np.array(info.data), info.quant, rows))
