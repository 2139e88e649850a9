"""``--gpu-layers`` on the command line: the same text, numbers that say where weights are, and refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvs_cli.plan import plan as making
from kvs_core.engine.rates import Found
from kvs_core.formats.gguf import GgufFile
from tests.cli.conftest import GREEDY, Kvs
from tests.cli.test_plan import RATES
from tests.support.tiny_gguf import write_tiny_qwen3moe


def test_the_text_is_the_same(kvs: Kvs, tiny_llama: Path) -> None:
    """With all layers on the device, some, and none; what passes is told per step and in all."""
    command = ("run", "-m", tiny_llama, "-p", "word " * 20, "-n", "5", "--device", "cpu", "--json", *GREEDY)
    whole = kvs(*command).json
    size = sum(
        info.n_bytes for name, info in GgufFile.open(tiny_llama).tensors.items()
        if name.startswith("blk.") and len(info.shape) == 2
    ) // 4
    assert whole["weights"]["streamed_layers"] == []
    assert whole["weights_h2d_bytes"] == whole["weights"]["ring_bytes"] == 0
    for asked, streamed in (("1", [0, 1, 2, 3]), ("3", [1, 3]), ("4", []), ("all", []), ("0", [])):
        done = kvs(*command, "-ngl", asked)
        weights = done.json["weights"]
        assert done.json["token_ids"] == whole["token_ids"]
        assert (weights["layers"], weights["streamed_layers"]) == (4, streamed)
        assert done.json["weights_h2d_bytes"] == weights["streamed_bytes"] == len(streamed) * size
        assert weights["ring_bytes"] == (size if streamed else 0)
        assert bool(streamed) == (f"weights: {4 - len(streamed)} of 4 layers stay on the device" in done.err)
        passes = -(-done.json["prompt_tokens"] // 512) + 4
        assert passes * len(streamed) * size <= done.json["kv"]["h2d_bytes"] <= (passes * len(streamed) + 1) * size


def test_the_summary_tells(kvs: Kvs, tiny_llama: Path) -> None:
    """How many layers are where, and what a step moves."""
    done = kvs("run", "-m", tiny_llama, "-p", "x", "-n", "2", "--device", "cpu", "-ngl", "3", *GREEDY)
    assert "weights: 2 of 4 layers resident, 2 streamed, 0." in done.err


def test_drafts_by_the_model_itself_are_warned_of(kvs: Kvs, tiny_llama: Path) -> None:
    """Each of them takes the weights over the link too; the text is the same."""
    command = ("run", "-m", tiny_llama, "-p", "word " * 20, "-n", "6", "--device", "cpu", *GREEDY)
    plain = kvs(*command)
    drafted = kvs(*command, "-ngl", "1", "--spec-type", "draft-resident")
    assert (drafted.code, drafted.out) == (0, plain.out)
    assert "--spec-type draft-resident: each drafted token takes the" in drafted.err


def test_experts_pass_too(kvs: Kvs, tmp_path: Path) -> None:
    """All experts of a layer, with the same text; ``kvs info`` counts what a run moves."""
    path = write_tiny_qwen3moe(tmp_path / "moe.gguf", seed=1)
    size = sum(
        info.n_bytes for name, info in GgufFile.open(path).tensors.items()
        if name.startswith("blk.1.") and len(info.shape) > 1
    )
    command = ("run", "-m", path, "-p", "word " * 20, "-n", "5", "--device", "cpu", "--json", *GREEDY)
    whole, split = kvs(*command).json, kvs(*command, "-ngl", "3").json
    assert split["token_ids"] == whole["token_ids"]
    assert split["weights"]["streamed_layers"] == [1, 3]
    assert split["weights_h2d_bytes"] == 2 * split["weights"]["ring_bytes"] == 2 * size
    info = kvs("info", path, "--device", "cpu", "-ngl", "3", "--json").json["weights"]
    assert info == {key: split["weights"][key] for key in info}


def test_an_arena_without_room_for_the_ring(kvs: Kvs, tiny_llama: Path) -> None:
    """Is refused with the MiB that would do, and how many of them the ring takes. That all layers stay, for which there
    may be no memory, is no advice."""
    command = ("run", "-m", tiny_llama, "-p", "x", "--device", "cpu", "-ngl", "1", "--kv-stream-arena-mib", "1")
    error = kvs(*command, "-c", "512", "-ub", "64", "--kv-page-tokens", "32").error
    assert "--kv-stream-arena-mib is 1; raise it, or lower --ubatch-size to " in error
    assert re.search(r"; 1 of the \d+ MiB are for weights that pass through$", error)
    assert "; raise it; 1 of the " in kvs(*command).error   # 512 rows alone need more
    assert "--gpu-layers" not in error


def test_info_and_plan_know_what_streams(kvs: Kvs, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers and bytes that a run has; the link takes their time in every step, and their ring is in the arena."""
    monkeypatch.setattr(making, "find_rates", lambda *_: Found(replace(RATES, copy_s=0.0), kept=True))
    small = ("-c", "2048", "-ub", "64", "--kv-page-tokens", "32", "--device", "cpu", "--kv-stream-arena-mib", "2")
    done = kvs("run", "-m", tiny_llama, "-p", "x", "-n", "1", *small, "-ngl", "3", "--json").json["weights"]
    info = kvs("info", tiny_llama, *small, "-ngl", "3", "--json").json
    assert info["weights"] == {key: done[key] for key in info["weights"]}
    text = kvs("info", tiny_llama, *small, "-ngl", "3").out
    assert "weights  " in text
    assert "2 of 4 layers resident; 0." in text
    plain, plan = (kvs("plan", tiny_llama, *small, *flags, "--json").json for flags in ((), ("-ngl", "3")))
    memory = plan["memory"]
    assert (memory["streamed_layers"], memory["streamed_weights_bytes"], memory["weights_ring_bytes"]) == (
        done["streamed_layers"], done["streamed_bytes"], done["ring_bytes"]
    )
    assert plan["weights_h2d_bytes"] == done["streamed_bytes"]
    assert plain["weights_h2d_bytes"] == 0
    assert memory["arena_bytes"] == plain["memory"]["arena_bytes"] == 2 << 20
    assert memory["pool_pages"] < plain["memory"]["pool_pages"]
    assert memory["weights_bytes"] < plain["memory"]["weights_bytes"]
    assert memory["host_needed_bytes"] - memory["needed_bytes"] - memory["history_bytes"] == done["streamed_bytes"]
    streamed_ms = 1e3 * done["streamed_bytes"] / plan["device"]["link_bytes_per_s"]
    first, end = plan["points"][0], plan["points"][-1]
    assert first["streamed_pages"] == 0
    assert first["link_ms"] == pytest.approx(streamed_ms, rel=1e-6)
    pages_ms = 1e3 * end["streamed_bytes"] / plan["device"]["link_bytes_per_s"]
    assert end["link_ms"] == pytest.approx(streamed_ms + pages_ms, rel=1e-6)
    assert "weights that stream" in kvs("plan", tiny_llama, *small, "-ngl", "3").out
