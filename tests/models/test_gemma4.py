"""What a ``gemma4`` file says of its layers, positions and text; what kvs has no code for is refused in one line."""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvs_core.device.base import ExpertSizes
from kvs_core.device.operands import Activation
from kvs_core.engine.pages import Pages
from kvs_core.errors import CapabilityError, ModelFileError
from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.models.model import forward_buffers, step_sizes
from kvs_core.models.registry import read_spec
from kvs_core.models.spec import LayerKind, LayerSpec
from kvs_core.settings.rooms import KvSettings
from tests.models.test_spec import with_keys, with_tensors
from tests.support import llamacpp
from tests.support.tiny_gguf import Experts, Gemma4, write_tiny_gemma4
from tests.support.tiny_vocab import TRAINING_TEXT

PATTERN = (True, True, False, True, True, False)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    more = Gemma4(shared=3, per_layer=16, values=False)
    return write_tiny_gemma4(
        tmp_path_factory.mktemp("gemma4") / "gemma4.gguf", seed=1, pattern=PATTERN, more=more,
        ffn=[96, 96, 96, 128, 128, 64],
    )


@pytest.fixture(scope="module")
def file(path: Path) -> GgufFile:
    return GgufFile.open(path)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    experts = Experts(count=6, used=2, ffn=32, joined=True)
    path = tmp_path_factory.mktemp("gemma4") / "mixture.gguf"
    return GgufFile.open(write_tiny_gemma4(path, seed=2, more=Gemma4(experts=experts)))


def test_layers_of_two_shapes(file: GgufFile) -> None:
    """Heads, windows and widths are each layer's own; buffers of one shape are there once."""
    spec = read_spec(file)
    shapes = [(layer.kv_heads, layer.k_dim, layer.v_dim, layer.window) for layer in spec.layers]
    assert shapes == [(4, 64, 64, 80) if slides else (1, 128, 128, 0) for slides in PATTERN]
    assert [layer.n_ff for layer in spec.layers] == [96, 96, 96, 128, 128, 64]
    names = [buffer.name for buffer in forward_buffers(spec, 8)]
    assert len(names) == len(set(names))
    assert [name for name in names if name.startswith("ffn")] == ["ffn 96", "ffn 128", "ffn 64"]


def test_layers_without_keys_read_the_last_ones_of_their_kind(file: GgufFile) -> None:
    """The last that slides, or that sees everything, among those that have some."""
    spec = read_spec(file)
    assert [layer.kv_index for layer in spec.layers] == [0, 1, 2, 1, 1, 2]
    assert [layer.read_index for layer in spec.layers] == list(range(6))
    assert [layer.shares for layer in spec.layers] == [False] * 3 + [True] * 3
    assert [layer.index for layer in spec.kv_layers] == [0, 1, 2]
    assert spec.n_reads == 6


def test_what_the_arch_itself_says(file: GgufFile) -> None:
    """Factors, activation and norms stand in no key; logits are capped at 30 where the file does not say."""
    spec = read_spec(file)
    assert (spec.activation, spec.post_norms, spec.v_norms) == (Activation.GELU, True, True)
    assert (spec.embedding_factor, spec.attention_scale) == (sqrt(64), 1.0)
    caps = [read_spec(with_keys(file, final_logit_softcapping=cap)).logit_softcap for cap in (5.0, 0.0, None)]
    assert caps == [5.0, 0.0, 30.0]


def test_positions_of_both_kinds_of_layers(file: GgufFile) -> None:
    """Those that slide have a base and a size of their own and are not stretched."""
    spec = read_spec(with_keys(file, rope__scaling__type="linear", rope__scaling__factor=8.0, rope__freq_base_swa=2e4))
    assert spec.rope_sliding is not None
    assert (spec.rope.freq_base, spec.rope.n_rot, spec.rope.scale, spec.rope.scaling) == (1e6, 128, 8.0, "linear")
    assert (spec.rope_sliding.freq_base, spec.rope_sliding.n_rot, spec.rope_sliding.scaling) == (2e4, 64, "none")


def test_a_mixture(mixture: GgufFile) -> None:
    """Experts, and a dense feed-forward part beside them."""
    spec = read_spec(mixture)
    assert spec.experts is not None
    assert (spec.experts.count, spec.experts.used, spec.experts.n_ff, spec.experts.joined) == (6, 2, 32, True)
    assert spec.n_ff == 96
    assert step_sizes(spec, 8).experts == ExpertSizes(count=6, used=2, n_ff=32, n_beside=96)


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"attention__shared_kv_layers": 2}, CapabilityError,
         "shared_kv_layers is 2 of 6 layers; kvs has code where the last two layers before them"),
        ({"attention__shared_kv_layers": 5}, CapabilityError, "shared_kv_layers is 5 of 6 layers"),
        ({"attention__shared_kv_layers": 7}, CapabilityError, "shared_kv_layers is 7 of 6 layers"),
        ({"attention__value_length_swa": 32}, CapabilityError, "layer 0 has keys of 64 values and values of 32"),
        ({"rope__dimension_count": 64}, ModelFileError, "rope.dimension_count is 64 with heads of 128 values"),
        ({"rope__dimension_count_swa": 32}, ModelFileError, "rope.dimension_count_swa is 32 with heads of 64 values"),
        ({"rope__freq_base_swa": 1.0}, ModelFileError, "rope.freq_base_swa is 1; it must exceed 1"),
        ({"attention__head_count_kv": np.array([3] * 6, np.int32)}, ModelFileError, "is 4, no multiple of 3"),
        ({"attention__head_count_kv": np.array([1] * 5, np.int32)}, ModelFileError, "has 5 entries; 6 are expected"),
        ({"feed_forward_length": np.array([0] * 6, np.int32)}, ModelFileError, "has numbers from 0 to 0"),
        ({"attention__sliding_window_pattern": None}, ModelFileError, "sliding_window_pattern, which this model needs"),
        ({"attention__key_length_swa": None}, ModelFileError, "key_length_swa, which this model needs"),
    ],
)
def test_what_does_not_fit_is_refused(
    file: GgufFile, keys: dict[str, Any], error: type[Exception], message: str
) -> None:
    """One line with the key, its value and what would do."""
    with pytest.raises(error) as caught:
        read_spec(with_keys(file, **keys))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["blk.0.attn_k", "blk.0.attn_v", "blk.1.attn_k_norm", "blk.4.inp_gate", "blk.4.post_norm", "per_layer_model_proj"],
)
def test_every_tensor_must_be_there(file: GgufFile, name: str) -> None:
    """But for keys that another layer has, and values of layers that see everything."""
    with pytest.raises(ModelFileError, match=f"has no tensor {name}.weight"):
        read_spec(with_tensors(file, **{f"{name}.weight": None}))


def layer(window: int, kv_heads: int, dim: int) -> LayerSpec:
    return LayerSpec(0, LayerKind.FULL, 4, kv_heads, dim, dim, 0, window=window)


def test_two_shapes_are_two_pools_and_no_more() -> None:
    """Layers that slide may have pages of their own; others that differ are refused."""
    kv = KvSettings()
    both = Pages.of([layer(80, 4, 64), layer(0, 1, 128), layer(80, 4, 64)], kv)
    assert (both.shared.k_dim, both.sliding and both.sliding.k_dim) == (128, 64)
    assert Pages.of([layer(80, 2, 64), layer(0, 2, 64)], kv).sliding is None
    assert Pages.of([layer(80, 2, 64), layer(40, 2, 64)], kv).sliding is None
    for layers in ([layer(0, 2, 64), layer(0, 1, 128)], [layer(80, 2, 64), layer(80, 1, 64), layer(0, 1, 128)]):
        with pytest.raises(CapabilityError, match="2 different KV shapes"):
            Pages.of(layers, kv)


@pytest.mark.parametrize(
    "text", [TRAINING_TEXT, " two  spaces ", "", "<start_of_turn>user\nriver<end_of_turn>\n", "▁", "\n\n"]
)
def test_text_has_llamacpps_tokens(path: Path, file: GgufFile, text: str) -> None:
    """With BOS and without a space in front; special tokens in the text are themselves."""
    tokenizer = Tokenizer.from_metadata(file.metadata, source="test")
    with llamacpp.Model(path) as model:
        expected = model.tokenize(text)
    assert tokenizer.encode(text) == expected
    assert expected[0] == tokenizer.bos_id
