"""``kvs run --session``: what was read once is not read again, and the text goes on where it ended."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.conftest import GREEDY, Kvs
from tests.support.tiny_gguf import write_tiny_qwen35

PROMPT = "The harbour at night is full of lights, and the boats lie still. " * 4


def there(err: str) -> tuple[int, int]:
    """Tokens of the prompt that were there already, and all of them."""
    found = re.search(r"session: (\d+) of (\d+) prompt tokens are there already", err)
    assert found is not None, err
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("arch", ["tiny_llama", "tiny_qwen35"])
@pytest.mark.parametrize("more", [(), ("--spec-type", "ngram-simple,draft-resident")])
def test_an_empty_prompt_goes_on(
    kvs: Kvs, request: pytest.FixtureRequest, tmp_path: Path, arch: str, more: tuple[str, ...]
) -> None:
    """In two runs or in one, streamed or not: the same text, and only the last token is read again."""
    path, file = request.getfixturevalue(arch), tmp_path / "talk.kvs"
    common = ("run", "-m", path, "-c", "1024", *GREEDY, *more)
    first = kvs(*common, "-p", PROMPT, "-n", "9", "--session", file)
    second = kvs(*common, "-p", "", "-n", "9", "--session", file, "--kv-page-tokens", "256")
    whole = kvs(*common, "-p", PROMPT, "-n", "18")
    assert first.out + second.out == whole.out
    kept, all_tokens = there(second.err)
    assert 1 <= all_tokens - kept <= (1 if not more else 9)
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("arch", ["tiny_llama", "tiny_qwen35"])
def test_another_question_about_the_same_text(
    kvs: Kvs, request: pytest.FixtureRequest, tmp_path: Path, arch: str
) -> None:
    """Reads what differs; the file holds the new text then. The same prompt again reads its last tokens alone."""
    path, file = request.getfixturevalue(arch), tmp_path / "talk.kvs"
    common = ("run", "-m", path, "-c", "1024", *GREEDY, "-n", "5", "--session", file)
    first = kvs(*common, "-p", PROMPT)
    assert there(first.err)[0] == 0
    again = kvs(*common, "-p", PROMPT, "--json")
    kept, all_tokens = there(again.err)
    assert all_tokens - kept <= 4
    assert again.json["text"] == first.out
    assert again.json["timings"]["prompt_n"] == all_tokens - kept
    other = kvs(*common, "-p", PROMPT[:-2] + "!")
    kept, all_tokens = there(other.err)
    assert 0 < all_tokens - kept < 12


def test_what_does_not_fit_is_said_before_anything_is_written(
    kvs: Kvs, tiny_qwen35: Path, tmp_path: Path
) -> None:
    """A place that cannot be written, before the model is loaded; a damaged file, one of another model: they stay."""
    file = tmp_path / "talk.kvs"
    common = ("run", "-m", tiny_qwen35, "-c", "512", *GREEDY, "-n", "3", "-p", "hello")
    for place in (tmp_path / "none" / "talk.kvs", tmp_path):
        refused = kvs(*common, "--session", place)
        assert (refused.code, refused.out) == (1, "")
        assert "cannot be written" in refused.err
        assert "loading" not in refused.err
    assert kvs(*common, "--session", file).code == 0
    data = file.read_bytes()
    other = write_tiny_qwen35(tmp_path / "other.gguf", seed=9)
    assert "another model" in kvs(*common[:2], other, *common[3:], "--session", file).err
    assert file.read_bytes() == data
    file.write_bytes(data[:-5])
    refused = kvs(*common, "--session", file)
    assert (refused.code, refused.out) == (1, "")
    assert "checksum" in refused.err
    assert file.read_bytes() == data[:-5]
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []
