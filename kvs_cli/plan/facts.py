"""All of a plan, for ``--json``."""

from __future__ import annotations

from typing import Any

from kvs_cli.plan.plan import Plan
from kvs_core.engine.arena_size import arena_for
from kvs_core.engine.forecast import Point
from kvs_core.memory.phases import Phase
from kvs_core.units import mib_ceil

Section = dict[str, Any]


def facts(plan: Plan) -> Section:
    """What ``--json`` prints. Sizes in bytes unless the name says otherwise; times in milliseconds."""
    setup, budget, rounds = plan.setup, plan.setup.budget, plan.rounds
    memory, kv, rates = budget.memory, setup.kv, plan.found.rates
    return {
        "synthetic": plan.model.file.synthetic,
        "model": {"path": str(plan.model.file.path), "name": plan.model.spec.name},
        "device": {
            "name": plan.device_name,
            "free_bytes": plan.free_bytes,
            "host_free_bytes": plan.ram_bytes,
            "rates_were_kept": plan.found.kept,
            "link_bytes_per_s": rates.link_bytes_per_s,
            "attention_bytes_per_s": rates.attention_bytes_per_s,
            "host_round_ms": 1e3 * rates.round_s,
            "host_draft_ms": 1e3 * rates.draft_s,
            "weight_bytes_per_s": {
                name: rates.weight_bytes_per_s.get(name, rates.weight_bytes_per_s[""])
                for name in setup.weights.forms
            },
        },
        "memory": {
            "fits": True,
            "needed_bytes": plan.needed_bytes,
            "host_needed_bytes": plan.host_needed_bytes,
            "weights_bytes": setup.weights.size_bytes,
            "float32_cache_bytes": setup.weights.cached_bytes,   # of the weights, on the CPU
            "float32_cache_limit_bytes": plan.cache_limit_bytes,   # by what is free now; null on a GPU
            "float32_uncached_bytes": setup.weights.in_file_bytes,   # made anew at every use
            "streamed_layers": list(setup.split.passing),
            "streamed_weights_bytes": setup.split.pass_bytes,
            "spilled_weights_bytes": setup.spilled_bytes,
            "weights_ring_bytes": setup.split.ring.size_bytes,
            "state_bytes": setup.state_bytes,
            "arena_bytes": memory.arena_bytes,
            "arena_is_chosen": kv.arena_mib in (None, "auto") and kv.pool_mib is None,
            "least_arena_mib": mib_ceil(arena_for(memory, budget.need.least_slots)),
            "full_arena_mib": mib_ceil(arena_for(memory, budget.need.all_slots)),
            "workspace_bytes": {phase.value: budget.buffers[phase].size_bytes for phase in Phase},
            "pool_pages": memory.slots(Phase.DECODE),
            "sliding_pool_pages": budget.need.sliding_slots,
            "history_bytes": plan.history_bytes,
            "served_history_bytes": plan.served_history_bytes,
        },
        "kv": {
            "type_k": kv.type_k, "type_v": kv.type_v, "layers": setup.kv_layers, "mode": budget.mode.value,
            "page_tokens": budget.geometry.page_tokens, "page_bytes": budget.geometry.page_bytes,
            "sliding_page_bytes": None if budget.pages.sliding is None else budget.pages.sliding.page_bytes,
        },
        "weights_h2d_bytes": setup.split.pass_bytes,   # per step
        "context_tokens": budget.context.context_tokens,
        "speculation": {
            "type": rounds.kind or None, "drafts": rounds.drafts, "tokens_per_round": rounds.tokens,
            "synthetic": plan.settings.speculative.is_synthetic,
        },
        "points": [_point(point) for point in plan.points],
        "alternatives": [
            {
                "name": other.name, "type_k": other.kv.type_k, "type_v": other.kv.type_v,
                "arena_mib": other.kv.arena_mib, "fits": other.end is not None,
                "end": None if other.end is None else _point(other.end),
            }
            for other in plan.alternatives
        ],
    }


def _point(point: Point) -> Section:
    placed = point.placement
    return {
        "tokens": point.tokens,
        "resident_pages": placed.resident_pages,
        "streamed_pages": placed.streamed_pages,
        "ring_slots": placed.ring_slots,
        "streamed_bytes": placed.streamed_bytes,
        "kernels_ms": 1e3 * point.kernels_s,
        "link_ms": 1e3 * point.link_s,
        "step_ms": 1e3 * point.step_s,
        "drafts_ms": 1e3 * point.drafts_s,
        "host_ms": 1e3 * point.host_s,
        "round_ms": 1e3 * point.round_s,
        "rounds_per_s": 1.0 / point.round_s,
        "tokens_per_s": point.tokens_per_s,
    }
