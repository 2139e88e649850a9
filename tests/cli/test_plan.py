"""``kvs plan``: what it says of memory is what an engine takes, and errors come before any weight is read."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvs_cli.plan import plan as making
from kvs_cli.plan import plot
from kvs_cli.plan.text import digits3
from kvs_core.demo import DEMO_MODEL
from kvs_core.device.host.device import HostDevice
from kvs_core.engine.budget import Drafting
from kvs_core.engine.engine import Engine
from kvs_core.engine.forecast import Rates
from kvs_core.engine.rates import Found
from kvs_core.errors import BudgetError
from kvs_core.formats.gguf import GgufFile
from kvs_core.memory.phases import Phase
from kvs_core.settings import ContextSettings, KvSettings, RopeSettings
from kvs_core.units import MIB, mib_ceil
from tests.cli.conftest import Kvs

SMALL = ("--device", "cpu", "-c", "2048", "--kv-page-tokens", "32", "-ub", "64", "-ctk", "q8_0", "-ctv", "q4_0")

RATES = Rates(
    link_bytes_per_s=1e8, weight_bytes_per_s={"": 1e9}, row_costs={"": (1.0, 1.5)}, attention_bytes_per_s=1e8,
    attention_row=0.5, layer_s=1e-4, least_attention_s=0.0, run_s=0.0, run_rows_s=0.0, copy_s=1e-5,
    round_s=1e-4, plan_s=0.0, draft_s=1e-4,
)


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test but one waits for a measurement, and none writes to the user's cache."""
    monkeypatch.setattr(making, "find_rates", lambda *_: Found(RATES, kept=True))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Say how many MiB the host device has free."""
    def say(mib: int) -> None:
        monkeypatch.setattr(HostDevice, "free_bytes", lambda self: mib * MIB)

    return say


def plan(kvs: Kvs, path: Path, *flags: str) -> dict[str, Any]:
    return kvs("plan", path, *SMALL, *flags, "--json").json


@pytest.mark.parametrize(("arch", "drafts"), [("tiny_llama", False), ("tiny_qwen35", False), ("tiny_qwen35", True)])
def test_memory_is_what_the_engine_takes(
    kvs: Kvs, request: pytest.FixtureRequest, arch: str, drafts: bool
) -> None:
    """Arena, pool, workspaces and state (the MTP block's too) are those of an engine with the same settings."""
    path = request.getfixturevalue(arch)
    facts = plan(kvs, path, "--kv-stream-arena-mib", "1", *(("--spec-type", "draft-mtp") if drafts else ()))
    memory = facts["memory"]
    engine = Engine(
        GgufFile.open(path), HostDevice(1), context=ContextSettings(ctx_size=2048, ubatch=64),
        kv=KvSettings("q8_0", "q4_0", 32, arena_mib=1), rope=RopeSettings(), drafting=Drafting(nextn=drafts),
    )
    try:
        assert memory["arena_bytes"] == engine.memory.arena_bytes == MIB
        assert memory["pool_pages"] == engine.memory.slots(Phase.DECODE)
        assert memory["state_bytes"] == engine.memory_report()["state"]
    finally:
        engine.close()
    assert memory["needed_bytes"] == memory["arena_bytes"] + memory["state_bytes"] + memory["weights_bytes"]
    assert memory["needed_bytes"] <= facts["device"]["free_bytes"]


def test_the_cache_of_float32_is_told(
    kvs: Kvs, free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU makes float32 of quantised matrices and keeps what a share of the free RAM holds: a line of its own says
    how much of the weights that is and why the answer changes with what is free. A GPU holds them as they are."""
    whole = kvs("plan", *SMALL, "--json").json["memory"]
    engine = Engine(
        GgufFile.open(DEMO_MODEL), device := HostDevice(1), context=ContextSettings(ctx_size=2048, ubatch=64),
        kv=KvSettings("q8_0", "q4_0", 32), rope=RopeSettings(),
    )
    try:
        assert whole["float32_cache_bytes"] == device._weights.held_bytes > 40 * MIB
    finally:
        engine.close()
    assert whole["float32_cache_bytes"] < whole["weights_bytes"]
    assert whole["float32_uncached_bytes"] == 0
    free(60)
    part = kvs("plan", *SMALL, "--json").json["memory"]
    cached, limit, left = (part[f"float32_{name}"] for name in ("cache_bytes", "cache_limit_bytes", "uncached_bytes"))
    assert limit == 36 * MIB
    assert limit - 4 * MIB < cached <= limit
    assert cached + left == whole["float32_cache_bytes"]
    assert part["weights_bytes"] == whole["weights_bytes"] - left
    told = f"{cached / MIB:.1f} MiB made of quantised matrices and kept, at most 60 % of what is free now, 36.0 MiB; "
    assert f"of it float32    {told}{left / MIB:.1f} MiB more are made anew at every use\n" in kvs("plan", *SMALL).out
    error = kvs("plan", *SMALL, "--kv-stream-arena-mib", "30").error
    assert f"MiB ({mib_ceil(cached)} of them a cache of float32), recurrent state of " in error
    monkeypatch.setattr(HostDevice, "is_host", False)
    memory = kvs("plan", *SMALL, "--json").json["memory"]
    assert (memory["float32_cache_bytes"], memory["float32_cache_limit_bytes"]) == (0, None)
    assert "of it float32" not in kvs("plan", *SMALL).out


def test_over_the_context(kvs: Kvs, tiny_llama: Path) -> None:
    """Halves of the context up to its end; all pages have a place; times add up and give the tokens per second."""
    facts = plan(kvs, tiny_llama, "--kv-stream-arena-mib", "1")
    points = facts["points"]
    assert [point["tokens"] for point in points] == [127, 255, 511, 1023, 2047]
    for point in points:
        pages = 4 * -(-(point["tokens"] + 1) // 32)
        assert point["resident_pages"] + point["streamed_pages"] == pages
        assert point["streamed_bytes"] == point["streamed_pages"] * facts["kv"]["page_bytes"]
        assert point["step_ms"] >= max(point["kernels_ms"], point["link_ms"])
        assert point["round_ms"] == pytest.approx(point["step_ms"] + point["drafts_ms"] + 0.1)
        assert point["host_ms"] == pytest.approx(0.1)
        assert point["tokens_per_s"] == pytest.approx(1e3 / point["round_ms"])
    assert (facts["device"]["host_round_ms"], facts["device"]["host_draft_ms"]) == pytest.approx((0.1, 0.1))
    assert points[0]["streamed_pages"] == 0 < points[-1]["streamed_pages"]
    rounds = [point["round_ms"] for point in points]
    assert rounds == sorted(rounds)


@pytest.mark.parametrize("command", ["plan", "info"])
def test_no_arena_makes_window_mode_resident(kvs: Kvs, tiny_llama: Path, command: str) -> None:
    """Its windows are fixed, so the arena from which a larger one gives nothing is not said to hold all pages, and
    where there is that much no other is advised."""
    flags = ("-c", "4096", "--kv-page-tokens", "32", "-ub", "64", "--kv-residency-mode", "window",
             "--kv-window-tokens", "256")
    facts = kvs(command, tiny_llama, *flags, "--json").json
    full = facts["memory" if command == "plan" else "plan"]["full_arena_mib"]
    told = kvs(command, tiny_llama, *flags, "--kv-stream-arena-mib", full + 1).out
    assert f"MiB, the largest ring from {full} MiB" in told
    assert "all pages resident" not in told
    assert "arena of" not in told


def test_what_else_there_is(kvs: Kvs, tiny_llama: Path) -> None:
    """One more GiB, no more than holds everything, and the other KV types; what does not fit says so."""
    facts = plan(kvs, tiny_llama, "--kv-stream-arena-mib", "1")
    others = {other["name"]: other for other in facts["alternatives"]}
    full = facts["memory"]["full_arena_mib"]
    assert set(others) == {f"arena of {full} MiB", "K f16, V f16", "K q8_0, V q8_0", "K q4_0, V q4_0"}
    end = facts["points"][-1]
    assert others[f"arena of {full} MiB"]["end"]["streamed_pages"] == 0
    assert others[f"arena of {full} MiB"]["end"]["tokens_per_s"] > end["tokens_per_s"]
    assert others["K q4_0, V q4_0"]["end"]["streamed_bytes"] < end["streamed_bytes"]
    assert others["K f16, V f16"]["end"]["streamed_bytes"] > end["streamed_bytes"]
    large = (*SMALL, "-c", "16384", "--kv-page-tokens", "256", "-ub", "256")
    least = kvs("plan", tiny_llama, *large, "--json").json["memory"]["least_arena_mib"]
    tight = kvs("plan", tiny_llama, *large, "--kv-stream-arena-mib", least, "--json").json["alternatives"]
    assert next((other["name"], other["end"]) for other in tight if not other["fits"]) == ("K f16, V f16", None)
    assert "does not fit" in kvs("plan", tiny_llama, *large, "--kv-stream-arena-mib", least).out


@pytest.mark.parametrize(("flags", "tokens"), [
    ((), None), (("--spec-synth-len", "2.5"), 2.5), (("--spec-synth-rates", "0.9,0.5,0.25"), 2.65)])
def test_drafts(kvs: Kvs, tiny_qwen35: Path, flags: tuple[str, ...], tokens: float | None) -> None:
    """A round of MTP drafts, and what it brings where that is supposed; else the text gives a range."""
    drafting = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3", *flags)
    facts = plan(kvs, tiny_qwen35, *drafting)
    assert facts["speculation"] == {
        "type": "draft-mtp", "drafts": 3, "tokens_per_round": tokens if tokens is None else pytest.approx(tokens),
        "synthetic": tokens is not None}
    point = facts["points"][-1]
    assert point["drafts_ms"] > 0
    if tokens is None:
        assert point["tokens_per_s"] is None
        text = kvs("plan", tiny_qwen35, *SMALL, *drafting).out
        assert f"{digits3(point['rounds_per_s'])} to {digits3(4 * point['rounds_per_s'])}" in text
    else:
        assert point["tokens_per_s"] == pytest.approx(tokens * point["rounds_per_s"])


@pytest.mark.parametrize(("value", "text"), [
    (0.012345, "0.0123"), (1.0, "1.00"), (9.996, "10.0"), (12.345, "12.3"), (99.96, "100"), (123.4, "123"),
    (12345.6, "12,300")])
def test_three_significant_digits(value: float, text: str) -> None:
    """Whatever the size; what rounds up to the next power of ten has no fourth."""
    assert digits3(value) == text


@pytest.mark.parametrize("factor", [1.0, 1e-4, 1e3])
def test_tokens_per_second_have_three_digits(
    kvs: Kvs, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """Of slow devices as of fast ones; in JSON all digits stay."""
    rates = replace(RATES, attention_bytes_per_s=1e8 * factor, weight_bytes_per_s={"": 1e9 * factor},
                    link_bytes_per_s=1e8 * factor, layer_s=1e-4 / factor)
    monkeypatch.setattr(making, "find_rates", lambda *_: Found(rates, kept=True))
    speed = plan(kvs, tiny_llama)["points"][-1]["tokens_per_s"]
    line = next(line for line in kvs("plan", tiny_llama, *SMALL).out.splitlines() if "2,047  " in line)
    assert line.split()[-1] == digits3(speed)
    assert float(digits3(speed).replace(",", "")) != speed


def test_measured_anew(kvs: Kvs, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--measure`` drops what was kept, once and before any rate is asked for; not of a model that does not fit."""
    done: list[str] = []
    monkeypatch.setattr(making, "forget_rates", lambda device: done.append(device.name))
    monkeypatch.setattr(making, "find_rates", lambda *_: done.append("rates") or Found(RATES, kept=False))
    assert "measured now" in kvs("plan", tiny_llama, *SMALL).out
    assert "cpu" not in done
    done.clear()
    assert kvs("plan", tiny_llama, *SMALL, "--measure").code == 0
    assert (done[0], done.count("cpu")) == ("cpu", 1)
    done.clear()
    monkeypatch.setattr(HostDevice, "free_bytes", lambda self: MIB)
    assert "does not fit" in kvs("plan", tiny_llama, *SMALL, "--measure").error
    assert done == []


def test_text_for_people(kvs: Kvs, tiny_qwen35: Path) -> None:
    """Sections and two tables, whole lines in plain text; forecasts of the CPU say how good they are."""
    done = kvs("plan", tiny_qwen35, *SMALL, "--kv-stream-arena-mib", "1", "-ub", "128", "--spec-type", "ngram-mod")
    assert done.code == 0
    for words in ("Plan\n  model", "within a factor of two", "it fits", "arena", "Over the context", "2,047",
                  "At 2,047 tokens instead", "K q4_0, V q4_0", "tokens/s", "not foretold"):
        assert words in done.out
    assert "\x1b" not in done.out
    assert "\u2026" not in done.out


def test_the_demo_model_and_a_synthetic_one(kvs: Kvs) -> None:
    """No model is the demo; a synthetic name is a model, and the forecast says so."""
    assert kvs("plan", "--device", "cpu", "--json").json["synthetic"] is False
    assert kvs("plan", "synthetic:tiny:q8_0", "--device", "cpu", "--json").json["synthetic"] is True


def test_no_weights_are_read(kvs: Kvs, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forecast comes from the file's table alone."""
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("kvs_core.formats.quants.dequantize_rows", refuse)
    monkeypatch.setattr("kvs_core.device.host.weights.dequantize_rows", refuse)
    assert plan(kvs, tiny_llama)["points"]


def test_what_does_not_fit(kvs: Kvs, tiny_llama: Path, free: Callable[[int], None]) -> None:
    """The numbers of each part, of the sum and of what is free; and of an arena that is too small."""
    free(10)
    error = kvs("plan", tiny_llama, *SMALL, "--kv-stream-arena-mib", "40").error
    assert "an arena of 40 MiB need" in error
    assert "cpu has 10 MiB free" in error
    error = kvs("plan", tiny_llama, *SMALL, "-c", "8192", "-ub", "256", "--kv-stream-arena-mib", "1").error
    assert "arena too small: prefill needs" in error
    assert "--kv-stream-arena-mib is 1" in error


def test_advice_that_helps_no_more_is_not_given(kvs: Kvs, tiny_llama: Path) -> None:
    """Smaller pages are advised where they are enough, by a number that is, and not where they are the smallest."""
    tight = ("-c", "8192", "-ub", "256", "--kv-stream-pool-mib", "1")
    error = kvs("plan", tiny_llama, *SMALL, *tight, "--kv-page-tokens", "256").error
    assert error.endswith("--kv-stream-pool-mib is 1; raise it, or lower --kv-page-tokens to 128")
    assert plan(kvs, tiny_llama, *tight, "--kv-page-tokens", "128")["memory"]["fits"]
    error = kvs("plan", tiny_llama, *SMALL, "-c", "32768", "-ub", "512", "--kv-stream-arena-mib", "1").error
    assert error.endswith("--kv-stream-arena-mib is 1; raise it, or lower --ubatch-size to 128")


def test_the_history_counts_where_the_weights_are(kvs: Kvs, tiny_llama: Path, free: Callable[[int], None]) -> None:
    """On the CPU weights, arena and history share one memory. With room for all of them it fits; a MiB less, and it is
    the history that does not, by that MiB; with less than the others need, it is they."""
    flags = ("-c", "16384", "--kv-stream-arena-mib", "3")
    facts = plan(kvs, tiny_llama, *flags)
    needed, history = facts["memory"]["needed_bytes"], facts["memory"]["history_bytes"]
    assert history == 16384 // 32 * 4 * facts["kv"]["page_bytes"] > 4 * MIB
    assert facts["memory"]["host_needed_bytes"] == needed + history
    enough = mib_ceil(needed + history)
    free(enough)
    said = kvs("plan", tiny_llama, *SMALL, *flags)
    assert f"of {enough:,}.0 MiB, the history among them" in said.out
    free(enough - 1)
    error = kvs("plan", tiny_llama, *SMALL, *flags).error
    assert f"the history of a full context takes {mib_ceil(history)} MiB, " in error
    assert "are left in cpu beside weights of" in error
    assert ": 1 MiB too many; use " in error
    free(needed // MIB - 2)
    error = kvs("plan", tiny_llama, *SMALL, *flags).error
    assert f"cpu has {needed // MIB - 2} MiB free: 3 MiB too many; use a smaller model" in error
    assert "history" not in error


def advised(error: str) -> list[list[str]]:
    """The flags of each way out that an error names, with their values."""
    ways = error.rpartition("; ")[2].split(", or ")
    return [[word for pair in re.findall(r"(--[a-z-]+) (?:to )?(\w+)", way) for word in pair] for way in ways]


@pytest.mark.parametrize(("context", "lacks_mib", "ways"), [
    (16384, 1, "use --cache-type-k q4_0 and --cache-type-v q4_0, or lower --ctx-size to 8192, or use "
               "--kv-stream-arena-mib 2"),
    (32768, 5, "use --cache-type-k q4_0 and --cache-type-v q4_0, or lower --ctx-size to 16384"),
    (32768, 12, "lower --ctx-size to 16384"),
])
def test_what_is_advised_where_it_does_not_fit_is_enough(
    kvs: Kvs, tiny_llama: Path, free: Callable[[int], None], context: int, lacks_mib: int, ways: str
) -> None:
    """Smaller KV types and a shorter context come first, then a smaller arena; each only where it is enough by itself,
    with the largest value that is."""
    flags = ("-c", str(context), "--kv-stream-arena-mib", "3")
    free(1000)
    enough = mib_ceil(plan(kvs, tiny_llama, *flags)["memory"]["host_needed_bytes"])
    free(enough - lacks_mib)
    error = kvs("plan", tiny_llama, *SMALL, *flags).error
    assert error.endswith(f"{lacks_mib} MiB too many; {ways}")
    for way in advised(error):
        assert plan(kvs, tiny_llama, *flags, *way)["memory"]["fits"]


def test_a_pool_that_was_given_is_what_gets_smaller(
    kvs: Kvs, tiny_llama: Path, free: Callable[[int], None]
) -> None:
    """Not the arena, which cannot be given beside it."""
    flags = ("-c", "16384", "--kv-stream-pool-mib", "3")
    free(1000)
    free(mib_ceil(plan(kvs, tiny_llama, *flags)["memory"]["host_needed_bytes"]) - 2)
    error = kvs("plan", tiny_llama, *SMALL, *flags).error
    assert error.endswith(", or lower --ctx-size to 8192, or use --kv-stream-pool-mib 1")
    assert plan(kvs, tiny_llama, *flags, *advised(error)[-1])["memory"]["fits"]


def test_types_and_context_together_where_neither_is_enough(
    kvs: Kvs, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,024 tokens are the fewest that are advised; with no room for these either it takes a smaller model."""
    flags = ("-c", "2048", "--kv-stream-arena-mib", "1")
    memory = plan(kvs, tiny_llama, *flags)["memory"]
    history = memory["history_bytes"]   # q8_0 and q4_0: 34 and 18 bytes of 32 numbers
    assert history % (2 * 52) == 0
    least = history // 2 * 36 // 52
    monkeypatch.setattr(HostDevice, "free_bytes", lambda self: memory["needed_bytes"] + least)
    error = kvs("plan", tiny_llama, *SMALL, *flags).error
    assert error.endswith("; use --cache-type-k q4_0, --cache-type-v q4_0, and lower --ctx-size to 1024")
    [way] = advised(error)
    assert plan(kvs, tiny_llama, *flags, *way)["memory"]["fits"]
    monkeypatch.setattr(HostDevice, "free_bytes", lambda self: memory["needed_bytes"] + least - 1)
    assert kvs("plan", tiny_llama, *SMALL, *flags).error.endswith("; use a smaller model")


def test_what_was_only_tried_is_not_refused(kvs: Kvs, tiny_llama: Path, free: Callable[[int], None]) -> None:
    """A ring that has no room in a smaller arena says nothing of the arena that was given."""
    flags = ("-c", "16384", "--kv-stream-arena-mib", "4", "--kv-stream-ring-slots", "500")
    free(1000)
    free(mib_ceil(plan(kvs, tiny_llama, *flags)["memory"]["host_needed_bytes"]) - 2)
    assert "does not fit: " in kvs("plan", tiny_llama, *SMALL, *flags).error


def test_an_arena_that_can_be_left_out(kvs: Kvs, tiny_llama: Path, free: Callable[[int], None]) -> None:
    """Where neither it nor anything else is enough by itself, it is left out, and what else is needed is named."""
    flags = ("-c", "16384", "-ctk", "f32", "-ctv", "f32", "--kv-stream-arena-mib", "12")
    free(1000)
    free(12)
    error = kvs("plan", tiny_llama, *SMALL, *flags).error
    assert "; leave out --kv-stream-arena-mib and " in error
    [way] = advised(error)
    assert plan(kvs, tiny_llama, *flags[:-2], *way[2:])["memory"]["fits"]


def test_the_history_counts_as_host_memory(
    kvs: Kvs, tiny_llama: Path, free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a device with memory of its own: pinned host memory holds the history and nothing else. What lacks is said of
    each; other KV types whose history has no room do not fit either."""
    monkeypatch.setattr(HostDevice, "is_host", False)
    flags = ("-c", "16384", "--kv-stream-arena-mib", "3")
    def ram(mib: int) -> None:
        monkeypatch.setattr(making, "available_ram_bytes", lambda: mib * MIB)

    ram(1000)
    memory = plan(kvs, tiny_llama, *flags)["memory"]
    history = mib_ceil(memory["history_bytes"])
    assert memory["host_needed_bytes"] == memory["history_bytes"]
    ram(history)
    said = kvs("plan", tiny_llama, *SMALL, *flags, "--json").json
    fits = {other["name"]: other["fits"] for other in said["alternatives"]}
    assert (fits["K q4_0, V q4_0"], fits["K f16, V f16"]) == (True, False)
    assert f"of {history}.0 MiB of host memory" in kvs("plan", tiny_llama, *SMALL, *flags).out
    ram(history - 2)
    error = kvs("plan", tiny_llama, *SMALL, *flags).error
    assert error == (f"does not fit: the history of a full context takes {history} MiB, {history - 2} MiB are left in "
                     "host memory: 2 MiB too many; use --cache-type-k q4_0 and --cache-type-v q4_0, or lower "
                     "--ctx-size to 8192")   # no arena: it takes none of that memory
    free(1)
    error = kvs("plan", tiny_llama, *SMALL, *flags).error
    assert "cpu has 1 MiB free: " in error
    assert f"; and the history of a full context takes {history} MiB, {history - 2} MiB are left in host" in error
    assert error.endswith("; use a smaller model")
    ram(history)
    free(mib_ceil(memory["needed_bytes"]) - 1)
    error = kvs("plan", tiny_llama, *SMALL, *flags, "-ngl", "all").error
    assert error.endswith(" MiB free: 1 MiB too many; use --kv-stream-arena-mib 2")


def test_what_the_history_of_sliding_windows_counts(
    kvs: Kvs, tiny_gemma3: Path, free: Callable[[int], None]
) -> None:
    """Windows alone, and beside them what kvs serve keeps for checkpoints, no more than the whole text. What is checked
    is the first, and it says so; with --swa-full there is but one number."""
    flags = ("-c", "16384", "--kv-stream-arena-mib", "3")
    memory = plan(kvs, tiny_gemma3, *flags)["memory"]
    whole = plan(kvs, tiny_gemma3, *flags, "--swa-full")["memory"]
    group = 4 * 32 * 208   # 2 KV heads of 64 in q8_0 and q4_0, two such layers of four
    assert (whole["history_bytes"], whole["served_history_bytes"]) == (512 * 32 * 4 * 208,) * 2
    assert memory["history_bytes"] == whole["history_bytes"] - 2 * (128 - 4) * group
    assert memory["served_history_bytes"] == memory["history_bytes"] + 32 * 2 * 2 * group
    short = plan(kvs, tiny_gemma3, "-c", "4096", "--kv-stream-arena-mib", "3")["memory"]
    assert short["history_bytes"] < short["served_history_bytes"] == 4096 * 4 * 208
    served = -(-10 * memory["served_history_bytes"] // MIB) / 10
    words = ("and no checkpoints; with the 32, of 8192 MiB at most, that kvs serve and --session keep by default up to "
             f"{served:,.1f} MiB\n")
    assert words in kvs("plan", tiny_gemma3, *SMALL, *flags).out
    assert "no checkpoints" not in kvs("plan", tiny_gemma3, *SMALL, *flags, "--swa-full").out
    free(mib_ceil(memory["needed_bytes"] + memory["history_bytes"]) - 1)
    error = kvs("plan", tiny_gemma3, *SMALL, *flags).error
    assert f"the history of a full context without checkpoints takes {mib_ceil(memory['history_bytes'])} MiB, " in error


def test_weights_that_spill_are_host_memory(
    kvs: Kvs, tiny_llama: Path, free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU whose weights may exceed its memory they fill it, the rest is in RAM and takes the link's time in every
    step; state and arena must fit. What lacks is said with its numbers."""
    monkeypatch.setattr(HostDevice, "is_host", False)
    monkeypatch.setattr(HostDevice, "spills", True)
    flags = ("-ngl", "all", "--kv-stream-arena-mib", "3")
    free(1000)
    whole = plan(kvs, tiny_llama, *flags)
    needed = whole["memory"]["needed_bytes"]
    assert whole["memory"]["spilled_weights_bytes"] == 0
    assert 3 * MIB < needed < 5 * MIB
    assert "weights that spill" not in kvs("plan", tiny_llama, *SMALL, *flags).out
    free(needed // MIB)
    facts = plan(kvs, tiny_llama, *flags)
    memory, spilled = facts["memory"], needed % MIB
    assert (memory["spilled_weights_bytes"], memory["needed_bytes"]) == (spilled, needed // MIB * MIB)
    assert memory["host_needed_bytes"] == memory["history_bytes"] + spilled
    assert memory["weights_bytes"] == whole["memory"]["weights_bytes"]
    assert facts["points"][0]["link_ms"] == pytest.approx(1e3 * spilled / 1e8)
    assert "weights that spill" in kvs("plan", tiny_llama, *SMALL, *flags).out
    monkeypatch.setattr(making, "available_ram_bytes", lambda: memory["history_bytes"] + spilled - 1)
    error = kvs("plan", tiny_llama, *SMALL, *flags).error
    assert "the history of a full context and the weights that spill take" in error
    free(2)
    assert "an arena of 3 MiB need 3 MiB, cpu has 2 MiB free: 1 MiB too many" in kvs(
        "plan", tiny_llama, *SMALL, *flags
    ).error


@pytest.mark.parametrize(("name", "error"), [
    ("plan.txt", "give a name that ends in .png, .svg, .pdf"), ("nowhere/plan.png", "there is no folder")])
def test_a_plot_that_cannot_be(kvs: Kvs, tiny_llama: Path, tmp_path: Path, name: str, error: str) -> None:
    """is refused before anything is measured."""
    assert error in kvs("plan", tiny_llama, *SMALL, "--plot", tmp_path / name).error


def test_a_plot_without_matplotlib(
    kvs: Kvs, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """says what to install."""
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    error = kvs("plan", tiny_llama, *SMALL, "--plot", tmp_path / "plan.png").error
    assert "pip install 'kvs-llm[bench]'" in error


@pytest.mark.parametrize("flags", [(), ("--spec-type", "draft-mtp")])
def test_a_plot(kvs: Kvs, tiny_qwen35: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """A picture, beside the tables."""
    pytest.importorskip("matplotlib")
    done = kvs("plan", tiny_qwen35, *SMALL, *flags, "--plot", tmp_path / "plan.svg")
    assert done.code == 0
    assert "</svg>" in (tmp_path / "plan.svg").read_text()
    assert "Over the context" in done.out


def test_matplotlib_is_loaded_for_plots_alone(kvs: Kvs, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``--plot`` nothing needs it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert kvs("plan", tiny_llama, *SMALL).code == 0


def test_an_arena_of_what_is_free(kvs: Kvs, tiny_llama: Path, free: Callable[[int], None]) -> None:
    """auto leaves ``--fit-target`` free; on the host half of the rest is the history's; never more than is needed."""
    flags = ("-c", "16384", "-ub", "64")
    def memory(*more: str) -> dict[str, Any]:
        found: dict[str, Any] = plan(kvs, tiny_llama, *flags, *more)["memory"]
        return found

    free(64)
    weights = memory()["weights_bytes"]
    full = memory()["full_arena_mib"]
    auto = memory("--kv-stream-arena-mib", "auto", "--fit-target", "50")
    assert auto["arena_bytes"] == (64 * MIB - weights - 50 * MIB) // 2 // MIB * MIB
    assert auto["arena_is_chosen"]
    more = memory("--kv-stream-arena-mib", "auto", "--fit-target", "46")
    assert more["arena_bytes"] - auto["arena_bytes"] == 2 * MIB
    free(4096)
    assert memory("--kv-stream-arena-mib", "auto")["arena_bytes"] == full * MIB
    free(64)
    error = kvs("plan", tiny_llama, *SMALL, *flags, "--kv-stream-arena-mib", "auto").error
    assert "--kv-stream-arena-mib auto: the arena needs" in error
    assert "without --fit-target 1024" in error


def test_the_engine_takes_what_auto_says(
    kvs: Kvs, tiny_qwen35: Path, free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the weights are loaded: what a device with memory of its own has free then, without recurrent state and the
    target; too little is refused with both numbers."""
    monkeypatch.setattr(HostDevice, "is_host", False)
    free(20)
    kv = KvSettings("q8_0", "q4_0", arena_mib="auto", fit_target_mib=15)
    context = ContextSettings(ctx_size=32768, ubatch=64)
    file = GgufFile.open(tiny_qwen35)
    engine = Engine(file, HostDevice(1), context=context, kv=kv, rope=RopeSettings())
    try:
        state = engine.memory_report()["state"]
        assert engine.memory.arena_bytes == (5 * MIB - state) // MIB * MIB
    finally:
        engine.close()
    free(15)
    with pytest.raises(BudgetError) as refused:
        Engine(file, HostDevice(1), context=context, kv=kv, rope=RopeSettings())
    assert refused.value.given_mib == 0 < refused.value.needed_mib
