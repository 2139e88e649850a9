"""Settings of the KV cache: types, arena, residency and what moves."""

from __future__ import annotations

from functools import partial

from kvs_core.settings.kinds import ON_OFF, ON_OFF_AUTO, SWITCH, choice, integer, number
from kvs_core.settings.rooms import KV_TYPES
from kvs_core.settings.setting import Group, Rule, Setting

_PAGES = 1 << 24
_MIB = 1 << 24

_kv = partial(Setting, group=Group.KV)

_NO_WINDOW = "window mode is not in this version; use --kv-residency-mode adaptive"

SETTINGS = (
    _kv("arena_mib", ("--kv-stream-arena-mib", "--shared-device-memory-mib"),
        integer(1, _MIB, words=("auto",)),
        "Device memory for KV pages and all workspaces, to the byte; weights are outside it. What does not fit is "
        "streamed from host RAM, with the same text. auto: all that is free once the weights are loaded, but for "
        "--fit-target; unset: a fair part of what is free. Neither takes more than the whole context needs.",
        unit="MiB", env="LLAMA_ARG_SHARED_DEVICE_MEMORY_MIB"),
    _kv("pool_mib", ("--kv-stream-pool-mib",), integer(0, _MIB),
        "Instead of an arena: memory for KV pages alone, with the workspaces outside it. 0: use the arena.",
        default=0, unit="MiB"),
    _kv("cache_type_k", ("-ctk", "--cache-type-k"), choice(*KV_TYPES),
        "Type in which keys are stored. Smaller types mean fewer bytes to move per token.",
        default="f16", env="LLAMA_ARG_CACHE_TYPE_K"),
    _kv("cache_type_v", ("-ctv", "--cache-type-v"), choice(*KV_TYPES),
        "Type in which values are stored; they bear fewer bits than keys.",
        default="f16", env="LLAMA_ARG_CACHE_TYPE_V"),
    _kv("residency_mode", ("--kv-residency-mode",), choice("adaptive", "window", "resident"),
        "Which pages stay on the device: adaptive keeps the newest and streams the rest, resident keeps all of them or "
        "refuses.",
        default="adaptive",
        refuse=(Rule(_NO_WINDOW, only=("window",)),)),
    _kv("page_tokens", ("--kv-page-tokens",), integer(32, 1 << 16, sample="256"),
        "Tokens in one page, a multiple of 32.",
        default=256, unit="tokens"),
    _kv("ring_slots", ("--kv-stream-ring-slots",), integer(0, _PAGES),
        "Pages in the ring through which streamed pages pass; 0: as many as keep the link busy.",
        default=0, unit="pages"),
    _kv("run_pages", ("--kv-stream-run-pages",), integer(0, _PAGES),
        "Pages moved by one copy; 0: enough for copies of several MiB.",
        default=0, unit="pages"),
    _kv("rotation", ("--kv-rotation",), ON_OFF,
        "Store quantised keys and values rotated by a Hadamard transform: far better text at q4_0 for little work.",
        default=True, env_off="LLAMA_ATTN_ROT_DISABLE"),
    _kv("flash_attn", ("-fa", "--flash-attn"), ON_OFF_AUTO,
        "Attention in one pass over pages, without a full score matrix. It is the only kind here.",
        default="auto", env="LLAMA_ARG_FLASH_ATTN",
        refuse=(Rule("streamed pages and quantised V need it; use --flash-attn on", only=("off",)),)),
    _kv("window_tokens", ("--kv-window-tokens",), integer(0, 1 << 31),
        "Window mode: newest tokens of a layer that stay on the device.",
        unit="tokens",
        refuse=(Rule(_NO_WINDOW),)),
    _kv("window_layers", ("--kv-window-layers",), integer(0, 1 << 16),
        "Window mode: layers that have a window.",
        unit="layers",
        refuse=(Rule(_NO_WINDOW),)),
    _kv("ring_tiles", ("--kv-stream-ring-tiles",), integer(2, 4, sample="2"),
        "Window mode: tiles of its fixed ring.",
        refuse=(Rule(_NO_WINDOW),)),
    _kv("auxiliary_layers", ("--kv-stream-auxiliary-layers",), integer(0, 1 << 16),
        "Count of MTP layers with KV; it comes from the model file and has to agree.",
        unit="layers"),
    _kv("no_rs_rollback", ("--no-kv-stream-rs-rollback",), SWITCH,
        "Switch off snapshots of recurrent state.",
        default=False, relevance="accept", env="LLAMA_ARG_NO_KV_STREAM_RS_ROLLBACK",
        note=(Rule("taking back rows needs no snapshots"),)),
    _kv("swa_full", ("--swa-full",), SWITCH,
        "Keep the whole history of sliding-window layers.",
        default=False, relevance="accept", env="LLAMA_ARG_SWA_FULL",
        note=(Rule("no supported model has sliding-window layers"),)),
    _kv("kv_unified", ("-kvu", "--kv-unified"), SWITCH,
        "One KV pool for all slots.",
        default=True, relevance="accept", env="LLAMA_ARG_KV_UNIFIED", off=("-no-kvu", "--no-kv-unified"),
        note=(Rule("there is one slot, so its pool is shared with nobody"),)),
    _kv("defrag_thold", ("-dt", "--defrag-thold"), number(),
        "Fragmentation at which the cache is tidied; deprecated.",
        relevance="accept", env="LLAMA_ARG_DEFRAG_THOLD",
        note=(Rule("deprecated: pages do not fragment"),)),
    _kv("kv_offload", ("-kvo", "--kv-offload"), SWITCH,
        "Keep the KV cache on the device.",
        default=True, relevance="reject", env="LLAMA_ARG_KV_OFFLOAD", off=("-nkvo", "--no-kv-offload"),
        refuse=(Rule("attention always reads pages from the device's arena; bound it with --kv-stream-arena-mib "
                     "N", only=(False,)),)),
)
