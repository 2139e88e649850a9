"""What is advised where an arena or a pool is too small is enough, and nothing is where nothing would be."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.engine.budget import plan_budget
from kvs_core.engine.levers import UNBOUND, Bounds
from kvs_core.errors import BudgetError, SettingsError
from kvs_core.models.registry import read_spec
from kvs_core.models.synthetic import synthetic_model
from kvs_core.paging.geometry import KvType
from kvs_core.settings import ContextSettings, KvSettings

SPEC = read_spec(synthetic_model("qwen3-8b:q4_k"))
KEYS = {"--ubatch-size": "ubatch", "--kv-page-tokens": "page_tokens", "--ctx-size": "ctx_size",
        "--cache-type-k": "type_k", "--cache-type-v": "type_v", "--kv-residency-mode": "residency_mode"}


def refused(
    context: ContextSettings, kv: KvSettings, ring_bytes: int = 0, bounds: Bounds = UNBOUND
) -> BudgetError | SettingsError | None:
    """Why these settings do not fit; None if they do."""
    try:
        plan_budget(SPEC, context, kv, free_bytes=1 << 40, ring_bytes=ring_bytes, bounds=bounds)
    except (BudgetError, SettingsError) as error:
        return error
    return None


def advice(context: ContextSettings, kv: KvSettings, bounds: Bounds = UNBOUND) -> str:
    """What is said to help, besides raising what is too small."""
    return str(refused(context, kv, bounds=bounds)).partition("raise it")[2]


def value_bytes(name: str) -> float:
    """Of one value of K or V."""
    held = KvType.parse(name)
    return held.block_bytes / held.block_values


def followed(context: ContextSettings, kv: KvSettings, advice: str) -> tuple[ContextSettings, KvSettings]:
    """The settings with the flags that an advice names."""
    for flag, value in re.findall(r"(--[a-z-]+) (?:to )?(\w+)", advice):
        changed: dict[str, Any] = {KEYS[flag]: int(value) if value.isdigit() else value}
        if flag in ("--ubatch-size", "--ctx-size"):
            context = replace(context, **changed)
        else:
            kv = replace(kv, **changed)
    return context, kv


@settings(deadline=None, max_examples=60)
@given(
    size_mib=st.sampled_from([1, 3, 10, 30, 60, 100, 150, 220, 260, 300]), fixed=st.booleans(),
    page_tokens=st.sampled_from([32, 96, 256, 1024]), ubatch=st.sampled_from([32, 100, 512, 2048]),
    ctx_size=st.sampled_from([2048, 32768]), type_k=st.sampled_from(["f16", "q4_0"]),
    type_v=st.sampled_from(["f16", "q4_0"]), mode=st.sampled_from(["adaptive", "resident"]),
    ring_mib=st.sampled_from([0, 0, 20]), ring_slots=st.sampled_from([0, 0, 16, 70]),
    run_pages=st.sampled_from([0, 0, 20]),
)
def test_what_is_advised_is_enough(
    size_mib: int, fixed: bool, page_tokens: int, ubatch: int, ctx_size: int, type_k: str, type_v: str, mode: Any,
    ring_mib: int, ring_slots: int, run_pages: int,
) -> None:
    """Each advice that a refusal gives, followed to the letter, makes it fit, and so do the MiB that it names, with a
    ring that was asked for too. Where it gives none, no flag alone does, whatever its value; and none names a value
    that is larger than the one that is."""
    context = ContextSettings(ctx_size=ctx_size, ubatch=ubatch)
    kv = KvSettings(type_k, type_v, page_tokens, residency_mode=mode, ring_slots=ring_slots, run_pages=run_pages,
                    arena_mib=None if fixed else size_mib, pool_mib=size_mib if fixed else None)
    ring_bytes = ring_mib << 20
    error = refused(context, kv, ring_bytes)
    if not isinstance(error, BudgetError):
        return
    raised = {"pool_mib": error.needed_mib} if fixed else {"arena_mib": error.needed_mib}
    assert refused(context, replace(kv, **raised), ring_bytes) is None
    said, _, ring = str(error).partition("; raise it")[2].partition("; ")
    assert ring == (
        f"{ring_mib} of the {error.needed_mib} MiB are for weights that pass through" if ring_mib and not fixed else ""
    )
    advices = said.split(", or ")[1:]
    for each in advices:
        other_context, other_kv = followed(context, kv, each)
        assert (other_context, other_kv) != (context, kv)
        assert other_context.ubatch <= ubatch
        assert other_context.ctx_size <= ctx_size
        assert other_kv.page_tokens <= page_tokens
        assert value_bytes(other_kv.type_k) <= value_bytes(type_k)
        assert value_bytes(other_kv.type_v) <= value_bytes(type_v)
        assert refused(other_context, other_kv, ring_bytes) is None
    if not advices:
        for values in ("--ubatch-size 32", "--kv-page-tokens 32", "--kv-page-tokens 32 and --ubatch-size 32",
                       "--cache-type-k q4_0 and --cache-type-v q4_0", "--ctx-size 1024"):
            assert refused(*followed(context, kv, values), ring_bytes)


@pytest.mark.parametrize(
    ("page_tokens", "ubatch", "arena_mib", "said"),
    [
        (256, 512, 240, ", or lower --ubatch-size to 256"),
        (256, 512, 160, ", or lower --kv-page-tokens to 64"),   # whatever the ubatch, pages of 256 need 191 MiB
        (256, 512, 60, ", or lower --kv-page-tokens to 64 and --ubatch-size to 64"),
        (32, 512, 120, ", or lower --ubatch-size to 256"),
        (32, 32, 30, ", or use --cache-type-k q8_0 and --cache-type-v q8_0"),
        (32, 32, 20, ""),
    ],
)
def test_the_first_that_is_enough(page_tokens: int, ubatch: int, arena_mib: int, said: str) -> None:
    """The lever that costs least, alone where it is enough, with the largest value that is."""
    kv = KvSettings(page_tokens=page_tokens, arena_mib=arena_mib)
    assert advice(ContextSettings(ctx_size=32768, ubatch=ubatch), kv) == said


def test_no_type_is_made_larger() -> None:
    """Where K is small already, types are advised that leave it so and make V smaller."""
    context = ContextSettings(ctx_size=32768, ubatch=32)
    kv = KvSettings("q4_0", "f16", page_tokens=32, arena_mib=25)
    assert refused(context, replace(kv, type_k="q8_0", type_v="q4_0")) is None   # the first pair that is enough
    assert advice(context, kv) == ", or use --cache-type-k q4_0 and --cache-type-v q4_0"


_PAGES_AND_ROWS = ", or lower --kv-page-tokens to {} and --ubatch-size to {}"


@pytest.mark.parametrize(
    ("mode", "page_tokens", "arena_mib", "bounds", "said"),
    [
        ("adaptive", 256, 60, {"ubatch_tokens": 64}, _PAGES_AND_ROWS.format(64, 64)),
        ("adaptive", 256, 60, {"ubatch_tokens": 65}, _PAGES_AND_ROWS.format(32, 128)),
        ("adaptive", 32, 70, {"ubatch_tokens": 128}, ", or lower --ubatch-size to 128"),
        ("adaptive", 32, 70, {"ubatch_tokens": 129}, ""),
        ("resident", 256, 190, {"context_tokens": 1024}, ", or lower --ctx-size to 1024"),
        ("resident", 256, 190, {"context_tokens": 1025}, ""),
        ("adaptive", 256, 160, {"pages_fixed": True}, ""),
        ("resident", 256, 190, {"pages_fixed": True}, ", or lower --ctx-size to 1024"),
    ],
)
def test_advice_keeps_to_what_is_known(
    mode: Any, page_tokens: int, arena_mib: int, bounds: dict[str, Any], said: str
) -> None:
    """The rows that drafts are verified with, the tokens that a text has, the pages that a session has."""
    kv = KvSettings(page_tokens=page_tokens, arena_mib=arena_mib, residency_mode=mode)
    assert advice(ContextSettings(ctx_size=32768), kv, Bounds(**bounds)) == said
