"""GGUF reading: what is in a file comes out as it is, and what is wrong with one is said in a line."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.errors import ModelFileError, SettingsError
from kvs_core.formats.gguf import GgufFile, TensorInfo, parse_override, part_names
from tests.support.examples import examples

MIB = 1 << 20
FORMATS = {
    GGUFValueType.UINT8: "<B", GGUFValueType.UINT16: "<H", GGUFValueType.UINT32: "<I", GGUFValueType.INT32: "<i",
    GGUFValueType.UINT64: "<Q", GGUFValueType.FLOAT32: "<f", GGUFValueType.BOOL: "<B",
}  # fmt: skip


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw)) + raw


def pair(key: str | bytes, kind: GGUFValueType, value: Any) -> bytes:
    raw = string(value) if kind is GGUFValueType.STRING else struct.pack(FORMATS[kind], value)
    return string(key) + u32(kind) + raw


def array_head(key: str, kind: int, count: int) -> bytes:
    return string(key) + u32(GGUFValueType.ARRAY) + u32(kind) + u64(count)


def tensor(name: str, dims: list[int], quant: int = 0, offset: int = 0) -> bytes:
    return string(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(quant) + u64(offset)


def gguf_bytes(
    pairs: list[bytes], tensors: list[bytes], data: bytes = b"", *, version: int = 3, alignment: int = 32, **counts: int
) -> bytes:
    """A file from its encoded parts; ``counts`` may claim other n_tensors or n_pairs."""
    head = b"GGUF" + u32(version) + u64(counts.get("n_tensors", len(tensors))) + u64(counts.get("n_pairs", len(pairs)))
    head += b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def refusal(path: Path, content: bytes) -> str:
    """The message with which a file of these bytes is refused."""
    path.write_bytes(content)
    with pytest.raises(ModelFileError) as error:
        GgufFile.open(path)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message


@contextmanager
def at_most(n_bytes: int) -> Iterator[None]:
    """Fails if the block holds more than ``n_bytes`` of new memory at any time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < n_bytes
    finally:
        tracemalloc.stop()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def write_sample(path: Path) -> dict[str, np.ndarray]:
    """A small model file of all kinds of values, by gguf's own writer; its tensors."""
    rng = np.random.default_rng(0)
    tensors = {
        "token_embd.weight": rng.normal(size=(7, 32)).astype(np.float32),
        "blk.0.norm.weight": rng.normal(size=5).astype(np.float32),
        "blk.0.conv": rng.normal(size=(2, 3, 4)).astype(np.float16),
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_int32("a.negative", -3)
    writer.add_uint64("a.wide", 1 << 40)
    writer.add_float32("a.eps", 1e-5)
    writer.add_float64("a.double", 0.1)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "Ġü 漢")
    writer.add_array("a.tokens", ["", "Ġa", "漢字"])
    writer.add_array("a.types", [1, -2, 3])
    writer.add_array("a.scores", [0.5, -1.5])
    writer.add_array("a.flags", [True, False, True])
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    q8_0 = gguf.quants.quantize(tensors["token_embd.weight"], GGMLQuantizationType.Q8_0)
    writer.add_tensor("output.weight", q8_0, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {**tensors, "output.weight": q8_0}


def test_values_come_out_as_written(path: Path) -> None:
    """Every kind of value arrives as the Python value that went in."""
    write_sample(path)
    file = GgufFile.open(path)
    assert (file.path, file.version, file.file_bytes, file.arch) == (path, 3, path.stat().st_size, "llama")
    expected = {
        "llama.block_count": 2, "a.negative": -3, "a.wide": 1 << 40, "a.eps": float(np.float32(1e-5)), "a.double": 0.1,
        "a.flag": True, "a.text": "Ġü 漢", "a.tokens": ["", "Ġa", "漢字"],
    }  # fmt: skip
    assert {key: file.metadata[key] for key in expected} == expected
    assert {key: type(file.metadata[key]) for key in expected} == {key: type(v) for key, v in expected.items()}
    assert file.get_array("a.types", np.int64).tolist() == [1, -2, 3]
    assert file.get_array("a.scores", np.float32).tolist() == [0.5, -1.5]
    assert file.get_array("a.flags", np.bool_).tolist() == [True, False, True]


def test_tensors_are_views_of_the_file(path: Path) -> None:
    """Names, shapes (GGUF order) and bytes are those written; the data are read-only views, copied nowhere."""
    written = write_sample(path)
    with at_most(MIB):
        file = GgufFile.open(path)
    assert list(file.tensors) == list(written)
    for name, values in written.items():
        info = file.tensors[name]
        assert info.data.tobytes() == values.tobytes()
        assert info.n_bytes == info.data.size == values.nbytes
        assert not info.data.flags.writeable
        assert not info.data.flags.owndata
    assert file.tensors["blk.0.conv"].shape == (4, 3, 2)
    assert file.tensors["blk.0.conv"].quant is GGMLQuantizationType.F16
    assert file.tensors["output.weight"].shape == (32, 7)
    assert file.tensors["output.weight"].n_elements == 224


def test_real_model_opens_fast(smollm2_path: Path) -> None:
    """A real model's header is read as gguf describes it, in well under a second."""
    start = time.perf_counter()
    file = GgufFile.open(smollm2_path)
    assert time.perf_counter() - start < 1.0
    assert file.arch == "llama"
    assert file.get_u32("llama.block_count") == 30
    assert len(file.get_strings("tokenizer.ggml.tokens")) == 49152
    assert len(file.tensors) == 272
    assert file.tensors["token_embd.weight"].shape == (576, 49152)
    assert sum(info.n_elements for info in file.tensors.values()) == 134_515_008


def test_large_vocabulary_opens_fast(path: Path) -> None:
    """A vocabulary of 250,000 tokens and as many merges opens in well under a second."""
    tokens = b"".join(string(f"tökén{i}") for i in range(250_000))
    pairs = [array_head(key, GGUFValueType.STRING, 250_000) + tokens for key in ("tokens", "merges")]
    path.write_bytes(gguf_bytes(pairs, []))
    start = time.process_time()
    file = GgufFile.open(path)
    assert time.process_time() - start < 1.0
    assert file.get_strings("merges")[-1] == "tökén249999"


def test_version_2_reads_like_3(path: Path) -> None:
    """Version 2, which has the same layout, is read as well."""
    path.write_bytes(gguf_bytes([pair("k", GGUFValueType.BOOL, 7)], [tensor("t", [2])], bytes(8), version=2))
    file = GgufFile.open(path)
    assert file.version == 2
    assert file.metadata["k"] is True
    assert file.tensors["t"].n_bytes == 8


def test_scalar_tensor_has_one_element(path: Path) -> None:
    """A tensor without dimensions is one number."""
    path.write_bytes(gguf_bytes([], [tensor("t", [])], struct.pack("<f", 2.5)))
    info = GgufFile.open(path).tensors["t"]
    assert (info.shape, info.n_elements) == ((1,), 1)
    assert info.data.view(np.float32)[0] == 2.5


def test_alignment_of_the_file_is_used(path: Path) -> None:
    """Data begin at, and offsets are checked against, general.alignment."""
    pairs = [pair("general.alignment", GGUFValueType.UINT32, 128)]
    data = bytes(range(4)) + bytes(124) + b"abcd"
    path.write_bytes(gguf_bytes(pairs, [tensor("a", [1]), tensor("b", [1], offset=128)], data, alignment=128))
    file = GgufFile.open(path)
    assert file.tensors["a"].data.tobytes() == bytes(range(4))
    assert file.tensors["b"].data.tobytes() == b"abcd"


U, S = GGUFValueType.UINT32, GGUFValueType.STRING
BAD_FILES = {
    "empty": (b"", "is empty"),
    "other format": (b"PK\x03\x04 something", "is not a GGUF file"),
    "only magic": (b"GGUF", "truncated"),
    "version 1": (gguf_bytes([], [], version=1), "version 1; versions 2 and 3"),
    "version 9": (gguf_bytes([], [], version=9), "version 9"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "2^60 tensors": (gguf_bytes([], [], n_tensors=1 << 60), "a header of 0 keys, 1152921504606846976 tensors"),
    "2^62 pairs": (gguf_bytes([], [], n_pairs=1 << 62), "a header of 4611686018427387904 keys"),
    "string of 2^62": (gguf_bytes([u64(1 << 62) + bytes(32)], []), "metadata key 0 takes 4611686018427387904 bytes"),
    "value of 2^62": (gguf_bytes([string("k") + u32(8) + u64(1 << 62)], []), "metadata key k takes"),
    "array of 2^40": (gguf_bytes([array_head("k", U, 1 << 40)], []), "metadata key k (1099511627776 entries)"),
    "strings, 2^40": (gguf_bytes([array_head("k", 8, 1 << 40)], []), "metadata key k (1099511627776 entries)"),
    "few strings": (gguf_bytes([array_head("k", 8, 2) + string("12345678")], [], b"x", alignment=1), "after 1 of 2"),
    "entry of 2^62": (gguf_bytes([array_head("k", 8, 1) + u64(1 << 62)], []), "entry 0 claims 4611686018427387904"),
    "array of arrays": (gguf_bytes([array_head("k", 9, 1) + bytes(64)], []), "array of arrays"),
    "value type 77": (gguf_bytes([string("k") + u32(77) + bytes(64)], []), "value type 77"),
    "key twice": (gguf_bytes([pair("k", U, 1), pair("k", U, 1)], []), "metadata key k appears twice"),
    "key not UTF-8": (gguf_bytes([pair(b"\xff\xfe", U, 1)], []), "metadata key 0 is not UTF-8"),
    "key of two lines": (gguf_bytes([pair("a\nb", U, 1)], []), r"metadata key 0 is 'a\nb', which is no printable text"),
    "token not UTF-8": (gguf_bytes([array_head("k", 8, 1) + string(b"\xff")], []), "entry 0 is not UTF-8"),
    "alignment 24": (gguf_bytes([pair("general.alignment", U, 24)], []), "general.alignment is 24"),
    "alignment 0": (gguf_bytes([pair("general.alignment", U, 0)], []), "general.alignment is 0"),
    "alignment text": (gguf_bytes([pair("general.alignment", S, "x")], []), "general.alignment is no integer"),
    "tensor twice": (gguf_bytes([], [tensor("t", [1]), tensor("t", [1])], bytes(64)), "tensor t appears twice"),
    "quant 4": (gguf_bytes([], [tensor("t", [32], quant=4)], bytes(64)), "quantization type 4,"),
    "quant 12345": (gguf_bytes([], [tensor("t", [32], quant=12345)], bytes(64)), "quantization type 12345"),
    "5 dimensions": (gguf_bytes([], [tensor("t", [1] * 5)], bytes(64)), "has 5 dimensions"),
    "2^31 dimensions": (gguf_bytes([], [string("t") + u32(1 << 31) + bytes(64)]), "has 2147483648 dimensions"),
    "dimension 0": (gguf_bytes([], [tensor("t", [4, 0])], bytes(64)), "a dimension is 0"),
    "2^64 elements": (gguf_bytes([], [tensor("t", [1 << 32] * 2)], bytes(64)), "t [4294967296, 4294967296] ends at"),
    "half a block": (gguf_bytes([], [tensor("t", [40], quant=2)], bytes(64)), "of 40, no multiple of the 32 of Q4_0"),
    "odd offset": (gguf_bytes([], [tensor("t", [1], offset=4)], bytes(64)), "offset 4, no multiple of the alignment"),
    "offset 2^63": (gguf_bytes([], [tensor("t", [1], offset=1 << 63)], bytes(64)), "tensor t [1] ends at byte"),
    "data one byte short": (gguf_bytes([], [tensor("t", [4])], bytes(15)), "tensor t [4] ends at byte"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_is_refused_in_one_line(path: Path, name: str) -> None:
    """What is wrong is said in one line, and no claim of a file makes memory grow."""
    content, message = BAD_FILES[name]
    with at_most(MIB):
        assert message in refusal(path, content)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([array_head("k", GGUFValueType.STRING, 1 << 25)], "has 33554432 entries; at most"),
        ([array_head("k", GGUFValueType.UINT8, 1 << 28)], "has 268435456 entries; at most"),
        ([string("k") + u32(GGUFValueType.STRING) + u64(1 << 28)], "a string of 268435456 bytes; at most"),
        ([array_head("k", GGUFValueType.STRING, 1) + u64(1 << 28)], "entry 0 claims 268435456 bytes"),
        ([u64(1 << 20)], "a string of 1048576 bytes; at most 1024"),
    ],
)
def test_absurd_counts_are_refused_in_a_long_file_too(path: Path, pairs: list[bytes], message: str) -> None:
    """A file long enough for what it claims is still not believed beyond all sense."""
    path.write_bytes(gguf_bytes(pairs, []))
    with path.open("r+b") as file:
        file.truncate(1 << 30)  # sparse
    with at_most(MIB), pytest.raises(ModelFileError) as error:
        GgufFile.open(path)
    assert message in str(error.value)


TEXT, BOOLS = GGUFValueType.STRING, GGUFValueType.BOOL


@pytest.mark.parametrize(
    ("kind", "values"),
    [("string", 8), ("array of one string", 8), ("array of empty strings", 2), ("array of bools", 8),
     ("wide string", 2), ("array of one wide string", 2)],
)
def test_all_values_of_a_header_share_one_budget(
    path: Path, kind: str, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many values, each of a size that makes sense, cannot take more memory together than any model's header does; a
    file of holes, which costs its maker nothing, is refused at the first value too many."""
    monkeypatch.setattr("kvs_core.formats.gguf_header._MAX_HEADER_BYTES", 10 * 100_000)
    text = bytes(99_996) + "🙂".encode() if "wide" in kind else bytes(100_000)

    def value(index: int) -> bytes:
        if kind.endswith("bools"):
            return array_head(f"k{index}", BOOLS, 100_000) + bytes(100_000)
        if "empty" in kind:
            return array_head(f"k{index}", TEXT, 6_000) + bytes(8 * 6_000)
        if kind.startswith("array"):
            return array_head(f"k{index}", TEXT, 1) + string(text)
        return pair(f"k{index}", TEXT, text)

    path.write_bytes(gguf_bytes([value(index) for index in range(values)], []))
    assert len(GgufFile.open(path).metadata) == values
    too_much = gguf_bytes([value(index) for index in range(40)], [])
    with at_most(2 * MIB):
        message = refusal(path, too_much)
    assert "takes more than 1000000 bytes of memory" in message


def test_a_sparse_file_takes_little_memory(path: Path) -> None:
    """Gigabytes of holes as tensors without names, or as arrays of empty strings, are refused within a MiB."""
    entries = gguf_bytes([], [], n_tensors=1 << 25)
    strings = gguf_bytes([array_head("k", TEXT, 1 << 24)], [])
    for head, message in ((entries, "tensor  appears twice"), (strings, "takes more than 536870912 bytes of memory")):
        path.write_bytes(head)
        with path.open("r+b") as file:
            file.truncate(1 << 30)
        with at_most(MIB), pytest.raises(ModelFileError) as error:
            GgufFile.open(path)
        assert message in str(error.value)


@pytest.mark.parametrize("name", ["absent.gguf", ".", "nul\0.gguf"])
def test_path_that_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    """A missing file, a folder and an impossible name get one line."""
    with pytest.raises(ModelFileError):
        GgufFile.open(tmp_path / name)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    """Where to write, the bytes of a small valid file, and the length of its header."""
    path = tmp_path_factory.mktemp("fuzz") / "model.gguf"
    write_sample(path)
    content = path.read_bytes()
    return path, content, content.index(b"output.weight") + 64


EXTREMES = [u64((1 << bits) - less) for bits in (8, 20, 32, 40, 60, 62, 63, 64) for less in (1, 2)]


@settings(max_examples=examples(400), deadline=None)
@given(data=st.data())
def test_damaged_header_never_does_worse_than_refuse(sample: tuple[Path, bytes, int], data: st.DataObject) -> None:
    """Whatever is cut off or overwritten: a ModelFileError or a usable file, within a few MiB."""
    path, content, header_bytes = sample
    damaged = bytearray(content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))])
    patch_bytes = st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from(EXTREMES))
    for at, patch in data.draw(st.lists(st.tuples(st.integers(0, header_bytes), patch_bytes), max_size=3)):
        damaged[at : at + len(patch)] = patch
    path.write_bytes(damaged)
    tensors: list[TensorInfo] = []
    message = f"{path}: "
    with at_most(4 * MIB):
        try:
            tensors += GgufFile.open(path).tensors.values()
        except ModelFileError as error:
            message = str(error)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for info in tensors:
        assert len(info.data.tobytes()) == info.n_bytes


def write_split(folder: Path) -> list[Path]:
    """Three parts of a model of three tensors."""
    paths = [folder / f"m-0000{no}-of-00003.gguf" for no in (1, 2, 3)]
    for no, path in enumerate(paths):
        path.write_bytes(split_part(no, f"t{no}"))
    return paths


def split_part(no: int, name: str, *, count: int = 3, total: int = 3) -> bytes:
    pairs = [
        pair("split.no", GGUFValueType.UINT16, no),
        pair("split.count", GGUFValueType.UINT16, count),
        pair("split.tensors.count", GGUFValueType.INT32, total),
        pair("general.architecture", GGUFValueType.STRING, f"part{no}"),
    ]
    return gguf_bytes(pairs, [tensor(name, [1])], struct.pack("<f", no))


def test_split_model_is_one_file(tmp_path: Path) -> None:
    """All parts' tensors are there; metadata are the first part's; sizes add up."""
    paths = write_split(tmp_path)
    file = GgufFile.open(paths[0])
    assert [info.data.view(np.float32)[0] for info in file.tensors.values()] == [0, 1, 2]
    assert file.arch == "part0"
    assert file.file_bytes == sum(path.stat().st_size for path in paths)


def test_broken_split_is_refused(tmp_path: Path) -> None:
    """Each way for a split to be incomplete or mixed up is named, with the file concerned."""
    paths = write_split(tmp_path)

    def message(path: Path = paths[0]) -> str:
        with pytest.raises(ModelFileError) as error:
            GgufFile.open(path)
        return str(error.value)

    assert "is part 2 of 3 of a split model; give m-00001-of-00003.gguf" in message(paths[1])
    renamed = paths[0].rename(tmp_path / "model.gguf")
    assert "its name must end in -00001-of-00003.gguf" in message(renamed)
    renamed.rename(paths[0])
    for content, expected in [
        (split_part(1, "t1"), "does not say, in split.no, that it is part 3 of 3"),
        (split_part(2, "t2", count=4), "does not say, in split.no, that it is part 3 of 3"),
        (split_part(2, "t0"), "tensor t0 is also in an earlier part"),
        (split_part(2, "t2")[:-1], "truncated"),
    ]:
        paths[2].write_bytes(content)
        assert message().startswith(str(paths[2]))
        assert expected in message()
    paths[2].unlink()
    assert message() == f"{paths[2]}: is missing; it is part 3 of 3 of this model"
    paths[2].write_bytes(split_part(2, "t2"))
    paths[0].write_bytes(split_part(0, "t0", total=5))
    assert "split.tensors.count is 5, but the parts hold 3" in message()


def test_part_names() -> None:
    """A part's name tells the names of all; any other name stands alone."""
    assert part_names("a-00002-of-00002.gguf") == ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]
    for name in ("a.gguf", "a-00003-of-00002.gguf", "a-00000-of-00002.gguf", "a-1-of-2.gguf", "-00001-of-00001.gguf"):
        assert part_names(name) == [name]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f.get_u32("absent"), "has no metadata key absent"),
        (lambda f: f.get_u32("a.negative"), "a.negative is -3; it must lie between 0 and 4294967295"),
        (lambda f: f.get_u32("a.wide"), "a.wide is 1099511627776"),
        (lambda f: f.get_u32("llama.block_count", 1, most=1), "llama.block_count is 2; it must lie between 0 and 1"),
        (lambda f: f.get_u32("a.flag"), "a.flag is a bool; an integer is expected"),
        (lambda f: f.get_u32("a.types"), "a.types is an array of 3 int32; an integer is expected"),
        (lambda f: f.get_f32("a.text", 1.0), "a.text is a string; a number is expected"),
        (lambda f: f.get_f32("nan"), "nan is nan; it must be finite"),
        (lambda f: f.get_str("a.eps"), "a.eps is a float; a string is expected"),
        (lambda f: f.get_strings("a.text"), "a.text is a string; an array of strings is expected"),
        (lambda f: f.get_array("a.tokens", np.int32), "a.tokens is an array of 3 strings; an array of integers"),
        (lambda f: f.get_array("a.scores", np.int32), "a.scores is an array of 2 float32; an array of integers"),
        (lambda f: f.get_array("a.types", np.int32, length=4), "a.types has 3 entries; 4 are expected"),
        (lambda f: f.get_array("a.types", np.uint32), "a.types holds -2, which is no uint32"),
    ],
)
def test_wrong_metadata_is_refused(path: Path, call: Any, message: str) -> None:
    """A key that is absent, of another type or out of bounds is named with its file and value."""
    write_sample(path)
    file = GgufFile.open(path).override([("nan", float("nan"))])
    with pytest.raises(ModelFileError) as error:
        call(file)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_defaults_stand_for_absent_keys(path: Path) -> None:
    """A default, None too, comes back as it is; an integer does where a number is asked for."""
    write_sample(path)
    file = GgufFile.open(path)
    assert file.get_u32("absent", None) is None
    assert file.get_f32("absent", 10000.0) == 10000.0
    assert file.get_str("absent", "x") == "x"
    assert file.get_strings("absent", None) is None
    assert file.get_array("absent", np.int32, None) is None
    assert file.get_u32("a.negative", least=-5) == -3
    assert file.get_f32("llama.block_count") == 2.0


def test_override_replaces_and_adds(path: Path) -> None:
    """Overrides are seen by the getters of the new file alone; a wrong type or a layout key is refused."""
    write_sample(path)
    file = GgufFile.open(path)
    changed = file.override([("llama.block_count", 9), ("new.key", "x")])
    assert (changed.get_u32("llama.block_count"), changed.get_str("new.key")) == (9, "x")
    assert file.get_u32("llama.block_count") == 2
    assert changed.tensors is file.tensors
    with pytest.raises(SettingsError, match=r"llama\.block_count: is a float, but in model\.gguf it is an integer"):
        file.override([("llama.block_count", 2.0)])
    for key in ("general.alignment", "split.count"):
        with pytest.raises(SettingsError, match="cannot be overridden"):
            file.override([(key, 1)])


def test_parse_override() -> None:
    """key=type:value in its four types; a string may hold anything, = and : included."""
    assert parse_override("a.b=int:-5") == ("a.b", -5)
    assert parse_override("a.b=float:1e-6") == ("a.b", 1e-6)
    assert parse_override("a.b=bool:true") == ("a.b", True)
    assert parse_override("a.b=str:x=y:z") == ("a.b", "x=y:z")
    assert parse_override("a.b=str:") == ("a.b", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write key=type:value"),
        ("a.b", "write key=type:value"),
        ("a.b=5", "write key=type:value"),
        ("=int:5", "write key=type:value"),
        ("a.b=u32:5", "type 'u32' is unknown; use int, float, bool or str"),
        ("a.b=int:five", "'five' is not a 64-bit integer"),
        ("a.b=int:9223372036854775808", "is not a 64-bit integer"),
        ("a.b=float:nan", "'nan' is not a finite number"),
        ("a.b=bool:yes", "'yes' is not true or false"),
    ],
)
def test_malformed_override_is_refused(text: str, message: str) -> None:
    """A pair that cannot be read is named as it was written, with the form to use."""
    with pytest.raises(SettingsError) as error:
        parse_override(text)
    assert message in str(error.value)
    assert text in str(error.value)
