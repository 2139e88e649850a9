"""Rotary position embedding: from a file's keys and the user's overrides to one angle per pair.

Rotary embedding turns pair i of a head by ``position * inv_freq[i]``, ``inv_freq[i] = base ** (-2 i / n_rot)`` (Su et
al., RoFormer, 2021). To reach beyond the trained context

    linear  divides all angles by ``scale``
    yarn    divides the slow ones, keeps the fast ones, mixes those between, and lengthens q and k by 1 + 0.1 ln(scale)
            (Peng et al., YaRN, 2023)
    longrope  divides each by a number of its own, from one of two tensors of the file: for contexts up to the original
            one and for longer ones (Ding et al., LongRoPE, 2024)

Which key or flag wins, and their defaults, are llama.cpp's, with two differences: ``--yarn-attn-factor`` also counts
while YaRN is on, where llama.cpp reads it and lets it fall; and the keys ``rope.scaling.yarn_*``, which llama.cpp heeds
in a few archs alone, are the defaults of their flags in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from kvs_core.device.operands import RopeTable
from kvs_core.errors import CapabilityError, ModelFileError, SettingsError
from kvs_core.formats.gguf import GgufFile
from kvs_core.settings.rooms import MAX_ROPE_SCALE, RopeScaling, RopeSettings

SCALINGS = (*get_args(RopeScaling), "longrope")
DIVISORS = "rope_freqs.weight"
LONG_DIVISORS, SHORT_DIVISORS = "rope_factors_long.weight", "rope_factors_short.weight"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """What a model file says.

    n_rot         values of a head that are turned, in ``n_rot / 2`` pairs
    still_pairs   pairs that no position id of a text reaches: they do not turn
    scaling       one of ``SCALINGS``; ``scale`` is the factor by which the context grows
    orig_ctx      positions before it grew
    attn_factor   factor on cos and sin besides YaRN's own
    reach_tokens  the context that the scaling was made for; 0 where the file does not say
    yarn_*        as in ``RopeSettings``, for YaRN
    """

    n_rot: int
    interleaved: bool
    freq_base: float
    scaling: str
    scale: float
    orig_ctx: int
    attn_factor: float
    reach_tokens: int = 0
    yarn_ext_factor: float = 1.0
    yarn_attn_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    still_pairs: tuple[int, ...] = ()


def read_rope(file: GgufFile, arch: str, *, n_rot: int, n_ctx_train: int, interleaved: bool) -> RopeSpec:
    """The rotary keys of ``arch`` and their defaults; the caller has checked ``n_rot`` against the head size.

    Raises ModelFileError for values out of range, CapabilityError for a scaling without code here.
    """
    prefix = f"{arch}.rope"
    scaling = file.get_str(f"{prefix}.scaling.type", "linear")
    if scaling not in SCALINGS:
        raise CapabilityError(
            f"{file.path}: {prefix}.scaling.type is {scaling!r}; kvs has code for {', '.join(SCALINGS)}"
        )
    scale = file.get_f32(f"{prefix}.scaling.factor", None)
    if scale is None:
        scale = file.get_f32(f"{prefix}.scale_linear", 0.0)  # the key of old converters
    base = file.get_f32(f"{prefix}.freq_base", 10000.0)
    attn_factor = file.get_f32(f"{prefix}.scaling.attn_factor", 1.0)
    scale = scale or 1.0
    if base <= 1.0 or not 1.0 / MAX_ROPE_SCALE <= scale <= MAX_ROPE_SCALE or attn_factor <= 0.0:
        raise ModelFileError(
            f"{file.path}: rotary base {base:g} (must exceed 1), scale {scale:g} (must lie between "
            f"{1 / MAX_ROPE_SCALE:g} and {MAX_ROPE_SCALE:g}) or attn_factor {attn_factor:g} (must be positive) is out "
            "of range"
        )
    orig_ctx = file.get_u32(f"{prefix}.scaling.original_context_length", 0)
    spec = RopeSpec(
        n_rot=n_rot,
        interleaved=interleaved,
        freq_base=base,
        scaling=scaling,
        scale=scale,
        orig_ctx=orig_ctx or n_ctx_train,
        attn_factor=attn_factor,
        reach_tokens=0 if scaling == "none" else int(orig_ctx * scale),
        yarn_ext_factor=file.get_f32(f"{prefix}.scaling.yarn_ext_factor", 1.0),
        yarn_attn_factor=file.get_f32(f"{prefix}.scaling.yarn_attn_factor", 1.0),
        yarn_beta_fast=file.get_f32(f"{prefix}.scaling.yarn_beta_fast", 32.0),
        yarn_beta_slow=file.get_f32(f"{prefix}.scaling.yarn_beta_slow", 1.0),
    )
    if spec.yarn_ext_factor < 0.0 or spec.yarn_attn_factor <= 0.0 or not 0 < spec.yarn_beta_slow <= spec.yarn_beta_fast:
        raise ModelFileError(
            f"{file.path}: {prefix}.scaling.yarn_ext_factor {spec.yarn_ext_factor:g} (must not be negative), "
            f"yarn_attn_factor {spec.yarn_attn_factor:g} (must be positive), yarn_beta_slow {spec.yarn_beta_slow:g} or "
            f"yarn_beta_fast {spec.yarn_beta_fast:g} (0 < slow <= fast) is out of range"
        )
    return spec


def reach_tokens(spec: RopeSpec, overrides: RopeSettings) -> int:
    """The context that the file's scaling, or the user's, was made for; 0 where neither says."""
    if (overrides.scaling or spec.scaling) == "none":
        return 0
    scale = _given_scale(overrides)
    return spec.reach_tokens if scale is None else int((overrides.yarn_orig_ctx or spec.orig_ctx) * scale)


def divisors_name(spec: RopeSpec, context_tokens: int) -> str | None:
    """The tensor whose numbers divide the angles of a ``longrope`` model in a context of that many tokens.

    As in llama.cpp the file's original context counts, whatever ``--yarn-orig-ctx`` says.
    """
    if spec.scaling != "longrope":
        return None
    return LONG_DIVISORS if context_tokens > spec.orig_ctx else SHORT_DIVISORS


def _given_scale(overrides: RopeSettings) -> float | None:
    if overrides.scale:
        return overrides.scale
    return 1.0 / overrides.freq_scale if overrides.freq_scale else None


def rope_table(
    spec: RopeSpec, overrides: RopeSettings, divisors: npt.NDArray[Any] | None = None
) -> RopeTable:
    """Angles and magnitude.

    divisors  [n_rot / 2]: each pair's angle is divided by its own
    Raises SettingsError if the overrides leave no usable angles.
    """
    base = overrides.freq_base or spec.freq_base
    if base <= 1.0:
        raise SettingsError(f"--rope-freq-base {base:g}: give a number above 1")
    scaling = overrides.scaling or spec.scaling
    scale = _given_scale(overrides) or spec.scale
    if scaling == "none":
        scale = 1.0

    plain = base ** (-np.arange(0, spec.n_rot, 2, dtype=np.float64) / spec.n_rot)
    if divisors is not None:
        plain = plain / divisors.astype(np.float64)
    plain[list(spec.still_pairs)] = 0.0

    # How far YaRN replaces the plain division; a value without --rope-scaling yarn switches it on, as in llama.cpp.
    mix = _unless_negative(overrides.yarn_ext_factor, spec.yarn_ext_factor if scaling == "yarn" else 0.0)
    own = spec.yarn_attn_factor if scaling == "yarn" else 1.0
    magnitude = spec.attn_factor * _unless_negative(overrides.yarn_attn_factor, own)
    if mix == 0.0:
        return RopeTable(plain / scale, spec.interleaved, magnitude)
    kept = mix * _kept_share(
        spec.n_rot,
        base,
        overrides.yarn_orig_ctx or spec.orig_ctx,
        _unless_negative(overrides.yarn_beta_fast, spec.yarn_beta_fast),
        _unless_negative(overrides.yarn_beta_slow, spec.yarn_beta_slow),
    )
    if scale > 1.0:
        magnitude *= 1.0 + 0.1 * log(scale)
    return RopeTable(plain / scale * (1.0 - kept) + plain * kept, spec.interleaved, magnitude)


@dataclass(frozen=True, slots=True)
class Ropes:
    """The embeddings of a model's layers: of those that see everything, and of those that see a window."""

    full: RopeTable
    sliding: RopeTable

    @staticmethod
    def of(
        full: RopeSpec, sliding: RopeSpec | None, overrides: RopeSettings, divisors: npt.NDArray[Any] | None = None
    ) -> Ropes:
        """What ``rope_table`` makes of the file and the overrides. Layers with positions of their own keep them.

        As in llama.cpp only a factor on cos and sin is for all layers.
        """
        table = rope_table(full, overrides, divisors)
        if sliding is None:
            return Ropes(table, table)
        return Ropes(table, rope_table(sliding, RopeSettings(yarn_attn_factor=overrides.yarn_attn_factor)))


def _kept_share(n_rot: int, base: float, orig_ctx: int, beta_fast: float, beta_slow: float) -> npt.NDArray[np.float64]:
    """[n_rot / 2]: 1 where a pair keeps its angle, 0 where it is divided, a ramp between (Peng et al., section 3.2).

    The ramp runs over pairs: from the one that turns ``beta_fast`` times within ``orig_ctx`` to the one that turns
    ``beta_slow`` times.
    """
    if not 0.0 < beta_slow <= beta_fast:
        raise SettingsError(
            f"--yarn-beta-slow {beta_slow:g} and --yarn-beta-fast {beta_fast:g}: give 0 < slow <= fast"
        )

    def pair_turning(times: float) -> float:
        return n_rot * log(orig_ctx / (times * 2.0 * pi)) / (2.0 * log(base))

    first = max(0.0, floor(pair_turning(beta_fast)))
    last = min(n_rot - 1.0, ceil(pair_turning(beta_slow)))
    pairs = np.arange(n_rot // 2, dtype=np.float64)
    return 1.0 - np.clip((pairs - first) / max(0.001, last - first), 0.0, 1.0)


def _unless_negative(value: float | None, default: float) -> float:
    return default if value is None or value < 0.0 else value
