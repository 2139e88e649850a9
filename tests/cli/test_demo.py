"""The demo model that ships with kvs: the default, and a needle that it finds with a few MiB of KV on the device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvs_cli.app import main
from kvs_core.demo import DEMO_MODEL
from tests.engine.written import FOR_LONG
from tests.support import llamacpp

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def needle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A prompt of 6,000 tokens that hides a number, and the number."""
    prompt = tmp_path_factory.mktemp("needle") / "prompt.txt"
    command = [sys.executable, "-m", "benchmarks.needle_prompt", "--tokens", "6000", "--output", prompt]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return prompt, done.stderr.rsplit("the answer is ", 1)[1].strip()


@FOR_LONG
def test_it_finds_the_needle_streamed_and_resident(
    needle: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --model: said on stderr, and the same answer, with the number in it, in 2 MiB and all resident."""
    prompt, answer = needle
    common = ["run", str(prompt), "--json", "--temp", "0", "-n", "8", "-ctk", "q8_0", "-ctv", "q8_0",
              "--kv-page-tokens", "32", "-ub", "64", "-t", "1"]
    results = []
    for arena in (["--kv-stream-arena-mib", "2"], ["--kv-residency-mode", "resident"]):
        assert main([*common, *arena]) == 0
        captured = capsys.readouterr()
        assert "taking the demo model" in captured.err
        results.append(json.loads(captured.out))
    streamed, resident = results
    assert answer in streamed["text"]
    assert streamed["text"] == resident["text"]
    assert streamed["kv"]["streamed_pages_per_step"] > streamed["kv"]["active_pages"] / 2
    assert resident["kv"]["h2d_bytes"] == 0


def test_info_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    """``kvs info`` alone is about the demo model: arch, licence, MTP block."""
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "qwen35" in shown
    assert "1 mtp" in shown


def test_llamacpp_continues_alike(capsys: pytest.CaptureFixture[str]) -> None:
    """llama.cpp loads the file and gives the same greedy text."""
    text = "It was late in the evening when the captain came back to the harbour and"
    assert main(["run", "-p", text, "--json", "--temp", "0", "-n", "24", "-ctk", "f32", "-ctv", "f32", "-t", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    with llamacpp.Model(DEMO_MODEL) as model, model.context(n_ctx=512, n_threads=1) as context:
        tokens = model.tokenize(text)
        assert len(tokens) == result["prompt_tokens"]
        assert context.greedy(tokens, 24) == result["token_ids"][:24]
