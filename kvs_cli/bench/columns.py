"""The columns of a sweep's CSV and JSONL: names, order and meaning. Names are never changed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

Cell: TypeAlias = str | int | float | bool | None
Row: TypeAlias = dict[str, Cell]

COLUMNS: Mapping[str, str] = MappingProxyType({
    "context_capacity": "tokens that the context holds",
    "prompt_tokens": "tokens that were really read before decoding",
    "filled_tokens": "tokens whose pages were copied from others instead of read (synthetic models only)",
    "decode_tokens": "tokens to be generated and timed, behind a warm-up; the last round may bring a few more",
    "spec_type": "drafters",
    "draft_n_max": "tokens drafted at most by draft-mtp or draft-resident",
    "p_min": "drafting stops below this probability",
    "synth_len": "tokens per verification that were pretended; empty: acceptance is real",
    "cache_type_k": "type of keys",
    "cache_type_v": "type of values",
    "batch_size": "tokens",
    "ubatch_size": "tokens",
    "residency_mode": "which pages stay on the device",
    "arena_auto": "the arena is the largest that works",
    "repeat": "number of the repetition, from 1",
    "draft_generated": "drafted tokens that were verified",
    "draft_accepted": "of those, accepted",
    "acceptance_pct": "their share",
    "mean_verify_width": "rows of a verification, the undrafted one included",
    "rounds": "verifications, or steps without drafts, that were timed: they gave rounds + draft_accepted tokens",
    "arena_mib": "the arena",
    "decode_kv_pool_mib": "of it, room for pages while decoding",
    "decode_workspace_mib": "of it, workspace while decoding",
    "recurrent_mib": "recurrent state, beside the arena",
    "resident_pages": "pages on the device at the end",
    "ring_slots": "slots through which the others pass",
    "active_pages": "pages of the context, all layers",
    "kv_mib": "those pages",
    "streamed_mib_per_pass": "moved to the device in a round (median)",
    "h2d_mib_per_token": "moved to the device per generated token",
    "h2d_calls_per_token": "copies per generated token",
    "h2d_gbps": "10^9 bytes per second moved while decoding",
    "link_gbps": "the same of large copies alone, probed at start",
    "link_share_pct": "h2d_gbps of link_gbps",
    "prefill_tps": "tokens read per second; of a filled context, of the last ones that were read",
    "prefill_link_tps": "the most that the link allows for what was copied meanwhile; empty: nothing was copied",
    "decode_tps": "tokens of the timed rounds by the seconds they took",
    "ms_per_step_p50": "of a round by the host's clock, drafts and sampling included (median)",
    "ms_per_step_p95": "the same, 95th percentile",
    "host_ms": "of a round, what no launch of captured work covers: the host while the GPU has no step to run, and "
               "picking tokens (median); empty on the CPU",
    "compute_floor_ms": "a round with all launches and no copies (median); where nothing is streamed, ms_per_step_p50",
    "link_floor_ms": "streamed_mib_per_pass at link_gbps",
    "step_over_floor": "ms_per_step_p50 / the larger floor: 1 is the limit",
    "first_token_ms": "from the start of the prompt, or of what was read of it last, to the first token",
    "load_ms": "from the start of the work to a ready engine",
    "device_peak_mib": "weights, state, arena and tables; it does not grow after loading",
    "host_history_mib": "the KV history in host memory",
    "device": "where it ran",
    "model": "file or synthetic name",
    "synthetic": "the weights are random",
    "error": "why the point failed; empty: it did not",
    "log": "its log, in the sweep's folder",
    "key": "a hash of all that decides the point, for --resume",
})
