"""Synthetic models have the sizes of the real ones, sane numbers, and are the same in memory and in a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from kvs_core.device.host.device import HostDevice
from kvs_core.engine.engine import Engine
from kvs_core.engine.session import Session
from kvs_core.errors import SettingsError
from kvs_core.formats.gguf import GgufFile, split_experts
from kvs_core.formats.gguf_writer import write_gguf
from kvs_core.formats.quants import dequantize_rows
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.models.registry import read_spec
from kvs_core.models.spec import ExpertSpec, LayerKind
from kvs_core.models.synthetic import MIXES, SHAPES, Mixture, Shape, Sliding, TwoShapes, synthetic_model
from kvs_core.settings import ContextSettings, KvSettings, RopeSettings
from tests.support import llamacpp

Quant = GGMLQuantizationType
TEXT = "The keys lie in pages, wörtlich 漢 w 1"

# Bytes of all tensors of the 27B, and bits of a weight.
SIZES = {
    "iq4_xs": (14.66e9, 4.36), "q4_k": (15.46e9, 4.60), "q4_k_m": (16.53e9, 4.92), "q5_k_m": (19.21e9, 5.71),
    "q4_0": (15.46e9, 4.60), "q6_k": (22.07e9, 6.56), "q8_0": (28.59e9, 8.50), "f16": (53.8e9, 16.0),
    "bf16": (53.8e9, 16.0),
}


def logits_of(file: GgufFile, tokens: list[int]) -> np.ndarray:
    """[T, V], on the host with float32 keys and values."""
    engine = Engine(
        file, HostDevice(1), context=ContextSettings(ctx_size=256, ubatch=64), kv=KvSettings("f32", "f32", 32),
        rope=RopeSettings(),
    )
    try:
        session = Session(engine)
        rows = [session.prefill(tokens[:-4])[-1], *(session.decode(token) for token in tokens[-4:])]
    finally:
        engine.close()
    return np.stack(rows)


@pytest.mark.parametrize("mix", MIXES)
def test_the_27b_has_its_sizes(mix: str) -> None:
    """Parameters, layers and heads are the real ones, in every mix; bytes are what the types make of them."""
    file = synthetic_model(f"qwen3.5-27b:{mix}")
    spec = read_spec(file)
    assert spec.name == f"synthetic qwen3.5-27b {mix}"
    assert file.synthetic
    assert (spec.n_params, spec.n_layer, len(spec.kv_layers)) == (26_895_998_464, 64, 16)
    assert (spec.n_embd, spec.n_ff, spec.n_vocab, spec.n_ctx_train) == (5120, 17408, 248320, 262144)
    full, gdn = spec.layers[63], spec.layers[62].gdn
    assert gdn is not None
    assert (full.kind, full.heads, full.kv_heads, full.k_dim, spec.rope.n_rot) == (LayerKind.FULL, 24, 4, 256, 64)
    assert (gdn.k_heads, gdn.v_heads, gdn.d_k, gdn.d_v) == (16, 48, 128, 128)
    size = sum(info.n_bytes for info in file.tensors.values())
    print(f"{mix}: {size / 1e9:.2f} GB, {8 * size / spec.n_params:.3f} bits per weight")
    assert size == pytest.approx(SIZES[mix][0], rel=0.005)
    assert 8 * size / spec.n_params == pytest.approx(SIZES[mix][1], rel=0.005)
    assert len(file.tensors) == 851
    assert sum(info.quant is Quant.F32 for info in file.tensors.values()) == 353


def test_the_mtp_block_is_an_option() -> None:
    """866 tensors with it, of which 506 matrices; the block takes embedding and head from the trunk."""
    spec = read_spec(file := synthetic_model("qwen3.5-27b:q4_k:mtp"))
    assert (spec.n_params, spec.n_layer, spec.n_nextn) == (27_320_697_856, 64, 1)
    assert len(file.tensors) == 866
    assert sum(info.quant is not Quant.F32 for info in file.tensors.values()) == 506


def test_q4_k_m_is_that_of_llama_quantize() -> None:
    """The first and last eighth and every third layer between have more bits for values, qkv and down."""
    tensors = synthetic_model("qwen3.5-27b:q4_k_m").tensors
    more = [*range(8), *range(10, 56, 3), *range(56, 64)]
    for layer in range(64):
        expected = Quant.Q6_K if layer in more else Quant.Q4_K
        assert tensors[f"blk.{layer}.ffn_down.weight"].quant is expected
        assert tensors[f"blk.{layer}.attn_{'v' if layer % 4 == 3 else 'qkv'}.weight"].quant is expected
        assert tensors[f"blk.{layer}.ffn_up.weight"].quant is Quant.Q4_K
    assert tensors["output.weight"].quant is Quant.Q6_K
    assert tensors["token_embd.weight"].quant is Quant.Q4_K


@pytest.mark.parametrize(
    ("name", "arch", "params", "tensors", "sizes", "heads", "context"),
    [
        ("qwen2.5-14b", "qwen2", 14_770_033_664, 579, (48, 5120, 13824, 152064), (40, 8, 128), 131072),
        ("qwen3-8b", "qwen3", 8_190_735_360, 399, (36, 4096, 12288, 151936), (32, 8, 128), 40960),
        ("qwen3-30b-a3b", "qwen3moe", 30_532_122_624, 579, (48, 2048, 0, 151936), (32, 4, 128), 40960),
    ],
)
def test_dense_models_have_their_sizes(
    name: str, arch: str, params: int, tensors: int, sizes: tuple[int, ...], heads: tuple[int, ...], context: int
) -> None:
    """Parameters, tensors, layers and heads are those of the published checkpoints; q4_k_m gives values more bits."""
    spec = read_spec(file := synthetic_model(f"{name}:q4_k_m"))
    layer = spec.layers[-1]
    assert (spec.arch, spec.n_params, len(file.tensors)) == (arch, params, tensors)
    assert (len(spec.kv_layers), spec.n_embd, spec.n_ff, spec.n_vocab) == sizes
    assert (layer.heads, layer.kv_heads, layer.k_dim, spec.rope.n_rot) == (*heads, heads[-1])
    assert (spec.n_ctx_train, spec.rope.freq_base, spec.n_nextn) == (context, 1e6, 0)
    more = [index for index in range(spec.n_layer) if file.tensors[f"blk.{index}.attn_v.weight"].quant is Quant.Q6_K]
    assert more[:2] == [0, 1]
    assert more[-1] == spec.n_layer - 1
    assert len(more) == spec.n_layer // 2


def test_the_mixture_has_its_sizes() -> None:
    """Experts and their types: more bits where a dense model's downs have them; a router is float32 everywhere."""
    spec = read_spec(file := synthetic_model("qwen3-30b-a3b:q4_k_m"))
    assert spec.experts == ExpertSpec(128, 8, 768, 0, joined=False)
    for layer, down in ((0, Quant.Q6_K), (6, Quant.Q4_K), (8, Quant.Q6_K), (47, Quant.Q6_K)):
        found = [file.tensors[f"blk.{layer}.ffn_{name}.weight"] for name in ("gate_inp", "gate_exps", "down_exps")]
        assert [info.quant for info in found] == [Quant.F32, Quant.Q4_K, down]
        assert [info.shape for info in found] == [(2048, 128), (2048, 768, 128), (768, 2048, 128)]
    downs = file.tensors["blk.9.ffn_down_exps.weight"]
    last = list(split_experts(downs))[127]
    assert (last.n_bytes, downs.n_bytes) == (2048 * 3 * 144, 128 * 2048 * 3 * 144)
    np.testing.assert_array_equal(last.data[1000:5000], downs.data[downs.n_bytes - last.n_bytes :][1000:5000])


def test_gemma3_27b_has_its_sizes() -> None:
    """Parameters, layers, heads and windows are those of the published checkpoint's text part; the head is tied."""
    spec = read_spec(file := synthetic_model("gemma3-27b:q4_k"))
    assert (spec.arch, spec.n_params, len(file.tensors)) == ("gemma3", 27_009_002_240, 62 * 13 + 2)
    assert (spec.n_layer, spec.n_embd, spec.n_ff, spec.n_vocab) == (62, 5376, 21504, 262144)
    layer = spec.layers[0]
    assert (layer.heads, layer.kv_heads, layer.k_dim, spec.attention_scale) == (32, 16, 128, 168**-0.5)
    assert [layer.index for layer in spec.layers if not layer.window] == [*range(5, 60, 6)]
    assert {layer.window for layer in spec.layers} == {0, 1024}
    assert (spec.rope.freq_base, spec.rope.scale, spec.n_ctx_train) == (1e6, 8.0, 131072)
    assert file.tensors["token_embd.weight"].quant is Quant.Q6_K


@pytest.mark.parametrize(
    ("name", "params", "sizes", "sliding", "full", "experts"),
    [
        ("gemma4-26b-a4b", 25_233_142_046, (30, 2816, 2112), (16, 8, 256), (16, 2, 512), (128, 8, 704)),
        ("gemma4-31b", 30_697_345_596, (60, 5376, 21504), (32, 16, 256), (32, 4, 512), None),
    ],
)
def test_gemma4_models_have_their_sizes(
    name: str, params: int, sizes: tuple[int, ...], sliding: tuple[int, ...], full: tuple[int, ...],
    experts: tuple[int, ...] | None,
) -> None:
    """Layers of two shapes, experts and parameters; layers that see everything have no values of their own."""
    spec = read_spec(file := synthetic_model(f"{name}:q4_k"))
    assert (spec.n_layer, spec.n_embd, spec.n_ff) == sizes
    assert (spec.n_vocab, spec.n_params) == (262144, params)
    assert [layer.index for layer in spec.layers if not layer.window] == [*range(5, spec.n_layer, 6)]
    for layer in spec.layers:
        assert (layer.heads, layer.kv_heads, layer.k_dim) == (sliding if layer.window else full)
        assert (f"blk.{layer.index}.attn_v.weight" in file.tensors) == bool(layer.window)
    assert {layer.window for layer in spec.layers} == {0, 1024}
    found = spec.experts
    assert (found and (found.count, found.used, found.n_ff)) == experts
    assert spec.rope_sliding is not None
    assert (spec.rope.n_rot, spec.rope_sliding.n_rot, spec.logit_softcap) == (512, 256, 30.0)
    if experts:   # 704 and 2112 are no whole blocks of 256
        assert file.tensors["blk.0.ffn_down_exps.weight"].quant is Quant.Q5_0
        assert file.tensors["blk.0.ffn_up_exps.weight"].quant is Quant.Q4_K


def test_a_dense_model_has_no_mtp_block() -> None:
    """One line that says what to leave out."""
    with pytest.raises(SettingsError, match=r"qwen2\.5-14b has no MTP block; leave :mtp out"):
        synthetic_model("qwen2.5-14b:q4_k:mtp")


@pytest.mark.parametrize("name", ["", "tiny", "tiny:", "tiny:q8", "nosuch:q8_0", "tiny:q8_0:", "tiny:q8_0:mtp:x", "\n"])
def test_a_wrong_name_lists_what_there_is(name: str) -> None:
    """One line with all shapes and mixes."""
    with pytest.raises(SettingsError) as caught:
        synthetic_model(name)
    message = str(caught.value)
    assert "\n" not in message
    assert ", ".join(SHAPES) in message
    assert ", ".join(MIXES) in message


def test_any_text_has_tokens() -> None:
    """A token per byte, " w" apart; tokens of any id print as text."""
    file = synthetic_model("tiny:q8_0")
    tokenizer = Tokenizer.from_metadata(file.metadata, source="synthetic")
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) == len(TEXT.encode()) - TEXT.count(" w")
    assert tokenizer.decode([300, 65, 508]) == " w300A w508"
    assert [tokenizer.token_text(i) for i in (509, 510, 511)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.eog_ids == {509, 511}


@pytest.mark.parametrize("mix", MIXES)
def test_a_file_is_the_model(tmp_path: Path, mix: str) -> None:
    """Written and read again: the same metadata, the same tensors, the same bytes."""
    file = synthetic_model(f"tiny:{mix}:mtp")
    path = tmp_path / "model.gguf"
    write_gguf(path, file.metadata, file.tensors)
    read = GgufFile.open(path)
    assert read.synthetic
    assert read.metadata.keys() == file.metadata.keys()
    assert all(np.array_equal(read.metadata[key], value) for key, value in file.metadata.items())
    assert list(read.tensors) == list(file.tensors)
    for name, info in file.tensors.items():
        other = read.tensors[name]
        assert (other.shape, other.quant, other.n_elements) == (info.shape, info.quant, info.n_elements)
        np.testing.assert_array_equal(other.data[:], info.data[:])
        assert np.isfinite(dequantize_rows(info, 0, info.n_elements // info.shape[0])).all()


@pytest.mark.parametrize("arch", ["qwen35", "qwen2", "qwen3", "qwen3moe", "gemma3", "gemma4", "gemma4 with experts"])
def test_numbers_are_sane_and_llama_cpp_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """Logits spread by 2, with another favourite at each position, and are those of llama.cpp on the written file."""
    small = {f"small-{dense}": Shape(dense, "qwen2", 6, 256, 512, 4, 2, 64, 512, 32768, 1e6)
             for dense in ("qwen2", "qwen3")}
    small["small-gemma3"] = Shape(
        "gemma3", "qwen2", 6, 256, 512, 4, 2, 64, 512, 32768, 1e6, sliding=Sliding(16, 3, 8.0)
    )
    for name, mixture in (("small-gemma4", None), ("small-gemma4 with experts", Mixture(8, 2, 128))):
        small[name] = Shape(
            "gemma4", "qwen2", 6, 256, 512, 4, 1, 128, 512, 32768, 1e6,
            two=TwoShapes(16, 3, 2, 64, values=mixture is None), mixture=mixture,
        )
    small["small-qwen3moe"] = Shape(
        "qwen3moe", "qwen2", 6, 256, 512, 4, 2, 64, 512, 32768, 1e6, mixture=Mixture(8, 3, 128)
    )
    monkeypatch.setattr("kvs_core.models.synthetic.SHAPES", {**SHAPES, **small})
    file = synthetic_model("tiny:f16" if arch == "qwen35" else f"small-{arch}:f16")
    tokens = Tokenizer.from_metadata(file.metadata, source="synthetic").encode(TEXT)
    logits = logits_of(file, tokens)
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits.std(axis=-1), 2.0, rtol=0.2)
    assert len(set(logits.argmax(axis=-1).tolist())) > 2
    path = tmp_path / "tiny.gguf"
    write_gguf(path, file.metadata, file.tensors)
    np.testing.assert_array_equal(logits_of(GgufFile.open(path), tokens), logits)
    with llamacpp.Model(path) as model, model.context() as context:
        assert model.tokenize(TEXT) == tokens
        theirs = context.decode(tokens)[-len(logits) :]
    # Two float32 implementations, but llama.cpp rounds activations to float16 in products with float16 weights.
    np.testing.assert_allclose(logits, theirs, atol=0.05)


def test_real_depth_stays_in_range() -> None:
    """Through the 64 layers' worth of additions that the 27B has, the residual stays a few units: from the gains."""
    file = synthetic_model("qwen3.5-27b:iq4_xs")
    rng = np.random.default_rng(0)
    for name, low, high in (("blk.0.ffn_down", 0.5, 0.7), ("blk.0.ssm_out", 0.2, 0.3), ("output", 1.8, 2.2),
                            ("blk.3.attn_q", 0.9, 1.1)):
        info = file.tensors[f"{name}.weight"]
        rows = dequantize_rows(info, 1000, 256)
        out = rows @ rng.normal(size=info.shape[0]).astype(np.float32)
        assert low < out.std() < high, name
    decay = np.exp(file.tensors["blk.5.ssm_a"].data[:].view(np.float32)
                   * np.log1p(np.exp(file.tensors["blk.5.ssm_dt.bias"].data[:].view(np.float32))))
    assert decay.min() > 0.7
    assert decay.max() < 0.999
