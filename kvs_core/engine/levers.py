"""What helps where an arena or a pool is too small, besides a larger one, and where KV takes too much memory: settings
are tried until it does. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from kvs_core.errors import BudgetError
from kvs_core.paging.geometry import KvType
from kvs_core.settings.rooms import PAGE_STEP_TOKENS, ContextPlan, ContextSettings, KvSettings
from kvs_core.units import mib_ceil

_LEAST_UBATCH_TOKENS = 32
_LEAST_CONTEXT_TOKENS = 1024   # with less nobody is helped
_SMALLER_TYPES = (("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0"))


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no advice goes below, since it is known that the command would not run then.

    ubatch_tokens   rows of the widest verification
    context_tokens  that the prompt takes, or what a context shift keeps
    pages_fixed     page size and K/V types are those of a saved session
    """

    ubatch_tokens: int = 1
    context_tokens: int = 1
    pages_fixed: bool = False


UNBOUND = Bounds()


class Fits(Protocol):
    """Whether the arena or the pool that was given is large enough for these settings, or there is memory for them."""

    def __call__(self, context: ContextSettings, kv: KvSettings) -> bool: ...


def advised(
    error: BudgetError, fits: Fits, context: ContextSettings, kv: KvSettings, plan: ContextPlan, bounds: Bounds, *,
    ring_bytes: int = 0,
) -> BudgetError:
    """``error``, which says "raise it", with what else helps.

    ring_bytes  of the arena, through which weights pass
    The other arguments are those of ``way_out``.
    """
    said = f"{error}{way_out(fits, context, kv, plan, bounds)}"
    if ring_bytes:
        said += f"; {mib_ceil(ring_bytes)} of the {error.needed_mib} MiB are for weights that pass through"
    return BudgetError(said, needed_mib=error.needed_mib, given_mib=error.given_mib)


def way_out(fits: Fits, context: ContextSettings, kv: KvSettings, plan: ContextPlan, bounds: Bounds) -> str:
    """To follow "raise it": the first lever, or pair of levers, that is enough, with the value that is; "" if none is.

    context, kv  what does not fit; plan: the sizes that this context has
    """
    found = next(_levers(fits, context, kv, plan, bounds), "")
    return f", or {found}" if found else ""


def _levers(
    fits: Fits, context: ContextSettings, kv: KvSettings, plan: ContextPlan, bounds: Bounds
) -> Iterator[str]:
    """Those that are enough, the one that costs least first."""
    if kv.residency_mode == "resident" and fits(context, replace(kv, residency_mode="adaptive")):
        yield "use --kv-residency-mode adaptive"
    least_ubatch = max(_LEAST_UBATCH_TOKENS, bounds.ubatch_tokens)
    ubatches = [(tokens, replace(context, ubatch=tokens)) for tokens in _smaller(plan.ubatch_tokens, least_ubatch)]
    smaller_pages = () if bounds.pages_fixed else _smaller(kv.page_tokens, PAGE_STEP_TOKENS)
    pages = [(tokens, replace(kv, page_tokens=tokens)) for tokens in smaller_pages]
    for tokens, rows in ubatches:
        if fits(rows, kv):
            yield f"lower --ubatch-size to {tokens}"
    for tokens, paged in pages:
        if fits(context, paged):
            yield f"lower --kv-page-tokens to {tokens}"
    for page_tokens, paged in pages:
        for tokens, rows in ubatches:
            if fits(rows, paged):
                yield f"lower --kv-page-tokens to {page_tokens} and --ubatch-size to {tokens}"
    yield from _other_types(fits, context, kv, bounds)
    yield from _shorter(fits, context, kv, plan, bounds)


def less_kv(fits: Fits, context: ContextSettings, kv: KvSettings, plan: ContextPlan) -> list[str]:
    """What makes KV small enough: other types, and a shorter context, each enough by itself, with the value that is;
    both together where neither is; [] where they are not either. Arguments as of ``way_out``."""
    ways = (_other_types(fits, context, kv, UNBOUND), _shorter(fits, context, kv, plan, UNBOUND))
    found = [said for way in ways if (said := next(way, ""))]
    if found:
        return found
    for type_k, type_v in reversed(list(_smaller_types(kv))):
        shorter = next(_shorter(fits, context, replace(kv, type_k=type_k, type_v=type_v), plan, UNBOUND), "")
        if shorter:
            return [f"use --cache-type-k {type_k}, --cache-type-v {type_v}, and {shorter}"]
    return []


def _other_types(fits: Fits, context: ContextSettings, kv: KvSettings, bounds: Bounds) -> Iterator[str]:
    for type_k, type_v in () if bounds.pages_fixed else _smaller_types(kv):
        if fits(context, replace(kv, type_k=type_k, type_v=type_v)):
            yield f"use --cache-type-k {type_k} and --cache-type-v {type_v}"


def _shorter(
    fits: Fits, context: ContextSettings, kv: KvSettings, plan: ContextPlan, bounds: Bounds
) -> Iterator[str]:
    for tokens in _smaller(plan.context_tokens, max(_LEAST_CONTEXT_TOKENS, bounds.context_tokens)):
        if fits(replace(context, ctx_size=tokens), kv):
            yield f"lower --ctx-size to {tokens}"


def _smaller(tokens: int, least: int) -> Iterable[int]:
    """Powers of two below ``tokens``, from the largest down to ``least``."""
    most = (tokens - 1).bit_length() - 1
    return [1 << power for power in range(most, -1, -1) if 1 << power >= least]


def _smaller_types(kv: KvSettings) -> Iterator[tuple[str, str]]:
    """Of K and V: neither is larger than it is, and one is smaller."""
    held = _value_bytes(kv.type_k), _value_bytes(kv.type_v)
    for type_k, type_v in _SMALLER_TYPES:
        size_k, size_v = _value_bytes(type_k), _value_bytes(type_v)
        if size_k <= held[0] and size_v <= held[1] and (size_k, size_v) != held:
            yield type_k, type_v


def _value_bytes(type_name: str) -> float:
    """Of one value, without what an incomplete block adds."""
    held = KvType.parse(type_name)
    return held.block_bytes / held.block_values
