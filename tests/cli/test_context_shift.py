"""``--context-shift`` on the command line: texts longer than the context, and what is said where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvs_core.engine.engine import Engine
from tests.cli.conftest import GREEDY, Kvs, tokenizer_of
from tests.support.tiny_gguf import write_tiny_llama

PROMPT = "The harbour at night is full of lights. "


def test_a_text_goes_on_beyond_the_context(kvs: Kvs, tmp_path: Path) -> None:
    """Three contexts of it, the same streamed, and JSON that tells how many tokens were forgotten; without the flag it
    ends where the context does."""
    model = write_tiny_llama(
        tmp_path / "llama.gguf", seed=2, n_layer=2, kv_heads=4, head_dim=128, pre="llama-bpe"   # of large pages
    )
    common = ("run", "-m", model, "-p", PROMPT, "-c", 256, "-n", 768, *GREEDY, "--ignore-eos", "--json", "-ctk", "f32",
              "--kv-page-tokens", 32, "-ub", 32)
    shifted = kvs(*common, "--context-shift", "--keep", 5)
    result, tokens = shifted.json, len(tokenizer_of(model).encode(PROMPT))
    assert (result["stop_reason"], result["generated_tokens"]) == ("length", 768)
    bos = int(tokenizer_of(model).add_bos)
    discard = (255 - 5 - bos) // 2
    assert result["dropped_tokens"] == discard * -(-(tokens + 768 - 256) // discard)
    assert f"context shift: {result['dropped_tokens']} tokens forgotten" in shifted.err
    streamed = kvs(*common, "--context-shift", "--keep", 5, "--kv-stream-pool-mib", 1).json
    assert streamed["kv"]["streamed_pages_per_step"] > 0
    assert streamed["token_ids"] == result["token_ids"]
    ended = kvs(*common, "--no-context-shift").json
    assert (ended["stop_reason"], ended["dropped_tokens"]) == ("context", 0)
    assert ended["token_ids"] == result["token_ids"][: 256 - tokens]


def test_a_session_goes_on_behind_a_shift(kvs: Kvs, tiny_llama: Path, tmp_path: Path) -> None:
    """In two runs as in one: the file holds what is left of the text."""
    file = tmp_path / "talk.kvs"
    common = ("run", "-m", tiny_llama, "-c", 256, *GREEDY, "--ignore-eos", "--context-shift", "--keep", 3)
    first = kvs(*common, "-p", PROMPT, "-n", 300, "--session", file)
    second = kvs(*common, "-p", "", "-n", 200, "--session", file)
    assert first.out + second.out == kvs(*common, "-p", PROMPT, "-n", 500).out


def test_a_session_that_filled_its_context_goes_on(kvs: Kvs, tiny_llama: Path, tmp_path: Path) -> None:
    """With the flag there is room at once, as in a run that had it from the beginning, and again later; without, the
    error says that there is none."""
    file = tmp_path / "talk.kvs"
    common = ("run", "-m", tiny_llama, "-c", 256, *GREEDY, "--ignore-eos")
    first = kvs(*common, "-p", PROMPT, "--session", file, "--json").json
    assert first["stop_reason"] == "context"
    full = kvs(*common, "-p", "", "--session", file).error
    assert full == ("the session has 256 tokens, the context holds 256 and must leave room for one more; raise "
                    "--ctx-size or use --context-shift")
    shifted = (*common, "--context-shift", "--keep", 3)
    whole = kvs(*shifted, "-p", PROMPT, "-n", first["generated_tokens"] + 190, "--json").json
    made = list(first["token_ids"])
    for count in (40, 150):
        more = kvs(*shifted, "-p", "", "-n", count, "--session", file, "--json").json
        assert more["generated_tokens"] == count
        made += more["token_ids"]
    assert made == whole["token_ids"]


def test_a_shift_that_is_interrupted_leaves_the_session_file(
    kvs: Kvs, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are lost, so the file of the run before stays, and the next run goes on from there."""
    file = tmp_path / "talk.kvs"
    common = ("run", "-m", tiny_llama, "-c", 256, *GREEDY, "--ignore-eos", "--context-shift", "--keep", 3)
    kvs(*common, "-p", PROMPT, "-n", 100, "--session", file)
    before = file.read_bytes()

    def interrupted(engine: Engine, keep: int, discard: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "shift", interrupted)
        ended = kvs(*common, "-p", "", "-n", 300, "--session", file)
    assert ended.code == 130
    assert f"its rows are lost; {file} is as it was" in ended.err
    assert file.read_bytes() == before
    assert kvs(*common, "-p", "", "-n", 20, "--session", file).code == 0


def test_a_full_session_of_a_recurrent_model_is_told_what_works(kvs: Kvs, tiny_qwen35: Path, tmp_path: Path) -> None:
    """Not --context-shift, which it refuses."""
    common = ("run", "-m", tiny_qwen35, "-c", 256, *GREEDY, "--ignore-eos", "--session", tmp_path / "talk.kvs")
    assert kvs(*common, "-p", PROMPT, "--json").json["stop_reason"] == "context"
    full = kvs(*common, "-p", "").error
    assert full == ("the session has 256 tokens, the context holds 256 and must leave room for one more; raise "
                    "--ctx-size or begin a new --session")


def test_recurrent_models_are_refused_at_start(kvs: Kvs, tiny_qwen35: Path) -> None:
    """In one line, with the reason and what to do."""
    error = kvs("run", "-m", tiny_qwen35, "-p", PROMPT, "--context-shift").error
    assert "--context-shift: tiny qwen35 has 6 recurrent layers, whose state cannot forget" in error
    assert "larger --ctx-size" in error


def test_a_keep_that_leaves_no_room_is_refused(kvs: Kvs, tiny_llama: Path, tmp_path: Path) -> None:
    """With both numbers, before the weights are read; the largest that does runs, and so does any where nothing shifts.
    -1 is cut down to what there is room for, of a session too."""
    common = ("run", "-m", tiny_llama, "-c", 256, *GREEDY, "--ignore-eos", "-n", 250)
    said = kvs(*common, "-p", PROMPT, "--context-shift", "--keep", 700)
    assert said.error == ("--keep 700 leaves --context-shift no room in a context of 256 tokens; keep at most 251, or "
                          "raise --ctx-size")   # 4 tokens are not kept, and the BOS is beside them
    assert "loading weights" not in said.err
    assert kvs(*common, "-p", PROMPT, "--context-shift", "--keep", 252).code == 1
    assert kvs(*common, "-p", PROMPT, "--context-shift", "--keep", 251).code == 0
    assert kvs(*common, "-p", PROMPT, "--keep", 700).code == 0
    words = "x" * 252
    tokens = len(tokenizer_of(tiny_llama).encode(words))
    assert 251 < tokens < 256
    shifted = ("--context-shift", "--json", "-p")
    whole = kvs(*common, *shifted, words, "--keep", -1).json
    assert whole["dropped_tokens"] > 0
    assert whole["token_ids"] == kvs(*common, *shifted, words, "--keep", 251).json["token_ids"]
    for keep in (-1, 251):
        assert kvs(*common, "-p", PROMPT, "--session", tmp_path / f"{keep}.kvs").code == 0
    made = [kvs(*common, *shifted, "", "--session", tmp_path / f"{keep}.kvs", "--keep", keep) for keep in (-1, 251)]
    assert made[0].json["token_ids"] == made[1].json["token_ids"]
    assert made[0].json["generated_tokens"] == 250


def test_keep_alone_is_named(kvs: Kvs, tiny_llama: Path) -> None:
    """It does nothing without a shift, and a line says so."""
    said = kvs("run", "-m", tiny_llama, "-p", "x", "-n", "1", "--keep", "4").err
    assert "--keep" in said
    assert "no effect without --context-shift" in said
