"""Rings and runs that a pool cannot have are refused with the number that it can."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvs_core.errors import BudgetError, SettingsError
from tests.engine.tiny import engine, kv_settings, run, text


@pytest.mark.parametrize("setting", ["ring_slots", "run_pages"])
def test_a_ring_the_pool_cannot_have(tiny_llama: Path, setting: str) -> None:
    """The refusal names the most that works; that works, and one more does not."""
    with (
        pytest.raises(SettingsError, match=r"must stay resident; use at most \d+") as refusal,
        engine(tiny_llama, kv=kv_settings(**{setting: 10_000}), pool=0.2, fixed=True),
    ):
        pass
    found = re.search(r"at most (\d+)", str(refusal.value))
    assert found is not None
    most = int(found[1])
    with engine(tiny_llama, kv=kv_settings(**{setting: most}), pool=0.2, fixed=True) as built:
        vocab = built.spec.n_vocab
        run(built, text(vocab, 300), [1, 2])
        assert built.report().h2d_bytes > 0
    with pytest.raises(SettingsError), engine(tiny_llama, kv=kv_settings(**{setting: most + 1}), pool=0.2, fixed=True):
        pass


def test_resident_mode_advises_what_can_help(tiny_llama: Path) -> None:
    """A cache that must be wholly resident and does not fit is not told to lower the ubatch."""
    kv = kv_settings(residency_mode="resident", arena_mib=1)
    with pytest.raises(BudgetError, match="or use --kv-residency-mode adaptive"), engine(
        tiny_llama, kv=kv, context=4096
    ):
        pass
