"""What is advised where an arena or a pool is too small is enough, and nothing is where nothing would be."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.engine.budget import plan_budget
from kvs_core.errors import BudgetError
from kvs_core.models.registry import read_spec
from kvs_core.models.synthetic import synthetic_model
from kvs_core.settings import ContextSettings, KvSettings

SPEC = read_spec(synthetic_model("qwen3-8b:q4_k"))
KEYS = {"--ubatch-size": "ubatch", "--kv-page-tokens": "page_tokens", "--ctx-size": "ctx_size",
        "--cache-type-k": "type_k", "--cache-type-v": "type_v", "--kv-residency-mode": "residency_mode"}


def refusal(context: ContextSettings, kv: KvSettings, ring_bytes: int = 0) -> str:
    """Why these settings do not fit; "" if they do."""
    try:
        plan_budget(SPEC, context, kv, free_bytes=1 << 40, ring_bytes=ring_bytes)
    except BudgetError as error:
        return str(error)
    return ""


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
    mode=st.sampled_from(["adaptive", "resident"]), ring_mib=st.sampled_from([0, 0, 20]),
)
def test_what_is_advised_is_enough(
    size_mib: int, fixed: bool, page_tokens: int, ubatch: int, ctx_size: int, type_k: str, mode: Any, ring_mib: int
) -> None:
    """Each advice that a refusal gives, followed to the letter, makes it fit. Where it gives none, no flag alone does,
    whatever its value; and none names a value that is no less than the one that is."""
    context = ContextSettings(ctx_size=ctx_size, ubatch=ubatch)
    kv = KvSettings(type_k, type_k, page_tokens, residency_mode=mode,
                    arena_mib=None if fixed else size_mib, pool_mib=size_mib if fixed else None)
    ring_bytes = ring_mib << 20
    said = refusal(context, kv, ring_bytes)
    if not said:
        return
    assert "; raise it" in said
    advices = said.partition("raise it")[2].split(", or ")[1:]
    for advice in advices:
        if advice.startswith("use --gpu-layers all: "):
            assert advice.endswith(f"{ring_mib} MiB of it are for weights that pass through")
            assert not refusal(context, kv)
            continue
        other_context, other_kv = followed(context, kv, advice)
        assert (other_context, other_kv) != (context, kv)
        assert (other_context.ubatch, other_context.ctx_size, other_kv.page_tokens) <= (ubatch, ctx_size, page_tokens)
        assert not refusal(other_context, other_kv, ring_bytes)
    if not advices:
        for values in ("--ubatch-size 32", "--kv-page-tokens 32", "--kv-page-tokens 32 and --ubatch-size 32",
                       "--cache-type-k q4_0 and --cache-type-v q4_0", "--ctx-size 1024"):
            assert refusal(*followed(context, kv, values), ring_bytes)


@pytest.mark.parametrize(
    ("page_tokens", "ubatch", "arena_mib", "advice"),
    [
        (256, 512, 240, ", or lower --ubatch-size to 256"),
        (256, 512, 160, ", or lower --kv-page-tokens to 64"),   # whatever the ubatch, pages of 256 need 191 MiB
        (256, 512, 60, ", or lower --kv-page-tokens to 64 and --ubatch-size to 64"),
        (32, 512, 120, ", or lower --ubatch-size to 256"),
        (32, 32, 30, ", or use --cache-type-k q8_0 and --cache-type-v q8_0"),
        (32, 32, 20, ""),
    ],
)
def test_the_first_that_is_enough(page_tokens: int, ubatch: int, arena_mib: int, advice: str) -> None:
    """The lever that costs least, alone where it is enough, with the largest value that is."""
    kv = KvSettings(page_tokens=page_tokens, arena_mib=arena_mib)
    said = refusal(ContextSettings(ctx_size=32768, ubatch=ubatch), kv)
    assert said.partition("raise it")[2] == advice
