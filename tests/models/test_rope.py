"""Rotary angles: the formulas, which setting wins, and llama.cpp's numbers."""

from __future__ import annotations

from dataclasses import replace
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
from kvs_core.models.rope import RopeSpec, rope_table
from kvs_core.settings.rooms import RopeSettings
from tests.models.dense_kv import DenseKv
from tests.support import llamacpp
from tests.support.tiny_gguf import write_tiny_llama, write_tiny_qwen35

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


def copy_with_keys(source: Path, target: Path, keys: dict[str, Any]) -> Path:
    """Write ``source`` to ``target`` with these metadata keys added or replaced."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or name in keys:
            continue
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], element)
    for name, value in keys.items():
        put = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        put(name, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}


@pytest.mark.parametrize(
    ("arch", "keys"),
    [
        ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        ("llama", YARN),
        ("llama", {**YARN, "rope.scaling.attn_factor": 1.3}),
        ("llama", {**YARN, "rope.scaling.factor": 0.5}),
        ("qwen35", YARN),
        ("qwen35", {"rope.freq_base": 100.0}),  # fast enough that the pair that stands still matters
    ],
)
def test_logits_are_those_of_llamacpp(tmp_path: Path, arch: str, keys: dict[str, Any]) -> None:
    """A file's scaling keys mean what they mean to llama.cpp."""
    write = {"llama": write_tiny_llama, "qwen35": write_tiny_qwen35}[arch]
    keys = {f"{arch}.{name}": value for name, value in keys.items()}
    path = copy_with_keys(write(tmp_path / "plain.gguf", seed=7), tmp_path / "scaled.gguf", keys)
    tokens = np.random.default_rng(0).integers(0, 256, 96).astype(np.int32)
    with llamacpp.Model(path) as model, model.context(n_threads=1) as context:
        expected = context.decode(tokens.tolist())
    device = HostDevice(threads=1)
    device.allocate_arena(1 << 20)
    try:
        ours = load_model(GgufFile.open(path), device)
        specs = [*forward_buffers(ours.spec, 96), *logit_buffers(ours.spec, 96)]
        ws = Workspace(device, 0, workspace_bytes(specs), specs)
        state = RecurrentState(ours.spec, device)
        batch = Batch(tokens, 0, Phase.PREFILL)
        state.begin(batch.phase, batch.rows, 0)
        device.begin_step(StepInputs(tokens, 0, 0, batch.phase))
        ours.forward(batch, DenseKv(ours.spec.n_layer), state, ws)
        # llama.cpp's angles are float32 products, ours float64. A wrong rule differs by 0.1 and more.
        np.testing.assert_allclose(ours.logits(ws.rows("x", 96), ws), expected, rtol=0, atol=1e-3)
    finally:
        device.close()
