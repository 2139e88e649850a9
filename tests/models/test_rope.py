"""Rotary angles: the formulas, which setting wins, and llama.cpp's numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import log
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.device.base import StepInputs
from kvs_core.device.host.device import HostDevice
from kvs_core.device.workspace import Workspace, workspace_bytes
from kvs_core.errors import SettingsError
from kvs_core.formats.gguf import GgufFile
from kvs_core.memory.phases import Phase
from kvs_core.models.blocks import Batch
from kvs_core.models.model import forward_buffers, logit_buffers
from kvs_core.models.qwen35 import still_pairs
from kvs_core.models.recurrent import RecurrentState
from kvs_core.models.registry import load_model
from kvs_core.models.rope import (
    LONG_DIVISORS,
    SHORT_DIVISORS,
    RopeSpec,
    divisors_name,
    reach_tokens,
    rope_table,
)
from kvs_core.settings.rooms import AS_IN_FILE, RopeSettings
from tests.models.dense_kv import DenseKv
from tests.support import llamacpp
from tests.support.float_copy import copy_metadata
from tests.support.tiny_gguf import (
    write_tiny_gemma3,
    write_tiny_llama,
    write_tiny_qwen2,
    write_tiny_qwen3,
    write_tiny_qwen3moe,
    write_tiny_qwen35,
    write_tiny_qwen35moe,
)

PLAIN = RopeSpec(
    n_rot=64, interleaved=True, freq_base=10000.0, scaling="linear", scale=1.0, orig_ctx=2048, attn_factor=1.0
)
FREQUENCIES = 10000.0 ** (-np.arange(32) / 32)


def test_without_scaling_pair_i_turns_by_the_power_of_the_base() -> None:
    """inv_freq[i] = base ** (-2 i / n_rot), in the file's pairing, magnitude 1."""
    table = rope_table(PLAIN, RopeSettings())
    np.testing.assert_allclose(table.inv_freq, FREQUENCIES, rtol=1e-14)
    assert (table.n_rot, table.interleaved, table.magnitude) == (64, True, 1.0)
    assert not rope_table(replace(PLAIN, interleaved=False), RopeSettings()).interleaved


@pytest.mark.parametrize(
    ("spec", "overrides", "factor"),
    [
        ({"scale": 4.0}, {}, 0.25),
        ({"scale": 4.0}, {"scale": 2.0}, 0.5),
        ({"scale": 4.0}, {"freq_scale": 0.125}, 0.125),
        ({"scale": 4.0}, {"scale": 8.0, "freq_scale": 0.125}, 0.125),
        ({"scale": 4.0}, {"scale": 0.0, "freq_scale": 0.0, "freq_base": 0.0, "yarn_ext_factor": -1.0}, 0.25),
        ({"scale": 4.0, "scaling": "none"}, {}, 1.0),
        ({"scale": 4.0}, {"scaling": "none", "scale": 2.0}, 1.0),
        ({"scale": 4.0, "scaling": "none"}, {"scaling": "linear"}, 0.25),
        ({"scale": 4.0, "scaling": "yarn"}, {"yarn_ext_factor": 0.0}, 0.25),
    ],
)
def test_linear_scaling_divides_all_angles(spec: dict[str, Any], overrides: dict[str, Any], factor: float) -> None:
    """The user's factor wins over the file's, unset ones do not, and ``none`` switches both off."""
    table = rope_table(replace(PLAIN, **spec), RopeSettings(**overrides))
    np.testing.assert_allclose(table.inv_freq, FREQUENCIES * factor, rtol=1e-12)
    assert table.magnitude == 1.0


def test_the_users_base_wins() -> None:
    """--rope-freq-base replaces the file's base."""
    table = rope_table(PLAIN, RopeSettings(freq_base=500.0))
    np.testing.assert_allclose(table.inv_freq, 500.0 ** (-np.arange(32) / 32), rtol=1e-14)


def test_divisors_divide_each_angle() -> None:
    """``rope_freqs.weight`` divides its pair's angle, beside the scaling."""
    divisors = np.linspace(1.0, 8.0, 32, dtype=np.float32)
    table = rope_table(replace(PLAIN, scale=2.0), RopeSettings(), divisors)
    np.testing.assert_allclose(table.inv_freq, FREQUENCIES / divisors / 2.0, rtol=1e-12)


@given(
    scale=st.floats(1.01, 64.0),
    base=st.floats(100.0, 1e7),
    orig_ctx=st.integers(64, 262144),
    n_rot=st.sampled_from([16, 64, 128]),
)
def test_yarn_keeps_fast_pairs_and_divides_slow_ones(scale: float, base: float, orig_ctx: int, n_rot: int) -> None:
    """Pairs turning more than 32 times in the original context stay, those turning less than once are divided, the
    share divided grows between, and q and k are lengthened by 1 + 0.1 ln(scale)."""
    spec = replace(PLAIN, n_rot=n_rot, freq_base=base, scaling="yarn", scale=scale, orig_ctx=orig_ctx)
    table = rope_table(spec, RopeSettings())
    plain = rope_table(replace(spec, scaling="none"), RopeSettings()).inv_freq
    turns = orig_ctx * plain / (2 * np.pi)
    share = table.inv_freq / plain
    one_pair = base ** (2 / n_rot)  # the ramp's ends lie on whole pairs
    assert np.allclose(share[turns > 32 * one_pair], 1.0)
    assert np.allclose(share[turns < 1 / one_pair], 1 / scale)
    assert (np.diff(share) <= 1e-12).all()
    assert table.magnitude == pytest.approx(1 + 0.1 * log(scale))


def test_yarn_settings_of_the_user_win() -> None:
    """Original context, betas and factors given by the user replace those of the file and the paper."""
    spec = replace(PLAIN, scaling="yarn", scale=4.0, orig_ctx=2048)
    wide = rope_table(spec, RopeSettings(yarn_beta_fast=1.0, yarn_beta_slow=1.0))
    # Both ends of the ramp on neighbouring pairs: one turn in 2048 positions lies between pairs 20 and 21.
    np.testing.assert_allclose(wide.inv_freq[:21], FREQUENCIES[:21], rtol=1e-12)
    np.testing.assert_allclose(wide.inv_freq[21:], FREQUENCIES[21:] / 4.0, rtol=1e-12)
    shorter = rope_table(spec, RopeSettings(yarn_orig_ctx=512))
    np.testing.assert_array_equal(shorter.inv_freq, rope_table(replace(spec, orig_ctx=512), RopeSettings()).inv_freq)
    half = rope_table(spec, RopeSettings(yarn_ext_factor=0.5)).inv_freq
    full = rope_table(spec, RopeSettings()).inv_freq
    np.testing.assert_allclose(half, (full + FREQUENCIES / 4.0) / 2.0, rtol=1e-12)
    assert rope_table(spec, RopeSettings(yarn_attn_factor=0.5)).magnitude == pytest.approx(0.5 * (1 + 0.1 * log(4)))
    assert rope_table(replace(spec, attn_factor=2.0), RopeSettings()).magnitude == pytest.approx(2 + 0.2 * log(4))


def test_yarn_keys_of_the_file_are_defaults_of_the_flags() -> None:
    """``rope.scaling.yarn_*`` count where the user says nothing, and where the scaling is YaRN."""
    spec = replace(PLAIN, scaling="yarn", scale=4.0)
    own = replace(spec, yarn_ext_factor=0.5, yarn_attn_factor=0.7, yarn_beta_fast=8.0, yarn_beta_slow=2.0)
    flags = RopeSettings(yarn_ext_factor=0.5, yarn_attn_factor=0.7, yarn_beta_fast=8.0, yarn_beta_slow=2.0)
    table, told = rope_table(own, RopeSettings()), rope_table(spec, flags)
    np.testing.assert_array_equal(table.inv_freq, told.inv_freq)
    assert table.magnitude == told.magnitude == pytest.approx(0.7 * (1 + 0.1 * log(4)))
    papers = RopeSettings(yarn_ext_factor=1.0, yarn_attn_factor=1.0, yarn_beta_fast=32.0, yarn_beta_slow=1.0)
    np.testing.assert_array_equal(rope_table(own, papers).inv_freq, rope_table(spec, RopeSettings()).inv_freq)
    linear = rope_table(replace(own, scaling="linear"), RopeSettings())
    np.testing.assert_allclose(linear.inv_freq, FREQUENCIES / 4.0, rtol=1e-12)
    assert linear.magnitude == 1.0


@pytest.mark.parametrize(
    ("spec", "overrides", "reach"),
    [
        ({}, {}, 0),
        ({"scale": 4.0, "scaling": "yarn", "reach_tokens": 8192}, {}, 8192),
        ({"scale": 4.0, "scaling": "yarn", "reach_tokens": 8192}, {"scaling": "none"}, 0),
        ({}, {"scale": 4.0}, 8192),
        ({}, {"scaling": "yarn", "freq_scale": 0.125, "yarn_orig_ctx": 1024}, 8192),
        ({"scaling": "none"}, {"scale": 4.0}, 0),
        ({"scale": 4.0, "reach_tokens": 8192}, {"scale": 2.0}, 4096),
        ({}, {"freq_base": 500.0}, 0),
    ],
)
def test_a_scaling_reaches_its_factor_of_the_original_context(
    spec: dict[str, Any], overrides: dict[str, Any], reach: int
) -> None:
    """The user's factor of it, or what the file says, or nothing that is known."""
    assert reach_tokens(replace(PLAIN, **spec), RopeSettings(**overrides)) == reach


def test_longrope_has_a_tensor_for_short_and_one_for_long_contexts() -> None:
    """Up to the original context the one, beyond it the other."""
    spec = replace(PLAIN, scaling="longrope")
    for context, name in ((256, SHORT_DIVISORS), (2048, SHORT_DIVISORS), (2304, LONG_DIVISORS)):
        assert divisors_name(spec, context) == name
    assert divisors_name(PLAIN, 4096) is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"scaling": "ntk"}, "--rope-scaling ntk: use one of none, linear, yarn"),
        ({"scale": -1.0}, "--rope-scale -1: give 0 or a number from 1e-06 to 1e+06"),
        ({"freq_scale": 1e-30}, "--rope-freq-scale 1e-30: give 0 or a number from"),
        ({"freq_base": -1.0}, "--rope-freq-base -1: give a positive number"),
        ({"freq_base": float("nan")}, "--rope-freq-base nan: give a finite number"),
        ({"yarn_orig_ctx": -1}, "--yarn-orig-ctx -1: give a positive number"),
        ({"yarn_ext_factor": float("inf")}, "--yarn-ext-factor inf: give a finite number"),
        ({"scale": 2.0, "freq_scale": 2.0}, "give one of them"),
        ({"freq_base": 1.0}, "--rope-freq-base 1: give a number above 1"),
        ({"scaling": "yarn", "yarn_beta_slow": 64.0}, "--yarn-beta-slow 64 and --yarn-beta-fast 32"),
        ({"scaling": "yarn", "yarn_beta_slow": 0.0}, "--yarn-beta-slow 0"),
    ],
)
def test_unusable_settings_are_refused(overrides: dict[str, Any], message: str) -> None:
    """A setting that gives no angles is refused in one line that names the flag."""
    with pytest.raises(SettingsError) as caught:
        rope_table(PLAIN, RopeSettings(**overrides))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pairs", "sections", "still"),
    [(32, (11, 11, 10, 0), ()), (6, (2, 2, 2, 0), ()), (8, (4, 2, 2, 0), (7,)), (8, (1, 1, 1, 1), (3, 7))],
)
def test_pairs_without_a_text_position_stand_still(
    pairs: int, sections: tuple[int, ...], still: tuple[int, ...]
) -> None:
    """The published sections reach every pair; others leave pairs to an id that is 0 in a text."""
    assert still_pairs(pairs, sections) == still
    table = rope_table(replace(PLAIN, n_rot=2 * pairs, still_pairs=still), RopeSettings())
    assert np.flatnonzero(table.inv_freq == 0.0).tolist() == list(still)


def copy_with_keys(
    source: Path, target: Path, keys: dict[str, Any], tensors: dict[str, np.ndarray] | None = None
) -> Path:
    """Write ``source`` to ``target`` with these metadata keys added or replaced, and tensors added."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    copy_metadata(reader, writer, without=keys)
    for name, value in keys.items():
        put = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        put(name, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


WRITERS = {
    "gemma3": partial(write_tiny_gemma3, window=20), "llama": write_tiny_llama, "qwen2": write_tiny_qwen2,
    "qwen3": write_tiny_qwen3, "qwen3moe": write_tiny_qwen3moe, "qwen35": write_tiny_qwen35,
    "qwen35moe": write_tiny_qwen35moe,
}
TOKENS = np.random.default_rng(0).integers(0, 256, 96).astype(np.int32)
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}


def scaled(folder: Path, arch: str, keys: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Path:
    """A tiny model with keys of its arch."""
    told = {f"{arch}.{name}": value for name, value in keys.items()}
    return copy_with_keys(WRITERS[arch](folder / "plain.gguf", seed=7), folder / "scaled.gguf", told, tensors)


def our_logits(path: Path, rope: RopeSettings, context_tokens: int) -> np.ndarray:
    """[T, V] of ``TOKENS`` on the host."""
    device = HostDevice(threads=1)
    device.allocate_arena(1 << 20)
    try:
        ours = load_model(GgufFile.open(path), device, context_tokens=context_tokens, rope=rope)
        specs = [*forward_buffers(ours.spec, 96), *logit_buffers(ours.spec, 96)]
        ws = Workspace(device, 0, workspace_bytes(specs), specs)
        state = RecurrentState(ours.spec, device)
        batch = Batch(TOKENS, 0, Phase.PREFILL)
        state.begin(batch.phase, batch.rows, 0)
        device.begin_step(StepInputs(TOKENS, 0, 0, batch.phase))
        ours.forward(batch, DenseKv(range(ours.spec.n_layer)), state, ws)
        return ours.logits(ws.rows("x", 96), ws).copy()
    finally:
        device.close()


def check_logits(
    path: Path, told: RopeSettings = AS_IN_FILE, rope: dict[str, float] | None = None, *, context_tokens: int = 2048
) -> np.ndarray:
    """Logits are llama.cpp's, whose context gets ``rope``."""
    with llamacpp.Model(path) as model, model.context(n_ctx=context_tokens, n_threads=1, rope=rope) as context:
        expected = context.decode(TOKENS.tolist())
    ours = our_logits(path, told, context_tokens)
    # llama.cpp's angles are float32 products, ours float64. A wrong rule differs by 0.1 and more.
    # GELU, in gemma3, comes from a table of float16 numbers there.
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-2 if GgufFile.open(path).arch == "gemma3" else 1e-3)
    return ours


@pytest.mark.parametrize(
    ("arch", "keys"),
    [
        ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        ("llama", YARN),
        ("llama", {**YARN, "rope.scaling.attn_factor": 1.3}),
        ("llama", {**YARN, "rope.scaling.factor": 0.5}),
        ("qwen2", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        ("qwen2", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
        ("qwen2", YARN),
        ("qwen2", {**YARN, "rope.scaling.attn_factor": 1.3}),
        ("qwen3", YARN),
        ("gemma3", {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}),
        ("gemma3", {"rope.freq_base_swa": 500.0, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}),
        ("gemma3", {**YARN, "rope.scaling.attn_factor": 1.3}),
        ("qwen35", YARN),
        ("qwen35", {"rope.freq_base": 100.0}),  # fast enough that the pair that stands still matters
    ],
)
def test_logits_are_those_of_llamacpp(tmp_path: Path, arch: str, keys: dict[str, Any]) -> None:
    """A file's scaling keys mean what they mean to llama.cpp."""
    check_logits(scaled(tmp_path, arch, keys))


YARN_FLAGS = {"scaling": "yarn", "scale": 4.0, "yarn_orig_ctx": 64}
THEIR_YARN = {"rope_scaling_type": 2, "rope_freq_scale": 0.25, "yarn_orig_ctx": 64}


@pytest.mark.parametrize("arch", ["gemma3", "llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("keys", "told", "theirs"),
    [
        ({}, {"scaling": "linear", "scale": 4.0}, {"rope_scaling_type": 1, "rope_freq_scale": 0.25}),
        ({}, {"freq_scale": 0.5, "freq_base": 500.0}, {"rope_freq_scale": 0.5, "rope_freq_base": 500.0}),
        ({}, YARN_FLAGS, THEIR_YARN),
        ({}, {**YARN_FLAGS, "yarn_ext_factor": 0.3}, {**THEIR_YARN, "yarn_ext_factor": 0.3}),
        ({}, {**YARN_FLAGS, "yarn_beta_fast": 4.0, "yarn_beta_slow": 0.5},
         {**THEIR_YARN, "yarn_beta_fast": 4.0, "yarn_beta_slow": 0.5}),
        ({}, {"scaling": "linear", "yarn_attn_factor": 1.2}, {"rope_scaling_type": 1, "yarn_attn_factor": 1.2}),
        (YARN, {"scaling": "none"}, {"rope_scaling_type": 0}),
        (YARN, {"scale": 2.0, "yarn_orig_ctx": 32}, {"rope_freq_scale": 0.5, "yarn_orig_ctx": 32}),
    ],
    ids=str,
)
def test_flags_mean_what_they_mean_to_llamacpp(
    tmp_path: Path, arch: str, keys: dict[str, Any], told: dict[str, Any], theirs: dict[str, float]
) -> None:
    """``--rope-*`` and ``--yarn-*``, over a file with and without keys of its own; each changes the logits."""
    path = scaled(tmp_path, arch, keys)
    ours = check_logits(path, RopeSettings(**told), theirs)
    assert np.abs(ours - our_logits(path, AS_IN_FILE, 2048)).max() > 0.1


def test_longrope_is_that_of_llamacpp(tmp_path: Path) -> None:
    """The divisors of the short contexts up to the original one and those of the long ones beyond, with the file's
    factor on the magnitude; an original context by flag changes nothing."""
    keys = {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 1024,
            "rope.scaling.attn_factor": 1.2}
    tensors = {SHORT_DIVISORS: np.linspace(1.0, 1.5, 32, dtype=np.float32),
               LONG_DIVISORS: np.linspace(1.0, 20.0, 32, dtype=np.float32)}
    path = scaled(tmp_path, "llama", keys, tensors)
    short, long = check_logits(path, context_tokens=1024), check_logits(path, context_tokens=2048)
    assert np.abs(short - long).max() > 0.1
    kept = check_logits(path, RopeSettings(yarn_orig_ctx=4096), {"yarn_orig_ctx": 4096}, context_tokens=2048)
    np.testing.assert_array_equal(kept, long)
