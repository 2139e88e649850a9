"""How a request wants its text made: the fields of every completion route, with llama-server's defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from kvs_cli.server.errors import bad_request
from kvs_cli.server.fields import Fields, refuse
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.sampling.params import RANDOM_SEED, SamplingParams

_WHOLE = ("top_k", "repeat_last_n", "dry_allowed_length", "dry_penalty_last_n", "mirostat", "min_keep")
_NUMBERS = (
    "temperature", "dynatemp_range", "dynatemp_exponent", "top_p", "min_p", "top_n_sigma", "typical_p",
    "xtc_probability", "xtc_threshold", "repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier",
    "dry_base", "mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay",
)
_MAX_STOPS = 256


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds where a request says nothing: the model's sampling and the server's flags. grammar, json_schema: for
    requests with a rule of neither kind."""

    sampling: SamplingParams
    n_predict: int = -1
    stop: tuple[str, ...] = ()
    grammar: str = ""
    json_schema: Mapping[str, Any] | None = None
    cache_prompt: bool = True
    n_keep: int = 0
    ping_s: int = 30
    thought_limit: int = -1
    thought_message: str = ""
    verbose: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """One request's wishes, checked. ``n_predict`` as asked, -1: no limit; n_keep, n_discard: see ``ContextShift``."""

    sampling: SamplingParams
    n_predict: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_progress: bool
    timings_per_token: bool
    return_tokens: bool
    cache_prompt: bool
    n_keep: int
    n_discard: int
    post_sampling_probs: bool
    t_max_predict_ms: int
    response_fields: tuple[str, ...]
    grammar: str
    json_schema: Mapping[str, Any] | None
    thought_limit: int
    thought_message: str
    ping_s: int
    verbose: bool

    @property
    def tokens_at_most(self) -> int:
        """For ``generate``: as in llama-server, 0 still makes one token."""
        return max(1, self.n_predict) if self.n_predict >= 0 else -1

    @staticmethod
    def read(body: Fields, defaults: Defaults, tokenizer: Tokenizer) -> Options:
        """From a request. ApiError 400 for what is of another type, SettingsError for numbers out of range."""
        limit = body.first("n_predict", "max_completion_tokens", "max_tokens")
        asked = body.whole(limit, -1, least=-1)
        if body.whole(body.first("n_cmpl", "n"), 1) != 1:
            raise bad_request(f"Field '{body.first('n_cmpl', 'n')}': Value must be between 1 <= value <= 1")
        if body.array("lora"):
            raise bad_request("Field 'lora': kvs applies no adapters; leave it out")
        body.whole("id_slot", -1)   # there is one slot, and any number means it
        thoughts = body.first("reasoning_budget_tokens", "thinking_budget_tokens")
        limit_asked = body.whole(thoughts, -1, least=-1)
        ruled = "grammar" in body or "json_schema" in body
        return Options(
            sampling=_sampling(body, defaults.sampling, tokenizer),
            n_predict=asked if asked >= 0 else defaults.n_predict,
            stop=_stops(body) or defaults.stop,
            stream=body.flag("stream", False),
            include_usage=body.object("stream_options").flag("include_usage", False),
            return_progress=body.flag("return_progress", False),
            timings_per_token=body.flag("timings_per_token", False),
            return_tokens=body.flag("return_tokens", False),
            cache_prompt=body.flag("cache_prompt", defaults.cache_prompt),
            n_keep=body.whole("n_keep", defaults.n_keep, least=-1),
            n_discard=body.whole("n_discard", 0, least=0),
            post_sampling_probs=body.flag("post_sampling_probs", False),
            t_max_predict_ms=body.whole("t_max_predict_ms", -1),
            response_fields=_texts(body, "response_fields"),
            grammar=body.text("grammar") if ruled else defaults.grammar,
            json_schema=_schema(body) if ruled else defaults.json_schema,
            thought_limit=limit_asked if limit_asked >= 0 else defaults.thought_limit,
            thought_message=body.text("reasoning_budget_message", defaults.thought_message),
            ping_s=body.whole("sse_ping_interval", defaults.ping_s, least=-1),
            verbose=body.flag("verbose", defaults.verbose),
        )

    def as_json(self) -> dict[str, Any]:
        """``generation_settings``, key by key as llama-server echoes them."""
        p = self.sampling
        settings: dict[str, Any] = {}
        for field in fields(p):
            if field.name in ("samplers", "logit_bias", "ignore_eos", "n_probs", "min_keep", "dry_sequence_breakers"):
                continue
            value = getattr(p, field.name)
            settings[field.name] = float(np.float32(value)) if isinstance(value, float) else value
        bias = [{"bias": None if amount == -math.inf else float(np.float32(amount)), "token": token}
                for token, amount in p.logit_bias]
        return settings | {
            "dry_sequence_breakers": list(p.dry_sequence_breakers),
            "stop": list(self.stop),
            "max_tokens": self.n_predict,
            "n_predict": self.n_predict,
            "n_keep": self.n_keep,
            "n_discard": self.n_discard,
            "ignore_eos": p.ignore_eos,
            "stream": self.stream,
            "logit_bias": bias,
            "n_probs": p.n_probs,
            "min_keep": p.min_keep,
            "grammar": self.grammar,
            "grammar_lazy": False,
            "grammar_triggers": [],
            "preserved_tokens": [],
            "samplers": list(p.samplers),
            "timings_per_token": self.timings_per_token,
            "post_sampling_probs": self.post_sampling_probs,
            "backend_sampling": False,
            "lora": [],
        }


def _sampling(body: Fields, base: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    changes: dict[str, Any] = {}
    for name in _WHOLE:
        if name in body:
            changes[name] = body.whole(name, 0)
    for name in _NUMBERS:
        if name in body:
            changes[name] = body[name]
    if "seed" in body:
        changes["seed"] = body.whole("seed", -1) & RANDOM_SEED   # as uint32, the way clients' larger ones are read
    if "ignore_eos" in body:
        changes["ignore_eos"] = body.flag("ignore_eos", False)
    if "logit_bias" in body:
        changes["logit_bias"] = _logit_bias(body["logit_bias"], tokenizer)
    if "samplers" in body:
        changes["samplers"] = body["samplers"]
    if "dry_sequence_breakers" in body:
        breakers = _texts(body, "dry_sequence_breakers")
        if not breakers:
            raise bad_request("Field 'dry_sequence_breakers': must be a non-empty array of strings")
        changes["dry_sequence_breakers"] = breakers
    probs = body.first("n_probs", "logprobs")
    if not isinstance(body.get(probs), bool):   # a chat request's switch is not for here
        changes["n_probs"] = body.whole(probs, base.n_probs, least=0)
    return replace(base, **changes)


def _logit_bias(given: object, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Pairs of a token, or a text whose tokens are all meant, and a number, or false for never."""
    pairs: list[tuple[object, object]] = []
    if isinstance(given, dict):
        pairs = list(given.items())
    elif isinstance(given, list):
        for entry in given:
            if not isinstance(entry, list) or len(entry) != 2:
                refuse("logit_bias", entry, "pairs of a token and a bias")
            pairs.append((entry[0], entry[1]))
    else:
        refuse("logit_bias", given, "an array of pairs, or an object")
    biases: list[tuple[int, float]] = []
    for what, amount in pairs:
        if amount is False:
            bias = -math.inf
        elif isinstance(amount, int | float) and not isinstance(amount, bool):
            bias = float(min(max(amount, -3e38), 3e38))
        else:
            refuse("logit_bias", amount, "a number or false as a bias")
        if isinstance(what, str) and not (isinstance(given, dict) and what.isascii() and what.isdecimal()):
            tokens = tokenizer.encode(what, add_special=False, parse_special=False)
        elif isinstance(what, int | str) and not isinstance(what, bool):
            tokens = [int(what)] if len(str(what)) < 12 else []
        else:
            refuse("logit_bias", what, "a token's number or a text")
        biases += [(token, bias) for token in tokens if 0 <= token < tokenizer.n_vocab]
    return tuple(biases)


def _stops(body: Fields) -> tuple[str, ...]:
    if isinstance(body.get("stop"), str):
        return (body.text("stop"),)
    stops = _texts(body, "stop")
    if len(stops) > _MAX_STOPS:
        raise bad_request(f"Field 'stop': {len(stops)} strings, at most {_MAX_STOPS} are looked for")
    return stops


def _texts(body: Fields, name: str) -> tuple[str, ...]:
    texts = body.array(name)
    for text in texts:
        if not isinstance(text, str):
            refuse(name, text, "an array of strings")
    return tuple(texts)


def _schema(body: Fields) -> Mapping[str, Any] | None:
    value = body.get("json_schema")
    if value is None or body.get("grammar"):
        return None
    return value if isinstance(value, dict) else refuse("json_schema", value, "an object")
