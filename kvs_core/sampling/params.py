"""SamplingParams: everything that decides how logits become a token, under llama-server's names and defaults."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from kvs_core.errors import SettingsError
from kvs_core.sampling.candidates import FLOAT32_MAX
from kvs_core.sampling.names import DEFAULT_SAMPLERS, parse_sampler_letters, parse_samplers

__all__ = ["METADATA_PARAMS", "RANDOM_SEED", "SamplingParams", "parse_sampler_letters", "parse_samplers"]

LOGGER = logging.getLogger(__name__)

RANDOM_SEED = 0xFFFFFFFF   # as a request says "draw one for me"; -1 means the same

# GGUF key general.sampling.<key> -> parameter
METADATA_PARAMS = {
    "sequence": "samplers",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "temp": "temperature",
    "penalty_last_n": "repeat_last_n",
    "penalty_repeat": "repeat_penalty",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}

_DEFAULT_DRY_BASE = 1.75
_LEAST_REPEAT_PENALTY = 1.0 / FLOAT32_MAX   # its inverse is the largest float32


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling, checked at birth: a value out of range is limited or refused as llama-server does.

    Off values: top_k 0, top_p 1, min_p 0, top_n_sigma <= 0, typical_p 1, xtc_probability 0, penalties 1 / 0 / 0,
    repeat_last_n 0, dry_multiplier 0, mirostat 0, adaptive_target < 0, dynatemp_range 0; temperature 0 is greedy.
    ``samplers`` may be spelled as ``parse_samplers`` allows; unknown ones are logged and dropped. ``logit_bias`` pairs
    may repeat an id (the biases add); -inf bans a token. ``n_probs`` is for a server's requests; sampling does not read
    it. Raises SettingsError.
    """

    seed: int = RANDOM_SEED
    samplers: tuple[str, ...] | str = DEFAULT_SAMPLERS   # a string of letters becomes names at birth
    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    top_n_sigma: float = -1.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = _DEFAULT_DRY_BASE
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    min_keep: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    n_probs: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                value = _whole(field.name, value)
            elif field.type == "float":
                value = _number(field.name, value)
            elif field.type == "bool" and not isinstance(value, bool):
                raise SettingsError(f"{field.name} is {value!r}: give true or false")
            object.__setattr__(self, field.name, value)
        self._check_seed()
        for name in ("repeat_last_n", "dry_allowed_length", "dry_penalty_last_n", "min_keep", "n_probs"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name} is {getattr(self, name)}: give 0 or more")
        if not _LEAST_REPEAT_PENALTY <= self.repeat_penalty <= FLOAT32_MAX:
            raise SettingsError(f"repeat_penalty is {self.repeat_penalty:g}: give a number above 0 (1 is off)")
        if self.dynatemp_exponent < 0.0:
            raise SettingsError(f"dynatemp_exponent is {self.dynatemp_exponent:g}: give 0 or more (1 is the default)")
        for name, low, high in _CLAMPS:
            object.__setattr__(self, name, min(max(getattr(self, name), low), high))
        if self.dry_base < 1.0:
            object.__setattr__(self, "dry_base", _DEFAULT_DRY_BASE)
        if isinstance(self.samplers, str):   # letters, as --sampler-seq and the API take them
            object.__setattr__(self, "samplers", parse_sampler_letters(self.samplers))
        else:
            object.__setattr__(self, "samplers", parse_samplers(_texts("samplers", self.samplers)))
        breakers = _texts("dry_sequence_breakers", self.dry_sequence_breakers)
        object.__setattr__(self, "dry_sequence_breakers", breakers)
        object.__setattr__(self, "logit_bias", _check_bias(self.logit_bias))

    def _check_seed(self) -> None:
        if not -1 <= self.seed <= RANDOM_SEED:
            raise SettingsError(f"seed is {self.seed}: give 0 to {RANDOM_SEED - 1}, or -1 for a random one")
        object.__setattr__(self, "seed", self.seed & RANDOM_SEED)

    @classmethod
    def resolve(cls, metadata: Mapping[str, object], explicit: Mapping[str, Any]) -> SamplingParams:
        """Built-in defaults, then the model's ``general.sampling.*`` keys, then what the user set.

        metadata  GGUF key -> value; keys of other kinds are skipped. A value that cannot be used is logged and skipped.
        explicit  parameter name -> value, only what the user gave. Raises SettingsError for an unknown name.
        """
        unknown = sorted(set(explicit) - {field.name for field in fields(cls)})
        if unknown:
            raise SettingsError(f"unknown sampling parameter {unknown[0]!r}; known are {', '.join(cls.__slots__)}")
        params = cls()
        for key, name in METADATA_PARAMS.items():
            value: Any = metadata.get(f"general.sampling.{key}")
            if value is None or name in explicit:
                continue
            try:
                changes: dict[str, Any] = {name: parse_samplers(str(value)) if name == "samplers" else value}
                params = replace(params, **changes)
            except SettingsError as error:
                LOGGER.warning("the model's general.sampling.%s is left out: %s", key, error)
        return replace(params, **explicit)


_CLAMPS: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, math.inf),
    ("top_k", 0, math.inf),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("xtc_probability", 0.0, 1.0),
    ("xtc_threshold", 0.0, 1.0),
    ("mirostat", 0, 2),
    ("adaptive_target", -math.inf, 1.0),
    ("adaptive_decay", 0.0, 0.99),
)


def _whole(name: str, value: object) -> int:
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        return int(value)
    raise SettingsError(f"{name} is {value!r}: give a whole number")


def _number(name: str, value: object) -> float:
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:   # a whole number beyond float64
            number = math.inf
        if abs(number) <= FLOAT32_MAX:
            return number
    raise SettingsError(f"{name} is {value!r}: give a finite number within float32")


def _items(name: str, value: object, what: str) -> tuple[Any, ...]:
    if isinstance(value, tuple | list):
        return tuple(value)
    raise SettingsError(f"{name} is {value!r}: give a list of {what}")


def _texts(name: str, value: object) -> tuple[str, ...]:
    texts = _items(name, value, "strings")
    for text in texts:
        if not isinstance(text, str):
            raise SettingsError(f"{name} holds {text!r}: give strings only")
    return texts


def _check_bias(pairs: object) -> tuple[tuple[int, float], ...]:
    checked: list[tuple[int, float]] = []
    for pair in _items("logit_bias", pairs, "(token id, bias) pairs"):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise SettingsError(f"logit_bias holds {pair!r}: give (token id, bias) pairs")
        token, bias = pair
        amount = -math.inf if bias == -math.inf else _number(f"logit_bias of token {token}", bias)
        checked.append((_whole("a token of logit_bias", token), amount))
    return tuple(checked)
