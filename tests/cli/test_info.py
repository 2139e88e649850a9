"""``kvs info``: what it says is what a run then does, and no weight is read for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvs_core.device.host.device import HostDevice
from kvs_core.engine.engine import Engine
from kvs_core.formats.gguf import GgufFile
from kvs_core.memory.phases import Phase
from kvs_core.settings import ContextSettings, KvSettings, RopeSettings
from tests.cli.conftest import GREEDY, Kvs
from tests.support.tiny_gguf import Experts, write_tiny_qwen3moe, write_tiny_qwen35, write_tiny_qwen35moe

SMALL = ("-c", "2048", "--kv-page-tokens", "32", "-ub", "64", "-ctk", "q8_0", "-ctv", "q4_0")


def info(kvs: Kvs, path: Path, *flags: str) -> dict[str, Any]:
    return kvs("info", path, *flags, "--json").json


def test_facts_of_a_model(kvs: Kvs, tiny_qwen35: Path) -> None:
    """Sizes, layers by kind, tokens by role and bytes by type are those of the file."""
    facts = info(kvs, tiny_qwen35, *SMALL)
    file = GgufFile.open(tiny_qwen35)
    model = facts["model"]
    assert (model["arch"], model["n_layer"], model["n_ctx_train"], model["n_vocab"]) == ("qwen35", 8, 32768, 381)
    assert model["file_bytes"] == tiny_qwen35.stat().st_size
    assert model["quants"] == [{"type": "F32", "tensors": len(file.tensors),
                                "bytes": sum(info.n_bytes for info in file.tensors.values())}]
    assert [(group["kind"], group["indices"]) for group in facts["layers"]] == [
        ("recurrent", [0, 1, 2, 4, 5, 6]), ("full", [3, 7]), ("mtp", [8])]
    assert facts["tokenizer"]["eos"] == {"id": 378, "text": "<|im_end|>"}
    assert {token["text"] for token in facts["tokenizer"]["eog"]} == {"<|endoftext|>", "<|im_end|>"}
    # 2 layers of 2 KV heads of 64: K in q8_0 (34 bytes per 32 values), V in q4_0 (18)
    assert facts["kv"]["token_bytes"] == 2 * 2 * 2 * (34 + 18)
    assert facts["kv"]["page_bytes"] == 32 * 2 * 2 * (34 + 18)


def test_experts_are_told(kvs: Kvs, tmp_path: Path, tiny_qwen35: Path) -> None:
    """How many there are and a row takes, and how wide they are; a dense model has none."""
    assert info(kvs, tiny_qwen35, *SMALL)["model"]["experts"] is None
    hybrid = write_tiny_qwen35moe(tmp_path / "hybrid.gguf", seed=1)
    model = info(kvs, hybrid, *SMALL)["model"]
    assert (model["experts"], model["n_ff"]) == ({"count": 5, "used": 2, "n_ff": 32, "n_shared": 32}, 0)
    assert "embedding 64, 2 of 5 experts of 32 and one of 32 for all, vocabulary" in kvs("info", hybrid, *SMALL).out
    routed = write_tiny_qwen3moe(tmp_path / "routed.gguf", seed=1, experts=Experts(count=7, used=3, ffn=64))
    assert "embedding 64, 3 of 7 experts of 64, vocabulary" in kvs("info", routed, *SMALL).out


@pytest.mark.parametrize("flags", [(), ("--kv-stream-arena-mib", "1"), ("--kv-stream-pool-mib", "1"),
                                   ("--kv-residency-mode", "resident")], ids=lambda flags: " ".join(flags))
@pytest.mark.parametrize("arch", ["tiny_gemma3", "tiny_gemma4", "tiny_llama", "tiny_qwen35"])
def test_the_plan_is_what_the_engine_does(
    kvs: Kvs, request: pytest.FixtureRequest, arch: str, flags: tuple[str, ...]
) -> None:
    """Arena, workspaces, pools and recurrent state, known from the file alone, are those of an engine."""
    path = request.getfixturevalue(arch)
    facts = info(kvs, path, *SMALL, *flags)
    plan = facts["plan"]
    names = {"--kv-stream-arena-mib": "arena_mib", "--kv-stream-pool-mib": "pool_mib",
             "--kv-residency-mode": "residency_mode"}
    chosen = {names[flag]: int(value) if value.isdigit() else value
              for flag, value in zip(flags[::2], flags[1::2], strict=True)}
    kv = KvSettings("q8_0", "q4_0", 32, **chosen)  # type: ignore[arg-type]
    engine = Engine(GgufFile.open(path), HostDevice(1), context=ContextSettings(ctx_size=2048, ubatch=64), kv=kv,
                    rope=RopeSettings())
    try:
        memory = engine.memory
        assert plan["arena_bytes"] == memory.arena_bytes
        assert {name: phase["pool_slots"] for name, phase in plan["phases"].items()} == {
            phase.value: memory.slots(phase) for phase in Phase}
        assert {name: phase["workspace_bytes"] for name, phase in plan["phases"].items()} == {
            phase.value: sum(region.size_bytes for region in memory.request(phase).workspace) for phase in Phase}
        assert facts["kv"]["state_bytes"] == engine.memory_report()["state"]
    finally:
        engine.close()


def test_streaming_at_full_context_is_as_foretold(kvs: Kvs, tiny_llama: Path) -> None:
    """A run that fills the context streams as many pages, through as large a ring, as the plan says."""
    flags = (*SMALL, "--kv-stream-arena-mib", "1", "--kv-stream-ring-slots", "8")
    plan = info(kvs, tiny_llama, *flags)["plan"]
    kv = kvs("run", "-m", tiny_llama, "-p", "word " * 650, "--ignore-eos", *GREEDY, *flags, "--json").json["kv"]
    assert kv["active_pages"] == plan["pages"]
    assert kv["history_bytes"] == plan["history_bytes"]
    assert plan["streamed_pages_per_step"] > 0
    assert kv["streamed_pages_per_step"] == plan["streamed_pages_per_step"]
    assert kv["ring_slots"] == plan["ring_slots"]
    assert [(layer["index"], layer["kind"], layer["kv_token_bytes"]) for layer in plan["layers"]] == [
        (index, "full", 2 * (68 + 36)) for index in range(4)]   # 2 KV heads of 64: q8_0 and q4_0
    assert {layer["resident_pages"] + layer["streamed_pages"] for layer in plan["layers"]} == {plan["pages"] // 4}
    assert sum(layer["streamed_pages"] for layer in plan["layers"]) == plan["streamed_pages_per_step"]


def test_the_least_arena_and_the_full_one(kvs: Kvs, tiny_llama: Path) -> None:
    """The least arena is accepted and one MiB less is not; the full one holds every page in both phases, no less does.
    """
    flags = ("-c", "8192", "-ub", "256")
    plan = info(kvs, tiny_llama, *flags)["plan"]
    least, full = plan["least_arena_mib"], plan["full_arena_mib"]
    assert 1 < least < full
    for arena, all_fit in ((least, False), (full - 1, False), (full, True)):
        there = info(kvs, tiny_llama, *flags, "--kv-stream-arena-mib", str(arena))["plan"]
        assert all(phase["pool_slots"] >= plan["pages"] for phase in there["phases"].values()) == all_fit
        assert (there["least_arena_mib"], there["full_arena_mib"]) == (least, full)
    assert there["streamed_pages_per_step"] == 0
    error = kvs("info", tiny_llama, *flags, "--kv-stream-arena-mib", str(least - 1)).error
    assert f"needs {least} MiB" in error


def test_fit_holds_an_arena_to_free_memory(kvs: Kvs, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With little memory free an arena that is not given is smaller than the context; with ``--fit off`` it is not."""
    monkeypatch.setattr("kvs_cli.commands.info.available_ram_bytes", lambda: 0)
    plans = {fit: info(kvs, tiny_llama, "-c", "8192", "-ub", "256", "--fit", fit)["plan"] for fit in ("on", "off")}
    assert plans["on"]["arena_bytes"] == plans["on"]["least_arena_mib"] << 20
    assert plans["off"]["arena_bytes"] == plans["off"]["full_arena_mib"] << 20
    assert plans["on"]["streamed_pages_per_step"] > plans["off"]["streamed_pages_per_step"] == 0
    given = info(kvs, tiny_llama, "-c", "8192", "-ub", "256", "--fit", "off", "--kv-stream-arena-mib", "50")["plan"]
    assert given["arena_bytes"] == 50 << 20


def test_a_model_without_attention_is_refused(kvs: Kvs, tmp_path: Path) -> None:
    """Layers that are all recurrent keep no KV; the line says that, and not that shapes differ."""
    path = write_tiny_qwen35(tmp_path / "recurrent.gguf", seed=1, mtp=False, n_layer=3)
    error = kvs("info", path).error
    assert "no attention layer" in error


def test_no_weights_are_read(kvs: Kvs, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of any size is described at once: its tensors' bytes are not touched and no device is opened."""
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("kvs_core.formats.quants.dequantize_rows", refuse)
    monkeypatch.setattr("kvs_core.device.host.weights.dequantize_rows", refuse)
    monkeypatch.setattr("kvs_core.device.host.device.HostDevice.__init__", refuse)
    assert info(kvs, tiny_llama)["model"]["arch"] == "llama"


def test_text_for_people(kvs: Kvs, tiny_qwen35: Path) -> None:
    """Sections with aligned lines, in plain text where stdout is no terminal; nothing on stderr."""
    done = kvs("info", tiny_qwen35, *SMALL, "--kv-stream-arena-mib", "1")
    assert (done.code, done.err) == (0, "")
    for words in ("  0-6 (6)          recurrent, a state of fixed size and no KV\n", "  3-7 (2)          full, 208 ",
                  "Model\n  name ", "6 recurrent ", "2 full ", "1 mtp ", "<|im_end|> (378)", "K q8_0, V q4_0",
                  "arena            1.0 MiB; least ", "then streamed "):
        assert words in done.out
    assert "\x1b" not in done.out


def test_layers_that_see_a_window_are_told_apart(kvs: Kvs, tiny_gemma3: Path) -> None:
    """Their tokens, and that they stream nothing, as data and as text."""
    facts = info(kvs, tiny_gemma3, *SMALL, "--kv-stream-arena-mib", "1")
    assert [(group["kind"], group["indices"], group["window"]) for group in facts["layers"]] == [
        ("full", [0, 2], 80), ("full", [1, 3], None)]
    planned = facts["plan"]["layers"]
    assert [layer["window"] for layer in planned] == [80, None, 80, None]
    assert [layer["streamed_pages"] > 0 for layer in planned] == [False, True, False, True]
    assert [layer["resident_pages"] for layer in planned[::2]] == [4, 4]   # 80 tokens lie in up to 4 pages of 32
    out = kvs("info", "-m", tiny_gemma3, *SMALL, "--kv-stream-arena-mib", "1").out
    for words in ("  2 last 80 tokens  4 query heads on 2 KV heads, heads of 64\n", "  2 full ",
                  "last 80 tokens, 208 bytes of KV per token; 4 pages resident, 0 streamed\n"):
        assert words in out, out


def test_two_shapes_of_pages_and_who_reads_whose(kvs: Kvs, tiny_gemma4: Path) -> None:
    """Bytes of both, the slots of both pools, and the layer whose keys and values another one reads."""
    facts = info(kvs, tiny_gemma4, *SMALL, "-c", "16384", "--kv-stream-arena-mib", "2")
    kv, plan = facts["kv"], facts["plan"]
    sliding, full = 4 * (68 + 36), 136 + 72   # q8_0 and q4_0: 34 and 18 bytes per 32 values
    assert (kv["page_bytes"], kv["sliding_page_bytes"]) == (32 * full, 32 * sliding)
    assert (kv["layers"], kv["token_bytes"]) == (3, 2 * sliding + full)
    assert [layer["reads_layer"] for layer in plan["layers"]] == [None, None, None, 1, 2]
    assert [layer["kv_token_bytes"] for layer in plan["layers"]] == [sliding, sliding, full, 0, 0]
    # Of layers that slide what a step of 64 sees and the one before it saw, 11 pages, and a group ahead of need.
    assert plan["pages"] == 512 + 2 * 16
    assert plan["history_bytes"] == 512 * 32 * full + 16 * 32 * 2 * sliding
    assert plan["history_checkpoint_bytes"] == 8 * 32 * 2 * sliding   # 80 tokens lie in 4 pages, of one group or two
    whole = info(kvs, tiny_gemma4, *SMALL, "-c", "16384", "--kv-stream-arena-mib", "2", "--swa-full")["plan"]
    assert (whole["pages"], whole["history_bytes"]) == (3 * 512, 512 * 32 * kv["token_bytes"])
    assert whole["history_checkpoint_bytes"] == 0
    assert plan["phases"]["prefill"]["sliding_pool_slots"] == plan["phases"]["decode"]["sliding_pool_slots"] > 0
    streamed = plan["layers"][2]["streamed_pages"]
    assert plan["streamed_pages_per_step"] == 2 * streamed > 0   # both layers that read them
    assert plan["streamed_bytes_per_step"] == 2 * streamed * kv["page_bytes"]
    out = kvs("info", "-m", tiny_gemma4, *SMALL, "-c", "16384", "--kv-stream-arena-mib", "2").out
    for words in ("6,656 bytes, or 13,312 bytes where it sees a window\n", " of layers that see a window\n",
                  "544 pages, 3.7 MiB of history in host memory, and up to 0.3 MiB for each checkpoint\n",
                  "last 80 tokens, reads the KV of layer 1\n", "full, reads the KV of layer 2\n"):
        assert words in out, out


def test_names_in_a_file_cannot_act_on_the_terminal(kvs: Kvs, tiny_llama: Path) -> None:
    """Control characters of metadata are not printed."""
    done = kvs("info", tiny_llama, "--override-kv", "general.name=str:bad\x1b[2Jname")
    assert done.code == 0
    assert "bad\ufffd[2Jname" in done.out


def test_sampling_defaults_say_where_they_come_from(kvs: Kvs, tiny_llama: Path) -> None:
    """Values that the model file sets are marked."""
    facts = info(kvs, tiny_llama, "--override-kv", "general.sampling.temp=float:0.25,general.sampling.mirostat=int:2")
    assert facts["sampling"]["from_model"] == ["temperature", "mirostat"]
    assert (facts["sampling"]["temperature"], facts["sampling"]["mirostat"]) == (0.25, 2)


def test_a_context_beyond_the_training_is_capped_with_a_notice(kvs: Kvs, tiny_llama: Path) -> None:
    """As for a run."""
    done = kvs("info", tiny_llama, "-c", "262144", "--json")
    assert done.json["plan"]["context_tokens"] == 32768
    assert "--ctx-size 262144: the model was trained for 32768 tokens" in done.err


def test_a_real_model(kvs: Kvs, smollm2_path: Path) -> None:
    """SmolLM2: 30 layers of 3 KV heads of 64."""
    facts = info(kvs, smollm2_path, "-ctk", "q8_0", "-ctv", "q8_0")
    assert facts["model"]["n_params"] == 134515008
    assert [quant["type"] for quant in facts["model"]["quants"]] == ["Q4_1", "Q8_0", "F32"]
    assert facts["kv"]["token_bytes"] == 30 * 3 * (68 + 68)  # q8_0: 34 bytes per 32 values
    assert [token["id"] for token in facts["tokenizer"]["eog"]] == [0, 2, 4]
