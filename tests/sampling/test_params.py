"""SamplingParams: limits at birth, and who wins among defaults, model and user."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest

from kvs_core.errors import SettingsError
from kvs_core.sampling.params import RANDOM_SEED, SamplingParams


def test_defaults_are_llama_servers() -> None:
    """An empty request samples as llama-server does."""
    p = SamplingParams()
    assert (p.temperature, p.top_k, p.top_p, p.min_p, p.typical_p, p.top_n_sigma) == (0.8, 40, 0.95, 0.05, 1.0, -1.0)
    assert (p.repeat_last_n, p.repeat_penalty, p.presence_penalty, p.frequency_penalty) == (64, 1.0, 0.0, 0.0)
    assert (p.dry_multiplier, p.dry_base, p.dry_allowed_length, p.dry_penalty_last_n) == (0.0, 1.75, 2, 64)
    assert (p.mirostat, p.mirostat_tau, p.mirostat_eta, p.adaptive_target, p.adaptive_decay) == (0, 5.0, 0.1, -1.0, 0.9)
    assert (p.xtc_probability, p.xtc_threshold, p.min_keep, p.seed, p.n_probs) == (0.0, 0.1, 0, RANDOM_SEED, 0)
    assert p.dry_sequence_breakers == ("\n", ":", '"', "*")


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("temperature", -1.0, 0.0),
        ("temperature", 3, 3.0),
        ("top_k", -1, 0),
        ("top_p", 1.5, 1.0),
        ("top_p", -0.5, 0.0),
        ("min_p", 7.0, 1.0),
        ("xtc_probability", 2.0, 1.0),
        ("xtc_threshold", -1.0, 0.0),
        ("mirostat", 5, 2),
        ("mirostat", -3, 0),
        ("adaptive_decay", 1.0, 0.99),
        ("adaptive_target", 1.5, 1.0),
        ("dry_base", 0.5, 1.75),
        ("seed", -1, RANDOM_SEED),
        ("top_k", np.int32(7), 7),
        ("top_p", np.float32(0.5), 0.5),
        ("samplers", ["Top-K", "tail_free", "temp"], ("top_k", "temperature")),
        ("samplers", "tzk", ("temperature", "top_k")),
        ("logit_bias", [[5, -math.inf], (5, 2)], ((5, -math.inf), (5, 2.0))),
    ],
)
def test_values_that_are_limited(name: str, given: Any, kept: Any) -> None:
    """What llama-server limits silently is limited, and numbers of other libraries become plain ones."""
    value = getattr(SamplingParams(**{name: given}), name)
    assert value == kept
    assert type(value) is type(kept)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("repeat_last_n", -1),
        ("repeat_penalty", 0.0),
        ("repeat_penalty", -1.0),
        ("repeat_penalty", 1e-44),
        ("dry_allowed_length", -1),
        ("dry_penalty_last_n", -1),
        ("min_keep", -2),
        ("n_probs", -1),
        ("dynatemp_exponent", -1.0),
        ("seed", -2),
        ("seed", 1 << 32),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("frequency_penalty", math.inf),
        ("presence_penalty", 1e39),
        ("mirostat_tau", 10**400),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_k", None),
        ("top_p", "0.9"),
        ("ignore_eos", 1),
        ("samplers", 3),
        ("samplers", (1,)),
        ("dry_sequence_breakers", "\n"),
        ("dry_sequence_breakers", (1,)),
        ("logit_bias", ((5, math.inf),)),
        ("logit_bias", ((5, math.nan),)),
        ("logit_bias", (("a", 1.0),)),
        ("logit_bias", ((5,),)),
        ("logit_bias", 5),
    ],
)
def test_values_that_are_refused(name: str, given: Any) -> None:
    """What cannot be used is refused in one line that names the parameter."""
    with pytest.raises(SettingsError) as caught:
        SamplingParams(**{name: given})
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


def test_resolve_lets_the_user_win_over_the_model_over_the_defaults() -> None:
    """GGUF keys replace defaults, explicit values replace both, other keys mean nothing."""
    metadata = {
        "general.sampling.temp": np.float32(0.5),
        "general.sampling.top_k": np.int32(20),
        "general.sampling.penalty_last_n": 32,
        "general.sampling.penalty_repeat": 1.5,
        "general.sampling.sequence": "top_k;temp;nonsense",
        "general.sampling.mirostat": 0,
        "general.name": "x",
    }
    p = SamplingParams.resolve(metadata, {"top_k": 5, "seed": 3})
    assert (p.temperature, p.top_k, p.repeat_last_n, p.repeat_penalty, p.seed) == (0.5, 5, 32, 1.5, 3)
    assert p.samplers == ("top_k", "temperature")
    assert p.top_p == 0.95
    assert SamplingParams.resolve(metadata, {"samplers": ("xtc",)}).samplers == ("xtc",)


def test_resolve_skips_what_a_model_says_wrongly(caplog: pytest.LogCaptureFixture) -> None:
    """A model's unusable value costs a warning, not the run; a user's is an error."""
    with caplog.at_level(logging.WARNING):
        p = SamplingParams.resolve({"general.sampling.penalty_last_n": -1, "general.sampling.top_p": "x"}, {})
    assert p == SamplingParams()
    assert len(caplog.messages) == 2
    with pytest.raises(SettingsError, match="repeat_last_n is -1"):
        SamplingParams.resolve({}, {"repeat_last_n": -1})
    with pytest.raises(SettingsError, match="'tempreature'"):
        SamplingParams.resolve({}, {"tempreature": 1.0})
