"""Settings of the KV cache: types, arena, residency and what moves."""

from __future__ import annotations

import re
from functools import partial

from kvs_core.settings.kinds import ON_OFF, ON_OFF_AUTO, SWITCH, Kind, choice, integer, number, shown, split_csv
from kvs_core.settings.rooms import KV_TYPES, LayerWindow
from kvs_core.settings.setting import Group, Rule, Setting

_PAGES = 1 << 24
_MIB = 1 << 24

_kv = partial(Setting, group=Group.KV)

_MOST_LAYERS = 1 << 16


def _as_layer_windows(text: str) -> tuple[LayerWindow, ...]:
    """``0-4=all,5-47=4096``: layers and what stays of them. A layer is named once."""
    windows: list[LayerWindow] = []
    for part in split_csv(text):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?\s*=\s*(all|[0-9]{1,10})", part)
        if match is None:
            raise ValueError(f"expected layers and tokens such as 0-4=all or 7=4096, got {shown(part)}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= _MOST_LAYERS:
            raise ValueError(f"layers {first}-{last}: the first one comes first, and none is above {_MOST_LAYERS - 1}")
        for other in windows:
            if first <= other.last and other.first <= last:
                raise ValueError(f"layer {max(first, other.first)} is named twice")
        windows.append(LayerWindow(first, last, None if match[3] == "all" else int(match[3])))
    return tuple(windows)


_LAYER_WINDOWS = Kind("LAYERS=N|all,...", ("5-47=4096", "0-4=all,5-47=4096"), _as_layer_windows, many=True)

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
        "Which pages stay on the device: adaptive keeps as many of the newest as fit and streams the rest, window "
        "keeps what --kv-window-tokens and --kv-window-layers say, resident keeps all of them or refuses.",
        default="adaptive"),
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
    _kv("window_tokens", ("--kv-window-tokens",), integer(0, 1 << 31, sample="4096"),
        "Window mode: newest tokens of a layer that stay on the device; the rest is streamed, with the same text.",
        unit="tokens"),
    _kv("window_layers", ("--kv-window-layers",), _LAYER_WINDOWS,
        "Window mode: windows of single layers, instead of --kv-window-tokens: 0-4=all,5-47=4096."),
    _kv("ring_tiles", ("--kv-stream-ring-tiles",), integer(2, 4, sample="2"),
        "Window mode: tiles of its fixed ring; a tile is a run of --kv-stream-run-pages pages. Unset: what the arena "
        "has room for, up to 4."),
    _kv("auxiliary_layers", ("--kv-stream-auxiliary-layers",), integer(0, 1 << 16),
        "Count of MTP layers with KV; it comes from the model file and has to agree.",
        unit="layers"),
    _kv("no_rs_rollback", ("--no-kv-stream-rs-rollback",), SWITCH,
        "Switch off snapshots of recurrent state.",
        default=False, relevance="accept", env="LLAMA_ARG_NO_KV_STREAM_RS_ROLLBACK",
        note=(Rule("taking back rows needs no snapshots"),)),
    _kv("swa_full", ("--swa-full",), SWITCH,
        "Keep in host memory what sliding-window layers have passed: a prompt then goes back to any place in the text, "
        "not to checkpoints alone. --context-shift keeps it too.",
        default=False, env="LLAMA_ARG_SWA_FULL"),
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
