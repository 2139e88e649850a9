"""``kvs bench equivalence`` sees one wrong bit, and says how far another engine is."""

from __future__ import annotations

import csv
import json
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_cli.quality.distance import Bits, Distance, log_probs
from kvs_cli.quality.equivalence import Recording
from kvs_core.device.host.device import HostDevice
from tests.cli.conftest import Kvs
from tests.quality.conftest import SMALL_PAGES

SHORT = ("--prompt-tokens", "320", "--decode-tokens", "6", *SMALL_PAGES)


def test_streamed_logits_have_the_bits_of_resident_ones(
    kvs: Kvs, tiny_qwen35: Path, story: Path, tmp_path: Path
) -> None:
    """Three pools chosen by the command, all of which stream; every logit of every row is counted."""
    ended = kvs("bench", "equivalence", "-m", tiny_qwen35, *SHORT, "--text-file", story, "--against", "none",
                "--output", tmp_path)
    assert ended.code == 0, ended.err
    result = json.loads((tmp_path / "equivalence.json").read_text())
    rows = result["rows"]
    assert len(rows) == 3
    assert len({row["pool_pages"] for row in rows}) == 3
    for row in rows:
        assert row["streamed_mib"] > 0
        assert row["rows"] == 326
        assert row["logits"] == 326 * result["n_vocab"]
        assert row["bits_differ"] == row["logits_differ"] == 0
    assert rows[0]["streamed_pages_per_step"] > rows[0]["active_pages"] / 4
    assert f"{3 * 326 * result['n_vocab']:,} logits compared with the resident cache: 0 bits differ" in ended.out
    with open(tmp_path / "equivalence.csv", encoding="utf-8") as file:
        assert [row["bits_differ"] for row in csv.DictReader(file)] == ["0"] * 3


def test_one_wrong_bit_fails_the_command(
    kvs: Kvs, tiny_llama: Path, story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is and that it is one; the exit code is 1."""
    read = Recording.read

    def flipped(recording: Recording, first: int, rows: int) -> np.ndarray:
        logits = read(recording, first, rows).copy()
        if first <= 200 < first + rows:
            logits[200 - first, 3:4].view(np.uint32)[:] ^= 1 << 7
        return logits

    monkeypatch.setattr(Recording, "read", flipped)
    ended = kvs("bench", "equivalence", "-m", tiny_llama, *SHORT, "--text-file", story, "--against", "none",
                "--arenas-mib", "4")
    assert ended.code == 1
    assert "1 bits differ, first in row 200" in ended.out
    assert "error: equivalence: 1 bits differ between arenas" in ended.err


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_llamacpp_is_near(kvs: Kvs, tiny_llama: Path, tiny_qwen35: Path, story: Path, arch: str) -> None:
    """On float32 weights and KV both compute the same: KL near 0, the same tokens. The prompt's last row and each row
    that is decoded are compared."""
    pytest.importorskip("xllamacpp")
    path = tiny_llama if arch == "llama" else tiny_qwen35
    result = kvs("bench", "equivalence", "-m", path, *SHORT, "-ctk", "f32", "-ctv", "f32", "--text-file", story,
                 "--against", "llama.cpp", "--arenas-mib", "4", "--json").json
    row = result["rows"][-1]
    assert (row["kind"], row["against"], row["rows"]) == ("distance", "llama.cpp", 7)
    assert row["kl_mean"] <= row["kl_max"] < 1e-5
    assert row["largest_difference"] < 1e-2
    assert row["same_top"] >= 6


def test_another_device_is_compared_with_the_cpu(
    kvs: Kvs, tiny_qwen35: Path, story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kvs runs on another device than the CPU: the prompt's last row and the decoded ones, as distributions.
    The device here is the CPU under another name, so its distance is 0."""
    class Other(HostDevice):
        name = "other"

    monkeypatch.setattr(
        "kvs_cli.open_model.open_device", lambda settings: HostDevice(1) if settings.wants_cpu else Other(1)
    )
    result = kvs("bench", "equivalence", "-m", tiny_qwen35, *SHORT, "--device", "auto", "--text-file", story,
                 "--against", "cpu", "--arenas-mib", "4", "--json").json
    assert result["device"] == "other"
    row = result["rows"][-1]
    assert (row["against"], row["rows"], row["same_top"], row["first_row"]) == ("cpu", 7, 7, None)
    assert row["kl_max"] < 1e-12
    assert row["largest_difference"] < 1e-12


def test_llamacpp_is_left_out_where_it_is_missing(
    kvs: Kvs, tiny_llama: Path, story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its reason; asked for by name, it is an error before anything is read."""
    find = util.find_spec
    monkeypatch.setattr(
        "kvs_cli.quality.llamacpp.find_spec", lambda name: None if name == "xllamacpp" else find(name)
    )
    common = ("bench", "equivalence", "-m", tiny_llama, *SHORT, "--text-file", story, "--arenas-mib", "4")
    result = kvs(*common, "--json").json
    assert result["left_out"] == {
        "llama.cpp": "the xllamacpp package is not installed", "cpu": "kvs runs on it already"
    }
    assert [row["kind"] for row in result["rows"]] == ["bits"]
    assert "xllamacpp package is not installed; use --against none" in kvs(*common, "--against", "llama.cpp").error


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--against", "vllm"), "--against 'vllm': give llama.cpp, cpu, auto or none"),
        (("--prompt-tokens", "0"), "--prompt-tokens is 0"),
        (("--decode-tokens", "0"), "--decode-tokens is 0"),
        (("--prompt-tokens", "40000"), "40032 tokens are needed, the context holds 32768"),
        (("--arenas-mib", "0"), "--arenas-mib 0: give numbers from 1"),
        (("--arenas-mib", "x"), "--arenas-mib 'x'"),
    ],
)
def test_bad_flags_are_one_line(kvs: Kvs, arguments: tuple[str, ...], error: str) -> None:
    """With the limits."""
    assert error in kvs("bench", "equivalence", *arguments).error


@pytest.mark.parametrize(("flag", "size"), [
    ("--arenas-mib", "64,1"), ("--kv-stream-arena-mib", "1"), ("--kv-stream-pool-mib", "1")])
def test_what_is_too_small_is_said_before_the_text_is_read(
    kvs: Kvs, tiny_qwen35: Path, story: Path, tmp_path: Path, flag: str, size: str
) -> None:
    """By the flag that was given; not a token is read, nothing is written. Of several arenas one is enough."""
    ended = kvs("bench", "equivalence", "-m", tiny_qwen35, "--prompt-tokens", "320", "--decode-tokens", "4", "-ub",
                "320", "-ctk", "f32", "-ctv", "f32", "--kv-page-tokens", "2048", "--text-file", story, "--against",
                "none", flag, size, "--device", "cpu", "--output", tmp_path / "out")
    assert f"{flag} is 1" in ended.error
    assert "MiB" in ended.error
    assert "reading the text" not in ended.err
    assert not (tmp_path / "out").exists()


@given(st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=1, max_size=6), st.data())
def test_bits_are_counted_as_bits(rows: list[list[float]], data: Any) -> None:
    """NaN equals itself, -0 is not 0; the count is that of the binary digits, in blocks of any size."""
    ours = np.array(rows, np.float32)
    masks = np.array(
        [[data.draw(st.sampled_from((0, 0, 1, 0x80000000, 0xFFFFFFFF))) for _ in row] for row in rows], np.uint32
    )
    theirs = (ours.view(np.uint32) ^ masks).view(np.float32)
    cut = data.draw(st.integers(0, len(rows)))
    bits = Bits()
    for part in (slice(0, cut), slice(cut, len(rows))):
        bits.add(ours[part], theirs[part])
    assert bits.rows == len(rows)
    assert bits.logits == 3 * len(rows)
    assert bits.bits_differ == sum(int(mask).bit_count() for row in masks for mask in row)
    assert bits.logits_differ == int(np.count_nonzero(masks))
    assert bits.first_row == next((number for number, row in enumerate(masks) if row.any()), None)


def test_distance_follows_its_formula() -> None:
    """KL(theirs || ours) by hand; what they give no share is nothing; the first other token is named with its gap."""
    distance = Distance()
    distance.add(np.log(np.array([0.5, 0.25, 0.25], np.float32)), np.log([0.5, 0.25, 0.25]))
    with np.errstate(divide="ignore"):
        distance.add(np.log(np.array([0.2, 0.7, 0.1], np.float32)) + 3, np.log([0.6, 0.4, 0.0]))
    expected = 0.6 * np.log(0.6 / 0.2) + 0.4 * np.log(0.4 / 0.7)
    assert distance.kl == pytest.approx([0.0, expected], abs=1e-6)
    assert distance.agreed == 1
    assert distance.largest == pytest.approx(np.log(3), abs=1e-6)
    assert distance.parting is not None
    assert (distance.parting.row, distance.parting.ours, distance.parting.theirs) == (1, 1, 0)
    assert distance.parting.gap == pytest.approx(np.log(3.5), abs=1e-6)


def test_log_probs_sum_to_one() -> None:
    """Also of logits far from 0."""
    row = np.array([900.0, 901.0, -50.0], np.float32)
    assert np.exp(log_probs(row)).sum() == pytest.approx(1.0)
