"""``kvs info``: what is in a model file, and the memory that a context and an arena take. No weights are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvs_cli.open_model import OpenModel, open_model, plan_context
from kvs_cli.plan.text import full_arena, mib_up
from kvs_cli.render import Screen, print_json, print_sections
from kvs_core.device.cuda.weights import part_bytes as cuda_part_bytes
from kvs_core.device.host.machine import available_ram_bytes
from kvs_core.device.host.parts import part_bytes as host_part_bytes
from kvs_core.engine.arena_size import arena_for
from kvs_core.engine.budget import Budget, plan_budget
from kvs_core.engine.split import Splits
from kvs_core.memory.phases import Phase
from kvs_core.models.recurrent import state_bytes
from kvs_core.models.spec import ExpertSpec, LayerSpec, ModelSpec
from kvs_core.paging.residency import Observation, ResidencyState, residency_step
from kvs_core.paging.weight_ring import ALL_STAY, WeightSplit
from kvs_core.sampling.params import METADATA_PARAMS, SamplingParams
from kvs_core.settings import DeviceSettings, EngineSettings, InfoSettings, KvSettings
from kvs_core.units import MIB, mib_ceil

Section = dict[str, Any]


def execute(settings: InfoSettings) -> int:
    """Print it; the exit code. Raises ``KvsError``, also for an arena that could not run this context."""
    model = open_model(settings.engine.model, Screen.of(settings.logging), settings.engine.rope)
    plan_context(model, settings.engine)
    split = _split(model, settings.engine.device)
    budget = plan_budget(
        model.spec, settings.engine.context, settings.engine.kv, free_bytes=available_ram_bytes(),
        ring_bytes=split.ring.size_bytes,
    )
    facts = _facts(model, settings.engine, budget, split)
    if settings.json:
        print_json(facts)
    else:
        print_sections(_sections(facts))
    return 0


def _split(model: OpenModel, device: DeviceSettings) -> WeightSplit:
    """As asked; how many layers fit is a matter of the device, which ``info`` does not look for."""
    layers = device.layers_on(is_host=device.wants_cpu)
    if layers is None:
        return ALL_STAY
    return Splits(model.file, model.spec, host_part_bytes if device.wants_cpu else cuda_part_bytes).at(layers)


def _facts(model: OpenModel, settings: EngineSettings, budget: Budget, split: WeightSplit) -> Section:
    """Everything that ``info`` knows, as ``--json`` prints it. Sizes in bytes unless the name says otherwise."""
    return {
        "synthetic": model.file.synthetic,
        "model": _model(model),
        "layers": _layers(model),
        "tokenizer": _tokenizer(model),
        "sampling": _sampling(model),
        "kv": {
            "type_k": settings.kv.type_k,
            "type_v": settings.kv.type_v,
            "layers": len(model.spec.kv_layers),
            "token_bytes": sum(budget.pages.token_bytes(model.spec.kv_layers)),
            "page_tokens": budget.geometry.page_tokens,
            "page_bytes": budget.geometry.page_bytes,
            "sliding_page_bytes": None if budget.pages.sliding is None else budget.pages.sliding.page_bytes,
            "state_bytes": state_bytes(model.spec),
        },
        "weights": {
            "layers": model.spec.n_layer,
            "streamed_layers": list(split.passing),
            "streamed_bytes": split.pass_bytes,
            "ring_bytes": split.ring.size_bytes,
        },
        "plan": _plan(budget, settings.kv, model.spec),
    }


def _model(model: OpenModel) -> Section:
    file, spec = model.file, model.spec
    tensors = Counter(info.quant.name for info in file.tensors.values())
    quant_bytes: Counter[str] = Counter()
    for info in file.tensors.values():
        quant_bytes[info.quant.name] += info.n_bytes
    return {
        "path": str(file.path),
        "name": spec.name,
        "arch": spec.arch,
        "n_params": spec.n_params,
        "file_bytes": file.file_bytes,
        "quants": [
            {"type": name, "tensors": tensors[name], "bytes": size} for name, size in quant_bytes.most_common()
        ],
        "n_ctx_train": spec.n_ctx_train,
        "n_layer": spec.n_layer,
        "n_embd": spec.n_embd,
        "n_ff": spec.n_ff,
        "experts": _experts(spec.experts),
        "n_vocab": spec.n_vocab,
    }


def _experts(experts: ExpertSpec | None) -> Section | None:
    if experts is None:
        return None
    return {"count": experts.count, "used": experts.used, "n_ff": experts.n_ff, "n_shared": experts.n_shared}


def _layers(model: OpenModel) -> list[Section]:
    """Layers that are alike, together."""
    alike: dict[tuple[Any, ...], Section] = {}
    trunk, nextn = model.spec.layers, model.spec.nextn
    for kind, layer in [*((layer.kind.value, layer) for layer in trunk), *(("mtp", layer) for layer in nextn)]:
        shape = _shape(layer)
        group = alike.setdefault((kind, *shape.items()), {"kind": kind, "indices": [], **shape})
        group["indices"].append(layer.index)
    return list(alike.values())


def _shape(layer: LayerSpec) -> Section:
    if layer.gdn is not None:
        gdn = layer.gdn
        return {"k_heads": gdn.k_heads, "v_heads": gdn.v_heads, "k_dim": gdn.d_k, "v_dim": gdn.d_v}
    return {
        "heads": layer.heads, "kv_heads": layer.kv_heads, "k_dim": layer.k_dim, "v_dim": layer.v_dim,
        "window": layer.window or None,
    }


def _tokenizer(model: OpenModel) -> Section:
    file, tokenizer = model.file, model.tokenizer
    return {
        "model": file.get_str("tokenizer.ggml.model"),
        "pre": file.get_str("tokenizer.ggml.pre", None),
        "n_vocab": tokenizer.n_vocab,
        "bos": _token(model, tokenizer.bos_id),
        "eos": _token(model, tokenizer.eos_id),
        "eog": [_token(model, token) for token in sorted(tokenizer.eog_ids)],
        "add_bos": tokenizer.add_bos,
        "add_eos": tokenizer.add_eos,
        "chat_template": "tokenizer.chat_template" in file.metadata,
    }


def _token(model: OpenModel, token: int | None) -> Section | None:
    return None if token is None else {"id": token, "text": model.tokenizer.token_text(token)}


def _sampling(model: OpenModel) -> Section:
    """Defaults under their request names; ``from_model``: those that the file sets."""
    params = SamplingParams.resolve(model.file.metadata, {})
    named = [name for key, name in METADATA_PARAMS.items() if f"general.sampling.{key}" in model.file.metadata]
    shown = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "repeat_penalty", *named))
    return {"from_model": named, **{name: getattr(params, name) for name in shown}}


def _plan(budget: Budget, kv: KvSettings, spec: ModelSpec) -> Section:
    """The memory plan. The streamed pages are those of a decode step at the context's end."""
    layers = len(spec.kv_layers)
    memory, geometry, context = budget.memory, budget.geometry, budget.context
    pages = geometry.pages_of(context.context_tokens)
    config = budget.residency
    seen = Observation(
        pages, writable_page=(context.context_tokens - 1) // geometry.page_tokens, pool_slots=memory.slots(Phase.DECODE)
    )
    full = residency_step(config, ResidencyState(cuts=(0,) * layers), seen)
    streamed = sum(full.cuts[layer.kv_index] for layer in spec.layers if layer.kv_index is not None)
    return {
        "context_tokens": context.context_tokens,
        "batch_tokens": context.batch_tokens,
        "ubatch_tokens": context.ubatch_tokens,
        "mode": budget.mode.value,
        "arena_bytes": memory.arena_bytes,
        "arena_is_chosen": kv.arena_mib in (None, "auto") and kv.pool_mib is None,
        "least_arena_mib": mib_ceil(arena_for(memory, budget.need.least_slots)),
        "full_arena_mib": mib_ceil(arena_for(memory, budget.need.all_slots)),
        "phases": {
            phase.value: {
                "workspace_bytes": budget.buffers[phase].size_bytes,
                "pool_slots": memory.slots(phase),
                "sliding_pool_slots": budget.need.sliding_slots,
            }
            for phase in Phase
        },
        "pages": sum(budget.history_pages()),
        "history_bytes": budget.history_bytes(budget.pages.page_bytes(spec.kv_layers)),
        "history_checkpoint_bytes": budget.checkpoint_bytes(budget.pages.page_bytes(spec.kv_layers)),
        "streamed_pages_per_step": streamed,
        "streamed_bytes_per_step": streamed * geometry.page_bytes,
        "ring_slots": full.ring_slots,
        "layers": [_planned(layer, spec, budget, pages, full) for layer in spec.layers],
    }


def _planned(layer: LayerSpec, spec: ModelSpec, budget: Budget, pages: int, state: ResidencyState) -> Section:
    """What a layer keeps at the context's end, and where: of its ``pages``, those before its cut stream, and those that
    a sliding window has passed are in host memory alone."""
    planned = {"index": layer.index, "kind": layer.kind.value, "window": layer.window or None, "reads_layer": None}
    if layer.shares and layer.kv_index is not None:
        planned["reads_layer"] = spec.kv_layers[layer.kv_index].index
    if layer.kv_index is None or layer.shares:
        return {**planned, "kv_token_bytes": 0, "resident_pages": 0, "streamed_pages": 0}
    streamed = state.cuts[layer.kv_index]
    passed = state.first_pages[layer.kv_index] if state.first_pages else 0
    return {
        **planned, "kv_token_bytes": budget.pages.geometry(layer).token_bytes,
        "resident_pages": pages - streamed - passed, "streamed_pages": streamed,
    }


def _for_checkpoints(size_bytes: int) -> str:
    return f", and up to {mib_up(size_bytes)} for each checkpoint" if size_bytes else ""


def _sections(facts: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The same for people."""
    model, kv, plan = facts["model"], facts["kv"], facts["plan"]
    tokenizer, sampling = facts["tokenizer"], facts["sampling"]
    phases = plan["phases"]
    chosen = " (chosen)" if plan["arena_is_chosen"] else ""
    return {
        "Model": {
            "name": model["name"],
            "architecture": model["arch"],
            "parameters": f"{model['n_params'] / 1e6:,.1f} million",
            "file": f"{model['path']}, {_mib(model['file_bytes'])}",
            **({"weights": "random: a synthetic model"} if facts["synthetic"] else {}),
            "tensors": ", ".join(f"{q['tensors']} {q['type']} of {_mib(q['bytes'])}" for q in model["quants"]),
            "context": f"{model['n_ctx_train']:,} tokens trained",
            "sizes": f"embedding {model['n_embd']}, {_width(model)}, vocabulary {model['n_vocab']}",
        },
        "Layers": _layer_lines(facts["layers"]),
        "Tokenizer": {
            "kind": " / ".join(filter(None, (tokenizer["model"], tokenizer["pre"]))),
            "begins text": f"{_name(tokenizer['bos'])}{'' if tokenizer['add_bos'] else ', not added'}",
            "ends text": ", ".join(map(_name, tokenizer["eog"])) or "none",
            "chat template": "yes" if tokenizer["chat_template"] else "no",
        },
        "Sampling defaults": {
            name: f"{value}{' (of the model)' if name in sampling['from_model'] else ''}"
            for name, value in sampling.items() if name != "from_model"
        },
        "KV cache": {
            "types": f"K {kv['type_k']}, V {kv['type_v']}",
            "per token": f"{kv['token_bytes']:,} bytes in {kv['layers']} layers",
            "page": f"{kv['page_tokens']} tokens of one layer, {_page_sizes(kv)}",
            "recurrent state": _mib(kv["state_bytes"]) if kv["state_bytes"] else "none",
        },
        "Memory plan": {
            "context": f"{plan['context_tokens']:,} tokens, read in ubatches of {plan['ubatch_tokens']}",
            "arena": f"{_mib(plan['arena_bytes'])}{chosen}; least {plan['least_arena_mib']} MiB, "
                     f"{full_arena(plan['mode'])} from {plan['full_arena_mib']} MiB",
            **{
                name: f"workspace {_mib(phase['workspace_bytes'])}, room for {_room(phase)}"
                for name, phase in phases.items()
            },
            **_streamed_weights(facts["weights"]),
            "full context": f"{plan['pages']} pages, {_mib(plan['history_bytes'])} of history in host memory"
                            f"{_for_checkpoints(plan['history_checkpoint_bytes'])}",
            "then streamed": f"{plan['streamed_pages_per_step']} pages, {_mib(plan['streamed_bytes_per_step'])} per "
                             f"token through a ring of {plan['ring_slots']}"
            if plan["streamed_pages_per_step"] else "nothing: all pages are resident",
        },
        "Layers at the full context": _planned_lines(plan["layers"]),
    }


def _streamed_weights(weights: Section) -> dict[str, str]:
    streamed, layers = weights["streamed_layers"], weights["layers"]
    if not streamed:
        return {}
    return {
        "weights": f"{layers - len(streamed)} of {layers} layers resident; {_mib(weights['streamed_bytes'])} streamed "
                   f"per step through {_mib(weights['ring_bytes'])} of the arena",
    }


def _page_sizes(kv: Section) -> str:
    sliding = kv["sliding_page_bytes"]
    shared = f"{kv['page_bytes']:,} bytes"
    return f"{shared}, or {sliding:,} bytes where it sees a window" if sliding else shared


def _room(phase: Section) -> str:
    sliding = phase["sliding_pool_slots"]
    return f"{phase['pool_slots']} pages" + (f" and {sliding} of layers that see a window" if sliding else "")


def _width(model: Section) -> str:
    experts = model["experts"]
    if experts is None:
        return f"feed-forward {model['n_ff']}"
    shared = f" and one of {experts['n_shared']} for all" if experts["n_shared"] else ""
    dense = f" beside a feed-forward of {model['n_ff']}" if model["n_ff"] else ""
    return f"{experts['used']} of {experts['count']} experts of {experts['n_ff']}{shared}{dense}"


def _layer_lines(groups: list[Section]) -> dict[str, str]:
    lines: dict[str, str] = {}
    for group in groups:
        sizes = f"heads of {group['k_dim']}" if group["k_dim"] == group["v_dim"] else (
            f"heads of {group['k_dim']} (K) and {group['v_dim']} (V)")
        if group["kind"] == "recurrent":
            text = f"{group['v_heads']} states on {group['k_heads']} key heads, {sizes}"
        else:
            text = f"{group['heads']} query heads on {group['kv_heads']} KV heads, {sizes}"
        lines[f"{len(group['indices'])} {_kind(group)}"] = text
    return lines


def _planned_lines(layers: list[Section]) -> dict[str, str]:
    """Layers that are alike, together, in the order of the first ones."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for layer in layers:
        facts = (
            _kind(layer), layer["kv_token_bytes"], layer["resident_pages"], layer["streamed_pages"],
            layer["reads_layer"],
        )
        alike.setdefault(facts, []).append(layer["index"])
    return {
        _numbers(indices): f"{kind}, {token_bytes:,} bytes of KV per token; {resident} pages resident, "
                           f"{streamed} streamed"
        if token_bytes else f"{kind}, {_of_others(read)}"
        for (kind, token_bytes, resident, streamed, read), indices in alike.items()
    }


def _of_others(layer: int | None) -> str:
    """What a layer without KV of its own has."""
    return "a state of fixed size and no KV" if layer is None else f"reads the KV of layer {layer}"


def _kind(layer: Section) -> str:
    """``full``, or ``last 1,024 tokens`` of a layer that sees but these."""
    window = layer.get("window")
    return f"last {window:,} tokens" if window else str(layer["kind"])


def _numbers(indices: list[int]) -> str:
    """``3``, ``0-5``, or ``3-27 (7)``: first and last, and how many of those between."""
    first, last, count = indices[0], indices[-1], len(indices)
    span = f"{first}-{last}" if count > 1 else f"{first}"
    return span if count == last - first + 1 else f"{span} ({count})"


def _name(token: Section | None) -> str:
    return "none" if token is None else f"{token['text']} ({token['id']})"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.1f} MiB"
