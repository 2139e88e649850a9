"""Names of samplers: what users may write, in flags, requests and GGUF metadata, and what each name stands for."""

from __future__ import annotations

import logging
from collections.abc import Iterable

LOGGER = logging.getLogger(__name__)

DEFAULT_SAMPLERS = (
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature",
)

SAMPLER_LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
    "i": "infill",
    "a": "adaptive_p",
}

SAMPLER_NAMES = tuple(SAMPLER_LETTERS.values())

_ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typical": "typ_p", "typicalp": "typ_p"}
_BY_SPELLING = {name.replace("_", ""): name for name in SAMPLER_NAMES} | _ALIASES


def parse_samplers(names: str | Iterable[str]) -> tuple[str, ...]:
    """Sampler names in order, from ``"penalties;top_k"`` or from a list of names.

    Case does not matter, and ``_`` may be ``-`` or absent. Unknown names are logged as a warning and dropped.
    """
    parts = names.split(";") if isinstance(names, str) else names
    known: list[str] = []
    for part in parts:
        spelling = part.strip().lower().replace("_", "").replace("-", "")
        if spelling in _BY_SPELLING:
            known.append(_BY_SPELLING[spelling])
        elif spelling:
            _warn_dropped(part)
    return tuple(known)


def parse_sampler_letters(letters: str) -> tuple[str, ...]:
    """Sampler names in order, from one letter each (``"edskypmxt"``). Unknown letters are logged and dropped."""
    known: list[str] = []
    for letter in letters:
        if letter.lower() in SAMPLER_LETTERS:
            known.append(SAMPLER_LETTERS[letter.lower()])
        else:
            _warn_dropped(letter)
    return tuple(known)


def _warn_dropped(name: str) -> None:
    known = ", ".join(f"{name} ({letter})" for letter, name in SAMPLER_LETTERS.items())
    LOGGER.warning("sampler %r is unknown and left out; known are %s", name, known)
