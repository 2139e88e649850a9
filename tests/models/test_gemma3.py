"""What a ``gemma3`` file says of its layers, positions and text; what is out of range is refused with its numbers."""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvs_core.device.operands import Activation
from kvs_core.errors import ModelFileError
from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.models.registry import read_spec
from tests.models.test_spec import with_keys, with_tensors
from tests.support import llamacpp
from tests.support.tiny_gguf import write_tiny_gemma3
from tests.support.tiny_vocab import TRAINING_TEXT


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gemma3(tmp_path_factory.mktemp("gemma3") / "gemma3.gguf", seed=1, n_layer=8)


@pytest.fixture(scope="module")
def file(path: Path) -> GgufFile:
    return GgufFile.open(path)


def windows(file: GgufFile, **keys: Any) -> list[int]:
    """Of each layer, with other keys."""
    return [layer.window for layer in read_spec(with_keys(file, **keys)).layers]


def test_layers_that_slide(file: GgufFile) -> None:
    """Of every n layers all but the last, 6 by default; or as an entry per layer says; none without a window."""
    pattern = "attention__sliding_window_pattern"
    assert windows(file) == [80, 0] * 4
    assert windows(file, **{pattern: None}) == [80, 80, 80, 80, 80, 0, 80, 80]
    assert windows(file, **{pattern: 4}) == [80, 80, 80, 0, 80, 80, 80, 0]
    assert windows(file, **{pattern: 1}) == [0] * 8
    assert windows(file, **{pattern: 0}) == [80] * 8
    listed = np.array([True, False, False, True, True, False, True, False])
    assert windows(file, **{pattern: listed, "attention__sliding_window": 33}) == [33, 0, 0, 33, 33, 0, 33, 0]
    for window in (None, 0):
        spec = read_spec(with_keys(file, attention__sliding_window=window))
        assert not any(layer.window for layer in spec.layers)
        assert spec.rope_sliding is None


def test_positions_of_both_kinds_of_layers(file: GgufFile) -> None:
    """Those that slide have a base of their own, 10000 by default, and are not stretched."""
    keys = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0, "rope__freq_base": 5e5}
    for base, expected in ((None, 1e4), (2e4, 2e4)):
        spec = read_spec(with_keys(file, **keys, rope__freq_base_swa=base))
        assert spec.rope_sliding is not None
        assert (spec.rope.freq_base, spec.rope.scaling, spec.rope.scale) == (5e5, "linear", 8.0)
        assert (spec.rope_sliding.freq_base, spec.rope_sliding.scaling) == (expected, "none")
        assert not spec.rope.interleaved
        assert not spec.rope_sliding.interleaved


def test_what_the_arch_itself_says(file: GgufFile) -> None:
    """Factors, activation and norms stand in no key; the cap of logits does."""
    spec = read_spec(file)
    assert (spec.activation, spec.post_norms) == (Activation.GELU, True)
    assert (spec.embedding_factor, spec.attention_scale) == (sqrt(64), 1 / sqrt(64))
    assert (spec.logit_softcap, read_spec(with_keys(file, final_logit_softcapping=30.0)).logit_softcap) == (0.0, 30.0)


def test_queries_of_62_layers_have_another_factor(tmp_path: Path) -> None:
    """The 27B's: of E / H values, whatever its heads have."""
    write_tiny_gemma3(tmp_path / "m.gguf", seed=1, n_layer=62, embd=48, ffn=16, heads=3, kv_heads=1, head_dim=32)
    assert read_spec(GgufFile.open(tmp_path / "m.gguf")).attention_scale == 1 / sqrt(16)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope__freq_base_swa": 1.0}, "gemma3.rope.freq_base_swa is 1; it must exceed 1"),
        ({"final_logit_softcapping": -2.0}, "gemma3.final_logit_softcapping is -2; it must not be negative"),
        ({"attention__sliding_window_pattern": np.array([True, False])},
         "gemma3.attention.sliding_window_pattern has 2 entries; 8 are expected"),
        ({"attention__sliding_window_pattern": "often"}, "sliding_window_pattern is a string; an integer is expected"),
        ({"attention__sliding_window": 1 << 31}, "gemma3.attention.sliding_window is 2147483648; it must lie"),
    ],
)
def test_keys_out_of_range(file: GgufFile, keys: dict[str, Any], message: str) -> None:
    """One line with the key, its value and what would do."""
    with pytest.raises(ModelFileError) as caught:
        read_spec(with_keys(file, **keys))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm", "ffn_norm"])
def test_every_norm_must_be_there(file: GgufFile, name: str) -> None:
    """A block without one is another model."""
    with pytest.raises(ModelFileError, match=f"has no tensor blk.3.{name}.weight"):
        read_spec(with_tensors(file, **{f"blk.3.{name}.weight": None}))


@pytest.mark.parametrize(
    "text", [TRAINING_TEXT, " two  spaces ", "", "<start_of_turn>user\nriver<end_of_turn>\n", "naïve 東京 🚀\t\n", "▁"]
)
def test_text_has_llamacpps_tokens(path: Path, file: GgufFile, text: str) -> None:
    """With BOS and without a space in front; special tokens in the text are themselves."""
    tokenizer = Tokenizer.from_metadata(file.metadata, source="test")
    with llamacpp.Model(path) as model:
        expected = model.tokenize(text)
        assert [model.is_end(token) for token in range(6)] == [token in tokenizer.eog_ids for token in range(6)]
    assert tokenizer.encode(text) == expected
    assert expected[0] == tokenizer.bos_id
