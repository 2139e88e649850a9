"""What helps where an arena or a pool is too small, besides a larger one, and where KV takes too much memory: settings
are tried until it does. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from kvs_core.settings.rooms import PAGE_STEP_TOKENS, ContextPlan, ContextSettings, KvSettings
from kvs_core.units import mib_ceil

_LEAST_UBATCH_TOKENS = 32
_LEAST_CONTEXT_TOKENS = 1024   # with less nobody is helped
_SMALLER_TYPES = (("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0"))


class Fits(Protocol):
    """Whether the arena or the pool that was given is large enough for these settings, or there is memory for them."""

    def __call__(self, context: ContextSettings, kv: KvSettings, ring_bytes: int) -> bool: ...


def way_out(
    fits: Fits, context: ContextSettings, kv: KvSettings, plan: ContextPlan, ring_bytes: int = 0
) -> str:
    """To follow "raise it": the first lever that is enough by itself, with the value that is; "" if none is.

    context, kv, ring_bytes  what does not fit; plan: the sizes that this context has
    """
    found = next(_levers(fits, context, kv, plan, ring_bytes), "")
    said = f", or {found}" if found else ""
    if ring_bytes and fits(context, kv, 0):
        said += f", or use --gpu-layers all: {mib_ceil(ring_bytes)} MiB of it are for weights that pass through"
    return said


def _levers(
    fits: Fits, context: ContextSettings, kv: KvSettings, plan: ContextPlan, ring_bytes: int
) -> Iterator[str]:
    """Those that are enough, the one that costs least first."""
    if kv.residency_mode == "resident" and fits(context, replace(kv, residency_mode="adaptive"), ring_bytes):
        yield "use --kv-residency-mode adaptive"
    ubatches = [
        (tokens, replace(context, ubatch=tokens)) for tokens in _smaller(plan.ubatch_tokens, _LEAST_UBATCH_TOKENS)
    ]
    pages = [(tokens, replace(kv, page_tokens=tokens)) for tokens in _smaller(kv.page_tokens, PAGE_STEP_TOKENS)]
    for tokens, rows in ubatches:
        if fits(rows, kv, ring_bytes):
            yield f"lower --ubatch-size to {tokens}"
    for tokens, paged in pages:
        if fits(context, paged, ring_bytes):
            yield f"lower --kv-page-tokens to {tokens}"
    for page_tokens, paged in pages:
        for tokens, rows in ubatches:
            if fits(rows, paged, ring_bytes):
                yield f"lower --kv-page-tokens to {page_tokens} and --ubatch-size to {tokens}"
    yield from _smaller_types(fits, context, kv, ring_bytes)
    yield from _shorter(fits, context, kv, plan, ring_bytes)


def less_kv(fits: Fits, context: ContextSettings, kv: KvSettings, plan: ContextPlan) -> list[str]:
    """What makes KV small enough: other types, and a shorter context, each enough by itself, with the value that is;
    both together where neither is; [] where they are not either. Arguments as of ``way_out``."""
    ways = (_smaller_types(fits, context, kv, 0), _shorter(fits, context, kv, plan, 0))
    found = [said for way in ways if (said := next(way, ""))]
    if found:
        return found
    type_k, type_v = _SMALLER_TYPES[-1]
    shorter = next(_shorter(fits, context, replace(kv, type_k=type_k, type_v=type_v), plan, 0), "")
    return [f"use --cache-type-k {type_k}, --cache-type-v {type_v}, and {shorter}"] if shorter else []


def _smaller_types(fits: Fits, context: ContextSettings, kv: KvSettings, ring_bytes: int) -> Iterator[str]:
    for type_k, type_v in _SMALLER_TYPES:
        if fits(context, replace(kv, type_k=type_k, type_v=type_v), ring_bytes):
            yield f"use --cache-type-k {type_k} and --cache-type-v {type_v}"


def _shorter(
    fits: Fits, context: ContextSettings, kv: KvSettings, plan: ContextPlan, ring_bytes: int
) -> Iterator[str]:
    for tokens in _smaller(plan.context_tokens, _LEAST_CONTEXT_TOKENS):
        if fits(replace(context, ctx_size=tokens), kv, ring_bytes):
            yield f"lower --ctx-size to {tokens}"


def _smaller(tokens: int, least: int) -> Iterable[int]:
    """Powers of two below ``tokens``, from the largest down to ``least``."""
    most = (tokens - 1).bit_length() - 1
    return [1 << power for power in range(most, -1, -1) if 1 << power >= least]
