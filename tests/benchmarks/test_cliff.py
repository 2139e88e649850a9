"""The models of ``benchmarks/cliff.py``, and what it writes of the machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import cliff
from benchmarks.cliff import MODELS
from benchmarks.gpu.rates import Rates
from kvs_core.engine.budget import plan_budget
from kvs_core.models.registry import read_spec
from kvs_core.models.synthetic import synthetic_model
from kvs_core.settings.rooms import ContextSettings, KvSettings


@pytest.mark.parametrize("model", MODELS)
def test_its_models_have_pages_to_stream(model: str) -> None:
    """At their contexts, which they are made for, most of the pool's pages need not be resident."""
    spec = read_spec(synthetic_model(model))
    assert MODELS[model] <= spec.n_ctx_most
    sizes = ContextSettings(ctx_size=MODELS[model], ubatch=512, batch=512)
    budget = plan_budget(spec, sizes, KvSettings(type_k="q8_0", type_v="q4_0"), free_bytes=1 << 37)
    assert budget.need.all_slots > 4 * budget.need.least_slots


@pytest.mark.parametrize(("given", "named"), [((), "of git"), (("--commit", "by hand"), "by hand")])
def test_its_machine_names_the_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: tuple[str, ...], named: str
) -> None:
    """What git knows, or what was given where the code is no repository; before the first point."""
    runtime = SimpleNamespace(getDeviceProperties=lambda index: {"name": b"a GPU"})
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr("benchmarks.gpu.rates.probe", lambda: Rates(*[1e12] * len(Rates.__dataclass_fields__)))
    monkeypatch.setattr(cliff, "commit", lambda: "of git")
    monkeypatch.setattr(cliff, "MODELS", {})
    monkeypatch.setattr(sys, "argv", ["cliff.py", "--models", "none", *given, "--output", str(tmp_path)])
    with pytest.raises(KeyError, match="none"):   # no model is measured
        cliff.main()
    machine = json.loads((tmp_path / "machine.json").read_text())
    assert (machine["gpu"], machine["commit"]) == ("a GPU", named)
