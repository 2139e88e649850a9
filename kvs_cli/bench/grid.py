"""What a sweep runs: contexts, variants of speculation and repeats, from the texts of its flags. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvs_core.errors import SettingsError
from kvs_core.settings.drafters import DRAFTERS, MAX_MODEL_DRAFT, MODEL_DRAFTERS, ModelDraftSettings
from kvs_core.settings.kinds import shown
from kvs_core.speculative.synthetic import rates_of_length

MOST_POINTS = 10_000
_LONGEST = 1 << 31
_LEAST_CONTEXT = 256


@dataclass(frozen=True, slots=True)
class Variant:
    """How text is drafted.

    types  drafters, in the order in which a round asks them; empty: none
    n_max  tokens that draft-mtp or draft-resident draft at most; 0 without them
    rates  pretended acceptance by position; empty: the true one
    """

    types: tuple[str, ...] = ()
    n_max: int = 0
    rates: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """For people: ``plain``, ``mtp 3``, ``ngram-mod + mtp 3``."""
        parts = [f"{name.removeprefix('draft-')} {self.n_max}" if name in MODEL_DRAFTERS else name
                 for name in self.types]
        return " + ".join(parts) or "plain"

    @property
    def spec_type(self) -> str:
        """As ``--spec-type`` takes it."""
        return ",".join(self.types) or "none"

    @property
    def synth_len(self) -> float | None:
        """Tokens that come out of a verification of the longest draft on average, where that is pretended."""
        return round(1.0 + sum(self.rates), 4) if self.rates else None

    @property
    def arguments(self) -> list[str]:
        """The flags of ``kvs run`` that make it so."""
        if not self.types:
            return []
        flags = ["--spec-type", self.spec_type]
        if self.n_max:
            flags += ["--spec-draft-n-max", str(self.n_max)]
        if self.rates:
            flags += ["--spec-synth-rates", ",".join(f"{rate:.6f}" for rate in self.rates)]
        return flags


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement. ``repeat`` counts from 1."""

    context_tokens: int
    variant: Variant
    repeat: int

    @property
    def name(self) -> str:
        """For file names."""
        return f"c{self.context_tokens}-{re.sub('[^a-z0-9]+', '-', self.variant.name)}-r{self.repeat}"


def parse_contexts(text: str) -> tuple[int, ...]:
    """``8192,16384`` or ``8192:262144:8192`` (first, last, step), or both mixed; ascending. Raises SettingsError."""
    found: set[int] = set()
    for part in text.split(","):
        numbers = [_whole(number, "--contexts") for number in part.split(":")]
        if len(numbers) not in (1, 3):
            raise SettingsError(f"--contexts {shown(part)}: give a number of tokens, or FIRST:LAST:STEP")
        first, last, step = numbers if len(numbers) == 3 else (numbers[0], numbers[0], 1)
        if not _LEAST_CONTEXT <= first <= last <= _LONGEST or step < 1:
            raise SettingsError(
                f"--contexts {part}: give FIRST from {_LEAST_CONTEXT} on, LAST not below it and a STEP of at least 1"
            )
        if (last - first) // step >= MOST_POINTS:
            raise SettingsError(
                f"--contexts {part}: {(last - first) // step + 1} contexts, at most {MOST_POINTS} are run; "
                "use a larger step"
            )
        found.update(range(first, last + 1, step))
    return tuple(sorted(found))


def parse_variants(mtp_lengths: str | None, spec_types: str | None, *, default_n_max: int) -> tuple[Variant, ...]:
    """Variants in the order given, none of them twice; plain decoding if nothing is.

    mtp_lengths    ``0,1,2,3``: tokens that draft-mtp drafts, 0: no drafting
    spec_types     ``none,draft-resident:5,ngram-mod+draft-mtp:3``: drafters joined by +, with the tokens of a draft
    default_n_max  of draft-mtp and draft-resident without a number
    Raises SettingsError.
    """
    made = []
    for part in mtp_lengths.split(",") if mtp_lengths is not None else ():
        length = _whole(part, "--mtp-lengths")
        if length > MAX_MODEL_DRAFT:
            raise SettingsError(f"--mtp-lengths {length}: draft-mtp drafts 1 to {MAX_MODEL_DRAFT} tokens, 0 is without")
        made.append(Variant(("draft-mtp",), length) if length else Variant())
    for part in spec_types.split(",") if spec_types is not None else ():
        made.append(_variant(part.strip(), default_n_max))
    return tuple(dict.fromkeys(made)) or (Variant(),)


def _variant(text: str, default_n_max: int) -> Variant:
    if text == "none":
        return Variant()
    lengths: dict[str, int] = {}
    for part in text.split("+"):
        name, colon, length = part.partition(":")
        if name not in DRAFTERS or (colon and name not in MODEL_DRAFTERS):
            raise SettingsError(
                f"--spec-types {shown(part)}: give none or drafters joined by +, of {', '.join(DRAFTERS)}; "
                f"{' and '.join(MODEL_DRAFTERS)} may have :N behind them"
            )
        n_max = _whole(length, f"--spec-types {name}") if colon else default_n_max
        if name in MODEL_DRAFTERS:
            ModelDraftSettings(n_max=n_max).check(name)
        lengths[name] = n_max if name in MODEL_DRAFTERS else 0
    drafted = {length for length in lengths.values() if length}
    if len(drafted) > 1:
        raise SettingsError(f"--spec-types {text}: both model drafters draft the same number of tokens; give one")
    return Variant(tuple(name for name in DRAFTERS if name in lengths), drafted.pop() if drafted else 0)


def pretend(variants: Sequence[Variant], lengths: str) -> tuple[Variant, ...]:
    """The variants with pretended acceptance (``--spec-synth-len``). Raises SettingsError.

    lengths  one number: what comes out of a verification of the longest draft among them; a shorter one accepts each
             of its positions as often. Several: one for each variant that drafts, in their order
    Variants with n-gram drafters cannot be pretended here: the lengths of their drafts are the text's.
    """
    drafting = [variant for variant in variants if variant.types]
    if not drafting:
        raise SettingsError("--spec-synth-len pretends that drafts are accepted, and no variant drafts; "
                            "add --mtp-lengths")
    ngram = [variant.name for variant in drafting if set(variant.types) - set(MODEL_DRAFTERS)]
    if ngram:
        raise SettingsError(f"--spec-synth-len: acceptance of {ngram[0]} is a matter of the text; sweep it without")
    numbers = [_decimal(part) for part in lengths.split(",")]
    longest = max(variant.n_max for variant in drafting)
    if len(numbers) == 1:
        _check_length(numbers[0], longest)
        all_rates = rates_of_length(numbers[0], longest)
        rates = {variant: all_rates[: variant.n_max] for variant in drafting}
    elif len(numbers) == len(drafting):
        for variant, number in zip(drafting, numbers, strict=True):
            _check_length(number, variant.n_max)
        rates = {variant: rates_of_length(number, variant.n_max)
                 for variant, number in zip(drafting, numbers, strict=True)}
    else:
        raise SettingsError(f"--spec-synth-len: {len(numbers)} numbers for {len(drafting)} variants that draft; "
                            "give one, or one for each")
    return tuple(replace(variant, rates=rates.get(variant, ())) for variant in variants)


def points(contexts: Sequence[int], variants: Sequence[Variant], repeats: int) -> list[Point]:
    """All of them; repeats come round by round, so that a slow change of the machine touches every variant alike."""
    count = len(contexts) * len(variants) * repeats
    if count > MOST_POINTS:
        raise SettingsError(f"{len(contexts)} contexts x {len(variants)} variants x {repeats} repeats are {count} "
                            f"points; at most {MOST_POINTS} are run")
    return [Point(context, variant, repeat)
            for repeat in range(1, repeats + 1) for context in contexts for variant in variants]


def _check_length(length: float, n_max: int) -> None:
    if not 1.0 <= length <= n_max + 1:
        raise SettingsError(f"--spec-synth-len {length:g}: 1 to {n_max + 1} tokens come out of a verification of "
                            f"{n_max} drafted ones; use a number in that range")


def _whole(text: str, flag: str) -> int:
    if not re.fullmatch(r"\s*[0-9]{1,10}\s*", text):
        raise SettingsError(f"{flag} {shown(text)}: expected a whole number of at most ten digits")
    return int(text)


def _decimal(text: str) -> float:
    if not re.fullmatch(r"\s*[0-9]{1,4}(\.[0-9]{1,9})?\s*", text):
        raise SettingsError(f"--spec-synth-len {shown(text)}: expected a number such as 2.5")
    return float(text)
