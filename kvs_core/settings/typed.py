"""From the table's values to what the rooms receive. Rules between several settings are checked here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvs_core.errors import SettingsError
from kvs_core.settings.drafters import (
    ModelDraftSettings,
    NgramCacheSettings,
    NgramMapSettings,
    NgramModSettings,
    NgramSimpleSettings,
    SpeculativeSettings,
)
from kvs_core.settings.escapes import expand_escapes
from kvs_core.settings.kinds import as_path
from kvs_core.settings.rooms import (
    ALL_LAYERS,
    VERBOSITY_ALL,
    ChatSettings,
    ConstraintSettings,
    ContextSettings,
    DeviceSettings,
    EngineSettings,
    InfoSettings,
    KvSettings,
    LoggingSettings,
    OutputSettings,
    PlanSettings,
    PromptSettings,
    RopeSettings,
    RunSettings,
)
from kvs_core.settings.serving import AccessSettings, CacheSettings, ListenSettings, ReplySettings, ServeSettings
from kvs_core.settings.sources import SYNTHETIC_PREFIX, HubModel, ModelSettings, SyntheticModel, UrlModel
from kvs_core.settings.table import TABLE

Values = Mapping[str, Any]
"""One value for every key of the table, given or default."""


def run_settings(values: Values, explicit: Collection[str], positionals: Sequence[str]) -> RunSettings:
    """Settings of ``kvs run``; ``positionals`` is the prompt file or ``-``. Raises SettingsError."""
    return RunSettings(
        engine=engine_settings(values),
        prompt=_prompt(values, positionals),
        sampling=_sampling(values, explicit),
        chat=_chat(values),
        output=OutputSettings(
            json=values["json"], n_probs=values["n_probs"], special=values["special"], stop=_stops(values)
        ),
        constraint=_constraint(values),
        logging=logging_settings(values),
        session=values["session"],
    )


def info_settings(values: Values, positionals: Sequence[str]) -> InfoSettings:
    """Settings of ``kvs info``; ``positionals`` may be the model instead of ``--model``. Raises SettingsError."""
    values = _with_model(values, positionals)
    return InfoSettings(engine=engine_settings(values), json=values["json"], logging=logging_settings(values))


def plan_settings(values: Values, positionals: Sequence[str]) -> PlanSettings:
    """Settings of ``kvs plan``; ``positionals`` as of ``kvs info``. Raises SettingsError."""
    values = _with_model(values, positionals)
    return PlanSettings(
        engine=engine_settings(values), json=values["json"], plot=values["plot"], measure=values["measure"],
        logging=logging_settings(values),
    )


def _with_model(values: Values, positionals: Sequence[str]) -> Values:
    """The values, with the model that stands in the command line without a flag."""
    if positionals and values["model"] is not None:
        raise SettingsError(f"{positionals[0]} and --model {values['model']} are both models; give one of them")
    return {**values, "model": _path(positionals[0], "MODEL")} if positionals else values


def serve_settings(values: Values, explicit: Collection[str], positionals: Sequence[str]) -> ServeSettings:
    """Settings of ``kvs serve``, which takes no ``positionals``. Raises SettingsError."""
    if positionals:
        raise SettingsError(f"{positionals[0]}: kvs serve takes flags alone; give the model with --model")
    threads = values["threads_http"]
    return ServeSettings(
        engine=engine_settings(values),
        sampling=_sampling(values, explicit),
        chat=_chat(values),
        listen=ListenSettings(
            hosts=values["host"], port=values["port"], ssl_key=values["ssl_key_file"], ssl_cert=values["ssl_cert_file"],
            prefix=values["api_prefix"], timeout_s=values["timeout"], ping_s=values["sse_ping_interval"],
            threads=threads if threads > 0 else None, reuse_port=values["reuse_port"],
        ),
        access=AccessSettings(
            keys=values["api_key"], key_file=values["api_key_file"], cors_origins=values["cors_origins"],
            cors_methods=values["cors_methods"], cors_headers=values["cors_headers"],
            cors_credentials=values["cors_credentials"],
        ),
        replies=ReplySettings(
            stop=_stops(values), special=values["special"], reasoning_format=values["reasoning_format"],
            thought_limit=values["reasoning_budget"], thought_message=values["reasoning_budget_message"] or "",
            preserve_thoughts=values["reasoning_preserve"], parse=not values["skip_chat_parsing"],
            continue_assistant=values["prefill_assistant"], verbose=values["verbose"],
        ),
        cache=CacheSettings(
            reuse=values["cache_prompt"], ram_mib=values["cache_ram"], checkpoints=values["ctx_checkpoints"],
            checkpoint_tokens=values["checkpoint_min_step"], folder=values["slot_save_path"],
        ),
        constraint=_constraint(values),
        logging=logging_settings(values),
        aliases=values["alias"],
        tags=values["tags"],
        metrics=values["metrics"],
        props=values["props"],
        slots=values["slots"],
        spm_infill=values["spm_infill"],
        page=values["ui"],
    )


def engine_settings(values: Values) -> EngineSettings:
    """All that the engine is built from. Raises SettingsError."""
    model = ModelSettings(
        source=_source(values),
        offline=values["offline"],
        override_kv=values["override_kv"],
        scan=values["check_tensors"],
    )
    _check_draft_types(values)
    return EngineSettings(
        model=model,
        context=_context(values),
        kv=KvSettings(
            type_k=values["cache_type_k"],
            type_v=values["cache_type_v"],
            page_tokens=values["page_tokens"],
            arena_mib=values["arena_mib"],
            pool_mib=values["pool_mib"] or None,
            residency_mode=values["residency_mode"],
            ring_slots=values["ring_slots"],
            run_pages=values["run_pages"],
            rotation=values["rotation"],
            fit=values["fit"],
            fit_target_mib=int(values["fit_target"].partition(",")[0]),
            auxiliary_layers=values["auxiliary_layers"],
            window_tokens=values["window_tokens"],
            window_layers=values["window_layers"] or (),
            ring_tiles=values["ring_tiles"],
            swa_full=values["swa_full"],
        ),
        rope=_rope(values),
        device=DeviceSettings(
            name=values["device"],
            main_gpu=values["main_gpu"],
            threads=values["threads"] if values["threads"] > 0 else None,
            gpu_layers={"auto": None, -1: None, "all": ALL_LAYERS}.get(values["gpu_layers"], values["gpu_layers"]),
        ),
        speculative=_speculative(values),
    )


def logging_settings(values: Values) -> LoggingSettings:
    """Where log lines go, and which; ``-v`` is the highest verbosity."""
    return LoggingSettings(
        verbosity=VERBOSITY_ALL if values["verbose"] else values["verbosity"],
        disabled=values["log_disable"],
        file=values["log_file"],
        jsonl=values["log_jsonl"],
        colors=values["log_colors"],
        prefix=values["log_prefix"],
        timestamps=values["log_timestamps"],
    )


def _source(values: Values) -> Path | HubModel | UrlModel | SyntheticModel | None:
    path, repo, url = values["model"], values["hf_repo"], values["model_url"]
    given = {"--model": path, "--hf-repo": repo, "--model-url": url}
    named = [flag for flag, value in given.items() if value is not None]
    if len(named) > 1:
        raise SettingsError(f"{' and '.join(named)} are each a model; give one of them")
    if repo is not None:
        return HubModel(repo, values["hf_file"], values["hf_token"])
    if values["hf_file"] is not None:
        raise SettingsError("--hf-file names a file of a repository; give that with --hf-repo")
    if url is not None:
        return UrlModel(url)
    assert path is None or isinstance(path, Path)
    if str(path).startswith(SYNTHETIC_PREFIX):
        return SyntheticModel(str(path).removeprefix(SYNTHETIC_PREFIX))
    return path


def _context(values: Values) -> ContextSettings:
    ctx_size, cap = values["ctx_size"], values["kv_unified_per_slot"]
    return ContextSettings(
        ctx_size=min(ctx_size or cap, cap) if cap is not None else ctx_size,
        n_predict=values["n_predict"],
        batch=values["batch_size"],
        ubatch=values["ubatch_size"],
        shift=values["context_shift"],
        keep=values["keep"],
    )


def _rope(values: Values) -> RopeSettings:
    scale, freq_scale = values["rope_scale"], values["rope_freq_scale"]
    if scale is not None and freq_scale is not None:
        raise SettingsError("--rope-scale and --rope-freq-scale are each other's inverse; give one of them")
    return RopeSettings(
        scaling=values["rope_scaling"],
        freq_base=values["rope_freq_base"] or None,
        scale=scale,
        freq_scale=freq_scale,
        yarn_orig_ctx=values["yarn_orig_ctx"] or None,
        yarn_ext_factor=_unless_negative(values["yarn_ext_factor"]),
        yarn_attn_factor=_unless_negative(values["yarn_attn_factor"]),
        yarn_beta_slow=_unless_negative(values["yarn_beta_slow"]),
        yarn_beta_fast=_unless_negative(values["yarn_beta_fast"]),
    )


def _unless_negative(value: float) -> float | None:
    return value if value >= 0 else None


def _prompt(values: Values, positionals: Sequence[str]) -> PromptSettings:
    given = {"PROMPT_FILE": positionals[0] if positionals else None, "--prompt": values["prompt"],
             "--file": values["file"]}
    named = [name for name, value in given.items() if value is not None]
    if not named:
        raise SettingsError(
            "no prompt: give PROMPT_FILE, -p TEXT, -f FILE, or - to read it from stdin; for a chat use kvs serve and "
            "its page"
        )
    if len(named) > 1:
        raise SettingsError(f"{' and '.join(named)} are both prompts; give one of them")
    if values["prompt"] is not None:
        text = values["prompt"]
        return PromptSettings(text=expand_escapes(text, "--prompt") if values["escape"] else text)
    path = _path(positionals[0], "PROMPT_FILE") if positionals else values["file"]
    return PromptSettings(file=None if path == Path("-") else path)


def _stops(values: Values) -> tuple[str, ...]:
    escape = values["escape"]
    return tuple(expand_escapes(text, "--reverse-prompt") if escape else text for text in values["reverse_prompt"])


def _path(text: str, name: str) -> Path:
    try:
        return as_path(text)
    except ValueError as error:
        raise SettingsError(f"{name}: {error}") from None


def _chat(values: Values) -> ChatSettings:
    system = values["system_prompt"]
    if system is not None and not values["chat"]:
        raise SettingsError("--system-prompt stands in the chat template, which is not used; add --chat")
    if values["chat_template"] is not None and values["chat_template_file"] is not None:
        raise SettingsError("--chat-template and --chat-template-file exclude each other; give one of them")
    variables: dict[str, object] = dict(values["chat_template_kwargs"] or {})
    if not isinstance(variables.get("enable_thinking", True), bool):
        raise SettingsError("--chat-template-kwargs: enable_thinking is not a boolean; use true or false")
    if values["reasoning"] != "auto":
        variables["enable_thinking"] = values["reasoning"] == "on"
    if values["reasoning_effort"] != "default":
        variables["reasoning_effort"] = values["reasoning_effort"]
    return ChatSettings(
        enabled=values["chat"],
        system_prompt=expand_escapes(system, "--system-prompt") if system is not None and values["escape"] else system,
        template=values["chat_template"],
        template_file=values["chat_template_file"],
        variables=variables,
    )


def _constraint(values: Values) -> ConstraintSettings:
    return ConstraintSettings(
        values["grammar"], values["grammar_file"], values["json_schema"], values["json_schema_file"]
    )


def _sampling(values: Values, explicit: Collection[str]) -> dict[str, object]:
    """Explicit values under their API names. Lists are lists, as in JSON; ``samplers`` may be a string of letters."""
    if "samplers" in explicit and "sampler_seq" in explicit:
        raise SettingsError("--samplers and --sampler-seq both set the samplers; give one of them")
    chosen: dict[str, object] = {}
    for setting in TABLE:
        if setting.api and setting.key in explicit:
            value = values[setting.key]
            chosen[setting.api] = list(value) if isinstance(value, tuple) else value
    breakers = chosen.get("dry_sequence_breakers")
    if isinstance(breakers, list):
        texts = [text for text in breakers if text != "none"]
        chosen["dry_sequence_breakers"] = [
            expand_escapes(text, "--dry-sequence-breaker") if values["escape"] else text for text in texts]
    return chosen


def _check_draft_types(values: Values) -> None:
    for letter, draft, main in (("k", values["spec_draft_type_k"], values["cache_type_k"]),
                                ("v", values["spec_draft_type_v"], values["cache_type_v"])):
        if draft not in (None, main):
            raise SettingsError(f"--spec-draft-type-{letter} {draft}: drafts share the type of the cache, "
                                f"{main}; leave it out or use {main}")


def _speculative(values: Values) -> SpeculativeSettings:
    types = [name for name in values["spec_type"] if name != "none"]
    mod = NgramModSettings(values["spec_ngram_mod_n_match"], values["spec_ngram_mod_n_min"],
                           values["spec_ngram_mod_n_max"])
    if values["spec_default"]:
        if mod != NgramModSettings():
            raise SettingsError(f"--spec-default is ngram-mod that matches 24 tokens and drafts 48 to 64, the flags of "
                                f"ngram-mod say {mod.n_match} and {mod.n_min} to {mod.n_max}; use --spec-type "
                                "ngram-mod with them instead")
        types.append("ngram-mod")
    return SpeculativeSettings(
        types=tuple(types),
        ngram_simple=NgramSimpleSettings(values["spec_ngram_simple_size_n"], values["spec_ngram_simple_size_m"]),
        ngram_map_k=NgramMapSettings(values["spec_ngram_map_k_size_n"], values["spec_ngram_map_k_size_m"]),
        ngram_map_k4v=NgramMapSettings(values["spec_ngram_map_k4v_size_n"], values["spec_ngram_map_k4v_size_m"],
                                       values["spec_ngram_map_k4v_min_hits"]),
        ngram_mod=mod,
        ngram_cache=NgramCacheSettings(values["lookup_cache_static"], values["lookup_cache_dynamic"]),
        draft=ModelDraftSettings(
            n_max=values["spec_draft_n_max"],
            n_min=values["spec_draft_n_min"],
            p_min=values["spec_draft_p_min"],
            sampling=values["spec_draft_sampling"],
        ),
        adaptive=values["spec_adaptive"],
        synth_len=values["spec_synth_len"],
        synth_rates=values["spec_synth_rates"],
    )
