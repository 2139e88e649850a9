"""The models of ``benchmarks/cliff.py``."""

from __future__ import annotations

import pytest

from benchmarks.cliff import MODELS
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
