"""``kvs bench perplexity`` is what a direct computation gives, whatever the arena."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_cli.quality.perplexity import Score, nats_of, windows
from tests.cli.conftest import Kvs, tokenizer_of
from tests.engine.compare import ours
from tests.quality.conftest import SMALL_PAGES
from tests.support.compare import log_probs


@given(tokens=st.integers(2, 400), room=st.integers(2, 90), data=st.data())
def test_windows_score_every_token_once(tokens: int, room: int, data: st.DataObject) -> None:
    """All but the first one, in order, each with as many tokens before it as the stride leaves."""
    stride = data.draw(st.integers(1, room - 1))
    made = list(windows(tokens, room, stride))
    scored = [token for window in made for token in range(window.scored, window.last)]
    assert scored == list(range(1, tokens))
    for window in made:
        assert 0 < window.last - window.first <= room
        assert window.first < window.scored < window.last
        assert window.first == 0 or window.scored - window.first >= room - stride


def test_nats_are_log_probabilities() -> None:
    """As a float64 log-softmax has them, blocks or not, and for logits far from 0."""
    logits = np.random.default_rng(1).normal(scale=30, size=(37, 50)).astype(np.float32) + np.float32(900)
    targets = [int(token) for token in np.random.default_rng(2).integers(50, size=37)]
    expected = -log_probs(logits)[np.arange(37), targets]
    np.testing.assert_allclose(nats_of(logits, targets), expected, rtol=0, atol=1e-12)


def test_measures_and_errors() -> None:
    """By the formulas of a mean: 2, 4 and 6 nats over 10 bytes."""
    found = Score(np.array([2.0, 4.0, 6.0]), 10).as_json()
    error = 2.0 / math.sqrt(3)
    assert found["nats_per_token"] == 4.0
    assert found["nats_per_token_error"] == pytest.approx(error)
    assert found["nats_per_byte"] == pytest.approx(1.2)
    assert found["bits_per_byte"] == pytest.approx(1.2 / math.log(2))
    assert found["bits_per_byte_error"] == pytest.approx(error * 0.3 / math.log(2))
    assert found["perplexity"] == pytest.approx(math.exp(4))
    assert found["perplexity_error"] == pytest.approx(math.exp(4) * error)


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_it_equals_a_direct_computation(
    kvs: Kvs, tiny_llama: Path, tiny_qwen35: Path, story: Path, tmp_path: Path, arch: str
) -> None:
    """Windows of 256 tokens, 100 apart, in the smallest arena: as logits of each window read at once, softmax in
    float64, token by token; with a BOS in front of every window where the model has one."""
    path = tiny_llama if arch == "llama" else tiny_qwen35
    result = kvs("bench", "perplexity", "-m", path, "--text-file", story, "--tokens", "500", "-c", "256", "--stride",
                 "100", *SMALL_PAGES, "--kv-stream-pool-mib", "1", "--json", "--output", tmp_path).json
    tokenizer = tokenizer_of(path)
    start = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    assert len(start) == (arch == "llama")
    text = tokenizer.encode(story.read_text(encoding="utf-8"), add_special=False)[:501]
    nats: list[float] = []
    first, done = 0, 1
    while done < len(text):
        last = min(len(text), first + 256 - len(start))
        logits = ours(path, [*start, *text[first:last]], type_k="q8_0", type_v="q8_0", context=512)
        rows = log_probs(logits)
        nats += [-float(rows[len(start) + at - first - 1, text[at]]) for at in range(done, last)]
        first, done = first + 100, last
    count = len(tokenizer.decode_bytes(text[1:]))
    assert result["tokens"] == len(nats) == len(text) - 1
    assert result["bytes"] == count
    assert result["nats_per_token"] == pytest.approx(np.mean(nats), abs=1e-5)
    assert result["nats_per_token_error"] == pytest.approx(np.std(nats, ddof=1) / math.sqrt(len(nats)), abs=1e-5)
    assert result["bits_per_byte"] == pytest.approx(sum(nats) / math.log(2) / count, abs=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(np.mean(nats)), rel=1e-4)
    with open(tmp_path / "perplexity.csv", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert len(table) == result["windows"]
    assert sum(int(row["tokens"]) for row in table) == len(nats)
    assert float(table[-1]["perplexity_so_far"]) == result["perplexity"]


def test_the_arena_changes_no_digit(kvs: Kvs, tiny_llama: Path, story: Path) -> None:
    """Streamed and resident: the same numbers to the last bit, and the streamed one did stream."""
    common = ("bench", "perplexity", "-m", tiny_llama, "--text-file", story, "--tokens", "600", "-c", "512",
              *SMALL_PAGES, "-ctk", "f32", "-ctv", "f32", "--json")
    resident = kvs(*common, "--kv-residency-mode", "resident").json
    streamed = kvs(*common, "--kv-stream-pool-mib", "1").json
    assert streamed["h2d_mib"] > 0
    assert resident["h2d_mib"] == 0
    assert [row["nats_per_token"] for row in streamed["rows"]] == [row["nats_per_token"] for row in resident["rows"]]


def test_the_default_text_is_the_benchmark_text(kvs: Kvs, tiny_llama: Path) -> None:
    """Nothing has to be given but the number of tokens; a table for people comes out."""
    ended = kvs("bench", "perplexity", "-m", tiny_llama, "--tokens", "64", "-c", "256", *SMALL_PAGES)
    assert ended.code == 0
    assert "over 64 tokens" in ended.out
    assert "of benchmark text" in ended.out
    assert " ± " in ended.out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--tokens", "0"), "--tokens is 0; give a number from 1"),
        (("--stride", "600", "-c", "512"), "--stride is 600; give a number from 1 to 512"),
        (("--stride", "0"), "--stride is 0"),
        (("-c", "100000"), "--ctx-size: 100000 tokens are needed, the context holds 32768"),
        (("-c", "1"), "--ctx-size is 1; give a number from 2"),
    ],
)
def test_bad_flags_are_one_line(kvs: Kvs, arguments: tuple[str, ...], error: str) -> None:
    """With the limits."""
    assert error in kvs("bench", "perplexity", *arguments).error


def test_an_empty_text_is_refused(kvs: Kvs, tmp_path: Path) -> None:
    """There is nothing to be scored in it."""
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert "has 0; give a longer --text-file" in kvs("bench", "perplexity", "--text-file", empty).error


def test_of_one_token_no_error_is_known() -> None:
    found = Score(np.array([2.0]), 3).as_json()
    assert found["nats_per_token"] == 2.0
    assert [value for key, value in found.items() if key.endswith("_error")] == [None] * 4
