"""``kvs plan`` and ``kvs bench sweep`` say the same of what both state."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvs_cli.bench.store import read_csv
from kvs_cli.plan import plan as making
from kvs_core.engine.forecast import Rates
from kvs_core.engine.rates import Found
from kvs_core.units import MIB
from tests.cli.conftest import Kvs, kvs  # noqa: F401

CONTEXT = 3840   # a sweep's prompt ends, and it decodes, within the last page of it

RATES = Rates(
    link_bytes_per_s=1e9, weight_bytes_per_s={"": 1e9}, row_costs={"": (1.0, 1.5)}, attention_bytes_per_s=1e9,
    attention_row=0.5, layer_s=1e-4, least_attention_s=0.0, run_s=0.0, run_rows_s=0.0, copy_s=0.0, round_s=0.0,
    plan_s=0.0, draft_s=0.0,
)


@pytest.mark.parametrize(("model", "arena_mib", "ubatch", "ring_slots"), [
    ((), 4, 64, 2), (("-m", "synthetic:tiny:q8_0:mtp"), 3, 32, 1)])
def test_what_is_foretold_is_what_is_measured(
    kvs: Kvs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,  # noqa: F811
    model: tuple[str, ...], arena_mib: int, ubatch: int, ring_slots: int,
) -> None:
    """Memory, and where the pages of a step at the end of the context are, plain and with drafts of two, which have
    less room and one layer more; in these arenas reading the prompt leaves a group fewer resident than fits. The ring
    is a fixed one: else it follows what is measured."""
    same = (*model, "--device", "cpu", "-t", "1", "-ub", ubatch, "-b", ubatch, "--kv-stream-ring-slots", ring_slots)
    monkeypatch.setattr(making, "find_rates", lambda *_: Found(RATES, kept=True))
    assert kvs("bench", "sweep", *same, "--contexts", CONTEXT, "--mtp-lengths", "0,2", "--decode-tokens", "8",
               "--arena-mib", arena_mib, "--output", tmp_path).code == 0
    rows = read_csv(tmp_path / "sweep.csv")
    for row, drafts in zip(rows, ((), ("--spec-type", "draft-mtp", "--spec-draft-n-max", "2")), strict=True):
        facts = kvs("plan", *same, "-c", CONTEXT, "--kv-stream-arena-mib", arena_mib, *drafts, "--json").json
        memory, end = facts["memory"], facts["points"][-1]
        assert end["streamed_pages"] > ring_slots
        foretold = {
            "arena_mib": memory["arena_bytes"] / MIB,
            "decode_kv_pool_mib": memory["pool_pages"] * facts["kv"]["page_bytes"] / MIB,
            "decode_workspace_mib": memory["workspace_bytes"]["decode"] / MIB,
            "recurrent_mib": memory["state_bytes"] / MIB,
            "host_history_mib": memory["history_bytes"] / MIB,
            "active_pages": end["resident_pages"] + end["streamed_pages"],
            "resident_pages": end["resident_pages"],
            "ring_slots": end["ring_slots"],
            "streamed_mib_per_pass": end["streamed_bytes"] / MIB,
        }
        assert {name: row[name] for name in foretold} == pytest.approx(foretold, rel=1e-5)
