"""Commands in this process, and a tiny model with little of everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import kvs as kvs
from tests.cli.conftest import tiny_llama as tiny_llama
from tests.cli.conftest import tiny_qwen35 as tiny_qwen35

SMALL_PAGES = ("--kv-page-tokens", "32", "-ub", "64", "-t", "1", "--device", "cpu", "-ctk", "q8_0", "-ctv", "q8_0")
"""So that a short text has many pages."""


@pytest.fixture
def story(tmp_path: Path) -> Path:
    """A text file of 200 words, with characters of several bytes."""
    path = tmp_path / "story.txt"
    text = "Clara carried the lamp to the old mill – nobody saw her. The café in Köln was closed, and it rained. "
    path.write_text(text * 10, encoding="utf-8")
    return path
