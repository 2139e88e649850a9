"""One point of a sweep: what its timed rounds are, and what is told of them."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from kvs_cli.bench import measure as measuring
from kvs_cli.bench.columns import COLUMNS, Row
from kvs_cli.bench.measure import measure, plan_reading
from kvs_cli.open_model import OpenModel
from kvs_core.device.base import Device
from kvs_core.device.cuda.device import CudaDevice
from kvs_core.device.cuda.hollow import hollow_device
from kvs_core.device.host.device import HostDevice
from kvs_core.engine.budget import Drafting
from kvs_core.engine.engine import Engine
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.models.registry import read_spec
from kvs_core.models.synthetic import synthetic_model
from kvs_core.settings.drafters import ModelDraftSettings, SpeculativeSettings
from kvs_core.settings.rooms import ContextSettings, KvSettings, RopeSettings
from tests.cuda_on_cpu.cpu_runtime import CpuRuntime

DECODE_TOKENS = 12


def point(device: Device, drafts: int, rates: tuple[float, ...] = ()) -> Row:
    """A point on the tiny model."""
    file = synthetic_model("tiny:q8_0:mtp")
    model = OpenModel(file, read_spec(file), Tokenizer.from_metadata(file.metadata, source="tiny"))
    speculative = SpeculativeSettings(
        ("draft-mtp",) if drafts else (), draft=ModelDraftSettings(n_max=max(1, drafts)), synth_rates=rates or None
    )
    engine = Engine(
        file, device, context=ContextSettings(ctx_size=512, ubatch=64, batch=64), kv=KvSettings("q8_0", "q4_0"),
        rope=RopeSettings(), drafting=Drafting(nextn=drafts > 0),
    )
    with closing(engine):
        engine.warm_up()
        return measure(engine, model, speculative, plan_reading(engine, model, None, DECODE_TOKENS), DECODE_TOKENS)


def test_timed_rounds_are_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """All draft as far, the last one too, though only one of its tokens was asked for: rounds of three tokens give 13,
    with a token more in one of them, and all of them count."""
    asked: list[int | None] = []
    run_round = measuring.run_round

    def noted(session: Any, sampler: Any, token: int, remaining: int | None, *rest: Any) -> Any:
        asked.append(remaining)
        return run_round(session, sampler, token, remaining, *rest)

    monkeypatch.setattr(measuring, "run_round", noted)
    row = point(HostDevice(1), 3, (1.0, 1.0, 0.1))
    rounds, accepted, drafted = (int(str(row[name])) for name in ("rounds", "draft_accepted", "draft_generated"))
    assert drafted == 3 * rounds
    assert row["mean_verify_width"] == 4.0
    assert row["decode_tokens"] == DECODE_TOKENS <= rounds + accepted < DECODE_TOKENS + 4
    assert rounds + accepted > DECODE_TOKENS   # else nothing is shown
    assert float(str(row["decode_tps"])) * float(str(row["ms_per_step_p50"])) == pytest.approx(
        1e3 * (rounds + accepted) / rounds, rel=0.5)
    assert set(asked) == {None}
    assert row.keys() <= COLUMNS.keys()
    assert row["host_ms"] is None   # nothing is captured


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_hosts_part_is_what_no_launch_covers(drafts: int) -> None:
    """Of a round by the clock; a launch of the stand-in is said to take a millisecond: the step's, and each draft's."""
    with closing(CudaDevice(CpuRuntime())) as device:
        row = point(hollow_device(device, 1000), drafts, (1.0,) * drafts)
    round_ms, host_ms = float(str(row["ms_per_step_p50"])), float(str(row["host_ms"]))
    assert round_ms - host_ms == pytest.approx(1.0 + drafts, rel=1e-3)
