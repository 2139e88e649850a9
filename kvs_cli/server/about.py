"""What the server says of itself and its model: /v1/models, /props, /slots."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvs_cli.server.fields import Fields
from kvs_cli.server.options import Options
from kvs_cli.server.service import Service
from kvs_core.formats.gguf import GgufFile
from kvs_core.settings import HubModel, ServeSettings

_HIDDEN = ("dry_sequence_breakers", "stop", "logit_bias", "grammar", "grammar_lazy", "grammar_triggers",
           "preserved_tokens")


def build_info() -> str:
    """The version, as replies name it."""
    try:
        return f"kvs-{version('kvs-llm')}"
    except PackageNotFoundError:
        return "kvs"


def model_name(settings: ServeSettings, file: GgufFile) -> str:
    """The model's id: the first alias in the alphabet, else what was given as the model."""
    if settings.aliases:
        return min(settings.aliases)
    match settings.engine.model.source:
        case HubModel(repo=repo):
            return repo
        case Path() as path:
            return str(path)
    return file.path.stem


def models_json(service: Service) -> dict[str, Any]:
    """``GET /v1/models``."""
    model, spec = service.model, service.model.spec
    tensors = model.file.tensors.values()
    details = {
        "parent_model": "", "format": "gguf", "family": spec.arch, "families": [spec.arch], "parameter_size": "",
        "quantization_level": _ftype(model.file),
    }  # fmt: skip
    name = service.names.model
    return {
        "models": [{
            "name": name, "model": name, "modified_at": "", "size": "", "digest": "", "type": "model",
            "description": "", "tags": [""], "capabilities": ["completion"], "parameters": "", "details": details,
        }],
        "object": "list",
        "data": [{
            "id": name,
            "aliases": sorted(set(service.settings.aliases)),
            "tags": sorted(set(service.settings.tags)),
            "object": "model",
            "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
            "created": service.created,
            "owned_by": "kvs",
            "meta": {
                "vocab_type": 1 if model.file.metadata.get("tokenizer.ggml.model") == "llama" else 2,
                "n_vocab": spec.n_vocab,
                "n_ctx": service.context.context_tokens,
                "n_ctx_train": spec.n_ctx_train,
                "n_embd": spec.n_embd,
                "n_params": spec.n_params,
                "size": sum(tensor.n_bytes for tensor in tensors),
                "ftype": _ftype(model.file),
            },
        }],
    }  # fmt: skip


def props_json(service: Service) -> dict[str, Any]:
    """``GET /props``."""
    template, settings = service.template, service.settings
    tokenizer = service.model.tokenizer
    return {
        "default_generation_settings": {"params": default_params(service), "n_ctx": service.context.context_tokens},
        "total_slots": 1,
        "model_alias": service.names.model,
        "model_ftype": _ftype(service.model.file),
        "model_path": str(service.model.file.path),
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": "",
        "endpoint_slots": settings.slots,
        "endpoint_props": settings.props,
        "endpoint_metrics": settings.metrics,
        "ui": settings.page,
        "ui_settings": {},
        "chat_template": template.text,
        "chat_template_caps": {
            "supports_object_arguments": template.wants_argument_objects,
            "supports_parallel_tool_calls": template.supports_tools,
            "supports_preserve_reasoning": "preserve_thinking" in template.text or "<think>" in template.text,
            "supports_reasoning_effort": "reasoning_effort" in template.text,
            "supports_string_content": not template.needs_parts,
            "supports_system_role": template.supports_system,
            "supports_tool_calls": template.supports_tools,
            "supports_tools": template.supports_tools,
            "supports_typed_content": template.needs_parts,
        },
        "bos_token": _text(service, tokenizer.bos_id),
        "eos_token": _text(service, tokenizer.eos_id),
        "build_info": service.names.build,
        "is_sleeping": False,
        "cors_proxy_enabled": False,
    }


def slots_json(service: Service) -> list[dict[str, Any]]:
    """``GET /slots``."""
    shown = service.room.view.as_json(service.context.context_tokens)
    if "params" in shown:
        shown["params"] = {key: value for key, value in shown["params"].items() if key not in _HIDDEN}
    return [shown]


def default_params(service: Service) -> dict[str, Any]:
    """The settings of a request that names none."""
    options = Options.read(Fields({}), service.defaults, service.model.tokenizer)
    return {key: value for key, value in options.as_json().items() if key not in _HIDDEN}


def _text(service: Service, token: int | None) -> str:
    return "" if token is None else service.model.tokenizer.token_text(token)


def _ftype(file: GgufFile) -> str:
    """The type that most of the weights have."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        sizes[tensor.quant.name] = sizes.get(tensor.quant.name, 0) + tensor.n_elements
    return max(sizes, key=sizes.__getitem__) if sizes else ""
