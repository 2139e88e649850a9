"""Stored K and V are ggml's bytes, and come back as ggml's numbers."""

import ctypes
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import xllamacpp
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvs_core.device.host.ops import kv_codec
from kvs_core.paging.geometry import KvType
from tests.ops.kv_rows import BLOCKS, ROWS

NARROW_TYPES = [kv_type for kv_type in KvType if kv_type is not KvType.F32]
BLOCK_TYPES = [kv_type for kv_type in KvType if kv_type.quantised]
GGML = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))))


def _call(name: str, source: np.ndarray, out: np.ndarray, count: int) -> np.ndarray:
    """One of ggml's row functions: (source, destination, number of values)."""
    function = getattr(GGML, name)
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), None
    function(source.ctypes.data, out.ctypes.data, count)
    return out


def _ggml_encode(kv_type: KvType, rows: np.ndarray) -> np.ndarray:
    """Bytes of float32 rows [n, D]: its reference quantisers, and its plain conversions for f16 and bf16."""
    out = np.zeros((len(rows), kv_type.row_bytes(rows.shape[1])), np.uint8)
    names = {KvType.F16: "ggml_fp32_to_fp16_row", KvType.BF16: "ggml_fp32_to_bf16_row"}
    return _call(names.get(kv_type, f"quantize_row_{kv_type.label}_ref"), rows, out, rows.size)


def _ggml_decode(kv_type: KvType, data: np.ndarray) -> np.ndarray:
    """float32 [n, values] of bytes [n, row_bytes]."""
    out = np.empty((len(data), data.shape[1] // kv_type.block_bytes * kv_type.block_values), np.float32)
    names = {KvType.F16: "ggml_fp16_to_fp32_row", KvType.BF16: "ggml_bf16_to_fp32_row"}
    return _call(names.get(kv_type, f"dequantize_row_{kv_type.label}"), data, out, out.size)


def _decode(kv_type: KvType, data: np.ndarray) -> np.ndarray:
    values = data.shape[-1] // kv_type.block_bytes * kv_type.block_values
    out = np.full((*data.shape[:-1], values), 7.0, np.float32)
    kv_codec.decode(kv_type, data, out)
    return out


def _known(kv_type: KvType, packed: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Encoded blocks without what ggml leaves to chance: the nibbles of an iq4_nl block that is all but zero."""
    blocks = packed.reshape(-1, kv_type.block_bytes).copy()
    if kv_type is KvType.IQ4_NL:
        blocks[np.abs(rows).reshape(-1, 32).max(axis=1) < 1e-15, 2:] = 0
    return blocks


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("kv_type", NARROW_TYPES)
def test_bytes_are_those_of_ggml(kv_type: KvType, kind: str) -> None:
    """Every byte that ggml defines, for easy rows and for those on the edges of its rounding."""
    rows = ROWS[kind]
    mine, theirs = kv_codec.encode(kv_type, rows), _ggml_encode(kv_type, rows)
    assert mine.dtype == np.uint8
    np.testing.assert_array_equal(_known(kv_type, mine, rows), _known(kv_type, theirs, rows))


@pytest.mark.parametrize("kv_type", BLOCK_TYPES)
@given(arrays(np.float32, (2, 32), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_bytes_of_any_finite_rows_are_those_of_ggml(kv_type: KvType, rows: np.ndarray) -> None:
    """The same for what a search comes up with."""
    mine, theirs = kv_codec.encode(kv_type, rows), _ggml_encode(kv_type, rows)
    np.testing.assert_array_equal(_known(kv_type, mine, rows), _known(kv_type, theirs, rows))


@pytest.mark.parametrize("kv_type", NARROW_TYPES)
def test_numbers_are_those_of_ggml(kv_type: KvType) -> None:
    """Random bytes, infinite and NaN scales among them, decode to ggml's floats bit for bit, NaN to NaN."""
    data = np.random.default_rng(5).integers(0, 256, (BLOCKS, kv_type.row_bytes(32)), dtype=np.uint8)
    mine, theirs = _decode(kv_type, data), _ggml_decode(kv_type, data)
    number = ~np.isnan(theirs)
    assert 0 < number.sum() < number.size
    np.testing.assert_array_equal(np.isnan(mine), ~number)
    np.testing.assert_array_equal(mine.view(np.uint32)[number], theirs.view(np.uint32)[number])


def test_every_f16_and_bf16_decodes_exactly() -> None:
    """All 65,536 of each: with infinities and NaN of both signs, of one, and with none."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    for part in (codes, codes[codes < 0xFC00], codes[codes >= 0x8000], codes[(codes & 0x7C00) != 0x7C00]):
        with np.errstate(invalid="ignore"):
            expected = part.view(np.float16).astype(np.float32)
        decoded = _decode(KvType.F16, part.view(np.uint8))
        np.testing.assert_array_equal(decoded.view(np.uint32), expected.view(np.uint32))
    wide = (codes.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(_decode(KvType.BF16, codes.view(np.uint8)), wide)


@pytest.mark.parametrize("kv_type", [*BLOCK_TYPES, KvType.BF16])
def test_agrees_with_the_gguf_package(kv_type: KvType) -> None:
    """The format as the ``gguf`` package has it: both ways, where it can encode."""
    rows = np.random.default_rng(7).standard_normal((500, 128)).astype(np.float32)
    packed = kv_codec.encode(kv_type, rows)
    quant = gguf.GGMLQuantizationType[kv_type.name]
    np.testing.assert_array_equal(_decode(kv_type, packed), gguf.quants.dequantize(packed, quant))
    if kv_type is not KvType.IQ4_NL:
        np.testing.assert_array_equal(packed, gguf.quants.quantize(rows, quant))


def test_f32_is_kept() -> None:
    """float32 rows come back as they were, NaN payloads and all."""
    bits = np.random.default_rng(9).integers(0, 1 << 32, (40, 96), dtype=np.uint32)
    back = _decode(KvType.F32, kv_codec.encode(KvType.F32, bits.view(np.float32)))
    np.testing.assert_array_equal(back.view(np.uint32), bits)


@pytest.mark.parametrize("kv_type", KvType)
def test_no_value_is_too_odd(kv_type: KvType) -> None:
    """Infinities, NaN and overflow neither warn nor raise, and spoil no block but their own."""
    rows = np.random.default_rng(11).standard_normal((6, 64)).astype(np.float32)
    clean = kv_codec.encode(kv_type, rows)
    rows[0, :32], rows[1, 3], rows[2, 5], rows[3, 7], rows[4, 9] = np.inf, np.inf, -np.inf, np.nan, 3e38
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        packed = kv_codec.encode(kv_type, rows)
        decoded = _decode(kv_type, packed)
    half = clean.shape[1] // 2
    np.testing.assert_array_equal(packed[5], clean[5])
    np.testing.assert_array_equal(packed[:5, half:], clean[:5, half:])
    assert np.isfinite(decoded[5]).all()
    assert np.isfinite(decoded[:, 32:]).all()


@pytest.mark.parametrize("kv_type", KvType)
def test_layout_of_the_bytes_does_not_matter(kv_type: KvType) -> None:
    """Rows cut out of larger pages, at any even address, decode to the same bits; so do rows encoded one by one."""
    rows = np.random.default_rng(13).standard_normal((5, 3, 4, 64)).astype(np.float32)
    packed = kv_codec.encode(kv_type, rows)
    alone = [kv_codec.encode(kv_type, row[None]) for row in rows.reshape(-1, 64)]
    np.testing.assert_array_equal(packed, np.concatenate(alone).reshape(packed.shape))
    expected = _decode(kv_type, packed).view(np.uint32)
    part = packed.reshape(5, 3, -1)
    for shift in (0, 4, 12, 32):
        page = np.full((5, 3, part.shape[-1] + 64), 0xFF, np.uint8)
        page[..., shift : shift + part.shape[-1]] = part
        cut = _decode(kv_type, page[..., shift : shift + part.shape[-1]])
        np.testing.assert_array_equal(cut.reshape(expected.shape).view(np.uint32), expected)
