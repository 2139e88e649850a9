"""The promise as a user meets it: one prompt, any arena, the same numbers to the last bit."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from kvs_cli.app import main
from tests.engine.written import FOR_LONG

PROSE = Path(__file__).parents[1] / "data" / "harbour.txt"
PROMPT_WORDS = 1545   # about 1,900 tokens


def kvs(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON of one run that succeeds."""
    assert main(["run", "--json", *arguments]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize(
    ("page_tokens", "ubatch"), [("256", "512"), pytest.param("64", "128", marks=FOR_LONG)],
    ids=["default pages", "small pages"],
)
def test_identical_probabilities_with_any_arena(
    smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], page_tokens: str, ubatch: str
) -> None:
    """A 1,900-token prompt with the smallest arena, a larger one (``KVS_TEST_LONG``: three) and fully resident."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(" ".join((PROSE.read_text() * 2).split(" ")[:PROMPT_WORDS]))
    common = [
        str(prompt), "-m", str(smollm2_path), "-n", "8", "--temp", "0", "--n-probs", "10", "-c", "2048",
        "-ctk", "q8_0", "-ctv", "q8_0", "--kv-page-tokens", page_tokens, "-ub", ubatch, "-t", "1",
    ]
    assert main(["run", *common, "--kv-stream-arena-mib", "1"]) == 1
    refusal = re.search(r"needs (\d+) MiB, --kv-stream-arena-mib is 1;", capsys.readouterr().err)
    assert refusal is not None
    least = int(refusal[1])
    assert main(["run", *common, "--kv-stream-arena-mib", str(least - 1)]) == 1
    capsys.readouterr()

    resident = kvs(capsys, *common, "--kv-residency-mode", "resident")
    assert 1850 <= resident["prompt_tokens"] <= 1950
    assert len(resident["probs"]) == 8
    assert resident["kv"]["h2d_bytes"] == 0
    most = resident["kv"]["arena_bytes"] >> 20
    for quarter in range(4) if os.environ.get("KVS_TEST_LONG") else (0, 2):
        arena = least + (most - least) * quarter // 4
        streamed = kvs(capsys, *common, "--kv-stream-arena-mib", str(arena))
        assert streamed["kv"]["h2d_bytes"] > 0
        assert streamed["kv"]["arena_bytes"] == arena << 20
        assert streamed["kv"]["resident_pages"] + streamed["kv"]["ring_slots"] <= streamed["kv"]["pool_pages"]
        assert streamed["probs"] == resident["probs"]
        assert streamed["token_ids"] == resident["token_ids"]
