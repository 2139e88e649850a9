"""How a plan is compared with a sweep."""

from __future__ import annotations

import pytest

from benchmarks.plan_check import arguments, ask, compare, line, said

ROW = {"context_capacity": "8192", "spec_type": "draft-mtp", "draft_n_max": "2", "draft_accepted": "52", "rounds": "45",
       "streamed_mib_per_pass": "0.0", "error": ""}
PLAN = {"device": {"name": "some GPU"}, "points": [
    {"tokens_per_s": 1.0}, {"tokens_per_s": 320.0, "round_ms": 6.75, "host_ms": 0.75, "streamed_bytes": 0}]}


def test_the_hosts_part_is_told_apart() -> None:
    """Medians over the repeats of a round, of the host's part of it and of what is left, beside what was planned."""
    rows = [ROW | {"decode_tps": tps, "ms_per_step_p50": round_ms, "host_ms": host_ms} for tps, round_ms, host_ms in (
        ("300", "7.0", "0.9"), ("310", "6.9", "0.8"), ("320", "6.8", "0.7"))]
    found = compare(rows, line(rows[0], PLAN))
    assert found["tps_ratio"] == pytest.approx(320 / 310, abs=1e-4)
    assert (found["plan_host_ms"], found["measured_host_ms"]) == (0.75, 0.8)
    assert (found["plan_device_ms"], found["measured_device_ms"]) == (6.0, pytest.approx(6.1))
    assert (found["plan_round_tokens"], found["measured_round_tokens"]) == (2.16, pytest.approx(97 / 45, abs=1e-4))
    assert said(found).endswith("ms per round 6.75, 6.90, of it the host's 0.75, 0.80; tokens of one 2.16, 2.16")


@pytest.mark.parametrize("cell", [{"host_ms": ""}, {}])
def test_where_nobody_told_it_apart(cell: dict[str, str]) -> None:
    """On the CPU, and in older sweeps, these cells are empty."""
    row = ROW | {"decode_tps": "300", "ms_per_step_p50": "7.0"} | cell
    found = compare([row], line(row, PLAN))
    assert [found[name] for name in found if "_host_" in name or "_device_" in name] == [None] * 4
    assert said(found).endswith("ms per round 6.75, 7.00; tokens of one 2.16, 2.16")


FLAGS = ROW | {"device": "cpu", "batch_size": "64", "ubatch_size": "64", "cache_type_k": "q8_0", "cache_type_v": "q4_0",
               "arena_mib": "2.0", "synth_len": ""}


def test_the_models_are_those_of_the_sweep() -> None:
    """The one that comes with kvs has no name to type; a synthetic one has its MTP block where it drafts."""
    assert "-m" not in arguments(FLAGS | {"model": "demo"})
    synthetic = FLAGS | {"model": "synthetic:tiny:q8_0:mtp"}
    assert arguments(synthetic)[:2] == ["-m", "synthetic:tiny:q8_0:mtp"]
    assert arguments(synthetic | {"spec_type": "none"})[:2] == ["-m", "synthetic:tiny:q8_0"]


def test_a_plan_that_fails_says_why() -> None:
    """in kvs's own line."""
    with pytest.raises(SystemExit, match="does not exist"):
        ask(FLAGS | {"model": "no-such.gguf"})
