"""What the speculative room receives: which drafters, their sizes, and the acceptance a benchmark pretends.

Each drafter's numbers are checked when that drafter is switched on: numbers of one that is off harm nothing, as in
llama-server, where ``--spec-draft-n-max 64`` beside ``--spec-type ngram-simple`` does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvs_core.errors import SettingsError

DraftSampling = Literal["greedy", "probabilistic"]

DRAFTERS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache", "draft-mtp", "draft-resident")
"""All types, in the order in which a round asks them."""

MODEL_DRAFTERS = ("draft-mtp", "draft-resident")
"""Types that run the model, bounded by ``--spec-draft-n-max``; the others look at tokens alone."""

_OF_PREFIX = {
    "spec_draft_": MODEL_DRAFTERS, "spec_ngram_simple_": ("ngram-simple",), "spec_ngram_map_k4v_": ("ngram-map-k4v",),
    "spec_ngram_map_k_": ("ngram-map-k",), "spec_ngram_mod_": ("ngram-mod",), "lookup_cache_": ("ngram-cache",),
}


def drafters_of(key: str) -> tuple[str, ...]:
    """The types that a setting of ``settings.speculative`` is for; none where it is for all or for no drafter."""
    return next((types for prefix, types in _OF_PREFIX.items() if key.startswith(prefix)), ())


MAX_VERIFY_ROWS = 65
MAX_MODEL_DRAFT = 7
NGRAM_CACHE_DRAFT = 8
"""Tokens that ngram-cache drafts at most; there is no flag for it."""


@dataclass(frozen=True, slots=True)
class NgramSimpleSettings:
    """size_n: tokens that have to match. size_m: tokens drafted at most."""

    size_n: int = 12
    size_m: int = 48


@dataclass(frozen=True, slots=True)
class NgramMapSettings:
    """ngram-map-k and ngram-map-k4v, sizes as in ngram-simple. min_hits: look-ups of a key before map-k4v drafts."""

    size_n: int = 12
    size_m: int = 48
    min_hits: int = 1


@dataclass(frozen=True, slots=True)
class NgramModSettings:
    """n_match: tokens that have to match. n_min, n_max: least and most tokens drafted."""

    n_match: int = 24
    n_min: int = 48
    n_max: int = 64


@dataclass(frozen=True, slots=True)
class NgramCacheSettings:
    """Files of counted followers, both only read; see ``speculative/lookup_file.py``."""

    static: Path | None = None
    dynamic: Path | None = None


@dataclass(frozen=True, slots=True)
class ModelDraftSettings:
    """draft-mtp and draft-resident.

    n_max     tokens drafted at most
    n_min     a shorter draft is thrown away
    p_min     drafting stops where the best guess is less probable than this
    sampling  greedy: the likeliest token; probabilistic: a drawn one, verified by rejection sampling
    """

    n_max: int = 3
    n_min: int = 0
    p_min: float = 0.0
    sampling: DraftSampling = "greedy"

    def check(self, name: str) -> None:
        """SettingsError if ``name`` cannot draft with these numbers."""
        if not 1 <= self.n_max <= MAX_MODEL_DRAFT:
            raise SettingsError(f"--spec-draft-n-max {self.n_max}: {name} drafts 1 to {MAX_MODEL_DRAFT} tokens; "
                                "use one of these, or leave that type out")
        if not 0 <= self.n_min <= self.n_max:
            raise SettingsError(f"--spec-draft-n-min {self.n_min} with --spec-draft-n-max {self.n_max}: no draft would "
                                f"be kept; use 0 to {self.n_max}")
        if not 0.0 <= self.p_min <= 1.0:
            raise SettingsError(f"--spec-draft-p-min {self.p_min:g}: use 0 to 1")
        if self.sampling not in ("greedy", "probabilistic"):
            raise SettingsError(f"--spec-draft-sampling {self.sampling}: use greedy or probabilistic")
        # Whether a second token falls below p_min depends on the first one drawn: throwing the draft away for it
        # would make some first tokens rarer than the target has them.
        if self.sampling == "probabilistic" and self.p_min > 0.0 and self.n_min > 1:
            raise SettingsError(f"--spec-draft-n-min {self.n_min} and --spec-draft-p-min {self.p_min:g} together would "
                                "change what probabilistic drafts generate; leave one out")


@dataclass(frozen=True, slots=True)
class SpeculativeSettings:
    """Drafters of a run, and how acceptance is pretended. Raises SettingsError.

    types        distinct, any order; held in the order of ``DRAFTERS``. Empty: no speculation
    adaptive     drafters that do not pay for themselves are paused; n-grams before a model's are watched first
    synth_len    benchmark: tokens that come out of a verification on average; the text is wrong
    synth_rates  instead: probability that each drafted position is accepted, one per token of the widest draft
    """

    types: tuple[str, ...] = ()
    ngram_simple: NgramSimpleSettings = NgramSimpleSettings()
    ngram_map_k: NgramMapSettings = NgramMapSettings()
    ngram_map_k4v: NgramMapSettings = NgramMapSettings()
    ngram_mod: NgramModSettings = NgramModSettings()
    ngram_cache: NgramCacheSettings = NgramCacheSettings()
    draft: ModelDraftSettings = ModelDraftSettings()
    adaptive: bool = True
    synth_len: float | None = None
    synth_rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in self.types:
            if name not in DRAFTERS:
                raise SettingsError(f"--spec-type {name}: not a drafter; use one of {', '.join(DRAFTERS)}")
        object.__setattr__(self, "types", tuple(name for name in DRAFTERS if name in self.types))
        for name in self.types:
            self._check_type(name)
        self._check_synthetic()

    @property
    def widest_draft(self) -> int:
        """Tokens of the longest draft that a round may verify; 0 without speculation."""
        return self.widest()[1] if self.types else 0

    @property
    def verify_rows(self) -> int:
        """Rows of the widest verification: the tail's and one per drafted token."""
        return 1 + self.widest_draft

    @property
    def is_synthetic(self) -> bool:
        """Acceptance is pretended: what is generated is no text."""
        return self.synth_len is not None or self.synth_rates is not None

    def widest(self) -> tuple[str, int]:
        """The flag that decides ``widest_draft``, and its tokens; only with speculation."""
        return max((self._drafted(name) for name in self.types), key=lambda pair: pair[1])

    def _drafted(self, name: str) -> tuple[str, int]:
        """The flag that bounds drafts of ``name``, and its tokens."""
        match name:
            case "ngram-simple":
                return "--spec-ngram-simple-size-m", self.ngram_simple.size_m
            case "ngram-map-k":
                return "--spec-ngram-map-k-size-m", self.ngram_map_k.size_m
            case "ngram-map-k4v":
                return "--spec-ngram-map-k4v-size-m", self.ngram_map_k4v.size_m
            case "ngram-mod":
                return "--spec-ngram-mod-n-max", self.ngram_mod.n_max
            case "ngram-cache":
                return "--spec-type ngram-cache", NGRAM_CACHE_DRAFT
        return "--spec-draft-n-max", self.draft.n_max

    def _matched(self, name: str) -> tuple[str, int]:
        """The flag that says how many tokens have to match for ``name``, and its tokens."""
        match name:
            case "ngram-simple":
                return "--spec-ngram-simple-size-n", self.ngram_simple.size_n
            case "ngram-map-k":
                return "--spec-ngram-map-k-size-n", self.ngram_map_k.size_n
            case "ngram-map-k4v":
                return "--spec-ngram-map-k4v-size-n", self.ngram_map_k4v.size_n
        return "--spec-ngram-mod-n-match", self.ngram_mod.n_match

    def _check_type(self, name: str) -> None:
        if name in MODEL_DRAFTERS:
            self.draft.check(name)
            return
        flag, drafted = self._drafted(name)
        if drafted < 1:
            raise SettingsError(f"{flag} {drafted}: {name} would draft nothing; use 1 to {MAX_VERIFY_ROWS - 1}, or "
                                "leave that type out")
        if drafted >= MAX_VERIFY_ROWS:
            raise SettingsError(f"{flag} {drafted}: verifying that takes {drafted + 1} rows, and at most "
                                f"{MAX_VERIFY_ROWS} run together; use 1 to {MAX_VERIFY_ROWS - 1}")
        flag, matched = self._matched(name)
        if name != "ngram-cache" and matched < 1:
            raise SettingsError(f"{flag} {matched}: nothing would have to match; use at least 1")
        if name == "ngram-mod" and self.ngram_mod.n_min < 0:
            raise SettingsError(f"--spec-ngram-mod-n-min {self.ngram_mod.n_min}: use at least 0")
        if name == "ngram-map-k4v" and self.ngram_map_k4v.min_hits < 1:
            raise SettingsError(f"--spec-ngram-map-k4v-min-hits {self.ngram_map_k4v.min_hits}: use at least 1")

    def _check_synthetic(self) -> None:
        length, rates = self.synth_len, self.synth_rates
        if length is None and rates is None:
            return
        if length is not None and rates is not None:
            raise SettingsError("--spec-synth-len and --spec-synth-rates exclude each other; give one of them")
        flag = "--spec-synth-len" if length is not None else "--spec-synth-rates"
        if not self.types:
            raise SettingsError(f"{flag} pretends that drafts are accepted, and nothing drafts; add --spec-type")
        bound, drafted = self.widest()
        if length is not None and not 1.0 <= length <= drafted + 1:
            raise SettingsError(f"--spec-synth-len {length:g}: {bound} allows {drafted} drafted tokens, so 1 to "
                                f"{drafted + 1} tokens come out of a step; use a number in that range")
        if rates is not None and (len(rates) != drafted or list(rates) != sorted(rates, reverse=True)
                                  or not all(0.0 <= rate <= 1.0 for rate in rates)):
            raise SettingsError(f"--spec-synth-rates: expected {drafted} rates from 0 to 1 that never rise, one per "
                                f"drafted token ({bound} {drafted}), got {len(rates)}; give that many")
