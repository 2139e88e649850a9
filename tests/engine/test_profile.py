"""The share of attention outside windows is what float64 says, whatever the arena, and the reading goes on as ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvs_core.device.host.device import HostDebug
from kvs_core.engine.profile import LayerProfile, Profile, profile_layers
from kvs_core.engine.session import Session
from kvs_core.errors import DeviceError
from kvs_core.memory.phases import Phase
from kvs_core.settings.rooms import LayerWindow
from tests.engine.machines import MACHINES, machine_of, write_models
from tests.engine.sliding import slide
from tests.engine.tiny import engine, kv_settings, text
from tests.engine.written import FOR_LONG
from tests.reference import forward

WINDOWS = (1, 31, 32, 33, 100, 200, 219, 220, 1000)
TOKENS = 220
PLAIN = kv_settings("f32", "f32", rotation=False)
# Float32 sums of some hundred weights, and rows that differ by as much, against float64.
CLOSE = 2e-5
# Queries, keys and weights in float16 (2^-11).
CLOSE_CUDA = 2e-3


def oracle(
    path: Path, tokens: Sequence[int], windows: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> list[list[float]]:
    """By layer and window: full matrices of weights in float64, what lies before each row's window, and its mean."""
    plain, found = forward.attention, []

    def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        scores = np.einsum("thd,shd->hts", q, np.repeat(k, q.shape[1] // k.shape[1], axis=1)) / np.sqrt(q.shape[2])
        distance = np.arange(len(q))[:, None] - np.arange(len(q))
        scores[:, distance < 0] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        outside = [(weights * (distance >= window)).sum(axis=-1)[:, window:] for window in windows]
        found.append([float(shares.mean()) if shares.size else 0.0 for shares in outside])
        return plain(q, k, v)

    with monkeypatch.context() as patched:
        patched.setattr(forward, "attention", attention)
        forward.forward(path, tokens)
    return found


@pytest.mark.parametrize("arch", ["llama", "qwen35", "qwen3"])
def test_shares_are_those_of_softmax_in_float64(
    tiny_models: dict[str, Path], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every layer and window: within a page, of pages, one row short of the text, as long as it, and longer."""
    path = tiny_models[arch]
    with engine(path, kv=PLAIN) as built:
        tokens = text(built.spec.n_vocab, TOKENS)
        profile = profile_layers(built, tokens, WINDOWS)
        assert [layer.layer for layer in profile.layers] == [layer.index for layer in built.spec.kv_layers]
    expected = oracle(path, tokens, WINDOWS, monkeypatch)
    shares = np.array([layer.outside for layer in profile.layers])
    np.testing.assert_allclose(shares, expected, rtol=0, atol=CLOSE)
    assert shares[:, WINDOWS.index(33)].min() > 0.1    # there was something to find
    assert not shares[:, WINDOWS.index(220) :].any()   # no row sees more keys than that
    beyond = shares * np.maximum(TOKENS - np.array(WINDOWS), 0)
    assert (np.diff(beyond, axis=1) <= 0).all()        # a larger window leaves less outside, row by row


@pytest.mark.parametrize("types", [("f32", "f32"), ("q8_0", "q4_0")], ids=str)
@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_the_arena_changes_no_bit(tiny_models: dict[str, Path], arch: str, types: tuple[str, str]) -> None:
    """Streamed through small rings in any runs, and resident: the same profile. What is overwritten is poison first."""
    kv = kv_settings(*types)
    with engine(tiny_models[arch], kv=replace(kv, residency_mode="resident")) as built:
        tokens = text(built.spec.n_vocab, 400)
        resident = profile_layers(built, tokens, (50, 64, 300))
        assert built.report().h2d_bytes == 0
    for pool, ring, run in ((0.0, 0, 0), (0.1, 3, 2), (0.2, 5, 1)):
        told = replace(kv, ring_slots=ring, run_pages=run)
        debug = HostDebug(poison=True, copy_delay=lambda: 0.0002)
        with engine(tiny_models[arch], kv=told, pool=pool, fixed=True, lower=True, debug=debug) as built:
            assert profile_layers(built, tokens, (50, 64, 300)) == resident
            assert built.report().h2d_bytes > 0


def test_reading_goes_on_as_if_nobody_looked(tiny_qwen35: Path) -> None:
    """The logits behind a profiled text have the bits that they have behind any other reading, and nobody looks on."""
    with engine(tiny_qwen35, kv=kv_settings()) as built:
        tokens = text(built.spec.n_vocab, 150)
        Session(built).prefill(tokens)
        with built.step([7], Phase.DECODE) as step:
            expected = step.logits().tobytes()
    heard: list[tuple[int, int]] = []
    with engine(tiny_qwen35, kv=kv_settings()) as built:
        profile_layers(built, tokens, (10, 100), lambda done, whole: heard.append((done, whole)))
        with built.step([7], Phase.DECODE) as step:
            assert step.logits().tobytes() == expected
        assert built._kv.watch is None
    assert heard == [(64, 150), (128, 150), (150, 150)]


def test_nobody_looks_on_after_an_error(tiny_llama: Path) -> None:
    """What breaks off the reading ends the looking, too."""
    def break_off(done: int, whole: int) -> None:
        raise KeyboardInterrupt

    with engine(tiny_llama, kv=kv_settings()) as built:
        with pytest.raises(KeyboardInterrupt):
            profile_layers(built, text(built.spec.n_vocab, 100), (10,), break_off)
        assert built._kv.watch is None


def test_scores_that_are_no_numbers_are_an_error(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They make no profile."""
    with engine(tiny_llama, kv=PLAIN) as built:
        sums = built._device.ops.log_sums
        monkeypatch.setattr(built._device.ops, "log_sums", lambda of: sums(of) * np.nan)
        with pytest.raises(DeviceError, match="not all numbers: no profile; --check-tensors"):
            profile_layers(built, text(built.spec.n_vocab, 100), (10,))


def test_sliding_layers_keep_their_own_window(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are listed and not measured; the other layers are, streamed beside them, with the same bits."""
    slide(monkeypatch, {1: 40, 3: 70})
    with engine(tiny_llama, kv=kv_settings()) as built:
        tokens = text(built.spec.n_vocab, 300)
        resident = profile_layers(built, tokens, (32, 128))
    assert [(layer.layer, layer.window, len(layer.outside)) for layer in resident.layers] == [
        (0, 0, 2), (1, 40, 0), (2, 0, 2), (3, 70, 0),
    ]
    assert min(resident.layers[2].outside) > 0
    with engine(tiny_llama, kv=kv_settings(), pool=0.0, fixed=True) as built:
        assert profile_layers(built, tokens, (32, 128)) == resident
        assert built.report().h2d_bytes > 0


def test_layers_keep_the_smallest_window_that_will_do() -> None:
    """Below the threshold, not at it; else all. Neighbours alike are together, but not over a sliding layer."""
    def layer(number: int, *outside: float) -> LayerProfile:
        return LayerProfile(number, 0, outside)

    profile = Profile(5000, (16, 64, 256), (
        layer(3, 0.5, 0.009, 0.001), layer(7, 0.2, 0.0, 0.0), layer(11, 0.01, 0.01, 0.01), LayerProfile(12, 512, ()),
        layer(15, 0.5, 0.4, 0.3), layer(19, 0.0, 0.2, 0.1), layer(23, 0.2, 0.1, 0.0),
    ))
    assert profile.window_layers(0.01) == (
        LayerWindow(3, 7, 64), LayerWindow(11, 11, None), LayerWindow(15, 15, None), LayerWindow(19, 19, 16),
        LayerWindow(23, 23, 256),
    )
    assert profile.window_layers(0.6) == (LayerWindow(3, 11, 16), LayerWindow(15, 23, 16))


@pytest.mark.parametrize(("tokens", "kept"), [(64, None), (65, 64)])
def test_a_window_that_no_row_sees_beyond_is_not_kept(tokens: int, kept: int | None) -> None:
    """Nothing lies outside of it, since nothing can."""
    profile = Profile(tokens, (16, 64), (LayerProfile(0, 0, (0.068, 0.0)), LayerProfile(1, 0, (0.001, 0.0))))
    assert profile.window_layers(0.01) == (LayerWindow(0, 0, kept), LayerWindow(1, 1, 16))


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("arch", [pytest.param("llama", marks=FOR_LONG), "qwen35"])
def test_a_gpu_finds_what_the_host_finds(name: str, arch: str, tmp_path: Path) -> None:
    """Up to float16; and streamed what it finds resident, bit for bit."""
    machine = machine_of(name)
    path = write_models(tmp_path, machine)[arch]
    windows, kv = (20, 64, 100), kv_settings("q8_0", "q8_0")
    with engine(path, kv=kv) as built:
        tokens = text(built.spec.n_vocab, machine.choose(200, 450))
        expected = profile_layers(built, tokens, windows)
    with engine(path, kv=kv, device=machine.device) as built:
        resident = profile_layers(built, tokens, windows)
    np.testing.assert_allclose(
        [layer.outside for layer in resident.layers], [layer.outside for layer in expected.layers], rtol=0,
        atol=CLOSE_CUDA,
    )
    with engine(path, kv=kv, pool=0.0, fixed=True, device=machine.device) as built:
        assert profile_layers(built, tokens, windows) == resident
        assert built.report().h2d_bytes > 0
