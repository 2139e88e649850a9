"""Which models a checker of memory and races sees."""

from __future__ import annotations

import pytest

from benchmarks.gpu import tiny_steps
from kvs_core.formats.gguf import GgufFile


@pytest.mark.parametrize(
    ("named", "seen"),
    [
        ([], [("qwen35", 32), ("llama", 32), ("gemma4", 32), ("qwen35", 256)]),
        (["small"], [("qwen35", 256)]),
        (["gemma4", "llama"], [("gemma4", 32), ("llama", 32)]),
    ],
    ids=str,
)
def test_models_by_name(monkeypatch: pytest.MonkeyPatch, named: list[str], seen: list[tuple[str, int]]) -> None:
    """All without a name, else those named in that order; files are there while their steps run."""
    ran: list[tuple[str, int]] = []

    def steps(file: GgufFile, type_k: str, type_v: str, page_tokens: int) -> None:
        assert file.tensors
        ran.append((str(file.metadata["general.architecture"]), page_tokens))

    monkeypatch.setattr(tiny_steps, "steps", steps)
    tiny_steps.main(named)
    assert ran == seen


def test_a_model_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """It is a mistake of usage, and those that there are follow."""
    with pytest.raises(SystemExit) as ended:
        tiny_steps.main(["large"])
    assert ended.value.code == 2
    assert "no model large: choose from qwen35, llama, gemma4, small" in capsys.readouterr().err
