"""Metadata and tensor tables: what a file says becomes a spec, and what cannot run is refused in one clear line."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from kvs_core.device.operands import GdnShape
from kvs_core.errors import CapabilityError, KvsError, ModelFileError
from kvs_core.formats.gguf import GgufFile, TensorInfo
from kvs_core.models import qwen35
from kvs_core.models.registry import read_spec
from kvs_core.models.spec import LayerKind
from kvs_core.settings import RopeSettings
from tests.support.tiny_gguf import write_tiny_llama, write_tiny_qwen2, write_tiny_qwen3, write_tiny_qwen35

QWEN_27B = {
    "general.architecture": "qwen35",
    "qwen35.block_count": 65,
    "qwen35.nextn_predict_layers": 1,
    "qwen35.context_length": 262144,
    "qwen35.embedding_length": 5120,
    "qwen35.feed_forward_length": 17408,
    "qwen35.attention.head_count": 24,
    "qwen35.attention.head_count_kv": 4,
    "qwen35.attention.key_length": 256,
    "qwen35.attention.value_length": 256,
    "qwen35.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen35.rope.dimension_count": 64,
    "qwen35.rope.dimension_sections": np.array([11, 11, 10, 0], np.int32),
    "qwen35.rope.freq_base": 1e7,
    "qwen35.ssm.conv_kernel": 4,
    "qwen35.ssm.state_size": 128,
    "qwen35.ssm.group_count": 16,
    "qwen35.ssm.time_step_rank": 48,
    "qwen35.ssm.inner_size": 6144,
    "qwen35.vocab_size": 248320,
}


def info(name: str, shape: tuple[int, ...]) -> TensorInfo:
    count = prod(shape)
    return TensorInfo(name, shape, GGMLQuantizationType.F32, count, 4 * count, np.empty(0, np.uint8))


def with_keys(file: GgufFile, **changes: Any) -> GgufFile:
    """``file`` with keys of its arch replaced (``__`` for a dot); None takes a key away."""
    metadata = dict(file.metadata)
    for name, value in changes.items():
        key = f"{file.arch}.{name.replace('__', '.')}"
        metadata.pop(key, None)
        if value is not None:
            metadata[key] = value
    return replace(file, metadata=MappingProxyType(metadata))


def with_tensors(file: GgufFile, **changes: Any) -> GgufFile:
    """``file`` with tensors changed by ``replace(info, **fields)``, added where new, or removed where None."""
    tensors = dict(file.tensors)
    for name, fields in changes.items():
        if fields is None:
            del tensors[name]
        else:
            tensors[name] = replace(tensors.get(name, info(name, (8,))), **fields)
    return replace(file, tensors=MappingProxyType(tensors))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return GgufFile.open(write_tiny_qwen35(tmp_path_factory.mktemp("q") / "q.gguf", seed=1, head_dim=48))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return GgufFile.open(write_tiny_llama(tmp_path_factory.mktemp("l") / "l.gguf", seed=1))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return GgufFile.open(write_tiny_qwen2(tmp_path_factory.mktemp("2") / "2.gguf", seed=1))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return GgufFile.open(write_tiny_qwen3(tmp_path_factory.mktemp("3") / "3.gguf", seed=1))


def test_the_27b_has_its_published_shape() -> None:
    """From the published metadata follow 64 layers, 16 with KV, the published tensor and parameter counts, and MTP."""
    empty = GgufFile(Path("27b.gguf"), 3, 0, MappingProxyType(QWEN_27B), MappingProxyType({}))
    spec = qwen35.read_spec(empty)
    table = [*qwen35.trunk_tensors(spec), *qwen35.nextn_tensors(spec)]
    # Qwen3.5-27B, 3.6 and 3.8: an own output head, MTP without own embeddings or head.
    held = [entry for entry in table if "embed_tokens" not in entry.name and "shared_head_head" not in entry.name]
    assert len(held) == 866
    file = replace(empty, tensors=MappingProxyType({entry.name: info(entry.name, entry.shape) for entry in held}))
    spec = read_spec(file)
    assert (spec.n_layer, spec.n_nextn, spec.n_params) == (64, 1, 27_320_697_856)
    assert [layer.index for layer in spec.kv_layers] == list(range(3, 64, 4))
    assert [layer.kv_index for layer in spec.kv_layers] == list(range(16))
    assert {layer.gdn for layer in spec.recurrent_layers} == {GdnShape(16, 48, 128, 128, 4)}
    assert len(spec.recurrent_layers) == 48
    (mtp,) = spec.nextn
    assert (mtp.index, mtp.kv_index, mtp.kv_heads, mtp.k_dim) == (64, 16, 4, 256)
    assert (spec.rope.n_rot, spec.rope.still_pairs, spec.attention_scale) == (64, (), 1 / 16)
    assert spec.name == "27b"


def test_defaults_of_absent_keys(llama: GgufFile, qwen: GgufFile) -> None:
    """Absent optional keys mean what the format says: heads share E, KV heads equal heads, base 10000, interval 4."""
    plain = with_keys(
        llama, attention__head_count_kv=None, attention__key_length=None, attention__value_length=None,
        rope__freq_base=None, rope__dimension_count=None, attention__head_count=1,
    )
    shapes = {"attn_q": (64, 64), "attn_k": (64, 64), "attn_v": (64, 64), "attn_output": (64, 64)}
    resized = {f"blk.{i}.{name}.weight": {"shape": shape} for i in range(4) for name, shape in shapes.items()}
    spec = read_spec(with_tensors(plain, **resized))
    assert (spec.layers[0].kv_heads, spec.layers[0].k_dim, spec.rope.n_rot, spec.rope.freq_base) == (1, 64, 64, 10000.0)
    spec = read_spec(with_keys(qwen, full_attention_interval=None))
    assert [layer.index for layer in spec.kv_layers] == [3, 7]


def test_a_listed_pattern_overrides_the_interval(qwen: GgufFile) -> None:
    """``attention.recurrent_layers`` says which layers are recurrent; interval and MTP entry mean nothing."""
    listed = np.array([True, True, True, False, True, True, True, False, True])
    spec = read_spec(with_keys(qwen, attention__recurrent_layers=listed, full_attention_interval=3))
    assert [layer.kind is LayerKind.RECURRENT for layer in spec.layers] == listed[:8].tolist()
    assert (spec.nextn[0].index, spec.nextn[0].kv_index) == (8, 2)


def test_optional_tensors_may_be_there(llama: GgufFile, qwen: GgufFile) -> None:
    """Biases, an own head and the MTP block's own norm are accepted, and may be absent."""
    biases = {f"blk.0.{name}.bias": {"shape": (size,)} for name, size in
              {"attn_q": 256, "attn_k": 128, "attn_v": 128, "attn_output": 64, "ffn_up": 128, "ffn_down": 64}.items()}
    assert read_spec(with_tensors(llama, **biases)).n_layer == 4
    assert read_spec(with_tensors(qwen, **{"blk.8.nextn.shared_head_norm.weight": None})).n_nextn == 1


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"block_count": None}, ModelFileError, "qwen35.block_count"),
        ({"block_count": 10**9}, ModelFileError, "qwen35.block_count is 1000000000; it must lie between 1 and 1024"),
        ({"block_count": 0}, ModelFileError, "qwen35.block_count is 0"),
        ({"block_count": 1}, ModelFileError, "which leaves no trunk"),
        ({"block_count": "nine"}, ModelFileError, "an integer is expected"),
        ({"embedding_length": 0}, ModelFileError, "embedding_length is 0"),
        ({"embedding_length": 2**31}, ModelFileError, "embedding_length is 2147483648"),
        ({"feed_forward_length": None}, ModelFileError, "feed_forward_length"),
        ({"context_length": 0}, ModelFileError, "context_length is 0"),
        ({"attention__head_count": 0}, ModelFileError, "head_count is 0"),
        ({"attention__head_count": 3}, ModelFileError, "is 3, no multiple of head_count_kv, which is 2"),
        ({"attention__head_count_kv": 0}, ModelFileError, "head_count_kv is 0"),
        ({"attention__key_length": 10**6}, ModelFileError, "key_length is 1000000"),
        ({"attention__value_length": 32}, ModelFileError, "the gate needs equal sizes"),
        ({"attention__layer_norm_rms_epsilon": 0.0}, ModelFileError, "it must lie between 0 and 1"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, ModelFileError, "must be finite"),
        ({"attention__layer_norm_rms_epsilon": None}, ModelFileError, "layer_norm_rms_epsilon"),
        ({"rope__dimension_count": 13}, ModelFileError, "it must be even and no larger"),
        ({"rope__dimension_count": 50}, ModelFileError, "it must be even and no larger"),
        ({"rope__dimension_count": 0}, ModelFileError, "dimension_count is 0"),
        ({"rope__dimension_sections": None}, ModelFileError, "dimension_sections"),
        ({"rope__dimension_sections": np.array([2, 2, 2], np.int32)}, ModelFileError, "4 are expected"),
        ({"rope__dimension_sections": np.array([3, 3, 3, 0], np.int32)}, ModelFileError, "four parts of the 6"),
        ({"rope__dimension_sections": np.array([-1, 3, 2, 0], np.int32)}, ModelFileError, "four parts of the 6"),
        ({"rope__dimension_sections": np.zeros(4, np.int32)}, ModelFileError, "four parts of the 6"),
        ({"rope__freq_base": 1.0}, ModelFileError, "rotary base 1 (must exceed 1)"),
        ({"rope__scaling__factor": -2.0}, ModelFileError, "scale -2 (must lie between"),
        ({"rope__scaling__type": "ntk"}, CapabilityError, "'ntk'; kvs has code for none, linear, yarn, longrope"),
        ({"rope__scaling__yarn_beta_fast": 0.5}, ModelFileError, "yarn_beta_slow 1 or yarn_beta_fast 0.5 (0 < slow"),
        ({"rope__scaling__yarn_ext_factor": -1.0}, ModelFileError, "yarn_ext_factor -1 (must not be negative)"),
        ({"rope__scaling__yarn_attn_factor": 0.0}, ModelFileError, "yarn_attn_factor 0 (must be positive)"),
        ({"attention__dual_chunk__local_size": 64}, CapabilityError, "no key of the size of its chunks"),
        ({"ssm__conv_kernel": 1}, ModelFileError, "conv_kernel is 1"),
        ({"ssm__conv_kernel": None}, ModelFileError, "conv_kernel"),
        ({"ssm__state_size": 10**6}, ModelFileError, "state_size is 1000000"),
        ({"ssm__group_count": 0}, ModelFileError, "group_count is 0"),
        ({"ssm__group_count": 3}, ModelFileError, "is 4, no multiple of ssm.group_count, which is 3"),
        ({"ssm__time_step_rank": None}, ModelFileError, "time_step_rank"),
        ({"ssm__inner_size": 100}, ModelFileError, "inner_size is 100; 4 heads of 32 values make 128"),
        ({"full_attention_interval": 0}, ModelFileError, "full_attention_interval is 0"),
        ({"attention__recurrent_layers": np.ones(8, bool)}, ModelFileError, "9 are expected"),
        ({"attention__recurrent_layers": np.ones(9, np.int32)}, ModelFileError, "an array of bools"),
        ({"nextn_predict_layers": 2}, CapabilityError, "kvs has code for one MTP block"),
        ({"expert_count": 8}, CapabilityError, "mixture of experts"),
    ],
)
def test_metadata_out_of_range_is_refused(
    qwen: GgufFile, changes: dict[str, Any], error: type[KvsError], message: str
) -> None:
    """One line that names the file, the key, its value and what is expected; the tensors are not even looked at."""
    with pytest.raises(error) as caught:
        read_spec(with_keys(qwen, **changes))
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{qwen.path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rope__dimension_count": 32}, ModelFileError, "is 32 with heads of 64 values; they must be equal and even"),
        ({"attention__key_length": 63, "rope__dimension_count": 63}, ModelFileError, "they must be equal and even"),
        ({"attention__scale": -1.0}, ModelFileError, "attention.scale is -1"),
        ({"attention__key_length": None, "attention__head_count": 6}, ModelFileError, "does not divide into 6 heads"),
        ({"expert_count": 8}, CapabilityError, "llama.expert_count is 8"),
    ],
)
def test_llama_metadata_out_of_range_is_refused(
    llama: GgufFile, changes: dict[str, Any], error: type[KvsError], message: str
) -> None:
    """As for qwen35, where the rules differ."""
    with pytest.raises(error) as caught:
        read_spec(with_keys(llama, **changes))
    assert message in str(caught.value)


def test_longrope_has_both_tensors_of_divisors(llama: GgufFile) -> None:
    """They belong to that scaling alone."""
    long, short = ("rope_factors_long.weight", "rope_factors_short.weight")
    both = with_tensors(llama, **{long: {"shape": (32,)}, short: {"shape": (32,)}})
    assert read_spec(with_keys(both, rope__scaling__type="longrope")).rope.scaling == "longrope"
    with pytest.raises(ModelFileError, match=r"has no tensor rope_factors_short\.weight \[32\]"):
        read_spec(with_keys(with_tensors(both, **{short: None}), rope__scaling__type="longrope"))
    with pytest.raises(ModelFileError, match=r"rope_factors_long\.weight and 1 more has no place"):
        read_spec(both)


def test_a_scaling_reaches_beyond_the_training_length(llama: GgufFile) -> None:
    """Where the file or the user says from which context on; never below the training length."""
    assert read_spec(llama).n_ctx_most == 32768
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    assert read_spec(with_keys(llama, **yarn)).n_ctx_most == 32768   # its context_length may be the longer one
    told = with_keys(llama, **yarn, rope__scaling__original_context_length=32768)
    assert (read_spec(told).n_ctx_train, read_spec(told).n_ctx_most) == (32768, 131072)
    assert read_spec(told, RopeSettings(scale=2.0)).n_ctx_most == 65536
    assert read_spec(llama, RopeSettings(scaling="yarn", scale=8.0)).n_ctx_most == 262144
    assert read_spec(llama, RopeSettings(scaling="yarn", scale=8.0, yarn_orig_ctx=1024)).n_ctx_most == 32768


def test_attention_scale_of_the_file_counts(llama: GgufFile) -> None:
    """``attention.scale`` replaces 1 / sqrt(D); 0 means that it is not set."""
    assert read_spec(with_keys(llama, attention__scale=0.5)).attention_scale == 0.5
    assert read_spec(with_keys(llama, attention__scale=0.0)).attention_scale == 0.125


def test_qwen2_and_qwen3_read_their_heads(qwen2: GgufFile, qwen3: GgufFile) -> None:
    """Heads of E / H values where no key says otherwise, or of ``key_length``, that turn in halves."""
    two, three = read_spec(qwen2), read_spec(qwen3)
    assert (two.n_layer, two.layers[2].heads, two.layers[2].kv_heads, two.layers[2].k_dim) == (3, 2, 1, 64)
    assert (three.n_layer, three.layers[3].heads, three.layers[3].kv_heads, three.layers[3].k_dim) == (4, 4, 2, 64)
    for spec in (two, three):
        assert (spec.rope.n_rot, spec.rope.interleaved, spec.rope.freq_base) == (64, False, 1e6)
        assert (spec.attention_scale, spec.n_nextn, spec.layers[1].gated) == (0.125, 0, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blk.1.attn_q.bias": None}, "has no tensor blk.1.attn_q.bias [128], which this qwen2 model needs"),
        ({"blk.1.attn_v.bias": {"shape": (32,)}}, "blk.1.attn_v.bias has the shape [32]; [64] is expected"),
        ({"blk.0.attn_output.bias": {}}, "blk.0.attn_output.bias has no place in the qwen2 model"),
        ({"blk.0.attn_q_norm.weight": {}}, "blk.0.attn_q_norm.weight has no place in the qwen2 model"),
        ({"rope_freqs.weight": {}}, "rope_freqs.weight has no place in the qwen2 model"),
    ],
)
def test_qwen2_has_biases_on_q_k_and_v(qwen2: GgufFile, changes: dict[str, Any], message: str) -> None:
    """They are all there, and no others."""
    with pytest.raises(ModelFileError) as caught:
        read_spec(with_tensors(qwen2, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blk.3.attn_q_norm.weight": None}, "has no tensor blk.3.attn_q_norm.weight [64], which this qwen3 model"),
        ({"blk.3.attn_k_norm.weight": {"shape": (32,)}}, "blk.3.attn_k_norm.weight has the shape [32]; [64] is"),
        ({"blk.0.attn_q.bias": {}}, "blk.0.attn_q.bias has no place in the qwen3 model"),
        ({"blk.0.attn_q.weight": {"shape": (64, 64)}}, "attn_q.weight has the shape [64, 64]; [64, 256] is expected"),
    ],
)
def test_qwen3_has_norms_of_q_and_k(qwen3: GgufFile, changes: dict[str, Any], message: str) -> None:
    """They are there in every layer, biases are not, and heads may together be wider than a row."""
    with pytest.raises(ModelFileError) as caught:
        read_spec(with_tensors(qwen3, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blk.3.attn_q.weight": None}, "has no tensor blk.3.attn_q.weight [64, 384]"),
        ({"blk.0.attn_qkv.weight": None}, "has no tensor blk.0.attn_qkv.weight [64, 256]"),
        ({"blk.0.attn_gate.weight": None}, "has no tensor blk.0.attn_gate.weight [64, 128]"),
        ({"blk.8.nextn.eh_proj.weight": None}, "has no tensor blk.8.nextn.eh_proj.weight [128, 64]"),
        ({"output_norm.weight": None}, "has no tensor output_norm.weight [64]"),
        ({"blk.1.ssm_conv1d.weight": {"shape": (3, 256)}}, "blk.1.ssm_conv1d.weight has the shape [3, 256]; [4, 256]"),
        ({"token_embd.weight": {"shape": (64, 9)}}, "token_embd.weight has the shape [64, 9]; [64, "),
        ({"output.weight": {"shape": (64, 9)}}, "output.weight has the shape [64, 9]"),
        ({"blk.0.ssm_a": {"quant": GGMLQuantizationType.I8}}, "blk.0.ssm_a has type I8, which cannot be read"),
        ({"blk.0.attn_q.weight": {}}, "tensor blk.0.attn_q.weight has no place in the qwen35 model"),
        ({"blk.9.ssm_a": {}, "blk.9.ssm_b": {}}, "tensor blk.9.ssm_a and 1 more has no place"),
    ],
)
def test_tensors_must_be_those_of_the_model(qwen: GgufFile, changes: dict[str, Any], message: str) -> None:
    """A tensor missing, misshapen, unreadable or without a use is named, with the shape expected and the one found."""
    with pytest.raises(ModelFileError) as caught:
        read_spec(with_tensors(qwen, **changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_arch_is_refused_with_the_known_ones(llama: GgufFile) -> None:
    """The line says what the file is and what could be run."""
    file = replace(llama, metadata=MappingProxyType({**llama.metadata, "general.architecture": "gptoss"}))
    known = "gemma3, gemma4, llama, qwen2, qwen3, qwen35, qwen35moe, qwen3moe"
    with pytest.raises(ModelFileError, match=f"architecture is 'gptoss'; kvs can run {known}"):
        read_spec(file)


def test_a_file_of_the_mtp_block_alone_is_refused(qwen: GgufFile) -> None:
    """It is told apart from a damaged file: the user has picked the draft model's file."""
    kept = {name: tensor for name, tensor in qwen.tensors.items() if not name.startswith("blk.") or "blk.8." in name}
    with pytest.raises(ModelFileError, match="holds only the MTP block of a model, not its 8 layers"):
        read_spec(replace(qwen, tensors=MappingProxyType(kept)))
