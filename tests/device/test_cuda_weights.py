"""Matrices arrive on the GPU as records that hold the file's blocks, whatever pieces they came in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from kvs_core.device.cuda.matrices import RECORD_TYPES, RecordSection, RowsSection, record_bytes
from kvs_core.device.cuda.weights import part_bytes
from kvs_core.formats.gguf import TensorInfo
from kvs_core.formats.quants import dequantize_rows, row_bytes
from kvs_core.models.weights import LayerPart
from tests.device.tensors import tensor
from tests.ops.conftest import lab  # noqa: F401  the fixture
from tests.ops.record_weights import interleave, random_tensor, repack, store_in

Quant = GGMLQuantizationType
BY_BLOCKS_OF_256 = (Quant.Q4_K, Quant.Q5_K, Quant.Q6_K, Quant.IQ4_XS)
ALL_TYPES = pytest.mark.parametrize("quant", RECORD_TYPES, ids=lambda quant: quant.name)


def rows_of(info: TensorInfo) -> np.ndarray:
    """uint8 [n_out, row bytes]"""
    return info.data.reshape(info.shape[1], -1)


def widths(quant: Quant) -> list[int]:
    return [256, 768] if quant in BY_BLOCKS_OF_256 else [32, 288, 576]


@ALL_TYPES
def test_records_hold_the_blocks(lab: Any, quant: Quant) -> None:  # noqa: F811
    """Every type, with a tail of rows and of columns, joined tensors that share a tile, in pieces of a few rows."""
    for n_in in widths(quant):
        infos = [random_tensor(f"{n_in}.{i}", quant, n_out, n_in, i) for i, n_out in enumerate((19, 8, 16))]
        store = store_in(lab, piece_bytes=5 * row_bytes(quant, n_in))
        weight = store.load(infos)
        (section,) = weight.sections
        assert isinstance(section, RecordSection)
        assert (weight.n_in, weight.n_out, section.n_tiles) == (n_in, 43, 3)
        expected = repack(quant, np.concatenate([rows_of(info) for info in infos]))
        np.testing.assert_array_equal(lab.host(section.records).reshape(expected.shape), expected)
        assert store.held_bytes == expected.nbytes == section.n_tiles * section.n_blocks * record_bytes(quant)


@ALL_TYPES
def test_gate_and_up_share_tiles(lab: Any, quant: Quant) -> None:  # noqa: F811
    """Eight gate rows, eight up rows, and so on."""
    gate, up = (random_tensor(f"blk.0.ffn_{name}.weight", quant, 24, 256, i) for i, name in enumerate(("gate", "up")))
    weight = store_in(lab, piece_bytes=700).load([gate, up])
    assert weight.swiglu is not None
    expected = repack(quant, interleave(rows_of(gate), rows_of(up)))
    np.testing.assert_array_equal(lab.host(weight.swiglu.records).reshape(expected.shape), expected)


@ALL_TYPES
def test_experts_in_one_tensor_have_the_records_of_two(lab: Any, quant: Quant) -> None:  # noqa: F811
    """An expert's gate before its up, in pieces that end within them: bytes as of gates and ups apart."""
    count, ffn, n_in = 3, 16, widths(quant)[-1]
    apart = [
        random_tensor(f"blk.0.ffn_{stem}_exps.weight", quant, count * ffn, n_in, i)
        for i, stem in enumerate(("gate", "up"))
    ]
    each = np.stack([rows_of(info).reshape(count, ffn, -1) for info in apart], axis=1)   # expert, half, row
    joined = experts(random_tensor("blk.0.ffn_gate_up_exps.weight", quant, 2 * count * ffn, n_in), count)
    joined = replace(joined, data=each.reshape(-1))
    store = store_in(lab, piece_bytes=7 * row_bytes(quant, n_in))
    got, expected = store.load_experts([joined]), store.load_experts([experts(info, count) for info in apart])
    assert got.swiglu is not None
    assert expected.swiglu is not None
    assert lab.host(got.swiglu.records).tobytes() == lab.host(expected.swiglu.records).tobytes()
    assert (got.n_out, got.count, got.swiglu.n_rows) == (2 * ffn, count, 2 * count * ffn)


def experts(info: TensorInfo, count: int) -> TensorInfo:
    """Rows of a matrix as those of ``count`` experts."""
    n_in, n_out = info.shape
    return replace(info, shape=(n_in, n_out // count, count))


def test_gate_and_up_of_two_types_do_not(lab: Any) -> None:  # noqa: F811
    """Nor do rows that are no multiple of eight, nor matrices with a bias."""
    store = store_in(lab)
    gate = random_tensor("blk.0.ffn_gate.weight", Quant.Q8_0, 8, 64)
    up = random_tensor("blk.0.ffn_up.weight", Quant.Q4_0, 8, 64)
    assert store.load([gate, up]).swiglu is None
    odd = [random_tensor(f"blk.1.ffn_{name}.weight", Quant.Q8_0, 12, 64) for name in ("gate", "up")]
    assert store.load(odd).swiglu is None
    even = [random_tensor(f"blk.2.ffn_{name}.weight", Quant.Q8_0, 8, 64) for name in ("gate", "up")]
    assert store.load(even, [tensor("b", np.ones((1, 8), np.float32)), None]).swiglu is None


def test_sections_follow_types_and_have_their_bias(lab: Any) -> None:  # noqa: F811
    """Joined tensors of one form are one section; types without records stay rows; a missing bias is zero."""
    infos = [
        random_tensor("a", Quant.Q8_0, 16, 64), random_tensor("b", Quant.Q8_0, 8, 64),
        random_tensor("c", Quant.F16, 5, 64), random_tensor("d", Quant.F16, 7, 64),
        random_tensor("e", Quant.Q4_1, 4, 64),
    ]
    values = np.arange(16, dtype=np.float32)
    bias = TensorInfo("a.bias", (16,), Quant.F32, 16, 64, values.view(np.uint8))
    weight = store_in(lab, piece_bytes=300).load(infos, [bias, None, None, None, None])
    assert [(section.quant, section.first_row, section.n_rows) for section in weight.sections] == [
        (Quant.Q8_0, 0, 24), (Quant.F16, 24, 12), (Quant.Q4_1, 36, 4)
    ]
    rows = weight.sections[1]
    assert isinstance(rows, RowsSection)
    np.testing.assert_array_equal(lab.host(rows.rows), np.concatenate([infos[2].data, infos[3].data]))
    assert rows.row_bytes == 128
    np.testing.assert_array_equal(lab.host(weight.bias), np.concatenate([values, np.zeros(24, np.float32)]))
    np.testing.assert_array_equal(lab.host(weight.sections[0].bias), np.concatenate([values, np.zeros(8, np.float32)]))


def test_types_without_a_kernel_become_float16(lab: Any) -> None:  # noqa: F811
    """Their values, rounded, in one section with float16 rows beside them."""
    values = np.random.default_rng(1).normal(size=(6, 256)).astype(np.float32)
    infos = [tensor("a", values, Quant.TQ1_0), tensor("b", values, Quant.F16)]
    (section,) = store_in(lab, piece_bytes=1100).load(infos).sections
    assert isinstance(section, RowsSection)
    assert (section.quant, section.n_rows, section.row_bytes) == (Quant.F16, 12, 512)
    expected = np.concatenate([dequantize_rows(infos[0], 0, 6), values]).astype(np.float16)
    np.testing.assert_array_equal(lab.host(section.rows), expected.reshape(-1).view(np.uint8))


def test_the_same_tensors_are_loaded_once(lab: Any) -> None:  # noqa: F811
    """A tied head costs nothing; another join is another weight."""
    store = store_in(lab)
    a, b = random_tensor("a", Quant.Q8_0, 16, 64), random_tensor("b", Quant.Q8_0, 16, 64)
    first = store.load([a])
    held = store.held_bytes
    assert store.load([a]) is first
    assert store.held_bytes == held
    assert store.load([a, b]) is not first
    assert list(store.weights) == [first, store.load([a, b])]


def test_a_part_is_at_home_as_it_would_be_on_the_gpu(lab: Any) -> None:  # noqa: F811
    """Byte for byte, whatever its matrices are: joined, of two types, with a bias, gate and up, in the file's form. It
    takes no memory of the GPU but for biases, lies where it is told to, and fits the room that was said to suffice."""
    infos = [random_tensor(name, quant, n_out, 288, i) for i, (name, quant, n_out) in enumerate((
        ("blk.0.attn_q.weight", Quant.Q8_0, 40), ("blk.0.attn_k.weight", Quant.Q4_0, 24),
        ("blk.0.attn_v.weight", Quant.F16, 8), ("blk.0.ffn_gate.weight", Quant.Q5_0, 24),
        ("blk.0.ffn_up.weight", Quant.Q5_0, 24), ("blk.0.attn_output.weight", Quant.Q8_0, 19),
    ))]
    bias = tensor("blk.0.attn_q.bias", np.linspace(-1.0, 1.0, 40, dtype=np.float32))
    joined = [(infos[:3], [bias, None, None]), (infos[3:5], []), (infos[5:], [None])]
    home = np.full(part_bytes(infos), 0x5A, np.uint8)
    store, plain = (store_in(lab, piece_bytes=900) for _ in range(2))

    def download(target: np.ndarray, memory: Any) -> None:
        target[:] = lab.host(memory)

    part = LayerPart(home)
    for tensors, biases in joined:
        part.add(store.load_passing(tensors, part.room, biases, download))
    assert store.held_bytes == 4 * (40 + 24 + 8)
    place = np.array(part.home)
    for memory in (home, place):
        part.lie_in(memory)
        at = 0
        for (tensors, biases), weight in zip(joined, store.weights, strict=True):
            expected = plain.load(tensors, biases)
            assert (weight.name, weight.n_in, weight.n_out) == (expected.name, expected.n_in, expected.n_out)
            assert (weight.swiglu is None) == (expected.swiglu is None)
            for own, other in zip(weight.sections, expected.sections, strict=True):
                assert type(own) is type(other)
                mine, theirs = (
                    each.records if isinstance(each, RecordSection) else each.rows for each in (own, other)
                )
                np.testing.assert_array_equal(mine, lab.host(theirs))
                assert mine.ctypes.data == memory.ctypes.data + at
                assert (own.first_row, own.n_rows) == (other.first_row, other.n_rows)
                assert (own.bias is None) == (other.bias is None)
                at += -(-mine.nbytes // 256) * 256
    assert at == part.home.nbytes <= home.nbytes


@pytest.mark.parametrize("quants", [(Quant.Q8_0, Quant.Q8_0), (Quant.Q5_0, Quant.F16), (Quant.Q4_0,)])
def test_experts_at_home_are_what_they_would_be_on_the_gpu(lab: Any, quants: tuple[Quant, ...]) -> None:  # noqa: F811
    """Byte for byte: gate and up of one type, of two, and joined; each part of an expert is where its section is."""
    names = [f"blk.0.ffn_{part}_exps.weight" for part in (("gate", "up") if len(quants) > 1 else ("gate_up",))]
    infos = [
        replace(random_tensor(name, quant, 3 * 16, 256, i), shape=(256, 16, 3))
        for i, (name, quant) in enumerate(zip(names, quants, strict=True))
    ]
    store, plain = (store_in(lab, piece_bytes=2000) for _ in range(2))
    home = np.full(part_bytes(infos), 0x5A, np.uint8)

    def download(target: np.ndarray, memory: Any) -> None:
        target[:] = lab.host(memory)

    part, expected = store.load_passing(infos, home, (), download), plain.load_experts(infos)
    (stack,) = store.stacks
    assert part.weight is stack
    assert part.home.nbytes == home.nbytes   # of whole tiles, or of rows of 512 bytes
    assert store.held_bytes == 0
    assert list(store.weights) == []
    assert (stack.n_in, stack.n_out, len(stack)) == (expected.n_in, expected.n_out, 3)
    assert (stack.swiglu is None) == (expected.swiglu is None) == (Quant.F16 in quants)
    place = np.array(home)
    for memory in (home, place):
        part.lie_in(memory)
        seen = set()
        for own, other in zip(stack.parts, expected.parts, strict=True):
            mine, theirs = (
                each.section.records if isinstance(each.section, RecordSection) else each.section.rows
                for each in (own, other)
            )
            np.testing.assert_array_equal(mine, lab.host(theirs))
            assert memory.ctypes.data <= mine.ctypes.data < memory.ctypes.data + memory.nbytes
            seen.add(mine.ctypes.data)
            assert (own.first_row, own.n_rows, own.column) == (other.first_row, other.n_rows, other.column)
        assert len(seen) == len(set(quants))
